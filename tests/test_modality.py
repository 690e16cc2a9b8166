"""One mode or two: the case seen on an H200, shapes that only look like two, and the dip against its definition."""

import itertools

import numpy as np
import pytest
from factories import noisy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import linprog

from harness.modality import Modes, dip, modes


def test_alternating_copies_are_two_modes():
    rng = np.random.default_rng(0)
    samples = np.tile([4.86, 5.05], 40) * (1 + 0.003 * rng.standard_normal(80))
    found = modes(samples)
    assert found.low == pytest.approx(4.86, abs=0.01)
    assert found.high == pytest.approx(5.05, abs=0.01)
    assert found.upper_share == 0.5


def test_exact_alternation_is_two_modes():
    assert modes([4.86, 5.05] * 10) == Modes(low=4.86, high=5.05, upper_share=0.5)


def test_rarer_mode_is_found_with_its_share():
    rng = np.random.default_rng(1)
    samples = np.where(np.arange(80) % 5 == 0, 5.4, 4.86) * (1 + 0.003 * rng.standard_normal(80))
    assert modes(samples).upper_share == pytest.approx(0.2)


def test_step_in_time_is_two_modes_whatever_the_order():
    samples = np.concatenate([np.full(30, 4.0), np.full(50, 5.0)])
    assert modes(samples) == modes(np.random.default_rng(2).permutation(samples)) == Modes(4.0, 5.0, 0.625)


@pytest.mark.parametrize("rounds", [20, 80])
@pytest.mark.parametrize("shape", ["normal", "skewed t(5)", "exponential", "AR(1) 0.7"])
def test_one_mode_is_rarely_called_two(shape: str, rounds: int):
    rng = np.random.default_rng(3)
    draw = {
        "normal": lambda: 5 + 0.05 * rng.standard_normal(rounds),
        "skewed t(5)": lambda: 5 + 0.05 * stats.nct.rvs(5, 2, size=rounds, random_state=rng),
        "exponential": lambda: 5 + 0.05 * rng.exponential(size=rounds),
        "AR(1) 0.7": lambda: noisy(5.0, rounds, noise=0.01, rho=0.7, rng=rng),
    }[shape]
    assert np.mean([modes(draw()) is not None for _ in range(400)]) <= 0.015


def test_two_modes_are_rarely_missed():
    rng = np.random.default_rng(4)
    found = [modes(5 + 0.05 * rng.standard_normal(80) + 0.3 * rng.integers(0, 2, 80)) for _ in range(100)]
    assert np.mean([each is not None for each in found]) >= 0.97


def test_modes_closer_than_matters_are_one():
    """A clock of coarse steps gives few distinct times; that is no news."""
    assert modes([5.000, 5.020] * 40) is None
    assert modes([5.000, 5.030] * 40) is not None


def test_outliers_are_no_mode():
    assert modes(np.concatenate([np.random.default_rng(5).normal(5, 0.02, 76), [9.0] * 4])) is None


@pytest.mark.parametrize("samples", [[], [1.0], [1.0, 2.0, 3.0], [5.0] * 40])
def test_too_little_to_tell_is_one_mode(samples):
    assert modes(samples) is None


def dip_by_definition(samples: list[float]) -> float:
    """The dip as linear programmes: the nearest distribution convex up to a sample and concave from it on."""
    x, counts = np.unique(samples, return_counts=True)
    n = counts.sum()
    upper = counts.cumsum() / n
    lower = upper - counts / n
    k = len(x)
    best = np.inf
    for mode in range(k):
        # Unknowns: the distribution just below every x, its value at the mode (it may jump there), the distance.
        rows, limits = [], []

        def at_most(limit: float, *terms: tuple[int, float], rows=rows, limits=limits) -> None:
            row = np.zeros(k + 2)
            for index, factor in terms:
                row[index] += factor
            rows.append(row)
            limits.append(limit)

        for i in range(k):
            at_most(lower[i], (i, 1.0), (k + 1, -1.0))
            at_most(-lower[i], (i, -1.0), (k + 1, -1.0))
            after = k if i == mode else i
            at_most(upper[i], (after, 1.0), (k + 1, -1.0))
            at_most(-upper[i], (after, -1.0), (k + 1, -1.0))
        at_most(0.0, (mode, 1.0), (k, -1.0))
        for side, sign in (([*range(mode + 1)], 1.0), ([k, *range(mode + 1, k)], -1.0)):
            places = {i: x[mode] if i == k else x[i] for i in side}
            for a, b in itertools.pairwise(side):
                at_most(0.0, (a, 1.0), (b, -1.0))
            for a, b, c in zip(side, side[1:], side[2:], strict=False):
                left, right = sign / (places[b] - places[a]), sign / (places[c] - places[b])
                at_most(0.0, (a, -left), (b, left + right), (c, -right))
        objective = np.eye(k + 2)[k + 1]
        solved = linprog(objective, A_ub=np.array(rows), b_ub=limits, bounds=[(0, 1)] * (k + 1) + [(0, None)])
        best = min(best, solved.fun)
    return float(best)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=14))
def test_dip_is_the_distance_to_the_nearest_unimodal_distribution(samples: list[int]):
    exact = dip_by_definition([float(x) for x in samples])
    assert dip(samples) == pytest.approx(max(exact, 0.5 / len(samples)), abs=1e-7)


def test_dip_of_two_equal_points_is_a_quarter():
    assert dip([0.0, 1.0] * 500) == pytest.approx(0.25, abs=0.001)


def test_dip_ignores_scale_and_place():
    samples = np.random.default_rng(6).standard_normal(50)
    assert dip(3 * samples + 7) == pytest.approx(dip(samples))
