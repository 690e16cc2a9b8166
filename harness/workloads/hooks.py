"""DDP's buckets: the comm hook that sees them, a first cap of their own, and which ones to expect."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from harness.workloads.collectives import Collective, Future, Timeline, completed

# Where torch looks for the first cap when it was given none.
_DEFAULT_FIRST = "_DEFAULT_FIRST_BUCKET_BYTES"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A gradient in its bucket: which parameter's, its first element there, and how many it has."""

    parameter: int
    first: int
    count: int


class BucketHook:
    """The one comm hook of all arms, and the replay of what it saw.

    It runs in the backward's thread and holds the interpreter meanwhile: for each bucket it divides (where the
    collective does not), marks ("ready", i) and starts the all-reduce, which marks ("done", i).

    reduce: whether this step's buckets are reduced; else each is given back as it is. leave_out: `wait` gives it back
    at once although its all-reduce has only started, a fault on purpose. buffers: of this step, in order. started:
    what was started in this step.
    """

    def __init__(
        self,
        collective: Collective,
        timeline: Timeline,
        size: int,
        parameters: Sequence[torch.Tensor],
        leave_out: str,
    ) -> None:
        self.reduce = False
        self.buffers: list[torch.Tensor] = []
        self.started: list[Future] = []
        self.layout: list[list[Piece]] | None = None
        self._collective, self._timeline, self._size = collective, timeline, size
        self._index = {parameter: at for at, parameter in enumerate(parameters)}
        self._leave_out = leave_out
        self._noting = False

    def begin(self, *, layout: bool = False) -> None:
        """Forget the last step. layout: note in this one where each gradient lies, for `gradients`."""
        self.reduce = False
        self.buffers.clear()
        self.started.clear()
        if layout:
            self.layout = []
        self._noting = layout

    def ready(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's comm hook, called for every bucket in order."""
        buffer, at = bucket.buffer(), len(self.buffers)
        if not self._collective.averages:
            buffer.div_(self._size)
        self.buffers.append(buffer)
        self._timeline.mark(("ready", at))  # behind the division, which is compute in every arm
        if self._noting and self.layout is not None:
            self.layout.append(
                [
                    Piece(
                        self._index[parameter],
                        int(view.storage_offset() - buffer.storage_offset()),
                        view.numel(),
                    )
                    for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
                ]
            )
        future: torch.futures.Future[torch.Tensor] = completed(buffer)
        if self.reduce:
            started = self.start(buffer, at, last=bucket.is_last())
            future = future if self._leave_out == "wait" else started
        return future

    def start(self, buffer: torch.Tensor, at: int, *, last: bool = True) -> Future:
        """last: nothing of this step is issued behind it."""
        ended = functools.partial(self._timeline.mark, ("done", at))
        future = self._collective.all_reduce(buffer, ended, last=last)
        self.started.append(future)
        return future

    def replay(self, buffers: Sequence[torch.Tensor]) -> None:
        """All-reduce the buffers in order, all started before the first is waited for, as in a backward of no length;
        the computing stream, or the host on the cpu, goes on when the last has ended."""
        for future in [self.start(buffer, at) for at, buffer in enumerate(buffers)]:
            future.wait()

    @property
    def pieces(self) -> list[Piece]:
        """Every gradient in the order it got ready, from the last step that noted the layout."""
        return [piece for pieces in self.layout or [] for piece in pieces]

    def gradients(self) -> list[torch.Tensor]:
        """What this step's buckets hold now, by parameter."""
        found = [
            (piece.parameter, buffer[piece.first : piece.first + piece.count])
            for buffer, pieces in zip(self.buffers, self.layout or [], strict=False)
            for piece in pieces
        ]
        return [view for _, view in sorted(found, key=lambda each: each[0])]


class BucketedDDP(DistributedDataParallel):
    """DistributedDataParallel with a cap for the first bucket, bytes, besides that of the others.

    torch takes a first cap from nobody: it is 1 MiB where no cap is given, else that of the others (pytorch#61353,
    pytorch#121640). It is set where the reducer is made; whether it was heard is for `expected_buckets` to say.
    """

    def __init__(self, module: torch.nn.Module, *, bucket: int, first: int, **options: Any) -> None:
        self._first_cap = first
        super().__init__(module, bucket_cap_mb=bucket / (1 << 20), **options)

    def _ddp_init_helper(self, *args: Any, **options: Any) -> None:
        config = getattr(self, "_bucket_config", None)
        if config is not None:  # newer than torch 2.11
            self._bucket_config = dataclasses.replace(config, first_bucket_bytes_cap=self._first_cap)
            super()._ddp_init_helper(*args, **options)  # type: ignore[no-untyped-call]
            return
        self.bucket_bytes_cap_default = True  # as if no cap had been given
        with first_cap(self._first_cap):
            super()._ddp_init_helper(*args, **options)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def first_cap(size: int) -> Iterator[None]:
    """Bytes of the first bucket for whoever is given no cap for it: DDP up to torch 2.11, and torch.compile where it
    splits the graph of a DDP model at its buckets."""
    before = getattr(dist, _DEFAULT_FIRST)
    setattr(dist, _DEFAULT_FIRST, size)
    try:
        yield
    finally:
        setattr(dist, _DEFAULT_FIRST, before)


def expected_buckets(sizes: Sequence[int], *, first: int, bucket: int) -> list[int]:
    """Bytes of the buckets that gradients of these bytes, in the order they get ready, are to fill: a bucket is closed
    by the gradient that takes it to its cap, and none is split."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= (bucket if buckets else first):
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets
