"""What launches say before any verdict: shifts and their uncertainty, against known answers and other estimators."""

import math

import numpy as np
import pytest

from harness import contrast
from harness.evidence import Evidence, History, Pair, history, launch_error, mean_error, steady


def pair(base: list[float], head: list[float], case: str = "case", **more: object) -> Pair:
    return Pair(case=case, quantity="overlapped_ms", base=base, head=head, **more)  # type: ignore[arg-type]


def ar1(rho: float, n: int, seed: int, noise: float = 0.01) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.empty(n)
    x[0] = rng.standard_normal()
    for at in range(1, n):
        x[at] = rho * x[at - 1] + math.sqrt(1 - rho**2) * rng.standard_normal()
    return 5.0 * np.exp(noise * x)


# The error of one launch


@pytest.mark.parametrize("rho", [0.0, 0.7])
@pytest.mark.parametrize("n", [20, 80])
def test_launch_error_is_the_spread_of_the_median(rho: float, n: int) -> None:
    launches = [ar1(rho, n, seed) for seed in range(300)]
    spread = np.std([np.median(rounds) / 5.0 for rounds in launches])
    assert np.mean([launch_error(rounds) for rounds in launches]) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_mean_error_is_the_spread_of_the_mean(rho: float) -> None:
    launches = [ar1(rho, 40, seed) for seed in range(300)]
    spread = np.std([rounds.mean() / 5.0 for rounds in launches])
    assert np.mean([mean_error(rounds) for rounds in launches]) == pytest.approx(spread, rel=0.25)
    assert mean_error([5.0]) == 0.0
    assert launch_error([5.0] * 19 + [50.0]) == 0.0 < mean_error([5.0] * 19 + [50.0])


def test_rounds_that_alternate_are_as_uncertain_as_their_times_are_apart() -> None:
    """The quartiles of 20 such rounds lie in different modes, and any round more moves the median to one of them."""
    assert launch_error([4.86, 5.05] * 10) == pytest.approx((5.05 - 4.86) / 2 / 4.955, rel=1e-6)
    assert launch_error([4.86] * 17 + [5.05] * 3) == 0.0


def test_one_round_or_equal_ones_have_no_error_to_see() -> None:
    assert launch_error([5.0]) == 0.0
    assert launch_error([5.0] * 20) == 0.0


@pytest.mark.parametrize(
    ("errors", "kept"),
    [
        ([0.001, 0.001, 0.0041, 0.001], [True, True, False, True]),
        ([0.001, 0.001, 0.0039, 0.001], [True] * 4),
        ([0.001, 0.001, 0.1], [True] * 3),  # two would be left
        ([0.001, 0.1, 0.001, 0.001, 0.1, 0.001, 0.001], [True] * 7),  # two scatter: it may be the code
        ([0.02, 0.03, 0.02, 0.001, 0.001], [True] * 5),  # the many are the measure
        ([0.001, 0.1], [True, True]),  # of two nobody knows which is the disturbed one
        ([0.0, 0.0, 0.0], [True] * 3),
        ([0.1], [True]),
        ([], []),
    ],
)
def test_disturbed_launches_are_those_whose_rounds_scatter_beside_the_others(
    errors: list[float], kept: list[bool]
) -> None:
    assert steady(errors).tolist() == kept


def test_leaving_out_the_disturbed_makes_no_false_alarm_and_finds_more() -> None:
    """100 unchanged cases of 5 against 5 launches. One launch in 20 is disturbed, as seen on an H200: its rounds
    scatter ten times as much, and it is slower by twice what that explains. Others vary by twice their rounds' error.
    """
    rng = np.random.default_rng(5)
    alarms, found = 0, {"all": 0, "steady": 0}
    for _ in range(40):
        pairs: dict[str, list[Pair]] = {name: [] for name in found}
        for case in range(100):
            disturbed = rng.random((2, 5)) < 0.05
            errors = 0.001 * np.exp(0.3 * rng.standard_normal((2, 5))) * np.where(disturbed, 10, 1)
            off = rng.standard_normal((2, 5))
            times = np.exp(2 * errors * np.where(disturbed, np.abs(off), off))
            for name, made in pairs.items():
                kept = [steady(side) if name == "steady" else side > 0 for side in errors]
                base, head = (list(side[those]) for side, those in zip(times, kept, strict=True))
                told = [list(side[those]) for side, those in zip(errors, kept, strict=True)]
                made.append(
                    pair(base, head, str(case), base_errors=told[0], head_errors=told[1], budget=0.02)
                )
        for name, made in pairs.items():
            verdicts = [told.verdict for told in contrast.compare(made)]
            found[name] += verdicts.count("same")
            alarms += name == "steady" and "slower" in verdicts
    assert alarms <= 1
    assert found["steady"] > 0.975 * 4000
    assert found["all"] < 0.96 * 4000


