import gc

import pytest
from fakes import ARMS, MS, FakeWorkload, Meeting, ScriptedClock, ThreadGroup

from harness import measure as module
from harness.measure import measure
from harness.statistics import StopRule, balanced_orders

ROUND_MS = sum(MS[arm] for arm in ARMS)
ROUND_S = (ROUND_MS + len(ARMS)) * 1e-3  # and one millisecond before each sample


def rule(*looks: int, **options: float) -> StopRule:
    return StopRule(looks=looks or (4,), **options)


def run(workload: FakeWorkload, with_rule: StopRule | None = None, **options):
    return measure(workload, with_rule or rule(), clock=workload.clock, **options)


def uneven(arm: str, n: int) -> float:
    """Times that rise, which no look calls settled."""
    return float(n)


def test_a_settled_case_keeps_every_round_as_it_was():
    workload = FakeWorkload()
    found = run(workload)
    assert (found.stop, found.failed, found.dropped) == ("settled", "", {})
    assert len(found.rounds) == 4
    for at, seen in enumerate(found.rounds):
        assert seen.arms == {arm: MS[arm] for arm in ARMS}
        assert seen.host == {arm: MS[arm] / 100 for arm in ARMS}
        assert seen.spans == {"transfer_in_overlapped": 2.5}
        assert seen.start == pytest.approx(at * ROUND_S)
    assert found.wall_s == pytest.approx(4 * ROUND_S)
    assert found.timed_s == pytest.approx(4 * ROUND_MS * 1e-3)
    assert found.checks["driver_allocations"] == 0


def test_the_warm_up_and_one_whole_round_are_run_first_and_not_used():
    workload = FakeWorkload(noise=lambda arm, n: 100.0 if n == 0 else 0.0)
    found = run(workload)
    orders = balanced_orders(ARMS)
    assert workload.calls[: 1 + len(ARMS)] == ["warm-up", *orders[0]]
    assert workload.calls.count("overlapped") == 5
    assert {seen.arms["overlapped"] for seen in found.rounds} == {MS["overlapped"]}
    assert all(len(windows) == 4 for windows in found.windows.values())
    assert found.timed_s == pytest.approx(4 * ROUND_MS * 1e-3)


def test_what_the_thrown_away_round_drops_is_not_counted():
    found = run(FakeWorkload(script={("compute", 0): {"dropped": "gate leaked"}}))
    assert (found.dropped, len(found.rounds), found.stop) == ({}, 4, "settled")


def test_the_balanced_orders_are_used_in_turn():
    workload = FakeWorkload(noise=uneven)
    found = run(workload, rule(6))
    orders = balanced_orders(ARMS)
    assert [seen.order for seen in found.rounds] == [orders[at % len(orders)] for at in range(6)]
    assert workload.calls[5:] == [arm for seen in found.rounds for arm in seen.order]


def test_a_dropped_sample_voids_its_whole_round_and_is_counted_by_reason():
    workload = FakeWorkload(
        script={
            ("compute", 2): {"dropped": "gate leaked"},
            ("serial", 2): {"dropped": "gate leaked"},
            ("overlapped", 4): {"dropped": "gate timed out"},
        }
    )
    found = run(workload)
    orders = balanced_orders(ARMS)
    assert found.dropped == {"gate leaked": 2, "gate timed out": 1}
    # Rounds 1 and 3 of 0 to 5 are void, and their places in the orders are not made up for.
    assert [seen.order for seen in found.rounds] == [orders[0], orders[2], orders[0], orders[1]]
    assert all(set(seen.arms) == set(ARMS) for seen in found.rounds)
    assert {arm: len(windows) for arm, windows in found.windows.items()} == dict.fromkeys(ARMS, 4)
    assert workload.calls.count("transfer") == 1 + 6
    assert (found.stop, found.failed) == ("settled", "")


def test_windows_are_those_of_the_samples_used():
    workload = FakeWorkload(ScriptedClock(0.0), script={("transfer", 1): {"dropped": "gate leaked"}})
    found = run(workload, rule(1, target=1.0))
    assert found.windows.keys() == set(ARMS)
    for arm, ((start, end),) in found.windows.items():
        assert end - start == pytest.approx(MS[arm] * 1e-3)
        assert start > 2 * ROUND_S  # after the round thrown away, and the void one


def test_a_failed_check_stops_at_once():
    workload = FakeWorkload(script={("serial", 2): {"failed": "serial: 3 rows are wrong"}})
    found = run(workload)
    assert found.failed == "check failed: serial: 3 rows are wrong"
    assert found.stop == ""
    assert len(found.rounds) == 1
    assert workload.calls[-1] == "serial"
    assert all(len(windows) == 1 for windows in found.windows.values())


