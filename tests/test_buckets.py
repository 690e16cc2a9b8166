"""The arithmetic of buckets against exact simulations, brute force and the figures of theory.md."""

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import buckets
from harness.buckets import DEFAULT_CAP, DEFAULT_FIRST, MIB

GIB = 1 << 30
H200_RATE = 794e12  # theory.md 10, bf16 GEMM
H200_BUS = {MIB: 39.9, 16 * MIB: 220.0, 64 * MIB: 347.0, 256 * MIB: 436.0}  # theory.md 10, 8 GPUs, GB/s


def simulated(ready: list[float], alone: list[float]) -> list[float]:
    """Ends of the collectives, event by event: a bucket that becomes ready joins a queue, and a link that is free takes
    the next of it."""
    events = [(at, 0, index) for index, at in enumerate(ready)]
    heapq.heapify(events)
    queue: list[int] = []
    ends = [0.0] * len(ready)
    busy = False
    while events:
        now, what, index = heapq.heappop(events)
        if what == 0:
            queue.append(index)
        else:
            ends[index], busy = now, False
        if queue and not busy:
            taken = queue.pop(0)
            busy = True
            heapq.heappush(events, (now + alone[taken], 1, taken))
    return ends


def random_steps() -> list[tuple[str, list[float], list[float]]]:
    """Steps of every kind: bound by compute, by communication, one bucket, a big last one, two ready at once."""
    draw = random.Random(5)
    made = []
    for at in range(200):
        count = 1 if at % 10 == 0 else draw.randint(2, 40)
        ready = sorted(draw.uniform(1, 20) for _ in range(count))
        mean = draw.choice([0.01, 0.2, 1.0, 5.0]) * 20 / count
        alone = [draw.expovariate(1 / mean) + 1e-6 for _ in range(count)]
        if at % 7 == 0:
            alone[-1] += 10.0
        if at % 11 == 0 and count > 1:
            ready[-2] = ready[-1]
        made.append((f"{at}: {count} buckets, {mean:.3g} ms each", ready, alone))
    return made


STEPS = random_steps()


@pytest.mark.parametrize(("ready", "alone"), [step[1:] for step in STEPS], ids=[step[0] for step in STEPS])
def test_schedule_is_the_simulation(ready, alone):
    ends = simulated(ready, alone)
    compute = ready[-1] + 0.3
    found = buckets.schedule(ready, alone, compute)
    assert found.tail == pytest.approx(ends[-1] - ready[-1])
    assert found.end == pytest.approx(max(compute, ends[-1]))
    assert found.exposed == pytest.approx(max(0.0, ends[-1] - compute))
    # From `since` on the link is never idle, and before it was.
    assert ends[-1] == pytest.approx(ready[found.since] + sum(alone[found.since :]))
    assert found.since == 0 or ends[found.since - 1] <= ready[found.since]


def test_the_random_steps_are_of_every_kind():
    found = [(buckets.schedule(ready, alone, ready[-1]), ready) for _, ready, alone in STEPS]
    assert sum(one.since == len(ready) - 1 > 0 for one, ready in found) > 20, "only the last bucket lies bare"
    assert sum(one.since == 0 and len(ready) > 1 for one, ready in found) > 20, "bound by communication"
    assert sum(len(ready) == 1 for _, ready in found) == 20


