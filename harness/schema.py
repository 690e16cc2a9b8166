"""What a record holds: one JSON file with everything one `overlap run` measured.

History of the schema
    1  first version
"""

from typing import Any

import msgspec

from harness.errors import UsageError

SCHEMA = 1
STATUSES = ("ok", "unsettled", "skipped", "invalid", "error")
MEASURED = ("ok", "unsettled")


class _Struct(msgspec.Struct, kw_only=True):
    pass


class Run(_Struct):
    """One `overlap run`: when, of which commit, by which command (arguments only, no paths), how long.

    dirty: the tree had uncommitted changes; None where there is no git to ask. finished: False until the end.
    spent: by launch, what is known of it as a whole: when its device was open (began, seconds since 1970), seconds
    outside the cases (open_s to open the device, controls_s, ceilings_s), launch_canary_us, the host time of an empty
    launch in microseconds, and the device's energy_j over energy_s seconds.
    planned: keys of all cases the run is to measure, so that it can be resumed.
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


class Ceiling(_Struct):
    """What the device reaches in one kind of work alone (harness/ceilings.py), median over a few samples.

    value: None where it could not be measured, and `detail` says why. low, high: the fastest and slowest sample
    but for one in ten.
    """

    name: str
    launch: int
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
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
    """The rounds of one process of a launch; telemetry holds the NVML summary beside them.

    host: the name of the host it ran on, where several processes measure together.
    """

    rounds: list[Round]
    telemetry: dict[str, Any] = {}
    host: str = ""


class Discarded(_Struct):
    """An attempt at a case that was spoiled from outside and measured again.

    rounds: how many it held. wall_s: seconds it took; waited_s: seconds waited before the next one.
    """

    reason: str
    rounds: int
    wall_s: float
    waited_s: float


class Launch(_Struct):
    """One fresh set of processes.

    stop: why sampling ended (`settled`, `budget`). wall_s, timed_s: seconds of the case and of its timed work.
    dropped: samples not used, by reason (`gate leaked`). checks: named facts about the samples, of which
    `repeats` is how many batches one sample holds. discarded: attempts before this one, none of whose samples are
    here.
    """

    index: int
    ranks: list[Rank]
    stop: str = ""
    wall_s: float = 0.0
    timed_s: float = 0.0
    dropped: dict[str, int] = {}
    checks: dict[str, Any] = {}
    discarded: list[Discarded] = []

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
    ceilings: list[Ceiling] = []
    cases: list[CaseResult] = []

    def case(self, key: str) -> CaseResult:
        for case in self.cases:
            if case.key == key:
                return case
        raise UsageError(f"case: {key!r} is not in this record of {len(self.cases)} cases")
