"""A child process as its parent sees it: what it says as it comes, and why it ended.

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Self, TypeVar

import msgspec

from harness import host, protocol, source, torchrun
from harness.files import SCRATCH
from harness.protocol import EVENTS, Begin, Done, Event, Failed, Job, Progress

# A worker that says nothing for this long before its first case hangs. It imports torch, loads every kernel, measures
# ceilings and controls: 13 s were seen until an H200 was open, and a cold or shared disk takes many times as long.
OPENING_S = 180.0

# The same within a case. A sound one is silent for longest while its buffers are made and each arm runs for the first
# time: 31 s for 1 GiB at ratio 8 on two idle cores. From then on it speaks every few seconds, or after a sample that
# takes longer, such as the ten seconds of a gate that times out.
CASE_S = 90.0

# From the end of its last event to the end of the process.
END_S = 20.0

# From SIGKILL to the end. A process that waits in a driver for a device that is lost takes no signal.
KILL_S = 10.0

# From SIGTERM to SIGKILL, for a child that has children of its own to end first.
RANKS_END_S = 10.0

# From SIGTERM to SIGKILL, for what a child that is gone has left in its group. Python's tracker of semaphores takes no
# SIGTERM, and removes those of the others when they are gone.
REST_S = 1.0

# How often a silent child is looked at: what it has started may hold its pipe open when it is gone itself.
LOOK_S = 0.5

# What the kernel counts against a child when the host runs out of memory, in thousandths of that memory: pinned memory
# counts for no process, and this is the process whose end loses nothing.
OOM_SCORE = 500

# No event is nearly as long as this.
MAX_EVENT_BYTES = 64 << 20

_LAST_WORDS_BYTES = 4096

T = TypeVar("T")


def module(name: str, events: int) -> list[str]:
    """The program harness.`name`, which reads what is asked from stdin and writes to the file descriptor `events`."""
    # -P: a file in the current folder must not stand in for a module of the same name.
    return [sys.executable, "-P", "-m", f"harness.{name}", str(events)]


def command(events: int) -> list[str]:
    """The program that reads a job and writes events."""
    return module("worker", events)


def ranks_command(events: int) -> list[str]:
    """The same for a job of several ranks: all of them, or rank 0 where torchrun has started a rank here already."""
    if torchrun.role() is None:
        return module("launching", events)
    return [*module("ranks", events), str(os.getpid())]


class Process:
    """A child in a process group of its own, which is ended whole with the `with` block; OSError if none starts.

    command: the program, given the file descriptor that it is to write lines to. asked: its standard input.
    silence_s: a child that says nothing for longer hangs; it may be changed while the child runs. who: the child in
    words. variables: of its environment, besides those of every child. ends_s: how long it may take to end by itself
    once it is told to, by SIGTERM; without, it is killed.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        asked: bytes,
        silence_s: float,
        *,
        who: str = "the worker",
        variables: Mapping[str, str] | None = None,
        ends_s: float = 0.0,
    ) -> None:
        self.silence_s = silence_s
        self._who, self._ends_s = who, ends_s
        self._trouble = ""
        self._stuck = False
        self._oom_kills = host.oom_kills()
        with contextlib.ExitStack() as opened:
            # A file and not a pipe: no child can block its parent by reading its job late, or not at all.
            given = opened.enter_context(tempfile.TemporaryFile())
            given.write(asked)
            given.seek(0)
            self._log: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            scratch = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="overlap-", ignore_cleanup_errors=True)
            )
            ours, theirs = os.pipe()
            self._events = opened.enter_context(os.fdopen(ours, "rb", buffering=0))
            try:
                self._process = subprocess.Popen(
                    command(theirs),
                    stdin=given,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    env=environment() | dict(variables or {}) | {SCRATCH: scratch},
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            opened.callback(self._kill)
            with contextlib.suppress(OSError):
                Path(f"/proc/{self._process.pid}/oom_score_adj").write_text(str(OOM_SCORE))
            given.close()
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def lines(self) -> Iterator[bytes]:
        """Lines until the child closes its pipe or is gone; one that is silent for too long, or writes no lines, is
        killed."""
        rest, heard = b"", time.monotonic()
        while True:
            gone = self.ended(0)  # asked first, so that nothing it said before is missed
            left = heard + self.silence_s - time.monotonic()
            lines: list[bytes] = []
            if select.select([self._events], [], [], 0 if gone else max(0.0, min(left, LOOK_S)))[0]:
                data = self._events.read(1 << 20)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
            elif gone:
                return
            for line in lines:
                yield line
                heard = time.monotonic()  # what is done with a line is no silence of the child's
            if len(rest) > MAX_EVENT_BYTES:
                self.refuse(f"{self._who} sent more than {MAX_EVENT_BYTES >> 20} MiB without an end of line")
                return
            if left <= 0 and not lines:
                self.refuse(f"no sign of life for {self.silence_s:g} s; ended")
                return

    def refuse(self, trouble: str) -> None:
        """End the child, with this as the reason."""
        self._trouble = trouble
        self._kill()

    def end(self) -> str:
        """Wait for the child to end and say why: trouble with it, a signal's name, or its exit code; empty for 0."""
        if not self._stuck and not self.ended(END_S):
            self._trouble = self._trouble or f"{self._who} did not end within {END_S:g} s of its last event"
        self._kill()
        code = self._process.returncode
        if self._trouble:
            return self._trouble
        if code < 0:
            return f"{self._who} was killed by {signal_words(-code, self._oom_kills)}"
        if code:
            return protocol.reason(f"{self._who} ended with exit code {code}: {self._last_words()}")
        return ""

    def heard(self, line: bytes, decoder: "msgspec.json.Decoder[T]") -> T | None:
        """The event in `line`; None if it is none, and the child is ended. A failure it tells is why it ends."""
        try:
            event = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.refuse(protocol.reason(f"{self._who} sent what is no event: {error}"))
            return None
        if isinstance(event, Failed):
            self._trouble = protocol.reason(event.reason) or f"{self._who} failed and did not say why"
        return event

    def ended(self, seconds: float) -> bool:
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
        if self._process.returncode is not None or self._stuck:
            return
        if self._ends_s and not self.ended(0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGTERM)
            self.ended(self._ends_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._process.pid, signal.SIGKILL)
            os.killpg(self._process.pid, signal.SIGTERM)
        until = time.monotonic() + REST_S
        while time.monotonic() < until and host.group_lives(self._process.pid):
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._stuck = True
            what = self._trouble.removesuffix("; ended") or f"{self._who} hangs"
            self._trouble = f"{what}; SIGKILL does not end it: it waits in the kernel"

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LAST_WORDS_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


class Child(Process):
    """A worker, which measures the cases of a job."""

    def __init__(self, job: Job) -> None:
        alone = job.ranks is None
        super().__init__(
            lambda events: command(events) if alone else ranks_command(events),
            msgspec.json.encode(job),
            OPENING_S,
            variables=job.environment,
            ends_s=0.0 if alone else RANKS_END_S,
        )
        self._left = set(job.cases)

    def events(self) -> Iterator[Event]:
        """Events until the child closes its pipe; one that is silent for too long, or talks nonsense, is killed."""
        for line in self.lines():
            event = self.heard(line, EVENTS)
            if event is None:
                return
            if isinstance(event, Begin | Progress | Done) and event.key not in self._left:
                self.refuse(
                    protocol.reason(f"{self._who} spoke of a case that is not its own: {event.key!r}")
                )
                return
            if isinstance(event, Begin):
                self.silence_s = CASE_S
            elif isinstance(event, Done):
                self._left.discard(event.key)
                event.reason = protocol.reason(event.reason)
            yield event

    def end(self) -> str:
        """Wait for the child to end and say why it ended: its own words, a signal's name, or its exit code."""
        return super().end() or "the worker ended before its work was done"


def signal_words(number: int, oom_kills: int | None) -> str:
    """The name of the signal that ended a process, and whether the host was short of memory.

    oom_kills: what host.oom_kills said when the process began.
    """
    try:
        name = signal.Signals(number).name
    except ValueError:  # most of the real-time signals have none
        name = f"signal {number}"
    if number != signal.SIGKILL:
        return name
    now = host.oom_kills()
    short = oom_kills is not None and now is not None and now > oom_kills
    return f"{name} ({'out of host memory: the kernel ended it' if short else 'out of memory, or killed by hand'})"


def environment() -> dict[str, str]:
    """What every child that opens the device is started in; the package may be a checkout that is not installed."""
    return {
        "CUDA_MODULE_LOADING": "EAGER",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": source.python_path(source.package_root()),
    }
