"""Thresholds of records made from machines whose every number is known."""

import dataclasses
import itertools
import math

import pytest
from factories_ddp import EVEN, Machine, ddp_record, ddp_result, token_results

from harness import buckets, metrics, terms, threshold
from harness.families import MIB
from harness.threshold import Crossing, Leg, crossing

TOKENS = (512, 1024, 2048, 4096, 8192)

# The last of these buckets is 22 % of the bytes, as of a model with a large embedding.
BIG_LAST = (2 * MIB,) * 400 + (224 * MIB,)
# Half of these buckets are so small that latency is all they cost.
MANY_SMALL = tuple(itertools.chain.from_iterable([(10 * MIB, 64 << 10)] * 100))


def found(machine: Machine, sizes=EVEN, tokens=TOKENS, **axes) -> threshold.TokenSet:
    """The one set of a record of this machine."""
    (made,) = threshold.find(ddp_record(*token_results(machine, tokens, sizes, **axes))).sets
    return made


def truth(machine: Machine, share: float, sizes=EVEN, gradient: int = 2) -> float:
    """Tokens where the machine itself exposes `share`, by bisection of its own law."""
    low, high = 1.0, 2.0**20

    def exposed(tokens: float) -> float:
        return machine.times(sizes, tokens, 2, gradient).share  # type: ignore[arg-type]

    assert exposed(high) < share
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if exposed(middle) >= share else (low, middle)
    return high


# crossings


def test_a_crossing_is_straight_in_log_tokens():
    made = crossing([(256, 0.5), (1024, 0.15), (4096, 0.05)], 0.1)
    assert made == Crossing(pytest.approx(2048), "in", (1024, 4096))
    assert made.weight == pytest.approx(0.5)


def test_the_last_crossing_counts():
    points = [(256, 0.5), (512, 0.02), (1024, 0.2), (2048, 0.0), (4096, 0.01)]
    assert crossing(points, 0.1).tokens == pytest.approx(1024 * math.sqrt(2))


@pytest.mark.parametrize(
    ("shares", "side", "near"),
    [((0.5, 0.3, 0.1), "above", (2048,)), ((0.09, 0.05, -0.01), "below", (512,)), ((0.01, 0.0, 0.2), "above", (2048,))],
)  # fmt: skip
def test_what_is_not_crossed_in_the_range_is_said_to_be_outside(shares, side, near):
    made = crossing(list(zip((512, 1024, 2048), shares, strict=True)), 0.1)
    assert (made.tokens, made.side, made.near) == (None, side, near)


# the measured threshold


@pytest.mark.parametrize("share", [0.05, 0.10])
@pytest.mark.parametrize(
    "machine",
    [
        Machine(), Machine(rate=200e12), Machine(bandwidth=100.0), Machine(work=3.0), Machine(load=1.5),
        Machine(fixed_ms=1.0),
    ],
    ids=["usual", "slow compute", "slow link", "idle parameters", "slower under load", "slow at few tokens"],
)  # fmt: skip
def test_the_threshold_comes_out_within_the_step_of_the_token_counts(machine, share):
    expected = truth(machine, share)
    fine = [round(expected * 1.05**at) for at in (-3, -2, -1, 0, 1, 2, 3)]
    coarse = [round(expected * 2**at) for at in (-1.5, -0.5, 0.5, 1.5)]
    for tokens, error in ((fine, 0.01), (coarse, 1.0)):
        made = {each.share: each for each in found(machine, tokens=tokens).thresholds}[share]
        assert made.measured.tokens == pytest.approx(expected, rel=error)
        assert made.measured.near[0] <= expected <= made.measured.near[1]


def test_the_interval_is_that_of_the_cases():
    """Shares 2 % wider either way give ends that are the crossings of the wider and the narrower shares."""
    made = found(Machine(), half=0.02, tokens=(512, 800, 1024)).thresholds[0]
    exposed = {at: Machine().times(EVEN, at, 2, 2).share for at in (512, 800, 1024)}
    for end, factor in ((made.low, 0.98), (made.high, 1.02)):
        assert end == crossing([(at, share * factor) for at, share in exposed.items()], 0.1)
    assert made.low.tokens < made.measured.tokens < made.high.tokens


def test_without_intervals_none_is_given():
    cases = token_results(Machine(), TOKENS)
    cases[2].metrics["exposed_fraction"].low = None
    made = threshold.find(ddp_record(*cases)).sets[0].thresholds[0]
    assert (made.low, made.high) == (None, None)
    assert made.measured.tokens is not None


def test_a_threshold_outside_the_token_counts_is_above_or_below():
    assert {each.measured.side for each in found(Machine(), tokens=(2048, 4096, 8192)).thresholds} == {
        "below"
    }
    assert {each.measured.side for each in found(Machine(), tokens=(128, 256, 512)).thresholds} == {"above"}


