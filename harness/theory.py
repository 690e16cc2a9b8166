"""What overlap should cost: the arithmetic of chunked copy and compute (theory.md sections 1 and 9).

Every formula is a prediction to set beside a measurement, never in place of one. Times are ms, or any one
unit throughout; `n` counts chunks; `o` is the fixed cost of a chunk in each stage. Functions of measured arms
take floats or arrays of equal shape.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", float, NDArray[np.float64])

FIT_CHUNKS = (1, 4, 16)
MAX_CHUNKS = 64


def serial(c: float, k: float, n: int = 1, o: float = 0.0) -> float:
    """C + K + 2no: the same work in sequence, in `n` chunks (theory.md 1)."""
    return c + k + 2 * n * o


def two_stage(c: float, k: float, n: int, o: float) -> float:
    """T(n) = M + m/n + (n+1)o with M = max(C, K), m = min(C, K): a copy and a compute stage (theory.md 1)."""
    return max(c, k) + min(c, k) / n + (n + 1) * o


def best_chunks(c: float, k: float, o: float) -> float:
    """n* = sqrt(m/o), where T(n) is least; infinite where a chunk costs nothing (theory.md 1)."""
    return math.sqrt(min(c, k) / o) if o > 0 else math.inf


def best_whole_chunks(c: float, k: float, o: float, limit: int = MAX_CHUNKS) -> int:
    """The whole n <= `limit` where T(n) is least: one more chunk while n(n+1) < m/o (theory.md 1)."""
    n = 1
    while n < limit and n * (n + 1) * o < min(c, k):
        n += 1
    return n


def best_time(c: float, k: float, o: float) -> float:
    """T* = M + 2 sqrt(mo) + o, the value of T at n* (theory.md 1); no whole n does better."""
    return max(c, k) + 2 * math.sqrt(min(c, k) * o) + o


def piece_model(transfer: T, compute: T, n: int) -> T:
    """c + k + (n-1)*max(c, k), c and k one of n pieces of the split arms: no fit (measurement.md h2d)."""
    c, k = transfer / n, compute / n
    longer: T = np.maximum(c, k)
    return c + k + (n - 1) * longer


def bound(transfer_1: T, compute_1: T) -> T:
    """max(T1, K1): the limit of any overlap, from the unsplit solo arms (design.md, bound_ratio)."""
    longer: T = np.maximum(transfer_1, compute_1)
    return longer


def exposed(compute: T, overlapped: T) -> T:
    """To - Tk: what the copy adds to the compute; negative if the overlapped run was faster (theory.md 9)."""
    return overlapped - compute


def exposed_fraction(transfer: T, compute: T, overlapped: T) -> T:
    """(To - Tk) / Ta: 0 hidden, 1 nothing hidden, > 1 overlap lost time; never clamped (theory.md 9)."""
    return (overlapped - compute) / transfer


def hidden_fraction(transfer: T, compute: T, overlapped: T) -> T:
    """(Ta + Tk - To) / min(Ta, Tk): 1 hidden, negative if overlap lost time; never clamped (theory.md 9)."""
    shorter: T = np.minimum(transfer, compute)
    return (transfer + compute - overlapped) / shorter


@dataclass(frozen=True)
class Curve:
    """A fitted T(n) of one batch: C1 and K1 of a batch and o of a chunk, in the unit of the points.

    repeats: batches in a row, measured as one pipeline of n*repeats pieces. R batches take
    R*M + R*m/(n*R) + (n*R + 1)*o, so one takes M + m/(n*R) + (n*R + 1)*o/R.
    """

    c: float
    k: float
    o: float
    repeats: int = 1

    def predict(self, n: int) -> float:
        return two_stage(self.c, self.k, n * self.repeats, self.o / self.repeats)

    @property
    def n_star(self) -> float:
        """The best number of chunks of a batch; infinite where a chunk costs nothing."""
        return best_chunks(self.c, self.k, self.o / self.repeats) / self.repeats


def fit_curve(points: Mapping[int, float], c1: float, k1: float, repeats: int = 1) -> Curve:
    """C1, K1 and o of T(n) fitted on the points of FIT_CHUNKS alone (measurement.md h2d (b)).

    points: overlapped time of one batch by number of chunks; the ones outside FIT_CHUNKS are left for testing. T(n) is
    linear in M, m and o, so three points fix all three without a start; least squares of the relative error
    holds M >= m >= 0 and o >= 0 where noise would break them. A curve cannot tell which leg is the longer
    one: the measured solo times `c1` and `k1` do. repeats: batches in a row that the time was shared by, see
    Curve. Raises ValueError where a fit point is missing or not positive.
    """
    from scipy.optimize import nnls  # half a second to import, and a reader of records fits nothing

    missing = [n for n in FIT_CHUNKS if not points.get(n, 0.0) > 0]
    if missing:
        raise ValueError(f"curve: no positive time at n = {', '.join(map(str, missing))}")
    # T = (M - m) + m(1 + 1/nR) + o(nR + 1)/R: non-negative unknowns are just the constraints.
    pieces = [n * repeats for n in FIT_CHUNKS]
    rows = np.array([[1.0, 1 + 1 / n, (n + 1) / repeats] for n in pieces])
    times = np.array([points[n] for n in FIT_CHUNKS])
    (excess, shorter, o), _ = nnls(rows / times[:, None], np.ones(len(times)))
    longer = excess + shorter
    c, k = (longer, shorter) if c1 >= k1 else (shorter, longer)
    return Curve(c=float(c), k=float(k), o=float(o), repeats=repeats)
