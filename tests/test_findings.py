import pytest
from factories import controls, curve_results, h2d_case, h2d_result, record, skipped, table_results

from harness import findings
from harness.labels import number, percent, ratio
from harness.record import Ceiling, Discarded
from harness.views import chunk_curves, overlap_grid


def text(found):
    return "\n".join(line.text for line in found)


def test_the_verdict_gives_the_numbers_of_the_table():
    cells = table_results()
    made = record(*cells)
    pinned, _, pageable, _ = cells
    told = text(findings.verdicts(made))
    hidden = [percent(case.metrics["hidden_fraction"].value) for case in (pinned, pageable)]
    assert f"pinned + side stream hides {hidden[0]} of the shorter leg" in told
    price = ratio(overlap_grid(made).price("pageable", "side"))
    assert f"pageable + side stream hides {hidden[1]} of the shorter leg, but takes {price}x as long" in told
    blocked, total = (number(pageable.metrics[name].value) for name in ("host_blocked_ms", "overlapped_ms"))
    assert f"blocks the host for {blocked} of {total} ms" in told
    assert "the same stream hides nothing, as it must" in told
    assert not any(line.doubt for line in findings.verdicts(made))


def test_a_same_stream_that_seems_to_hide_is_doubted():
    cells = table_results()
    cells[1] = h2d_result(h2d_case(stream="default", gate="off"), hidden=0.5)
    (doubted,) = (line for line in findings.verdicts(record(*cells)) if line.doubt)
    assert "cannot overlap with itself" in doubted.text


def test_noise_that_swallows_the_answer_is_no_verdict():
    cells = [h2d_result(h2d_case(stream=s, gate="off"), noise=0.3) for s in ("side", "default")]
    told = text(findings.verdicts(record(*cells)))
    assert "pinned + side stream is too noisy to tell" in told
    assert "the same stream is too noisy to tell" in told
    assert "as it must" not in told


def test_an_overlap_that_costs_time_is_not_called_hiding():
    told = text(findings.verdicts(record(h2d_result(h2d_case(gate="off"), hidden=-0.2))))
    assert "hides nothing and adds 20 % of the shorter leg" in told


def test_a_share_known_badly_comes_with_its_interval():
    noisy = h2d_result(h2d_case(gate="off"), hidden=0.5, noise=0.1)
    hidden = noisy.metrics["hidden_fraction"]
    assert hidden.high - hidden.low > 0.1
    assert f"({percent(hidden.low)} to {percent(hidden.high)})" in text(findings.verdicts(record(noisy)))


def test_an_unsettled_cell_is_marked_in_its_sentence():
    cells = table_results()
    cells[0].status = "unsettled"
    assert findings.verdicts(record(*cells))[0].text.endswith("(unsettled)")


def test_advice_gives_the_best_count_the_theory_and_the_equals():
    (curve,) = chunk_curves(record(*curve_results(overhead_ms=0.02)))
    advice = findings.chunk_advice(curve).text
    best = curve.case(curve.recommended)
    assert f"use {curve.recommended} chunks (theory's n* {number(curve.n_star)})" in advice
    assert f"{number(best.metrics['overlapped_ms'].value)} ms" in advice
    least = best.metrics["overlapped_ms"].value
    alike = [n for n, ms in curve.values("overlapped_ms").items() if least < ms <= 1.02 * least]
    assert alike
    assert "; " + " and ".join(map(str, alike)) + " within 2 % of it" in advice


def test_advice_at_the_edge_of_what_was_measured_says_so():
    (curve,) = chunk_curves(record(*curve_results(chunks=(1, 2, 4), overhead_ms=0.0)))
    advice = findings.chunk_advice(curve).text
    assert "no larger count was measured" in advice
    assert "the curve has no fit" in advice


def test_loss_beyond_the_piece_model_is_called_unexplained():
    good = curve_results(chunks=(1, 2, 4, 8))
    (curve,) = chunk_curves(record(*good))
    assert "unexplained" not in findings.model_check(curve).text
    bad = [*good[:3], h2d_result(h2d_case(chunks=8), hidden=0.5)]
    (curve,) = chunk_curves(record(*bad))
    check = findings.model_check(curve)
    off = curve.case(8).metrics["model_ratio"].value - 1
    assert f"at most {percent(off, places=1)} from the piece model (n=8)" in check.text
    assert "unexplained loss of more than 3 % at n=8" in check.text
    assert not check.doubt


def test_faster_than_the_piece_model_is_doubted():
    points = [*curve_results(chunks=(1, 2)), h2d_result(h2d_case(chunks=4), hidden=0.99)]
    (curve,) = chunk_curves(record(*points))
    assert findings.model_check(curve).doubt


def test_failed_controls_are_named_with_value_and_limits():
    made = record(*table_results(), controls=controls(failing=["null"]))
    found = findings.controls(made)
    assert found.doubt
    assert "3 of 4 passed; failed: null" in found.text
    assert "want -0.005 to 0.005" in found.text
    assert findings.controls(record(*table_results(), controls=controls())).text == "controls: 4 of 4 passed"
    assert findings.controls(record(*table_results())).doubt


