"""What a record shows, in sentences: the verdict on overlap, the chunk count to use, and what to doubt."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness import exposure, feeding_words, together, validity
from harness.labels import clean, count, number, percent, ratio, reason, short_names
from harness.record import STATUSES, CaseResult, Ceiling, Control, Metric, Record
from harness.views import MEMORIES, Curve, Grid, chunk_curves, metric, overlap_grid, value

# A cell that hides less than this counts as hiding nothing (the 2x2 table's own limit for one stream).
HIDES_NOTHING = 0.15

# The piece model has no fitted constant; a well-kept pipeline is this close to it.
PIECE_BAND = 0.03

# Chunk counts this close to the best one are as good in practice.
AS_GOOD = 0.02

# A hidden share known no better than this is given with its interval.
WIDE = 0.1

# One known no better than this is not known.
UNKNOWN = 0.5

SUMMARY_LINES = 9
CASES_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One sentence; `doubt` marks those that say what not to believe or what went wrong."""

    text: str
    doubt: bool = False


def identity(record: Record) -> str:
    """On what, of what and when: the first line of a summary."""
    run, machine = record.run, record.machine
    device = clean(machine.gpu.get("name", "")) or "no GPU"
    commit = (
        "no commit" if run.commit == "none" else f"commit {run.commit[:8]}{'+dirty' if run.dirty else ''}"
    )
    profiles = sorted({clean(case.params["profile"]) for case in record.cases if "profile" in case.params})
    parts = (
        f"{clean(machine.name)} ({device}, {clean(machine.device)} backend)",
        f"profile {', '.join(profiles)}" if profiles else "",
        commit,
        clean(run.time),
        f"{clean(run.tier)} tier" if run.tier else "",
        f"{run.launches} launch{'' if run.launches == 1 else 'es'}",
        f"{number(run.seconds)} s" if run.seconds else "",
    )
    return ", ".join(filter(None, parts))


def verdicts(record: Record) -> list[Finding]:
    """What the 2x2 table, the collectives and the loaders say; empty where none of their cases was measured."""
    grid, found = overlap_grid(record), []
    if grid is not None and any(grid.measured(*place) for place in grid.cells):
        found = [*_side_stream(grid), *_same_stream(grid)]
    told = [*together.verdicts(record), *exposure.verdicts(record), *feeding_words.verdicts(record)]
    return found + [Finding(text, doubt) for text, doubt in told]


def _side_stream(grid: Grid) -> list[Finding]:
    where = f"({grid.where})"
    found = []
    pinned, pageable = grid.measured("pinned", "side"), grid.measured("pageable", "side")
    if pinned is not None:
        text = f"pinned + side stream {_hides(pinned)} {where}{_over_bound(pinned)}"
        poor = (value(pinned, "hidden_fraction") or 0.0) < HIDES_NOTHING
        found.append(Finding(text + _label(pinned), poor))
    if pageable is not None:
        text = f"pageable + side stream {_hides(pageable)}"
        price = grid.price("pageable", "side")
        if price is not None:
            text += f", but takes {ratio(price)}x as long as pinned + side"
        else:
            text += f" {where}{_over_bound(pageable)}"
        blocked, total = value(pageable, "host_blocked_ms"), value(pageable, "overlapped_ms")
        if blocked is not None and total is not None and blocked > total / 2:
            text += f" and blocks the host for {number(blocked)} of {number(total)} ms"
        found.append(Finding(text + _label(pageable)))
    return found


def _over_bound(case: CaseResult) -> str:
    over = value(case, "bound_ratio")
    return "" if over is None else f", at {ratio(over)}x its bound"


