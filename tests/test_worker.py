import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import pytest
from factories import controls, h2d_case, h2d_result
from fakes import ARMS, FakeBackend, FakeTelemetry, FakeWorkload, Meeting, ThreadGroup

pytest.importorskip("torch")  # harness.worker is the process that measures

import harness
from harness import worker
from harness.errors import MeasurementError, Skip, UsageError
from harness.measure import Measured
from harness.profiles import load_profile
from harness.protocol import (
    EVENTS,
    Begin,
    CeilingsDone,
    Closing,
    ControlDone,
    Done,
    Failed,
    Job,
    Progress,
    Ready,
)
from harness.record import Ceiling, Round
from harness.statistics import StopRule
from harness.validity import Sample as Reading
from harness.views import remarks
from harness.worker import judge, run_job

PROFILE = load_profile("cpu")
A, B, C = (
    h2d_case(memory="pageable", chunks=n, size=1 << 20, gate="off", profile=PROFILE.key).key
    for n in (1, 2, 4)
)


class Stage:
    """A worker's surroundings: what `build` gives for each key, and all that the job said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend, self.telemetry = FakeBackend(), FakeTelemetry()
        self.workloads: dict[str, FakeWorkload | BaseException] = {}
        self.controls: list[object] = controls()
        self.ceilings: list[Ceiling] = []
        self.said: list[object] = []
        self.opened: list[tuple[object, ...]] = []
        monkeypatch.setattr(worker, "get_backend", lambda kind: self.backend)
        monkeypatch.setattr(worker, "build", self.build)
        monkeypatch.setattr(worker, "run_controls", lambda *_: iter(self.controls))
        monkeypatch.setattr(worker, "run_ceilings", lambda backend, launch: self.ceilings)
        self.slept: list[float] = []
        monkeypatch.setattr(worker.time, "sleep", self.slept.append)
        monkeypatch.setattr(worker, "open_sampler", self.open)
        monkeypatch.setattr(worker, "PROGRESS_S", 60.0)

    def open(self, *arguments: object, own: list[int], contexts: int):
        assert (own, contexts) == ([os.getpid()], 1)
        self.opened.append(arguments)
        return self.telemetry.open()

    def build(self, case, profile, backend, group=None):
        assert profile == PROFILE
        assert backend is self.backend
        made = self.workloads.setdefault(case.key, FakeWorkload())
        if isinstance(made, BaseException):
            raise made
        return made

    def run(self, *cases: str, began: float | None = None, **options) -> list[object]:
        job = Job(
            device="cpu",
            uuid=options.pop("uuid", None),
            no_telemetry="a cpu has no NVML",
            profile=PROFILE,
            cases=list(cases),
            launch=options.pop("launch", 0),
            target=0.02,
            **options,
        )
        run_job(job, self.said.append, began=worker.time.monotonic() if began is None else began)
        return self.said

    def done(self, key: str) -> Done:
        (found,) = (event for event in self.said if isinstance(event, Done) and event.key == key)
        return found


@pytest.fixture
def stage(monkeypatch):
    return Stage(monkeypatch)


def test_a_job_is_told_event_by_event(stage):
    ready, *rest = stage.run(A, B, launch=3)
    assert isinstance(ready, Ready)
    assert (ready.facts, ready.canary_us) == ({"torch": "9.9"}, 2.5)
    assert 0 <= ready.open_s < 5
    ceilings, *rest = rest
    assert isinstance(ceilings, CeilingsDone)
    assert (ceilings.ceilings, ceilings.link) == (stage.ceilings, None)
    assert [event.control for event in rest[:4] if isinstance(event, ControlDone)] == controls()
    energy = Closing(energy_j=None, energy_s=0.0)
    assert rest[4:] == [Begin(key=A), stage.done(A), Begin(key=B), stage.done(B), energy]
    assert stage.opened == [(None, "a cpu has no NVML")]
    assert stage.backend.closed == 1
    for key in (A, B):
        done = stage.done(key)
        assert (done.status, done.reason, done.out_of_time) == ("ok", "", False)
        assert stage.workloads[key].closed == 1
        launch = done.launch
        assert (launch.index, launch.stop, launch.dropped) == (3, "settled", {})
        assert len(launch.ranks[0].rounds) == 20
        assert launch.timed_s == pytest.approx(20 * 0.017)
        assert {"bytes": 1 << 20, "driver_allocations": 0}.items() <= launch.checks.items()
        assert 0 <= launch.checks["sampling_s"] <= launch.wall_s


def test_without_controls_there_are_none(stage):
    kinds = {type(event) for event in stage.run(A, controls=False)}
    assert kinds == {Ready, CeilingsDone, Begin, Done, Closing}
    stage.said.clear()
    assert CeilingsDone not in {type(event) for event in stage.run(A, ceilings=False)}


def test_the_time_of_each_control_is_told(stage, monkeypatch):
    now = iter(range(100, 200))
    monkeypatch.setattr(worker.time, "monotonic", lambda: float(next(now)))
    stage.run(began=90.0)
    assert stage.said[0].open_s == 10.0
    assert [event.seconds for event in stage.said if isinstance(event, ControlDone)] == [1.0] * 4


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Skip("pinned memory has no meaning here"), "skipped", "pinned memory has no meaning here"),
        (UsageError("h2d: chunks: too many"), "error", "h2d: chunks: too many"),
        (MeasurementError("cpu backend: lost a thread"), "error", "cpu backend: lost a thread"),
        (RuntimeError("CUDA error: bad\nCompile with ..."), "error", "RuntimeError: CUDA error: bad"),
        (MemoryError(), "error", "MemoryError"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["in build", "while sampling"])
def test_what_goes_wrong_in_a_case_ends_only_that_case(stage, error, status, reason, late):
    broken = FakeWorkload(script={("serial", 5): error})
    stage.workloads[B] = broken if late else error
    stage.run(A, B, C, controls=False)
    done = stage.done(B)
    assert (done.status, done.reason, done.launch, done.out_of_time) == (status, reason, None, False)
    assert [stage.done(key).status for key in (A, C)] == ["ok", "ok"]
    assert broken.closed == late
    assert [event.key for event in stage.said if isinstance(event, Begin)] == [A, B, C]


def test_a_device_that_is_lost_ends_the_worker(stage):
    def lose() -> None:
        if len(broken.calls) == 12:
            stage.backend.lost = RuntimeError("CUDA error: unspecified launch failure")
            raise stage.backend.lost

    broken = FakeWorkload(before=lose)
    stage.workloads[B] = broken
    with pytest.raises(RuntimeError, match="launch failure"):
        stage.run(A, B, C, controls=False)
    assert isinstance(stage.said[-1], Begin)
    assert stage.said[-1].key == B
    assert broken.closed == 1


def test_when_the_parent_is_gone_nothing_more_is_measured(stage, monkeypatch):
    def say(event: object) -> None:
        stage.said.append(event)
        if isinstance(event, Progress):
            raise BrokenPipeError

    job = Job(device="cpu", uuid=None, no_telemetry="", profile=PROFILE, cases=[A, B], launch=0, target=0.02)
    monkeypatch.setattr(worker, "PROGRESS_S", 0.0)
    with pytest.raises(BrokenPipeError):
        run_job(job, say)
    assert isinstance(stage.said[-1], Progress)
    assert stage.workloads[A].closed == 1
    assert B not in stage.workloads


def test_progress_is_told_now_and_then(stage, monkeypatch):
    monkeypatch.setattr(worker, "PROGRESS_S", 0.0)
    stage.run(A, controls=False)
    assert [event.rounds for event in stage.said if isinstance(event, Progress)] == list(range(21))
    stage.said.clear()
    monkeypatch.setattr(worker, "PROGRESS_S", 60.0)
    stage.run(A, controls=False)
    assert not [event for event in stage.said if isinstance(event, Progress)]


def test_when_the_budget_is_used_up_the_rest_is_skipped_for_now(stage):
    """What the controls and the opening of the device took counts too."""
    stage.run(A, B, seconds=5.0, began=worker.time.monotonic() - 6)
    for key in (A, B):
        done = stage.done(key)
        assert (done.status, done.out_of_time, done.launch) == ("skipped", True, None)
        assert done.reason == "the time budget was used up"
    assert stage.workloads == {}


@pytest.mark.parametrize(("family", "quantile"), [("h2d", 0.5), ("feed", None)])
def test_a_case_settles_by_its_familys_headline_and_the_profiles_target(
    family: str, quantile: float | None
) -> None:
    job = Job(device="cpu", uuid=None, no_telemetry="", profile=PROFILE, cases=[], launch=0)
    rule = worker._rule(job, family, None, 1)
    assert (rule.target, rule.quantile) == (PROFILE.settled_of(family), quantile)
    assert worker._rule(msgspec.structs.replace(job, target=0.2), family, None, 1).target == 0.2


def test_a_budget_is_shared_among_the_cases_that_are_left(stage, monkeypatch):
    rules = []
    real = worker.measure

    def spy(workload, rule, **options):
        rules.append(rule)
        return real(workload, rule, **options)

    monkeypatch.setattr(worker, "measure", spy)
    monkeypatch.setattr(worker.time, "monotonic", lambda: 100.0)
    stage.run(A, B, C, seconds=12.0, began=97.0, controls=False)
    assert [rule.budget_s for rule in rules] == [3.0, 4.5, 9.0]
    assert {(rule.target, rule.limit_s) for rule in rules} == {(0.02, 9.0)}, "no case outlasts the budget"
    rules.clear()
    stage.said.clear()
    stage.run(A, seconds=1e6, began=97.0, controls=False)
    stage.run(B, controls=False)
    assert [rule.budget_s for rule in rules] == [PROFILE.case_seconds] * 2
    assert [rule.limit_s for rule in rules] == [6 * PROFILE.case_seconds] * 2


def test_readings_are_those_since_the_case_began_and_can_spoil_it(stage):
    stage.telemetry.readings = [Reading(t=t, reasons=0x40 | 0x4, sm_mhz=1500) for t in (1.0, 2.0)]
    stage.telemetry.missing = {"power_w": "not supported"}
    before = worker.time.monotonic()
    stage.run(A, controls=False, ceilings=False)
    done = stage.done(A)
    slow = "thermal slowdown (hardware)"
    assert (done.status, done.reason) == ("invalid", f"{slow} (and 2 attempts before)")
    assert [tried.reason for tried in done.launch.discarded] == [slow, slow]
    telemetry = done.launch.ranks[0].telemetry
    assert telemetry["labels"] == ["software power cap"]
    assert telemetry["missing"]["power_w"] == "not supported"
    assert before <= stage.telemetry.asked[0] <= worker.time.monotonic()
    assert len(done.launch.ranks[0].rounds) == 20, "an invalid case keeps its samples"


def gone_after(stage: Stage, asked: int) -> None:
    """A stranger is on the GPU during the first `asked` attempts."""
    shared = [Reading(t=t, others=1) for t in (1.0, 2.0)]
    looks = iter(range(2000))  # one before and one after each attempt
    stage.telemetry.since = lambda t0, t1=None: shared if next(looks) // 2 < asked else []


def test_a_case_spoiled_from_outside_is_measured_again_and_what_was_discarded_is_kept(stage):
    gone_after(stage, 1)
    stage.run(A, B, controls=False, ceilings=False)
    done = stage.done(A)
    assert (done.status, done.reason) == ("ok", "")
    (tried,) = done.launch.discarded
    assert (tried.reason, tried.rounds, tried.waited_s) == ("shared GPU: 1 other process", 20, 1.0)
    assert tried.wall_s >= 0
    assert len(done.launch.ranks[0].rounds) == 20, "none of the discarded samples is among them"
    assert stage.slept == [1.0]
    assert stage.done(B).launch.discarded == []
    assert [event.rounds for event in stage.said if isinstance(event, Progress)] == [0]


def test_whoever_stays_on_the_gpu_does_not_hold_the_launch_up(stage, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE_S", 8.0)
    monkeypatch.setattr(worker.time, "monotonic", lambda: 100.0)
    gone_after(stage, 1000)
    stage.run(A, B, C, controls=False, ceilings=False)
    found = [stage.done(key) for key in (A, B, C)]
    assert {done.status for done in found} == {"invalid"}
    assert [len(done.launch.discarded) for done in found] == [2, 1, 1]
    assert found[0].reason == "shared GPU: 1 other process (and 2 attempts before)"
    assert all(len(done.launch.ranks[0].rounds) == 20 for done in found), "never an empty result"


def test_no_attempt_begins_that_would_end_after_the_budget(stage):
    gone_after(stage, 1000)
    stage.run(A, controls=False, ceilings=False, seconds=0.5)
    assert stage.done(A).launch.discarded == []
    assert stage.slept == []


def test_what_is_wrong_with_the_work_itself_is_not_tried_again(stage):
    gone_after(stage, 1000)
    stage.workloads[A] = FakeWorkload(script={("serial", 3): {"failed": "serial: 2 rows are wrong"}})
    stage.run(A, controls=False, ceilings=False)
    done = stage.done(A)
    assert (done.status, done.reason) == ("invalid", "check failed: serial: 2 rows are wrong")
    assert (done.launch.discarded, stage.slept) == ([], [])


def test_a_link_below_its_best_spoils_a_case(stage):
    stage.telemetry.readings = [Reading(t=t, pcie_generation=3, pcie_width=16) for t in (1.0, 2.0)]
    stage.run(A, controls=False, best_link=(5, 16))
    done = stage.done(A)
    assert done.reason.startswith("PCIe link at gen3 x16 under load, below its gen5 x16")
    (ceilings,) = (event for event in stage.said if isinstance(event, CeilingsDone))
    assert ceilings.link == (3, 16)
    stage.said.clear()
    stage.run(A, controls=False, best_link=(3, 16))
    assert stage.done(A).status == "ok"


def test_readings_are_of_the_device_that_torch_uses(stage):
    facts = {"uuid": "bbbbbbbb-1111-2222-3333-bbbbbbbbbbbb"}
    stage.backend.facts = lambda: facts
    stage.run(uuid="GPU-aaaaaaaa-1111-2222-3333-aaaaaaaaaaaa", controls=False)
    assert [uuid for uuid, _ in stage.opened] == [
        "GPU-aaaaaaaa-1111-2222-3333-aaaaaaaaaaaa",
        "GPU-bbbbbbbb-1111-2222-3333-bbbbbbbbbbbb",
    ]
    assert stage.telemetry.closed == 2
    stage.opened.clear()
    stage.run(uuid="GPU-BBBBBBBB-1111-2222-3333-bbbbbbbbbbbb", controls=False)
    assert len(stage.opened) == 1


def test_the_energy_of_the_launch_is_told(stage):
    stage.telemetry.readings = [Reading(t=float(t), energy_j=100.0 * t) for t in range(13)]
    *_, closing = stage.run(controls=False)
    assert closing == Closing(energy_j=1200.0, energy_s=12.0)


def test_a_failed_check_makes_the_case_invalid(stage):
    stage.workloads[A] = FakeWorkload(script={("serial", 3): {"failed": "serial: 2 rows are wrong"}})
    stage.run(A, controls=False)
    done = stage.done(A)
    assert (done.status, done.reason) == ("invalid", "check failed: serial: 2 rows are wrong")
    assert len(done.launch.ranks[0].rounds) == 2


def test_what_a_library_warns_of_is_kept_once_and_in_one_line(stage):
    """pytorch/pytorch#70222: gradients whose strides differ from their bucket's are copied, and torch says so."""

    def warn() -> None:
        warnings.warn(
            "Grad strides do not match\nbucket view strides in /srv/x.py.", UserWarning, stacklevel=2
        )

    stage.workloads[A] = FakeWorkload(before=warn)
    stage.workloads[B] = FakeWorkload()
    stage.run(A, B, controls=False)
    text = "Grad strides do not match bucket view strides in (path)"
    assert stage.done(A).launch.checks["warnings"] == [text]
    assert "warnings" not in stage.done(B).launch.checks
    case = h2d_result(h2d_case())
    case.launches[0].checks["warnings"] = [text]
    assert f"warned: {text}" in [remark.text for remark in remarks(case)]


