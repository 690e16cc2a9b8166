"""What a case's launches come to: exact values on hand-made rounds, and what is left out when something is missing."""

import math
import subprocess
import sys

import msgspec
import pytest
from factories import (
    curve_results,
    h2d_case,
    h2d_launch,
    h2d_result,
    record,
    skipped,
    table_results,
    unmeasured,
)
from factories_feed import feed_case
from hypothesis import given
from hypothesis import strategies as st

from harness import metrics, theory
from harness.case import Case
from harness.metrics import derive, derive_curves, judge_launches, launch_values, samples
from harness.record import CaseResult, Launch, Rank, Round, dumps, loads
from harness.registry import metrics_of
from harness.statistics import StopRule

METRICS = metrics_of("h2d")
EIGHT = h2d_case(chunks=8)
ONE = h2d_case(chunks=1)

# 8 chunks: 8 ms of copies, 10 of compute, 20 in sequence, 12 together; unsplit 7 and 9.
TIMES = {
    "transfer": 8.0,
    "compute": 10.0,
    "serial": 20.0,
    "overlapped": 12.0,
    "transfer_1": 7.0,
    "compute_1": 9.0,
}
EXPECTED = {
    "overlapped_ms": 12.0,
    "overlapped_p10_ms": 12.0,
    "overlapped_mean_ms": 12.0,
    "transfer_ms": 8.0,
    "compute_ms": 10.0,
    "serial_ms": 20.0,
    "transfer_unsplit_ms": 7.0,
    "compute_unsplit_ms": 9.0,
    "exposed_ms": 2.0,
    "exposed_fraction": 0.25,
    "hidden_fraction": 0.75,
    "bound_ratio": 12.0 / 9.0,
    "model_ratio": 12.0 / 11.0,  # 1 + 1.25 + 7 * 1.25
    "overlapped_over_compute": 1.2,
    "overlapped_over_serial": 0.6,
    "host_blocked_ms": 3.0,
    "host_ms": 3.0,
}


def launch_of(
    *rounds: dict[str, float], index: int = 0, host: float | None = 3.0, checks: dict | None = None
) -> Launch:
    return Launch(
        index=index, ranks=[Rank(rounds=[a_round(arms, host) for arms in rounds])], checks=checks or {}
    )


def a_round(arms: dict[str, float], host: float | None = 3.0) -> Round:
    return Round(
        order=list(arms), arms=dict(arms), host={} if host is None else {**of_host(host), "serial": 1.0}
    )


def of_host(ms: float) -> dict[str, float]:
    """So long the host enqueues both legs while they overlap, and as long both alone."""
    return {"overlapped": ms, "transfer": ms / 3, "compute": 2 * ms / 3}


def result_of(case: Case, *launches: Launch, status: str = "ok") -> CaseResult:
    return derive(unmeasured(case, status, launches=launches))


def values(result: CaseResult) -> dict[str, float]:
    return {name: metric.value for name, metric in result.metrics.items()}


def test_every_metric_of_a_hand_made_case():
    result = result_of(EIGHT, launch_of(*[TIMES] * 20))
    assert values(result) == pytest.approx(EXPECTED)
    assert list(result.metrics) == list(METRICS)
    assert all(metric.low == metric.value == metric.high for metric in result.metrics.values())
    assert {name: metric.unit for name, metric in result.metrics.items()} == {
        name: metric.unit for name, metric in METRICS.items()
    }
    assert result.model == {"pieces": 8, "piece_ms": 11.0, "bound_ms": 9.0, "realised_ratio": 7.0 / 9.0}


def test_one_metric_by_itself_is_as_all_of_them_together():
    case = h2d_result(h2d_case(), launches=2, rounds=9)
    for name, found in derive(case).metrics.items():
        assert metrics.measured(case, name) == found
    assert metrics.measured(unmeasured(h2d_case(), "error", "x"), "overlapped_ms") is None


def test_overlap_that_lost_time_is_not_clamped():
    result = result_of(EIGHT, launch_of(TIMES | {"overlapped": 24.0}))
    assert result.metrics["hidden_fraction"].value == pytest.approx(-0.75)
    assert result.metrics["exposed_fraction"].value == pytest.approx(1.75)
    result = result_of(EIGHT, launch_of(TIMES | {"overlapped": 9.5}))
    assert result.metrics["exposed_ms"].value == pytest.approx(-0.5)


