"""How much a number varies from launch to launch, learnt from all tests of a comparison at once.

Three launches against three leave four degrees of freedom: too few to tell a small spread from a lucky one.
The other cases tell which spreads occur. The model: a test's variance v with f degrees of freedom is
sigma^2 chi^2_f / f, and sigma is drawn from an unknown distribution over the cases, which is fitted without any
assumed shape (nonparametric maximum likelihood, Kiefer & Wolfowitz 1956, by EM). A difference is then judged
by the normal tail averaged over the sigmas that its own v leaves possible. Such p-values hold on average over
the tests, fixed sigmas included (Ignatiadis & Sen, Empirical partially Bayes multiple testing and compound
chi^2 decisions, arXiv 2303.02887), and an average is all that a sum over tests, Bonferroni's bound, needs.

The moderated t of limma (Smyth 2004) is the same with one inverse chi^2 as the distribution. With one noisy
case (1 %) among 99 quiet ones (0.11 %) that shape shrinks the noisy one to the quiet ones, and 7 in 100
comparisons of unchanged code say "slower"; this one says so in 3 of 1,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.statistics import Array

# Spreads of a launch that are told apart, relative: 0.01 % to 100 %. A step is well below what v can resolve.
GRID: Array = np.exp(np.arange(np.log(1e-4), np.log(1.0) + 0.15, 0.15))
# Steps of EM from an even start. Stopped early it leaves the fit a little too wide, never too narrow.
STEPS = 100
# So many tests of any spread at all are added to those seen: what no other case shows is rare, not impossible.
# With nothing else seen (a comparison of one case) the p-value is that of the ordinary t test.
STRANGERS = 3.0


@dataclass(frozen=True)
class Spread:
    """What is known of a launch's standard deviation in every test: sigma and its weight, (tests, K) each.

    Distances are in units of one launch: a difference of means of b and h launches over sqrt(1/b + 1/h). tails: the
    noise of such a distance is normal, or Student's t of so many degrees of freedom with the same sigma.
    """

    sigma: Array
    weight: Array
    tails: float = math.inf

    def beyond(self, *distances: Array) -> Array:
        """(tests,) the chance that independent noises all reach their distances."""
        from scipy.special import ndtr, stdtr  # a third of a second to import

        chance = self.weight
        for distance in distances:
            far = -distance[:, None] / self.sigma
            if math.isinf(self.tails):
                chance = chance * ndtr(far)
            else:
                chance = chance * stdtr(self.tails, far * math.sqrt(self.tails / (self.tails - 2)))
        return np.asarray(chance.sum(axis=1))

    def reach(self, chance: float) -> Array:
        """(tests,) the distance that noise reaches with this chance, at most a half."""
        return solve(lambda distance: self.beyond(distance) <= chance, len(self.sigma))

    def given(self, variance: Array, freedom: Array, floor: Array) -> Spread:
        """The same after further launches; arguments as in `learn`."""
        weight = self.weight * _likelihood(self.sigma, variance, freedom, floor)
        return replace(self, weight=weight / weight.sum(axis=1, keepdims=True))

    def at(self, tests: NDArray[np.intp]) -> Spread:
        """The same of some of the tests."""
        return replace(self, sigma=self.sigma[tests], weight=self.weight[tests])


def learn(variance: Array, freedom: Array, floor: Array, owner: NDArray[np.intp]) -> Spread:
    """What every test's own variance and all other cases say of its spread.

    variance: (tests,) estimates of one launch's variance, in squares of the relative difference. freedom:
    their degrees of freedom. floor: (tests,) a standard deviation that sigma cannot lie below. owner: the case
    of each test; the tests of a case tell nothing of its own spread to each other, so that a lone noisy case
    is not taken for proof that there are many, nor a lone test for a population.
    """
    sigma = np.broadcast_to(GRID, (len(variance), len(GRID)))
    likelihood = _likelihood(sigma, variance, freedom, floor)
    shares = np.full(len(GRID), 1 / len(GRID))
    for _ in range(STEPS):
        shares = shares * (likelihood.T @ (1 / (likelihood @ shares))) / len(likelihood)
    seen = likelihood * shares
    seen /= seen.sum(axis=1, keepdims=True)
    own = np.zeros((owner.max() + 1, len(GRID)))
    np.add.at(own, owner, seen)
    others = np.maximum(seen.sum(axis=0) - own[owner], 0.0)
    weight = likelihood * (others + STRANGERS / len(GRID))
    return Spread(sigma, weight / weight.sum(axis=1, keepdims=True))


def _likelihood(sigma: Array, variance: Array, freedom: Array, floor: Array) -> Array:
    """(tests, K) of each sigma, the largest of a test 1."""
    log = -freedom[:, None] * (np.log(sigma) + variance[:, None] / (2 * sigma**2))
    # The widest is always possible.
    log = np.where(sigma < np.minimum(floor[:, None], sigma[:, -1:]), -np.inf, log)
    return np.asarray(np.exp(log - log.max(axis=1, keepdims=True)))


def solve(reached: Callable[[Array], NDArray[np.bool_]], tests: int) -> Array:
    """(tests,) the least distance at which `reached`, false below it and true above, within 0.1 %."""
    low, high = np.full(tests, GRID[0] / 10), np.full(tests, GRID[-1] * 40)
    for _ in range(16):
        middle = np.sqrt(low * high)
        there = reached(middle)
        low, high = np.where(there, low, middle), np.where(there, middle, high)
    return high
