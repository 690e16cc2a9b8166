"""The child process of one launch, as its parent sees it: its events as they come, and why it ended.

Nothing a child does, or leaves undone, raises here: it comes out as a reason.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import msgspec

from harness import protocol, source
from harness.protocol import EVENTS, Begin, Done, Event, Failed, Job, Progress

# A child that says nothing for this long, beyond what its case may take, hangs.
SILENCE_S = 120.0

# From the end of its last event to the end of the process.
END_S = 20.0

# No event is nearly as long as this.
MAX_EVENT_BYTES = 64 << 20

_LAST_WORDS_BYTES = 4096


def command(events: int) -> list[str]:
    """The program that reads a job from stdin and writes events to the file descriptor `events`."""
    # -P: a file in the current folder must not stand in for a module of the same name.
    return [sys.executable, "-P", "-m", "harness.worker", str(events)]


class Child:
    """A worker in a process group of its own, which is ended whole with the `with` block; OSError if none starts."""

    def __init__(self, job: Job) -> None:
        self._limit = SILENCE_S + job.profile.case_seconds
        self._left = set(job.cases)
        self._trouble = ""
        with contextlib.ExitStack() as opened:
            # A file and not a pipe: no child can block its parent by reading its job late, or not at all.
            asked = opened.enter_context(tempfile.TemporaryFile())
            asked.write(msgspec.json.encode(job))
            asked.seek(0)
            self._log: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            ours, theirs = os.pipe()
            self._events = opened.enter_context(os.fdopen(ours, "rb", buffering=0))
            try:
                self._process = subprocess.Popen(
                    command(theirs),
                    stdin=asked,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    env=environment(),
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            asked.close()
            self._opened = opened.pop_all()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._opened.close()

    def events(self) -> Iterator[Event]:
        """Events until the child closes its pipe; one that is silent for too long, or talks nonsense, is killed."""
        rest = b""
        while select.select([self._events], [], [], self._limit)[0]:
            data = self._events.read(1 << 20)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = self._understood(line)
                if event is None:
                    self._kill()
                    return
                yield event
            if len(rest) > MAX_EVENT_BYTES:
                self._trouble = (
                    f"the worker sent more than {MAX_EVENT_BYTES >> 20} MiB without an end of line"
                )
                self._kill()
                return
        self._trouble = f"no sign of life for {self._limit:g} s; ended"
        self._kill()

    def end(self) -> str:
        """Wait for the child to end and say why it ended: its own words, a signal's name, or its exit code."""
        if not self._ended(END_S):
            self._trouble = self._trouble or f"the worker did not end within {END_S:g} s of its last event"
        self._kill()
        code = self._process.returncode
        if self._trouble:
            return self._trouble
        if code < 0:
            return f"the worker was killed by {_signal_name(-code)}"
        if code:
            return protocol.reason(f"the worker ended with exit code {code}: {self._last_words()}")
        return "the worker ended before its work was done"

    def _understood(self, line: bytes) -> Event | None:
        """The event in `line`; None, with the trouble noted, if it is none, or of a case not asked for."""
        try:
            event = EVENTS.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._trouble = protocol.reason(f"the worker sent what is no event: {error}")
            return None
        if isinstance(event, Begin | Progress | Done) and event.key not in self._left:
            self._trouble = protocol.reason(f"the worker spoke of a case that is not its own: {event.key!r}")
            return None
        if isinstance(event, Done):
            self._left.discard(event.key)
            event.reason = protocol.reason(event.reason)
        elif isinstance(event, Failed):
            self._trouble = protocol.reason(event.reason) or "the worker failed and did not say why"
        return event

    def _ended(self, seconds: float) -> bool:
        """Whether the child ends within that time. It is not reaped, so that its number stays its group's."""
        until = time.monotonic() + seconds
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.005)
        return True

    def _kill(self) -> None:
        """End the child's whole group, what outlived the child included, and reap the child."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LAST_WORDS_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


def environment() -> dict[str, str]:
    """What every child that opens the device is started in; the package may be a checkout that is not installed."""
    paths = filter(None, [str(source.package_root()), os.environ.get("PYTHONPATH", "")])
    return {
        "CUDA_MODULE_LOADING": "EAGER",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # most of the real-time signals have none
        name = f"signal {number}"
    return f"{name} (out of memory, or killed by hand)" if number == signal.SIGKILL else name