def _hides(case: CaseResult) -> str:
    """The hidden fraction as a verb phrase; 0.15 is where hiding starts, below 0 the overlap cost time."""
    hidden = metric(case, "hidden_fraction")
    if hidden is None:
        return "has no hidden fraction"
    if _width(hidden) > UNKNOWN:
        return f"is too noisy to tell: hidden share {_share(hidden)}"
    if hidden.value >= HIDES_NOTHING:
        return f"hides {_share(hidden)} of the shorter leg"
    if hidden.value >= 0 or (hidden.high is not None and hidden.high >= 0):
        return f"hides next to nothing ({percent(hidden.value, places=1)} of the shorter leg)"
    return f"hides nothing and adds {percent(-hidden.value)} of the shorter leg to both legs in sequence"


def _width(hidden: Metric) -> float:
    return 0.0 if hidden.low is None or hidden.high is None else hidden.high - hidden.low


def _share(hidden: Metric, places: int = 0) -> str:
    """The share, with its interval where the share alone would promise too much."""
    text = percent(hidden.value, places=places)
    if hidden.low is None or hidden.high is None or _width(hidden) <= WIDE:
        return text
    return f"{text} ({percent(hidden.low)} to {percent(hidden.high)})"


def _same_stream(grid: Grid) -> list[Finding]:
    cells = {memory: grid.measured(memory, "default") for memory in MEMORIES}
    hidden = {memory: metric(case, "hidden_fraction") for memory, case in cells.items() if case is not None}
    shares = {memory: found for memory, found in hidden.items() if found is not None}
    if not shares:
        return []
    listed = ", ".join(f"{memory} {_share(found, places=1)}" for memory, found in shares.items())
    if any(found.value > HIDES_NOTHING and (found.low is None or found.low > 0) for found in shares.values()):
        text = "one stream cannot overlap with itself, yet seems to hide"
        return [Finding(f"{text} {listed}: doubt this run", True)]
    if any(_width(found) > UNKNOWN for found in shares.values()):
        return [Finding(f"the same stream is too noisy to tell: hidden share {listed}")]
    return [Finding(f"the same stream hides nothing, as it must: {listed}")]


def _label(case: CaseResult) -> str:
    return "" if case.status == "ok" else f" ({case.status})"


def chunk_advice(curve: Curve) -> Finding | None:
    """The chunk count to use, the theory's beside it, and which others are as good."""
    best = curve.case(curve.recommended)
    least = None if best is None else value(best, "overlapped_ms")
    if best is None or least is None:
        return None
    theory = f"theory's n* {number(curve.n_star)}"
    if curve.n_star is None:
        theory = "no n* from theory: the curve has no fit"
    elif math.isinf(curve.n_star):
        theory = "theory sets no limit: a chunk was fitted to cost nothing"
    times = curve.values("overlapped_ms")
    alike = [n for n, ms in times.items() if ms <= least * (1 + AS_GOOD) and n != curve.recommended]
    text = (
        f"use {curve.recommended} chunks ({theory}): "
        f"{number(least)} ms, {ratio(value(best, 'bound_ratio'))}x the bound"
    )
    if curve.recommended == max(curve.chunks):
        text += "; no larger count was measured"
    if alike:
        text += f"; {_listed(alike)} within {percent(AS_GOOD)} of it"
    return Finding(text + _label(best))


def model_check(curve: Curve) -> Finding | None:
    """How far the curve is from the piece model at its worst; a loss beyond the band is unexplained.

    A point is beyond the band only with its whole interval.
    """
    pairs = ((n, metric(case, "model_ratio")) for n, case in zip(curve.chunks, curve.cases, strict=True))
    ratios = {n: found for n, found in pairs if found is not None}
    if not ratios:
        return None
    above = [n for n, found in ratios.items() if _low(found) > 1 + PIECE_BAND]
    below = [n for n, found in ratios.items() if _high(found) < 1 - PIECE_BAND]
    worst = max(ratios, key=lambda n: abs(ratios[n].value - 1))
    text = f"at most {percent(abs(ratios[worst].value - 1), places=1)} from the piece model (n={worst})"
    if above:
        text += f"; unexplained loss of more than {percent(PIECE_BAND)} at n={_listed(above)}"
    if below:
        text += f"; faster than the model allows at n={_listed(below)}: doubt the solo arms"
    return Finding(text, bool(below))


