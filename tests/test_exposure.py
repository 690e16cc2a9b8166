"""What a record says of collectives beside compute, on machines whose every number is known."""

import re

import pytest
from factories import record
from factories_ddp import EVEN, MIB, Machine, bucket_results, ddp_record, ddp_result, token_results
from factories_feed import Loader, feed_result

from harness import exposure, findings, tables
from harness.record import Metric

MACHINE = Machine(alpha_ms=0.02, bandwidth=303.0, rate=600e12, dilation=0.1)


def scaled(by: float, half: float = 0.002, **axes):
    """The usual case with an option that makes its step so much longer."""
    case = ddp_result(MACHINE, half=half, **axes)
    found = case.metrics["overlapped_ms"]
    case.metrics["overlapped_ms"] = Metric(
        value=found.value * by, unit="ms", low=found.low * by, high=found.high * by
    )
    return case


def texts(*cases) -> list[str]:
    return [effect.text for effect in exposure.effects(ddp_record(*cases), "ddp")]


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (1.05, "option=static-graph takes 5.0 % longer (4.7 % to 5.3 %)"),
        (0.95, "option=static-graph takes 5.0 % less (-5.3 % to -4.7 %)"),
        (1.002, "option=static-graph shows no effect (-0.1 % to 0.5 %)"),
    ],
)
def test_an_option_shows_its_effect_or_that_it_has_none(by, text):
    assert texts(ddp_result(MACHINE), scaled(by, option="static-graph")) == [text]


def test_an_option_that_could_not_be_seen_is_not_said_to_have_none():
    noisy = scaled(1.02, half=0.2, option="static-graph")
    (text,) = texts(ddp_result(MACHINE), noisy)
    assert text.startswith("option=static-graph: cannot be told (-")


def test_an_option_is_compared_with_the_same_case_without_it_and_nothing_else():
    plain = ddp_result(MACHINE)
    (found,) = exposure.effects(
        ddp_record(plain, scaled(1.3, connections=1), scaled(1.3, tokens=512, connections=32)), "ddp"
    )
    assert (found.axis, found.usual.key) == ("connections", plain.key)
    assert texts(scaled(1.3, option="compile")) == []
    # Two options at once are none of either.
    assert texts(plain, scaled(1.3, option="compile", connections=1)) == []


def test_options_of_loaders_are_compared_by_their_real_steps_and_ddp_is_left_to_itself():
    slow = Loader(
        decode_ms=15.0, step_ms=2.0
    )  # 4 ms by four workers; twice as long where they start each epoch anew
    made = [
        feed_result(slow),
        feed_result(slow, prefetch=4),
        feed_result(Loader(decode_ms=31.0, step_ms=2.0), persistent="off"),
        feed_result(slow, prefetch=4, workers=8),
        ddp_result(MACHINE),
        scaled(1.05, option="static-graph"),
    ]
    both, twice = exposure.options(record(*made), "feed")
    assert both.startswith("prefetch=4 shows no effect (")
    assert both.endswith("workers=4")
    assert twice.startswith("persistent=off takes 100")
    assert len(exposure.options(record(*made), "ddp")) == 1


def test_a_case_without_a_number_has_no_effect():
    bad = scaled(1.3, option="compile")
    bad.status = "invalid"
    assert texts(ddp_result(MACHINE), bad) == []


def test_the_fastest_buckets_of_each_token_count_are_told_with_what_lies_bare():
    cases = [
        *bucket_results(MACHINE, (MIB, 64 * MIB), EVEN, tokens=512),
        *bucket_results(MACHINE, (MIB, 64 * MIB), EVEN, tokens=8192),
        scaled(0.5, option="bucket-view"),
    ]
    said = exposure.verdicts(ddp_record(*cases))
    assert len(said) == 2
    for text, tokens in zip((text for text, _ in said), (512, 8192), strict=True):
        alike = [case for case in cases[:4] if case.params["tokens"] == tokens]
        best = min(alike, key=lambda case: case.metrics["overlapped_ms"].value)
        assert f"tokens={tokens}" in text
        assert f"bucket={best.params['bucket'] // MIB}MiB" in text
        assert f"of {best.metrics['transfer_ms'].value:.3g} ms of collectives lie bare" in text
        assert "as its tail, " in text


def test_of_many_token_counts_three_are_told_and_every_doubt():
    lost = Machine(alpha_ms=0.02, bandwidth=303.0, rate=600e12, load=3.0)
    cases = [
        *token_results(MACHINE, (1024, 2048, 4096, 8192, 16384)),
        *token_results(lost, (512, 16384), model="embedding"),
    ]
    said = exposure.verdicts(ddp_record(*cases))
    blocks = [re.search(r"tokens=(\d+)", text) for text, _ in said if "model=blocks" in text]
    assert [int(found[1]) for found in blocks if found] == [1024, 4096, 16384]
    assert [doubt for text, doubt in said if "model=embedding" in text] == [True]


