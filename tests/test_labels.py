import math

import pytest
from factories import h2d_case, unmeasured

from harness.labels import clean, number, percent, ratio, short_names, spread, with_doubt, with_interval
from harness.record import Metric


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.4449, "5.44"),
        (54.449, "54.4"),
        (9.996, "10.0"),
        (0.9996, "1.00"),
        (0.012345, "0.0123"),
        (1234.5, "1234"),
        (143.2, "143"),
        (0.0, "0.00"),
        (-0.218, "-0.218"),
        (None, "-"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_number_keeps_three_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.9349, "0.935"), (7.116, "7.12"), (-0.2182, "-0.218"), (0.00031, "0.000"), (1.2, "1.20")],
)
def test_ratio_is_never_clamped_and_stops_at_three_decimals(value, text):
    assert ratio(value) == text


def test_zero_has_no_sign():
    assert (number(-1e-12, places=3), ratio(-0.0001), percent(-0.0001)) == ("0.000", "0.000", "0 %")


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (9.97, 10.01, "±0.3 %"),
        (9.996, 10.004, "±0.04 %"),
        (9.0, 10.1, "±10 %"),
        (9.8, 10.15, "±2.0 %"),
        (None, None, ""),
    ],
)
def test_spread_is_the_wider_half_of_the_interval(low, high, text):
    assert spread(Metric(value=10.0, unit="ms", low=low, high=high)) == text


def test_an_interval_is_shown_where_there_is_one():
    assert with_interval(Metric(value=0.5, unit="fraction", low=0.45, high=0.551)) == "0.500 (0.450 to 0.551)"
    assert with_interval(Metric(value=0.5, unit="fraction")) == "0.500"
    assert with_interval(None) == "-"


def test_a_fraction_near_nothing_has_its_interval_and_a_time_its_share():
    near = Metric(value=-0.05, unit="fraction", low=-1.2, high=1.1)
    assert with_doubt(near) == "-0.050 (-1.20 to 1.10)"
    assert with_doubt(Metric(value=10.0, unit="ms", low=9.9, high=10.1)) == "10.0 ±1.0 %"
    assert with_doubt(None) == "-"


def test_text_from_a_record_cannot_steer_a_terminal():
    assert "\x1b" not in clean("a\x1b[31mb\x07\nc")
    assert clean(" a\nb ") == "a b"


def results(*axes):
    return [unmeasured(h2d_case(**changed), "skipped", "why") for changed in axes]


def test_what_all_cases_share_is_said_once():
    cases = results({"chunks": 1}, {"chunks": 8}, {"chunks": 8, "gate": "off"})
    names = short_names(cases)
    assert [names[case.key] for case in cases] == ["n=1 gated", "n=8 gated", "n=8 ungated"]
    assert names.common == "pinned, side, 256MiB, ratio=1, alternate, profile=h200.1a2b"


def test_rare_axes_are_named_only_where_they_are_unusual():
    cases = results({}, {"ratio": 0.5}, {"issue": "copies-first"}, {"stream": "default"})
    names = short_names(cases)
    assert [names[case.key] for case in cases] == ["side", "side ratio=0.5", "side copies-first", "default"]


def test_names_of_different_cases_differ():
    cases = results(
        *({"chunks": n, "gate": g, "ratio": r} for n in (1, 8) for g in ("on", "off") for r in (1.0, 2.0))
    )
    names = short_names(cases)
    assert len({names[case.key] for case in cases}) == len(cases)


def test_a_lone_case_keeps_its_name():
    (case,) = results({})
    assert short_names([case])[case.key] == "pinned side n=8 256MiB gated"


def test_no_case_beside_others_has_an_empty_name():
    """What is as usual goes unsaid, unless it is all that tells a case from the others."""
    names = short_names(results({}, {"ranks": 2}, {"ranks": 3}))
    assert sorted(names[key] for key in names.fields) == ["ranks=1", "ranks=2", "ranks=3"]


def test_an_unknown_family_is_named_by_its_own_words():
    known, other = results({}, {})
    other.family, other.key, other.params = "ddp", "ddp[bucket=25]", {"bucket": 25}
    names = short_names([known, other])
    assert names[other.key] == "ddp bucket=25"
    assert names[known.key].startswith("h2d ")