def _low(found: Metric) -> float:
    return found.value if found.low is None else found.low


def _high(found: Metric) -> float:
    return found.value if found.high is None else found.high


def _listed(numbers: Iterable[int]) -> str:
    *head, last = [str(n) for n in numbers]
    return f"{', '.join(head)} and {last}" if head else last


def controls(record: Record) -> Finding:
    """How many controls passed, and each that did not with what it gave and what it should."""
    if not record.controls and "--no-controls" in record.run.command:
        return Finding("controls: left out, as asked for, so nothing vouches for these numbers", True)
    if not record.controls and record.machine.device == "cpu" and exposure.alone_measured(record):
        text = "controls: those of streams say nothing of ranks on a cpu; every case's serial arm is its own"
        return Finding(text)
    if not record.controls:
        return Finding("controls: none were run, so nothing vouches for these numbers", True)
    failed = [control for control in record.controls if not control.passed]
    text = f"controls: {len(record.controls) - len(failed)} of {len(record.controls)} passed"
    if failed:
        text += "; failed: " + "; ".join(
            f"{clean(control.name)} {control_value(control)} (launch {control.launch})" for control in failed
        )
    return Finding(text, bool(failed))


def control_value(control: Control) -> str:
    """What a control gave and what it accepts: `0.9 ratio, want 0.95 to 1.05`."""
    got = "no value" if control.value is None else f"{ratio(control.value)} {clean(control.unit)}"
    return f"{got.strip()}, want {ratio(control.low)} to {ratio(control.high)}"


def ceilings(record: Record) -> Finding | None:
    """What the device reaches alone, a median over launches; None where it was not measured."""
    found: dict[str, list[Ceiling]] = {}
    for ceiling in record.ceilings:
        found.setdefault(clean(ceiling.name), []).append(ceiling)
    parts = []
    for name, alike in found.items():
        rates = [ceiling.value for ceiling in alike if ceiling.value is not None]
        unit = clean(alike[0].unit)
        parts.append(
            f"{name} {number(statistics.median(rates))} {unit}"
            if rates
            else f"{name} not measured ({clean(alike[0].detail)})"
        )
    return Finding(f"alone: {', '.join(parts)}") if parts else None


def samples(record: Record) -> Finding:
    """Rounds used, samples left out by reason, and how much of the run was timed work."""
    launches = [launch for case in record.cases for launch in case.launches]
    rounds = sum(len(rank.rounds) for launch in launches for rank in launch.ranks)
    dropped: Counter[str] = Counter()
    for launch in launches:
        dropped.update({clean(why): times for why, times in launch.dropped.items() if times})
    listed = ", ".join(f"{why} {times}" for why, times in dropped.items())
    text = f"samples: {count(rounds, 'round')} used, " + (f"dropped: {listed}" if dropped else "none dropped")
    timed = sum(launch.timed_s for launch in launches)
    if record.run.seconds > 0 and timed > 0:
        text += f"; timed work fills {percent(timed / record.run.seconds)} of {number(record.run.seconds)} s"
    made = sum(len(seen.arms) for launch in launches for rank in launch.ranks for seen in rank.rounds)
    sampling = sum(float(launch.checks.get("sampling_s") or 0.0) for launch in launches)
    if made and sampling > timed > 0:
        # What the harness adds to a sample outside its timed region: filling, conditioning, checking.
        text += f", and {number((sampling - timed) / made * 1e3)} ms around each sample prepare and check it"
    return Finding(text)


