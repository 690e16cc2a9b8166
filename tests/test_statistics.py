"""Intervals that cover, a stop rule that stops when it should, and balanced orders; all on seeded samples."""

import itertools
import math
import subprocess
import sys
import time

import numpy as np
import pytest
from factories import noisy
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from harness.statistics import (
    Bootstrap,
    Interval,
    StopRule,
    balanced_orders,
    block_bootstrap_indices,
    carry_over,
    drift,
    interval,
    lag1,
)


def series(mean: float, rounds: int, *, noise: float = 0.01, rho: float = 0.0, seed: int = 0) -> np.ndarray:
    return noisy(mean, rounds, noise=noise, rho=rho, rng=np.random.default_rng(seed))


def median_of_x(t):
    return t["x"]


# Block bootstrap


@given(st.integers(1, 60), st.integers(1, 25))
def test_blocks_are_runs_of_neighbours_that_wrap_round(n: int, block: int):
    indices = block_bootstrap_indices(n, block, 7, np.random.default_rng(0))
    used = max(1, min(block, n // 2))
    assert indices.shape == (7, n)
    assert indices.min() >= 0
    assert indices.max() < n
    for row in indices:
        steps = (np.diff(row) % n) == 1 % n
        joints = np.arange(1, n) % used == 0
        assert np.all(steps | joints)


def test_every_sample_is_drawn_equally_often():
    indices = block_bootstrap_indices(30, 10, 20_000, np.random.default_rng(1))
    assert np.bincount(indices.ravel(), minlength=30) / indices.size == pytest.approx(1 / 30, rel=0.03)


def test_short_sample_still_shows_its_spread():
    """One block as long as the sample would give its median every time."""
    found = interval(median_of_x, [{"x": series(5.0, 8)}])
    assert found.low < found.value < found.high


# Intervals


def test_value_is_a_function_of_medians_not_a_median_of_ratios():
    both, alone = [1.0, 2.0, 9.0], [1.0, 4.0, 2.0]
    assert interval(lambda t: t["both"] / t["alone"], [{"both": both, "alone": alone}]).value == 1.0
    assert np.median(np.divide(both, alone)) == 1.0  # so that the next line tells them apart
    both, alone = [1.0, 2.0, 9.0], [3.0, 4.0, 2.0]
    assert interval(lambda t: t["both"] / t["alone"], [{"both": both, "alone": alone}]).value == 2 / 3
    assert np.median(np.divide(both, alone)) == 0.5


def test_value_over_launches_is_the_median_of_their_values():
    launches = [{"x": [1.0] * 20}, {"x": [2.0] * 40}, {"x": [9.0] * 20}]
    found = interval(median_of_x, launches)
    assert found == Interval(2.0, 1.0, 9.0)
    assert Bootstrap(launches).values(median_of_x, ["x"]).tolist() == [1.0, 2.0, 9.0]


def test_arms_are_resampled_together():
    """Both arms ride on the same slow wave: their ratio is known far better than either."""
    wave = series(1.0, 80, noise=0.05, rho=0.7)
    launch = {"both": 6.0 * wave, "alone": 3.0 * wave}
    ratio = interval(lambda t: t["both"] / t["alone"], [launch])
    assert ratio == Interval(2.0, pytest.approx(2.0), pytest.approx(2.0))
    assert interval(lambda t: t["both"], [launch]).half_width > 0.05


def test_launches_that_differ_widen_the_interval():
    alike = [{"x": series(5.0, 40, seed=seed)} for seed in range(4)]
    apart = [{"x": series(mean, 40, seed=seed)} for seed, mean in enumerate((4.8, 4.9, 5.1, 5.2))]
    assert interval(median_of_x, apart).half_width > 5 * interval(median_of_x, alike).half_width


def test_rounds_inside_a_launch_widen_the_interval_too():
    """Two launches of equal medians: all the spread there is comes from the rounds."""
    x = series(5.0, 40, noise=0.05)
    assert interval(median_of_x, [{"x": x}, {"x": x[::-1]}]).half_width > 0.01


def test_launches_are_resampled_apart():
    """Two launches know the median better than one, by about the root of two."""
    x = series(5.0, 80)
    found = (interval(median_of_x, [{"x": x}] * count) for count in (1, 2))
    one, two = (each.high - each.low for each in found)
    assert two < 0.75 * one


@pytest.mark.parametrize(("low", "high"), [(4.0, 5.1), (4.9, 6.0)])
def test_half_width_is_the_wider_side(low: float, high: float):
    assert Interval(5.0, low, high).half_width == 1.0


def test_single_sample_has_no_interval():
    found = interval(median_of_x, [{"x": [5.0]}])
    assert found == Interval(5.0, None, None)
    assert found.half_width == math.inf


def test_a_mean_sees_what_a_median_leaves_out():
    """One sample in eight is ten times as long: stalls that come in bursts."""
    x = np.tile([1.0] * 7 + [10.0], 10)
    bootstrap = Bootstrap([{"x": x}])
    mean, median = (bootstrap.interval(median_of_x, ["x"], quantile=each) for each in (None, 0.5))
    assert (mean.value, median.value) == (2.125, 1.0)
    assert mean.low < 2.125 < mean.high
    assert bootstrap.values(median_of_x, ["x"], None).tolist() == [2.125]


def test_quantiles_other_than_the_median():
    x = np.arange(101.0)
    found = Bootstrap([{"x": x}]).interval(median_of_x, ["x"], quantile=0.1)
    assert found.value == 10.0
    assert found.low < 10.0 < found.high


def test_same_seed_same_interval_and_another_seed_another():
    launches = [{"x": series(5.0, 40)}, {"x": series(5.0, 40, seed=1)}]
    assert interval(median_of_x, launches, seed=3) == interval(median_of_x, launches, seed=3)
    assert interval(median_of_x, launches, seed=3) != interval(median_of_x, launches, seed=4)


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([], "no launches"),
        ([{"x": [1.0, 2.0], "y": [1.0]}], r"arms have \[1, 2\] samples"),
        ([{"x": []}], r"arms have \[0\] samples"),
        ([{}], r"arms have \[\] samples"),
    ],
)
def test_samples_that_cannot_be_resampled_are_refused(launches, message):
    with pytest.raises(ValueError, match=message):
        Bootstrap(launches)