def test_where_both_lie_on_the_same_side_of_the_token_counts_nothing_is_said():
    """Idle parameters double the threshold, but neither it nor the formula's is within what was measured."""
    for tokens in ((2048, 4096, 8192), (128, 256, 512)):
        assert [each.off for each in found(Machine(work=3.0), tokens=tokens).thresholds] == [(), ()]


def test_the_share_that_is_crossed_more_than_once_is_counted():
    cases = token_results(Machine(), TOKENS)
    cases[3].metrics["exposed_fraction"].value = 0.2
    made = threshold.find(ddp_record(*cases)).sets[0]
    assert made.crossings(0.1) == 3
    assert made.thresholds[0].measured.near == (4096, 8192)


# beside it: predicted and derived


@pytest.mark.parametrize(("gradients", "gradient"), [("bf16", 2), ("fp32", 4)])
def test_the_derived_value_is_the_formula_with_what_was_measured(gradients, gradient):
    made = found(Machine(rate=794e12), gradients=gradients).derived
    assert made.rate == pytest.approx(794e12)
    assert made.bandwidth == pytest.approx(303.0)
    assert made.whole == pytest.approx(303.0)
    assert made.gradient == gradient
    assert made.tokens == pytest.approx(buckets.tokens_threshold_ddp(gradient, 2, 794e12, 303.0))
    assert made.tokens == pytest.approx({2: 1310, 4: 2620}[gradient], abs=1)


def test_the_bandwidth_is_that_of_buckets_of_their_size():
    """With latency a bucket of 2 MiB is slower than all bytes in one piece."""
    made = found(Machine(alpha_ms=0.02)).derived
    assert made.bandwidth == pytest.approx(buckets.bus_bandwidth(2 * MIB, 0.02 + 2 * MIB / 303e6, 2))
    assert 300 < made.whole < 303


@pytest.mark.parametrize("machine", [Machine(), Machine(alpha_ms=0.01), Machine(work=3.0)])
@pytest.mark.parametrize("sizes", [EVEN, MANY_SMALL, (8 * MIB,) * 25])
def test_the_prediction_is_exact_where_compute_grows_with_the_tokens(machine, sizes):
    for each in found(machine, sizes, tokens=(256, 1024, 16384)).thresholds:
        assert each.predicted == pytest.approx(truth(machine, each.share, sizes), rel=1e-6)


def test_a_last_bucket_above_the_share_is_predicted_never_to_hide():
    made = found(Machine(), BIG_LAST)
    assert [each.predicted for each in made.thresholds] == [math.inf, math.inf]
    assert {each.measured.side for each in made.thresholds} == {"above"}


def test_token_counts_too_far_apart_are_said_to_be():
    """Between 512 and 2,048 the share falls straight in tokens and then no more: no line in log tokens follows that."""
    near = found(Machine(), tokens=(800, 860, 900, 950, 1000))
    assert [each.coarse for each in near.thresholds] == [None, None]
    for each in found(Machine(), tokens=(512, 2048, 8192)).thresholds:
        assert each.coarse == pytest.approx(each.measured.tokens, rel=0.01)
        assert each.coarse > 1.5 * each.predicted
        assert each.off == (), "the machine does what the formula says"


# which term is off


@pytest.mark.parametrize("tokens", [TOKENS, (512, 2048, 8192)], ids=["five", "three"])
def test_where_measurement_and_formula_agree_nothing_is_said(tokens):
    made = found(Machine(), tokens=tokens)
    assert [each.off for each in made.thresholds] == [(), ()]


@pytest.mark.parametrize(
    ("name", "machine", "sizes", "raises"),
    [
        ("work", Machine(work=3.0), EVEN, True),
        ("work", Machine(work=9.0), EVEN, False),
        ("tail", Machine(), BIG_LAST, True),
        ("latency", Machine(alpha_ms=0.02), MANY_SMALL, True),
        ("rate", Machine(fixed_ms=3.0), EVEN, False),
        ("dilation", Machine(dilation=0.2), EVEN, True),
        ("bandwidth", Machine(load=1.5), EVEN, True),
        ("unexplained", Machine(unexplained_ms=0.6), EVEN, True),
    ],
)
def test_the_term_that_alone_is_off_is_named_first_and_with_its_sign(name, machine, sizes, raises):
    for each in found(machine, sizes).thresholds:
        first, *others = each.off
        assert first.name == name
        assert (first.share > 0) == raises
        assert all(abs(other.share) < 0.3 * abs(first.share) for other in others)


