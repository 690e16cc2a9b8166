"""What is said of loaders: each sentence from a record of known truth."""

from pathlib import Path

from factories import h2d_case, h2d_result, record
from factories_feed import Loader, feed_record, feed_result, feed_results

from harness import feeding_words, metrics
from harness import summary as of_programs
from harness.findings import doubts as all_doubts
from harness.findings import summary


def verdicts(*results) -> list[str]:
    return [text for text, _ in feeding_words.verdicts(feed_record(*results))]


def notes(*results) -> str:
    return "\n".join(feeding_words.notes(feed_record(*results)))


def test_the_knee_stands_beside_theory():
    (said,) = verdicts(*feed_results(Loader(), (0, 1, 2, 4, 8, 16)))
    assert said.startswith(
        "feed jpeg pinned: input-bound with 2 workers (a real step takes 2.00x the cached one)"
    )
    assert "not from 4 on (a real step takes 1.00x the cached one)" in said
    assert said.endswith("theory: 4 within 5 % (8.00 ms of a worker for a batch, 2.00 ms a step)")


def test_theory_is_told_from_the_median_case_and_beside_what_a_lone_worker_brings():
    """A host whose cores come and go: costs were taken case by case, and one was dear."""
    costs = {1: 8.0, 2: 8.0, 4: 30.0}
    given = [
        feed_result(Loader(storage_ms=10.5 if workers == 1 else 0.0), workers=workers,
                    launch={"facts": {"read_ms": 0.0, "decode_ms": cost}})
        for workers, cost in costs.items()
    ]  # fmt: skip
    (said,) = verdicts(*given)
    assert said.endswith(
        "theory: 4 (4 to 15 from case to case) within 5 % (8.00 ms of a worker for a batch, 2.00 ms a step; "
        "a lone worker brings one in 10.5, handing over and shared cores included)"
    )
    (close,) = verdicts(*feed_results(Loader(), (1, 2, 4)))
    assert "lone" not in close


def test_a_loader_that_never_keeps_up_and_one_that_always_does():
    (never,) = verdicts(*feed_results(Loader(step_ms=0.1), (0, 8, 16)))
    assert "input-bound with 0, 8 and 16 workers, so more than 16 are needed" in never
    assert "with 16)" in never
    (always,) = verdicts(*feed_results(Loader(step_ms=9.0), (0, 4)))
    assert "not input-bound with no worker or more" in always
    (worse,) = verdicts(*feed_results(Loader(), (4, 8)), feed_result(Loader(storage_ms=3.0), workers=16))
    assert "not input-bound with 4 workers (" in worse
    assert "; input-bound with 16: more workers are slower" in worse
    (between,) = verdicts(*feed_results(Loader(), (2, 4)), feed_result(Loader(storage_ms=3.0), workers=16))
    assert "input-bound with 2 workers (a real step takes 2.00x the cached one), not with 4 (" in between
    assert "; input-bound with 16: more workers are slower" in between


def test_more_workers_that_are_no_help_are_not_asked_for():
    """As where they share few cores: the more of them, the slower each step is beside the cached one."""
    (said,) = verdicts(
        *[
            feed_result(Loader(step_ms=2.0, decode_ms=6.0 * count**2), workers=count, launch={"seed": count})
            for count in (1, 2, 4)
        ]
    )
    assert "input-bound with 1, 2 and 4 workers, and more are no help: best with 1" in said
    assert "are needed" not in said


def test_a_loader_that_no_worker_makes_faster_is_not_asked_for_more():
    """Storage sets its pace: by chance the last number of workers is the best."""
    (said,) = verdicts(
        *[feed_result(Loader(storage_ms=4.0 - 0.01 * count), workers=count) for count in (1, 2, 4)]
    )
    assert "and more are no help: best with 4" in said


def test_without_workers_no_cores_are_shared_with_any():
    (said,) = verdicts(feed_result(Loader(step_ms=9.0, slowed=0.3), workers=0))
    assert "the copy, or batches made beside it" in said
    assert "workers" not in said.split(": ", 1)[1]


