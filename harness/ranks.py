"""One rank of the processes that measure a case together: `python -m harness.ranks FD PARENT [MEETING]`.

Rank 0 reads the job from stdin, shares it, and alone writes events, to the file descriptor FD. PARENT: the number of
the process that started this one, which ends with it. MEETING: the name under which the ranks meet; without one rank 0
gives it a name and announces it to the other ranks' hosts (harness/following.py).
"""

import sys

from harness import serving

if __name__ == "__main__":
    serving.end_with_parent(int(sys.argv[2]))  # Before torch is imported, which takes seconds.

import contextlib
import faulthandler
import itertools
import os
import pickle
import re
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import harness
from harness import torchrun, worker
from harness.board import Board, Now
from harness.errors import MeasurementError, OverlapError
from harness.protocol import JOBS, Failed
from harness.serving import one_line
from harness.torchrun import ANOTHERS, LATE, OWN, Role

T = TypeVar("T")

# From the first rank's coming to the last's. Less than a worker may be silent before its first case (harness/child.py).
JOIN_S = 120.0

# How long rank 0 waits for the others, and any rank in a collective of the case; less than a worker may be silent in
# one, by more than the 30 s that torch elastic gives a rank to end in and what is said on the way there.
MEET_S = 40.0

# How long the others wait for rank 0, which may be busy with what only it does. Who waits for rank 0 watches it, and
# ends them with it.
PATIENT_S = 1800.0

# How long a rank that waited in vain listens for why the other one is lost.
ROLL_CALL_S = 4.0

# What ranks share after every round fits in one message, which takes half as long as the two of torch's
# all_gather_object.
_PAGE_BYTES, _LENGTH_BYTES = 8192, 8

# What Gloo and NCCL say of a peer that is late or gone. They have no exceptions of their own for it in every torch.
_LATE = re.compile(r"[Tt]imed? ?out|communicator was aborted")
_GONE = re.compile(r"onnection (closed|reset|refused|was likely closed)|[Bb]roken pipe|remote process exit")

# But a kernel that runs for too long is this rank's.
_OF_DEVICE = re.compile(r"^CUDA error")

# Between a timeout and what it does about it NCCL's watchdog sleeps for four times as many ms, else for 60 s, so that
# what it knows can be written to files, which nobody here reads. A worker may not be silent for so long after MEET_S.
_WATCHDOG = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}


class Lost(MeasurementError):
    """Another rank did not come, or is gone."""