def test_ratios_are_of_arm_medians():
    fast, slow = TIMES | {"overlapped": 10.0, "compute": 20.0}, TIMES | {"overlapped": 30.0, "compute": 10.0}
    middle = TIMES | {"overlapped": 12.0, "compute": 11.0}
    result = result_of(EIGHT, launch_of(fast, slow, middle))
    assert result.metrics["overlapped_over_compute"].value == 12.0 / 11.0
    assert launch_values(result, "overlapped_over_compute") == [12.0 / 11.0]


def test_bound_comes_from_the_unsplit_arms():
    """Else what splitting costs would hide in the bound."""
    costly = TIMES | {"transfer": 80.0, "compute": 80.0}
    assert result_of(EIGHT, launch_of(costly)).metrics["bound_ratio"].value == 12.0 / 9.0


def test_one_chunk_is_its_own_unsplit_arm():
    arms = {name: ms for name, ms in TIMES.items() if not name.endswith("_1")}
    result = result_of(ONE, launch_of(*[arms] * 20))
    assert result.metrics["transfer_unsplit_ms"].value == 8.0
    assert result.metrics["bound_ratio"].value == 1.2
    assert result.metrics["model_ratio"].value == 12.0 / 18.0
    assert set(result.checks["lag1"]) == set(arms)
    assert "bound_ratio" not in result_of(EIGHT, launch_of(*[arms] * 20)).metrics


def test_batches_of_a_sample_are_one_pipeline():
    """Two batches of 8 chunks: 16 pieces of 0.5 and 0.625 ms."""
    result = result_of(EIGHT, launch_of(TIMES, checks={"repeats": 2}))
    assert result.model["pieces"] == 16
    assert result.model["piece_ms"] == pytest.approx((0.5 + 16 * 0.625) / 2)
    assert result.metrics["model_ratio"].value == pytest.approx(12.0 / 10.5)
    assert result_of(EIGHT, launch_of(TIMES, checks={"repeats": "many"})).model["pieces"] == 8


def test_times_are_of_one_batch_however_many_a_sample_holds():
    """Else a small batch, of which many fit in a sample, would look as slow as a large one."""
    one = result_of(EIGHT, launch_of(*[TIMES] * 20))
    four = {arm: 4 * ms for arm, ms in TIMES.items()}
    result = result_of(EIGHT, launch_of(*[four] * 20, host=12.0, checks={"repeats": 4}))
    same = set(METRICS) - {"model_ratio"}
    assert {name: values(result)[name] for name in same} == pytest.approx({n: EXPECTED[n] for n in same})
    assert {name: result.model[name] for name in ("bound_ms", "realised_ratio")} == {
        name: one.model[name] for name in ("bound_ms", "realised_ratio")
    }
    assert samples(result, "overlapped_ms") == samples(one, "overlapped_ms") == [12.0] * 20
    assert launch_values(result, "host_blocked_ms") == [3.0]
    assert result.launches[0].ranks[0].rounds[0].arms == four, "the record keeps what was timed"


def test_each_launch_is_divided_by_its_own_batches():
    double = {arm: 2 * ms for arm, ms in TIMES.items()}
    result = result_of(EIGHT, launch_of(TIMES), launch_of(double, index=1, checks={"repeats": 2}))
    assert launch_values(result, "overlapped_ms") == [12.0, 12.0]


def test_two_modes_are_told_in_times_of_one_batch():
    result = h2d_result(EIGHT, rounds=80, repeats=4, modes={"overlapped": (20.0, 24.0)})
    low, high, _ = result.checks["bimodal"]["overlapped"]
    assert (low, high) == pytest.approx((5.0, 6.0), rel=0.02)


@pytest.mark.parametrize("repeats", [1, 4])
def test_a_curve_of_small_batches_finds_the_same_cost_per_chunk(repeats: int):
    made = record(*curve_results(repeats=repeats, overhead_ms=0.02, noise=0.0))
    for case in made.cases:
        assert case.model["curve_overhead_ms"] == pytest.approx(0.02, rel=1e-3)
        assert case.model["curve_transfer_ms"] == pytest.approx(4.87, rel=1e-3)
        assert case.model["curve_compute_ms"] == pytest.approx(4.21, rel=1e-3)
        assert case.model["curve_ms"] == pytest.approx(case.metrics["overlapped_ms"].value, rel=1e-3)
        assert case.model["n_star"] == pytest.approx(math.sqrt(4.21 / (0.02 * repeats)), rel=1e-3)


def apart(*scales: float, status: str = "ok", reason: str = "") -> CaseResult:
    """A case whose launches each know their value well; `scales` is what they differ by."""
    made = [h2d_launch(EIGHT, index=at, scale=scale, noise=0.001) for at, scale in enumerate(scales)]
    return derive(unmeasured(EIGHT, status, reason, launches=made))


