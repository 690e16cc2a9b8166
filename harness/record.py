"""The record: one JSON file with everything one `overlap run` measured. Records are the source of truth.

History of the schema
    1  first version

A record is written whole and atomically after every finished case, so a killed run leaves a readable one.
Reading validates every field; nothing read from a record is ever executed.
"""

import datetime
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.case import Case
from harness.errors import RecordError, UsageError
from harness.families import FAMILIES
from harness.files import write_whole

SCHEMA = 1
STATUSES = ("ok", "unsettled", "skipped", "invalid", "error")
MEASURED = ("ok", "unsettled")

# A record of 500 cases is about 10 MB; anything far beyond is not one of ours.
MAX_BYTES = 512 << 20

# Thirty years: no sample takes so long, and sums and squares of such times are still exact enough.
MAX_MS = 1e12

# A number of more digits than this fits no counter, and one of three hundred fits no float.
MAX_DIGITS = 100

# The only times that may be negative: they are differences.
DIFFERENCES = ("exposed_ms",)


class _Struct(msgspec.Struct, kw_only=True):
    pass


class Run(_Struct):
    """One `overlap run`: when, of which commit, by which command (arguments only, no paths), how long.

    dirty: the tree had uncommitted changes; None where there is no git to ask. finished: False until the end.
    spent: by launch, seconds outside the cases (open_s to open the device, controls_s) and launch_canary_us, the
    host time of an empty launch in microseconds. planned: keys of all cases the run is to measure, so that it can
    be resumed.
    """

    time: str
    commit: str
    dirty: bool | None
    command: list[str]
    seconds: float = 0.0
    finished: bool = False
    suites: list[str] = []
    tier: str = ""
    launches: int = 1
    planned: list[str] = []
    spent: dict[str, dict[str, float]] = {}


class Machine(_Struct):
    """What it was measured on. `name` names a kind of machine that stays the same from night to night."""

    name: str
    device: str
    gpu: dict[str, Any] = {}
    cpu: dict[str, Any] = {}


class Control(_Struct):
    """One control of measurement.md rule 6: `value` must lie in [low, high]."""

    name: str
    launch: int
    passed: bool
    value: float | None
    low: float
    high: float
    unit: str
    detail: str = ""


class Round(_Struct):
    """Every arm once, in `order`. Each time is of one sample, which is `repeats` batches (Launch.repeats).

    arms: device time of each arm, ms. host: time the host needed to enqueue it, ms. spans: other times taken
    from the arm's timeline, ms (`transfer_in_overlapped`: start to end of the last copy while both run).
    start: seconds since the sampling of this case began.
    """

    order: list[str]
    arms: dict[str, float]
    host: dict[str, float] = {}
    spans: dict[str, float] = {}
    start: float = 0.0


class Rank(_Struct):
    """The rounds of one process of a launch; telemetry holds the NVML summary beside them."""

    rounds: list[Round]
    telemetry: dict[str, Any] = {}


class Launch(_Struct):
    """One fresh set of processes.

    stop: why sampling ended (`settled`, `budget`). wall_s, timed_s: seconds of the case and of its timed work.
    dropped: samples not used, by reason (`gate leaked`). checks: named facts about the samples, of which
    `repeats` is how many batches one sample holds.
    """

    index: int
    ranks: list[Rank]
    stop: str = ""
    wall_s: float = 0.0
    timed_s: float = 0.0
    dropped: dict[str, int] = {}
    checks: dict[str, Any] = {}

    @property
    def repeats(self) -> int:
        """Batches in one sample, which run as one pipeline; 1 where the launch does not say."""
        found = self.checks.get("repeats")
        return found if isinstance(found, int) and found > 0 else 1


class Metric(_Struct):
    """A value with its 95 % interval; `low` and `high` are None where there was no more than one sample.

    A time (unit `ms`) is of one batch, whatever the number of batches in a sample.
    """

    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> float | None:
        """The wider side of the interval as a share of the value; None where that has no meaning."""
        if self.low is None or self.high is None or not self.value:
            return None
        return max(self.high - self.value, self.value - self.low) / abs(self.value)


class CaseResult(_Struct):
    """All that is known of one case; `metrics` and `model` are derived from `launches` (harness/metrics.py)."""

    key: str
    family: str
    params: dict[str, str | int | float]
    status: str
    reason: str = ""
    launches: list[Launch] = []
    metrics: dict[str, Metric] = {}
    model: dict[str, float | int | str | bool | None] = {}
    checks: dict[str, Any] = {}

    @property
    def measured(self) -> bool:
        return self.status in MEASURED


class Record(_Struct):
    """See the module; field order is the order in the file."""

    schema: int
    method: int
    run: Run
    machine: Machine
    software: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    controls: list[Control] = []
    cases: list[CaseResult] = []

    def case(self, key: str) -> CaseResult:
        for case in self.cases:
            if case.key == key:
                return case
        raise UsageError(f"case: {key!r} is not in this record of {len(self.cases)} cases")


