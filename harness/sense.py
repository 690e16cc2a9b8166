"""What can stand in a record and what cannot, beyond its types.

`writable` leaves out of a record what `faults` would refuse when it is read: a fault in one number must not cost the
whole record.
"""

import math
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from harness.case import Case
from harness.errors import UsageError
from harness.families import FAMILIES
from harness.schema import STATUSES, CaseResult, Ceiling, Metric, Record, Round

# Thirty years: no sample takes so long, and sums and squares of such times are still exact enough.
MAX_MS = 1e12

# A number of more digits than this fits no counter, and one of three hundred fits no float.
MAX_DIGITS = 100

# Of a run; each takes a quarter of a minute or more.
MAX_LAUNCHES = 10_000

# No sample of any device holds more: what a launch says of its work, by name, from the least to the most.
FACTS = {
    "bytes": (0, 1 << 50), "flops": (0, 1e21), "parameters": (1, 1 << 50),
    **dict.fromkeys(("batch_bytes", "stored_bytes", "worker_bytes", "tokens", "padded"), (0, 1 << 50)),
    **dict.fromkeys(("read_ms", "decode_ms", "first_batch_ms", "second_epoch_ms"), (0, MAX_MS)),
    "samples": (1, 1 << 50),
}  # fmt: skip
# The same of each entry of a list.
LISTS = {"buckets": (1, 1 << 50), "ready_ms": (0, MAX_MS), "alone_ms": (0, MAX_MS)}
# What is named one by one: a few short words, such as the types in a batch that stayed unpinned.
WORDS, MOST_WORDS, LONGEST_WORD = ("unpinned",), 100, 200

# Times of work, of which none is 0.
WORK = (
    "overlapped_ms",
    "transfer_ms",
    "compute_ms",
    "serial_ms",
    "transfer_unsplit_ms",
    "compute_unsplit_ms",
)

# No share or ratio of two times is larger.
MAX_RATIO = 1e12

# The only times that may be negative: they are differences.
DIFFERENCES = ("exposed_ms", "dilation_ms", "unexplained_ms")


def writable(record: Record) -> Record:
    """A copy in which every number that must be there is finite and can be."""
    run = msgspec.structs.replace(
        record.run,
        seconds=_finite(record.run.seconds),
        spent={launch: _known(spent) for launch, spent in record.run.spent.items()},
    )
    controls = [
        msgspec.structs.replace(
            control, low=_finite(control.low, -_LARGEST), high=_finite(control.high, _LARGEST)
        )
        for control in record.controls
    ]
    ceilings = [
        ceiling
        if not _ceiling_fault(ceiling)
        else msgspec.structs.replace(ceiling, value=None, low=None, high=None)
        for ceiling in record.ceilings
    ]
    cases = [_writable(case) for case in record.cases]
    return msgspec.structs.replace(record, run=run, controls=controls, ceilings=ceilings, cases=cases)


_LARGEST = sys.float_info.max


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if abs(value) <= _LARGEST else otherwise


def _known(times: dict[str, float]) -> dict[str, float]:
    """Without the entries that are not finite; a record has many of these, and nearly all are whole."""
    if all(map(math.isfinite, times.values())):
        return times
    return {name: value for name, value in times.items() if math.isfinite(value)}


def _writable(case: CaseResult) -> CaseResult:
    """A copy in which every number that must be there is finite."""
    return msgspec.structs.replace(
        case,
        params={
            name: value
            for name, value in case.params.items()
            if not isinstance(value, float) or math.isfinite(value)
        },
        metrics=_writable_metrics(case.metrics),
        launches=[
            msgspec.structs.replace(
                launch,
                wall_s=_finite(launch.wall_s),
                timed_s=_finite(launch.timed_s),
                checks=_possible_facts(launch.checks),
                discarded=[
                    msgspec.structs.replace(
                        tried, wall_s=_finite(tried.wall_s), waited_s=_finite(tried.waited_s)
                    )
                    for tried in launch.discarded
                ],
                ranks=[
                    msgspec.structs.replace(rank, rounds=[_writable_round(r) for r in rank.rounds])
                    for rank in launch.ranks
                ],
            )
            for launch in case.launches
        ],
    )


