"""The contract between a workload and `measure`."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One arm, run once.

    ms: device time of the arm. host_ms: time the host needed to issue it. window: monotonic seconds (start, end)
    of the timed region, for telemetry. dropped: why the sample is void though nothing is wrong with the work
    (`gate leaked`). failed: what a check found wrong; such work is not what the case says.
    """

    ms: float
    host_ms: float
    window: tuple[float, float]
    spans: dict[str, float] = field(default_factory=dict)
    dropped: str | None = None
    failed: str | None = None


class Workload(Protocol):
    """The arms of one case. Memory is taken when it is built and given back by `close`."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, each sampled once a round."""

    @property
    def facts(self) -> dict[str, int | float]:
        """The fixed work of a sample, kept beside the samples: bytes, flops, repeats."""

    def warm_up(self) -> str | None:
        """Run every arm once without a gate, so that whatever loads on first use has loaded; what a check found."""

    def sample(self, arm: str) -> Sample:
        """Prepare (untimed), run (timed) and check (untimed) one arm."""

    def close(self) -> None: ...
