"""The best bucket cap of records made from machines whose every number is known."""

import math

import pytest
from factories_ddp import Machine, bucket_results, ddp_record, ddp_result

from harness import best_bucket, buckets
from harness.families import MIB

LAYERS = [8 * MIB] * 128
CAPS = [MIB, 25 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB]


def found(machine: Machine, caps=CAPS, tensors=LAYERS, **axes) -> best_bucket.BestBucket:
    (made,) = best_bucket.find(ddp_record(*bucket_results(machine, caps, tensors, **axes)))
    return made


def test_the_measured_best_is_the_least_time_and_those_that_cannot_be_told_from_it():
    made = found(Machine(alpha_ms=0.05))
    times = {cap.cap: cap.overlapped.value for cap in made.caps}
    assert list(times) == CAPS
    assert made.best.cap == min(times, key=lambda cap: times[cap]) == 25 * MIB
    assert made.as_good == ()
    assert [cap.cap for cap in found(Machine(alpha_ms=0.05), half=0.01).as_good] == [64 * MIB]


@pytest.mark.parametrize(
    ("alpha", "rate", "tokens"),
    [(0.05, 600e12, 2048), (0.3, 600e12, 2048), (0.05, 600e12, 512), (1.0, 600e12, 512), (30.0, 600e12, 512)],
)
def test_theory_finds_the_machine_and_its_best_count(alpha, rate, tokens):
    made = found(Machine(alpha_ms=alpha, rate=rate), tokens=tokens).theory
    assert made.alpha == pytest.approx(alpha, rel=1e-6)
    assert made.bandwidth == pytest.approx(303.0)
    total, backward = sum(LAYERS), 2 / 3 * 6 * sum(LAYERS) / 2 * tokens / rate * 1e3 * (2 / 2)
    assert (
        made.backward
        == pytest.approx(2 / 3 * 6 * (total / 2) * tokens / rate * 1e3)
        == pytest.approx(backward)
    )
    given = (made.backward, total, alpha, buckets.beta_of(303.0, 2))
    times = {count: buckets.step(given[0], given[1], count, given[2], given[3]) for count in range(1, 1000)}
    assert times[made.count] == pytest.approx(min(times.values()))
    assert made.cap == pytest.approx(total / made.count)
    usual = buckets.step(given[0], given[1], total / (25 * MIB), given[2], given[3])
    assert made.default == pytest.approx(usual / min(times.values()) - 1)


def test_theory_and_measurement_agree_where_buckets_are_equal():
    """Of the counts measured, the best is one of the two nearest to theory's."""
    machine, counts = Machine(alpha_ms=0.3), (2, 4, 8, 16, 32, 64)
    cases = [
        ddp_result(machine, (1024 * MIB // count,) * count, bucket=1024 * MIB // count, tokens=1024)
        for count in counts
    ]
    (made,) = best_bucket.find(ddp_record(*cases))
    nearest = sorted(counts, key=lambda count: abs(math.log(count / made.theory.count)))[:2]
    assert made.best.count in nearest


def test_caps_that_give_the_same_buckets_are_one():
    made = found(Machine(alpha_ms=0.05), caps=[MIB, 4 * MIB, 8 * MIB, 25 * MIB])
    assert [(cap.cap, cap.same, cap.count) for cap in made.caps] == [
        (MIB, (4 * MIB, 8 * MIB), 128),
        (25 * MIB, (), 33),
    ]


def test_one_list_of_buckets_is_no_choice():
    assert best_bucket.find(ddp_record(*bucket_results(Machine(), [MIB, 4 * MIB], LAYERS))) == []
    assert best_bucket.find(ddp_record()) == []


def test_cases_that_differ_in_more_are_apart():
    cases = bucket_results(Machine(), CAPS[:2], LAYERS) + bucket_results(
        Machine(), CAPS[:3], LAYERS, tokens=512
    )
    assert [len(each.caps) for each in best_bucket.find(ddp_record(*cases))] == [2, 3]


def test_without_a_cost_of_a_bucket_more_never_lose():
    made = found(Machine(alpha_ms=0.0)).theory
    assert (made.count, made.cap) == (None, None)
    assert made.default > 0


def test_buckets_that_ended_with_others_are_left_out_of_the_fit():
    cases = bucket_results(Machine(alpha_ms=0.05), CAPS[:3], LAYERS)
    for case in cases:
        alone = case.launches[0].checks["alone_ms"]
        case.launches[0].checks["alone_ms"] = [0.0 if at % 4 == 3 else ms for at, ms in enumerate(alone)]
    (made,) = best_bucket.find(ddp_record(*cases))
    assert made.lacking == ""
    assert made.theory.alpha == pytest.approx(0.05)


def test_what_is_lacking_is_said():
    cases = bucket_results(Machine(), CAPS[:3], LAYERS)
    cases[1].launches[0].checks.pop("ready_ms")
    (made,) = best_bucket.find(ddp_record(*cases))
    assert [cap.cap for cap in made.caps] == [MIB, 64 * MIB]
    assert made.lacking == "at a cap of 25MiB, ready_ms: launch 0 has none"
    assert made.theory is not None
    cases = bucket_results(Machine(), CAPS[:3], LAYERS)
    for case in cases:
        case.params["ranks"] = 1
    (made,) = best_bucket.find(ddp_record(*cases))
    assert made.theory is None
    assert made.lacking.startswith("ranks: got 1")
