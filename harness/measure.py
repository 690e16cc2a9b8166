"""Rounds of samples: every arm once a round, in balanced order, until the headline is known well enough."""

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.group import Alone, Group
from harness.record import Round
from harness.statistics import StopRule, balanced_orders
from harness.workloads.base import Workload

HEADLINE = "overlapped"

# A case whose rounds are mostly void ends, and says so: after this many of them, or when it has had its time (a gate
# that times out takes ten seconds a sample).
MAX_VOID_SHARE = 0.5
MAX_VOID = 10

# After this long without a sign of life one is given between the samples of a round: six large samples, or six gates
# that time out, take longer than a process may be silent.
SIGN_S = 5.0


@dataclass
class Measured:
    """What `measure` brings back. `failed` is the first thing a check found wrong; the case is then invalid.

    by_rank: the rounds of every rank. windows, timed_s: of this one.
    """

    by_rank: list[list[Round]] = field(default_factory=list)
    windows: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    stop: str = ""
    failed: str = ""
    wall_s: float = 0.0
    timed_s: float = 0.0
    checks: dict[str, float | int | None] = field(default_factory=dict)

    @property
    def rounds(self) -> list[Round]:
        """The rounds of rank 0."""
        return self.by_rank[0] if self.by_rank else []


def measure(
    workload: Workload,
    rule: StopRule,
    *,
    allocations: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    on_round: Callable[[int], None] = lambda rounds: None,
    group: Group | None = None,
) -> Measured:
    """Sample `workload` round by round until `rule` says stop, a check fails, or most rounds are void.

    A round in which one sample is void (a leaked gate) is left out whole, so that the arms stay balanced. In a group
    every rank does the same: what one of them found holds for all, the slowest of each round is what `rule` is asked
    about, and time is rank 0's.

    Args:
        allocations: how often device memory was taken so far; sampling must not change it.
        clock: monotonic seconds.
        on_round: called with the rounds so far after every one, a void one included, as a sign of life, and after a
            sample or the warm-up where SIGN_S have gone by since.
    """
    result, group = Measured(), group or Alone()
    orders = balanced_orders(workload.arms)
    began = said = clock()

    def sign(since: float = 0.0) -> None:
        nonlocal said
        if clock() - said >= since:
            said = clock()
            on_round(len(result.rounds))

    def alive() -> None:
        sign(SIGN_S)

    with _quiet_host(result):
        # First everything loads; then one round as they will be, which is thrown away.
        result.failed = _failed(group, [found or "" for found in group.share(workload.warm_up())])
        alive()
        if not result.failed:
            thrown = _one_round(workload, orders[0], Measured(), clock, began, alive, group)
            result.failed = _failed(group, [seen.failed for seen in thrown])
            sign()
        taken = allocations()
        began = clock()
        attempts = 0
        headline: list[float] = []
        while not result.failed and not result.stop:
            order = orders[attempts % len(orders)]
            by_rank = _one_round(workload, order, result, clock, began, alive, group)
            attempts += 1
            result.failed = _failed(group, [seen.failed for seen in by_rank])
            if result.failed:
                break
            for reason in (reason for seen in by_rank for reason in seen.dropped):
                result.dropped[reason] = result.dropped.get(reason, 0) + 1
            elapsed = by_rank[0].elapsed
            if not any(seen.dropped for seen in by_rank):
                _take(result, by_rank, by_rank[group.rank])
                headline.append(max(seen.round.arms[HEADLINE] for seen in by_rank))
                result.stop = rule.decide(headline, elapsed) or ""
            voids = attempts - len(headline)
            enough = voids > MAX_VOID or elapsed >= rule.limit_s
            if enough and voids > MAX_VOID_SHARE * attempts:
                result.failed = f"{voids} of {attempts} rounds are void: " + _counts(result.dropped)
            sign()
        result.wall_s = clock() - began
        result.checks["driver_allocations"] = max(group.share(allocations() - taken))
    if not result.failed and result.checks["driver_allocations"]:
        result.failed = (
            f"device memory was allocated {result.checks['driver_allocations']} times while sampling"
        )
    return result


@dataclass
class _Seen:
    """What one rank has of one round: its samples, which are void as a whole if one of them was dropped."""

    round: Round
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    failed: str = ""
    elapsed: float = 0.0


def _one_round(
    workload: Workload,
    order: list[str],
    result: Measured,
    clock: Callable[[], float],
    began: float,
    alive: Callable[[], None],
    group: Group,
) -> list[_Seen]:
    """One round as every rank saw it.

    A process alone ends it at the first check that fails; in a group the others wait in the next sample.
    alive: called after every sample.
    """
    mine = _Seen(Round(order=list(order), arms={}, start=round(clock() - began, 6)))
    for arm in order:
        sample = workload.sample(arm)
        alive()
        if sample.failed is not None:
            mine.failed = mine.failed or sample.failed
            if group.size == 1:
                break
        if sample.dropped is not None:
            mine.dropped.append(sample.dropped)
            continue
        mine.round.arms[arm] = round(sample.ms, 6)
        mine.round.host[arm] = round(sample.host_ms, 6)
        mine.round.spans.update({name: round(ms, 6) for name, ms in sample.spans.items()})
        mine.windows[arm] = sample.window
        result.timed_s += sample.ms * 1e-3
    mine.elapsed = clock() - began
    return group.share(mine)


def _failed(group: Group, found: list[str]) -> str:
    """The first of what the ranks found wrong, with its rank where there are several; empty where all is well."""
    for rank, failed in enumerate(found):
        if failed:
            return f"check failed: rank {rank}: {failed}" if group.size > 1 else f"check failed: {failed}"
    return ""


def _take(result: Measured, by_rank: list[_Seen], mine: _Seen) -> None:
    result.by_rank = result.by_rank or [[] for _ in by_rank]
    for rounds, seen in zip(result.by_rank, by_rank, strict=True):
        rounds.append(seen.round)
    for arm, window in mine.windows.items():
        result.windows.setdefault(arm, []).append(window)


def _counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count} times" for reason, count in dropped.items())


@contextmanager
def _quiet_host(result: Measured) -> Iterator[None]:
    """No garbage collection while sampling; what else disturbed the host is counted in `result.checks`."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    switches, steal = _involuntary_switches(), _steal_seconds()
    began = time.monotonic()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        seconds = time.monotonic() - began
        result.checks["involuntary_switches"] = _involuntary_switches() - switches
        after = _steal_seconds()
        if steal is not None and after is not None and seconds > 0:
            result.checks["steal_fraction"] = round((after - steal) / (seconds * (os.cpu_count() or 1)), 4)


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _steal_seconds() -> float | None:
    """Time another guest had this machine's cores, all cores together; None where the kernel does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
