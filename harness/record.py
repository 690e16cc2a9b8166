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
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import RecordError, UsageError
from harness.files import write_whole

SCHEMA = 1
STATUSES = ("ok", "unsettled", "skipped", "invalid", "error")
MEASURED = ("ok", "unsettled")

# A record of 500 cases is about 10 MB; anything far beyond is not one of ours.
MAX_BYTES = 512 << 20


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
    """Every arm once, in `order`.

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
    dropped: samples not used, by reason (`gate leaked`). checks: named facts about the samples.
    """

    index: int
    ranks: list[Rank]
    stop: str = ""
    wall_s: float = 0.0
    timed_s: float = 0.0
    dropped: dict[str, int] = {}
    checks: dict[str, Any] = {}


class Metric(_Struct):
    """A value with its 95 % interval; `low` and `high` are None where there was no more than one sample."""

    value: float
    unit: str
    low: float | None = None
    high: float | None = None


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
    arm), or stands at its default: readers take what is missing for unknown.
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
        metrics={name: metric for name, metric in case.metrics.items() if math.isfinite(metric.value)},
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


def _writable_round(round: Round) -> Round:
    return Round(
        order=round.order,
        arms=_known(round.arms),
        host=_known(round.host),
        spans=_known(round.spans),
        start=_finite(round.start),
    )


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
    for case in record.cases:
        if case.status not in STATUSES:
            raise RecordError(
                f"{source}: {case.key!r}: got status {case.status!r}, want one of {', '.join(STATUSES)}"
            )
    return record


class _Head(msgspec.Struct):
    schema: int


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