# History


def nights(count: int, night: float, launch: float, seed: int, per_night: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        5 * np.exp(night * rng.standard_normal() + launch * rng.standard_normal(per_night))
        for _ in range(count)
    ]


def test_history_tells_nights_from_launches() -> None:
    found = history(nights(400, night=0.01, launch=0.003, seed=0))
    assert found.launch == pytest.approx(0.003, rel=0.1)
    assert found.night == pytest.approx(0.01, rel=0.1)
    assert found.freedom == 133


def test_nights_that_differ_by_their_launches_alone_do_not_differ() -> None:
    found = [history(nights(40, night=0.0, launch=0.003, seed=seed)).night for seed in range(20)]
    assert np.mean(np.square(found)) < 0.1 * 0.003**2


def test_a_slow_drift_is_no_noise() -> None:
    drifting = [night * math.exp(0.001 * at) for at, night in enumerate(nights(40, 0.001, 0.001, 1))]
    assert np.std([np.log(night).mean() for night in drifting]) > 0.01
    assert history(drifting).night < 0.002


def test_history_needs_three_nights() -> None:
    with pytest.raises(ValueError, match="got 2 nights, want three or more"):
        history(nights(2, 0.01, 0.01, 0))


# Pairs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base": []}, r"case overlapped_ms: base: got \[\], want a positive number per launch"),
        ({"head": [1.0, 0.0]}, r"head: got \[1.0, 0.0\], want a positive"),
        ({"head": [1.0, math.nan]}, "want a positive number"),
        ({"base_errors": [0.1]}, r"base: got the errors \[0.1\], want one per launch or none"),
        ({"head_errors": [0.1, -1.0, 0.1]}, "want one per launch or none"),
        ({"budget": 0.0}, "budget: got 0.0, want a share above 0"),
    ],
)
def test_a_pair_that_cannot_be_tested_is_refused(given: dict[str, object], message: str) -> None:
    sides = {"base": [1.0, 1.0, 1.0], "head": [1.0, 1.0, 1.0]}
    with pytest.raises(ValueError, match=message):
        pair(**{**sides, **given})  # type: ignore[arg-type]


def test_a_shift_and_its_variance_are_those_of_welch_less_his_unequal_variances() -> None:
    tests = Evidence.of([pair([5.0, 5.1, 5.2], [5.5, 5.6, 5.7, 5.9, 5.4])], "interleaved")
    base, head = np.log([5.0, 5.1, 5.2]), np.log([5.5, 5.6, 5.7, 5.9, 5.4])
    assert tests.shift[0] == pytest.approx(head.mean() - base.mean())
    assert tests.unit[0] == pytest.approx(math.sqrt(1 / 3 + 1 / 5))
    assert tests.freedom[0] == 6
    assert tests.variance[0] == pytest.approx((2 * base.var(ddof=1) + 4 * head.var(ddof=1)) / 6)


def test_errors_of_the_launches_are_a_floor_of_the_shift() -> None:
    errors = {"base_errors": [0.01, 0.02, 0.02], "head_errors": [0.01, 0.01]}
    tests = Evidence.of([pair([5.0] * 3, [5.0] * 2, **errors)], "interleaved")
    error = math.sqrt((0.01**2 + 0.02**2 + 0.02**2) / 9 + (0.01**2 + 0.01**2) / 4)
    assert tests.floor[0] * tests.unit[0] == pytest.approx(error)


def test_nights_take_both_terms_from_history() -> None:
    known = History(launch=0.002, night=0.005, freedom=6)
    tests = Evidence.of([pair([5.0, 5.001, 5.002], [5.5, 5.501, 5.502], history=known)], "nights")
    assert tests.variance[0] == pytest.approx(2 * (0.005**2 + 0.002**2 / 3))
    assert (tests.unit[0], tests.freedom[0]) == (1.0, 6)
    assert tests.spread.tails == 5.0


def test_a_night_noisier_than_history_counts_as_it_is() -> None:
    known = History(launch=0.002, night=0.005, freedom=6)
    tests = Evidence.of([pair([5.0, 5.5, 6.0], [5.5, 6.0, 6.5], history=known)], "nights")
    logs = [np.log([5.0, 5.5, 6.0]), np.log([5.5, 6.0, 6.5])]
    tonight = np.mean([log.var(ddof=1) for log in logs])
    assert tests.variance[0] == pytest.approx(2 * (0.005**2 + tonight / 3))


def test_nights_without_a_history_are_refused() -> None:
    with pytest.raises(ValueError, match="case overlapped_ms: no history, which nights are compared by"):
        Evidence.of([pair([5.0], [5.0])], "nights")


