"""Does the loader keep up? The same in sentences: verdicts for a summary, notes for below a table, and doubts."""

from collections.abc import Iterable, Sequence

from harness.feeding import CLOSE, Feed, Scale, batchings, feeds, scales, storage_bound
from harness.labels import USUAL, Names, axis_words, clean, count, number, percent, ratio, short_names
from harness.record import Record
from harness.views import metric

# Sentences of a summary; the others stand below the table.
MOST_VERDICTS = 3

# A lone worker that takes so many times what a batch costs to make loses it by handing over, or by its core.
SLOW_HAND = 1.25

# What is listed in one line.
MOST_LISTED = 12


def verdicts(record: Record) -> list[tuple[str, bool]]:
    """What a summary says, and whether to doubt it: whether the loader keeps up, and from how many workers on, for the
    first few sets of cases alike but for their workers; and what stayed unpinned."""
    found = feeds(record)
    return [
        *((text, False) for text in _sentences(found)[:MOST_VERDICTS]),
        *((text, True) for text in _unpinned(found)),
    ]


def notes(record: Record) -> list[str]:
    """What a table of these cases leaves unsaid: the rest of the verdicts, what storage must give, how long the start
    takes, memory, and what padding wastes."""
    found = feeds(record)
    names = short_names([feed.case for feed in found])
    made = [
        *_sentences(found)[MOST_VERDICTS:],
        *_rates(found),
        _starts(found, names),
        _memory(found),
        *(_batching(alike) for alike in batchings(found)),
        _utilisation(found),
        _cores(record, found),
    ]
    return [text for text in made if text]


def doubts(record: Record) -> list[tuple[str, bool]]:
    """What a reader should know before believing these numbers."""
    found = feeds(record)
    names = short_names([feed.case for feed in found])
    made = []
    if shared := _cores(record, found):
        made.append((shared, record.machine.device == "cpu"))
    unclear = [feed for feed in found if feed.verdict == "unclear"]
    if unclear:
        made.append((f"too noisy to tell input-bound from not: {_named(unclear, names)}", False))
    fast = [feed for feed in found if _too_fast(feed)]
    if fast:
        text = (
            "a real step is faster than the loader alone or the cached step, as with batches made before it"
        )
        made.append((f"{text}: {_named(fast, names)}", True))
    return made


def _too_fast(feed: Feed) -> bool:
    over = metric(feed.case, "bound_ratio")
    return over is not None and over.high is not None and over.high < 1 - CLOSE


def _unpinned(found: Sequence[Feed]) -> list[str]:
    names = short_names([feed.case for feed in found])
    alike: dict[tuple[str, ...], list[Feed]] = {}
    for feed in found:
        if feed.unpinned:
            alike.setdefault(feed.unpinned, []).append(feed)
    return [
        "pinned memory was asked for, and stayed pageable, so that its copies do not overlap: "
        f"{', '.join(map(clean, words[:MOST_LISTED]))} ({_named(cases, names)})"
        for words, cases in alike.items()
    ]


def _sentences(found: Sequence[Feed]) -> list[str]:
    """One for each set of cases; those of several numbers of workers first."""
    sets = sorted(scales(found), key=lambda scale: len(scale.feeds) == 1)
    return [
        _of_scale(scale, found) if len(scale.feeds) > 1 else _of_case(scale.feeds[0], found) for scale in sets
    ]


def _of_scale(scale: Scale, found: Iterable[Feed]) -> str:
    """The knee beside the formula's, and how far off it is below."""
    knee, needed, best, late = scale.knee, scale.needed, scale.best, scale.late
    before = [feed for feed in late if knee is None or feed.workers < knee]
    if knee is None and not late:
        text = "too noisy to tell input-bound from not"
    elif knee is None:
        text = f"input-bound with {_listed(scale.workers)} workers"
        if best.workers == scale.workers[-1] and scale.grows:
            text += f", so more than {best.workers} are needed ({_off(best)} with {best.workers})"
        else:
            text += f", and more are no help: best with {best.workers} ({_off(best)})"
    else:
        at = _at(scale, knee)
        if before:
            text = f"input-bound with {_workers(before[-1])} ({_off(before[-1])}), "
            text += f"not with {knee}" if scale.again else f"not from {knee} on"
        else:
            text = f"not input-bound with {_workers(at)}{'' if scale.again else ' or more'}"
        text += f" ({_off(at)})"
        if scale.again:
            slower = ": more workers are slower" if scale.again[-1] == scale.workers[-1] else " all the same"
            text += f"; input-bound with {_listed(scale.again)}{slower}"
    if scale.unclear and (knee is not None or late):
        text += f"; too noisy to tell with {_listed(scale.unclear)}"
    if needed is not None:
        cost = f"{number(scale.worker_ms)} ms of a worker for a batch, {number(scale.cached_ms)} ms a step"
        text += f"; theory: {_needed(scale, needed)} within {percent(CLOSE)} ({cost}{_lone(scale)})"
    if any(storage_bound(feed, found) for feed in late):
        text += f"; {_storage(late[-1])}"
    return f"feed {case_name(best, 'workers')}: {text}{_label(scale.feeds)}"


def _needed(scale: Scale, needed: int) -> str:
    """With what it would be by the fastest and the slowest case, where they were measured at other speeds of a core."""
    least, most = scale.needed_between or (needed, needed)
    return str(needed) if least == most else f"{needed} ({least} to {most} from case to case)"


def _lone(scale: Scale) -> str:
    """Where a single worker brings batches more slowly than it makes them, theory asks for too few."""
    if scale.worker_ms is None or scale.lone_ms is None or scale.lone_ms <= SLOW_HAND * scale.worker_ms:
        return ""
    return f"; a lone worker brings one in {number(scale.lone_ms)}, handing over and shared cores included"


def _workers(feed: Feed) -> str:
    return count(feed.workers, "worker") if feed.workers else "no worker"


def _off(feed: Feed) -> str:
    """How far a real step is from the cached one, and whether it waits."""
    text = f"a real step takes {ratio(feed.over.value)}x the cached one"
    if feed.verdict == "slowed":
        text += f" by {_slows(feed)}"
    elif feed.verdict == "input-bound" and feed.bursts:
        text += ", in bursts, so told by means"
    return text


def _slows(feed: Feed) -> str:
    """What may slow a step whose batch is there."""
    return "the copy, or cores shared with workers" if feed.workers else "the copy, or batches made beside it"


def _at(scale: Scale, workers: int) -> Feed:
    return next(feed for feed in scale.feeds if feed.workers == workers)


def _of_case(feed: Feed, found: Iterable[Feed]) -> str:
    steps = f"{number(feed.real_ms)} ms, the cached one {number(feed.cached_ms)}"
    over = f"a real step takes {ratio(feed.over.value)}x the cached one ({steps})"
    if feed.verdict == "unclear":
        between = f"{ratio(feed.over.low)} to {ratio(feed.over.high)}"
        text = f"too noisy to tell: {over}, anything from {between}{_blocked(feed)}"
    elif feed.verdict == "slowed":
        waits = f", of which the device waits {number(feed.gap_ms)} ms for its batch" if feed.gap_ms else ""
        text = f"not input-bound, and yet {over}{waits}: {_slows(feed)}"
    elif feed.verdict == "input-bound":
        text = f"input-bound: {over}{_waiting(feed)}{_blocked(feed)}"
        if storage_bound(feed, found):
            text += f"; {_storage(feed)}"
    elif feed.verdict == "balanced":
        text = f"balanced: {over}, and the loader alone is as slow or slower ({number(feed.loader_ms)} ms)"
    else:
        text = f"not input-bound: {over}; the loader could feed {ratio(1 + feed.headroom)}x as many"
    return f"feed {case_name(feed)}: {text}{_label([feed])}"


def _waiting(feed: Feed) -> str:
    if feed.gap_ms is None:
        return ""
    rest = (feed.excess_ms - feed.gap_ms) / feed.cached_ms
    text = f"; {number(feed.gap_ms)} ms of it the device waits"
    if rest < -CLOSE:
        text += f", and computes {percent(-rest)} faster for the rest it has"
    return text


def _blocked(feed: Feed) -> str:
    """Bursts, which a median would hide."""
    if not feed.bursts:
        return ""
    longest = f" (the longest wait {number(feed.next_max_ms)} ms)" if feed.next_max_ms else ""
    return f", in bursts{longest}, so told by means"


def _storage(feed: Feed) -> str:
    """The rate that storage must give, where it is what the step waits for."""
    part = (
        f": a worker spends {percent(feed.read_part)} of its time on getting bytes" if feed.read_part else ""
    )
    return f"storage-bound{part}{_rate(feed, ', and it needs')}" + (
        f", reached {_mb(feed.reached_rate)}" if feed.reached_rate else ""
    )


def _rate(feed: Feed, verb: str) -> str:
    if feed.needed_rate is None:
        return ""
    text, samples = f"{verb} {_mb(feed.needed_rate)} to keep up", feed.facts.get("samples")
    if samples:
        each = feed.facts["stored_bytes"] / samples / 1e3
        text += f" ({number(samples / feed.cached_ms * 1e3)} samples/s of {number(each)} kB)"
    return text


