"""The child's side of a process that the harness starts (harness/child.py is the parent's).

It reads what is asked of it from stdin, and says events as JSON lines over a file descriptor of their own, its only
argument, so that whatever a library prints cannot garble them.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from harness.protocol import Failed

Say = Callable[[msgspec.Struct], None]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(work: Callable[[bytes, Say], None]) -> int:
    """Do `work` with what was asked; the exit code, 0 when it came to its end. An error is told, then raised."""
    faulthandler.enable()
    end_with_parent()
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as out:

        def say(event: msgspec.Struct) -> None:
            out.write(msgspec.json.encode(event) + b"\n")

        try:
            work(sys.stdin.buffer.read(), say)
        except BrokenPipeError:
            return 1  # The parent is gone: there is nobody left to measure for.
        except Exception as error:
            say(Failed(reason=one_line(error)))
            raise
    return 0


def one_line(error: BaseException) -> str:
    """The error's kind and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent dies, for one that hangs notices no closed pipe.

    parent: its number, if known; where that process is gone already, this one ends here.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
