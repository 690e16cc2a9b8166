"""The h2d pipeline: right in every arm, and caught when it is wrong."""

import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from harness import profiles
from harness.backends import get_backend
from harness.backends.base import Backend
from harness.case import Case
from harness.errors import Skip
from harness.families import H2D, MIB
from harness.group import Alone
from harness.measure import measure
from harness.profiles import Profile
from harness.statistics import StopRule
from harness.workloads import build
from harness.workloads.h2d import MAX_GATED_LAUNCHES, H2DWorkload


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = get_backend(request.param)
    yield made
    made.close()


def profile_of(backend: Backend) -> Profile:
    """The device's profile with a pool small enough for many tests."""
    name = "cpu" if backend.kind == "cpu" else "h200"
    return msgspec.structs.replace(profiles.packaged()[name], rotate_bytes=4 * MIB)


def case_of(backend: Backend, **axes: Any) -> Case:
    memory = "pageable" if backend.kind == "cpu" else "pinned"
    base = {"memory": memory, "stream": "side", "chunks": 4, "size": 2 * MIB, "ratio": 1.0, "gate": "off"}
    return Case.of(H2D, **base | {"profile": "p"} | axes)


def workload_of(
    backend: Backend, leave_out: str = "", delay_copies_ms: float = 0.0, **axes: Any
) -> H2DWorkload:
    return H2DWorkload(
        case_of(backend, **axes),
        profile_of(backend),
        backend,
        leave_out=leave_out,
        delay_copies_ms=delay_copies_ms,
    )


AXES = [
    {},
    {"chunks": 1},
    {"chunks": 3},  # does not divide the rows
    {"chunks": 64},
    {"stream": "default"},
    {"issue": "copies-first", "chunks": 8},
    {"ratio": 4.0},
    {"ratio": 0.25},
    {"size": 8 * MIB, "chunks": 5},
    {"gate": "on", "size": 64 * MIB},
    {"gate": "on", "size": 64 * MIB, "chunks": 16, "issue": "copies-first"},
    {"memory": "pageable"},
]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_arm_is_right_and_timed(backend: Backend, axes: dict[str, Any]) -> None:
    workload = workload_of(backend, **axes)
    assert workload.warm_up() is None
    assert ("transfer_1" in workload.arms) == (axes.get("chunks") != 1)
    for _ in range(3):
        for arm in workload.arms:
            sample = workload.sample(arm)
            assert sample.failed is None
            assert sample.dropped is None
            assert sample.ms > 0
            assert sample.host_ms > 0
            assert sample.window[0] < sample.window[1]
    workload.close()


def test_the_payload_changes_from_sample_to_sample(backend: Backend) -> None:
    workload = workload_of(backend, chunks=1, size=8 * MIB)
    seen = []
    for _ in range(2):
        workload.sample("transfer")
        seen.append(workload.transfer_buffers()[1].clone())
    assert not torch.equal(*seen)
    workload.close()


def test_compute_leaves_its_input_alone(backend: Backend) -> None:
    workload = workload_of(backend)
    workload.sample("compute")
    assert torch.equal(workload._ring, workload._decoy)
    workload.close()


@pytest.mark.parametrize(("leave_out", "caught"), [("stream_wait", True), ("", False)])
def test_a_wait_left_out_is_caught(backend: Backend, leave_out: str, caught: bool) -> None:
    """A delay makes the copies late for certain; with its wait the pipeline is right all the same."""
    workload = workload_of(backend, leave_out=leave_out, delay_copies_ms=3.0)
    workload.warm_up()
    found = sum(workload.sample("overlapped").failed is not None for _ in range(100))
    workload.close()
    assert found >= 95 if caught else found == 0


@pytest.mark.parametrize(("leave_out", "caught"), [("reuse_wait", True), ("", False)])
def test_a_buffer_reused_too_early_is_caught(backend: Backend, leave_out: str, caught: bool) -> None:
    """Compute of four times the copy's length, through fewer buffers than chunks."""
    profile = msgspec.structs.replace(profile_of(backend), rotate_bytes=MIB)
    size = 64 * MIB if backend.kind == "cuda" else 16 * MIB
    case = case_of(backend, ratio=8.0, chunks=16, size=size)
    workload = H2DWorkload(case, profile, backend, leave_out=leave_out)
    assert workload.plan.split.slots < 16
    workload.warm_up()
    found = sum(workload.sample("overlapped").failed is not None for _ in range(20))
    workload.close()
    assert found >= 19 if caught else found == 0


