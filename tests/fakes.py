"""A clock that a test turns, a workload whose samples are written down, and a backend without a device."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from harness.validity import Sample as Reading
from harness.workloads.base import Sample

ARMS = ("transfer", "compute", "serial", "overlapped")
MS = {
    "transfer": 2.0,
    "compute": 4.0,
    "serial": 6.0,
    "overlapped": 5.0,
    "transfer_1": 1.5,
    "compute_1": 3.5,
}


class ScriptedClock:
    """Monotonic seconds that only `advance` moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeWorkload:
    """Samples as written: MS[arm] + noise(arm, n) for the n-th sample of an arm, changed by script[arm, n].

    A sample advances the clock by `ms`, and by 1 ms before it for what is not timed. `warm` is what the warm-up
    finds. The samples of the warm-up round count: n is 0 there.
    """

    facts: Mapping[str, int | float] = {"bytes": 1 << 20, "flops": 8.0, "repeats": 1, "buffers": 2}

    def __init__(
        self,
        clock: ScriptedClock | None = None,
        *,
        arms: Sequence[str] = ARMS,
        noise: Callable[[str, int], float] = lambda arm, n: 0.0,
        script: Mapping[tuple[str, int], Mapping[str, Any] | BaseException] | None = None,
        warm: str | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.arms = tuple(arms)
        self.clock = clock or ScriptedClock()
        self.calls: list[str] = []
        self.closed = 0
        self._noise, self._script, self._warm, self._before = noise, dict(script or {}), warm, before

    def warm_up(self) -> str | None:
        self.calls.append("warm-up")
        return self._warm

    def sample(self, arm: str) -> Sample:
        self._before()
        n = self.calls.count(arm)
        self.calls.append(arm)
        changed = self._script.get((arm, n), {})
        if isinstance(changed, BaseException):
            raise changed
        ms = MS[arm] + self._noise(arm, n)
        self.clock.advance(1e-3)
        start = self.clock()
        self.clock.advance(ms * 1e-3)
        spans = {"transfer_in_overlapped": ms / 2} if arm == "overlapped" else {}
        return replace(
            Sample(ms=ms, host_ms=ms / 100, window=(start, self.clock()), spans=spans),
            **changed,
        )

    def close(self) -> None:
        self.closed += 1


class FakeBackend:
    """What a worker asks of a backend itself. lost: what `synchronize` raises from then on."""

    kind = "cpu"

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self.closed = 0

    def facts(self) -> dict[str, Any]:
        return {"torch": "9.9"}

    def canary_us(self, launches: int = 1000) -> float:
        return 2.5

    def allocations(self) -> int:
        return 0

    def synchronize(self, event: object = None) -> None:
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        self.closed += 1


class FakeTelemetry:
    """Readings written down; `asked` are the times they were asked from."""

    def __init__(self, readings: Sequence[Reading] = ()) -> None:
        self.missing: dict[str, str] = {}
        self.readings, self.asked = list(readings), list[float]()
        self.closed = 0

    def since(self, t0: float, t1: float | None = None) -> list[Reading]:
        self.asked.append(t0)
        return self.readings

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        self.closed += 1

    def open(self, *_: object) -> "FakeTelemetry":
        return self


class ThreadGroup:
    """Ranks that are threads of the test: `run` gives what each came back with."""

    def __init__(self, rank: int, size: int, meeting: "Meeting") -> None:
        self.rank, self.size, self.host, self.device = rank, size, f"host-{rank}", None
        self._meeting = meeting

    def share(self, value: Any) -> list[Any]:
        return self._meeting.share(self.rank, value)

    def meet(self) -> None:
        self._meeting.share(self.rank, None)


class Meeting:
    """Where the threads of a group wait for each other; one that failed leaves none of them waiting."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def share(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        shared = list(self._values)
        self._barrier.wait()
        return shared

    @staticmethod
    def run(work: Callable[[ThreadGroup], Any], size: int = 2) -> list[Any]:
        meeting = Meeting(size)

        def one(rank: int) -> Any:
            try:
                return work(ThreadGroup(rank, size, meeting))
            except BaseException:
                meeting._barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            return [done.result() for done in [pool.submit(one, rank) for rank in range(size)]]
