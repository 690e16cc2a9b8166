"""Readings beside the samples, taken by a process of its own (harness/nvml_sampler.py).

The child keeps what it reads and hands it over when asked, so that nothing wakes the measuring process, nor
takes its interpreter lock, while work is being timed. Both clocks are CLOCK_MONOTONIC, which processes share.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from harness.validity import Sample

INTERVAL_S = 0.005
ANSWER_S = 5.0
END_S = 2.0

# -P keeps the current folder off the path; the package may be a checkout that is not installed.
_BOOT = """
import sys
parent = sys.argv.pop(1)
if parent not in sys.path:
    sys.path.insert(0, parent)
from harness.nvml_sampler import main
sys.exit(main(sys.argv[1:]))
"""


class Query(msgspec.Struct):
    """Asks for the samples with t0 <= t <= t1 (None: until now)."""

    t0: float
    t1: float | None = None


class Answer(msgspec.Struct):
    """samples in order of time; missing: what cannot be read just now, and why."""

    samples: list[Sample]
    missing: dict[str, str]


class Telemetry(Protocol):
    """What takes readings: `Sampler`, or `NullSampler` where there is nothing to read."""

    @property
    def missing(self) -> dict[str, str]:
        """What cannot be read, and why; `telemetry` stands for everything."""

    def since(self, t0: float, t1: float | None = None) -> list[Sample]: ...

    def paused(self) -> AbstractContextManager[None]:
        """No readings for the length of a `with` block, to see what they cost."""

    def close(self) -> None: ...


class NullSampler:
    """No readings, and the reason."""

    def __init__(self, reason: str) -> None:
        self.missing = {"telemetry": reason}

    def __enter__(self) -> "NullSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def since(self, t0: float, t1: float | None = None) -> list[Sample]:
        return []

    def paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass


class Sampler:
    """A child process that reads the GPU of `uuid` until `close`; it ends by itself when this process dies.

    It never raises: when the child is gone or silent, `since` is empty and `missing` says why. The child
    inherits the CPU affinity of the moment, so start it before pinning this process to cores.

    Args:
        interval_s: between two looks; a reading is dated to within it.
        own: processes that, with their descendants, are no strangers on the GPU; this one by default.
        contexts: how many of those use this GPU, where a container hides which processes do.
    """

    def __init__(
        self,
        uuid: str,
        *,
        interval_s: float = INTERVAL_S,
        own: Iterable[int] | None = None,
        contexts: int = 1,
    ) -> None:
        self.missing: dict[str, str] = {}
        self._pending = b""
        self._child: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-P", "-c", _BOOT, str(Path(__file__).resolve().parent.parent)]
        command += ["--uuid", uuid, "--interval", str(interval_s), "--parent", str(os.getpid())]
        for pid in {os.getpid()} if own is None else own:
            command += ["--own", str(pid)]
        command += ["--contexts", str(contexts)]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as error:
            self.missing = {"telemetry": f"the sampler did not start: {error.strerror}"}

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id; None once it is closed."""
        return None if self._child is None else self._child.pid

    def since(self, t0: float, t1: float | None = None) -> list[Sample]:
        """The samples from monotonic t0 to t1, both in; until now for None, with one more look at everything.

        Blocks for the answer, up to ANSWER_S: ask between timed windows, not in one.
        """
        child = self._child
        if child is None:
            return []
        try:
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(Query(t0, t1)) + b"\n")
            answer = msgspec.json.decode(self._line(child), type=Answer)
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
            self._give_up(child, error)
            return []
        self.missing = answer.missing
        return answer.samples

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The child stands still for the length of a `with` block; do not ask for samples in it."""
        child = self._child
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if child is not None:
                child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the child and reap it; harmless when repeated."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        finally:
            child.stdout.close()

    def _line(self, child: "subprocess.Popen[bytes]") -> bytes:
        assert child.stdout is not None
        until = time.monotonic() + ANSWER_S
        parts = [self._pending]
        while b"\n" not in parts[-1]:
            ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            parts.append(chunk)
        line, _, self._pending = b"".join(parts).partition(b"\n")
        return line

    def _give_up(self, child: "subprocess.Popen[bytes]", error: Exception) -> None:
        silent = isinstance(error, TimeoutError)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0 if silent else END_S)
        code = child.poll()
        if code is None:
            child.kill()
            reason = f"the sampler gave no answer within {ANSWER_S:g} s"
            if not silent:
                reason = "the sampler gave an answer that cannot be read"
        elif code < 0:
            reason = f"the sampler was killed by {signal.Signals(-code).name}"
        else:
            reason = f"the sampler ended with exit code {code}"
        self.close()
        self.missing = {"telemetry": reason}


def open_sampler(
    uuid: str | None,
    reason: str = "",
    *,
    interval_s: float = INTERVAL_S,
    own: Iterable[int] | None = None,
    contexts: int = 1,
) -> Sampler | NullSampler:
    """A `Sampler` of the GPU of that UUID; a `NullSampler` with `reason` for no UUID."""
    if uuid is None:
        return NullSampler(reason or "no GPU to read")
    return Sampler(uuid, interval_s=interval_s, own=own, contexts=contexts)