class Tampering:
    """A backend whose device is wrong in one way; everything else is the real one's."""

    def __init__(self, real: Backend, what: str) -> None:
        self._real, self._what = real, what
        self.armed = False
        self._copies = self._products = 0
        self._temporaries: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._copies += 1
        if self.armed and self._what == "copy one row short":
            target, source = target[:-1], source[:-1]
        if self.armed and self._what == "a chunk is not copied" and self._copies % 4 == 3:
            return
        if self.armed and self._what == "copies go into temporaries":
            target = target[list(range(len(target)))]  # as pinned[[0, 1]].copy_(x) does
            self._temporaries.append(target)
        self._real.copy(target, source, stream)

    def gemm(self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor) -> None:
        self._products += 1
        if self.armed and self._what == "a chunk is not multiplied" and self._products % 4 == 2:
            return
        if self.armed and self._what == "half the columns are not multiplied":
            half = out.shape[1] // 2
            part = torch.empty_like(out[:, :half])
            self._real.gemm(x, [weight[:, :half] for weight in weights], part)
            self._real.synchronize()
            out[:, :half] = part
            return
        self._real.gemm(x, weights, out)
        if self.armed and self._what == "the product is not finite":
            self._real.synchronize()
            out[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("what", "arms"),
    [
        ("copy one row short", ("transfer", "transfer_1", "serial", "overlapped")),
        ("a chunk is not copied", ("transfer", "serial", "overlapped")),
        ("copies go into temporaries", ("transfer", "transfer_1", "serial", "overlapped")),
        ("a chunk is not multiplied", ("compute", "serial", "overlapped")),
        ("half the columns are not multiplied", ("compute", "compute_1", "serial", "overlapped")),
        ("the product is not finite", ("compute", "serial", "overlapped")),
    ],
)
def test_wrong_work_fails_its_check(backend: Backend, what: str, arms: tuple[str, ...]) -> None:
    tampered = Tampering(backend, what)
    workload = H2DWorkload(case_of(backend), profile_of(backend), tampered)  # type: ignore[arg-type]
    assert workload.warm_up() is None
    tampered.armed = True
    for arm in arms:
        failed = workload.sample(arm).failed
        assert failed is not None, arm
        assert "rows" in failed
    workload.close()


class Editing:
    """A backend whose user writes to a batch as soon as its copies are issued, while they wait behind the gate."""

    def __init__(self, real: Backend) -> None:
        self._real = real
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._real.copy(target, source, stream)
        if self.armed:
            source[-1].mul_(-1.5)  # not what it was, however often


@pytest.mark.parametrize("at_once", [True, False])
def test_a_batch_that_is_edited_while_its_copy_waits_fails_its_check(backend: Backend, at_once: bool) -> None:
    """pytorch/pytorch#127612. What arrived is compared with what the batch was, and not with what it is."""
    editing = Editing(backend)
    case = case_of(backend, gate="on", size=64 * MIB)
    workload = H2DWorkload(case, profile_of(backend), editing)  # type: ignore[arg-type]
    assert workload.warm_up() is None
    batches = workload._host.clone()
    for arm in workload.arms:
        if arm.startswith("compute"):
            continue
        editing.armed = at_once
        failed = workload.sample(arm).failed
        editing.armed = False
        if not at_once:
            workload._host.neg_()  # the copies are over
        workload._host.copy_(batches)
        assert (failed is not None) == at_once, (arm, failed)
    workload.close()


