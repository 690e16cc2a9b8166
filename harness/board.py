"""What the processes of many ranks tell each other before they are a group, and after one of them is lost.

It lies in a key-value store of torch.distributed: torchrun's, or where nobody keeps one, that of
`python -m harness.board FD`, which also says that the run goes on and, when it is told to end, that it is over.
"""

import json
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import NoReturn

import msgspec
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from harness import torchrun
from harness.elastic import BEAT_S, LEAVE_S, Kept
from harness.errors import MeasurementError
from harness.protocol import Failed
from harness.serving import Say, serve
from harness.torchrun import Role

# For a host that is up, and a network that works.
REACH_S = 60.0


class Now(msgspec.Struct, kw_only=True):
    """What rank 0 last announced: a job by the name of its meeting, that there is none yet, or that all is over."""

    meeting: str = ""
    environment: dict[str, str] = {}
    over: bool = False


class Board:
    """A place in the store; MeasurementError where the store is gone, for it goes with rank 0's host."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def reach(cls, role: Role, *, keep: bool = False, limit_s: float = REACH_S) -> "Board":
        """The board of this run; MeasurementError if it is not reached, or with `keep` cannot be kept, in time."""
        try:
            store = TCPStore(
                role.address,
                role.port,
                is_master=keep,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            if keep and "EADDRINUSE" in str(error):
                raise MeasurementError(
                    f"MASTER_PORT {role.port} is in use on {socket.gethostname()}; choose another"
                ) from None
            raise MeasurementError(
                f"rank {role.rank} cannot reach rank 0 at {role.address}, port {role.port}, within {limit_s:g} s"
            ) from error
        return cls(PrefixStore(f"overlap/{role.attempt}", store))

    def set(self, key: str, value: object) -> None:
        self._asked("set", key, json.dumps(value))

    def get(self, key: str) -> object:
        """The value of `key`; None where nobody has set one."""
        if not self.has([key]):
            return None
        return json.loads(self._asked("get", key))  # type: ignore[arg-type]

    def has(self, keys: list[str]) -> bool:
        """Whether all of them are set."""
        return bool(self._asked("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and tell what it then is."""
        return int(self._asked("add", key, amount))  # type: ignore[call-overload,no-any-return]

    def announce(self, now: Now) -> None:
        self.set("now", msgspec.to_builtins(now))

    def now(self) -> Now:
        return msgspec.convert(self.get("now") or {}, Now)

    def tell(self, meeting: str, rank: int, reason: str) -> None:
        """Say why that rank is lost to the meeting, unless it was said before."""
        if self.told(meeting, rank) is None:
            self.set(f"{meeting}/lost/{rank}", reason)

    def told(self, meeting: str, rank: int) -> str | None:
        reason = self.get(f"{meeting}/lost/{rank}")
        return None if reason is None else str(reason)

    def _asked(self, what: str, *arguments: object) -> object:
        try:
            return getattr(self.store, what)(*arguments)
        except RuntimeError as error:
            raise MeasurementError("rank 0 is gone: its store does not answer") from error


class _Stop(BaseException):
    pass


def keep(role: Role, say: Say) -> None:
    """Keep the board until SIGTERM; then say that the run is over, and see the others off."""

    def stop(number: int, frame: object) -> NoReturn:
        raise _Stop

    try:
        board = Board.reach(role, keep=not role.agent_store)
        board.announce(Now())
    except MeasurementError as error:
        say(Failed(reason=str(error)))
        return
    try:
        signal.signal(signal.SIGTERM, stop)
        say(Kept())
        while True:
            board.add("beat", 1)
            time.sleep(BEAT_S)
    except _Stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    board.announce(Now(over=True))
    until = time.monotonic() + LEAVE_S
    # A store that torchrun keeps outlives this process.
    while not role.agent_store and board.add("left", 0) < board.add("came", 0) and time.monotonic() < until:
        time.sleep(0.05)


def main() -> int:
    """Entry of rank 0's child that keeps the board."""
    role = torchrun.role()
    assert role is not None, "started without a role"
    return serve(lambda asked, say: keep(role, say))


if __name__ == "__main__":
    sys.exit(main())
