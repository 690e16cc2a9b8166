"""What a case of several ranks comes to: exact values on hand-made rounds of a group."""

import pytest
from factories_ddp import ddp_record

from harness.case import Case
from harness.families import DDP, MIB
from harness.metrics import derive, launch_values, samples
from harness.record import CaseResult, Launch, Rank, Round, dumps, loads
from harness.registry import metrics_of
from harness.views import remarks

CASE = Case.of(
    DDP, model="blocks", bucket=25 * MIB, tokens=2048, gradients="bf16", ranks=2, backend="nccl", profile="h200.1a2b"
)  # fmt: skip

# A backward from 5 to 20 ms, collectives of 6 ms in three buckets, of which 2 ms lie bare and 1 ms slows the compute.
ARMS = {
    "transfer": 6.0,
    "compute": 20.0,
    "serial": 26.0,
    "overlapped": 23.0,
    "transfer_1": 4.0,
    "native": 22.5,
}
SPANS = {
    "compute.backward": 5.0,
    "compute.last_ready": 20.0,
    "overlapped.backward": 5.0,
    "overlapped.first_ready": 8.2,
    "overlapped.last_ready": 21.0,
    "overlapped.last_done": 23.0,
    "overlapped.tail": 2.0,
}
FACTS = {"repeats": 1, "buckets": [2, 2, 2], "ready_ms": [10.0, 15.0, 20.0], "alone_ms": [2.0, 2.0, 2.0]}


def launch(*ranks: tuple[dict[str, float], dict[str, float]], rounds: int = 20, **facts) -> Launch:
    return Launch(
        index=0,
        ranks=[
            Rank(
                rounds=[
                    Round(order=list(arms), arms=dict(arms), host=dict.fromkeys(arms, 3.0), spans=dict(spans))
                    for _ in range(rounds)
                ]
            )
            for arms, spans in ranks
        ],
        checks=FACTS | facts,
    )


def result(*launches: Launch) -> CaseResult:
    return derive(
        CaseResult(key=CASE.key, family="ddp", params=dict(CASE.params), status="ok", launches=list(launches))
    )


def values(found: CaseResult) -> dict[str, float]:
    return {name: metric.value for name, metric in found.metrics.items()}


def test_every_metric_of_two_equal_ranks():
    found = values(result(launch((ARMS, SPANS), (ARMS, SPANS))))
    assert list(found) == list(metrics_of("ddp"))[: len(found)]
    assert set(metrics_of("ddp")) - set(found) == set()
    expected = {
        "overlapped_ms": 23.0, "transfer_ms": 6.0, "compute_ms": 20.0, "transfer_unsplit_ms": 4.0,
        "compute_unsplit_ms": 20.0, "exposed_ms": 3.0, "exposed_fraction": 0.5, "hidden_fraction": 0.5,
        "bound_ratio": 1.15, "model_ratio": 23.0 / 22.0, "tail_ms": 2.0, "dilation_ms": 1.0, "unexplained_ms": 0.0,
        "start_fraction": 3.2 / 16.0, "waiting_ms": 0.0, "over_native": 23.0 / 22.5, "host_blocked_ms": 3.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_late_peer_makes_waiting_and_no_slower_collective():
    """NVIDIA/nccl#146: who came first waits in the collective for the other one, 50 ms here."""
    waits = ARMS | {"transfer": 56.0, "transfer_1": 54.0}
    found = values(result(launch((waits, SPANS), (ARMS, SPANS))))
    assert found["transfer_ms"] == 6.0
    assert found["transfer_unsplit_ms"] == 4.0
    assert found["waiting_ms"] == 50.0


def test_a_step_takes_as_long_as_its_slowest_rank_whose_spans_explain_it():
    slow = ARMS | {"overlapped": 27.0}
    late = SPANS | {"overlapped.tail": 6.0}
    for ranks in (((slow, late), (ARMS, SPANS)), ((ARMS, SPANS), (slow, late))):
        found = values(result(launch(*ranks)))
        assert (found["overlapped_ms"], found["tail_ms"]) == (27.0, 6.0)
        assert found["unexplained_ms"] == 0.0


def test_what_tail_and_dilation_do_not_explain_is_said():
    found = values(result(launch((ARMS | {"overlapped": 25.0}, SPANS), (ARMS, SPANS))))
    assert found["unexplained_ms"] == pytest.approx(2.0)


def test_the_model_is_the_schedule_of_the_launch_s_own_buckets():
    found = result(launch((ARMS, SPANS), (ARMS, SPANS), alone_ms=[8.0, 8.0, 8.0]))
    assert found.model["pieces"] == 3
    assert found.model["piece_ms"] == 34.0  # 10 + 3 * 8: the link never rests once the first bucket is ready
    assert found.metrics["model_ratio"].value == pytest.approx(23.0 / 34.0)


@pytest.mark.parametrize(
    "facts", [{"ready_ms": []}, {"alone_ms": [1.0]}, {"ready_ms": None}, {"buckets": "many"}]
)
def test_a_launch_that_does_not_tell_its_buckets_has_no_model(facts):
    found = result(launch((ARMS, SPANS), **facts))
    assert ("model_ratio" in found.metrics) == ("buckets" in facts)
    assert found.metrics["overlapped_ms"].value == 23.0


def test_samples_of_a_store_are_the_own_cost_too():
    case = result(launch((ARMS | {"transfer": 56.0}, SPANS), (ARMS, SPANS)))
    assert set(samples(case, "transfer_ms")) == {6.0}
    assert launch_values(case, "tail_ms") == [2.0]
    assert samples(case, "no such metric") == []


def test_a_case_whose_host_is_as_slow_as_its_device_is_launch_bound():
    slow = launch((ARMS, SPANS))
    for seen in slow.ranks[0].rounds:
        seen.host["overlapped"] = 22.0
    assert result(slow).checks["launch_bound"] is True
    assert result(launch((ARMS, SPANS))).checks["launch_bound"] is False


def test_collectives_that_the_host_is_slow_to_start_are_said_to_be_so():
    """Then their time is the host's, and what is made of it too."""
    slow = launch((ARMS, SPANS))
    for seen in slow.ranks[0].rounds:
        seen.host["transfer"] = 0.95 * seen.arms["transfer"]
    found = result(slow)
    assert found.checks["transfer_launch_bound"] is True
    assert found.checks["launch_bound"] is False
    assert any("its collectives alone are launch-bound" in remark.text for remark in remarks(found))
    assert result(launch((ARMS, SPANS))).checks["transfer_launch_bound"] is False


def test_compute_that_is_faster_beside_collectives_is_kept_in_a_record():
    """A difference may be negative; it is dropped by no writer and refused by no reader."""
    early = SPANS | {"overlapped.last_ready": 18.0, "overlapped.tail": 5.0}
    case = result(launch((ARMS, early), (ARMS, early)))
    assert case.metrics["dilation_ms"].value == -2.0
    kept = loads(dumps(ddp_record(case))).cases[0]
    assert kept.metrics == case.metrics
