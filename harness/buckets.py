"""What gradient buckets and tokens per GPU should cost: the arithmetic of theory.md sections 3 and 4.

Every formula is a prediction to set beside a measurement, never in place of one. Times are ms and sizes bytes;
bandwidths are bus bandwidths in GB/s (10^9 bytes), rates FLOP/s. G: bytes of all gradients, b: buckets, N: ranks,
B: time of the backward that makes the gradients. One bucket's all-reduce takes alpha + beta * its bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20

# PyTorch's own (theory.md 3).
DEFAULT_CAP, DEFAULT_FIRST = 25 * MIB, MIB


@dataclass(frozen=True)
class Schedule:
    """When a step's collectives end, ms.

    end: end of the step. tail: end of the last collective after its bucket was ready. exposed: end of the step
    after the compute alone. since: the bucket from which on the link was never idle; the last one where only it
    lies bare.
    """

    end: float
    tail: float
    exposed: float
    since: int


def schedule(ready_ms: Sequence[float], alone_ms: Sequence[float], compute_ms: float) -> Schedule:
    """Collectives in order, one at a time, none before its bucket is ready: finish_i = max(ready_i, finish_{i-1}) +
    a_i; the step ends with the later of the compute and the last of them (theory.md 3, for unequal buckets).

    ready_ms: (buckets,) when each bucket is ready; alone_ms: (buckets,) what its collective takes; from the start of
    the step. ValueError where there is no bucket, or the two differ in length.
    """
    if not ready_ms or len(ready_ms) != len(alone_ms):
        raise ValueError(f"schedule: got {len(ready_ms)} ready times of {len(alone_ms)} buckets")
    finish, since = -math.inf, 0
    for at, (ready, cost) in enumerate(zip(ready_ms, alone_ms, strict=True)):
        if ready >= finish:
            finish, since = ready, at
        finish += cost
    end = max(compute_ms, finish)
    return Schedule(end=end, tail=finish - ready_ms[-1], exposed=end - compute_ms, since=since)


def scale_for_share(ready_ms: Sequence[float], alone_ms: Sequence[float], share: float) -> float:
    """The least x for which the tail of `schedule`, with every ready time x times as late, is no more than `share` of
    all collectives' time; infinite where the last bucket alone is more than that.

    Exact: a collective that follows bucket j without a pause ends S_j = sum of a_j and after it; so the tail is the
    largest S_j - x (ready_last - ready_j), and each of these falls with x (theory.md 3 and 4).
    """
    schedule(ready_ms, alone_ms, 0.0)
    allowed = share * math.fsum(alone_ms)
    behind, needed = 0.0, 0.0
    for ready, cost in zip(reversed(ready_ms), reversed(alone_ms), strict=True):
        behind += cost
        room = ready_ms[-1] - ready
        if behind > allowed:
            needed = max(needed, (behind - allowed) / room if room > 0 else math.inf)
    return needed


def cost(size: float, alpha: float, beta: float) -> float:
    """a = alpha + beta * size, one bucket's all-reduce (theory.md 3, with size = G/b)."""
    return alpha + beta * size


def step(backward: float, total: float, count: float, alpha: float, beta: float) -> float:
    """T = B/b + a + (b-1) max(B/b, a) for b equal buckets, with a = alpha + G beta / b (theory.md 3)."""
    piece, a = backward / count, cost(total / count, alpha, beta)
    return piece + a + (count - 1) * max(piece, a)


def best_count(backward: float, total: float, alpha: float, beta: float) -> float:
    """b* = max((B - G beta)/alpha, sqrt(B/alpha)), at least 1: where `step` is least, in every regime (theory.md 3);
    infinite where a bucket costs nothing by itself."""
    if alpha <= 0:
        return math.inf
    return max(1.0, (backward - total * beta) / alpha, math.sqrt(backward / alpha))


def best_whole_count(backward: float, total: float, alpha: float, beta: float, limit: int = 1 << 20) -> int:
    """The whole number of buckets, no more than `limit`, where `step` is least; the fewer of two that are as good.

    `step` falls up to b* and rises after it, so it is a neighbour of b*.
    """
    best = min(best_count(backward, total, alpha, beta), float(limit))
    return min(
        {math.floor(best), min(math.ceil(best), limit)},
        key=lambda count: (step(backward, total, count, alpha, beta), count),
    )