def test_two_terms_that_are_off_are_both_named():
    """Parameters that do half the work, and compute that is slower at few tokens, pull in opposite directions."""
    for each in found(Machine(work=3.0, fixed_ms=1.0)).thresholds:
        assert {term.name: term.share > 0 for term in each.off} == {"work": True, "rate": False}


@pytest.mark.parametrize("work", [5.8, 6.2], ids=["above the formula", "below it"])
def test_inside_a_wide_interval_nothing_is_said(work):
    """The same machine: its other work is named where the cases are sure, and not where they are not."""
    machine, tokens = Machine(work=work), (850, 900, 950, 1050, 2048)
    sure, unsure = (found(machine, tokens=tokens, half=half).thresholds[0] for half in (0.002, 0.99))
    assert [term.name for term in sure.off] == ["work"]
    assert unsure.off == ()
    assert unsure.measured == sure.measured


def test_an_interval_that_reaches_the_formula_from_outside_the_range_agrees():
    """Never under 10 % by its value, and by its interval anywhere from the formula's threshold on."""
    cases = token_results(Machine(dilation=0.12), TOKENS)
    for case in cases:
        case.metrics["exposed_fraction"].low = Machine().times(EVEN, case.params["tokens"], 2, 2).share - 0.01
    made = threshold.find(ddp_record(*cases)).sets[0].thresholds[0]
    assert (made.measured.side, made.low.near) == ("above", (512, 1024))
    assert (made.off, made.unseen) == ((), False)


def test_a_difference_that_no_term_is_sure_of_is_said_to_be_unseen():
    cases = token_results(Machine(dilation=0.2), TOKENS)
    for case in cases:
        case.metrics["dilation_ms"].low -= 1.0
        case.metrics["dilation_ms"].high += 1.0
    for each in threshold.find(ddp_record(*cases)).sets[0].thresholds:
        assert (each.off, each.unseen) == ((), True)
    assert [each.unseen for each in found(Machine()).thresholds] == [False, False]


def test_the_terms_of_a_case_add_up_to_measurement_less_formula():
    machine = Machine(alpha_ms=0.01, work=5.0, fixed_ms=0.5, dilation=0.1, load=1.2, unexplained_ms=0.1)
    made = found(machine, MANY_SMALL)
    most, derived = made.facts[max(made.facts)], made.derived
    for tokens, facts in made.facts.items():
        seen = made.cases[tokens].metrics
        parts = terms.terms(facts, most, derived.bandwidth, derived.tokens, seen)
        gap = seen["exposed_fraction"].value - terms.formula_share(tokens, derived.tokens)
        assert sum(part.share for part in parts) == pytest.approx(gap)
        assert [part.name for part in parts] == list(terms.TERMS)


# which cases


def test_cases_alike_but_for_tokens_are_one_set_and_others_another():
    both = token_results(Machine(), TOKENS) + token_results(Machine(), TOKENS[:3], gradients="fp32")
    alone = token_results(Machine(), TOKENS[:2], bucket=64 * MIB)
    made = threshold.find(ddp_record(*both, *alone))
    assert [list(each.cases) for each in made.sets] == [list(TOKENS), list(TOKENS[:3])]
    assert made.lacking == ""


def test_the_order_of_the_record_does_not_matter():
    forward, backward = token_results(Machine(), TOKENS), token_results(Machine(), TOKENS)[::-1]
    one, other = (threshold.find(ddp_record(*cases)).sets[0] for cases in (forward, backward))
    assert one.thresholds == other.thresholds


@pytest.mark.parametrize("status", ["skipped", "invalid", "error"])
def test_cases_without_a_sound_number_do_not_count(status):
    cases = token_results(Machine(), TOKENS[:3])
    cases[1].status = status
    made = threshold.find(ddp_record(*cases))
    assert made.sets == ()
    assert made.lacking == (
        "no cases alike but for tokens are measured at 3 token counts or more; "
        "the most are of ddp at 512 and 2048 tokens"
    )


