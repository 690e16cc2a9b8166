"""Rank 0's side of a run that torchrun started on one host or many: it alone keeps a record and says what is next.

The other ranks follow (harness/following.py). This process imports no torch.
"""

import contextlib
from collections.abc import Iterator

import msgspec

from harness.child import Process, module
from harness.errors import UsageError
from harness.protocol import Failed
from harness.torchrun import Role

# How often rank 0 says that the run goes on, and after how long without the others give it up.
BEAT_S = 5.0
LOST_S = 120.0

# For the other ranks to read that the run is over, where the store ends with rank 0.
LEAVE_S = 10.0

# From the start of the process that keeps the board until it has it. A cold import of torch may take most of it.
KEPT_S = 180.0


class Kept(msgspec.Struct, tag="kept", kw_only=True):
    """The board is there."""


_SAID = msgspec.json.Decoder(Kept | Failed)


@contextlib.contextmanager
def leading(role: Role | None) -> Iterator[None]:
    """While it lasts the other ranks are told of every job; afterwards that there is none any more.

    UsageError where the ranks cannot find each other, such as a port in use. Without a role nothing is done.
    """
    if role is None:
        yield
        return
    try:
        process = Process(
            lambda events: module("board", events),
            b"",
            KEPT_S,
            who="the board of the ranks",
            ends_s=LEAVE_S + 5,
        )
    except OSError as error:
        raise UsageError(f"torchrun: no process could be started: {error.strerror}") from None
    with process:
        line = next(process.lines(), None)
        said = None if line is None else process.heard(line, _SAID)
        if not isinstance(said, Kept):
            raise UsageError(f"torchrun: {process.end() or 'the board of the ranks ended'}")
        yield
