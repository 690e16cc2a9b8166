"""Whether a sample has one mode or two: pinned copies alternate between 4.86 and 5.05 ms on an H200."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# sqrt(n) * dip above this is not one mode. Uniform samples, the hardest unimodal case, pass it in 3 to 7 of
# 100; normal, skewed t(5) and AR(1) ones with rho up to 0.7 in at most 1 of 100, for n from 20 to 320.
DIP_LIMIT = 0.5
# Modes closer than this share of the median are not worth a word: the stop rule's target is 1 %.
MODE_GAP = 0.005


@dataclass(frozen=True)
class Modes:
    """Two times that a sample alternates between, as medians, and the share of samples at the upper one."""

    low: float
    high: float
    upper_share: float


def modes(samples: ArrayLike) -> Modes | None:
    """The two modes of a sample by Hartigan's dip test; None for one mode, or for modes within MODE_GAP.

    No shape is assumed, so a skewed or heavy-tailed sample is one mode. Two equally frequent modes 6 standard
    deviations apart are found in 99 of 100 series of 80 samples; a mode that holds a tenth of them is missed.
    """
    x = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(x)
    if n < 4 or math.sqrt(n) * dip(x) <= DIP_LIMIT:
        return None
    # The split into two groups with the least sum of squares, from running sums.
    size = np.arange(1, n)
    total, running = x.sum(), x.cumsum()[:-1]
    between = running**2 / size + (total - running) ** 2 / (n - size)
    cut = int(np.argmax(between)) + 1
    low, high = float(np.median(x[:cut])), float(np.median(x[cut:]))
    if high - low < MODE_GAP * abs(float(np.median(x))):
        return None
    return Modes(low=low, high=high, upper_share=(n - cut) / n)


def dip(samples: ArrayLike) -> float:
    """Hartigan's dip: the least distance between the empirical distribution and any unimodal one.

    Hartigan & Hartigan, The dip test of unimodality, Ann. Statist. 13 (1985): shrink an interval that holds
    the mode; left of it the fit is the greatest convex minorant, right of it the least concave majorant.
    """
    x, counts = np.unique(np.asarray(samples, dtype=np.float64), return_counts=True)
    n = int(counts.sum())
    upper = counts.cumsum() / n
    lower = upper - counts / n
    width = 1 / n
    while True:
        convex, concave = _hull(x, lower, 1), _hull(x, upper, -1)
        below, above = np.interp(x, x[convex], lower[convex]), np.interp(x, x[concave], upper[concave])
        gap = above - below
        first = convex[int(np.argmax(gap[convex]))]
        last = concave[len(concave) - 1 - int(np.argmax(gap[concave][::-1]))]
        if gap[last] > gap[first]:
            widest, first = gap[last], convex[convex <= last][-1]
        else:
            widest, last = gap[first], concave[concave >= first][0]
        if widest <= width:
            return float(width / 2)
        left = (upper[:first] - below[:first]).max(initial=0.0)
        right = (above[last + 1 :] - lower[last + 1 :]).max(initial=0.0)
        width = max(width, left, right)
        if first == 0 and last == len(x) - 1:
            return float(width / 2)
        x, lower, upper = x[first : last + 1], lower[first : last + 1], upper[first : last + 1]


def _hull(x: Array, y: Array, sign: int) -> NDArray[np.intp]:
    """Indices of the lower (sign 1) or upper (-1) hull of points sorted by x."""
    kept: list[int] = []
    for at in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2:]
            if sign * ((y[b] - y[a]) * (x[at] - x[b]) - (y[at] - y[b]) * (x[b] - x[a])) < 0:
                break
            kept.pop()
        kept.append(at)
    return np.array(kept)
