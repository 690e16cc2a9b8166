"""What the launches of two commits say about a number, before any verdict: the shift, and how sure it is.

Everything is on a log scale: noise is a share of a time, and a ratio of times is a difference of logs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.spreads import Spread, learn
from harness.statistics import Array

Design = Literal["interleaved", "nights"]

BUDGET = 0.02
# What a spread is measured by. The launches of a case vary by 0.05 to 27 % on an H200, but in all of them by about
# twice the error of their rounds.
RULERS = ("history", "rounds", "none")
LEAST = 1e-4
# A mean over launches has lost the tails that a launch may have; the one difference of two nights has not.
NIGHT_TAILS = 5.0
# A gap of so many residual standard deviations parts launches into two groups.
PARTED = 20.0
# A launch whose rounds scatter by so many times the median of its side's was disturbed from outside. Seen in 2 % of
# the launches of budgeted cases on an H200 that others use as well (results/records/h200-1, commit aa141224): they lie
# up to 4 % from the rest, by twice their own error, and one of them hides what the others agree on.
DISTURBED = 4.0
# Launches of a side that are always compared: fewer say nothing of how much launches vary.
LEAST_LAUNCHES = 3


@dataclass(frozen=True, kw_only=True)
class History:
    """How unchanged code varied, as relative standard deviations: a launch within its night, and a night.

    freedom: degrees of freedom of `night`.
    """

    launch: float
    night: float
    freedom: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One quantity of one case, measured twice: a positive number per launch, in any unit.

    base_errors, head_errors: the relative standard error of each launch by its own rounds (see `launch_error`), or
    empty. budget: the relative loss that may not pass; an effect below half of it is never called. population: pairs
    of one vary alike for all that is known beforehand, so what is seen of some tells of the others. Pairs of another,
    such as pageable copies, which are known to alternate, tell nothing of these.
    """

    case: str
    quantity: str
    base: Sequence[float]
    head: Sequence[float]
    base_errors: Sequence[float] = ()
    head_errors: Sequence[float] = ()
    history: History | None = None
    budget: float = BUDGET
    population: str = ""

    def __post_init__(self) -> None:
        sides = ("base", self.base, self.base_errors), ("head", self.head, self.head_errors)
        for side, launches, errors in sides:
            name = f"{self.case} {self.quantity}: {side}"
            if not len(launches) or not all(0 < number < math.inf for number in launches):
                raise ValueError(f"{name}: got {list(launches)}, want a positive number per launch")
            if len(errors) not in (0, len(launches)) or not all(0 <= error < math.inf for error in errors):
                raise ValueError(f"{name}: got the errors {list(errors)}, want one per launch or none")
        if not 0 < self.budget < math.inf:
            raise ValueError(f"{self.case} {self.quantity}: budget: got {self.budget}, want a share above 0")


def launch_error(rounds: ArrayLike) -> Array:
    """(...,) the relative standard error of a launch's median by its own rounds, (rounds, ...) in the order taken.

    Half the distance between the order statistics one standard deviation of rank from the middle, which assumes no
    shape: rounds that alternate between two times in equal parts are as uncertain as the times are apart. Neighbours
    that resemble each other (lag-1 autocorrelation r) count as (1 - r)/(1 + r) of their number.
    """
    x = np.asarray(rounds, dtype=np.float64)
    r = _resemblance(x)
    ordered, last = np.sort(x, axis=0), len(x) - 1
    reach = np.sqrt(len(x) * (1 + r) / (1 - r)) / 2

    def at(place: Array) -> Array:
        below = np.floor(place).astype(np.intp)
        low, high = (
            np.take_along_axis(ordered, np.minimum(rank, last)[None], axis=0)[0]
            for rank in (below, below + 1)
        )
        return np.asarray(low + (place - below) * (high - low))

    low, high = (at(np.clip(last / 2 + side * reach, 0, last)) for side in (-1, 1))
    return (high - low) / 2 / at(np.full_like(reach, last / 2))


def mean_error(rounds: ArrayLike) -> Array:
    """(...,) as `launch_error`, of a launch's mean: where few rounds take long, a median is sure and a mean is not."""
    x = np.asarray(rounds, dtype=np.float64)
    if len(x) < 2:
        return np.zeros(x.shape[1:])
    r = _resemblance(x)
    return np.asarray(x.std(axis=0, ddof=1) * np.sqrt((1 + r) / (1 - r) / len(x)) / x.mean(axis=0))


