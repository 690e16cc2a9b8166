"""What a child is given, and what its parent is told; tests/test_supervise.py has the many ways in which one dies."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import child
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