def _possible_facts(checks: dict[str, Any]) -> dict[str, Any]:
    """Without what no workload can have said."""
    wrong = {name for name, _ in _fact_faults(checks)}
    return {name: told for name, told in checks.items() if name not in wrong} if wrong else checks


def _fact_faults(checks: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What cannot be in the facts of a launch: the name, and what is wrong."""
    if not _is_count(repeats := checks.get("repeats", 1)):
        yield "repeats", f"got {repeats!r}, want a whole number from 1"
    for name, (low, high) in FACTS.items():
        if name in checks and not _within(checks[name], low, high):
            yield name, f"got {_short(checks[name])}, want a number from {low:g} to {high:g}"
    for name, (low, high) in LISTS.items():
        told = checks.get(name, [])
        if not isinstance(told, list) or not all(_within(each, low, high) for each in told):
            yield name, f"got {_short(told)}, want a list of numbers from {low:g} to {high:g}"
    for name in WORDS:
        told = checks.get(name, [])
        if not isinstance(told, list) or len(told) > MOST_WORDS or not all(map(_is_word, told)):
            yield (
                name,
                f"got {_short(told)}, want a list of up to {MOST_WORDS} words of up to {LONGEST_WORD} letters",
            )


def _is_word(found: object) -> bool:
    return isinstance(found, str) and len(found) <= LONGEST_WORD


def _within(found: object, low: float, high: float) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and low <= found <= high


def _short(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _is_count(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 1


def _writable_metrics(metrics: dict[str, Metric]) -> dict[str, Metric]:
    bare = {
        name: msgspec.structs.replace(metric, low=_end(metric.low), high=_end(metric.high))
        for name, metric in metrics.items()
        if math.isfinite(metric.value)
    }
    return {name: metric for name, metric in bare.items() if not _metric_fault(name, metric)}


def _end(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _writable_round(round: Round) -> Round:
    return Round(
        order=round.order,
        arms=_possible(round.arms),
        host=_possible(round.host),
        spans=_possible(round.spans),
        start=round.start if 0 <= round.start <= MAX_MS else 0.0,
    )


def _possible(times: dict[str, float]) -> dict[str, float]:
    """Without what is no time; a record has many of these, and nearly all are whole."""
    if _time_fault(times) is None:
        return times
    return {name: ms for name, ms in times.items() if 0 <= ms <= MAX_MS}


def printable(value: Any) -> Any:
    """`value` with every character that UTF-8 cannot write as a question mark."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [printable(item) for item in value]
    return value


def long_numbers(record: Record) -> Iterator[str]:
    """Places of whole numbers of more than MAX_DIGITS digits; a case is named by its key."""
    yield from _long(msgspec.to_builtins(msgspec.structs.replace(record, cases=[])), "")
    for case in record.cases:
        for place in _long(msgspec.to_builtins(case), ""):
            yield f"{case.key!r}: {place}"


def _long(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        yield place
    named = isinstance(value, dict)
    for name, inner in value.items() if named else enumerate(value) if isinstance(value, list) else ():
        # A name of the file may hold anything; a message is one line.
        text = str(name) if str(name).isprintable() else repr(name)
        yield from _long(
            inner, f"{place}.{text}" if place and named else text if named else f"{place}[{text}]"
        )


def faults(record: Record) -> Iterator[str]:
    """What no run writes, each with its place, though every value is of the right type."""
    if not 1 <= record.run.launches <= MAX_LAUNCHES:
        yield f"run.launches: got {record.run.launches}, want 1 to {MAX_LAUNCHES}"
    for control in record.controls:
        where, low, high = f"control {control.name!r}", control.low, control.high
        if control.launch < 0:
            yield f"{where}: launch: got {control.launch}, want 0 or more"
        if low > high:
            yield f"{where}: low: got {low:g}, want no more than high, {high:g}"
        # One that failed lies outside by its nature.
        if control.passed and control.value is not None and not low <= control.value <= high:
            yield f"{where}: value: got {control.value:g} of one that passed, want {low:g} to {high:g}"
    for ceiling in record.ceilings:
        if fault := _ceiling_fault(ceiling):
            yield f"ceiling {ceiling.name!r}: {fault}"
    known = set()
    for case in record.cases:
        if case.key in known:
            yield f"{case.key!r}: key: two cases have it"
        known.add(case.key)
        for fault in _case_faults(case):
            yield f"{case.key!r}: {fault}"


def _case_faults(case: CaseResult) -> Iterator[str]:
    if case.status not in STATUSES:
        yield f"status: got {case.status!r}, want one of {', '.join(STATUSES)}"
    yield from _key_faults(case)
    if case.measured and not case.launches:
        yield f"launches: got none, want one or more of a case that is {case.status}"
    for launch in case.launches:
        where = f"launch {launch.index}"
        if launch.index < 0:
            yield f"launches: index: got {launch.index}, want 0 or more"
        for told, fault in _fact_faults(launch.checks):
            yield f"{where}: checks.{told}: {fault}"
        for rank in launch.ranks:
            for at, seen in enumerate(rank.rounds):
                for field in ("arms", "host", "spans"):
                    name = _time_fault(getattr(seen, field))
                    if name is not None:
                        ms = getattr(seen, field)[name]
                        yield f"{where}, round {at}: {field}: {name!r}: got {ms:g} ms, want 0 to {MAX_MS:g}"
                if not 0 <= seen.start <= MAX_MS:
                    yield f"{where}, round {at}: start: got {seen.start:g}, want 0 to {MAX_MS:g}"
    for name, metric in case.metrics.items():
        if fault := _metric_fault(name, metric):
            yield f"metrics: {name!r}: {fault}"


def _key_faults(case: CaseResult) -> Iterator[str]:
    """Where the key and `params` are not of one case; nothing is known of another program's families."""
    if case.family not in FAMILIES:
        return
    try:
        named = Case.parse(case.key, FAMILIES)
    except UsageError as error:
        yield f"key: {error}"
        return
    if named.family.name != case.family:
        yield f"family: got {case.family!r}, and a key of {named.family.name!r}"
    elif named.key != case.key:
        yield f"key: want it written as {named.key!r}"
    for axis in named.family.axes:
        given = case.params.get(axis.name, axis.default)
        if given is None or not axis.check(given) or given != named[axis.name]:
            yield f"params.{axis.name}: got {given!r}, and {named[axis.name]!r} in the key"


def _ceiling_fault(ceiling: Ceiling) -> str:
    """What cannot be about a ceiling; empty where nothing is wrong."""
    known = [number for number in (ceiling.low, ceiling.value, ceiling.high) if number is not None]
    if not all(0 <= number <= _LARGEST for number in known):
        return f"got {', '.join(f'{number:g}' for number in known)}, want finite numbers of 0 or more"
    if known != sorted(known):
        return f"got {', '.join(f'{number:g}' for number in known)}, want low, value and high in this order"
    return ""


def _time_fault(times: dict[str, float]) -> str | None:
    """The name of a time that cannot be."""
    return next((name for name, ms in times.items() if not 0 <= ms <= MAX_MS), None)


def _metric_fault(name: str, metric: Metric) -> str:
    """What cannot be about a metric; empty where nothing is wrong."""
    value, low, high = metric.value, metric.low, metric.high
    if low is not None and high is not None and not low <= value <= high:
        return f"got {value:g} with an interval from {low:g} to {high:g}, want a value inside"
    if metric.unit != "ms":
        return "" if abs(value) <= MAX_RATIO else f"got {value:g}, want no more than {MAX_RATIO:g}"
    if value == 0 and name in WORK:
        return "got 0 ms, and no work takes no time"
    # The interval of a time may well reach below 0, where few samples say little.
    if value < 0 and name not in DIFFERENCES:
        return f"got {value:g} ms, want 0 or more"
    far = next((end for end in (value, low, high) if end is not None and abs(end) > MAX_MS), None)
    return "" if far is None else f"got {far:g} ms, want no more than {MAX_MS:g}"