class TorchGroup:
    """A group of real processes (harness/group.py), which meet by Gloo whatever their collectives use.

    device: `cpu` until `use` has given this rank its GPU.
    """

    def __init__(self, role: Role, board: Board, meeting: str) -> None:
        """Join; Lost where a rank does not come within JOIN_S, MeasurementError where they cannot reach each other."""
        self.rank, self.size, self.host = role.rank, role.size, socket.gethostname()
        self.device = torch.device("cpu")
        self._role, self._board, self._meeting = role, board, meeting
        self._met = 0
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._hosts = [""] * self.size
        self._hosts = self._join()
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"group/{meeting}", board.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=PATIENT_S if self.rank else MEET_S),
            )
        except RuntimeError as error:
            raise MeasurementError(
                f"the ranks do not reach each other: {one_line(error)}; GLOO_SOCKET_IFNAME names the network to use"
            ) from error

    @classmethod
    def join(cls, meeting: str = "0") -> "TorchGroup":
        """The group that torchrun's variables speak of."""
        role = torchrun.role()
        if role is None:
            raise MeasurementError("RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: not set; start with torchrun")
        return cls(role, Board.reach(role, limit_s=JOIN_S), meeting)

    def share(self, value: T) -> list[T]:
        said = pickle.dumps(value)
        with self._together():
            pages = _gather(len(said).to_bytes(_LENGTH_BYTES, "little") + said[:_PAGE_BYTES], self.size)
            lengths = [int.from_bytes(page[:_LENGTH_BYTES], "little") for page in pages]
            if (longest := max(lengths)) > _PAGE_BYTES:
                whole = _gather(said, self.size, longest)
            else:
                whole = [page[_LENGTH_BYTES:] for page in pages]
        return [pickle.loads(text[:length]) for text, length in zip(whole, lengths, strict=True)]

    def meet(self) -> None:
        with self._together():
            dist.barrier()

    def process_group(self, backend: str) -> dist.ProcessGroup:
        """All ranks, for the collectives of a case, by `gloo` or `nccl`; made once. All ranks ask in the same order."""
        if backend not in self._groups:
            for name, value in _WATCHDOG.items():
                os.environ.setdefault(name, value)  # read when the group is made
            made = dist.new_group(backend=backend, timeout=timedelta(seconds=MEET_S))
            assert isinstance(made, dist.ProcessGroup)
            self._groups[backend] = made
        return self._groups[backend]

    def use(self, kind: str) -> None:
        """Give this rank a device: the next GPU of its host, where ranks may outnumber them.

        MeasurementError, on all ranks, where one has no GPU, or they are not all of one model.
        """
        count = torch.cuda.device_count() if kind == "cuda" else 0
        if kind == "cuda":
            without = [rank for rank, gpus in enumerate(self.share(count)) if not gpus]
            if without:
                raise MeasurementError(f"{self._name(without[0])} has no GPU; start it where there is one")
            self.device = torch.device("cuda", self._role.local_rank % count)
            torch.cuda.set_device(self.device)
        mine = {"overlap": harness.__version__, "method": harness.METHOD_VERSION, "torch": torch.__version__}
        mine["device"] = torch.cuda.get_device_name(self.device) if count else "cpu"
        for rank, theirs in enumerate(shared := self.share(mine)):
            for what, here in shared[0].items():
                if theirs[what] != here:
                    raise MeasurementError(
                        f"unequal hosts: {what} is {here} for {self._name(0)}, {theirs[what]} for {self._name(rank)}"
                    )

    def close(self) -> None:
        dist.destroy_process_group()

    def lost(self, error: BaseException) -> str | None:
        """Why another rank is lost, where that made `error` happen here; None for an error of this rank's own.

        The rank that failed may say why itself, or who started it may; else those that do not answer are named.
        """
        text = str(error)
        if not isinstance(error, Lost | RuntimeError) or _OF_DEVICE.search(text):
            return None
        if not (_LATE.search(text) or _GONE.search(text)):
            return text if isinstance(error, Lost) else None
        others = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + ROLL_CALL_S
        with contextlib.suppress(MeasurementError):  # a store that is gone tells nothing
            self._board.set(f"{self._meeting}/waits/{self.rank}", True)
            while time.monotonic() < until:
                for rank in others:
                    if told := self._board.told(self._meeting, rank):
                        return told
                time.sleep(0.05)
            waiting = [rank for rank in others if self._board.get(f"{self._meeting}/waits/{rank}")]
            if silent := self._behind() or [rank for rank in others if rank not in waiting]:
                return f"{self._names(silent)} {_fate(text)}"
        return one_line(error)

    def tell(self, reason: str, *, mine: bool) -> None:
        """Say to the other ranks why this one ends, if the reason is its own; and rank 0, that the job is over."""
        with contextlib.suppress(MeasurementError):
            if mine:
                self._board.tell(self._meeting, self.rank, reason)
            if self.rank == 0:
                self._board.set(f"{self._meeting}/over", True)

    def _join(self) -> list[str]:
        """Every rank's host, once all are here."""
        self._board.set(f"{self._meeting}/here/{self.rank}", [self.host, self.size])
        keys = [f"{self._meeting}/here/{rank}" for rank in range(self.size)]
        until = time.monotonic() + JOIN_S
        for looks in itertools.count(1):
            if self._board.has(keys):
                break
            if (over := time.monotonic() > until) or looks % 50 == 0:
                self._check_sizes(keys)
                late = [rank for rank, key in enumerate(keys) if not self._board.has([key])]
                told = next(filter(None, (self._board.told(self._meeting, rank) for rank in late)), None)
                if told or (over and late):
                    raise Lost(told or f"{self._names(late)} of {self.size} {LATE} {JOIN_S:g} s")
            time.sleep(0.02)
        self._check_sizes(keys)
        return [str(self._said(key)[0]) for key in keys]

    def _said(self, key: str) -> list[object]:
        found = self._board.get(key)
        return found if isinstance(found, list) and len(found) == 2 else ["", None]

    def _check_sizes(self, keys: list[str]) -> None:
        """MeasurementError where ranks of another start are here, which count on more of them, or on fewer."""
        for rank, key in enumerate(keys):
            theirs = self._said(key)[1]
            if theirs not in (None, self.size):
                raise MeasurementError(
                    f"rank {rank} was started as one of {theirs}, rank {self.rank} as one of {self.size}"
                )

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        self._met += 1
        self._board.set(f"{self._meeting}/met/{self.rank}", self._met)
        try:
            yield
        except RuntimeError as error:
            raise Lost(str(error)) from error

    def _behind(self) -> list[int]:
        """Ranks that have not come to where this one is."""
        met = [self._board.get(f"{self._meeting}/met/{rank}") or 0 for rank in range(self.size)]
        return [rank for rank, times in enumerate(met) if isinstance(times, int) and times < self._met]

    def _name(self, rank: int) -> str:
        return self._role.name(self._hosts[rank], rank)

    def _names(self, ranks: list[int]) -> str:
        named = [self._name(rank) for rank in ranks]
        return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def _gather(mine: bytes, size: int, length: int = _LENGTH_BYTES + _PAGE_BYTES) -> list[bytes]:
    """What all ranks give, each of at most `length` bytes and filled up to it."""
    padded = torch.frombuffer(bytearray(mine.ljust(length, b"\0")), dtype=torch.uint8)
    theirs = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(theirs, padded)
    return [text.numpy().tobytes() for text in theirs]