def test_launches_that_disagree_leave_a_case_unsettled():
    result = apart(1.0, 1.14, 0.9)
    judge_launches(record(result), lambda family: 0.04)
    assert result.status == "unsettled"
    wide = round(100 * result.metrics["overlapped_ms"].spread)
    assert wide == 14
    assert result.reason == "3 launches differ: the interval is +-14 % of the value, target 4 %"
    assert derive(result).status == "unsettled"


@pytest.mark.parametrize(
    ("scales", "target", "status"),
    [((1.0, 1.002, 0.998), 0.04, "ok"), ((1.0,), 1e-9, "ok"), ((1.0, 1.14), 0.5, "ok")],
)
def test_launches_that_agree_and_a_single_one_stay_ok(scales, target: float, status: str):
    result = apart(*scales)
    judge_launches(record(result), lambda family: target)
    assert (result.status, result.reason) == (status, "")


@pytest.mark.parametrize("status", ["unsettled", "skipped", "invalid", "error"])
def test_what_is_wrong_already_keeps_its_reason(status: str):
    result = apart(1.0, 1.14, 0.9, status=status, reason="thermal slowdown")
    judge_launches(record(result), lambda family: 0.04)
    assert (result.status, result.reason) == (status, "thermal slowdown")


def test_what_is_known_of_an_ok_case_stays_beside_the_new_reason():
    result = apart(1.0, 1.14, reason="measured in 2 of 3 launches: budget")
    judge_launches(record(result), lambda family: 0.04)
    assert result.reason.startswith(
        "measured in 2 of 3 launches: budget; 2 launches differ: the interval is +-"
    )


def test_step_of_several_ranks_is_the_slowest_of_each_round():
    ranks = [
        [a_round(TIMES | {"overlapped": ms}, host) for ms, host in seen]
        for seen in ([(12.0, 1.0), (13.0, 1.0), (14.0, 1.0)], [(15.0, 2.0), (12.0, 2.0), (13.0, 5.0)])
    ]
    result = result_of(EIGHT, Launch(index=0, ranks=[Rank(rounds=rounds) for rounds in ranks]))
    assert samples(result, "overlapped_ms") == [15.0, 13.0, 14.0]
    assert result.metrics["overlapped_ms"].value == 14.0
    assert result.metrics["host_blocked_ms"].value == 2.0
    assert "ranks_misaligned" not in result.checks


@pytest.mark.parametrize("fault", ["a round short", "another order"])
def test_launch_whose_ranks_ran_different_rounds_is_left_out(fault: str):
    rounds = [a_round(TIMES), a_round(TIMES)]
    other = rounds[:1] if fault == "a round short" else [rounds[0], a_round(dict(reversed(TIMES.items())))]
    bad = Launch(index=3, ranks=[Rank(rounds=rounds), Rank(rounds=other)])
    result = result_of(EIGHT, bad, launch_of(TIMES | {"overlapped": 13.0}, index=4))
    assert result.checks["ranks_misaligned"] == [3]
    assert result.metrics["overlapped_ms"].value == 13.0
    alone = result_of(EIGHT, bad)
    assert alone.metrics == {}
    assert alone.checks == {"ranks_misaligned": [3]}


def test_values_per_launch_and_samples_for_stores():
    launches = [
        launch_of(TIMES, TIMES | {"overlapped": 14.0}),
        launch_of(TIMES | {"overlapped": 18.0}, index=1),
    ]
    result = result_of(EIGHT, *launches)
    assert launch_values(result, "overlapped_ms") == [13.0, 18.0]
    assert samples(result, "overlapped_ms") == [12.0, 14.0, 18.0]
    assert samples(result, "bound_ratio") == launch_values(result, "bound_ratio") == [13.0 / 9.0, 2.0]
    assert samples(result, "exposed_ms") == [3.0, 8.0]
    assert samples(result, "overlapped_p10_ms") == pytest.approx([12.2, 18.0])
    assert result.metrics["overlapped_ms"].value == 15.5
    assert result.metrics["bound_ratio"].value == pytest.approx(15.5 / 9.0)


@pytest.mark.parametrize("name", METRICS)
def test_metric_is_the_median_of_its_launch_values(name: str):
    result = h2d_result(EIGHT, launches=3, seed=4)
    assert result.metrics[name].value == pytest.approx(sorted(launch_values(result, name))[1])


