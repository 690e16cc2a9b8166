"""The ranks of a job on this machine: real processes that die, hang and fail, and what is left of the run.

The ranks are those of tests/faulty_ranks.py: real but for their workload, which takes no time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faulty_ranks
import pytest
from processes import children, gone

import harness
from harness import child, launching, record, runs, supervise
from harness.launching import blame
from harness.profiles import load_profile
from harness.protocol import Failed, Job
from harness.record import MEASURED, Record
from harness.torchrun import ANOTHERS, OWN

ROOT = Path(harness.__file__).parent.parent
HERE = Path(__file__).parent
PROFILE = load_profile("cpu")

# Seconds that rank 0 waits, and then listens for a reason.
LIMITS = {"MEET_S": 3.0, "ROLL_CALL_S": 0.5}


def key(ranks: int, bucket: int) -> str:
    return (
        f"ddp[model=blocks,bucket={bucket}MiB,tokens=64,gradients=fp32,ranks={ranks},backend=gloo,"
        f"profile={PROFILE.key_of('ddp')}]"
    )


def told(log: Path, at: dict[str, str], **limits: float) -> str:
    """What tests/faulty_ranks.py is told. at: faults by "KEY RANK"."""
    return json.dumps({"at": at, "limits": LIMITS | limits, "log": str(log)})


def started(log: Path) -> list[tuple[int, int]]:
    """Rank and number of every rank's process."""
    if not log.exists():
        return []
    return [(int(rank), int(pid)) for rank, pid, _ in (line.split() for line in log.read_text().splitlines())]


def within(seconds: float, log: Path) -> bool:
    """Whether every rank is gone by then."""
    until = time.monotonic() + seconds
    while not all(gone(pid) for _, pid in started(log)) and time.monotonic() < until:
        time.sleep(0.02)
    return all(gone(pid) for _, pid in started(log))


