"""The parent of the launches against children that really die, hang and talk nonsense."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import factories
import msgspec
import pytest
from factories import h2d_case

from harness import METHOD_VERSION, child, record, supervise
from harness.devices import Device
from harness.errors import UsageError
from harness.profiles import Profile, load_profile
from harness.protocol import Begin, ControlDone, Done, Event, Failed
from harness.record import Machine, Record, Run
from harness.supervise import Plan, lacking

PROFILE = load_profile("cpu")
CASES = [
    h2d_case(memory="pageable", chunks=n, size=1 << 20, gate="off", profile=PROFILE.key) for n in (1, 2, 4, 8)
]
A, B, C, D = (case.key for case in CASES)

# Speaks as a worker does, without torch. `faults` has code to run at `start`, at `end`, and in place of a case.
STAND_IN = """
import json, os, signal, subprocess, sys, time
fd, faults, log = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
job = json.loads(sys.stdin.buffer.read())

def say(**event):
    send(json.dumps(event).encode() + b"\\n")

def send(data):
    while data:
        data = data[os.write(fd, data):]

def note(kind, what):
    with open(log, "a") as file:
        print(json.dumps([kind, what]), file=file)

def measured(ms=5.0, n=20):
    arms = {"transfer": 2.0, "compute": 4.0, "serial": 6.0, "overlapped": ms}
    one = dict(order=list(arms), arms=arms, host={arm: 0.1 for arm in arms})
    return {"index": job["launch"], "ranks": [{"rounds": [one] * n}], "stop": "settled", "timed_s": 1.0}

def done(key, status="ok", reason="", launch=True, **more):
    say(type="done", key=key, status=status, reason=reason, launch=measured() if launch is True else launch, **more)

note("job", job)
note("pid", os.getpid())
exec(faults.get("start", ""))
say(type="ready", facts={"threads": 7}, canary_us=1.5, open_s=0.25)
if job["ceilings"]:
    rate = dict(name="h2d", launch=job["launch"], value=55.0, unit="GB/s")
    say(type="ceilings", ceilings=[rate], link=[5, 8], seconds=0.25)
if job["controls"]:
    for name in ("null", "race"):
        control = dict(name=name, launch=job["launch"], passed=True, value=0.0, low=-1.0, high=1.0, unit="of 1")
        say(type="control", control=control | faults.get(name, {}), seconds=0.5)
for key in job["cases"]:
    say(type="begin", key=key)
    if key in faults:
        exec(faults[key])
    else:
        done(key)
say(type="closing", energy_j=4200.0, energy_s=12.5)
exec(faults.get("end", ""))
"""

SHUT = "os.close(fd); fd = os.open('/dev/null', os.O_WRONLY); "


class Bench:
    """A plan, its record on disk, and the workers that were started for it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._log, self._script = folder / "r.json", folder / "log", folder / "stand_in.py"
        self._script.write_text(STAND_IN)
        self._log.touch()
        self.faults: dict[str, object] = {}
        self.seen: list[tuple[Event, int]] = []
        monkeypatch.setattr(child, "command", self.command)

    def command(self, events: int) -> list[str]:
        return [
            sys.executable, "-I", "-S", str(self._script), str(events), json.dumps(self.faults), str(self._log),
        ]  # fmt: skip

    def run(
        self,
        *,
        launches: int = 1,
        controls: bool = False,
        seconds: float | None = None,
        profile: Profile = PROFILE,
        kept: Record | None = None,
        watch: Callable[[Event, int], object] = lambda event, launch: None,
    ) -> Record:
        plan = Plan(
            cases=CASES,
            profile=profile,
            device=Device("cpu", "cpu", 2, None, "asked for"),
            launches=launches,
            seconds=seconds,
            target=0.03,
            controls=controls,
        )

        def see(event: Event, launch: int) -> None:
            self.seen.append((event, launch))
            watch(event, launch)

        supervise.run(plan, kept or empty(), self.path, see)
        return record.read(self.path)

    def logged(self, kind: str) -> list:
        lines = map(json.loads, self._log.read_text().splitlines())
        return [what for found, what in lines if found == kind]

    @property
    def asked(self) -> list[list[str]]:
        """The cases each worker was asked for."""
        return [job["cases"] for job in self.logged("job")]

    def done(self) -> list[tuple[str, str]]:
        return [(event.key, event.status) for event, _ in self.seen if isinstance(event, Done)]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = Bench(tmp_path, monkeypatch)
    yield made
    for pid in made.logged("pid"):
        assert not Path(f"/proc/{pid}").exists(), "a worker was left behind, or not reaped"
    for pid in made.logged("offspring"):
        assert not alive(pid), "a worker's own child was left behind"