def test_times_are_the_device_s_whenever_the_host_notices(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch/tutorials#3648: when the host saw an end says nothing about when it was."""
    workload = workload_of(backend)
    workload.warm_up()
    real = backend.synchronize

    def late(event: Any = None) -> None:
        real(event)
        time.sleep(0.3)

    monkeypatch.setattr(backend, "synchronize", late)
    sample = workload.sample("overlapped")
    monkeypatch.undo()
    noticed_ms = (sample.window[1] - sample.window[0]) * 1e3
    assert max(sample.ms, sample.spans["transfer_in_overlapped"]) < noticed_ms - 290
    workload.close()


def test_a_sample_whose_gate_leaked_is_dropped(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = workload_of(backend, gate="on", size=64 * MIB)
    workload.warm_up()
    monkeypatch.setattr(backend, "pending", lambda event: False)
    assert workload.sample("overlapped").dropped == "gate leaked"
    monkeypatch.undo()
    assert workload.sample("overlapped").dropped is None
    workload.close()


def test_facts_tell_the_fixed_work(backend: Backend) -> None:
    workload = workload_of(backend, size=8 * MIB)
    facts = workload.facts
    plan = workload.plan
    assert facts["bytes"] == 8 * MIB * plan.repeats
    assert facts["flops"] == 2 * plan.rows * plan.width * plan.columns * plan.gemms * plan.repeats
    workload.close()


def test_too_many_launches_for_a_gate_are_refused_with_the_reason(backend: Backend) -> None:
    profile = profile_of(backend)
    many = {memory: {"1MiB": MAX_GATED_LAUNCHES} for memory in ("pinned", "pageable")}
    profile = msgspec.structs.replace(profile, h2d=msgspec.structs.replace(profile.h2d, repeats=many))
    with pytest.raises(Skip, match="behind a gate"):
        build(case_of(backend, gate="on", size=MIB), profile, backend)


def test_a_batch_beyond_memory_is_refused_before_any_is_taken(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "free_bytes", lambda: (1 << 20, 1 << 20))
    monkeypatch.setattr(backend, "host_tensor", lambda *a, **k: pytest.fail("took memory"))
    with pytest.raises(Skip, match="GiB of host memory"):
        workload_of(backend)


def test_what_has_no_meaning_is_skipped_with_the_reason(backend: Backend) -> None:
    axes = {"memory": "pinned"} if backend.kind == "cpu" else {"memory": "pageable", "gate": "on"}
    with pytest.raises(Skip, match=r"no meaning|never gated"):
        workload_of(backend, **axes)


def two_bare_threads_overlap() -> bool:
    """Whether a copy and products on two plain threads take clearly less than one after the other, here and now.

    Other work on this machine, seen or not, may leave no second core: then no harness can show any overlap.
    """
    source, target = torch.ones(2, 32 * MIB), torch.empty(32 * MIB)
    x, y = torch.ones(2, 1024, 1024)

    def copies() -> None:
        torch.set_num_threads(1)
        for index in range(4):
            target.copy_(source[index % 2])

    def products() -> None:
        torch.set_num_threads(1)
        for _ in range(2):
            torch.mm(x, x, out=y)

    def seconds(*works: Callable[[], None]) -> float:
        threads = [threading.Thread(target=work) for work in works]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    gained = []
    for _ in range(7):
        alone = seconds(copies), seconds(products)
        gained.append((sum(alone) - seconds(copies, products)) / min(alone))
    return sorted(gained)[1] > 0.5


@pytest.mark.timing
def test_on_a_cpu_several_chunks_beat_serial_and_one_does_not() -> None:
    """In 3 of 4 rounds; judged only while two bare threads overlap before it and after it."""
    backend = get_backend("cpu")
    profile = profiles.packaged()["cpu"]
    threads = torch.get_num_threads()
    judged = []
    for _ in range(5):
        free = two_bare_threads_overlap()
        faster = {}
        for chunks in (8, 1):
            case = case_of(backend, size=64 * MIB, chunks=chunks, gate="on")
            workload = H2DWorkload(case, profile, backend)
            rounds = measure(workload, StopRule(looks=(20,))).rounds
            workload.close()
            faster[chunks] = sum(seen.arms["overlapped"] < seen.arms["serial"] for seen in rounds)
        if faster[8] >= 15 and faster[1] < 15:
            break
        if free and two_bare_threads_overlap():
            judged.append(faster)
    else:
        if len(judged) < 2:
            pytest.skip(f"other work leaves no second core here; rounds of 20 that were faster: {judged}")
        pytest.fail(f"rounds of 20 in which overlapped beat serial, by chunks: {judged}")
    backend.close()
    torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["on", "off"])
@pytest.mark.parametrize(("leave_out", "caught"), [("stream_wait", True), ("", False)])
def test_on_a_gpu_the_race_needs_no_delay_to_be_caught(leave_out: str, caught: bool, gate: str) -> None:
    backend = get_backend("cuda")
    workload = H2DWorkload(
        case_of(backend, size=256 * MIB, chunks=8, gate=gate),
        profiles.packaged()["h200"],
        backend,
        leave_out=leave_out,
    )
    workload.warm_up()
    found = sum(workload.sample("overlapped").failed is not None for _ in range(100))
    workload.close()
    assert found >= 95 if caught else found == 0


class Blocking:
    """The cuda backend with copies that the host waits for."""

    def __init__(self, real: Backend) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source)


