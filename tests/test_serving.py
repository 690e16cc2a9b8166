"""The child's side: what it says, how it ends, and that it does not outlive its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import child
from harness.protocol import Failed
from harness.serving import one_line


def serve(code, asked=b"work", keep_open=True):
    """Exit code, what was said, and what was printed by a child that serves `work(asked, say)`."""
    program = f"""
import sys
from harness.protocol import Begin
from harness.serving import serve
def work(asked, say):
{code}
sys.exit(serve(work))
"""
    ours, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
            env=child.environment(),
        )
    finally:
        os.close(theirs)
    with os.fdopen(ours, "rb") as events:
        if not keep_open:
            events.close()
        printed, _ = process.communicate(asked, 60)
        said = [] if events.closed else events.read().splitlines()
    return process.returncode, said, printed.decode()


def test_what_was_asked_is_done_and_every_event_is_a_line():
    code, said, printed = serve("    for key in asked.decode().split(): say(Begin(key=key))", b"a b")
    assert (code, printed) == (0, "")
    assert said == [b'{"type":"begin","key":"a"}', b'{"type":"begin","key":"b"}']


def test_an_error_is_told_in_one_line_and_printed_whole():
    code, said, printed = serve("    say(Begin(key='a')); raise RuntimeError('first\\nsecond')")
    assert code == 1
    assert said[1:] == [b'{"type":"failed","reason":"RuntimeError: first"}']
    assert printed.rstrip().endswith("RuntimeError: first\nsecond")


def test_a_child_whose_parent_listens_no_longer_ends_without_complaint():
    code, _, printed = serve("    say(Begin(key='a'))", keep_open=False)
    assert (code, printed) == (1, "")


def test_a_crash_in_native_code_is_traced_for_the_log():
    code, said, printed = serve("    import faulthandler; faulthandler._sigsegv()")
    assert (code, said) == (-signal.SIGSEGV, [])
    assert "Fatal Python error: Segmentation fault" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked in Linux's way")
def test_a_child_that_hangs_does_not_outlive_its_parent(tmp_path):
    note = tmp_path / "pid"
    parent = f"""
import os, sys, time
from harness.child import Process
hang = "from pathlib import Path; import os, time\\nfrom harness.serving import serve\\n"
hang += "def work(asked, say):\\n    Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)\\nserve(work)"
with Process(lambda events: [sys.executable, "-P", "-c", hang, str(events)], b"", 600) as process:
    for line in process.lines(): pass
"""
    started = subprocess.Popen([sys.executable, "-P", "-c", parent], env=child.environment())
    try:
        until = time.monotonic() + 30
        while not (note.exists() and note.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        pid = int(note.read_text())
        assert Path(f"/proc/{pid}").exists()
    finally:
        started.kill()
        started.wait()
    while running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(pid)


def running(pid):
    """Whether the process is there and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_is_one_line():
    assert one_line(RuntimeError("  first\nsecond")) == "RuntimeError: first"
    assert one_line(KeyError()) == "KeyError"
    assert Failed(reason=one_line(ValueError("x"))).reason == "ValueError: x"