def test_a_record_of_other_families_says_that_there_is_none():
    assert threshold.find(ddp_record()).lacking.endswith("or more, and none of ddp is measured at all")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: c.launches[0].checks.pop("alone_ms"), "at 1,024 tokens, alone_ms: launch 0 has none"),
        (lambda c: c.launches[0].checks.update(ready_ms=[]), "at 1,024 tokens, ready_ms: launch 0 has none"),
        (lambda c: c.launches[0].checks.update(alone_ms=[1.0]), "alone_ms: launch 0 has 1 of 512 buckets"),
        (
            lambda c: [launch.checks.update(alone_ms=[0.0] * 512) for launch in c.launches],
            "none took any time",
        ),
        (lambda c: c.launches[0].checks["ready_ms"].reverse(), "ready_ms: not in the order of the buckets"),
        (lambda c: c.launches[0].checks.update(flops="many"), "flops: got 'many', want a number"),
        (lambda c: c.launches[0].checks.update(flops=math.nan), "flops: got nan, want a number"),
        (lambda c: c.launches[0].checks.update(parameters=0), "parameters: got 0, want more"),
        (lambda c: c.launches[0].checks.update(parameters=True), "parameters: got True, want a number"),
        (lambda c: c.launches[1].checks.update(buckets=[1, 2]), "buckets: the launches differ"),
        (lambda c: c.metrics.pop("compute_ms"), "compute_ms: was not measured"),
        (lambda c: c.launches.clear(), "launches: it has none"),
        (
            lambda c: [launch.checks.update(buckets=[2 * MIB] * 511 + [MIB]) for launch in c.launches],
            "buckets: not the same at every number of tokens",
        ),
    ],
)
def test_what_a_case_lacks_is_named_and_the_measured_threshold_stands(spoil, words):
    cases = token_results(Machine(), TOKENS[:3], launches=2)
    whole = threshold.find(ddp_record(*token_results(Machine(), TOKENS[:3]))).sets[0]
    spoil(cases[1])
    (made,) = threshold.find(ddp_record(*cases)).sets
    assert words in made.lacking
    assert made.derived is None
    assert [each.measured for each in made.thresholds] == [each.measured for each in whole.thresholds]
    assert {each.predicted for each in made.thresholds} == {None}


def test_one_rank_has_no_derived_value():
    cases = token_results(Machine(), TOKENS)
    for case in cases:
        case.params["ranks"] = 1
    assert (
        threshold.find(ddp_record(*cases)).sets[0].lacking
        == "ranks: got 1, which has nobody to send anything to"
    )


def test_buckets_that_ended_with_others_leave_a_bandwidth():
    cases = token_results(Machine(), TOKENS)
    for case in cases:
        alone = case.launches[0].checks["alone_ms"]
        case.launches[0].checks["alone_ms"] = [0.0 if at % 4 == 3 else ms for at, ms in enumerate(alone)]
    assert threshold.find(ddp_record(*cases)).sets[0].derived.bandwidth == pytest.approx(303.0)


def test_the_metrics_of_a_run_give_the_same():
    """The factory's numbers are those that metrics.derive takes from the same rounds."""
    cases = token_results(Machine(dilation=0.1, load=1.2), TOKENS)
    one, other = (
        threshold.find(ddp_record(*made)).sets[0]
        for made in (cases, [metrics.derive(case) for case in cases])
    )
    for a, b in zip(one.thresholds, other.thresholds, strict=True):
        assert a.measured.near == b.measured.near
        assert a.measured.tokens == pytest.approx(b.measured.tokens)
        assert [term.name for term in a.off] == [term.name for term in b.off]


# a family of its own


def test_a_family_is_a_row_of_the_table(monkeypatch):
    """fsdp's two legs: other bytes for each parameter, other FLOP, metrics of other names; nothing else differs."""

    def gather(case):
        facts = terms.Facts.of(case)
        return dataclasses.replace(facts, wire=facts.wire / 2)

    forward = Leg(
        name="forward", moved=lambda g: 2.0, work=2.0, law="r F u / W", prefix="forward_", facts=gather
    )
    backward = Leg(
        name="backward",
        moved=lambda g: 2 + g,
        work=4.0,
        law="((2+g)/4) r F u / W",
        prefix="backward_",
        facts=gather,
    )
    monkeypatch.setitem(threshold.LEGS, "fsdp", (forward, backward))
    cases = []
    for tokens in TOKENS:
        case = ddp_result(Machine(), tokens=tokens, gradients="fp32")
        case.family, case.key = "fsdp", case.key.replace("ddp", "fsdp")
        case.metrics |= {
            f"{leg}_{name}": case.metrics[name]
            for leg in ("forward", "backward")
            for name in list(case.metrics)
        }
        cases.append(case)
    one, other = threshold.find(ddp_record(*cases)).sets
    assert (one.leg.name, other.leg.name) == ("forward", "backward")
    for made, expected in (
        (one, buckets.tokens_threshold_fsdp_forward(2, one.derived.rate, one.derived.bandwidth)),
        (other, buckets.tokens_threshold_fsdp_backward(4, 2, one.derived.rate, one.derived.bandwidth)),
    ):
        assert made.derived.tokens == pytest.approx(expected)
        assert made.derived.bandwidth == pytest.approx(303.0 / 2), (
            "a gather moves half of what an all-reduce does"
        )
        assert (
            made.thresholds[0].measured.near == found(Machine(), gradients="fp32").thresholds[0].measured.near
        )