def test_a_lone_case_says_what_waits_and_for_how_long():
    (bound,) = verdicts(feed_result(Loader(step_ms=1.0), launch={"noise": 0.0}))
    assert bound.startswith(
        "feed jpeg workers=4 pinned: input-bound: a real step takes 2.00x the cached one (2.00 ms,"
    )
    assert bound.endswith("the cached one 1.00); 1.00 ms of it the device waits")
    (free,) = verdicts(feed_result(Loader(step_ms=4.0)))
    assert "not input-bound" in free
    assert "the loader could feed 2.00x as many" in free
    (balanced,) = verdicts(feed_result(Loader(step_ms=2.0)))
    assert "balanced" in balanced
    (slowed,) = verdicts(feed_result(Loader(step_ms=4.0, slowed=0.5)))
    assert "not input-bound, and yet" in slowed
    assert "cores shared with workers" in slowed
    (unclear,) = verdicts(feed_result(Loader(step_ms=4.0, slowed=0.1), launch={"noise": 0.2, "seed": 1}))
    assert "too noisy to tell" in unclear


def test_bursts_are_said_and_told_by_means():
    (said,) = verdicts(feed_result(Loader(decode_ms=2.0, burst=8, stall_ms=8.0), launch={"rounds": 40}))
    assert "in bursts (the longest wait 64.0 ms), so told by means" in said
    assert "3.00 ms, the cached one 2.00" in said


def test_steps_that_run_faster_after_a_rest_are_named():
    """An idle device clocks up: its waiting is more than what the step takes longer."""
    (said,) = verdicts(feed_result(Loader(step_ms=2.0, slowed=-0.2, decode_ms=15.0)))
    assert "computes 20 % faster for the rest it has" in said


def test_a_slow_store_is_said_with_the_rate_it_needs_and_the_one_it_gives():
    (said,) = verdicts(feed_result(Loader(read_ms=320.0, step_ms=5.0), source="store", launch={"noise": 0.0}))
    assert "storage-bound: a worker spends 98 % of its time on getting bytes" in said
    assert "it needs 64.0 MB/s to keep up (3200 samples/s of 20.0 kB), reached 3.91 MB/s" in said
    (several,) = verdicts(*feed_results(Loader(read_ms=320.0, step_ms=5.0), (4, 8), source="store"))
    assert "storage-bound" in several


def test_a_summary_takes_few_of_them_and_the_notes_the_rest():
    several = [
        *feed_results(Loader(), (0, 4)),
        *[feed_result(Loader(), source=name, workers=8) for name in ("files", "shards", "store")],
    ]
    said, told = verdicts(*several), notes(*several)
    assert len(said) == feeding_words.MOST_VERDICTS
    assert "source=store" not in "".join(said)
    assert "feed jpeg source=store workers=8 pinned: not input-bound" in told


def test_notes_say_what_it_takes_to_feed():
    told = notes(feed_result(Loader(step_ms=2.0), launch={"noise": 0.0}))
    assert "jpeg from memory: storage must give 160 MB/s to keep up (8000 samples/s of 20.0 kB)" in told
    assert "s to the first batch, and to the next epoch's: 0.410 and 0.0120" in told
    assert "host memory of a worker, beyond what it shares: 41.0 MB" in told
    bound = notes(feed_result(Loader(step_ms=1.0)))
    assert (
        "NVML's utilisation where most input-bound (4 workers): 40 % over all arms, while the device is idle for 50 %"
        in bound
    )
    assert "NVML" not in told


def test_storage_is_asked_for_what_its_own_samples_take_at_the_fastest_step():
    told = notes(
        feed_result(Loader(step_ms=4.0), launch={"noise": 0.0}),
        feed_result(Loader(step_ms=2.0), source="files", launch={"noise": 0.0}),
        feed_result(Loader(), source="shards", launch={"noise": 0.0, "facts": {"stored_bytes": 4_800_000}}),
    )
    assert (
        "jpeg from memory, files: storage must give up to 160 MB/s to keep up (8000 samples/s of 20.0 kB)"
        in told
    )
    assert "jpeg from shards: storage must give 2400 MB/s to keep up (8000 samples/s of 300 kB)" in told


def test_numbers_of_workers_that_are_too_noisy_are_named():
    noisy = feed_result(Loader(step_ms=4.0, slowed=0.1), workers=2, launch={"noise": 0.2, "seed": 4})
    (said,) = verdicts(noisy, *feed_results(Loader(step_ms=4.0), (4, 8)))
    assert (
        "not input-bound with 4 workers or more (a real step takes 1.00x the cached one); too noisy to tell with 2;"
        in said
    )


