"""Does the loader keep up: verdicts of loaders and steps whose every time is known."""

import numpy as np
import pytest
from factories import h2d_case, h2d_result
from factories_feed import Loader, feed_record, feed_result, feed_results

from harness import feeding, metrics
from harness.feeding import Feed, batchings, feeds, scales, storage_bound
from harness.record import dumps, loads

COUNTS = (0, 1, 2, 4, 8, 16)


def feed(truth: Loader | None = None, **options) -> Feed:
    found = Feed.of(feed_result(truth, **options))
    assert found is not None
    return found


def test_times_are_means_of_one_batch():
    found = feed(Loader(read_ms=2.0, decode_ms=6.0, step_ms=1.0), workers=4, launch={"noise": 0.0})
    assert (found.loader_ms, found.cached_ms, found.real_ms) == pytest.approx((2.0, 1.0, 2.0))
    assert (found.gap_ms, found.next_ms) == pytest.approx((1.0, 1.0))
    assert found.over.value == pytest.approx(2.0)
    assert found.headroom == pytest.approx(-0.5)
    assert (found.worker_ms, found.read_part) == (8.0, 0.25)


@pytest.mark.parametrize(
    ("truth", "workers", "verdict"),
    [
        (Loader(step_ms=1.0), 4, "input-bound"),
        (Loader(step_ms=1.9), 4, "input-bound"),  # 5.3 % longer
        (Loader(step_ms=1.93), 4, "balanced"),  # 3.6 %
        (Loader(step_ms=2.0), 4, "balanced"),
        (Loader(step_ms=2.2), 4, "compute-bound"),
        (Loader(step_ms=9.0), 0, "compute-bound"),
        (Loader(step_ms=9.0, in_line=True), 0, "input-bound"),
        (Loader(step_ms=4.0, slowed=0.3), 4, "slowed"),
        (Loader(step_ms=4.0, copy_ms=1.0), 4, "slowed"),
    ],
)
def test_the_verdict_is_what_was_built_in(truth, workers, verdict):
    assert feed(truth, workers=workers).verdict == verdict


def test_steps_that_may_as_well_be_equal_are_not_called():
    noisy = feed(Loader(step_ms=4.0, slowed=0.1), launch={"noise": 0.2, "seed": 1})
    assert noisy.over.low < 1 < 1 + feeding.CLOSE < noisy.over.value
    assert noisy.verdict == "unclear"
    assert not feeding.fed(noisy)


def gapped(truth: Loader, noise: float, gaps: tuple[float, ...], **options) -> Feed:
    """A case of noisy rounds whose device waits before each step as long as `gaps` say in turn."""
    result = feed_result(truth, launch={"noise": noise, "seed": 1}, **options)
    for at, seen in enumerate(result.launches[0].ranks[0].rounds):
        seen.spans["overlapped.gap"] = gaps[at % len(gaps)]
    found = Feed.of(metrics.derive(result))
    assert found is not None
    return found


def test_steps_that_seem_equal_are_called_so_only_where_that_is_sure():
    truth = Loader(step_ms=4.0, decode_ms=2.0)
    wide = gapped(truth, 0.3, (0.0, 3.0))
    assert wide.over.value < 1 + feeding.CLOSE < wide.over.high
    assert wide.gap.high > feeding.CLOSE * wide.cached_ms
    assert wide.verdict == "unclear"
    # The device's own events say that it never waits, however much its steps differ.
    assert gapped(truth, 0.3, (0.001,)).verdict == "compute-bound"


def test_a_wait_is_called_only_where_it_is_sure():
    truth = Loader(step_ms=4.0, slowed=0.1)
    rare = gapped(truth, 0.2, (0.0,) * 19 + (16.0,))
    assert rare.over.low < 1 < 1 + feeding.CLOSE < rare.over.value
    assert rare.gap_ms > feeding.WAITING_PART * rare.excess_ms
    assert rare.gap.low <= feeding.CLOSE * rare.cached_ms
    assert rare.verdict == "unclear"
    steady = gapped(truth, 0.2, (0.5, 0.8))
    assert steady.over.low < 1
    assert steady.verdict == "input-bound"


def test_one_round_has_no_interval_and_tells_nothing():
    assert feed(Loader(step_ms=1.0), launch={"rounds": 1}).verdict == "unclear"
    assert feed(Loader(step_ms=9.0), launch={"rounds": 1}).verdict == "unclear"