def alive(pid: int) -> bool:
    """Whether a process runs, given a moment to vanish after its SIGKILL."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.01)
    return True


def empty(**run: object) -> Record:
    return Record(
        schema=record.SCHEMA,
        method=METHOD_VERSION,
        run=Run(time="2026-11-30T08:00:00Z", commit="none", dirty=None, command=["run"], **run),  # type: ignore[arg-type]
        machine=Machine(name="cpu-2", device="cpu"),
    )


def statuses(kept: Record) -> dict[str, str]:
    return {case.key: case.status for case in kept.cases}


def only(kept: Record, key: str, status: str, others: Iterable[str] = (A, B, C, D)) -> str:
    """The reason of the one case that has this status; all of the others are ok."""
    assert statuses(kept) == {other: status if other == key else "ok" for other in others}
    return kept.case(key).reason


def test_a_run_leaves_a_finished_record(bench):
    kept = bench.run(controls=True)
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")
    assert kept.run.finished
    assert kept.run.seconds > 0
    expected = {"open_s": 0.25, "launch_canary_us": 1.5, "controls_s": 1.0}
    assert expected.items() <= kept.run.spent["0"].items()
    assert [(control.name, control.passed) for control in kept.controls] == [("null", True), ("race", True)]
    assert kept.software["threads"] == 7
    case = kept.case(C)
    assert (case.family, case.params["chunks"], case.reason) == ("h2d", 4, "")
    assert (len(case.launches), len(case.launches[0].ranks[0].rounds)) == (1, 20)
    assert case.metrics["overlapped_ms"].value == 5.0
    assert bench.asked == [[A, B, C, D]]


def test_a_worker_is_told_all_that_it_needs(bench):
    bench.run(controls=True, launches=2)
    first, second = bench.logged("job")
    assert msgspec.convert(first["profile"], Profile) == PROFILE
    assert (first["device"], first["uuid"], first["no_telemetry"]) == (
        "cpu",
        None,
        "the cpu backend has no GPU to read",
    )
    assert (first["target"], first["seconds"], first["controls"]) == (0.03, None, True)
    assert (first["launch"], second["launch"], second["controls"]) == (0, 1, True)


def test_a_budget_is_shared_among_the_launches_that_are_left(bench):
    bench.run(launches=3, seconds=300.0)
    shares = [job["seconds"] for job in bench.logged("job")]
    assert shares == pytest.approx([100.0, 150.0, 300.0], abs=10.0)
    assert 100 * 3 > shares[0] * 3 > 295
    assert shares[2] < 300


def test_the_record_on_disk_holds_every_finished_case_at_every_event(bench):
    finished: list[str] = []

    def watch(event: Event, launch: int) -> None:
        if isinstance(event, Done):
            finished.append(event.key)
        on_disk = record.read(bench.path)
        assert list(statuses(on_disk)) == finished
        assert not on_disk.run.finished

    bench.faults[B] = "os.kill(os.getpid(), signal.SIGKILL)"
    bench.run(watch=watch)
    assert finished == [A, B, C, D]


KILLED = "the worker was killed by SIGKILL (out of memory, or killed by hand)"
NO_EVENT = "the worker sent what is no event"
NOT_ITS_OWN = "the worker spoke of a case that is not its own"
HANG = "time.sleep(60)"

# Code run in place of a case, and how the reason begins.
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", KILLED),
    "segfault": ("os.kill(os.getpid(), signal.SIGSEGV)", "the worker was killed by SIGSEGV"),
    "aborted": ("print('terminate called'); os.abort()", "the worker was killed by SIGABRT"),
    "real-time signal": ("os.kill(os.getpid(), 40)", "the worker was killed by signal 40"),
    "exit code": (
        "print('loading'); print('NCCL lost its way in /opt/nccl/x.so\\n'); sys.stdout.flush(); os._exit(3)",
        "the worker ended with exit code 3: NCCL lost its way in (path)",
    ),
    "silent exit": ("os._exit(3)", "the worker ended with exit code 3: it printed nothing"),
    "traceback": ("raise KeyError('stream')", "the worker ended with exit code 1: KeyError: 'stream'"),
    "exit as if done": ("os._exit(0)", "the worker ended before its work was done"),
    "its own words": (
        "say(type='failed', reason='RuntimeError: CUDA error'); os._exit(1)",
        "RuntimeError: CUDA error",
    ),
    "no words of its own": (
        "say(type='failed', reason=''); os._exit(1)",
        "the worker failed and did not say why",
    ),
    "megabytes printed": (
        "os.write(1, b'x' * (4 << 20)); os.write(1, b'\\nlast\\n'); os._exit(9)",
        "the worker ended with exit code 9: last",
    ),
    "garbage": ("send(b'Segmentation fault\\n'); " + HANG, NO_EVENT + ": JSON is malformed"),
    "half a line": ('send(b\'{"type": "done", \'); os._exit(7)', "the worker ended with exit code 7"),
    "not unicode": ("send(b'\\xff\\xfe\\x00\\n'); " + HANG, NO_EVENT),
    "an event of no kind": ("say(type='hello'); " + HANG, NO_EVENT + ": Invalid value 'hello'"),
    "a status of no kind": ("done(key, status='fine'); " + HANG, NO_EVENT + ": Invalid enum value 'fine'"),
    "a number that is none": (
        "done(key, launch=measured(float('nan'))); " + HANG,
        NO_EVENT,
    ),
    "another's case": ("done('h2d[chunks=3]'); " + HANG, NOT_ITS_OWN + ": 'h2d[chunks=3]'"),
}


@pytest.mark.parametrize(("code", "reason"), FAULTS.values(), ids=FAULTS)
def test_what_ends_a_worker_costs_only_the_case_it_was_in(bench, code, reason):
    bench.faults[B] = code
    kept = bench.run()
    assert only(kept, B, "error").startswith(reason)
    assert kept.case(B).launches == []
    assert kept.run.finished
    assert bench.asked == [[A, B, C, D], [C, D]]
    assert bench.done() == [(A, "ok"), (B, "error"), (C, "ok"), (D, "ok")]


def test_a_case_told_twice_is_taken_once(bench):
    bench.faults[B] = "done(key); done(key); time.sleep(60)"
    kept = bench.run()
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")
    assert len(kept.case(B).launches) == 1


def test_a_worker_without_a_sign_of_life_is_ended(bench, monkeypatch):
    monkeypatch.setattr(child, "CASE_S", 0.5)
    bench.faults[B] = "time.sleep(60)"
    began = time.monotonic()
    kept = bench.run()
    assert only(kept, B, "error") == "no sign of life for 0.5 s; ended"
    assert time.monotonic() - began < 5


def test_opening_the_device_may_take_longer_than_a_case_is_silent(bench, monkeypatch):
    monkeypatch.setattr(child, "CASE_S", 0.2)
    bench.faults["start"] = "time.sleep(0.6)"
    assert statuses(bench.run()) == dict.fromkeys((A, B, C, D), "ok")


def test_a_device_that_never_opens_is_not_waited_for(bench, monkeypatch):
    monkeypatch.setattr(child, "OPENING_S", 0.5)
    bench.faults["start"] = "time.sleep(60)"
    kept = bench.run()
    assert {case.reason for case in kept.cases} == {"no sign of life for 0.5 s; ended"}
    assert len(bench.asked) == 1


def test_what_the_parent_does_with_an_event_is_no_silence_of_the_worker_s(bench, monkeypatch):
    """Such as writing a large record to a slow disk, or being stopped by Ctrl-Z."""
    monkeypatch.setattr(child, "CASE_S", 0.5)
    bench.faults[B] = "time.sleep(1.2); done(key)"
    kept = bench.run(watch=lambda event, launch: event == Begin(key=B) and time.sleep(1.0))
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")


def test_bytes_that_make_no_event_are_no_sign_of_life(bench, monkeypatch):
    monkeypatch.setattr(child, "CASE_S", 0.5)
    bench.faults[B] = "for _ in range(600): send(b'x'); time.sleep(0.1)"
    assert only(bench.run(), B, "error") == "no sign of life for 0.5 s; ended"


def test_a_worker_that_is_gone_is_noticed_though_its_offspring_holds_its_pipe(bench):
    """As worker processes of a loader do that were forked."""
    bench.faults[B] = (
        "if (pid := os.fork()) == 0: time.sleep(60)\n"
        "note('offspring', pid); os.kill(os.getpid(), signal.SIGKILL)"
    )
    began = time.monotonic()
    kept = bench.run()
    assert only(kept, B, "error") == KILLED
    assert time.monotonic() - began < 10


def test_progress_is_a_sign_of_life(bench, monkeypatch):
    monkeypatch.setattr(child, "CASE_S", 0.5)
    bench.faults[B] = (
        "for n in range(8):\n    time.sleep(0.1)\n    say(type='progress', key=key, rounds=n)\ndone(key)"
    )
    kept = bench.run()
    assert statuses(kept)[B] == "ok"


def test_a_line_without_an_end_is_not_waited_for(bench, monkeypatch):
    monkeypatch.setattr(child, "MAX_EVENT_BYTES", 1 << 20)
    bench.faults[B] = "send(b'x' * (3 << 20)); time.sleep(60)"
    assert only(bench.run(), B, "error") == "the worker sent more than 1 MiB without an end of line"


def test_a_worker_that_hangs_up_but_does_not_end_is_ended(bench, monkeypatch):
    monkeypatch.setattr(child, "END_S", 0.2)
    bench.faults[B] = SHUT + "time.sleep(60)"
    reason = only(bench.run(), B, "error")
    assert reason == "the worker did not end within 0.2 s of its last event"


def test_a_worker_that_hangs_after_its_work_costs_nothing(bench, monkeypatch):
    monkeypatch.setattr(child, "END_S", 0.2)
    bench.faults["end"] = SHUT + "time.sleep(60)"
    kept = bench.run()
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")
    assert bench.asked == [[A, B, C, D]]


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(60)"])
def test_what_a_worker_has_started_ends_with_it(bench, monkeypatch, then):
    """Such as the sampler, or workers of a loader: also where the worker itself is gone already."""
    monkeypatch.setattr(child, "CASE_S", 0.3)
    bench.faults[B] = f"note('offspring', subprocess.Popen(['sleep', '60']).pid); {then}"
    kept = bench.run()
    assert statuses(kept)[B] == "error"
    assert len(bench.logged("offspring")) == 1  # that it is gone is seen at the end of every test


def test_megabytes_of_print_disturb_nothing(bench):
    bench.faults["start"] = "os.write(1, b'warning\\n' * (1 << 19)); os.write(2, b'{}\\n' * 1000)"
    assert statuses(bench.run()) == dict.fromkeys((A, B, C, D), "ok")


def test_a_job_longer_than_a_pipe_holds_does_not_block_the_parent(bench, monkeypatch):
    """Where the worker ends without reading it."""
    monkeypatch.setattr(
        child, "command", lambda events: [sys.executable, "-I", "-S", "-c", "raise SystemExit(5)"]
    )
    big = msgspec.structs.replace(PROFILE, summary="x" * (1 << 20))
    kept = bench.run(profile=big)
    assert {case.reason for case in kept.cases} == {"the worker ended with exit code 5: it printed nothing"}


def test_a_worker_that_gets_to_no_case_is_not_started_again(bench):
    bench.faults["start"] = "say(type='failed', reason='MeasurementError: needs 2 cores'); os._exit(1)"
    kept = bench.run()
    assert {(case.status, case.reason) for case in kept.cases} == {
        ("error", "MeasurementError: needs 2 cores")
    }
    assert len(kept.cases) == 4
    assert len(bench.asked) == 1
    assert isinstance(bench.seen[0][0], Failed)
    assert bench.done() == [(key, "error") for key in (A, B, C, D)]


def test_a_worker_that_ends_between_two_cases_spoils_none(bench):
    bench.faults[B] = "done(key); os._exit(4)"
    kept = bench.run()
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")
    assert bench.asked == [[A, B, C, D], [C, D]]


def test_a_program_that_cannot_be_started_is_an_error_of_the_cases(bench, monkeypatch):
    monkeypatch.setattr(child, "command", lambda events: ["/nowhere/python"])
    kept = bench.run()
    assert {case.reason for case in kept.cases} == {"no worker could be started: No such file or directory"}
    assert kept.run.finished


def test_no_descriptor_is_left_open(bench, monkeypatch):
    bench.faults[B] = "os.kill(os.getpid(), signal.SIGKILL)"
    before = len(os.listdir("/proc/self/fd"))
    bench.run()
    monkeypatch.setattr(child, "command", lambda events: ["/nowhere/python"])
    bench.run()
    assert len(os.listdir("/proc/self/fd")) == before


def test_after_so_many_deaths_the_launch_is_given_up(bench, monkeypatch):
    monkeypatch.setattr(supervise, "MAX_STARTS", 2)
    bench.faults |= dict.fromkeys((A, B, C, D), "os.kill(os.getpid(), signal.SIGKILL)")
    kept = bench.run()
    assert [kept.case(key).reason for key in (A, B)] == [KILLED, KILLED]
    given_up = f"given up: 2 workers ended early in this launch, the last one: {KILLED}"
    assert [kept.case(key).reason for key in (C, D)] == [given_up, given_up]
    assert bench.asked == [[A, B, C, D], [B, C, D]]


def test_controls_are_run_once_a_launch_unless_they_were_cut_short(bench):
    bench.faults[B] = "os._exit(3)"
    kept = bench.run(controls=True, launches=2)
    assert [job["controls"] for job in bench.logged("job")] == [True, False, True]
    assert [(control.name, control.launch) for control in kept.controls] == [
        ("null", 0), ("race", 0), ("null", 1), ("race", 1),
    ]  # fmt: skip


def test_what_the_device_reaches_alone_is_measured_once_a_launch(bench):
    bench.faults[B] = "os.kill(os.getpid(), signal.SIGKILL)"
    kept = bench.run(launches=2)
    assert [job["ceilings"] for job in bench.logged("job")] == [True, False, True]
    assert [(found.launch, found.value) for found in kept.ceilings] == [(0, 55.0), (1, 55.0)]
    assert kept.run.spent["0"]["ceilings_s"] == 0.25


def test_a_launch_tells_its_energy(bench):
    assert {"energy_j": 4200.0, "energy_s": 12.5}.items() <= bench.run().run.spent["0"].items()


def test_the_link_under_load_goes_into_the_machine_and_its_best_to_the_worker(bench):
    kept = empty()
    kept.machine.gpu = {"pcie_generation_max": 5, "pcie_width_max": 16}
    kept = bench.run(kept=kept)
    assert [job["best_link"] for job in bench.logged("job")] == [[5, 16]]
    assert kept.machine.gpu["pcie_width_loaded"] == 8


@pytest.mark.parametrize(
    ("value", "words"), [(0.0712, "0.0712"), (None, "no number")], ids=["a number", "no number"]
)
def test_a_failed_control_makes_what_was_measured_invalid(bench, value, words):
    bench.faults |= {
        "null": {"passed": False, "value": value, "low": -0.005, "high": 0.005},
        B: "done(key, 'skipped', 'no meaning here', launch=None)",
        C: "os._exit(3)",
        D: "done(key, 'unsettled', 'noisy')",
    }
    kept = bench.run(controls=True)
    assert statuses(kept) == {A: "invalid", B: "skipped", C: "error", D: "invalid"}
    for key in (A, D):
        assert kept.case(key).reason == f"control failed: null: {words}, want -0.005 to 0.005"
        assert kept.case(key).launches, "its samples stay"
    assert any(isinstance(event, ControlDone) and not event.control.passed for event, _ in bench.seen)


def test_a_case_under_a_failed_control_is_never_shown_as_measured(bench):
    bench.faults |= {"null": {"passed": False, "value": 0.07, "low": -0.005, "high": 0.005}}
    bench.run(controls=True)
    assert {status for _, status in bench.done()} == {"invalid"}


def test_a_failed_control_condemns_what_its_own_processes_measured(bench):
    """A run that was resumed has controls of its own; what it measures stands on those."""
    bench.faults |= {
        "null": {"passed": False, "value": 0.07, "low": -0.005, "high": 0.005},
    }

    def interrupt(event, launch):
        if isinstance(event, Done):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(controls=True, watch=interrupt)
    kept = record.read(bench.path)
    assert statuses(kept) == {A: "invalid"}
    bench.faults.clear()
    assert statuses(bench.run(controls=True, kept=kept)) == {A: "invalid", B: "ok", C: "ok", D: "ok"}


def test_launches_add_up_and_the_worst_status_wins(bench):
    first = "job['launch'] == 0"
    bench.faults |= {
        A: f"done(key, *([] if {first} else ['unsettled', 'noisy']))",
        B: f"done(key, *(['invalid', 'shared GPU'] if {first} else ['unsettled', 'noisy']))",
        C: f"done(key) if {first} else os._exit(3)",
    }
    kept = bench.run(launches=2)
    found = {
        case.key: (case.status, case.reason, [seen.index for seen in case.launches]) for case in kept.cases
    }
    assert found == {
        A: ("unsettled", "launch 2 of 2: noisy", [0, 1]),
        B: ("invalid", "launch 1 of 2: shared GPU", [0, 1]),
        C: ("error", "launch 2 of 2: the worker ended with exit code 3: it printed nothing", [0]),
        D: ("ok", "", [0, 1]),
    }
    assert kept.case(D).metrics["overlapped_ms"].value == 5.0
    assert [launch for event, launch in bench.seen if isinstance(event, Begin)] == [0] * 4 + [1] * 4


def test_launches_that_settled_each_and_differ_are_not_ok(bench):
    bench.faults[A] = "done(key, launch=measured(5.0 + job['launch']))"
    kept = bench.run(launches=3)
    why = only(kept, A, "unsettled")
    assert why == "3 launches differ: the interval is +-17 % of the value, target 3 %"


def test_an_error_of_one_launch_is_not_healed_by_the_next(bench):
    """Nor is the case asked for again: its status would stay what it is."""
    bench.faults[B] = "os._exit(3) if job['launch'] == 0 else done(key)"
    kept = bench.run(launches=2)
    assert only(kept, B, "error").startswith("launch 1 of 2: the worker ended with exit code 3")
    assert bench.asked[-1] == [A, C, D]


def test_what_has_no_meaning_is_asked_once(bench):
    bench.faults[B] = "done(key, 'skipped', 'no pinned memory here', launch=None)"
    kept = bench.run(launches=3)
    assert only(kept, B, "skipped") == "no pinned memory here"
    assert bench.asked == [[A, B, C, D], [A, C, D], [A, C, D]]


LATE = "done(key, 'skipped', 'the time budget was used up', launch=None, out_of_time=True)"


def test_what_the_budget_left_out_is_skipped_with_the_reason(bench):
    bench.faults |= {C: LATE, D: LATE}
    kept = bench.run(seconds=100.0)
    assert statuses(kept) == {A: "ok", B: "ok", C: "skipped", D: "skipped"}
    assert {kept.case(key).reason for key in (C, D)} == {"the time budget was used up"}
    assert kept.run.finished


def test_a_later_launch_may_still_measure_what_the_budget_left_out(bench):
    bench.faults |= {
        B: f"{LATE} if job['launch'] == 0 else done(key)",
        C: f"{LATE} if job['launch'] == 1 else done(key, 'unsettled', 'noisy')",
        D: f"{LATE} if job['launch'] == 1 else done(key)",
    }
    kept = bench.run(launches=2, seconds=100.0)
    share = "measured in 1 of 2 launches: the time budget was used up"
    assert {case.key: (case.status, case.reason) for case in kept.cases} == {
        A: ("ok", ""),
        B: ("ok", share),
        C: ("unsettled", f"launch 1 of 2: noisy; {share}"),
        D: ("ok", share),
    }
    assert [len(kept.case(key).launches) for key in (A, B, C, D)] == [2, 1, 1, 1]
    assert [case.key for case in kept.cases] == [A, B, C, D], "in the order of the plan"


def test_a_skip_in_a_later_launch_takes_no_samples_away(bench):
    bench.faults[B] = (
        "done(key) if job['launch'] == 0 else done(key, 'skipped', 'no memory left', launch=None)"
    )
    kept = bench.run(launches=2)
    assert (kept.case(B).status, len(kept.case(B).launches)) == ("ok", 1)
    assert kept.case(B).reason == "measured in 1 of 2 launches: no memory left"


def test_a_reason_of_the_worker_reaches_the_record_without_paths(bench):
    bench.faults[B] = "done(key, 'error', 'OSError: /root/x.so\\nnot found', launch=None)"
    assert only(bench.run(), B, "error") == "OSError: (path) not found"


def stop_at(key: str) -> Callable[[Event, int], None]:
    def watch(event: Event, launch: int) -> None:
        if isinstance(event, Begin) and event.key == key:
            raise KeyboardInterrupt

    return watch


def test_an_interrupt_ends_the_worker_and_keeps_what_is_finished(bench):
    bench.faults[B] = "time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        bench.run(watch=stop_at(B))
    kept = record.read(bench.path)
    assert statuses(kept) == {A: "ok"}
    assert not kept.run.finished
    assert kept.run.seconds > 0


def test_an_interrupt_while_a_case_is_written_does_not_lose_it(bench, monkeypatch):
    write, interrupted = record.write, []

    def interrupt(path: Path, kept: Record) -> None:
        if statuses(kept) == {A: "ok", B: "ok"} and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        write(path, kept)

    monkeypatch.setattr(record, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert statuses(record.read(bench.path)) == {A: "ok", B: "ok"}


def test_a_run_goes_on_where_it_was_stopped(bench):
    with pytest.raises(KeyboardInterrupt):
        bench.run(watch=stop_at(C))
    half = record.read(bench.path)
    seconds = half.run.seconds
    kept = bench.run(kept=half)
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")
    assert [len(case.launches) for case in kept.cases] == [1] * 4
    assert bench.asked == [[A, B, C, D], [C, D]]
    assert kept.run.finished
    assert kept.run.seconds > seconds


def test_only_the_launches_that_are_lacking_are_run(bench):
    def watch(event: Event, launch: int) -> None:
        if launch == 1 and isinstance(event, Begin) and event.key == C:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(launches=3, watch=watch)
    kept = bench.run(launches=3, kept=record.read(bench.path))
    assert bench.asked == [[A, B, C, D], [A, B, C, D], [C, D], [A, B, C, D]]
    assert {tuple(seen.index for seen in case.launches) for case in kept.cases} == {(0, 1, 2)}


def test_what_the_budget_left_out_is_lacking_when_a_run_is_resumed(bench):
    """Until the run ends it stands nowhere as skipped."""
    bench.faults |= {B: LATE, D: "time.sleep(60)"}
    with pytest.raises(KeyboardInterrupt):
        bench.run(seconds=100.0, watch=stop_at(D))
    half = record.read(bench.path)
    assert statuses(half) == {A: "ok", C: "ok"}
    bench.faults.clear()
    kept = bench.run(kept=half)
    assert statuses(kept) == dict.fromkeys((A, B, C, D), "ok")
    assert bench.asked[-1] == [B, D]
    assert [case.key for case in kept.cases] == [A, B, C, D]


def test_a_record_with_everything_needs_no_worker(bench):
    kept = bench.run()
    kept.run.finished = False
    assert bench.run(kept=kept).run.finished
    assert len(bench.asked) == 1


def test_a_full_disk_ends_the_run_and_the_older_file_stays(bench):
    """A limit on the size of files fails a write as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def watch(event: Event, launch: int) -> None:
        if isinstance(event, Done):
            resource.setrlimit(resource.RLIMIT_FSIZE, (bench.path.stat().st_size + 100, before[1]))

    bench.faults[C] = "time.sleep(60)"
    try:
        with pytest.raises(UsageError, match=r"results: cannot write .*r\.json: File too large"):
            bench.run(watch=watch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = record.read(bench.path)
    assert statuses(kept) == {A: "ok"}
    assert not kept.run.finished
    assert [path.name for path in bench.path.parent.glob("*.part")] == []


def test_a_folder_that_cannot_be_written_is_found_before_any_worker_starts(bench, tmp_path):
    (tmp_path / "file").write_text("")
    bench.path = tmp_path / "file" / "r.json"
    with pytest.raises(UsageError, match="results: cannot write"):
        bench.run()
    assert bench.asked == []


def test_lacking_is_told_by_launch():
    ok = factories.h2d_result(CASES[0], launches=1)
    plan = Plan(
        cases=CASES,
        profile=PROFILE,
        device=Device("cpu", "cpu", 2),
        launches=2,
        seconds=None,
        target=0.03,
    )
    kept = empty()
    kept.cases = [ok, factories.skipped(CASES[1]), factories.unmeasured(CASES[2], "error", "died")]
    assert lacking(plan, kept, 0) == [CASES[3]]
    assert lacking(plan, kept, 1) == [CASES[0], CASES[3]]


@pytest.mark.parametrize(
    ("ranks", "device", "reason"),
    [
        (1, Device("cuda", "NVIDIA H200", 1), None),
        (2, Device("cuda", "NVIDIA H200", 2), None),
        (2, Device("cuda", "NVIDIA H200", 1), "needs 2 GPUs, one a rank; 1 here"),
        (2, Device("cpu", "", 0), None),
    ],
)
def test_copies_of_several_ranks_need_a_gpu_each(ranks, device, reason):
    assert supervise.no_ranks(h2d_case(ranks=ranks), device) == reason