def measured(*, stop: str = "settled", failed: str = "", rounds: int = 40) -> Measured:
    return Measured(by_rank=[[Round(order=list(ARMS), arms={})] * rounds], stop=stop, failed=failed)


@pytest.mark.parametrize(
    ("found", "spoiled", "expected"),
    [
        (measured(), [], ("ok", "")),
        (
            measured(stop="budget"),
            [],
            ("unsettled", "the interval was wider than 1.5% of the value after 40 rounds"),
        ),
        (
            measured(stop="budget", rounds=8),
            [],
            ("unsettled", "its time was over after 8 rounds, before the first look at 20"),
        ),
        (measured(), ["shared GPU", "hardware slowdown"], ("invalid", "shared GPU; hardware slowdown")),
        (measured(stop="budget"), ["shared GPU"], ("invalid", "shared GPU")),
        (measured(failed="check failed: x", stop=""), ["shared GPU"], ("invalid", "check failed: x")),
        (measured(failed="memory was allocated"), [], ("invalid", "memory was allocated")),
    ],
)
def test_the_verdict_names_what_is_worst(found, spoiled, expected):
    assert judge(found, spoiled, StopRule(target=0.015)) == expected


def start(*arguments: str, job: bytes, **options) -> tuple[subprocess.CompletedProcess[bytes], list[object]]:
    """`python -m harness.worker` with a pipe for its events, which are returned."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as events:
        try:
            done = subprocess.run(
                [sys.executable, *arguments, str(theirs)],
                input=job,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                cwd=Path(harness.__file__).parent.parent,
                timeout=60,
                **options,
            )
        finally:
            os.close(theirs)
        return done, [EVENTS.decode(line) for line in events.read().splitlines()]


def test_the_process_says_why_it_failed_and_ends_with_a_code():
    job = Job(device="tpu", uuid=None, no_telemetry="", profile=PROFILE, cases=[A], launch=0, target=0.02)
    done, events = start("-m", "harness.worker", job=msgspec.json.encode(job))
    assert done.returncode == 1
    assert events == [Failed(reason="UsageError: device: got 'tpu', want cuda or cpu")]
    assert b"Traceback" in done.stdout  # in its log, which the parent reads where the worker says nothing


# Several ranks, as threads.


def ranks(monkeypatch, *workloads: FakeWorkload | BaseException, device: str = "cpu"):
    """What each of them said of case A."""
    backends = [FakeBackend() for _ in workloads]

    def build(case, profile, backend, group):
        made = workloads[group.rank]
        if isinstance(made, BaseException):
            raise made
        return made

    monkeypatch.setattr(worker, "build", build)
    monkeypatch.setattr(worker, "open_sampler", lambda *_, **__: FakeTelemetry())
    monkeypatch.setattr(worker, "run_controls", lambda *_: iter(controls()))
    monkeypatch.setattr(worker, "run_ceilings", lambda backend, launch: [])
    opened = iter(backends)
    monkeypatch.setattr(worker, "get_backend", lambda kind: next(opened))
    job = Job(
        device=device, uuid=None, no_telemetry="", profile=PROFILE, cases=[A], launch=0, target=0.02,
        ranks=len(workloads),
    )  # fmt: skip

    def one(group: ThreadGroup) -> list[object]:
        said: list[object] = []
        run_job(job, said.append, group=group)
        return said

    return Meeting.run(one, len(workloads))


def of_case(said: list[object]) -> Done:
    (done,) = (event for event in said if isinstance(event, Done))
    return done


def test_a_launch_holds_the_rounds_and_the_host_of_every_rank(monkeypatch):
    slow = FakeWorkload(noise=lambda arm, n: 1.0)
    for said in ranks(monkeypatch, FakeWorkload(), slow):
        launch = of_case(said).launch
        assert [rank.host for rank in launch.ranks] == ["host-0", "host-1"]
        first, second = ([seen.arms["overlapped"] for seen in rank.rounds] for rank in launch.ranks)
        assert [after - before for before, after in zip(first, second, strict=True)] == [1.0] * len(first)


def test_ranks_of_one_host_know_each_other_on_their_gpus(monkeypatch):
    """Else each would be a stranger on the other's GPU, and every case invalid."""
    found = []

    def one(group: ThreadGroup) -> None:
        group.host, group.device = ("a", "cuda:0") if group.rank < 2 else ("a", "cuda:1")
        if group.rank == 3:
            group.host = "b"
        found.append((group.rank, worker._ours(group)))

    Meeting.run(one, 4)
    known = dict(found)
    assert [len(known[rank]["own"]) for rank in range(4)] == [3, 3, 3, 1]
    assert [known[rank]["contexts"] for rank in range(4)] == [2, 2, 1, 1]


def test_a_case_that_one_rank_cannot_measure_is_skipped_by_all(monkeypatch):
    sound = FakeWorkload()
    for said in ranks(monkeypatch, sound, Skip("NCCL needs a GPU for each rank")):
        done = of_case(said)
        assert (done.status, done.reason) == ("skipped", "NCCL needs a GPU for each rank")
    assert sound.closed == 1


def test_what_goes_wrong_on_one_rank_in_a_case_ends_the_job(monkeypatch):
    """The other would wait for it for ever; fresh ranks measure the rest (tests/test_launching.py)."""
    with pytest.raises((RuntimeError, threading.BrokenBarrierError)):
        ranks(
            monkeypatch, FakeWorkload(), FakeWorkload(script={("serial", 2): RuntimeError("CUDA error: bad")})
        )


@pytest.mark.parametrize(("device", "run"), [("cuda", 4), ("cpu", 0)])
def test_controls_are_of_rank_0_and_of_streams_that_ranks_use(monkeypatch, device, run):
    first, second = ranks(monkeypatch, FakeWorkload(), FakeWorkload(), device=device)
    assert sum(isinstance(event, ControlDone) for event in first) == run
    assert not any(isinstance(event, ControlDone | CeilingsDone) for event in second)