def counts(record: Record) -> Finding:
    """Cases by status; an unfinished run says so."""
    by_status = Counter(case.status for case in record.cases)
    listed = ", ".join(f"{by_status[status]} {status}" for status in STATUSES if by_status[status])
    planned = "" if record.run.finished else f" of {len(record.run.planned)} planned"
    text = f"cases: {len(record.cases)}{planned}" + (f" ({listed})" if listed else "")
    if not record.run.finished:
        text += "; the run has not finished, go on with `overlap run --resume`"
    return Finding(text, not record.run.finished or bool(by_status["invalid"] + by_status["error"]))


def nothing_measured(record: Record) -> Finding | None:
    """Why there is no number at all; None where there is one."""
    if any(case.measured for case in record.cases):
        return None
    if not record.cases:
        return Finding("nothing was measured: the record holds no case", True)
    given = Counter(f"{case.status}: {reason(case)}" for case in record.cases)
    (why, times), *others = given.most_common()
    more = f" ({times} of {len(record.cases)} cases)" if others else ""
    return Finding(f"nothing was measured: {why}{more}", True)


def doubts(record: Record) -> list[Finding]:
    """Everything that a reader has to know before believing a number of this record."""
    names = short_names(record.cases)
    found = [line for line in (*verdicts(record), *_model_checks(record), controls(record)) if line.doubt]
    if not record.run.finished:
        found.append(Finding("the run did not finish: cases are missing", True))
    for status in ("error", "invalid", "unsettled"):
        alike: dict[str, list[str]] = {}
        for case in record.cases:
            if case.status == status:
                alike.setdefault(reason(case), []).append(names[case.key])
        for why, cases in alike.items():
            more = f" and {len(cases) - CASES_NAMED} more" if len(cases) > CASES_NAMED else ""
            found.append(Finding(f"{status}: {why}: {', '.join(cases[:CASES_NAMED])}{more}", True))
    tried = Counter(
        clean(discarded.reason)
        for case in record.cases
        for launch in case.launches
        for discarded in launch.discarded
    )
    found += [
        Finding(f"{count(times, 'attempt')} discarded and measured again: {why}")
        for why, times in tried.items()
    ]
    told = [*exposure.doubts(record), *feeding_words.doubts(record)]
    found += [Finding(text, doubt) for text, doubt in told]
    capped = Counter(label for case in record.cases for label in _labels(case))
    found += [Finding(f"{label}: seen in {count(times, 'case')}") for label, times in capped.items()]
    if record.run.dirty:
        text = "the tree had uncommitted changes: the commit does not say what was measured"
        found.append(Finding(text, True))
    if record.machine.gpu.get("driver_model") == "WDDM":
        text = "driver model WDDM: it batches launches and copies; not comparable with other driver models"
        found.append(Finding(text, True))
    if record.machine.device == "cpu":
        found.append(Finding("measured on the cpu backend: never comparable with a GPU's numbers", True))
    return found


def _model_checks(record: Record) -> list[Finding]:
    checks = ((curve.name, model_check(curve)) for curve in chunk_curves(record))
    return [replace(line, text=f"{name}: {line.text}") for name, line in checks if line]


def _labels(case: CaseResult) -> set[str]:
    """What the clocks say of the case, though its numbers stand."""
    return {
        label
        for launch in case.launches
        for rank in launch.ranks
        for label in validity.labels(rank.telemetry)
    }


def summary(record: Record) -> list[Finding]:
    """Two findings or more: identity, verdicts, chunks, controls, samples, counts. No more than SUMMARY_LINES by
    advice on chunks; each family has its verdicts."""
    nothing = nothing_measured(record)
    found = [Finding(identity(record)), *([nothing] if nothing else verdicts(record))]
    advice = [
        replace(line, text=f"{curve.name}: {line.text}")
        for curve in chunk_curves(record)
        if (line := chunk_advice(curve))
    ]
    alone = ceilings(record)
    ends = [controls(record), *([alone] if alone else []), samples(record)] if record.cases else []
    last = [*ends, counts(record)]
    return [*found, *advice[: max(0, SUMMARY_LINES - len(found) - len(last))], *last]
