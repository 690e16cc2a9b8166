"""What the samples of one case say: intervals, when to stop, and reasons to doubt them.

Everything is seeded and deterministic. A sample is a 1-D float array in the order it was taken; samples of
one launch are dependent in time, so resampling keeps blocks of neighbours together (measurement.md rule 7).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Statistic = Callable[[Mapping[str, Array]], Array]

# Lag-1 autocorrelation up to 0.73 was seen; its memory is gone after ten samples.
BLOCK = 10
RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval, which is None where a single sample gives none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float:
        """The wider side of the interval, as people are shown it; infinite where there is none."""
        if self.low is None or self.high is None:
            return math.inf
        return max(self.high - self.value, self.value - self.low)


def block_bootstrap_indices(n: int, block: int, resamples: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """(resamples, n) indices of a circular moving-block bootstrap: runs of `block` neighbours.

    A sample shorter than two blocks gets blocks of half of it: one block of the whole would show no spread.
    """
    block = block_length(n, block)
    starts = rng.integers(0, n, size=(resamples, -(-n // block), 1))
    return ((starts + np.arange(block)) % n).reshape(resamples, -1)[:, :n]


def block_length(n: int, block: int = BLOCK) -> int:
    """The length of block really used for `n` samples."""
    return max(1, min(block, n // 2))


class Bootstrap:
    """Resampled rounds of one case, jointly over its arms; every statistic of it shares the same resamples.

    launches: for each launch the samples of its arms, equally long within a launch. A statistic is a function
    of arm medians (or another quantile, or for None the means) that works elementwise on arrays. Its value is
    the median over launches of its value per launch. Its interval resamples the launches, then blocks of
    rounds inside each.

    The plain percentile interval of so few blocks is too narrow: for 80 rounds of AR(1) noise with rho 0.7 it
    covers the truth in 85 of 100 series, not 95. So the percentiles are moved outwards as far as a t quantile
    for that many blocks asks (Hesterberg 2015, arXiv 1411.5279), and below four blocks the interval is
    stretched by 4/blocks about its value, since two blocks show half of the spread. Seen then, of 100 series,
    for rho 0 and rho 0.7: 93 and 89 at 20 rounds, 96 and 88 at 40, 97 and 91 at 80, 94 and 91 at 160 and 320.
    Launches that differ by more than their rounds vary are too few for any resampling: 2 of them covered in
    58 of 100, 3 in 78, 5 in 92.
    """

    def __init__(self, launches: Sequence[Mapping[str, ArrayLike]], *, seed: int = 0) -> None:
        if not launches:
            raise ValueError("bootstrap: got no launches, want one or more")
        self._launches = [
            {arm: np.asarray(samples, dtype=np.float64) for arm, samples in launch.items()}
            for launch in launches
        ]
        self._rounds = [_common_length(launch) for launch in self._launches]
        self._blocks = sum(n / block_length(n) for n in self._rounds)
        self._seed = seed
        self._memo: dict[tuple[str, float | None], Array] = {}

    def values(self, of: Statistic, arms: Sequence[str], quantile: float | None = 0.5) -> Array:
        """(launches,) the statistic in every launch."""
        found = {
            arm: np.array([_quantile(launch[arm], quantile) for launch in self._launches]) for arm in arms
        }
        return np.asarray(of(found), dtype=np.float64)

    def interval(self, of: Statistic, arms: Sequence[str], quantile: float | None = 0.5) -> Interval:
        """The statistic of those arms with its interval."""
        value = float(np.median(self.values(of, arms, quantile)))
        if sum(self._rounds) == 1:
            return Interval(value)
        resampled = np.median(of({arm: self._resampled(arm, quantile) for arm in arms}), axis=1)
        tail, stretch = _tail(self._blocks), max(1.0, 4 / self._blocks)
        low, high = (float(end) for end in np.quantile(resampled, (tail, 1 - tail)))
        low = value - stretch * max(0.0, value - low)
        high = value + stretch * max(0.0, high - value)
        return Interval(value, low, high)

    def _resampled(self, arm: str, quantile: float | None) -> Array:
        """(RESAMPLES, launches) quantiles, or means, of resampled rounds of resampled launches."""
        if (arm, quantile) not in self._memo:
            inside = np.stack(
                [
                    _quantile(launch[arm][self._indices[n]], quantile)
                    for launch, n in zip(self._launches, self._rounds, strict=True)
                ]
            )
            self._memo[arm, quantile] = inside[self._drawn]
        return self._memo[arm, quantile]

    @cached_property
    def _indices(self) -> dict[int, NDArray[np.intp]]:
        """By number of rounds: launches of equal length may share them, as `_drawn` mixes the resamples."""
        return {
            n: block_bootstrap_indices(n, BLOCK, RESAMPLES, np.random.default_rng(self._seed))
            for n in set(self._rounds)
        }

    @cached_property
    def _drawn(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(RESAMPLES, launches) each: which launch, and which of its resamples."""
        rng = np.random.default_rng([self._seed, len(self._launches), 1])
        shape = (RESAMPLES, len(self._launches))
        # A launch drawn twice brings a different resample of its rounds each time.
        return rng.integers(0, shape[1], shape), np.argsort(rng.random(shape), axis=0)


