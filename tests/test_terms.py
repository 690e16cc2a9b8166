"""What a case says of its buckets, and which terms are named."""

import pytest
from factories_ddp import EVEN, Machine, ddp_result

from harness import terms
from harness.families import MIB
from harness.record import Metric
from harness.terms import Facts, Term


def facts(machine=None, sizes=EVEN, **axes) -> Facts:
    return Facts.of(ddp_result(machine or Machine(), sizes, **axes))


def test_the_facts_of_a_case_are_what_its_launches_hold():
    made = facts(Machine(rate=500e12), gradients="fp32", tokens=4096)
    assert (made.tokens, made.ranks, made.sizes) == (4096, 2, EVEN)
    assert made.total == sum(EVEN)
    assert made.gradient == 4
    assert made.wire == 1.0
    assert made.rate == pytest.approx(500e12)
    assert made.work == pytest.approx(4.0), "FLOP of the backward for each parameter and token"
    assert made.window == pytest.approx(2 / 3 * made.compute)


def test_times_are_the_medians_of_the_launches():
    case = ddp_result(Machine(), (MIB, MIB), launches=3)
    for launch, factor in zip(case.launches, (1.0, 5.0, 1.1), strict=True):
        launch.checks["alone_ms"] = [factor, 2 * factor]
    assert Facts.of(case).alone == (1.1, 2.2)


def test_the_backward_begins_where_most_rounds_say_else_after_a_third():
    """2 of 6 FLOP are the forward's."""
    case = ddp_result(Machine(), EVEN)
    rounds = [round for rank in case.launches[0].ranks for round in rank.rounds]
    for round, begins in zip(rounds, (1.0, 2.0, 2.0, 2.0, 2.0, 9.0), strict=True):
        round.spans["compute.backward"] = begins
    assert Facts.of(case).begins == 2.0
    for round in rounds:
        round.spans.clear()
    assert Facts.of(case).begins == pytest.approx(case.metrics["compute_ms"].value / 3)


def test_the_bandwidth_is_the_median_over_bytes():
    """A hundred small buckets that are slow do not outvote the ones that hold the bytes."""
    machine = Machine(alpha_ms=0.05)
    one = facts(machine, (64 << 10,) * 100 + (100 * MIB,) * 2)
    expected = 100 * MIB / (0.05 + 100 * MIB / 303e6) / 1e6
    assert terms.bandwidth([one]) == pytest.approx(expected)


def test_no_share_of_the_formula_is_negative():
    assert terms.formula_share(250, 1000) == 0.75
    assert terms.formula_share(5000, 1000) == 0.0


def test_dilation_counts_where_the_compute_is_the_longer_and_not_where_the_link_never_rests():
    """Where the transfer is the longer, its end does not move: what the dilation adds, the tail loses."""
    for tokens, expected in ((8192, 0.2), (256, 0.0)):
        machine = Machine(dilation=0.2)
        case, most = (ddp_result(machine, tokens=each) for each in (tokens, 8192))
        made = {
            term.name: term.share
            for term in terms.terms(Facts.of(case), Facts.of(most), 303.0, 990.0, case.metrics)
        }
        assert made["dilation"] == pytest.approx(expected, abs=0.003)
        assert made["bandwidth"] == pytest.approx(0.0, abs=1e-9)
        assert made["unexplained"] == pytest.approx(0.0, abs=1e-9)


def test_without_tail_and_dilation_what_they_tell_is_unexplained():
    case = ddp_result(Machine(dilation=0.2), tokens=8192)
    known = {name: metric for name, metric in case.metrics.items() if name not in ("tail_ms", "dilation_ms")}
    made = {t.name: t.share for t in terms.terms(Facts.of(case), Facts.of(case), 303.0, 990.0, known)}
    assert (made["dilation"], made["bandwidth"]) == (0.0, 0.0)
    assert made["unexplained"] == pytest.approx(0.2, abs=0.003)


def test_one_bucket_is_dilated_as_a_whole():
    """Nothing runs beside a backward whose only bucket is ready at its end."""
    case = Facts.of(ddp_result(Machine(), (512 * MIB,)))
    assert terms.tail_alone(case, 3.0) == pytest.approx(case.alone[0])


def test_terms_between_two_cases_are_weighed_and_keep_the_case_that_shows_them_best():
    one = [Term("work", 0.4, 0.01, 512), Term("tail", 0.0, 0.0, 512)]
    other = [Term("work", 0.1, 0.02, 1024), Term("tail", -0.2, 0.0, 1024)]
    work, tail = terms.mixed(one, other, 0.25)
    assert (work.share, work.half, work.tokens) == (pytest.approx(0.325), pytest.approx(0.0125), 512)
    assert (tail.share, tail.tokens) == (pytest.approx(-0.05), 1024)


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ({"work": 0.05, "tail": 0.004}, ["work"]),
        ({"work": 0.05, "tail": 0.011}, ["work"]),
        ({"work": 0.05, "tail": 0.013}, ["work", "tail"]),
        ({"work": 0.02, "tail": -0.05}, ["tail", "work"]),
        ({"work": 0.004, "tail": 0.004}, []),
    ],
)
def test_a_term_is_named_for_a_fifth_of_the_gap_and_a_tenth_of_the_share(shares, named):
    given = [Term(name, share, 0.0, 512) for name, share in shares.items()]
    assert [term.name for term in terms.off(given, 0.05)] == named


def test_a_term_within_its_own_interval_is_not_named():
    assert terms.off([Term("dilation", 0.05, 0.06, 512)], 0.05) == []
    case = ddp_result(Machine(dilation=0.2), tokens=8192)
    case.metrics["dilation_ms"] = Metric(value=0.7, unit="ms", low=-0.5, high=1.9)
    made = terms.terms(Facts.of(case), Facts.of(case), 303.0, 990.0, case.metrics)
    assert "dilation" not in [term.name for term in terms.off(made, 0.05)]
