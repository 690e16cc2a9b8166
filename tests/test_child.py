"""What a child is given, and what its parent is told; tests/test_supervise.py has the many ways in which one dies."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness import child, host
from harness.child import Child
from harness.profiles import load_profile
from harness.protocol import Begin, Event, Failed, Job

JOB = Job(
    device="tpu",
    uuid=None,
    no_telemetry="",
    profile=load_profile("cpu"),
    cases=["a"],
    launch=0,
    target=0.03,
)
BEGIN = """
import os, sys
out = os.fdopen(int(sys.argv[1]), "w")
print('{"type": "begin", "key": "a"}', file=out, flush=True)
"""


def follow(monkeypatch: pytest.MonkeyPatch, code: str) -> tuple[list[Event], str]:
    """The events of a child that runs `code`, and why it ended."""
    monkeypatch.setattr(
        child, "command", lambda events: [sys.executable, "-I", "-S", "-c", code, str(events)]
    )
    with Child(JOB) as worker:
        return list(worker.events()), worker.end()


def test_events_come_as_they_are_said_and_not_at_the_end(monkeypatch, tmp_path):
    """The child waits for a file that its parent writes when it has heard it."""
    heard = tmp_path / "heard"
    wait = f"import time\nwhile not os.path.exists({str(heard)!r}): time.sleep(0.01)"
    monkeypatch.setattr(
        child, "command", lambda events: [sys.executable, "-I", "-S", "-c", BEGIN + wait, str(events)]
    )
    with Child(JOB) as worker:
        events: Iterator[Event] = worker.events()
        assert next(events) == Begin(key="a")
        heard.touch()
        assert list(events) == []
        assert worker.end() == "the worker ended before its work was done"


def test_the_job_is_on_its_standard_input(monkeypatch):
    code = (
        BEGIN + "import json; job = json.loads(sys.stdin.read()); print(job['profile']['name']); sys.exit(3)"
    )
    assert follow(monkeypatch, code)[1] == "the worker ended with exit code 3: cpu"


def test_a_child_has_a_group_of_its_own_the_package_and_eager_loading(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    code = BEGIN + (
        "print(os.getpgrp() == os.getpid(), os.environ['CUDA_MODULE_LOADING'],"
        " os.path.basename(os.environ['PYTHONPATH'].split(os.pathsep)[1])); sys.exit(3)"
    )
    assert follow(monkeypatch, code)[1].endswith(": True EAGER elsewhere")
    code = BEGIN + "print('root', os.environ['PYTHONPATH'].split(os.pathsep)[0] == %r); sys.exit(3)"
    root = str(Path(child.__file__).resolve().parent.parent)
    assert follow(monkeypatch, code % root)[1].endswith(": root True")


def test_how_modules_are_loaded_can_be_chosen(monkeypatch):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    code = BEGIN + "print(os.environ['CUDA_MODULE_LOADING']); sys.exit(3)"
    assert follow(monkeypatch, code)[1].endswith(": LAZY")


def test_the_real_command_runs_the_worker_wherever_it_is_started(tmp_path, monkeypatch):
    """A file of the current folder that has a module's name must not be taken for it."""
    (tmp_path / "harness.py").write_text("raise SystemExit('the wrong harness')")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong msgspec')")
    monkeypatch.chdir(tmp_path)
    with Child(JOB) as worker:
        said = list(worker.events())
        reason = worker.end()
    assert said == [Failed(reason=reason)]
    assert reason == "UsageError: device: got 'tpu', want cuda or cpu"


def test_a_child_that_the_kernel_reaps_is_no_trouble(monkeypatch):
    """As for a parent that ignores SIGCHLD; how the child ended is then not to be known."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        events, reason = follow(monkeypatch, BEGIN + "sys.exit(3)")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (events, reason) == ([Begin(key="a")], "the worker ended before its work was done")


def test_leaving_the_block_ends_the_child(monkeypatch):
    code = BEGIN + "import time; time.sleep(60)"
    monkeypatch.setattr(
        child, "command", lambda events: [sys.executable, "-I", "-S", "-c", code, str(events)]
    )
    with contextlib.suppress(KeyboardInterrupt), Child(JOB) as worker:
        assert next(worker.events()) == Begin(key="a")
        pid = worker._process.pid
        os.kill(pid, 0)  # it is there
        raise KeyboardInterrupt
    assert not Path(f"/proc/{pid}").exists()


def test_a_child_that_no_signal_ends_is_given_up_in_a_bounded_time(monkeypatch):
    """One that waits in a driver for a device that is lost. Here its signal is kept from it."""
    kill, kept = os.killpg, []
    monkeypatch.setattr(os, "kill", lambda *arguments: None)
    monkeypatch.setattr(os, "killpg", lambda *arguments: kept.append(arguments))
    for limit in ("CASE_S", "KILL_S", "REST_S"):
        monkeypatch.setattr(child, limit, 0.2)
    code = BEGIN + "import time; time.sleep(60)"
    monkeypatch.setattr(
        child, "command", lambda events: [sys.executable, "-I", "-S", "-c", code, str(events)]
    )
    began = time.monotonic()
    with Child(JOB) as worker:
        said, reason = list(worker.events()), worker.end()
    assert time.monotonic() - began < 5
    assert said == [Begin(key="a")]
    assert reason == "no sign of life for 0.2 s; SIGKILL does not end it: it waits in the kernel"
    assert [sent for _, sent in kept] == [signal.SIGTERM, signal.SIGKILL]
    kill(*kept[-1])
    worker._process.wait()


def test_what_fails_while_a_child_is_started_ends_it(monkeypatch):
    pids = []

    def interrupted(path: Path, text: str) -> None:
        pids.append(int(path.parent.name))
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "command", lambda events: ["sleep", "60"])
    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Child(JOB)
    assert not Path(f"/proc/{pids[0]}").exists()


TERMED = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.2)
    open(sys.argv[1], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, %s)
os.write(int(sys.argv[2]), b"here\\n")
time.sleep(60)
"""


@pytest.mark.parametrize(("handler", "ended"), [("end", True), ("signal.SIG_IGN", False)])
def test_a_child_with_children_may_end_them_first_for_as_long_as_it_is_given(tmp_path, handler, ended):
    note = tmp_path / "note"
    began = time.monotonic()
    with child.Process(
        lambda events: [sys.executable, "-I", "-S", "-c", TERMED % handler, str(note), str(events)],
        b"",
        10,
        ends_s=5.0 if ended else 0.3,
    ) as process:
        assert next(process.lines()) == b"here"
        pid = process._process.pid
    assert note.exists() is ended
    assert not Path(f"/proc/{pid}").exists()
    assert time.monotonic() - began < 4


def test_a_child_is_called_by_its_name_and_has_variables_of_its_own():
    code = "import os, sys; print(os.environ['A'], os.environ['PYTHONUNBUFFERED']); sys.exit(3)"
    with child.Process(
        lambda events: [sys.executable, "-I", "-S", "-c", code], b"", 10, who="rank 1", variables={"A": "x"}
    ) as process:
        assert list(process.lines()) == []
        assert process.end() == "rank 1 ended with exit code 3: x 1"


# Several ranks.


def test_a_job_of_several_ranks_is_launched_here_with_its_environment(monkeypatch):
    """A job of one process is not, however many ranks torchrun has started."""
    asked = []
    code = BEGIN + "print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')); sys.exit(3)"

    def module(name: str, events: int) -> list[str]:
        asked.append(name)
        return [sys.executable, "-I", "-S", "-c", code, str(events)]

    monkeypatch.setattr(child, "module", module)
    job = msgspec.structs.replace(JOB, ranks=2, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})

    def end(job: Job) -> str:
        with Child(job) as worker:
            assert list(worker.events()) == [Begin(key="a")]
            return worker.end()

    assert end(job) == "the worker ended with exit code 3: 32"
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    end(job)
    end(JOB)
    assert asked == ["launching", "ranks", "worker"]


def test_a_rank_that_torchrun_has_placed_is_started_with_its_parents_number(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert child.ranks_command(7)[-3:] == ["harness.ranks", "7", str(os.getpid())]


# Out of memory.

SCORE = Path("/proc/self/oom_score_adj")
KILLED = "the worker was killed by SIGKILL"


@pytest.mark.skipif(not SCORE.exists(), reason="no such kernel")
def test_a_host_that_is_out_of_memory_ends_the_child_before_its_parent(monkeypatch):
    own = int(SCORE.read_text())
    # The parent writes it while the child already runs.
    code = BEGIN + (
        f"import time; read = lambda: open({str(SCORE)!r}).read().strip(); until = time.monotonic() + 5\n"
        f"while read() == '{own}' and time.monotonic() < until: time.sleep(0.01)\n"
        "print(read()); sys.exit(3)"
    )
    assert follow(monkeypatch, code)[1].endswith(f": {child.OOM_SCORE}")
    assert own < child.OOM_SCORE


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2, 3, "(out of host memory: the kernel ended it)"),
        (2, 2, "(out of memory, or killed by hand)"),
        (None, None, "(out of memory, or killed by hand)"),
        (None, 3, "(out of memory, or killed by hand)"),
    ],
)
def test_the_kernel_tells_whether_memory_was_short(monkeypatch, before, after, words):
    counts = iter([before, after])
    monkeypatch.setattr(host, "oom_kills", lambda: next(counts))
    assert follow(monkeypatch, BEGIN + "os.kill(os.getpid(), 9)")[1] == f"{KILLED} {words}"


@pytest.fixture
def small_group():
    """The file of members of a control group with little memory; skipped where none may be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = {"memory": ("memory", "limit_in_bytes", "swappiness"), "": ("", "max", "swap.max")}
        if controllers not in names:
            continue
        tree, limit, swap = names[controllers]
        folder = host.CGROUPS / tree / path.lstrip("/") / f"overlap-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                counts = folder / ("memory.oom_control" if tree else "memory.events")
                if "oom_kill " not in counts.read_text():
                    continue
                (folder / f"memory.{limit}").write_text(str(200 << 20))
                with contextlib.suppress(OSError):
                    (folder / f"memory.{swap}").write_text("0")
                yield folder / "cgroup.procs"
                return
            finally:
                until = time.monotonic() + 5
                while folder.exists() and time.monotonic() < until:  # its last member may not be gone yet
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                    time.sleep(0.02)
    pytest.skip("no control group with a limit of memory can be made here")


def test_a_child_that_takes_more_memory_than_there_is_is_named_as_such(small_group):
    """The kernel really ends it, and not its parent, which is in the same group."""
    parent = f"""
import os, sys
with open({str(small_group)!r}, "w") as members:
    members.write(str(os.getpid()))
from harness import child
from harness.profiles import load_profile
from harness.protocol import Job
greedy = "taken = [bytearray(1 << 24) for _ in range(100)]"
child.command = lambda events: [sys.executable, "-I", "-S", "-c", greedy]
job = Job(device="cpu", uuid=None, no_telemetry="", profile=load_profile("cpu"), cases=[], launch=0, target=0.03)
with child.Child(job) as worker:
    list(worker.events())
    print(worker.end())
"""
    done = subprocess.run(
        [sys.executable, "-c", parent],
        cwd=Path(child.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{KILLED} (out of host memory: the kernel ended it)\n"
