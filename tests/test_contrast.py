"""Verdicts: how often unchanged code is called slower, and how often a loss is, on simulated launches (seeded).

OVERLAP_COMPARISONS=2000 repeats every scenario that often, as the README's figures were made. Noise is that of a calm
H200 (harness/contrast.py), 0.11 % of the overlapped and the copy's time and 0.06 % of the compute's, unless a scenario
says otherwise. Every handling of noise has a test beside it that shows what comes without.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq
from scipy.special import digamma, polygamma, stdtr

from harness import contrast, evidence, metrics
from harness import record as records
from harness.contrast import LEVEL, Contrast, calls, compare, confirm
from harness.evidence import Evidence, History, Pair, history

COMPARISONS = int(os.environ.get("OVERLAP_COMPARISONS", "100"))
CASES = 100
H200 = (0.0011, 0.0011, 0.0006)
BUSY_H200 = (0.0039, 0.0036, 0.0009)
QUANTITIES = ("overlapped_ms", "transfer_ms", "compute_ms")
RECORDS = Path(__file__).parent.parent / "results" / "records" / "h200-1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Between launches, on a log scale. sd: of all cases; without it, quantities: of each quantity. noisy: so many
    cases with another sd. student: tails of t(5), as wide. apart: so many cases whose launches are each at one of two
    times so far apart."""

    sd: float | None = None
    quantities: tuple[float, ...] = H200
    noisy: tuple[int, float] = (0, 0.0)
    student: bool = False
    apart: tuple[int, float] = (0, 0.0)

    def spread(self) -> np.ndarray:
        found = np.tile(self.quantities if self.sd is None else (self.sd,) * 3, (CASES, 1))
        found[: self.noisy[0]] = self.noisy[1]
        return found

    def launches(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """(cases, quantities, launches) logs."""
        shape = (CASES, len(H200), count)
        drawn = rng.standard_t(5, shape) / math.sqrt(5 / 3) if self.student else rng.standard_normal(shape)
        found = self.spread()[..., None] * drawn
        cases, gap = self.apart
        found[:cases] += gap * rng.integers(0, 2, (cases, 1, count))
        return found


def of(base: np.ndarray, head: np.ndarray, errors: np.ndarray | None = None) -> Evidence:
    """As Evidence.of the pairs, a hundred times faster. Gaps are left out: they only keep effects from being called.

    errors: (cases, quantities) of a launch by its rounds.
    """
    b, h = base.shape[-1], head.shape[-1]
    squares = sum(((side - side.mean(-1, keepdims=True)) ** 2).sum(-1) for side in (base, head))
    tests = base.shape[0] * base.shape[1]
    return Evidence(
        design="interleaved",
        shift=(head.mean(-1) - base.mean(-1)).ravel(),
        unit=np.full(tests, math.sqrt(1 / b + 1 / h)),
        variance=np.ravel(squares) / (b + h - 2),
        freedom=np.full(tests, b + h - 2.0),
        floor=np.zeros(tests) if errors is None else errors.ravel(),
        scale=np.ones(tests) if errors is None else errors.ravel(),
        ruler=np.full(tests, evidence.RULERS.index("none" if errors is None else "rounds")),
        owner=np.repeat(np.arange(base.shape[0]), base.shape[1]),
        population=np.zeros(tests, dtype=np.intp),
        launches=np.full(tests, b + h),
        minimum=np.full(tests, math.log1p(0.01)),
        gap=np.zeros(tests),
    )


def pairs(base: np.ndarray, head: np.ndarray, **more: object) -> list[Pair]:
    return [
        Pair(
            case=str(case),
            quantity=QUANTITIES[at],
            base=list(5 * np.exp(base[case, at])),
            head=list(5 * np.exp(head[case, at])),
            **more,  # type: ignore[arg-type]
        )
        for case in range(base.shape[0])
        for at in range(base.shape[1])
    ]


Slower = Callable[[Evidence], np.ndarray]


def false_alarms(
    noise: Noise,
    launches: int,
    slower: Slower = lambda tests: calls(tests) > 0,
    comparisons: int = COMPARISONS,
) -> float:
    """The share of comparisons of unchanged code in which any test is called slower."""
    rng = np.random.default_rng(1)
    drawn = ((noise.launches(rng, launches), noise.launches(rng, launches)) for _ in range(comparisons))
    return float(np.mean([slower(of(base, head)).any() for base, head in drawn]))


def found(noise: Noise, launches: int, loss: float, comparisons: int = max(4, COMPARISONS // 5)) -> float:
    """The share of losses that are called, of ten in each comparison."""
    rng = np.random.default_rng(2)
    hits = []
    for _ in range(comparisons):
        base, head = noise.launches(rng, launches), noise.launches(rng, launches)
        head[-10:, 0] += math.log1p(loss)
        hits.append(calls(of(base, head)).reshape(base.shape[:2])[-10:, 0] > 0)
    return float(np.mean(hits))


def test_the_fast_way_to_evidence_is_the_real_one() -> None:
    rng = np.random.default_rng(0)
    base, head = Noise().launches(rng, 3), Noise().launches(rng, 5)
    told = {"base_errors": [0.001] * 3, "head_errors": [0.001] * 5}
    for fast, real in (
        (of(base, head), Evidence.of(pairs(base, head), "interleaved")),
        (of(base, head, np.full((CASES, 3), 0.001)), Evidence.of(pairs(base, head, **told), "interleaved")),
    ):
        for field in dataclasses.fields(Evidence):
            if field.name != "design":
                assert getattr(fast, field.name) == pytest.approx(getattr(real, field.name)), field.name


# Noise as recorded


@pytest.mark.parametrize(("commit", "stated"), [("00901578", H200), ("aa141224", BUSY_H200)])
def test_the_noise_of_an_h200_is_that_of_its_records(commit: str, stated: tuple[float, ...]) -> None:
    made = [records.read(path) for path in sorted(RECORDS.glob(f"*-{commit}.json"))]
    by_key = [
        {case.key: case for case in one.cases if case.status == "ok"} for one in made if len(one.cases) > 30
    ]
    launches = len(by_key)
    settled = [[one[key] for one in by_key] for key in set.intersection(*(set(one) for one in by_key))]
    lucky = math.sqrt(stats.chi2.median(launches - 1) / (launches - 1))
    for name, spread in zip(QUANTITIES, stated, strict=True):
        medians = np.log([[metrics.launch_values(case, name)[0] for case in cases] for cases in settled])
        assert np.median(medians.std(axis=1, ddof=1)) / lucky == pytest.approx(spread, rel=0.15), name


# Unchanged code

SCENARIOS = {
    "H200": Noise(),
    "H200, t(5)": Noise(student=True),
    "busy H200, t(5)": Noise(quantities=BUSY_H200, student=True),
    "3 %": Noise(sd=0.03),
    "3 %, t(5)": Noise(sd=0.03, student=True),
    "5 noisy cases, 3 %": Noise(noisy=(5, 0.03)),
    "5 noisy cases, 3 %, t(5)": Noise(noisy=(5, 0.03), student=True),
    "5 noisy cases, 1 %": Noise(noisy=(5, 0.01)),
    "5 noisy cases, 0.6 %": Noise(noisy=(5, 0.006)),
    "1 noisy case, 1 %": Noise(sd=0.0011, noisy=(1, 0.01)),
}


@pytest.mark.parametrize("noise", SCENARIOS.values(), ids=SCENARIOS)
@pytest.mark.parametrize("launches", [3, 5])
def test_unchanged_code_is_slower_somewhere_in_at_most_1_of_100_comparisons(
    noise: Noise, launches: int
) -> None:
    assert false_alarms(noise, launches) <= 0.01


def test_launches_that_alternate_are_no_loss() -> None:
    """Five cases at two times, 4 % apart: in one comparison of twelve, one of them has all of base at the lower."""
    noise, rng, called = Noise(apart=(5, 0.04)), np.random.default_rng(3), []
    for _ in range(COMPARISONS * 3 // 5):
        tests = Evidence.of(pairs(noise.launches(rng, 3), noise.launches(rng, 3)), "interleaved")
        blind = dataclasses.replace(tests, gap=np.zeros_like(tests.gap))
        called.append([(calls(each) > 0).any() for each in (tests, blind)])
    seen, unseen = np.mean(called, axis=0)
    assert seen <= 0.01
    assert unseen > 0.03, "without the gaps of the others they are called"


def test_cases_known_to_alternate_hide_no_loss_of_the_others() -> None:
    """A dozen pageable cases at two speeds, 15 % apart, beside pinned ones that are as quiet as an H200's."""
    noise, rng, called = Noise(apart=(12, 0.15)), np.random.default_rng(21), []
    for _ in range(COMPARISONS // 10):
        base, head = noise.launches(rng, 3), noise.launches(rng, 3)
        head[-10:, 0] += math.log1p(0.05)
        mixed = pairs(base, head)
        known = [
            dataclasses.replace(one, population="pageable" if int(one.case) < 12 else "pinned")
            for one in mixed
        ]
        called.append([[one.verdict == "slower" for one in compare(told)] for told in (known, mixed)])
    seen, hidden = np.mean(called, axis=0)
    lost = np.arange(3 * CASES) >= 3 * (CASES - 10)
    lost &= np.arange(3 * CASES) % 3 == 0
    assert seen[lost].mean() >= 0.95
    assert seen[~lost].mean() <= 0.01 / lost.size * 10
    assert hidden[lost].mean() < 0.1, "taken for cases of one kind they hide it"


def moderated(distance: np.ndarray, variance: np.ndarray, freedom: float) -> np.ndarray:
    """One-sided p of limma's moderated t (Smyth 2004): the spreads of all tests drawn from one inverse chi^2."""
    e = np.log(variance) - digamma(freedom / 2) + np.log(freedom / 2)
    excess = e.var(ddof=1) - polygamma(1, freedom / 2)
    prior, pooled = 1e6, np.exp(e.mean())
    if excess > 0:
        prior = 2 * brentq(lambda half: polygamma(1, half) - excess, 1e-3, 1e6)
        pooled = np.exp(e.mean() + digamma(prior / 2) - np.log(prior / 2))
    posterior = (prior * pooled + freedom * variance) / (prior + freedom)
    return np.asarray(stdtr(prior + freedom, -distance / np.sqrt(posterior)))


def test_one_shape_for_all_spreads_calls_a_lone_noisy_case() -> None:
    """Plain shrinkage, limma's moderated t: the noisy case is taken for one of the quiet."""

    def shrunk(tests: Evidence) -> np.ndarray:
        p = moderated(tests.shift / tests.unit, tests.variance, tests.freedom[0])
        return (p * len(p) <= LEVEL) & (tests.shift >= tests.minimum)

    assert false_alarms(SCENARIOS["1 noisy case, 1 %"], 3, shrunk, 200) > 0.03


def test_without_the_correction_most_comparisons_call_something() -> None:
    def uncorrected(tests: Evidence) -> np.ndarray:
        return (tests.spread.beyond(tests.shift / tests.unit) <= LEVEL) & (tests.shift >= tests.minimum)

    assert false_alarms(Noise(sd=0.03), 3, uncorrected, 40) > 0.5


# Losses


@pytest.mark.parametrize("loss", [0.05, 0.02])
@pytest.mark.parametrize(
    "noise", [Noise(), Noise(student=True), Noise(noisy=(5, 0.03))], ids=["normal", "t(5)", "5"]
)
def test_a_loss_at_the_noise_of_an_h200_is_called_from_3_launches_a_side(noise: Noise, loss: float) -> None:
    assert found(noise, 3, loss) >= 0.95


def test_5_percent_at_the_noise_of_a_busy_h200_is_called_from_3_launches_a_side() -> None:
    assert found(Noise(quantities=BUSY_H200), 3, 0.05) >= 0.95


def test_10_percent_at_3_percent_noise_is_called_from_7_launches_a_side() -> None:
    assert found(Noise(sd=0.03), 7, 0.10) >= 0.9


def test_launches_alone_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test by its own spread, the ordinary t test: sound, and blind."""
    monkeypatch.setattr("harness.spreads.STRANGERS", 1e9)
    assert found(Noise(sd=0.03), 7, 0.10, 4) < 0.7
    assert found(Noise(), 3, 0.02, 4) < 0.9


def mixed(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(cases, 3) spreads and errors of the launches of very unlike cases, as those of an H200 are: 0.05 to 20 %."""
    errors = 0.001 * np.exp(np.clip(1.5 * rng.standard_normal((CASES, 1)), -1.5, 4)) * np.ones(3)
    return 2 * errors * np.exp(0.5 * rng.standard_normal((CASES, 1))), errors


def test_the_rounds_tell_noisy_cases_from_quiet_ones() -> None:
    rng, loss = np.random.default_rng(18), math.log1p(0.04)
    alarms, told, untold = [], [], []
    for _ in range(COMPARISONS):
        spread, errors = mixed(rng)
        base, head = (spread[..., None] * rng.standard_normal((CASES, 3, 3)) for _ in range(2))
        alarms.append((calls(of(base, head, errors)) > 0).any())
        calm = np.flatnonzero((spread[:, 0] > 0.003) & (spread[:, 0] < 0.005))
        head[calm, 0] += loss
        for hits, known in ((told, errors), (untold, None)):
            hits.append((calls(of(base, head, known)).reshape(CASES, 3)[calm, 0] > 0).mean())
    assert np.mean(alarms) <= 0.01
    assert np.mean(told) > 0.85
    assert np.mean(untold) < np.mean(told) - 0.15


def test_rounds_that_hide_the_noise_of_their_launches_raise_no_alarm() -> None:
    """Five cases vary by fifteen times the error of their rounds, the others by twice."""
    rng, alarms = np.random.default_rng(19), []
    for _ in range(COMPARISONS):
        errors = np.full((CASES, 3), 0.0005)
        spread = 2 * errors
        spread[:5] = 15 * errors[:5]
        base, head = (spread[..., None] * rng.standard_normal((CASES, 3, 3)) for _ in range(2))
        alarms.append((calls(of(base, head, errors)) > 0).any())
    assert np.mean(alarms) <= 0.01


# Verdicts


def quiet(*, cases: int = 40, launches: int = 3, loss: float = 0.0, **more: object) -> list[Pair]:
    """Unchanged cases at H200 noise, but for the headline of case 0."""
    rng = np.random.default_rng(5)
    base, head = (0.0011 * rng.standard_normal((cases, 3, launches)) for _ in range(2))
    head[0, 0] += math.log1p(loss)
    return pairs(base, head, **more)


def headline(told: list[Contrast]) -> Contrast:
    return told[0]


def test_unchanged_cases_are_the_same_and_say_what_they_could_have_seen() -> None:
    told = compare(quiet())
    assert {one.verdict for one in told} == {"same"}
    assert all(-0.005 < one.low < one.effect < one.high < 0.005 for one in told)
    assert all(0.01 < one.visible < 0.02 for one in told)
    assert not any(one.tripped for one in told)


def test_a_loss_is_called_with_its_size() -> None:
    one = headline(compare(quiet(loss=0.05)))
    assert (one.verdict, one.tripped) == ("slower", True)
    assert one.effect == pytest.approx(0.05, abs=0.003)
    assert one.low < 0.05 < one.high
    assert one.head / one.base - 1 == pytest.approx(one.effect)
    assert one.p_slower <= LEVEL < one.p_faster


def test_a_gain_is_called_faster() -> None:
    one = headline(compare(quiet(loss=-0.05)))
    assert (one.verdict, one.tripped) == ("faster", False)
    assert one.p_faster <= LEVEL < one.p_slower


def test_what_is_certain_and_small_is_the_same() -> None:
    one = headline(compare(quiet(loss=0.006)))
    assert one.p_slower <= LEVEL
    assert (one.verdict, one.tripped) == ("same", False)


def test_the_budget_says_what_is_small() -> None:
    assert headline(compare(quiet(loss=0.03))).verdict == "slower"
    assert headline(compare(quiet(loss=0.03, budget=0.1))).verdict == "same"


def test_a_noisy_case_is_inconclusive_and_says_what_it_could_have_seen() -> None:
    rng = np.random.default_rng(6)
    noise = Noise(noisy=(5, 0.03))
    told = compare(pairs(noise.launches(rng, 5), noise.launches(rng, 5)))
    assert {one.verdict for one in told[:15]} == {"inconclusive"}
    assert {one.verdict for one in told[15:]} == {"same"}
    assert 0.05 < np.median([one.visible for one in told[:15]]) < 0.5


@pytest.mark.parametrize(("noise", "launches"), [(Noise(), 3), (Noise(sd=0.01), 5), (Noise(sd=0.03), 5)])
def test_the_visible_loss_is_seen_in_80_of_100(noise: Noise, launches: int) -> None:
    rng = np.random.default_rng(7)
    told = compare(pairs(noise.launches(rng, launches), noise.launches(rng, launches)))
    visible = float(np.median([one.visible for one in told[::3]]))
    assert found(noise, launches, visible, 20) == pytest.approx(0.8, abs=0.1)


def test_the_interval_covers_the_effect_in_95_of_100() -> None:
    noise, rng = Noise(noisy=(5, 0.03)), np.random.default_rng(8)
    told = [one for _ in range(8) for one in compare(pairs(noise.launches(rng, 3), noise.launches(rng, 3)))]
    assert np.mean([one.low < 0 < one.high for one in told]) == pytest.approx(0.95, abs=0.02)


def test_errors_inside_the_launches_are_believed() -> None:
    """Launches that agree by luck, each of rounds that do not."""
    lucky = Pair(case="lucky", quantity="overlapped_ms", base=[5.0, 5.001, 5.002], head=[5.25, 5.251, 5.252])
    doubted = dataclasses.replace(lucky, base_errors=[0.04] * 3, head_errors=[0.04] * 3)
    assert compare([lucky, *quiet()])[0].verdict == "slower"
    assert compare([doubted, *quiet()])[0].verdict == "inconclusive"


def test_unequal_counts_of_launches_are_compared() -> None:
    told = compare([*quiet(launches=3, loss=0.05)[:60], *quiet(launches=7)[60:]])
    assert [one.verdict for one in told].count("slower") == 1
    uneven = Pair(
        case="uneven", quantity="overlapped_ms", base=[5.0, 5.005], head=[5.25, 5.253, 5.248, 5.251]
    )
    assert compare([uneven, *quiet()])[0].verdict == "slower"


def test_a_lone_case_sees_less_than_one_of_many() -> None:
    """Nobody else tells how much launches vary."""
    noise, rng = Noise(sd=0.01), np.random.default_rng(16)
    given = pairs(noise.launches(rng, 3), noise.launches(rng, 3))
    many = [one.visible for one in compare(given)[::3]]
    alone = [compare(given[at : at + 3])[0].visible for at in range(0, 60, 3)]
    assert np.median(alone) > 1.25 * np.median(many)


def test_the_correction_is_holms() -> None:
    assert contrast._holm(np.array([0.01, 0.5, 0.02, 0.015])) == pytest.approx([0.04, 0.5, 0.045, 0.045])
    assert contrast._holm(np.array([0.6, 0.7])) == pytest.approx([1.0, 1.0])


def test_nothing_is_nothing() -> None:
    assert compare([]) == []
    assert confirm([], []) == []


def test_the_order_is_that_of_the_pairs() -> None:
    given = quiet()
    assert [(one.case, one.quantity) for one in compare(given)] == [
        (pair.case, pair.quantity) for pair in given
    ]


# The second stage


def twice(noise: Noise, launches: int, loss: float = 0.0, comparisons: int = max(4, COMPARISONS // 10)):
    """(comparisons, cases) whether the headline was called in both stages, and (comparisons,) whether any other was."""
    rng = np.random.default_rng(9)
    hits, others = [], []
    for _ in range(comparisons):
        stages = []
        for _ in range(2):
            base, head = noise.launches(rng, launches), noise.launches(rng, launches)
            head[-10:, 0] += math.log1p(loss)
            stages.append(pairs(base, head))
        slower = np.array([one.verdict == "slower" for one in confirm(*stages)]).reshape(CASES, 3)
        hits.append(slower[-10:, 0].copy())
        slower[-10:, 0] = False
        others.append(slower.any())
    return np.array(hits), np.array(others)


def test_two_stages_call_10_percent_at_3_percent_noise_from_5_launches_a_side() -> None:
    hits, _ = twice(Noise(sd=0.03), 5, 0.10)
    assert hits.mean() >= 0.9
    assert found(Noise(sd=0.03), 5, 0.10, 4) < 0.9, "one stage would not"


def test_two_stages_call_unchanged_code_in_at_most_1_of_100() -> None:
    noise = Noise(sd=0.03, student=True)
    assert false_alarms(noise, 5, lambda tests: tests.shift >= contrast._trip(tests)) > 0.1, (
        "the first one trips"
    )
    hits, others = twice(noise, 5)
    assert max(hits.mean(), others.mean()) <= 0.01


def again(first: list[Pair], loss: float) -> list[Pair]:
    """Fresh launches of case 0."""
    rng = np.random.default_rng(10)
    base, head = (0.0011 * rng.standard_normal((1, 3, 3)) for _ in range(2))
    head[0, 0] += math.log1p(loss)
    return pairs(base, head)


def test_what_trips_and_trips_again_is_slower_by_what_it_was_then() -> None:
    first = quiet(loss=0.05)
    assert headline(compare(first, stages=2)).tripped
    one = headline(confirm(first, again(first, 0.04)))
    assert one.verdict == "slower"
    assert one.effect == pytest.approx(0.04, abs=0.003), "the first launches were picked for being slow"
    assert one.p_slower < headline(compare(first)).p_slower


def test_what_does_not_trip_again_is_not_slower() -> None:
    first = quiet(loss=0.05)
    assert headline(confirm(first, again(first, 0.0))).verdict == "same"
    assert headline(confirm(first, again(first, -0.05))).verdict == "inconclusive"


def test_what_was_not_measured_again_is_open() -> None:
    one = headline(confirm(quiet(loss=0.05), []))
    assert (one.verdict, one.visible) == ("inconclusive", math.inf)


def test_what_did_not_trip_stays_as_it_was() -> None:
    first = quiet(loss=0.05)
    once = compare(first, stages=2)
    assert confirm(first, again(first, 0.05))[1:] == once[1:]


def test_others_that_alternate_leave_a_loss_open_until_it_is_seen_twice() -> None:
    """By chance 1 in 64 that alternates looks like that, 1 in 4,096 in both stages."""
    noise, rng = Noise(apart=(5, 0.04)), np.random.default_rng(17)
    stages = []
    for _ in range(2):
        base, head = noise.launches(rng, 3), noise.launches(rng, 3)
        head[-1, 0] += 0.04
        stages.append(pairs(base, head))
    assert compare(stages[0])[-3].verdict == "inconclusive"
    assert compare(stages[0])[-3].visible > 0.04
    assert compare(stages[0], stages=2)[-3].visible < 0.02
    one = confirm(*stages)[-3]
    assert one.verdict == "slower"
    assert one.visible < 0.02


def test_a_smaller_loss_is_visible_in_two_stages() -> None:
    noise, rng = Noise(sd=0.03), np.random.default_rng(11)
    given = pairs(noise.launches(rng, 5), noise.launches(rng, 5))
    one, two = ([told.visible for told in compare(given, stages=stages)] for stages in (1, 2))  # type: ignore[arg-type]
    assert np.median(two) < 0.9 * np.median(one)
    hits, _ = twice(noise, 5, float(np.median(two)), 20)
    assert hits.mean() == pytest.approx(0.8, abs=0.06)


# Night against night

NIGHT = 0.001


def two_nights(rng: np.random.Generator, *, student: bool, loss: float = 0.0, nights: int = 10) -> list[Pair]:
    """Every quantity of 30 cases, with a history of so many nights of three launches."""
    shape = (90, nights + 2)

    def noise(*size: int) -> np.ndarray:
        return rng.standard_t(5, size) / math.sqrt(5 / 3) if student else rng.standard_normal(size)

    x = NIGHT * noise(*shape, 1) + 0.0011 * noise(*shape, 3)
    x[0, -1] += math.log1p(loss)
    x = 5 * np.exp(x)
    return [
        Pair(
            case=str(at // 3),
            quantity=QUANTITIES[at % 3],
            base=list(x[at, -2]),
            head=list(x[at, -1]),
            history=history(x[at, :-2]),
        )
        for at in range(len(x))
    ]


def test_nights_are_compared_by_how_nights_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nights of unchanged code differ by more than their launches: taken as in turns they would be slower."""
    rng = np.random.default_rng(12)
    drawn = [two_nights(rng, student=True) for _ in range(COMPARISONS // 2)]
    tests = [Evidence.of(given, "nights") for given in drawn]
    assert np.mean([(calls(each) > 0).any() for each in tests]) <= 0.01
    monkeypatch.setattr(evidence, "NIGHT_TAILS", math.inf)
    tests = [Evidence.of(given, "nights") for given in drawn]
    small = [dataclasses.replace(each, minimum=np.zeros(90)) for each in tests]
    assert np.mean([(calls(each) > 0).any() for each in small]) > 0.01, "nights have tails"


def test_a_loss_between_nights_is_called() -> None:
    rng = np.random.default_rng(13)
    told = [headline(compare(two_nights(rng, student=False, loss=0.05), design="nights")) for _ in range(10)]
    assert [one.verdict for one in told].count("slower") >= 9
    assert all(one.visible > 0.012 for one in told)


def test_a_history_of_few_nights_sees_less() -> None:
    rng = np.random.default_rng(14)
    few, many = (
        np.median(
            [told.visible for told in compare(two_nights(rng, student=False, nights=nights), design="nights")]
        )
        for nights in (4, 20)
    )
    assert few > 1.3 * many


def test_nights_have_one_stage() -> None:
    with pytest.raises(ValueError, match="nights have one stage"):
        compare(quiet(history=History(launch=0.001, night=0.001, freedom=3)), design="nights", stages=2)


def test_a_history_makes_a_noisy_case_as_sure_as_the_others() -> None:
    """10 % in a case of 3 % noise among quiet ones, from 5 launches a side."""
    usual = Noise(noisy=(5, 0.03))
    rng, hits = np.random.default_rng(15), {True: 0, False: 0}
    for _ in range(10):
        base, head = usual.launches(rng, 5), usual.launches(rng, 5)
        head[:5, 0] += math.log1p(0.12)
        for known in hits:
            given = pairs(base, head)
            if known:
                past = usual.spread().ravel()
                given = [
                    dataclasses.replace(pair, history=History(launch=past[at], night=0.0, freedom=6.0))
                    for at, pair in enumerate(given)
                ]
            hits[known] += sum(one.verdict == "slower" for one in compare(given)[:15:3])
    assert hits[True] > hits[False] + 5