def test_history_says_which_of_the_cases_is_the_noisy_one() -> None:
    """Cases that do as history expects are alike, whatever their noise: the noisy one borrows from the quiet ones."""
    rng = np.random.default_rng(0)
    usual = np.where(np.arange(100) < 5, 0.03, 0.001)
    launches = np.exp(usual[:, None] * rng.standard_normal((100, 6)))
    known = [
        pair(list(row[:3]), list(row[3:]), str(at), history=History(launch=usual[at], night=0.0, freedom=9.0))
        for at, row in enumerate(launches)
    ]
    reach = Evidence.of(known, "interleaved").spread.reach(1e-4) / usual
    assert np.median(reach[:5]) == pytest.approx(np.median(reach), rel=0.1)
    unknown = [pair(list(row[:3]), list(row[3:]), str(at)) for at, row in enumerate(launches)]
    assert np.median(
        Evidence.of(unknown, "interleaved").spread.reach(1e-4)[:5] / usual[:5]
    ) > 1.2 * np.median(reach)


def test_cases_with_and_without_history_stand_side_by_side() -> None:
    rng = np.random.default_rng(1)
    launches = np.exp(0.001 * rng.standard_normal((60, 6)))
    known = History(launch=0.001, night=0.0, freedom=9.0)
    pairs = [
        pair(list(row[:3]), list(row[3:]), str(at), history=known if at % 3 else None)
        for at, row in enumerate(launches)
    ]
    reach = Evidence.of(pairs, "interleaved").spread.reach(0.025)
    assert reach.min() > 0.001
    assert reach.max() < 0.004


# Launches that are each at one of two times


@pytest.mark.parametrize(
    ("base", "head", "apart"),
    [
        ([4.86, 4.861, 5.05], [4.86, 5.051, 5.05], True),
        ([4.86, 4.861, 5.05], [5.052, 5.051, 5.05], True),
        ([4.86, 4.861, 4.862], [5.052, 5.051, 5.05], False),
        ([4.86, 4.861, 4.862], [4.863, 4.861, 5.05], False),
        ([4.86, 4.91, 4.98], [4.88, 4.95, 5.05], False),
        ([4.86], [5.05], False),
        ([4.86] * 3, [4.86] * 3, False),
    ],
)
def test_a_gap_is_seen_where_one_side_has_launches_on_both_ends(base: list, head: list, apart: bool) -> None:
    """Neither a plain shift of all launches nor one launch that went astray is such a gap."""
    gap = Evidence.of([pair(base, head)], "interleaved").gap[0]
    assert gap == pytest.approx(math.log(5.05 / 4.86), rel=0.01) if apart else gap == 0.0


@pytest.mark.parametrize("launches", [3, 5])
def test_plain_noise_rarely_looks_like_two_times(launches: int) -> None:
    x = np.exp(0.03 * np.random.default_rng(2).standard_t(5, (3000, 2 * launches)))
    pairs = [pair(list(row[:launches]), list(row[launches:])) for row in x]
    assert np.mean(Evidence.of(pairs, "interleaved").gap > 0) < 0.002


def test_others_that_alternate_leave_a_shift_of_that_size_open() -> None:
    """With three launches a side, alternation looks like a shift in 1 of 64; with seven, in 1 of 16,384."""
    two = pair([4.86, 4.861, 5.05], [4.86, 5.051, 5.05], "alternates")
    shifted = pair([4.86, 4.861, 4.862], [5.05, 5.051, 5.052], "shifted")
    tests = Evidence.of([two, shifted], "interleaved")
    gap = tests.gap[0]
    assert tests.least(tests.launches, 0.005)[1] == pytest.approx(2 * gap)
    assert tests.least(tests.launches, 0.005)[0] == tests.minimum[0], "its own spread tells"
    assert tests.least(np.full(2, 14), 0.005)[1] == tests.minimum[1]


def test_others_of_another_population_say_nothing_of_a_shift_or_a_spread() -> None:
    """Pageable copies alternate, as is known beforehand: pinned ones beside them are judged by pinned ones."""
    rng = np.random.default_rng(4)
    quiet = [
        pair(*np.exp(0.001 * rng.standard_normal((2, 5))).tolist(), str(at), population="pinned")
        for at in range(20)
    ]
    two = [
        pair([4.86, 4.861, 5.05], [4.86, 5.051, 5.05], f"alternates {at}", population="pageable")
        for at in range(20)
    ]
    alone, beside = Evidence.of(quiet, "interleaved"), Evidence.of([*quiet, *two], "interleaved")
    assert (beside.least(beside.launches, 0.005)[:20] == beside.minimum[:20]).all()
    assert (beside.least(beside.launches, 0.005)[20:] > 2 * beside.minimum[20:]).all()
    assert beside.spread.reach(1e-4)[:20] == pytest.approx(alone.spread.reach(1e-4))