def test_a_failed_check_counts_even_where_the_sample_is_void():
    found = run(FakeWorkload(script={("serial", 1): {"failed": "wrong", "dropped": "gate leaked"}}))
    assert (found.failed, found.rounds) == ("check failed: wrong", [])


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"warm": "compute: 1 row is wrong"}, ["warm-up"]),
        (
            {"script": {(ARMS[0], 0): {"failed": "compute: 1 row is wrong"}}},
            ["warm-up", balanced_orders(ARMS)[0][0]],
        ),
    ],
)
def test_a_check_that_fails_while_warming_up_leaves_nothing_sampled(options, calls):
    workload = FakeWorkload(**options)
    found = run(workload)
    assert found.failed == "check failed: compute: 1 row is wrong"
    assert (workload.calls, found.rounds) == (calls, [])


def test_a_case_whose_rounds_are_mostly_void_ends_and_says_so():
    leaks = {("overlapped", n): {"dropped": "gate leaked"} for n in range(1, 100)}
    workload = FakeWorkload(script=leaks)
    found = run(workload, rule(20))
    assert found.failed == "11 of 11 rounds are void: gate leaked 11 times"
    assert (found.rounds, found.stop) == ([], "")


def test_half_of_the_rounds_may_be_void_but_no_more():
    every_other = {("overlapped", n): {"dropped": "gate leaked"} for n in range(2, 200, 2)}
    found = run(FakeWorkload(script=every_other), rule(20))
    assert (found.failed, found.stop, len(found.rounds)) == ("", "settled", 20)
    two_of_three = {("overlapped", n): {"dropped": "gate leaked"} for n in range(1, 200) if n % 3}
    found = run(FakeWorkload(script=two_of_three), rule(20))
    assert found.failed == "11 of 16 rounds are void: gate leaked 11 times"


def test_void_rounds_that_take_long_end_at_the_limit():
    """A gate that opens by itself only after ten seconds must not be waited for eleven times over."""
    clock = ScriptedClock()
    leaks = {("overlapped", n): {"dropped": "gate timed out"} for n in range(100)}
    workload = FakeWorkload(clock, script=leaks, before=lambda: clock.advance(10.0))
    found = run(workload, rule(20, limit_s=60.0))
    assert found.failed == "2 of 2 rounds are void: gate timed out 2 times"


@pytest.mark.parametrize(
    ("noise", "with_rule", "rounds", "stop"),
    [
        (lambda arm, n: 0.0, rule(2, 4, 8), 2, "settled"),
        (lambda arm, n: uneven(arm, n) if n < 4 else 0.0, rule(2, 4, 16), 16, "settled"),
        (uneven, rule(2, 4, 8), 8, "budget"),
        (uneven, rule(2, 4, 8, budget_s=3 * ROUND_S), 4, "budget"),
        (uneven, rule(2, 4, 8, budget_s=0.0), 2, "budget"),
        (uneven, rule(4, 8, limit_s=3 * ROUND_S), 3, "budget"),
    ],
)
def test_the_rule_decides_at_its_looks(noise, with_rule, rounds, stop):
    found = run(FakeWorkload(noise=noise), with_rule)
    assert (len(found.rounds), found.stop) == (rounds, stop)


def test_the_time_of_the_rule_begins_with_the_sampling():
    """Whatever the warm-up took."""
    clock = ScriptedClock()
    slow_start = FakeWorkload(clock, noise=lambda arm, n: 1e5 if n == 0 else uneven(arm, n))
    found = run(slow_start, rule(2, 4, 8, limit_s=10.0))
    assert (len(found.rounds), found.stop) == (8, "budget")
    assert found.wall_s < 1.0


def test_device_memory_taken_while_sampling_fails_the_case():
    taken = iter([7, 9])
    found = run(FakeWorkload(), allocations=lambda: next(taken))
    assert found.failed == "device memory was allocated 2 times while sampling"
    assert found.checks["driver_allocations"] == 2
    assert found.stop == "settled"


def test_memory_taken_while_warming_up_is_fine():
    workload = FakeWorkload()
    found = run(workload, allocations=lambda: 5 if len(workload.calls) > len(ARMS) else 0)
    assert (found.failed, found.checks["driver_allocations"]) == ("", 0)


def test_a_failed_check_is_not_hidden_behind_memory():
    taken = iter([7, 9])
    workload = FakeWorkload(script={("serial", 1): {"failed": "wrong"}})
    found = run(workload, allocations=lambda: next(taken))
    assert found.failed == "check failed: wrong"


def test_every_round_gives_a_sign_of_life_and_so_does_a_void_one():
    seen: list[int] = []
    run(FakeWorkload(script={("serial", 2): {"dropped": "gate leaked"}}), on_round=seen.append)
    assert seen == [0, 1, 1, 2, 3, 4]


@pytest.fixture
def collecting():
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.usefixtures("collecting")
def test_garbage_is_not_collected_while_sampling():
    states: list[bool] = []
    run(FakeWorkload(before=lambda: states.append(gc.isenabled())))
    assert set(states) == {False}
    assert gc.isenabled()