def _resemblance(x: Array) -> Array:
    """(...,) lag-1 autocorrelation of rounds, from 0 to 0.9."""
    off = x - x.mean(axis=0)
    power = (off**2).sum(axis=0)
    if len(x) <= 2:
        return np.zeros_like(power)
    return np.asarray(np.clip((off[:-1] * off[1:]).sum(axis=0) / np.where(power > 0, power, 1.0), 0.0, 0.9))


def steady(errors: ArrayLike) -> NDArray[np.bool_]:
    """(launches,) which launches of a side to compare, by the errors of their rounds: all but one that was disturbed.

    Where two of a side scatter, it may be the code that does, and where fewer than LEAST_LAUNCHES were left, nobody
    could tell: all are compared then. The choice sees no time, so it favours no side.
    """
    found = np.asarray(errors, dtype=np.float64)
    kept = np.less_equal(found, DISTURBED * np.median(found)) if len(found) else found >= 0
    return kept if kept.sum() >= max(LEAST_LAUNCHES, len(found) - 1) else np.ones_like(kept)


def history(nights: Sequence[ArrayLike]) -> History:
    """From the launches of three or more nights in a row, in order, between two changes of the code.

    A night is compared with the next, and not with the mean of all, so that a slow drift is no noise. The variance of
    n nights that vary as t(5) does, taken that way, is worth (n - 1)/3 degrees of freedom. Raises ValueError for
    fewer than three nights.
    """
    logs = [np.log(np.asarray(night, dtype=np.float64)) for night in nights]
    if len(logs) < 3:
        raise ValueError(f"history: got {len(logs)} nights, want three or more")
    freedom = sum(len(night) - 1 for night in logs)
    launch = sum(float(((night - night.mean()) ** 2).sum()) for night in logs) / max(1, freedom)
    means = np.array([night.mean() for night in logs])
    between = float((np.diff(means) ** 2).mean()) / 2
    inside = launch * float(np.mean([1 / len(night) for night in logs]))
    return History(
        launch=math.sqrt(launch), night=math.sqrt(max(0.0, between - inside)), freedom=(len(logs) - 1) / 3
    )


@dataclass(frozen=True)
class Evidence:
    """The tests of a comparison as arrays, (tests,) each.

    shift: log of head over base. unit: the standard deviation of a shift in those of a launch. variance: of a launch,
    estimated with `freedom`. floor: a standard deviation it cannot have less than. scale: the standard deviation that
    it is measured by, and ruler, an index of RULERS, where that is from. owner and population: the case and the
    population, as numbers. launches: of both sides. minimum: the least shift that is called. gap: see `_gap`.
    """

    design: Design
    shift: Array
    unit: Array
    variance: Array
    freedom: Array
    floor: Array
    scale: Array
    ruler: NDArray[np.intp]
    owner: NDArray[np.intp]
    population: NDArray[np.intp]
    launches: NDArray[np.intp]
    minimum: Array
    gap: Array

    @classmethod
    def of(cls, pairs: Sequence[Pair], design: Design) -> Evidence:
        """Raises ValueError for nights of which a pair has no history."""
        owner, population = (
            _numbered([getattr(pair, field) for pair in pairs]) for field in ("case", "population")
        )
        rows = [_interleaved(pair) if design == "interleaved" else _nights(pair) for pair in pairs]
        shift, unit, variance, freedom, floor, gap = np.array(rows, dtype=np.float64).T
        scale, ruler = zip(
            *(_scale(pair, error) for pair, error in zip(pairs, floor, strict=True)), strict=True
        )
        return cls(
            design=design,
            shift=shift,
            unit=unit,
            variance=variance,
            freedom=freedom,
            floor=floor,
            scale=np.array(scale),
            ruler=np.array([RULERS.index(name) for name in ruler]),
            gap=gap,
            owner=owner,
            population=population,
            launches=np.array([len(pair.base) + len(pair.head) for pair in pairs]),
            minimum=np.log1p([pair.budget / 2 for pair in pairs]),
        )

    @cached_property
    def spread(self) -> Spread:
        """Of a launch in every test, as shares of its scale: so measured, noisy cases and quiet ones are alike."""
        kinds = np.unique([self.ruler, self.population], axis=1, return_inverse=True)[1]
        parts = [np.flatnonzero(kinds == kind) for kind in range(kinds.max() + 1)]
        sigma, weight = [], []
        for part in parts:
            scale = self.scale[part] / np.exp(np.log(self.scale[part]).mean())
            owner = np.unique(self.owner[part], return_inverse=True)[1]
            found = learn(self.variance[part] / scale**2, self.freedom[part], self.floor[part] / scale, owner)
            sigma.append(found.sigma * scale[:, None])
            weight.append(found.weight)
        order = np.argsort(np.concatenate(parts))
        tails = NIGHT_TAILS if self.design == "nights" else math.inf
        return Spread(np.concatenate(sigma)[order], np.concatenate(weight)[order], tails)

    def least(self, launches: NDArray[np.intp], level: float) -> Array:
        """The least shift that may be called, whatever its spread: the minimum, or what alternation could do.

        Launches that are each at one of two times put all of base at the lower and all of head at the upper one with
        chance 2^-launches, and show no spread then. Such cases are known by the others of their population: where
        more of these alternate than `level` allows for, no shift within twice the gap of the next is called. Nobody
        knows of the only one there is, and 3 against 3 of its launches look slower in 1 of 64 comparisons: a history
        or a second stage tells.
        """
        least = self.minimum.copy()
        if self.gap.any():
            for owner, population in np.unique([self.owner, self.population], axis=1).T:
                alike = self.population == population
                gaps = np.sort(self.gap[alike & (self.owner != owner)])[::-1]
                mine = np.flatnonzero(alike & (self.owner == owner))
                allowed = np.minimum(level * 2.0 ** launches[mine], len(gaps)).astype(np.intp)
                least[mine] = np.maximum(least[mine], 2 * np.append(gaps, 0.0)[allowed])
        return least


