import numpy as np
import pytest

from harness.steps import FIT_POINTS, apart, levels


def noisy(count: int, *, noise: float = 0.003, seed: int = 0) -> np.ndarray:
    return 5.45 * (1 + noise * np.random.default_rng(seed).standard_normal(count))


@pytest.mark.parametrize(("at", "size"), [(40, 0.05), (40, -0.05), (20, 0.02), (57, 0.05)])
def test_a_step_is_found_where_it_is(at, size):
    """Noise as an H200 has from night to night."""
    found = 0
    for seed in range(20):
        values = noisy(60, seed=seed)
        values[at:] *= 1 + size
        fitted = levels(list(values))
        if [level.first for level in fitted] == [0, at]:
            found += 1
            assert fitted[0].last == at - 1
            assert fitted[1].last == 59
            assert fitted[1].value / fitted[0].value == pytest.approx(1 + size, abs=0.006)
    assert found >= 19


@pytest.mark.parametrize("noise", [0.003, 0.03])
@pytest.mark.parametrize("count", [FIT_POINTS, 20, 60])
def test_noise_is_one_level(count, noise):
    several = sum(len(levels(list(noisy(count, noise=noise, seed=seed)))) > 1 for seed in range(100))
    assert several <= 3


def test_below_so_many_points_nothing_is_called_a_step():
    values = [5.0] * (FIT_POINTS // 2) + [9.0] * (FIT_POINTS - FIT_POINTS // 2)
    assert len(levels(list(values))) == 2
    (only,) = levels(values[1:])
    assert (only.first, only.last) == (0, FIT_POINTS - 2)
    assert levels([]) == []


def test_a_small_step_at_the_newest_commit_is_no_step_and_yet_seen():
    """What asv's fit cannot find until there are more points of it."""
    seen = 0
    for seed in range(20):
        values = noisy(60, seed=seed)
        values[-1] *= 1.02
        assert len(levels(list(values))) == 1
        seen += apart(list(values)) == 1
    assert seen >= 17


@pytest.mark.parametrize("size", [0.03, -0.03])
def test_points_apart_are_counted_on_either_side(size):
    values = noisy(20)
    values[-3:] *= 1 + size
    assert apart(list(values)) == 3
    values[-2] = 5.45
    assert apart(list(values)) == 1


def test_noise_is_seldom_apart():
    assert sum(apart(list(noisy(20, seed=seed))) > 0 for seed in range(200)) <= 4
    assert apart([5.0] * 20) == 0
    assert apart([5.0] * FIT_POINTS) == 0, "too few to tell what is usual"