def traced(run: Callable[[], object], path: Path) -> list[dict[str, Any]]:
    """The events of a profiler's trace of `run`; none of the device's where CUPTI is missing."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
            run()
            torch.cuda.synchronize()
        made.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("memory", "blocking", "waits"),
    [("pinned", False, False), ("pinned", True, True), ("pageable", False, None)],
)
def test_a_trace_shows_pinned_copies_and_no_wait_of_the_host_between_them(
    memory: str, blocking: bool, waits: bool | None, tmp_path: Path
) -> None:
    """Lightning-AI/pytorch-lightning#620: copies that are pageable, or followed by a wait. `waits` None: either."""
    real = get_backend("cuda")
    backend: Any = Blocking(real) if blocking else real
    case = case_of(real, memory=memory, size=64 * MIB, chunks=8)
    workload = H2DWorkload(case, profile_of(real), backend)
    workload.warm_up()
    events = traced(lambda: workload.sample("overlapped"), tmp_path / "trace.json")
    pieces = workload.plan.split.chunks * workload.plan.repeats
    workload.close()
    copies = [event for event in events if str(event.get("name", "")).startswith("Memcpy HtoD")]
    if not copies:
        pytest.skip("the profiler saw no copies: CUPTI is missing, or in use")
    assert len(copies) >= pieces
    kind = "Pinned" if memory == "pinned" else "Pageable"
    assert {event["name"] for event in copies} == {f"Memcpy HtoD ({kind} -> Device)"}
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    numbers = {event["args"]["correlation"] for event in copies}
    issued = [call["ts"] for call in calls if call.get("args", {}).get("correlation") in numbers]
    assert len(issued) >= pieces
    waited = [
        call["name"]
        for call in calls
        if "Synchronize" in call["name"] and min(issued) < call["ts"] < max(issued)
    ]
    assert waits is None or bool(waited) == waits, waited


class Two(Alone):
    """This rank of two, of which the other one says what it is told to."""

    size, host = 2, "here"

    def __init__(self, other: str | None = None) -> None:
        self.met: list[str] = []
        self._other = other

    def share(self, value: Any) -> list[Any]:
        return [value, value if isinstance(value, str) and value == self.host else self._other]

    def meet(self) -> None:
        self.met.append("met")


@pytest.mark.parametrize("gate", ["on", "off"])
def test_ranks_leave_together_when_all_is_ready(
    backend: Backend, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the gate everything is enqueued before they meet; without it nothing is."""
    group = Two()
    workload = H2DWorkload(
        case_of(backend, ranks=2, gate=gate, size=64 * MIB), profile_of(backend), backend, group=group
    )
    workload.warm_up()
    group.met.clear()
    issue, opened = workload._issue, backend.open_gate

    def open_gate() -> bool:
        group.met.append("opened")
        return opened()

    workload._issue = lambda *given: (group.met.append("issued"), issue(*given))  # type: ignore[method-assign]
    monkeypatch.setattr(backend, "open_gate", open_gate)
    assert workload.sample("overlapped").failed is None
    assert group.met == (["issued", "met", "opened"] if gate == "on" else ["met", "issued"])
    workload.close()


def test_a_rank_skips_what_another_one_cannot_do(backend: Backend) -> None:
    with pytest.raises(Skip, match="no room there"):
        H2DWorkload(case_of(backend, ranks=2), profile_of(backend), backend, group=Two("no room there"))


def test_ranks_of_a_host_share_its_memory(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is enough for one of them alone is too little for two."""
    free = H2DWorkload(case_of(backend), profile_of(backend), backend)
    need = free.plan.host_bytes + (free.plan.device_bytes if backend.kind == "cpu" else 0)
    free.close()
    monkeypatch.setattr(backend, "free_bytes", lambda: (int(1.5 * need), 1 << 40))
    H2DWorkload(case_of(backend), profile_of(backend), backend).close()
    with pytest.raises(Skip, match="host memory"):
        H2DWorkload(case_of(backend, ranks=2), profile_of(backend), backend, group=Two())


@pytest.mark.timing
def test_two_processes_measure_a_case_together(tmp_path: Path) -> None:
    key = "h2d[memory=pageable,stream=side,chunks=2,size=1MiB,ratio=1,gate=on,ranks=2]"
    command = [sys.executable, "-m", "harness", "run", "--device", "cpu", "--case", key]
    ran = subprocess.run(
        [*command, "--results", str(tmp_path), "--json"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    (case,) = json.loads(ran.stdout)["cases"]
    (path,) = tmp_path.glob("records/*/*.json")
    (kept,) = json.loads(path.read_text())["cases"]
    assert case["status"] in ("ok", "unsettled")
    assert kept["key"].startswith(key.removesuffix("]"))
    by_rank = [[seen["arms"] for seen in rank["rounds"]] for rank in kept["launches"][0]["ranks"]]
    assert len(by_rank) == 2
    assert len(by_rank[0]) == len(by_rank[1]) >= 20
    assert by_rank[0] != by_rank[1]
