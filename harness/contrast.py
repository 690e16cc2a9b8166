"""What differs between the launches of two commits: same, faster, slower or inconclusive (measurement.md, Comparing).

A test is one quantity of one case, decided from one number per launch. One correction (Holm) spans all tests: at most
1 in 100 comparisons of unchanged code calls any of them slower or faster.

Noise of an NVIDIA H200, in cases that settled (of the gate, in budgeted ones): the standard deviation of a launch's
median between launches, and in brackets what the rounds inside the launches explain, from results/:

    one day, 2 launches, 28 cases     overlapped 0.11 % (0.08)   transfer 0.11 % (0.10)   compute 0.06 % (0.05)
    another, 5 launches, 17 cases     overlapped 0.39 % (0.15)   transfer 0.36 % (0.22)   compute 0.09 % (0.04)
    a quiet host, 3 launches, 28      overlapped 0.06 % (0.05)   transfer 0.08 % (0.05)   compute 0.05 % (0.03)
    a busy host, 5 launches, 28       overlapped 1.28 % (0.26)   transfer 1.61 % (0.40)   compute 0.11 % (0.06)
    a gate (gate/same), 6, 28         overlapped 0.11 % (0.06)   transfer 0.11 % (0.06)   compute 0.23 % (0.04)

Single launches are 2 to 4 % apart from the rest. Pageable copies vary by 12 % and up to 27 %, small ungated ones by 15
to 20 %, the time the host needs to enqueue by 20 %. A launch varies by twice the error of its rounds, give or take
half an order of magnitude: by their rounds noisy and quiet cases are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.evidence import Design, Evidence, Pair
from harness.spreads import Spread, solve
from harness.statistics import LEVEL as CONFIDENCE
from harness.statistics import Array

Verdict = Literal["same", "faster", "slower", "inconclusive"]

# The chance that a comparison of unchanged code says "slower" anywhere; the same again for "faster".
LEVEL = 0.005
# How many tests of unchanged code trip in the first of two stages, on average of a comparison.
TRIPS = 0.5
# The smallest visible loss is called this often.
POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """What a pair says. Effects are relative: 0.05 is 5 % slower.

    base, head: geometric means of the launches. effect: head / base - 1, with its 95 % interval. visible: the
    smallest loss that is called slower in 80 of 100 comparisons. p_slower, p_faster: one-sided, corrected for all
    tests. tripped: to be measured again, where a second stage follows.
    """

    case: str
    quantity: str
    verdict: Verdict
    base: float
    head: float
    effect: float
    low: float
    high: float
    visible: float
    p_slower: float
    p_faster: float
    tripped: bool


def compare(
    pairs: Sequence[Pair], *, design: Design = "interleaved", stages: Literal[1, 2] = 1
) -> list[Contrast]:
    """The verdict on every pair, in their order.

    slower, faster: significant after correction, and the effect is at least half the budget. same: neither, and the
    interval lies within +-budget. inconclusive: the rest; `visible` says what could have been seen.

    interleaved: base and head took turns on one machine, so a launch is the unit and its spread that of these
    launches; a history says how noisy a case is beside the others. nights: base and head are each of one night, and
    SE^2 = 2 night^2 + launch^2 (1/b + 1/h), with both terms from the history that every pair then needs.

    stages: 2 where `confirm` follows an interleaved comparison; `visible` is then that of both stages, with as many
    launches in the second. What trips between nights is confirmed by an interleaved comparison of its own.
    """
    if stages == 2 and design == "nights":
        raise ValueError("compare: nights have one stage, got 2")
    return _compare(pairs, Evidence.of(pairs, design), stages) if pairs else []


def confirm(pairs: Sequence[Pair], fresh: Sequence[Pair]) -> list[Contrast]:
    """The verdict on every pair of an interleaved comparison, when what tripped was measured again.

    A test is slower that trips in `pairs` and is slower again in `fresh`, the pairs of fresh launches. The chance that
    any test of unchanged code does both is LEVEL. The effect of a tripped test is that of its fresh launches, as the
    first ones were picked for being slow. One without fresh launches is inconclusive, with nothing visible.
    """
    if not pairs:
        return []
    tests = Evidence.of(pairs, "interleaved")
    found = _compare(pairs, tests, stages=2)
    again = {(pair.case, pair.quantity): pair for pair in fresh}
    tripped = [at for at, first in enumerate(found) if first.tripped]
    for at in tripped:
        found[at] = replace(found[at], verdict="inconclusive", visible=math.inf)
    measured = [at for at in tripped if (pairs[at].case, pairs[at].quantity) in again]
    if measured:
        decided = _decide(tests, measured, [again[pairs[at].case, pairs[at].quantity] for at in measured])
        for at, verdict in zip(measured, decided, strict=True):
            found[at] = verdict
    return found


def calls(tests: Evidence) -> NDArray[np.intp]:
    """(tests,) 1 slower, -1 faster, 0 neither, in one stage."""
    least = tests.least(tests.launches, LEVEL)
    slower, faster = ((_p(tests, sign) <= LEVEL) & (sign * tests.shift >= least) for sign in (1, -1))
    return slower.astype(np.intp) - faster


def _compare(pairs: Sequence[Pair], tests: Evidence, stages: Literal[1, 2]) -> list[Contrast]:
    spread, trip = tests.spread, _trip(tests)
    if stages == 1:
        line = np.maximum(tests.unit * spread.reach(LEVEL / len(pairs)), tests.least(tests.launches, LEVEL))
        visible = _visible(spread, (tests.unit, line))
    else:
        line = tests.unit * _again(spread, trip / tests.unit, len(pairs))
        line = np.maximum(line, tests.least(2 * tests.launches, LEVEL))
        visible = _visible(spread, (tests.unit, trip), (tests.unit, line))
    return _contrasts(
        pairs, tests, spread, calls(tests), visible=visible, p_slower=_p(tests, 1), p_faster=_p(tests, -1),
        tripped=tests.shift >= trip,
    )  # fmt: skip


def _decide(tests: Evidence, tripped: Sequence[int], fresh: Sequence[Pair]) -> list[Contrast]:
    """The verdict on the tripped of all tests, by their fresh launches."""
    at, second = np.array(tripped), Evidence.of(fresh, "interleaved")
    trip, unit, launches = _trip(tests)[at], tests.unit[at], tests.launches.copy()
    launches[at] += second.launches
    least = tests.least(launches, LEVEL)[at]
    # One spread for both stages: noise that was taken for quiet once may well be again.
    spread = tests.spread.at(at).given(second.variance, second.freedom, second.floor)
    p = np.ones(len(tests.shift))
    p[at] = spread.beyond(trip / unit, second.shift / second.unit)
    p = _holm(p)[at]
    line = np.maximum(second.unit * _again(spread, trip / unit, len(tests.shift)), least)
    return _contrasts(
        fresh, second, spread, ((p <= LEVEL) & (second.shift >= least)).astype(np.intp),
        visible=_visible(spread, (unit, trip), (second.unit, line)),
        p_slower=p, p_faster=np.ones(len(at)), tripped=np.ones(len(at), dtype=np.bool_),
    )  # fmt: skip


def _p(tests: Evidence, sign: int) -> Array:
    """(tests,) one-sided, corrected: slower for 1, faster for -1."""
    return _holm(tests.spread.beyond(sign * tests.shift / tests.unit))


def _trip(tests: Evidence) -> Array:
    """(tests,) the shift from which a test trips."""
    chance = min(0.5, TRIPS / len(tests.shift))
    return np.maximum(tests.unit * tests.spread.reach(chance), tests.minimum)


def _again(spread: Spread, tripped: Array, tests: int) -> Array:
    """(tests,) the distance in fresh launches from which a test is slower that tripped beyond the distance before."""
    return solve(lambda distance: spread.beyond(tripped, distance) <= LEVEL / tests, len(tripped))


def _visible(spread: Spread, *lines: tuple[Array, Array]) -> Array:
    """(tests,) the loss that passes every line, given as a unit and a shift, with the chance POWER."""

    def seen(loss: Array) -> NDArray[np.bool_]:
        return spread.beyond(*((line - loss) / unit for unit, line in lines)) >= POWER

    return np.expm1(solve(seen, len(spread.sigma)))


def _holm(p: Array) -> Array:
    """p, corrected so that any of them falls to a level by chance with at most that chance (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def _contrasts(
    pairs: Sequence[Pair],
    tests: Evidence,
    spread: Spread,
    called: NDArray[np.intp],
    *,
    visible: Array,
    p_slower: Array,
    p_faster: Array,
    tripped: NDArray[np.bool_],
) -> list[Contrast]:
    half = tests.unit * spread.reach((1 - CONFIDENCE) / 2)
    low, effect, high = (np.expm1(tests.shift + side * half) for side in (-1, 0, 1))
    found = []
    for at, pair in enumerate(pairs):
        verdict: Verdict = "inconclusive"
        if called[at]:
            verdict = "slower" if called[at] > 0 else "faster"
        elif -pair.budget <= low[at] and high[at] <= pair.budget:
            verdict = "same"
        found.append(
            Contrast(
                case=pair.case,
                quantity=pair.quantity,
                verdict=verdict,
                base=float(np.exp(np.log(pair.base).mean())),
                head=float(np.exp(np.log(pair.head).mean())),
                effect=float(effect[at]),
                low=float(low[at]),
                high=float(high[at]),
                visible=float(visible[at]),
                p_slower=float(p_slower[at]),
                p_faster=float(p_faster[at]),
                tripped=bool(tripped[at]),
            )
        )
    return found