def _fate(text: str) -> str:
    return "is gone" if _GONE.search(text) else f"{LATE} {MEET_S:g} s"


def main() -> int:
    """Entry of one rank's process; 0 when every case of the job was told. Else the last line it prints says why."""
    faulthandler.enable()
    role = torchrun.role()
    assert role is not None, "started without a role"
    events, meeting = int(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else None
    with os.fdopen(os.dup(events), "wb", buffering=0) as out:
        os.dup2(2, 1)  # whatever a library prints goes to the log
        if events > 2:
            os.close(events)

        def say(event: msgspec.Struct) -> None:
            if role.rank == 0:
                out.write(msgspec.json.encode(event) + b"\n")

        part = _Part(role, meeting)
        try:
            part.take(say)
        except BrokenPipeError:
            return OWN  # The parent is gone: there is nobody left to measure for.
        except Exception as error:
            traceback.print_exc()
            reason, code = part.why(error)
            if meeting is None:  # nobody else speaks for the ranks
                say(Failed(reason=reason))
            os.write(2, f"{reason}\n".encode(errors="replace"))
            return code
    return 0


class _Part:
    """What one rank does in a job."""

    def __init__(self, role: Role, meeting: str | None) -> None:
        self._role, self._meeting = role, meeting
        self._group: TorchGroup | None = None

    def take(self, say: Callable[[msgspec.Struct], None]) -> None:
        """Measure the job with the other ranks, saying each event."""
        role, meeting = self._role, self._meeting
        asked = sys.stdin.buffer.read() if role.rank == 0 else b""
        board = Board.reach(role, limit_s=JOIN_S)
        if meeting is None:
            meeting = uuid.uuid4().hex
            board.announce(Now(meeting=meeting, environment=JOBS.decode(asked).environment))
        self._group = group = TorchGroup(role, board, meeting)
        job = JOBS.decode(group.share(asked)[0])
        group.use(job.device)
        worker.run_job(job, say, group=group)
        group.meet()
        group.close()

    def why(self, error: Exception) -> tuple[str, int]:
        """The reason in one line, and the exit code that says whose it is."""
        group = self._group
        another = group.lost(error) if group else str(error) if isinstance(error, Lost) else None
        reason = " ".join((another or own(error, self._role)).split())
        if group:
            group.tell(reason, mine=another is None)
        return reason, OWN if another is None else ANOTHERS


def own(error: BaseException, role: Role) -> str:
    """What went wrong here, in one line. An error of this package names the rank, where it is one rank's."""
    if isinstance(error, OverlapError):
        return str(error)
    return f"{role.name(socket.gethostname())}: {one_line(error)}"


if __name__ == "__main__":
    # A rank that failed must not wait in destructors for collectives that never end.
    if code := main():
        os._exit(code)