@pytest.mark.parametrize(
    ("rounds", "rho", "least", "most"),
    [(20, 0.0, 0.88, 0.99), (20, 0.7, 0.83, 0.97), (80, 0.0, 0.92, 0.995), (80, 0.7, 0.88, 0.99)],
)
def test_interval_covers_the_truth_about_as_often_as_it_says(rounds, rho, least, most):
    """The plain percentile interval covers in 69, 60, 91 and 85 of 100 of these."""
    rng = np.random.default_rng(11)
    found = [
        interval(median_of_x, [{"x": noisy(100.0, rounds, noise=0.01, rho=rho, rng=rng)}]) for _ in range(250)
    ]
    assert least <= np.mean([each.low <= 100.0 <= each.high for each in found]) <= most


def test_interval_of_a_ratio_covers_the_truth():
    rng = np.random.default_rng(12)
    covered = 0
    for _ in range(200):
        both, alone, wave = (noisy(1.0, 80, noise=0.01, rho=0.7, rng=rng) for _ in range(3))
        found = interval(
            lambda t: t["both"] / t["alone"], [{"both": 6 * both * wave, "alone": 3 * alone * wave}]
        )
        covered += found.low <= 2.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


# Stop rule


def decisions(rule: StopRule, samples, seconds_per_round: float = 0.0) -> tuple[int, str]:
    """The round the rule stops at and what it says, fed round by round as `measure` does."""
    for rounds in range(1, len(samples) + 1):
        verdict = rule.decide(list(samples[:rounds]), rounds * seconds_per_round)
        if verdict is not None:
            return rounds, verdict
    raise AssertionError("never stopped")


def test_quiet_samples_settle_at_the_first_look_and_noisy_ones_later():
    assert decisions(StopRule(), series(5.0, 80, noise=0.003)) == (20, "settled")
    rounds, verdict = decisions(StopRule(), series(5.0, 80, noise=0.02))
    assert rounds in (40, 80)
    assert verdict == "settled"
    assert decisions(StopRule(), series(5.0, 80, noise=0.2)) == (80, "budget")


def test_time_is_asked_at_looks_and_never_before_the_first():
    noisy_samples = series(5.0, 80, noise=0.2)
    assert decisions(StopRule(budget_s=0.0), noisy_samples, 1.0) == (20, "budget")
    assert decisions(StopRule(budget_s=21.0), noisy_samples, 1.0) == (40, "budget")
    assert decisions(StopRule(budget_s=40.0), noisy_samples, 1.0) == (40, "budget")