def _numbered(names: Sequence[str]) -> NDArray[np.intp]:
    """Each name as a number, in order of appearance."""
    numbers = {name: at for at, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names])


def _interleaved(pair: Pair) -> tuple[float, ...]:
    base, head, shift, unit, within = _sides(pair)
    freedom = len(base) + len(head) - 2
    variance = _squares(base, head) / max(1, freedom)
    return shift, unit, variance, freedom, within / unit, _gap(base, head)


def _nights(pair: Pair) -> tuple[float, ...]:
    """As one launch a side, of the variance of a night's mean. A noisier night than history's counts as it is."""
    base, head, shift, unit, within = _sides(pair)
    if pair.history is None:
        raise ValueError(f"{pair.case} {pair.quantity}: no history, which nights are compared by")
    past, freedom = pair.history, len(base) + len(head) - 2
    tonight = _squares(base, head) / max(1, freedom)
    variance = 2 * past.night**2 + max(past.launch**2, tonight) * unit**2
    return shift, 1.0, variance, past.freedom, within, 0.0


def _scale(pair: Pair, floor: float) -> tuple[float, str]:
    """What a launch of this pair should vary by: as it did, or in proportion to its rounds."""
    if pair.history is not None:
        return max(pair.history.launch, LEAST), "history"
    if len(pair.base_errors) and len(pair.head_errors):
        return max(floor, LEAST), "rounds"
    return 1.0, "none"


def _sides(pair: Pair) -> tuple[Array, Array, float, float, float]:
    """Logs of both sides; the shift; its standard deviation in those of a launch; its error by the rounds alone."""
    base, head = np.log(np.asarray(pair.base, float)), np.log(np.asarray(pair.head, float))
    errors = (error / len(side) for side in (pair.base_errors, pair.head_errors) for error in side)
    unit = math.sqrt(1 / len(base) + 1 / len(head))
    return base, head, float(head.mean() - base.mean()), unit, math.hypot(*errors)


def _squares(base: Array, head: Array) -> float:
    return float(((base - base.mean()) ** 2).sum() + ((head - head.mean()) ** 2).sum())


def _gap(base: Array, head: Array) -> float:
    """How far apart two groups of launches lie that one side has both of; 0 where there are no two such groups."""
    x = np.concatenate([base, head])
    order = np.argsort(x)
    steps = np.diff(x[order])
    if len(x) < 5:
        return 0.0
    cut = int(np.argmax(steps[1:-1])) + 2
    low, high = x[order[:cut]], x[order[cut:]]
    rest = math.sqrt(_squares(low, high) / (len(x) - 2))
    if steps[cut - 1] <= PARTED * rest:
        return 0.0
    upper = np.isin(np.arange(len(x)), order[cut:])
    mixed = any(0 < side.sum() < len(side) for side in (upper[: len(base)], upper[len(base) :]))
    return float(high.mean() - low.mean()) if mixed else 0.0