def test_overlap_that_costs_more_than_the_collectives_is_a_doubt():
    lost = Machine(alpha_ms=0.02, bandwidth=303.0, rate=600e12, load=3.0)
    ((text, doubt),) = exposure.verdicts(ddp_record(ddp_result(lost, tokens=512)))
    assert doubt
    assert "overlap lost time" in text
    assert [doubt for _, doubt in exposure.verdicts(ddp_record(ddp_result(MACHINE, tokens=8192)))] == [False]


@pytest.mark.parametrize(
    ("rest", "half", "doubted"),
    [(0.0, 0.1, 0), (0.03, 0.005, 1), (0.03, 0.02, 0), (-0.03, 0.005, 1), (0.015, 0.001, 0)],
)  # fmt: skip
def test_arms_that_do_not_close_are_named(rest, half, doubted):
    """Beyond 2 % of the overlapped time, and beyond doubt."""
    case = ddp_result(MACHINE)
    whole = case.metrics["overlapped_ms"].value
    case.metrics["unexplained_ms"] = Metric(
        value=rest * whole, unit="ms", low=(rest - half) * whole, high=(rest + half) * whole
    )
    said = [found.text for found in findings.doubts(ddp_record(case)) if "do not add up" in found.text]
    assert len(said) == doubted


def test_parts_that_do_not_come_to_the_whole_explain_nothing():
    case = ddp_result(MACHINE)
    case.metrics["unexplained_ms"] = Metric(value=0.1 * case.metrics["overlapped_ms"].value, unit="ms")
    ((text, _),) = exposure.verdicts(ddp_record(case))
    assert "not to be taken apart" in text
    assert "as slower compute" not in text
    case.metrics["unexplained_ms"].value = 0.0
    case.metrics["dilation_ms"].value = -0.01
    ((text, _),) = exposure.verdicts(ddp_record(case))
    assert "none as slower compute" in text


def test_one_rank_exposes_nothing_and_ranks_beyond_the_cores_are_a_doubt():
    assert exposure.verdicts(ddp_record(ddp_result(MACHINE, ranks=1))) == []
    made = ddp_record(ddp_result(MACHINE, ranks=4))
    made.machine.device, made.machine.cpu = "cpu", {"usable_cores": 2}
    assert any("4 ranks share 2 cores" in found.text for found in findings.doubts(made))
    made.machine.cpu = {"usable_cores": 4}
    assert not any("ranks share" in found.text for found in findings.doubts(made))


def test_caps_that_make_the_same_buckets_are_one_case():
    cases = bucket_results(MACHINE, (25 * MIB, 512 * MIB, 256 * MIB), (MIB, 300 * MIB, 300 * MIB))
    said = [found.text for found in findings.doubts(ddp_record(*cases)) if "same buckets" in found.text]
    assert said == ["the same buckets, whatever the cap, so one case: bucket=25MiB, bucket=256MiB"]


def test_the_table_of_a_record_has_what_lies_bare_and_the_effects(capsys):
    from rich.console import Console

    made = ddp_record(*token_results(MACHINE, (512, 2048)), scaled(1.05, option="static-graph"))
    Console(width=132).print(tables.case_table(made))
    shown = capsys.readouterr().out
    for title in ("exposed", "tail", "dilation"):
        assert title in shown
    assert "option=static-graph takes 5.0 % longer" in shown
    assert any("lie bare" in found.text for found in findings.summary(made))


def test_a_long_name_of_a_lone_case_does_not_take_the_room_of_its_numbers(capsys):
    from rich.console import Console

    Console(width=100).print(tables.case_table(ddp_record(ddp_result(MACHINE))))
    shown = capsys.readouterr().out
    assert "1 case: model=blocks bucket=25MiB tokens=2048" in shown
    assert "transfer" in shown
    assert "No room" not in shown


@pytest.mark.parametrize(
    ("hidden", "half", "doubted"), [(0.0, 0.002, 0), (0.3, 0.002, 1), (0.3, 0.2, 0), (-0.5, 0.002, 0)]
)
def test_a_serial_arm_that_seems_to_hide_is_a_doubt(hidden, half, doubted):
    case = ddp_result(MACHINE)
    transfer, compute = (case.metrics[name].value for name in ("transfer_ms", "compute_ms"))
    serial = transfer + compute - hidden * min(transfer, compute)
    case.metrics["serial_ms"] = Metric(
        value=serial, unit="ms", low=serial * (1 - half), high=serial * (1 + half)
    )
    said = [found.text for found in findings.doubts(ddp_record(case)) if "even in sequence" in found.text]
    assert len(said) == doubted


def test_without_the_controls_of_streams_ranks_on_a_cpu_have_their_own():
    made = ddp_record(ddp_result(MACHINE))
    assert findings.controls(made).doubt, "on a GPU they say something"
    made.machine.device = "cpu"
    assert not findings.controls(made).doubt
    made.cases[0].family = "h2d"
    assert findings.controls(made).doubt