def test_settled_samples_are_called_so_even_out_of_time():
    quiet = series(5.0, 80, noise=0.001)
    assert decisions(StopRule(budget_s=0.0), quiet, 1.0) == (20, "settled")


def test_hard_limit_stops_between_looks_and_before_the_first():
    noisy_samples = series(5.0, 80, noise=0.2)
    assert decisions(StopRule(limit_s=7.0), noisy_samples, 1.0) == (7, "budget")
    assert decisions(StopRule(limit_s=33.0), noisy_samples, 1.0) == (33, "budget")
    assert decisions(StopRule(limit_s=7.0), [5.0] * 80, 1.0) == (7, "budget")  # too few to call settled


def test_samples_cut_off_between_looks_may_have_settled():
    """Time says nothing of the samples' values, so the look it forces is as good as a fixed one."""
    samples = series(5.0, 80, noise=0.02)
    at_20, at_39 = (interval(median_of_x, [{"x": samples[:n]}]).half_width / 5.0 for n in (20, 39))
    assert at_39 < at_20
    rule = StopRule(target=(at_20 + at_39) / 2, limit_s=39.0)
    assert decisions(rule, samples, 1.0) == (39, "settled")


def test_nothing_is_imported_between_timed_rounds():
    code = """
import sys
from harness.statistics import StopRule
rule, before = StopRule(), set(sys.modules)
rule.decide([5.0, 5.1] * 10, 1.0)
assert set(sys.modules) == before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_look_between_the_fixed_rounds():
    constant = [5.0] * 100
    rule = StopRule(looks=(20, 40))
    assert [n for n in range(1, 42) if rule.decide(constant[:n], 0.0)] == [20, 40, 41]


def test_a_lopsided_interval_is_settled_by_its_wider_side():
    """The table shows that side beside the value: the target must mean the same."""
    samples = np.concatenate([np.full(45, 5.0), 5.0 + 0.02 * np.arange(35)])
    samples = np.random.default_rng(0).permutation(samples)
    found = interval(median_of_x, [{"x": samples}])
    wide, narrow = found.high - found.value, found.value - found.low
    assert narrow < wide / 2
    assert not StopRule(target=0.99 * wide / found.value).settled(samples)
    assert StopRule(target=1.01 * wide / found.value).settled(samples)


def test_what_is_told_by_means_settles_by_means():
    """Few rounds that take long move no median, and a mean by much."""
    samples = [5.0, 5.01, 4.99, 5.0] * 4 + [5.0, 20.0, 5.0, 20.0]
    assert StopRule(target=0.05).settled(samples)
    assert not StopRule(target=0.05, quantile=None).settled(samples)


def test_target_is_relative_to_the_value():
    samples = series(5.0, 20, noise=0.01)
    half = interval(lambda t: t["x"], [{"x": samples}]).half_width
    assert StopRule(target=1.01 * half / np.median(samples)).settled(samples)
    assert not StopRule(target=0.99 * half / np.median(samples)).settled(samples)


def test_settled_means_that_the_median_is_near_the_truth():
    """Of launches called settled within 1 %, few are off by more: optional stopping does not fool the rule."""
    rng = np.random.default_rng(13)
    ends = []
    for _ in range(150):
        samples = noisy(100.0, 80, noise=0.02, rho=0.5, rng=rng)
        rounds, verdict = decisions(StopRule(), samples)
        if verdict == "settled":
            ends.append(abs(np.median(samples[:rounds]) - 100.0))
    assert len(ends) > 75
    assert np.mean(np.array(ends) > 1.0) <= 0.08


def test_decision_fits_between_two_timed_rounds():
    rule, samples = StopRule(), list(series(5.0, 80))
    rule.decide(samples, 0.0)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        rule.decide(samples, 0.0)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.010


@pytest.mark.parametrize("looks", [(), (0, 20), (20, 20), (40, 20)])
def test_looks_must_rise(looks):
    with pytest.raises(ValueError, match="looks: got"):
        StopRule(looks=looks)


# Order in time


def test_lag1_of_known_series():
    assert lag1(series(1.0, 4000, rho=0.7)) == pytest.approx(0.7, abs=0.05)
    assert lag1(series(1.0, 4000)) == pytest.approx(0.0, abs=0.05)
    assert lag1([4.86, 5.05] * 100) == pytest.approx(-1.0, abs=0.01)
    assert lag1([0.1] * 50) == 0.0
    assert lag1([1.0, 2.0]) == 0.0


def test_drift_is_last_third_over_first():
    assert drift([2.0] * 3 + [50.0] * 3 + [3.0] * 3) == 0.5
    assert drift([1.0, 2.0, 3.0, 4.0, 5.0]) == 0.0


# Carry-over

ARMS = ["transfer", "compute", "serial", "overlapped"]


def rounds_with(effect: float, rounds: int, seed: int) -> tuple[list[list[str]], dict[str, np.ndarray]]:
    """Rounds in which `overlapped` is slower by `effect` right after `serial`."""
    orders = [balanced_orders(ARMS)[at % 4] for at in range(rounds)]
    taken = {arm: series(5.0, rounds, noise=0.005, seed=seed + at) for at, arm in enumerate(ARMS)}
    for at, order in enumerate(orders):
        place = order.index("overlapped")
        if place and order[place - 1] == "serial":
            taken["overlapped"][at] *= 1 + effect
    return orders, taken


def test_carry_over_names_the_arm_what_ran_before_it_and_by_how_much():
    found = carry_over(*rounds_with(0.03, 80, seed=0))
    assert found.arm == "overlapped"
    assert found.after == "serial"
    assert found.shift == pytest.approx(0.03, abs=0.006)
    assert found.p < 1e-6


def test_carry_over_is_rarely_seen_where_there_is_none():
    called = [carry_over(*rounds_with(0.0, 80, seed=10 * seed)).p < 0.01 for seed in range(200)]
    assert np.mean(called) <= 0.02


def test_drift_is_not_taken_for_carry_over():
    orders, taken = rounds_with(0.0, 80, seed=1)
    ramp = np.linspace(1.0, 1.2, 80)
    assert carry_over(orders, {arm: x * ramp for arm, x in taken.items()}).p > 0.05


def test_first_place_of_a_round_is_not_compared():
    """What ran before it may lie in a dropped round."""
    orders, taken = rounds_with(0.0, 80, seed=2)
    for at, order in enumerate(orders):
        taken[order[0]][at] *= 3
    assert carry_over(orders, taken).p > 0.01


def test_carry_over_counts_its_tests():
    orders, taken = rounds_with(0.01, 40, seed=3)
    alone = carry_over(orders, {"overlapped": taken["overlapped"]})
    still = {arm: np.arange(40.0) % 7 + 5 if arm != "overlapped" else x for arm, x in taken.items()}
    assert carry_over(orders, still).p == pytest.approx(min(1.0, 4 * alone.p))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=8), min_size=2, max_size=5))
def test_p_is_that_of_kruskal_and_wallis(groups: list[list[int]]):
    assume(len({x for group in groups for x in group}) > 1)
    orders = [[f"before {at}", "arm"] for at, group in enumerate(groups) for _ in group]
    taken = [10.0 + x for group in groups for x in group]
    assert carry_over(orders, {"arm": taken}).p == pytest.approx(stats.kruskal(*groups).pvalue)


def test_nothing_to_compare_gives_no_carry_over():
    assert carry_over([["a", "b"]] * 20, {"a": [1.0] * 20, "b": series(1.0, 20)}) is None
    assert carry_over([], {"a": [], "b": []}) is None
    orders, taken = rounds_with(0.0, 8, seed=0)
    assert carry_over(orders, taken) is None
    constant = {arm: [5.0] * 80 for arm in ARMS}
    assert carry_over(rounds_with(0.0, 80, seed=0)[0], constant) is None


# Balanced orders


@pytest.mark.parametrize("k", range(1, 9))
def test_orders_are_balanced_for_place_and_predecessor(k: int):
    arms = list("abcdefgh"[:k])
    orders = balanced_orders(arms)
    assert len(orders) == (k if k % 2 == 0 or k == 1 else 2 * k)
    assert all(sorted(order) == arms for order in orders)
    times = len(orders) // k
    for place in range(k):
        assert sorted(order[place] for order in orders) == sorted(arms * times)
    followed = sorted(pair for order in orders for pair in itertools.pairwise(order))
    assert followed == sorted(list(itertools.permutations(arms, 2)) * times)


def test_no_arms_have_no_orders():
    assert balanced_orders([]) == []