def test_durations_have_intervals_of_durations_and_the_longest_has_none():
    result = feed_result(Loader(decode_ms=2.0, burst=20, stall_ms=8.0), launch={"rounds": 30})
    assert result.metrics["gap_ms"].low == 0
    longest = result.metrics["next_max_ms"]
    assert (longest.value, longest.low, longest.high) == (pytest.approx(64.0), None, None)


def test_without_a_gap_the_interval_decides():
    assert feed(Loader(step_ms=1.0), launch={"spans": False}).verdict == "input-bound"
    assert feed(Loader(step_ms=9.0), launch={"spans": False}).verdict == "compute-bound"
    noisy = feed(Loader(step_ms=4.0, slowed=0.1), launch={"noise": 0.2, "seed": 1, "spans": False})
    assert noisy.verdict == "unclear"


def test_a_loader_that_stalls_in_bursts_is_input_bound_though_most_batches_come_at_once():
    """One round in eight waits: the median of real steps is that of the cached ones."""
    result = feed_result(Loader(decode_ms=2.0, burst=8, stall_ms=8.0), workers=4, launch={"rounds": 40})
    found = Feed.of(result)
    rounds = result.launches[0].ranks[0].rounds
    medians = {arm: np.median([seen.arms[arm] for seen in rounds]) for arm in ("overlapped", "compute")}
    assert medians["overlapped"] / medians["compute"] == pytest.approx(1, abs=0.02)
    assert result.metrics["overlapped_ms"].value == pytest.approx(3.0, rel=0.02), "and so for a gate"
    ((_, error),) = metrics.launch_estimates(result, ["overlapped_ms"])["overlapped_ms"]
    assert error > 0.2, "a mean of few long rounds is not as sure as a median is"
    assert found.real_ms == pytest.approx(3.0, rel=0.02)
    assert (found.verdict, found.bursts) == ("input-bound", True)
    assert found.next_max_ms == pytest.approx(64.0)


def test_a_steady_wait_is_no_burst_and_a_short_one_is_not_worth_a_word():
    assert not feed(Loader(step_ms=1.0)).bursts
    assert not feed(Loader(step_ms=9.0, burst=8, stall_ms=0.5)).bursts


def test_one_hiccup_is_no_burst():
    result = feed_result(Loader(step_ms=1.0), workers=0)
    result.launches[0].ranks[0].rounds[3].spans["overlapped.next_max"] = 70.0
    found = Feed.of(result)
    assert (found.verdict, found.bursts) == ("input-bound", False)


def test_workers_that_deliver_in_turns_are_no_burst():
    """Eight of them started together: a wait for the first, and none for the seven after it."""
    result = feed_result(Loader(decode_ms=15.0, step_ms=1.0), workers=8)
    for seen in result.launches[0].ranks[0].rounds:
        seen.spans["overlapped.next_max"] = 8 * seen.spans["overlapped.next"]
    assert not Feed.of(result).bursts
    result.params["workers"] = 1
    assert Feed.of(result).bursts


def test_the_knee_is_beside_the_workers_that_the_formula_asks_for():
    (scale,) = scales(feeds(feed_record(*feed_results(Loader(), COUNTS))))
    assert scale.workers == list(COUNTS)
    assert (scale.knee, scale.needed, scale.again) == (4, 4, [])
    assert scale.best.over.value == pytest.approx(1, abs=0.01)


def test_from_case_to_case_is_what_each_case_would_say_by_itself():
    """Both a batch's cost and the step differ from case to case."""
    cases = [
        feed_result(
            Loader(step_ms=step), workers=workers, launch={"facts": {"read_ms": 0.0, "decode_ms": cost}}
        )
        for workers, cost, step in ((1, 8.0, 2.0), (2, 12.0, 6.0), (4, 16.0, 2.0))
    ]
    (scale,) = scales(feeds(feed_record(*cases)))
    assert (scale.needed, scale.needed_between) == (6, (2, 8))


@pytest.mark.parametrize(("step", "needed"), [(8.1, 1), (2.7, 3), (1.6, 5), (1.0, 8), (0.51, 15)])
def test_the_formula_for_workers(step, needed):
    (scale,) = scales(feeds(feed_record(*feed_results(Loader(step_ms=step), range(1, 17)))))
    assert (scale.needed, scale.knee) == (needed, needed)


def test_where_no_number_of_workers_is_enough_there_is_no_knee():
    (scale,) = scales(feeds(feed_record(*feed_results(Loader(step_ms=0.1), COUNTS))))
    assert (scale.knee, scale.needed) == (None, 77)