@pytest.mark.parametrize(("ready", "alone"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_buckets_without_a_time_are_refused(ready, alone):
    with pytest.raises(ValueError, match="ready times of"):
        buckets.schedule(ready, alone, 1.0)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_the_scale_for_a_share_is_where_the_simulation_reaches_it(share):
    seen = 0
    for _, ready, alone in STEPS:
        scale = buckets.scale_for_share(ready, alone, share)

        def tail(x, ready=ready, alone=alone):
            later = [x * at for at in ready]
            return (simulated(later, alone)[-1] - later[-1]) / sum(alone)

        if math.isinf(scale):
            assert tail(1e6) > share
        elif scale > 0:
            seen += 1
            assert tail(scale) == pytest.approx(share, rel=1e-6)
            assert tail(0.999 * scale) > share > tail(1.001 * scale) - 1e-9
        else:
            assert tail(1e-9) <= share
    assert seen > 10


def test_a_last_bucket_that_is_too_large_is_bare_at_any_number_of_tokens():
    """An embedding's gradient comes last, in one piece (theory.md 3)."""
    assert buckets.scale_for_share([1.0, 2.0, 3.0], [1.0, 1.0, 8.0], 0.79) == math.inf
    assert buckets.scale_for_share([1.0, 2.0, 3.0], [1.0, 1.0, 8.0], 0.80) < math.inf


@pytest.mark.parametrize("backward", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("count", [1, 2, 7, 32])
@pytest.mark.parametrize(("alpha", "beta"), [(0.02, 1e-8), (0.0, 1e-7), (2.0, 1e-9)])
def test_step_is_the_simulation_of_equal_buckets(backward, count, alpha, beta):
    total = 512 * MIB
    ready = [backward * (at + 1) / count for at in range(count)]
    alone = [buckets.cost(total / count, alpha, beta)] * count
    expected = max(backward, simulated(ready, alone)[-1])
    assert buckets.step(backward, total, count, alpha, beta) == pytest.approx(expected)
    assert buckets.schedule(ready, alone, backward).end == pytest.approx(expected)


@pytest.mark.parametrize(
    ("backward", "total", "alpha", "beta", "regime"),
    [
        (40.0, 512 * MIB, 0.1, 7e-9, "compute"),
        (40.0, 512 * MIB, 0.7, 7e-9, "compute"),
        (4.0, 512 * MIB, 0.02, 7e-9, "almost even"),
        (3.7, 512 * MIB, 0.1, 7e-9, "communication"),
        (1.0, 512 * MIB, 0.03, 7e-9, "communication"),
        (1.0, 512 * MIB, 3.0, 7e-9, "one bucket"),
        (0.0, 512 * MIB, 0.5, 7e-9, "one bucket"),
        (10.0, 0, 0.5, 7e-9, "compute"),
    ],
)  # fmt: skip
def test_the_best_count_is_that_of_brute_force(backward, total, alpha, beta, regime):
    found = buckets.best_whole_count(backward, total, alpha, beta)
    times = {count: buckets.step(backward, total, count, alpha, beta) for count in range(1, 2001)}
    assert times[found] == pytest.approx(min(times.values()), rel=1e-12)
    least = buckets.step(backward, total, buckets.best_count(backward, total, alpha, beta), alpha, beta)
    assert least <= min(times.values()) * (1 + 1e-12), "no whole count does better than b*"
    assert regime != "one bucket" or found == 1
    if regime == "communication":
        assert least == pytest.approx(total * beta + 2 * math.sqrt(alpha * backward))


@given(
    st.floats(0.01, 1000), st.integers(0, 8 * GIB), st.floats(1e-3, 10), st.floats(1e-10, 1e-6)
)  # fmt: skip
def test_no_count_beats_the_best(backward, total, alpha, beta):
    found = buckets.best_whole_count(backward, total, alpha, beta)
    best = buckets.step(backward, total, found, alpha, beta)
    for count in {1, 2, 3, max(1, found - 1), found + 1, 2 * found, max(1, found // 2), 500}:
        assert best <= buckets.step(backward, total, count, alpha, beta) * (1 + 1e-9)


def test_the_limits_of_the_best_count():
    assert buckets.best_count(10.0, GIB, 0.0, 1e-9) == math.inf, "a bucket costs nothing: more never lose"
    assert buckets.best_whole_count(10.0, GIB, 0.0, 1e-9, limit=1000) == 1000
    assert buckets.best_count(10.0, GIB, 1e6, 1e-9) == 1.0
    # Bound by compute, one bucket's collective is the tail that lies bare.
    count, alpha, beta = 10, 0.1, 5e-9
    bare = buckets.step(100.0, GIB, count, alpha, beta) - 100.0
    assert bare == pytest.approx(buckets.cost(GIB / count, alpha, beta))


def test_the_published_bandwidths_are_a_latency_and_a_slope():
    """theory.md 10, all-reduce on 8 H200: the fit is within 15 % of every size, and says what 25 MiB reach."""
    times = {size: buckets.beta_of(bus, 8) * size for size, bus in H200_BUS.items()}
    assert times[MIB] == pytest.approx(0.0460, abs=5e-5)
    assert times[256 * MIB] == pytest.approx(1.077, abs=5e-4)
    alpha, beta = buckets.fit(list(times), list(times.values()))
    for size, ms in times.items():
        assert buckets.cost(size, alpha, beta) == pytest.approx(ms, rel=0.15)
        assert buckets.bus_bandwidth(size, ms, 8) == pytest.approx(H200_BUS[size])
    assert 0.040 < alpha < 0.050
    assert 400 < buckets.bus_bandwidth(1, beta, 8) < 500, "368 by rings to 482 by the switch at 16 GiB"
    # PyTorch's defaults: the first bucket is nearly all latency, and 25 MiB reach half of what 256 MiB do.
    assert alpha / buckets.cost(DEFAULT_FIRST, alpha, beta) > 0.9
    reached = buckets.bus_bandwidth(DEFAULT_CAP, buckets.cost(DEFAULT_CAP, alpha, beta), 8)
    assert 0.5 < reached / H200_BUS[256 * MIB] < 0.7


def test_the_bandwidth_of_two_ranks_is_their_bytes_over_the_time():
    """theory.md 4: 2 GiB of gradients at 303 GB/s on two H200 take 7.09 ms."""
    assert buckets.beta_of(303.0, 2) * 2 * GIB == pytest.approx(7.087, abs=5e-4)
    assert buckets.bus_bandwidth(2 * GIB, 7.087, 2) == pytest.approx(303.0, rel=1e-4)
    assert buckets.bus_bandwidth(GIB, 1.0, 1) == 0.0, "one rank moves nothing"


def test_the_thresholds_that_follow_from_published_figures():
    """theory.md 4 with 794 TFLOP/s: two H200 at 303 GB/s, eight at 482 (all-reduce), 361 and 363 (gather, scatter)."""
    assert buckets.tokens_threshold_ddp(2, 2, H200_RATE, 303) == pytest.approx(1310, abs=1)
    assert buckets.tokens_threshold_ddp(4, 2, H200_RATE, 303) == pytest.approx(2620, abs=1)
    assert buckets.tokens_threshold_ddp(2, 8, H200_RATE, 482) == pytest.approx(1441, abs=1)
    assert buckets.tokens_threshold_ddp(2, 8, H200_RATE, H200_BUS[MIB]) == pytest.approx(17412, abs=1)
    assert buckets.tokens_threshold_fsdp_forward(8, H200_RATE, 361) == pytest.approx(1924.5, abs=1)
    forward = buckets.tokens_threshold_fsdp_forward(8, H200_RATE, 363)
    for gradient, factor, recomputed in ((2, 1.0, 4 / 6), (4, 1.5, 1.0)):
        for recompute, share in ((False, factor), (True, recomputed)):
            found = buckets.tokens_threshold_fsdp_backward(gradient, 8, H200_RATE, 363, recompute=recompute)
            assert found == pytest.approx(share * forward)


@pytest.mark.parametrize("gradient", [2, 4])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_at_the_threshold_the_backward_is_as_long_as_the_all_reduce(gradient, ranks):
    """What the formula says, written out for a layer of p parameters: 4pT FLOP beside pg bytes."""
    for p in (1e6, 1e9):
        tokens = buckets.tokens_threshold_ddp(gradient, ranks, 500e12, 250.0)
        backward_ms = 4 * p * tokens / 500e12 * 1e3
        assert backward_ms == pytest.approx(buckets.beta_of(250.0, ranks) * p * gradient)


@pytest.mark.parametrize(("alpha", "beta"), [(0.05, 3e-9), (0.0, 3e-9), (0.4, 0.0), (1e-4, 1e-6)])
def test_the_fit_finds_what_made_the_times(alpha, beta):
    sizes = [64 << 10, MIB, 25 * MIB, 25 * MIB, 512 * MIB]
    found = buckets.fit(sizes, [buckets.cost(size, alpha, beta) for size in sizes])
    assert found == pytest.approx((alpha, beta), rel=1e-6, abs=1e-15)
    assert alpha or found[0] == 0.0, "what rounding leaves is no latency"
    assert beta or found[1] == 0.0


def test_neither_side_of_the_fit_is_negative_and_it_is_the_best_of_those():
    sizes = [MIB, 2 * MIB, 4 * MIB, 8 * MIB]
    for times in ([0.5, 1.2, 2.9, 6.5], [4.0, 3.0, 2.0, 1.0]):
        alpha, beta = buckets.fit(sizes, times)
        assert min(alpha, beta) == 0.0

        def error(a, b, times=times):
            return sum(
                (buckets.cost(size, a, b) / ms - 1) ** 2 for size, ms in zip(sizes, times, strict=True)
            )

        for da in (0.0, 0.01, 0.1):
            for db in (-1e-9, 0.0, 1e-9):
                assert error(alpha, beta) <= error(alpha + da, max(0.0, beta + db)) + 1e-12


@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        ([MIB, MIB], [1.0, 1.1], "two sizes or more that differ"),
        ([], [], "two sizes or more that differ"),
        ([GIB, GIB + 1], [1.0, 1.0], "two sizes or more that differ"),
        ([MIB, 2 * MIB], [1.0, 0.0], "positive"),
        ([MIB, 2 * MIB], [1.0, math.nan], "positive"),
        ([MIB, 2 * MIB], [1.0], "1 times of 2 sizes"),
    ],
)
def test_a_fit_of_nothing_is_refused(sizes, times, words):
    with pytest.raises(ValueError, match=words):
        buckets.fit(sizes, times)
