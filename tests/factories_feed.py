"""Builders of synthetic feed launches, case results and records, of a loader and a step whose every time is known.

    feed = Loader(read_ms=1.0, decode_ms=7.0, step_ms=2.0)
    whole = feed_record(*feed_results(feed, workers=(0, 2, 4, 8)))

Times are ms of one batch. The truth behind them: a worker needs read + decode for a batch, W of them deliver W batches
in that time, up to `cores`, and no faster than `storage_ms` a batch. Without a worker the host does it itself. What the
loader needs longer than a step, the device waits for. A sample holds `repeats` batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import factories
import numpy as np

from harness import metrics
from harness.case import Case, Value
from harness.families import FEED
from harness.record import CaseResult, Launch, Rank, Record, Round
from harness.statistics import balanced_orders

DEFAULTS: dict[str, Value] = {
    "data": "jpeg",
    "source": "memory",
    "workers": 4,
    "memory": "pinned",
    "profile": "h200.1a2b",
}


def feed_case(**axes: Value) -> Case:
    """JPEGs from memory by four workers into pinned memory, with `axes` replaced."""
    return Case.of(FEED, **{**DEFAULTS, **axes})


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What a batch and a step cost, and what is wrong with them.

    storage_ms: a batch from storage, however many workers ask. copy_ms: to the device, in the step's way. slowed:
    share that a step takes longer beside the workers. in_line: without workers the device waits while a batch is
    made, as on a cpu; else the host makes it while the device computes. burst: in one round of so many the device
    waits, as long as `stall_ms` each, which the loader alone does not show; 0 for none.
    """

    read_ms: float = 1.0
    decode_ms: float = 7.0
    step_ms: float = 2.0
    cores: int = 16
    storage_ms: float = 0.0
    copy_ms: float = 0.0
    slowed: float = 0.0
    in_line: bool = False
    burst: int = 0
    stall_ms: float = 0.0

    def alone(self, workers: int) -> float:
        """ms a batch of the loader alone."""
        together = max(1, min(workers, self.cores))
        return max((self.read_ms + self.decode_ms) / together, self.storage_ms)

    def gap(self, workers: int) -> float:
        if not workers and self.in_line:
            return self.alone(0)
        return max(0.0, self.alone(workers) - self.busy)

    @property
    def busy(self) -> float:
        """ms of the device for a real step."""
        return self.step_ms * (1 + self.slowed) + self.copy_ms


def feed_launch(
    case: Case, truth: Loader, *, rounds: int = 20, noise: float = 0.002, seed: int = 0, index: int = 0,
    repeats: int = 8, facts: dict[str, Any] | None = None, spans: bool = True,
) -> Launch:  # fmt: skip
    """One launch. facts: in the place of, or beside, what the workload tells; None for one takes it away."""
    rng = np.random.default_rng([seed, index, case.number("workers")])
    workers = case.number("workers")
    arms = ("transfer", "compute", "overlapped")
    orders = balanced_orders(list(arms))
    seen = []
    for at in range(rounds):
        stall = truth.stall_ms if truth.burst and at % truth.burst == truth.burst // 2 else 0.0
        gap = truth.gap(workers) + stall
        times = {
            "transfer": truth.alone(workers),
            "compute": truth.step_ms,
            "overlapped": truth.busy + gap,
        }
        seen.append(
            Round(
                order=orders[at % len(orders)],
                arms={arm: repeats * ms * (1 + noise * rng.standard_normal()) for arm, ms in times.items()},
                host=dict.fromkeys(arms, 0.5 * repeats),
                spans={
                    "overlapped.next": gap,
                    "overlapped.next_max": repeats * stall + gap - stall,
                    "overlapped.gap": gap,
                }
                if spans
                else {},
                start=at * 0.05,
            )
        )
    told = {
        "repeats": repeats,
        "bytes": repeats * 2_400_000,
        "flops": repeats * 1e9,
        "samples": 16,
        "batch_bytes": 2_400_000,
        "stored_bytes": 320_000,
        "read_ms": truth.read_ms,
        "decode_ms": truth.decode_ms,
        "first_batch_ms": 410.0 if workers else 9.0,
        "second_epoch_ms": 12.0 if workers else 9.0,
        "worker_bytes": 41_000_000,
        "unpinned": [],
    } | (facts or {})
    return Launch(
        index=index,
        ranks=[Rank(rounds=seen, telemetry={"utilisation_percent": {"min": 0, "median": 40.0, "max": 90}})],
        stop="settled",
        timed_s=1.0,
        wall_s=1.5,
        checks={name: fact for name, fact in told.items() if fact is not None},
    )


def feed_result(
    truth: Loader | None = None, *, launches: int = 1, status: str = "ok", reason: str = "",
    launch: dict[str, Any] | None = None, **axes: Value,
) -> CaseResult:  # fmt: skip
    """A measured case, its metrics derived; `launch`: options of `feed_launch`."""
    case = feed_case(**axes)
    made = [feed_launch(case, truth or Loader(), index=index, **(launch or {})) for index in range(launches)]
    return metrics.derive(factories.unmeasured(case, status, reason, launches=made))


def feed_results(truth: Loader, workers: Iterable[int], **axes: object) -> list[CaseResult]:
    """Cases that differ in their workers alone."""
    return [feed_result(truth, workers=count, **axes) for count in workers]  # type: ignore[arg-type]


def feed_record(*results: CaseResult, device: str = "cuda") -> Record:
    """A finished record of these cases."""
    made = factories.record(*results, machine="h200-1" if device == "cuda" else "cpu-2", device=device)
    made.run.suites = ["feed"]
    return made