def utc_now() -> str:
    """Now, as records write it: `2026-11-30T08:00:00Z`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def record_path(results: Path, record: Record) -> Path:
    """results/records/<machine>/<UTC time>-<commit8>.json"""
    stamp = re.sub(r"[-:]", "", record.run.time)
    return results / "records" / safe_name(record.machine.name) / f"{stamp}-{record.run.commit[:8]}.json"


def safe_name(name: str) -> str:
    """`name` if it is safe as a folder of the store; UsageError otherwise."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        raise UsageError(
            f"machine: got {name!r}, want up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


def dumps(record: Record) -> bytes:
    """The record as strict JSON, which `loads` reads back.

    A non-finite number becomes null. Where null is not allowed the entry is left out (a metric, the time of an
    arm), or stands at its default: readers take what is missing for unknown. So does a time or an interval that
    cannot be, which `loads` would refuse: a fault in one number must not cost the whole record.
    """
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
    whole = msgspec.structs.replace(
        record, run=run, controls=controls, cases=[_writable(case) for case in record.cases]
    )
    try:
        data = msgspec.json.encode(whole)
    except UnicodeEncodeError:
        # A word of the command line or of the environment that is not UTF-8.
        data = msgspec.json.encode(_unicode(msgspec.to_builtins(whole)))
    return data + b"\n"


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
                ranks=[
                    msgspec.structs.replace(rank, rounds=[_writable_round(r) for r in rank.rounds])
                    for rank in launch.ranks
                ],
            )
            for launch in case.launches
        ],
    )


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


def _unicode(value: Any) -> Any:
    """`value` with every character that UTF-8 cannot write as a question mark."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_unicode(key): _unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unicode(item) for item in value]
    return value


def loads(data: bytes, *, source: str = "record") -> Record:
    """The record in `data`; RecordError says what is wrong and where."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema < 1:
            raise RecordError(f"{source}: schema: got {head.schema}, want 1 to {SCHEMA}")
        if head.schema > SCHEMA:
            raise RecordError(
                f"{source}: schema {head.schema} is newer than this program reads ({SCHEMA}); update overlap"
            )
        record = msgspec.json.decode(data, type=Record)
        if re.search(rb"[0-9]{%d}" % MAX_DIGITS, data):  # seldom true, and the search for its place is slow
            for place in _long_numbers(record):
                raise RecordError(f"{source}: {place}: a whole number of more than {MAX_DIGITS} digits")
    except msgspec.DecodeError as error:
        raise RecordError(f"{source}: not a readable record: {error}") from None
    except RecursionError:
        raise RecordError(f"{source}: not a readable record: nested too deeply") from None
    try:
        safe_name(record.machine.name)
    except UsageError as error:
        raise RecordError(f"{source}: {error}") from None
    if re.fullmatch(r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z", record.run.time) is None:
        raise RecordError(f"{source}: run.time: got {record.run.time!r}, want UTC, as 2026-11-30T08:00:00Z")
    if re.fullmatch(r"[0-9a-f]{7,40}|none", record.run.commit) is None:
        raise RecordError(f"{source}: run.commit: got {record.run.commit!r}, want 7 to 40 hex digits or none")
    for fault in _faults(record):
        raise RecordError(f"{source}: {fault}")
    return record


class _Head(msgspec.Struct):
    schema: int


def _long_numbers(record: Record) -> Iterator[str]:
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


def _faults(record: Record) -> Iterator[str]:
    """What no run writes, each with its place, though every value is of the right type."""
    for control in record.controls:
        where, low, high = f"control {control.name!r}", control.low, control.high
        if control.launch < 0:
            yield f"{where}: launch: got {control.launch}, want 0 or more"
        if low > high:
            yield f"{where}: low: got {low:g}, want no more than high, {high:g}"
        # One that failed lies outside by its nature.
        if control.passed and control.value is not None and not low <= control.value <= high:
            yield f"{where}: value: got {control.value:g} of one that passed, want {low:g} to {high:g}"
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
        repeats = launch.checks.get("repeats", 1)
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            yield f"{where}: checks.repeats: got {repeats!r}, want a whole number from 1"
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


def _time_fault(times: dict[str, float]) -> str | None:
    """The name of a time that cannot be."""
    return next((name for name, ms in times.items() if not 0 <= ms <= MAX_MS), None)


def _metric_fault(name: str, metric: Metric) -> str:
    """What cannot be about a metric; empty where nothing is wrong."""
    value, low, high = metric.value, metric.low, metric.high
    if low is not None and high is not None and not low <= value <= high:
        return f"got {value:g} with an interval from {low:g} to {high:g}, want a value inside"
    if metric.unit != "ms":
        return ""
    # The interval of a time may well reach below 0, where few samples say little.
    if value < 0 and name not in DIFFERENCES:
        return f"got {value:g} ms, want 0 or more"
    far = next((end for end in (value, low, high) if end is not None and abs(end) > MAX_MS), None)
    return "" if far is None else f"got {far:g} ms, want no more than {MAX_MS:g}"


def read(path: Path) -> Record:
    """The record in `path`; RecordError if it cannot be read, is truncated, of wrong types, or newer."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which no record is")
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot read: {error.strerror}") from None
    return loads(data, source=str(path))


def write(path: Path, record: Record) -> None:
    """Replace `path` by `record` in one step; a reader sees the old record or the new one, never a part.

    Raises UsageError if the folder cannot be written or the disk is full; the old file is then untouched.
    """
    write_whole(path, dumps(record), field="results")