def interval(
    of: Statistic,
    launches: Sequence[Mapping[str, ArrayLike]],
    *,
    quantile: float | None = 0.5,
    seed: int = 0,
) -> Interval:
    """A function of arm medians (another `quantile`; None: means) with its 95 % interval, see Bootstrap.

    >>> interval(lambda t: t["both"] / t["alone"], [{"both": [4.0] * 20, "alone": [2.0] * 20}])
    Interval(value=2.0, low=2.0, high=2.0)
    """
    arms = sorted({arm for launch in launches for arm in launch})
    return Bootstrap(launches, seed=seed).interval(of, arms, quantile)


def _common_length(launch: Mapping[str, Array]) -> int:
    lengths = {len(samples) for samples in launch.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"bootstrap: arms have {sorted(lengths)} samples, want the same number, one or more")
    return lengths.pop()


@lru_cache
def _tail(blocks: float) -> float:
    """The percentile, as a share, that the lower end is taken at."""
    from scipy.special import stdtrit  # a third of a second to import, and readers of samples need none of it

    freedom = max(1.0, blocks - 1)
    reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(1 + 1 / freedom)
    return math.erfc(reach / math.sqrt(2)) / 2


def _quantile(samples: Array, quantile: float | None) -> Any:
    if quantile is None:
        return np.mean(samples, axis=-1)
    # np.median partitions, and is twice as fast as the general quantile.
    if quantile == 0.5:
        return np.median(samples, axis=-1)
    return np.quantile(samples, quantile, axis=-1)


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When a launch has enough rounds (measurement.md rule 7). Looks only at fixed rounds.

    target: the wider side of the headline's interval over its value, that of its `quantile` (None: of its mean).
    budget_s: asked at looks, and so never before the first. limit_s: asked at every round, for a case that would not
    reach its next look in time.
    """

    looks: tuple[int, ...] = (20, 40, 80)
    target: float = 0.01
    quantile: float | None = 0.5
    budget_s: float = math.inf
    limit_s: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            not self.looks
            or self.looks[0] < 1
            or any(a >= b for a, b in zip(self.looks, self.looks[1:], strict=False))
        ):
            raise ValueError(f"stop rule: looks: got {self.looks}, want rounds in rising order, from 1")
        self.settled((1.0, 1.0))  # imports what a look needs now, and not between two timed rounds

    def decide(self, samples: Sequence[float], elapsed_s: float) -> Literal["settled", "budget"] | None:
        """Why to stop after these samples of the headline; None to go on.

        Past `limit_s` a sample beyond the first look is still looked at, as time says nothing of its value.
        """
        rounds = len(samples)
        late = elapsed_s >= self.limit_s
        if rounds not in self.looks and rounds < self.looks[-1] and not late:
            return None
        if rounds >= self.looks[0] and self.settled(samples):
            return "settled"
        return "budget" if late or elapsed_s >= self.budget_s or rounds >= self.looks[-1] else None

    def settled(self, samples: Sequence[float]) -> bool:
        """Whether the interval is within the target."""
        launches = [{"headline": samples}]
        found = interval(lambda t: t["headline"], launches, quantile=self.quantile, seed=self.seed)
        return found.half_width <= self.target * abs(found.value)


def lag1(samples: ArrayLike) -> float:
    """Lag-1 autocorrelation; 0 for a constant sample and for fewer than three."""
    x = np.asarray(samples, dtype=np.float64)
    if len(x) < 3 or x.min() == x.max():
        return 0.0
    x = x - x.mean()
    return float(x[:-1] @ x[1:] / (x @ x))


def drift(samples: ArrayLike) -> float:
    """Median of the last third over that of the first, minus 1; 0 for fewer than six samples."""
    x = np.asarray(samples, dtype=np.float64)
    third = len(x) // 3
    return float(np.median(x[-third:]) / np.median(x[:third])) - 1 if third > 1 else 0.0


@dataclass(frozen=True)
class CarryOver:
    """The arm that depends most clearly on the arm before it.

    shift: its median after `after` over its median after the others, minus 1; the largest in size. p: of
    Kruskal-Wallis over the arms before it, times the number of arms tested (Bonferroni).
    """

    arm: str
    after: str
    shift: float
    p: float


def carry_over(orders: Sequence[Sequence[str]], samples: Mapping[str, ArrayLike]) -> CarryOver | None:
    """Whether an arm's samples depend on which arm ran before it in its round; None if nothing can be tested.

    orders: the arms of every round as run; samples: by arm, one per round. The first place of a round is left
    out, since a dropped round may lie before it. Arms need two different predecessors, three times each.
    """
    found = []
    for arm, taken in samples.items():
        before: dict[str, list[float]] = {}
        for order, sample in zip(orders, np.asarray(taken, dtype=np.float64), strict=True):
            place = list(order).index(arm)
            if place:
                before.setdefault(order[place - 1], []).append(float(sample))
        groups = {other: group for other, group in before.items() if len(group) >= 3}
        if len(groups) < 2 or len(set(itertools.chain(*groups.values()))) == 1:
            continue
        shifts = {other: _shift(other, groups) for other in groups}
        after = max(shifts, key=lambda other: abs(shifts[other]))
        found.append(CarryOver(arm, after, shifts[after], _kruskal(list(groups.values()))))
    if not found:
        return None
    worst = min(found, key=lambda each: each.p)
    return CarryOver(worst.arm, worst.after, worst.shift, min(1.0, worst.p * len(found)))


def _kruskal(groups: Sequence[Sequence[float]]) -> float:
    """p of the Kruskal-Wallis test, with its correction for ties: that all groups are drawn alike.

    As scipy.stats.kruskal, whose import takes a second of the cores that a run may be measuring on.
    """
    from scipy.special import chdtrc

    sizes = [len(group) for group in groups]
    _, inverse, counts = np.unique(np.concatenate(groups), return_inverse=True, return_counts=True)
    n = len(inverse)
    ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
    between = sum(part.sum() ** 2 / len(part) for part in np.split(ranks, np.cumsum(sizes)[:-1]))
    statistic = 12 / (n * (n + 1)) * between - 3 * (n + 1)
    ties = 1 - float((counts**3 - counts).sum()) / (n**3 - n)
    return float(chdtrc(len(groups) - 1, statistic / ties))


def _shift(other: str, groups: Mapping[str, list[float]]) -> float:
    rest = list(itertools.chain(*(group for name, group in groups.items() if name != other)))
    return float(np.median(groups[other]) / np.median(rest)) - 1


def balanced_orders(arms: Sequence[str]) -> list[list[str]]:
    """Orders of the arms balanced for place and for what ran before (Williams 1949).

    Every arm stands equally often in every place, and follows every other arm equally often: in k orders for
    an even number k of arms, in 2k for an odd one.
    """
    k = len(arms)
    zigzag = [(at + 1) // 2 if at % 2 else (k - at // 2) % k for at in range(k)]
    rows = [[(step + shift) % k for step in zigzag] for shift in range(k)]
    if k % 2 and k > 1:
        rows += [row[::-1] for row in rows]
    return [[arms[at] for at in row] for row in rows]
