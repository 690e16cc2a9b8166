"""The spreads of all tests at once: against the ordinary t test where nothing is shared, and on average where it is."""

import numpy as np
import pytest
from scipy import stats

from harness import spreads
from harness.spreads import GRID, learn, solve


def variances(sigma: np.ndarray, freedom: float, seed: int) -> np.ndarray:
    return sigma**2 * np.random.default_rng(seed).chisquare(freedom, len(sigma)) / freedom


def of(variance: np.ndarray, freedom: float, floor: float = 0.0, owner: np.ndarray | None = None):
    tests = len(variance)
    return learn(
        variance, np.full(tests, freedom), np.full(tests, floor), np.arange(tests) if owner is None else owner
    )


@pytest.mark.parametrize("freedom", [2, 4, 8, 12])
@pytest.mark.parametrize("t", [1.0, 4.0, 12.0])
def test_a_lone_test_is_the_ordinary_t_test(freedom: int, t: float) -> None:
    spread = of(np.array([0.01**2]), freedom)
    assert spread.beyond(np.array([t * 0.01]))[0] == pytest.approx(stats.t.sf(t, freedom), rel=0.01)


def test_the_tests_of_one_case_do_not_vouch_for_each_other() -> None:
    """Else the legs of a noisy case that happen to agree would prove that it is quiet."""
    alone = of(np.full(4, 0.01**2), 4, owner=np.zeros(4, dtype=int)).beyond(np.full(4, 0.08))
    assert alone == pytest.approx(stats.t.sf(8, 4), rel=0.01)
    assert (of(np.full(4, 0.01**2), 4).beyond(np.full(4, 0.08)) < alone / 1.5).all()


def test_alike_tests_share_what_they_know() -> None:
    """Of 300 tests of one spread each is nearly as good as one whose spread is known."""
    sigma = np.full(300, 0.003)
    spread = of(variances(sigma, 4, 0), 4)
    reach = np.median(spread.reach(1e-4)) / 0.003
    known, alone = stats.norm.isf(1e-4), stats.t.isf(1e-4, 4)
    assert known < reach < 1.15 * known
    assert reach < alone / 2


def test_a_test_whose_launches_vary_more_is_not_taken_for_a_quiet_one() -> None:
    variance = variances(np.full(300, 0.001), 4, 1)
    variance[0] = 0.03**2
    spread = of(variance, 4)
    assert spread.reach(0.025)[0] > 0.03
    assert spread.reach(0.025)[1:].max() < 0.005


def test_p_values_hold_on_average_over_quiet_and_noisy_tests() -> None:
    """At level 1e-3 one in a thousand of all the tests is below it, whichever spreads they have."""
    sigma = np.full(300, 0.0011)
    sigma[:15] = 0.006
    below = []
    for seed in range(100):
        shift = np.random.default_rng([seed, 1]).standard_normal(300) * sigma
        below.append((of(variances(sigma, 4, seed), 4).beyond(shift) < 1e-3).mean())
    assert np.mean(below) == pytest.approx(1e-3, rel=0.3)


def test_what_no_other_case_shows_is_rare_and_not_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone noisy test, quiet by luck: without strangers its p is that of the quiet ones, a billionth."""
    variance = variances(np.full(300, 0.001), 4, 2)
    variance[0] = 0.001**2
    p = of(variance, 4).beyond(np.full(300, 0.01))[0]
    monkeypatch.setattr(spreads, "STRANGERS", 0.0)
    assert of(variance, 4).beyond(np.full(300, 0.01))[0] < p / 100
    assert 1e-9 < p < 1e-4


def test_sigma_is_not_below_the_floor() -> None:
    """Nor piled up at it: of the tests with a high floor nothing is known but that they are noisy."""
    variance = variances(np.full(300, 0.001), 4, 3)
    floor = np.zeros(300)
    floor[0] = 0.01
    spread = learn(variance, np.full(300, 4.0), floor, np.arange(300))
    assert spread.weight[0, GRID < 0.01].sum() == 0
    assert spread.reach(0.025)[0] > 1.96 * 0.01
    assert spread.reach(0.025)[1] < 0.005
    variance[0] = 0.03**2
    noisy = learn(variance, np.full(300, 4.0), floor, np.arange(300))
    assert noisy.beyond(np.full(300, 0.03 * 4))[0] == pytest.approx(stats.t.sf(4, 4), rel=0.1)


def test_a_floor_above_all_spreads_leaves_the_widest() -> None:
    spread = of(np.full(3, 0.01**2), 4, floor=5.0)
    assert spread.weight[:, -1] == pytest.approx(1.0)


def test_further_launches_count_like_more_of_the_same() -> None:
    one, two = np.array([0.01**2]), np.array([0.02**2])
    both = of(one, 4).given(two, np.array([6.0]), np.zeros(1))
    pooled = np.sqrt((4 * 0.01**2 + 6 * 0.02**2) / 10)
    assert both.beyond(np.array([3 * pooled]))[0] == pytest.approx(stats.t.sf(3, 10), rel=0.01)


def test_two_noises_are_independent_given_their_spread() -> None:
    spread = of(variances(np.full(300, 0.003), 12, 4), 12)
    far = np.full(300, 0.006)
    alone = spread.beyond(far)
    assert (spread.beyond(far, far) >= alone**2).all()
    assert spread.beyond(far, np.zeros(300)) == pytest.approx(alone / 2)


def test_tails_of_student_have_the_same_sigma() -> None:
    known = spreads.Spread(np.array([[0.01]]), np.ones((1, 1)), 5.0)
    t5 = stats.t(5, scale=0.01 * np.sqrt(3 / 5))
    assert t5.std() == pytest.approx(0.01)
    assert known.beyond(np.array([0.05])) == pytest.approx(t5.sf(0.05))
    assert known.reach(0.025) == pytest.approx(t5.isf(0.025), rel=1e-3)


def test_no_launch_to_spare_leaves_the_spread_open() -> None:
    """One launch against one: no p is small, however far apart they lie."""
    spread = of(np.zeros(1), 0)
    assert spread.beyond(np.array([0.05]))[0] > 0.1


def test_constant_launches_have_the_least_spread_there_is() -> None:
    spread = of(np.zeros(300), 4)
    assert spread.reach(0.025) == pytest.approx(1.96 * GRID[0], rel=0.1)


def test_solve_finds_where_it_turns_true() -> None:
    wanted = np.array([1e-4, 0.02, 3.0])
    assert solve(lambda x: x >= wanted, 3) == pytest.approx(wanted, rel=1e-3)