def test_what_was_not_told_is_not_said():
    facts = dict.fromkeys(
        ("read_ms", "decode_ms", "stored_bytes", "first_batch_ms", "worker_bytes", "samples"), None
    )
    bare = [feed_result(workers=count, launch={"facts": facts, "spans": False}) for count in (2, 4)]
    for each in bare:
        each.launches[0].ranks[0].telemetry = {}
    assert notes(*bare) == ""
    (said,) = verdicts(*bare)
    assert "theory" not in said


def test_batchings_are_set_beside_each_other():
    made = [
        feed_result(
            Loader(step_ms=step, decode_ms=0.1, read_ms=0.1), data="text", batching=how,
            launch={"facts": {"tokens": 4000, "padded": padded}, "noise": 0.0},
        )
        for how, padded, step in (("padding", 8000, 4.0), ("packing", 4096, 2.0))
    ]  # fmt: skip
    told = notes(*made)
    assert "tokens wasted: padding 50.0 % (4.00 ms a real step, 4.00 cached, 1.00 us a real token)" in told
    assert "packing 2.3 % (2.00 ms a real step, 2.00 cached, 0.500 us a real token)" in told


def test_steps_that_are_faster_than_what_feeds_them_are_a_loud_doubt():
    made = feed_result(Loader(step_ms=2.0, decode_ms=15.0))
    assert feeding_words.doubts(feed_record(made)) == []
    for seen in made.launches[0].ranks[0].rounds:
        seen.arms["overlapped"] *= 0.7
    ((text, loud),) = feeding_words.doubts(feed_record(metrics.derive(made)))
    assert loud
    assert text.startswith("a real step is faster than the loader alone or the cached step")


def test_what_stayed_unpinned_is_a_loud_doubt():
    made = feed_record(feed_result(launch={"facts": {"unpinned": ["Batch.mask"]}}), feed_result(workers=8))
    (found,) = (line for line in all_doubts(made) if "stayed pageable" in line.text)
    assert found.doubt
    assert found.text.endswith("Batch.mask (workers=4)")
    assert found in summary(made), "`show` has it too"
    assert not any("stayed" in text for text in verdicts(feed_result()))


def test_workers_that_share_cores_are_a_doubt_on_a_cpu():
    for device, loud in (("cpu", True), ("cuda", False)):
        made = feed_record(feed_result(workers=4), device=device)
        made.machine.cpu["usable_cores"] = 4
        assert (
            "4 workers share 4 cores with the process that computes: they take each other's time", loud
        ) in feeding_words.doubts(made)  # fmt: skip
        made.machine.cpu["usable_cores"] = 5
        assert not feeding_words.doubts(made)


def test_an_unsettled_case_is_marked_and_a_record_of_copies_says_nothing():
    (said,) = verdicts(feed_result(status="unsettled"))
    assert said.endswith("(unsettled)")
    copies = record(h2d_result(h2d_case()))
    assert not feeding_words.verdicts(copies)
    assert not feeding_words.notes(copies)
    assert not feeding_words.doubts(copies)


def test_the_summary_of_a_record_has_the_verdicts():
    lines = [line.text for line in summary(feed_record(*feed_results(Loader(), (2, 4))))]
    assert sum(line.startswith("feed jpeg pinned: input-bound with 2 workers") for line in lines) == 1


def test_a_number_of_workers_that_waits_among_others_that_do_not_is_said_all_the_same():
    slow = feed_result(Loader(step_ms=9.0, decode_ms=15.0), workers=1)
    (said,) = verdicts(
        feed_result(Loader(step_ms=9.0), workers=0), slow, *feed_results(Loader(step_ms=9.0), (2, 4))
    )
    assert "; input-bound with 1 all the same" in said


def test_programs_are_told_verdict_and_knee():
    told = of_programs.of(feed_record(*feed_results(Loader(), (1, 2, 4, 8))), Path("a.json"))
    assert [case["verdict"] for case in told["cases"]] == [
        "input-bound",
        "input-bound",
        "balanced",
        "compute-bound",
    ]
    (scale,) = told["loaders"]
    assert (scale["workers"], scale["knee"], scale["workers_needed"]) == ([1, 2, 4, 8], 4, 4)
