"""Rounds of samples: every arm once a round, in balanced order, until the headline is known well enough."""

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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
    """What `measure` brings back. `failed` is the first thing a check found wrong; the case is then invalid."""

    rounds: list[Round] = field(default_factory=list)
    windows: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    stop: str = ""
    failed: str = ""
    wall_s: float = 0.0
    timed_s: float = 0.0
    checks: dict[str, float | int | None] = field(default_factory=dict)


def measure(
    workload: Workload,
    rule: StopRule,
    *,
    allocations: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    on_round: Callable[[int], None] = lambda rounds: None,
) -> Measured:
    """Sample `workload` round by round until `rule` says stop, a check fails, or most rounds are void.

    A round in which one sample is void (a leaked gate) is left out whole, so that the arms stay balanced.

    Args:
        allocations: how often device memory was taken so far; sampling must not change it.
        clock: monotonic seconds.
        on_round: called with the rounds so far after every one, a void one included, as a sign of life, and after a
            sample or the warm-up where SIGN_S have gone by since.
    """
    result = Measured()
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
        failed = workload.warm_up()
        alive()
        if failed is not None:
            result.failed = f"check failed: {failed}"
        else:
            _one_round(workload, orders[0], Measured(), clock, began, result, alive)
            sign()
        taken = allocations()
        began = clock()
        attempts = 0
        while not result.failed and not result.stop:
            order = orders[attempts % len(orders)]
            done = _one_round(workload, order, result, clock, began, result, alive)
            attempts += 1
            elapsed = clock() - began
            if done:
                result.stop = rule.decide([r.arms[HEADLINE] for r in result.rounds], elapsed) or ""
            voids = attempts - len(result.rounds)
            enough = voids > MAX_VOID or elapsed >= rule.limit_s
            if not result.failed and enough and voids > MAX_VOID_SHARE * attempts:
                result.failed = f"{voids} of {attempts} rounds are void: " + _counts(result.dropped)
            sign()
        result.wall_s = clock() - began
        result.checks["driver_allocations"] = allocations() - taken
    if not result.failed and result.checks["driver_allocations"]:
        result.failed = (
            f"device memory was allocated {result.checks['driver_allocations']} times while sampling"
        )
    return result


def _one_round(
    workload: Workload,
    order: list[str],
    into: Measured,
    clock: Callable[[], float],
    began: float,
    verdict: Measured,
    alive: Callable[[], None],
) -> bool | None:
    """Add one round to `into`; False if it is void, None if a check failed (then `verdict.failed` says what).

    alive: called after every sample.
    """
    this = Round(order=list(order), arms={}, start=round(clock() - began, 6))
    windows: dict[str, tuple[float, float]] = {}
    void = False
    for arm in order:
        sample = workload.sample(arm)
        alive()
        if sample.failed is not None:
            verdict.failed = f"check failed: {sample.failed}"
            return None
        if sample.dropped is not None:
            into.dropped[sample.dropped] = into.dropped.get(sample.dropped, 0) + 1
            void = True
            continue
        this.arms[arm] = round(sample.ms, 6)
        this.host[arm] = round(sample.host_ms, 6)
        this.spans.update({name: round(ms, 6) for name, ms in sample.spans.items()})
        windows[arm] = sample.window
        into.timed_s += sample.ms * 1e-3
    if void:
        return False
    into.rounds.append(this)
    for arm, window in windows.items():
        into.windows.setdefault(arm, []).append(window)
    return True


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