def fit(sizes: Sequence[float], times_ms: Sequence[float]) -> tuple[float, float]:
    """(alpha ms, beta ms per byte) by least squares of the relative error of alpha + beta * size, neither negative.

    ValueError where fewer than two sizes differ, since one cannot tell latency from bandwidth, or a time or size is not
    positive.
    """
    if len(sizes) != len(times_ms):
        raise ValueError(f"fit: got {len(times_ms)} times of {len(sizes)} sizes")
    if not all(0 < value < math.inf for value in (*sizes, *times_ms)):
        raise ValueError("fit: want sizes and times that are positive")
    if len(set(sizes)) < 2:
        raise ValueError("fit: want two sizes or more that differ")
    # In units of the mean size both unknowns are times, and the equations are well scaled.
    unit = math.fsum(sizes) / len(sizes)
    rows = [(1 / ms, size / unit / ms) for size, ms in zip(sizes, times_ms, strict=True)]
    uu, uv, vv = (math.fsum(a[i] * a[j] for a in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)
    determinant = uu * vv - uv * uv
    if determinant <= 1e-12 * uu * vv:
        raise ValueError("fit: want two sizes or more that differ")
    alpha, beta = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    # The error is convex: where one is negative, the best of those allowed has it at 0. So small a share of every time
    # is what rounding leaves.
    if alpha < 1e-9 * min(times_ms):
        alpha, beta = 0.0, v / vv
    elif beta * min(sizes) / unit < 1e-9 * min(times_ms):
        alpha, beta = u / uu, 0.0
    return alpha, beta / unit


def bus_bandwidth(size: float, ms: float, ranks: int) -> float:
    """busbw = 2 (N-1)/N * bytes / time of an all-reduce, GB/s (theory.md 3; nccl-tests' definition): what every rank's
    link carries, whatever the algorithm. 0 for one rank, which moves nothing."""
    return wire(ranks) * size / ms / 1e6


def beta_of(bandwidth: float, ranks: int) -> float:
    """beta = 2(N-1)/(N busbw) of theory.md 3, in ms per byte."""
    return wire(ranks) / bandwidth / 1e6


def wire(ranks: int) -> float:
    """2r, r = (N-1)/N: bytes on a link for each byte of an all-reduce (theory.md 4)."""
    return 2 * (ranks - 1) / ranks


def tokens_threshold(moved: float, work: float, ranks: int, rate: float, bandwidth: float) -> float:
    """Tokens per GPU from which on the compute is as long as the communication: T = (moved/work) r F u / W (theory.md
    4), where p cancels.

    moved: bytes through an all-gather or reduce-scatter for each parameter; an all-reduce counts as both. work: FLOP
    for each parameter and token of the compute that it can hide behind. rate: F u, FLOP/s reached. bandwidth: W, GB/s,
    at the size of the messages.
    """
    return moved / work * (ranks - 1) / ranks * rate / (bandwidth * 1e9)


def tokens_threshold_ddp(gradient: float, ranks: int, rate: float, bandwidth: float) -> float:
    """T >= (g/2) r F u / W: an all-reduce of g bytes behind the backward's 4 FLOP (theory.md 4)."""
    return tokens_threshold(2 * gradient, 4.0, ranks, rate, bandwidth)


def tokens_threshold_fsdp_forward(ranks: int, rate: float, bandwidth: float) -> float:
    """T >= r F u / W: a gather of 2 bytes (bf16) behind the forward's 2 FLOP (theory.md 4)."""
    return tokens_threshold(2.0, 2.0, ranks, rate, bandwidth)


def tokens_threshold_fsdp_backward(
    gradient: float, ranks: int, rate: float, bandwidth: float, *, recompute: bool = False
) -> float:
    """T >= ((2+g)/4) r F u / W: a gather of 2 bytes and a reduce-scatter of g behind 4 FLOP, or behind 6 with full
    `recompute` (theory.md 4)."""
    return tokens_threshold(2 + gradient, 6.0 if recompute else 4.0, ranks, rate, bandwidth)