def _mb(rate: float) -> str:
    return f"{number(rate / 1e6)} MB/s"


def _rates(found: Sequence[Feed]) -> list[str]:
    """What storage must give, for all cases alike in what a sample takes of it: the most that one of them asks for."""
    alike: dict[tuple[object, ...], list[Feed]] = {}
    for feed in found:
        if feed.needed_rate is not None and feed.facts.get("samples"):
            each = round(feed.facts["stored_bytes"] / feed.facts["samples"])
            alike.setdefault((feed.case.params.get("data"), each), []).append(feed)
    made = []
    for (data, _), cases in alike.items():
        most = max(cases, key=lambda feed: feed.needed_rate or 0.0)
        sources = dict.fromkeys(clean(feed.case.params.get("source")) for feed in cases)
        verb = "storage must give up to" if len(cases) > 1 else "storage must give"
        made.append(f"{clean(data)} from {', '.join(sources)}: {_rate(most, verb)}")
    return made


def _starts(found: Sequence[Feed], names: Names) -> str:
    """The first batch and the next epoch's, of the most workers of each set."""
    told = []
    for scale in scales(found):
        feed = scale.feeds[-1]
        first, second = feed.facts.get("first_batch_ms"), feed.facts.get("second_epoch_ms")
        if first is not None and second is not None:
            told.append(f"{number(first / 1e3)} and {number(second / 1e3)} ({names[feed.case.key]})")
    return f"s to the first batch, and to the next epoch's: {_some(told)}" if told else ""


def _memory(found: Sequence[Feed]) -> str:
    taken = [feed.facts["worker_bytes"] for feed in found if feed.workers and "worker_bytes" in feed.facts]
    if not taken:
        return ""
    least, most = (f"{number(size / 1e6)}" for size in (min(taken), max(taken)))
    return f"host memory of a worker, beyond what it shares: {least if least == most else f'{least} to {most}'} MB"


def _batching(alike: Sequence[Feed]) -> str:
    """Wasted tokens are counted, not estimated; a batch need not hold the same tokens, so time is of a token too."""
    told = []
    for feed in alike:
        each = feed.per_token(feed.real_ms)
        told.append(
            f"{clean(feed.case.params.get('batching'))} {percent(feed.wasted or 0.0, places=1)} "
            f"({number(feed.real_ms)} ms a real step, {number(feed.cached_ms)} cached, {number(each)} us a real token)"
        )
    return f"tokens wasted: {', '.join(told)}"


def _cores(record: Record, found: Sequence[Feed]) -> str:
    cores, most = record.machine.cpu.get("usable_cores"), max((feed.workers for feed in found), default=0)
    if not isinstance(cores, int) or most < cores:
        return ""
    shared = f"{count(most, 'worker')} share {count(cores, 'core')} with the process that computes"
    return f"{shared}: they take each other's time"


def _utilisation(found: Sequence[Feed]) -> str:
    """NVML calls a GPU busy that has any kernel at all in a reading."""
    bound = [
        feed for feed in found if feed.verdict == "input-bound" and feed.busy is not None and feed.gap_ms
    ]
    if not bound:
        return ""
    worst = max(bound, key=lambda feed: feed.over.value)
    idle = (worst.gap_ms or 0.0) / worst.real_ms
    return (
        f"NVML's utilisation where most input-bound ({count(worst.workers, 'worker')}): {percent(worst.busy or 0.0)} "
        f"over all arms, while the device is idle for {percent(idle)} of a real step"
    )


def case_name(feed: Feed, *but: str) -> str:
    """The case by all its axes that are not as usual."""
    params = feed.case.params.items()
    words = {axis: axis_words("feed", axis, given) for axis, given in params if axis not in (*but, "profile")}
    return " ".join(text for axis, text in words.items() if text != USUAL.get(axis))


def _named(cases: Sequence[Feed], names: Names) -> str:
    return _some([names[feed.case.key] for feed in cases], 3)


def _some(texts: Sequence[str], most: int = MOST_LISTED) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def _listed(numbers: Iterable[int]) -> str:
    *head, last = [str(each) for each in numbers]
    return f"{', '.join(head)} and {last}" if head else last


def _label(cases: Iterable[Feed]) -> str:
    statuses = dict.fromkeys(feed.case.status for feed in cases if feed.case.status != "ok")
    return f" ({', '.join(statuses)})" if statuses else ""