def test_missing_arms_leave_out_just_what_needs_them():
    partial = {name: TIMES[name] for name in ("compute", "overlapped")}
    result = result_of(EIGHT, launch_of(*[partial] * 5, host=None))
    assert set(result.metrics) == {
        "overlapped_ms",
        "overlapped_p10_ms",
        "overlapped_mean_ms",
        "compute_ms",
        "exposed_ms",
        "overlapped_over_compute",
    }
    assert result.model == {"pieces": 8}
    assert samples(result, "transfer_ms") == launch_values(result, "bound_ratio") == []


def test_an_arm_missing_in_one_round_or_launch_is_missing():
    without = {name: ms for name, ms in TIMES.items() if name != "serial"}
    assert "serial_ms" not in result_of(EIGHT, launch_of(TIMES, without)).metrics
    assert "serial_ms" not in result_of(EIGHT, launch_of(TIMES), launch_of(without, index=1)).metrics
    assert "overlapped_ms" in result_of(EIGHT, launch_of(TIMES), launch_of(without, index=1)).metrics


@pytest.mark.parametrize(
    "launches",
    [[], [Launch(index=0, ranks=[])], [Launch(index=0, ranks=[Rank(rounds=[])])], [launch_of({}, host=None)]],
)
def test_no_samples_no_metrics(launches: list[Launch]):
    result = result_of(EIGHT, *launches, status="error")
    assert result.metrics == {}
    assert result.model == {}
    assert result.checks == {}
    assert launch_values(result, "overlapped_ms") == samples(result, "overlapped_ms") == []


def test_launch_without_samples_does_not_hide_the_others():
    result = result_of(EIGHT, Launch(index=0, ranks=[]), launch_of(TIMES, index=1))
    assert result.metrics["overlapped_ms"].value == 12.0


def test_derive_leaves_its_argument_alone_and_may_be_repeated():
    bare = unmeasured(EIGHT, "ok", launches=[h2d_launch(EIGHT, modes={"transfer": (4.8, 5.1)})])
    bare.checks["stolen"] = 0.1
    once = derive(bare)
    assert bare.metrics == bare.model == {}
    assert bare.checks == {"stolen": 0.1}
    assert once.checks["stolen"] == 0.1
    assert derive(once) == once


def test_derived_again_from_other_launches_nothing_stale_is_left():
    once = h2d_result(EIGHT, modes={"transfer": (4.8, 5.1)}, rounds=80)
    assert "bimodal" in once.checks
    again = derive(msgspec.structs.replace(once, launches=[h2d_launch(EIGHT)]))
    assert again == derive(unmeasured(EIGHT, "ok", launches=[h2d_launch(EIGHT)]))
    assert "bimodal" not in again.checks


def test_what_settled_a_launch_is_the_interval_shown():
    """The stop rule and the table must not disagree on whether 1 % was reached."""
    rule = StopRule()
    for seed in range(10):
        result = h2d_result(EIGHT, rounds=40, noise=0.02, seed=seed)
        found = result.metrics["overlapped_ms"]
        settled = found.spread <= rule.target
        assert rule.settled(samples(result, "overlapped_ms")) == settled


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.nan])
def test_nonsense_times_make_no_number_that_a_record_cannot_hold(nonsense: float):
    result = result_of(EIGHT, launch_of(TIMES, TIMES | {"transfer": nonsense}))
    assert result.metrics["overlapped_ms"].value == 12.0
    assert not {"transfer_ms", "exposed_fraction", "hidden_fraction", "model_ratio"} & set(result.metrics)
    assert result_of(EIGHT, launch_of(dict.fromkeys(TIMES, nonsense), host=None)).metrics == {}


def test_record_of_derived_cases_survives_the_file():
    made = record(*table_results(), *curve_results(), skipped(h2d_case(memory="pageable")))
    assert loads(dumps(made)) == made


def test_reading_samples_loads_no_scipy():
    """A store reads records in processes that must start fast; scipy takes longer than all else."""
    code = "import sys, harness.metrics; sys.exit('scipy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Launch-bound


@pytest.mark.parametrize(("host_ms", "expected"), [(10.9, True), (10.7, False)])
def test_launch_bound_from_nine_tenths_of_the_device_time(host_ms: float, expected: bool):
    case = h2d_case(gate="off")
    assert result_of(case, launch_of(*[TIMES] * 5, host=host_ms)).checks["launch_bound"] is expected


@pytest.mark.parametrize(("memory", "expected"), [("pinned", True), ("pageable", None)])
def test_a_feed_step_may_be_launch_bound_too(memory: str, expected: bool | None):
    """The host has the waits for batches and for the device taken out of its time."""
    case = feed_case(memory=memory)
    found = result_of(case, launch_of(*[TIMES] * 5, host=0.95 * TIMES["overlapped"]))
    assert found.checks.get("launch_bound") is expected


