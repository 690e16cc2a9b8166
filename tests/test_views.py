import math

import numpy as np
import pytest
from factories import curve_results, h2d_case, h2d_result, record, skipped, table_results
from factories_feed import feed_result

from harness.families import MIB
from harness.record import Discarded
from harness.views import chunk_curves, overlap_grid, overlapped_series, remarks, telemetry_series, value


def test_the_grid_is_the_fullest_ungated_set_of_eight_or_more_chunks():
    lone = h2d_result(h2d_case(size=512 * MIB, gate="off"))
    few = table_results(chunks=4)
    gated = [h2d_result(h2d_case(memory="pinned", stream=stream)) for stream in ("side", "default")]
    grid = overlap_grid(record(lone, *few, *gated, *table_results(chunks=8)))
    assert (grid.where, len(grid.cells)) == ("256MiB in 8 chunks, ungated", 4)


def test_no_grid_without_such_cases():
    assert overlap_grid(record(*table_results(chunks=4), *curve_results(chunks=(1, 8)))) is None


def test_price_is_total_over_pinned_side():
    cells = table_results()
    grid = overlap_grid(record(*cells))
    side, _, pageable, _ = (value(case, "overlapped_ms") for case in cells)
    assert grid.price("pageable", "side") == pytest.approx(pageable / side)
    assert grid.price("pinned", "side") == 1


def test_no_price_without_the_cell_it_is_a_multiple_of():
    grid = overlap_grid(record(skipped(h2d_case(gate="off")), *table_results()[1:]))
    assert grid.price("pageable", "side") is None


@pytest.mark.parametrize("status", ["skipped", "invalid", "error"])
def test_a_cell_that_is_not_measured_shows_its_reason_and_no_number(status):
    cells = table_results()
    cells[0].status, cells[0].reason = status, "shared GPU"
    grid = overlap_grid(record(*cells))
    assert grid.facts("pinned", "side") == [(status, "shared GPU")]


def test_an_unsettled_cell_says_so_beside_its_numbers():
    cells = table_results()
    cells[2].status, cells[2].reason = "unsettled", "too wide"
    facts = overlap_grid(record(*cells)).facts("pageable", "side")
    assert facts[0][0] == "hidden fraction"
    assert facts[-1] == ("unsettled", "too wide")


def test_an_absent_cell_is_not_taken_for_a_skipped_one():
    grid = overlap_grid(record(*table_results()[:2]))
    assert grid.facts("pageable", "side") == [("", "not in this run")]


def test_curves_hold_measured_cases_that_differ_in_chunks_alone():
    points = curve_results(chunks=(16, 1, 4, 8))
    points[0].status = "invalid"
    (curve,) = chunk_curves(record(*points, h2d_result(h2d_case(chunks=2, gate="off"))))
    assert curve.chunks == [1, 4, 8]


def test_two_points_are_no_curve():
    assert chunk_curves(record(*curve_results(chunks=(1, 8)))) == []


def test_recommended_is_the_fastest_measured_count_with_and_without_a_fit():
    fitted = record(*curve_results(overhead_ms=0.02))
    (curve,) = chunk_curves(fitted)
    fastest = min(curve.cases, key=lambda case: case.metrics["overlapped_ms"].value)
    assert curve.recommended == fastest.params["chunks"] == fastest.model["recommended_chunks"]
    (unfitted,) = chunk_curves(record(*curve_results(chunks=(2, 8, 32))))
    assert (unfitted.recommended, unfitted.n_star) == (32, None)


def test_a_fit_without_cost_per_chunk_sets_no_limit():
    points = record(*curve_results())
    for case in points.cases:
        case.model["n_star"] = None
    assert chunk_curves(points)[0].n_star == math.inf


def test_remarks_tell_what_the_checks_found():
    case = h2d_result(h2d_case(gate="off"), status="unsettled", reason="too wide")
    case.checks = {
        "launch_bound": True,
        "bimodal": {"overlapped": [4.86, 5.05, 0.4]},
        "carry_over": {"arm": "compute", "after": "serial", "shift": 0.012, "p": 0.001, "found": True},
    }
    told = " | ".join(f"{remark.text}: {remark.detail}" for remark in remarks(case))
    for text in (
        "too wide",
        "launch-bound",
        "4.86 and 5.05 ms",
        "40 %",
        "compute depends",
        "1.2 % after serial",
    ):
        assert text in told


def test_arms_of_a_loader_are_called_as_in_its_table():
    case = feed_result()
    case.checks = {
        "bimodal": {"transfer": [4.86, 5.05, 0.4]},
        "carry_over": {"arm": "compute", "after": "overlapped", "shift": 0.012, "p": 0.001, "found": True},
    }
    told = [f"{remark.text}: {remark.detail}" for remark in remarks(case)]
    assert told[0].startswith("loader alternates between two times")
    assert told[1] == "cached step depends on the arm before it: 1.2 % after real step"


def test_a_case_that_was_measured_again_says_after_what():
    case = h2d_result(h2d_case(chunks=8))
    case.launches[0].discarded = [
        Discarded(reason="shared GPU: 1 other process", rounds=20, wall_s=1, waited_s=1)
    ]
    assert [remark.text for remark in remarks(case)] == ["measured again after: shared GPU: 1 other process"]
    case.status = "invalid"
    assert "measured again" not in str(remarks(case)), "its reason says that it was of no use"


def test_remarks_leave_out_what_was_not_found_and_survive_odd_checks():
    case = h2d_result(h2d_case())
    case.checks = {
        "launch_bound": False,
        "carry_over": {"found": False},
        "bimodal": {"overlapped": ["x", None, 1]},
    }
    assert not [remark for remark in remarks(case) if "launch" in remark.text or "depends" in remark.text]
    case.checks = {"bimodal": "yes", "carry_over": 3}
    assert remarks(case) == []


def test_series_of_several_ranks_is_the_slowest_of_each_round():
    case = h2d_result(h2d_case(), ranks=2, rounds=6)
    first, second = ([r.arms["overlapped"] for r in rank.rounds] for rank in case.launches[0].ranks)
    assert overlapped_series(case) == [[max(pair) for pair in zip(first, second, strict=True)]]


def test_series_are_of_one_batch():
    case = h2d_result(h2d_case(), rounds=6, repeats=4)
    (taken,) = overlapped_series(case)
    assert taken == [r.arms["overlapped"] / 4 for r in case.launches[0].ranks[0].rounds]
    assert np.median(taken) == pytest.approx(value(case, "overlapped_ms"))


def test_readings_of_the_cases_of_a_launch_stand_end_to_end():
    cases = [h2d_result(h2d_case(chunks=n), rounds=4) for n in (2, 4)]
    for case in cases:
        case.launches[0].wall_s = 6.0
        case.launches[0].ranks[0].telemetry = {
            "series": {"t": [0.0, 0.5], "sm_mhz": [1980, None], "power_w": [500.0, 600.0]}
        }
    made = record(*cases)
    assert telemetry_series(made, 0, "sm_mhz") == [(0.0, 1980.0), (6.0, 1980.0)]
    assert telemetry_series(made, 0, "power_w") == [(0.0, 500.0), (0.5, 600.0), (6.0, 500.0), (6.5, 600.0)]
    assert telemetry_series(made, 1, "power_w") == []
    cases[0].launches[0].ranks[0].telemetry = {"series": "odd"}
    assert telemetry_series(made, 0, "sm_mhz") == [(6.0, 1980.0)]