def test_more_workers_that_are_slower_are_seen():
    cases = [
        *feed_results(Loader(), (2, 4, 8)),
        feed_result(Loader(storage_ms=3.0), workers=16),
    ]
    (scale,) = scales(feeds(feed_record(*cases)))
    assert (scale.knee, scale.again) == (4, [16])


def test_cases_that_differ_in_more_than_workers_are_sets_of_their_own():
    found = feeds(
        feed_record(*feed_results(Loader(), (0, 4)), *feed_results(Loader(), (0, 4), memory="pageable"))
    )
    assert [scale.workers for scale in scales(found)] == [[0, 4], [0, 4]]


def test_what_storage_must_give():
    """320,000 bytes in each step of 2 ms."""
    found = feed(Loader(step_ms=2.0, read_ms=40.0), source="store", launch={"noise": 0.0})  # 47 ms by four
    assert found.needed_rate == pytest.approx(160e6)
    assert found.reached_rate == pytest.approx(320e3 / 11.75e-3)


def test_storage_bound_is_input_bound_by_where_the_bytes_come_from():
    reading = feed(Loader(read_ms=40.0), source="store")
    assert storage_bound(reading, [reading])
    decoding = feed(Loader(read_ms=1.0, decode_ms=40.0), source="store")
    assert not storage_bound(decoding, [decoding])
    # A rate that all workers share is not seen by one that reads alone; the same case from memory tells.
    shared = feed(Loader(storage_ms=9.0), source="store")
    from_memory, as_slow = feed(Loader(), source="memory"), feed(Loader(decode_ms=70.0), source="memory")
    assert storage_bound(shared, [from_memory, shared])
    assert not storage_bound(shared, [as_slow, shared])
    assert not storage_bound(shared, [feed(Loader(), source="memory", workers=16), shared])
    kept_up = feed(Loader(read_ms=40.0, step_ms=60.0), source="store")
    assert not storage_bound(kept_up, [kept_up])


def test_wasted_tokens_are_counted():
    facts = {"padding": (4000, 8000), "bucketing": (4000, 4500), "packing": (4000, 4096)}
    made = [
        feed_result(
            data="text", batching=how, launch={"facts": {"tokens": tokens, "padded": padded}, "noise": 0.0}
        )
        for how, (tokens, padded) in facts.items()
    ]
    (alike,) = batchings(feeds(feed_record(*made, feed_result())))
    assert [each.wasted for each in alike] == [0.5, 1 - 4000 / 4500, 1 - 4000 / 4096]
    assert alike[0].per_token(alike[0].real_ms) == pytest.approx(0.5)
    assert feed().wasted is None


def test_facts_are_medians_over_launches_and_what_cannot_be_is_none():
    result = feed_result(launches=3)
    for launch, ms in zip(result.launches, (1.0, 5.0, 2.0), strict=True):
        launch.checks |= {"read_ms": ms, "stored_bytes": "many", "samples": True, "unpinned": ["a", "b", 3]}
    found = Feed.of(result)
    assert found.facts["read_ms"] == 2.0
    assert found.needed_rate is None
    assert "samples" not in found.facts
    assert found.unpinned == ("a", "b")


def test_other_families_and_cases_without_numbers_are_left_out():
    made = feed_record(
        h2d_result(h2d_case()), feed_result(status="invalid", reason="why"), feed_result(workers=2)
    )
    assert [each.workers for each in feeds(made)] == [2]


def test_a_record_keeps_what_a_loader_says():
    made = feed_record(feed_result(launch={"facts": {"tokens": 5, "padded": 8, "unpinned": ["Batch.mask"]}}))
    again = loads(dumps(made))
    assert again.cases[0].metrics == made.cases[0].metrics
    assert again.cases[0].launches[0].checks == made.cases[0].launches[0].checks
    assert Feed.of(again.cases[0]) == Feed.of(made.cases[0])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("samples", 0), ("read_ms", -1.0), ("read_ms", float("nan")), ("padded", "many"), ("worker_bytes", 1e30),
        ("unpinned", "all"), ("unpinned", [1]), ("unpinned", ["x" * 201]), ("unpinned", ["x"] * 101),
    ],
)  # fmt: skip
def test_a_fact_that_cannot_be_is_left_out_of_a_record(name, told):
    made = feed_record(feed_result(launch={"facts": {name: told}}))
    again = loads(dumps(made)).cases[0]
    assert name not in again.launches[0].checks
    assert again.launches[0].checks["batch_bytes"] == 2_400_000