@pytest.mark.usefixtures("collecting")
@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_garbage_is_collected_again_whatever_happens(error):
    with pytest.raises(type(error)):
        run(FakeWorkload(script={("serial", 2): error}))
    assert gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    run(FakeWorkload())
    assert not gc.isenabled()


def test_what_disturbed_the_host_is_counted(monkeypatch):
    switches, steal, clock = iter([10, 17]), iter([1.0, 3.0]), iter([50.0, 60.0])
    monkeypatch.setattr(module, "_involuntary_switches", lambda: next(switches))
    monkeypatch.setattr(module, "_steal_seconds", lambda: next(steal))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    found = run(FakeWorkload())
    assert found.checks["involuntary_switches"] == 7
    assert found.checks["steal_fraction"] == 0.05  # 2 s of 10 s on 4 cores


def test_where_the_kernel_tells_no_steal_time_none_is_given(monkeypatch):
    monkeypatch.setattr(module, "_steal_seconds", lambda: None)
    assert "steal_fraction" not in run(FakeWorkload()).checks


def test_steal_time_is_read_from_the_kernel(monkeypatch):
    stat = "cpu  10 20 30 40 50 60 70 250 0 0\ncpu0 1 2\n"
    monkeypatch.setattr(module.Path, "read_text", lambda path: stat)
    monkeypatch.setattr(module.os, "sysconf", lambda name: 100)
    assert module._steal_seconds() == 2.5
    monkeypatch.setattr(module.Path, "read_text", lambda path: "cpu 1 2\n")
    assert module._steal_seconds() is None


def test_unsplit_arms_are_sampled_like_the_others():
    arms = (*ARMS, "transfer_1", "compute_1")
    found = run(FakeWorkload(arms=arms))
    assert all(set(seen.arms) == set(arms) for seen in found.rounds)
    assert found.timed_s == pytest.approx(4 * sum(MS[arm] for arm in arms) * 1e-3)


def together(*workloads: FakeWorkload, with_rule: StopRule | None = None):
    """What each rank's `measure` came back with."""

    def one(group: ThreadGroup):
        return run(workloads[group.rank], with_rule, group=group)

    return Meeting.run(one, len(workloads))


def test_ranks_share_their_rounds_and_stop_together_on_the_slowest():
    """Rank 1 alone would never settle; rank 0 alone would after the first look."""
    first, second = together(FakeWorkload(), FakeWorkload(noise=uneven), with_rule=rule(4, 8))
    assert first.by_rank == second.by_rank
    assert [len(rounds) for rounds in first.by_rank] == [8, 8]
    assert {seen.arms["overlapped"] for seen in first.by_rank[0]} == {MS["overlapped"]}
    assert [seen.arms["overlapped"] - MS["overlapped"] for seen in first.by_rank[1]] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    assert all(len(windows) == 8 for found in (first, second) for windows in found.windows.values())


def test_a_sample_dropped_on_one_rank_voids_the_round_of_all():
    leaky = FakeWorkload(script={("compute", 2): {"dropped": "gate leaked"}})
    first, second = together(FakeWorkload(), leaky)
    assert first.by_rank == second.by_rank
    assert [len(rounds) for rounds in first.by_rank] == [4, 4]
    assert first.dropped == second.dropped == {"gate leaked": 1}


@pytest.mark.parametrize("at", [0, 2], ids=["while warming up", "while sampling"])
def test_a_check_that_fails_on_one_rank_ends_all_after_the_same_samples(at):
    """The other ranks wait in the next sample's collective for the one that found it."""
    wrong = FakeWorkload(script={(balanced_orders(ARMS)[0][0], at): {"failed": "serial: 3 rows are wrong"}})
    sound = FakeWorkload()
    found = together(sound, wrong)
    assert {each.failed for each in found} == {"check failed: rank 1: serial: 3 rows are wrong"}
    assert sound.calls == wrong.calls


def test_what_the_warm_up_of_one_rank_finds_holds_for_all():
    found = together(FakeWorkload(), FakeWorkload(warm="gradients differ"))
    assert {each.failed for each in found} == {"check failed: rank 1: gradients differ"}


def test_time_is_that_of_rank_0():
    """A rank whose clock is far ahead does not end the case for all, nor stay behind when the others end it."""
    hasty = FakeWorkload(before=lambda: hasty.clock.advance(1000.0))
    asked = rule(4, 1000, budget_s=10 * ROUND_S, target=1e-9)
    first, second = together(FakeWorkload(noise=uneven), hasty, with_rule=asked)
    assert first.stop == second.stop == "budget"
    assert len(first.by_rank[0]) == len(second.by_rank[0]) >= 4


def test_memory_taken_on_one_rank_spoils_the_case_for_all():
    def one(group: ThreadGroup):
        taken = iter([0, 3 * group.rank])
        return run(FakeWorkload(), allocations=lambda: next(taken), group=group)

    found = Meeting.run(one)
    assert {each.failed for each in found} == {"device memory was allocated 3 times while sampling"}