@pytest.mark.parametrize("axes", [{"gate": "on"}, {"gate": "off", "memory": "pageable"}])
def test_launch_bound_is_no_question_where_the_host_waits_by_design(axes: dict[str, str]):
    result = result_of(h2d_case(**axes), launch_of(*[TIMES] * 5, host=12.0))
    assert "launch_bound" not in result.checks


# Curves


def test_curve_of_exact_times_is_predicted_exactly():
    made = record(*curve_results(c_ms=6.4, k_ms=6.4, overhead_ms=0.025, noise=0.0))
    for case in made.cases:
        n = case.params["chunks"]
        assert case.model["curve_ms"] == pytest.approx(theory.two_stage(6.4, 6.4, n, 0.025))
        assert case.model["curve_ratio"] == pytest.approx(1.0)
        assert case.model["curve_overhead_ms"] == pytest.approx(0.025)
        assert case.model["n_star"] == pytest.approx(16.0)
        assert case.model["recommended_chunks"] == 16
        assert case.model["curve_fitted"] is (n in (1, 4, 16))


def test_curve_is_tested_where_it_was_not_fitted():
    """A point off the law shows in its ratio and moves no prediction."""
    plain, bent = curve_results(noise=0.0), curve_results(noise=0.0)
    bent[3].metrics["overlapped_ms"].value *= 1.2
    plain, bent = record(*plain), record(*bent)
    assert [case.model["curve_ms"] for case in bent.cases] == [case.model["curve_ms"] for case in plain.cases]
    assert bent.cases[3].model["curve_ratio"] == pytest.approx(1.2)


def test_recommended_count_is_the_measured_best_not_the_theory():
    results = curve_results(noise=0.0)
    results[1].metrics["overlapped_ms"].value = 1.0
    made = record(*results)
    assert {case.model["recommended_chunks"] for case in made.cases} == {2}


def test_free_chunks_have_no_theoretical_best():
    made = record(*curve_results(overhead_ms=0.0, noise=0.0))
    model = made.cases[0].model
    assert model["n_star"] is None or model["n_star"] > 1000
    assert model["recommended_chunks"] == 64
    assert all(
        value is None or not isinstance(value, float) or math.isfinite(value) for value in model.values()
    )


@pytest.mark.parametrize("chunks", [(1, 4, 16, 8), (1, 2, 4, 8), (2, 4, 8, 16, 32), (1, 4, 16)])
def test_too_few_points_are_no_curve(chunks: tuple[int, ...]):
    made = record(*curve_results(chunks=chunks))
    assert not any("curve_ms" in case.model or "n_star" in case.model for case in made.cases)


def test_cases_that_differ_in_more_than_chunks_share_no_curve():
    gated, ungated = (1, 4, 16), (2, 8, 32)
    results = [h2d_result(h2d_case(chunks=n)) for n in gated] + [
        h2d_result(h2d_case(chunks=n, gate="off")) for n in ungated
    ]
    assert not any("curve_ms" in case.model for case in record(*results).cases)


def test_unmeasured_cases_are_in_no_curve():
    results = [
        msgspec.structs.replace(case, status="invalid") if case.params["chunks"] in (4, 64) else case
        for case in curve_results()
    ]
    assert not any("curve_ms" in case.model for case in record(*results).cases)
    results = [
        msgspec.structs.replace(case, status="invalid") if case.params["chunks"] == 64 else case
        for case in curve_results()
    ]
    assert ["curve_ms" in case.model for case in record(*results).cases] == [True] * 6 + [False]


def test_curves_derived_again_leave_nothing_stale():
    made = record(*curve_results())
    before = [dict(case.model) for case in made.cases]
    derive_curves(made)
    assert [case.model for case in made.cases] == before
    del made.cases[0]
    derive_curves(made)
    assert not any(key in case.model for case in made.cases for key in metrics._CURVE_KEYS)
    assert all("piece_ms" in case.model for case in made.cases)


@given(st.floats(0.5, 50.0), st.floats(0.5, 50.0), st.integers(2, 64))
def test_perfect_pipeline_has_the_ratios_of_theory(c: float, k: float, n: int):
    case = h2d_case(chunks=n)
    result = h2d_result(case, c_ms=c, k_ms=k, overhead_ms=0.0, noise=0.0, rounds=3)
    assert result.metrics["model_ratio"].value == pytest.approx(1.0)
    assert result.metrics["hidden_fraction"].value == pytest.approx(1 - 1 / n)
    assert result.metrics["bound_ratio"].value == pytest.approx(1 + min(c, k) / max(c, k) / n)