class Outcome:
    """A run in this process's care: its record, and how many sets of ranks it took."""

    def __init__(self, kept: Record, ranks: int, log: Path) -> None:
        self.kept = kept
        self.sets = len(started(log)) / ranks
        self.reasons = {
            int(case.params["bucket"]) >> 20: "measured" if case.status in MEASURED else case.reason
            for case in kept.cases
        }


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Measures cases of these buckets (MiB), with a fault on some rank in some."""

    def run(ranks: int, faults: dict[int, tuple[int, str] | None], **limits: float) -> Outcome:
        log = tmp_path / "log"
        at = {f"{key(ranks, bucket)} {fault[0]}": fault[1] for bucket, fault in faults.items() if fault}
        monkeypatch.setattr(child, "module", faulty_ranks.stand_in(told(log, at, **limits)))
        plan, kept, path = runs.prepare(
            runs.Options(
                device="cpu", patterns=tuple(key(ranks, bucket) for bucket in faults), target=0.2,
                controls=False, results=tmp_path / "results", machine="here",
            )
        )  # fmt: skip
        supervise.run(plan, kept, path)
        assert within(1, log), "a rank was left behind"
        return Outcome(record.read(path), ranks, log)

    return run


def test_two_ranks_are_killed_and_hang(night):
    """Each fault costs the case it was in, with one reason; the others are measured by fresh ranks."""
    found = night(2, {1: None, 2: (1, "killed"), 4: (0, "null_pointer"), 8: None, 16: (1, "hang")})
    assert found.reasons == {
        1: "measured",
        2: "rank 1 was killed by SIGKILL (out of memory, or killed by hand)",
        4: "rank 0 was killed by SIGSEGV",
        8: "measured",
        16: "rank 1 did not come within 3 s",
    }
    assert found.sets == 3
    (launch,) = found.kept.cases[0].launches
    assert [rank.rounds[0].arms["overlapped"] for rank in launch.ranks] == [5.0, 5.05]
    assert {rank.host for rank in launch.ranks} == {os.uname().nodename}


def test_four_ranks_are_killed(night):
    found = night(4, {1: (3, "killed"), 2: None, 4: (2, "null_pointer")})
    assert found.reasons == {
        1: "rank 3 was killed by SIGKILL (out of memory, or killed by hand)",
        2: "measured",
        4: "rank 2 was killed by SIGSEGV",
    }
    assert found.sets == 2


def test_one_of_four_ranks_hangs_in_native_code(night):
    """Where no signal handler and no thread of it runs: the others wait, and rank 0 says for whom."""
    found = night(4, {1: None, 2: (2, "hang")})
    assert found.reasons == {1: "measured", 2: "rank 2 did not come within 3 s"}


def test_an_error_of_a_rank_is_its_own_and_a_hang_of_rank_0_is_seen_by_the_parent(night, monkeypatch):
    monkeypatch.setattr(child, "CASE_S", 2.5)
    found = night(2, {1: (1, "raises"), 2: (0, "hang")})
    assert found.reasons == {
        1: "rank 1: RuntimeError: device-side assert",
        2: "no sign of life for 2.5 s; ended",
    }


def test_a_rank_without_a_gpu_is_named_before_any_case_begins(tmp_path, monkeypatch):
    log = tmp_path / "log"
    at = {"start 0": "a_gpu", "start 1": "no_gpu"}
    monkeypatch.setattr(child, "module", faulty_ranks.stand_in(told(log, at)))
    job = Job(
        device="cuda", uuid=None, no_telemetry="", profile=PROFILE, cases=[key(2, 1)], launch=0, target=0.2,
        ranks=2, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    )  # fmt: skip
    with child.Child(job) as agent:
        events = list(agent.events())
        reason = agent.end()
    assert events == [Failed(reason=reason)]
    assert reason == "rank 1 has no GPU; start it where there is one"
    assert within(0.1, log), "a rank was left behind"
    assert {line.split()[2] for line in log.read_text().splitlines()} == {"8"}


def test_the_limits_of_ranks_end_before_their_parent_gives_them_up():
    """So that the reason is theirs, who know the rank: even of one that ends only by SIGKILL, 30 s after SIGTERM."""
    from harness import measure, ranks

    assert measure.SIGN_S + ranks.MEET_S + ranks.ROLL_CALL_S + 30 < child.CASE_S
    assert ranks.JOIN_S < child.OPENING_S


# `overlap run`, in a process of its own.


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_no_rank_outlives_the_run(tmp_path, how):
    """Not even one that hangs in native code. torch elastic gives every rank a session of its own."""
    log = tmp_path / "log"
    faults = told(log, {f"{key(2, 2)} 1": "hang"}, MEET_S=60.0)
    parent = subprocess.Popen(
        [sys.executable, str(HERE / "elastic_overlap.py"), faults, "run", "--device", "cpu", "--no-controls",
         "--target", "0.2", "--machine", "here", "--results", "results", "--case", key(2, 1), "--case", key(2, 2)],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert parent.stderr is not None
        assert any(line.startswith("[1/2]") for line in parent.stderr)
        time.sleep(0.5)  # into the case that hangs
        assert [rank for rank, _ in sorted(started(log))] == [0, 1]
        assert not any(gone(pid) for _, pid in started(log))
        parent.send_signal(how)
        _, rest = parent.communicate(timeout=30)
        assert within(0.1 if how == signal.SIGINT else 5, log), "a rank outlived its run"
    finally:
        parent.kill()
        for _, pid in started(log):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        parent.communicate()  # one that is left unreaped is a warning, and so a failure, of whichever test comes later
    (path,) = tmp_path.glob("results/records/here/*.json")
    kept = record.read(path)
    assert ([case.status for case in kept.cases], kept.run.finished) == (["ok"], False)
    if how == signal.SIGINT:
        assert parent.returncode == 130
        assert "1 of 2 cases are in" in rest


def ranks_of(run: int) -> list[int]:
    """The processes of a run's ranks, oldest first."""
    below = [pid for launch in children(run) for pid in children(launch)]
    return sorted(pid for pid in below if b"harness.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes())


def lose_a_rank(folder: Path, how: signal.Signals, device: str, backend: str) -> tuple[Record, float]:
    """Real collectives: rank 1 is hit in the middle of the second case of three. The record, and how many seconds later
    that case was over."""
    cases = [
        f"ddp[model=blocks,bucket=4MiB,tokens={tokens},gradients=bf16,ranks=2,backend={backend}]"
        for tokens in (64, 128, 32)
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "harness", "run", "--device", device, "--no-controls", "--machine", "here", "--target",
         "0.001", "--results", "results", *(word for case in cases for word in ("--case", case))],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    ranks: set[int] = set()
    try:
        assert run.stderr is not None
        assert any(line.startswith("[1/3]") for line in run.stderr)
        time.sleep(2)  # into the case that follows
        both = ranks_of(run.pid)
        assert len(both) == 2
        ranks.update(both)
        hit = time.monotonic()
        os.kill(both[1], how)
        assert any(line.startswith("[2/3]") for line in run.stderr)
        took = time.monotonic() - hit
        while run.poll() is None and time.monotonic() < hit + 200:
            ranks.update(ranks_of(run.pid))
            time.sleep(0.1)
        assert run.returncode == 4
        assert all(map(gone, ranks))
    finally:
        run.kill()
        run.communicate()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    (path,) = folder.glob("results/records/here/*.json")
    return record.read(path), took


# A rank that is stopped is one that hangs: the other waits for as long as a collective may take, MEET_S.
@pytest.mark.parametrize(
    ("how", "reason", "limit_s"),
    [(signal.SIGKILL, "rank 1 was killed by SIGKILL", 15.0), (signal.SIGSTOP, "rank 1", 90.0)],
    ids=["killed", "hangs"],
)
@pytest.mark.multigpu
def test_a_rank_lost_in_a_collective_of_nccl_costs_its_case_alone(tmp_path, how, reason, limit_s):
    """On the cpu by Gloo this takes 40 and 120 s, too long for every day; faults without collectives are above."""
    kept, took = lose_a_rank(tmp_path, how, "cuda", "nccl")
    first, hit, after = kept.cases
    assert (first.status in MEASURED, after.status in MEASURED) == (True, True), [first.reason, after.reason]
    assert hit.status == "error"
    assert reason in hit.reason
    assert took < limit_s


# Whose end is the reason.

SEGV, KILL, ABRT, TERM = (
    -int(number) for number in (signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGTERM)
)
WATCHDOG = [
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [Rank 0] Watchdog caught collective operation timeout",
    "frame #0: clone",
    "Fatal Python error: Aborted",
]


@pytest.mark.parametrize(
    ("codes", "printed", "reason"),
    [
        ({1: SEGV, 0: TERM}, {}, "rank 1 was killed by SIGSEGV"),
        ({0: ANOTHERS, 1: SEGV}, {0: ["rank 1 is gone"]}, "rank 1 was killed by SIGSEGV"),
        ({0: ABRT, 1: TERM}, {0: WATCHDOG}, "rank 0 was killed by SIGABRT: " + WATCHDOG[1].partition(":  ")[2]),
        ({0: ABRT, 2: OWN}, {0: WATCHDOG, 2: ["rank 2: ValueError"]}, "rank 2: ValueError"),
        ({0: ANOTHERS, 1: TERM}, {0: ["x", "rank 1 did not come"]}, "rank 1 did not come"),
        ({0: ANOTHERS, 1: OWN}, {0: ["rank 1 is gone"], 1: ["Traceback", "rank 1: KeyError"]}, "rank 1: KeyError"),
        ({0: ANOTHERS, 1: KILL}, {0: ["rank 1 did not come within 40 s"]}, "rank 1 did not come within 40 s"),
        ({0: ANOTHERS, 1: SEGV}, {0: ["rank 1 did not come within 40 s"]}, "rank 1 was killed by SIGSEGV"),
        ({1: 7}, {1: ["no more licences"]}, "rank 1 ended with exit code 7: no more licences"),
        ({1: 7}, {}, "rank 1 ended with exit code 7: it printed nothing"),
        ({1: OWN}, {}, f"rank 1 ended with exit code {OWN}: it printed nothing"),
        ({3: TERM, 0: TERM}, {}, "rank 3 was killed by SIGTERM"),
        ({2: -64}, {}, "rank 2 was killed by SIGRTMAX"),
        ({2: -40}, {}, "rank 2 was killed by signal 40"),
    ],
)  # fmt: skip
def test_the_rank_to_blame_is_not_one_that_fell_with_it(codes, printed, reason):
    assert blame(codes, lambda rank: printed.get(rank, []), 0) == reason


def test_a_host_that_ran_out_of_memory_is_told(monkeypatch):
    monkeypatch.setattr(child.host, "oom_kills", lambda: 3)
    assert blame({1: KILL}, lambda rank: [], 2).endswith("SIGKILL (out of host memory: the kernel ended it)")


def test_what_ranks_print_is_kept_in_files_without_names(tmp_path, monkeypatch):
    """However this process ends they are gone."""
    monkeypatch.setattr(launching.tempfile, "tempdir", str(tmp_path))
    ours, theirs = os.pipe()
    with contextlib.closing(launching.Logs(2, theirs)) as logs:
        printed_and_kept(logs, ours, theirs)
    assert list(tmp_path.iterdir()) == []


def printed_and_kept(logs: launching.Logs, ours: int, theirs: int) -> None:
    envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
    to = logs.reify(envs)
    for rank in envs:
        with open(to.stderrs[rank], "w") as file:
            print("x" * (1 << 17), f"\nlast words of {rank}", file=file)
    with open(to.stdouts[0], "w") as events, open(to.stdouts[1], "w") as nowhere:
        print("event", file=events)
        print("lost", file=nowhere)
    os.close(theirs)
    assert os.read(ours, 100) == b"event\n"
    os.close(ours)
    assert [logs.lines(rank)[-1] for rank in envs] == ["last words of 0", "last words of 1"]
    assert not any(Path(file).is_file() for file in to.error_files.values())