def test_dropped_samples_are_counted_by_reason():
    cases = [h2d_result(h2d_case(chunks=n), rounds=20, dropped={"gate leaked": n}) for n in (2, 4)]
    assert "samples: 40 rounds used, dropped: gate leaked 6" in findings.samples(record(*cases)).text
    assert "none dropped" in findings.samples(record(*table_results())).text


def test_cases_are_counted_by_status():
    made = record(*table_results(), skipped(h2d_case(chunks=2)))
    assert findings.counts(made).text == "cases: 5 (4 ok, 1 skipped)"
    made.run.finished, made.run.planned = False, ["a"] * 9
    assert "5 of 9 planned" in findings.counts(made).text
    assert "--resume" in findings.counts(made).text


def test_nothing_measured_says_why():
    made = record(skipped(h2d_case(), "needs a GPU"), skipped(h2d_case(chunks=2), "needs a GPU"))
    assert findings.nothing_measured(made).text == "nothing was measured: skipped: needs a GPU"
    assert findings.nothing_measured(record()).text == "nothing was measured: the record holds no case"
    assert findings.nothing_measured(record(*table_results())) is None


@pytest.mark.parametrize("dirty", [True, False])
def test_identity_tells_machine_profile_and_commit(dirty):
    line = findings.identity(record(*table_results(), dirty=dirty))
    for part in ("h200-1", "NVIDIA H200", "profile h200.1a2b", "commit 01234567", "2026-11-30T08:00:00Z"):
        assert part in line
    assert ("+dirty" in line) is dirty


def test_doubts_hold_bad_cases_with_names_and_stay_empty_for_a_clean_run():
    assert findings.doubts(record(*table_results(), controls=controls())) == []
    cases = curve_results(chunks=(1, 2, 4, 8, 16))
    for case in cases[:4]:
        case.status, case.reason = "invalid", "shared GPU: 1 other process"
    told = text(findings.doubts(record(*cases, controls=controls(), dirty=True)))
    assert "invalid: shared GPU: 1 other process: n=1, n=2, n=4 and 1 more" in told
    assert "uncommitted changes" in told


@pytest.mark.parametrize(("model", "doubted"), [("WDDM", True), ("WDM (TCC)", False), (None, False)])
def test_a_driver_model_that_batches_copies_is_a_doubt(model, doubted):
    made = record(*table_results(), controls=controls())
    made.machine.gpu["driver_model"] = model
    found = [line for line in findings.doubts(made) if line.text.startswith("driver model WDDM: ")]
    assert [line.doubt for line in found] == [True] * doubted
    assert all(line.text.endswith("not comparable with other driver models") for line in found)


def test_clock_labels_are_told_though_the_numbers_stand():
    case = h2d_result(h2d_case())
    case.launches[0].ranks[0].telemetry = {"reasons": {"sw_power_cap": 2.0}}
    assert "software power cap: seen in 1 case" in text(findings.doubts(record(case, controls=controls())))


def test_a_summary_has_at_most_nine_lines():
    curves = [*curve_results(), *curve_results(chunks=(1, 2, 4), seed=1)]
    for case in curves[-3:]:
        case.params["issue"] = "copies-first"
    whole = record(*table_results(), *curves)
    whole.ceilings = [Ceiling(name="h2d", launch=0, value=55.2, unit="GB/s")]
    for made in (record(), record(*curves), whole):
        lines = findings.summary(made)
        assert 2 <= len(lines) <= 9
        assert lines[-1].text == findings.counts(made).text
        assert any("chunks (theory" in line.text for line in lines) is bool(chunk_curves(made))


def test_what_the_device_reaches_alone_is_told_over_launches() -> None:
    made = record(*table_results())
    assert findings.ceilings(made) is None
    made.ceilings = [
        *(
            Ceiling(name="h2d", launch=at, value=rate, unit="GB/s")
            for at, rate in enumerate((55.0, 40.0, 55.4))
        ),
        Ceiling(name="hbm", launch=0, value=None, unit="GB/s", detail="CUDA out of memory"),
    ]
    assert findings.ceilings(made).text == "alone: h2d 55.0 GB/s, hbm not measured (CUDA out of memory)"
    assert findings.ceilings(made) in findings.summary(made)


def test_attempts_that_were_discarded_are_counted_with_their_reason() -> None:
    case = h2d_result(h2d_case(gate="off"))
    tried = Discarded(reason="shared GPU: 1 other process", rounds=20, wall_s=1.5, waited_s=1.0)
    case.launches[0].discarded = [tried, tried]
    told = text(findings.doubts(record(case, controls=controls())))
    assert "2 attempts discarded and measured again: shared GPU: 1 other process" in told


def test_the_price_of_a_sample_is_told() -> None:
    case = h2d_result(h2d_case(chunks=1), rounds=10)
    (launch,) = case.launches
    made = sum(len(seen.arms) for seen in launch.ranks[0].rounds)
    launch.timed_s, launch.checks["sampling_s"] = 1.0, 1.0 + made * 0.0025
    made_of = record(case)
    made_of.run.seconds = 4.0
    assert "fills 25 % of 4.00 s, and 2.50 ms around each sample" in findings.samples(made_of).text
