"""In which order samples come: shuffled anew each epoch, shared out over ranks, taken up again where a run stopped.

The order is a function of (seed, epoch) alone. Workers, prefetching and start methods have no part in it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from harness.errors import UsageError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pick:
    """What a dataset is asked for. It carries its epoch, since workers that live on never hear of a new one.

    row: the row of its batch that a packed text goes to.
    """

    epoch: int
    index: int
    row: int = 0


class Position(NamedTuple):
    """How far one rank has come: `taken` samples of its share of `epoch`."""

    epoch: int
    taken: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of one rank, epoch by epoch.

    Every epoch is one permutation of all samples, and rank r has every `ranks`-th of it from the r-th on: shares are
    disjoint, and together they are complete. Nothing is padded, so they differ by one sample where `ranks` does not
    divide `samples`; with drop_last they are alike, and what is over, other samples each epoch, is left out.
    """

    samples: int
    seed: int
    rank: int = 0
    ranks: int = 1
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise UsageError(f"rank: {self.rank} of {self.ranks} ranks; must be 0 to {self.ranks - 1}")
        if self.seed < 0:
            raise UsageError(f"seed: {self.seed}; must be 0 or more")
        if not len(self):
            raise UsageError(
                f"samples: {self.samples} for {self.ranks} ranks leave rank {self.rank} without any"
            )

    def __len__(self) -> int:
        """Samples of this rank in an epoch; the same in all epochs."""
        if self.drop_last:
            return self.samples // self.ranks
        return max(0, -(-(self.samples - self.rank) // self.ranks))

    def epoch(self, number: int) -> Indices:
        """Indices of this rank's samples in that epoch, in order; shape (len(self),)."""
        return self._all(number)[self.rank :: self.ranks][: len(self)]

    def position(self, taken: int) -> Position:
        """Where this rank is when it has taken so many samples since the start of epoch 0."""
        return Position(*divmod(taken, len(self)))

    def resume(self, position: Position) -> Iterator[Pick]:
        """This rank's samples from there on, without end.

        It costs one permutation of the epoch (about 20 ms and 8 MB for a million samples), wherever in it the position
        is: nothing that was taken before is gone through.
        """
        epoch, taken = position
        if epoch < 0 or not 0 <= taken <= len(self):
            raise UsageError(f"position: epoch {epoch}, {taken} taken of {len(self)}; no such place")
        for number in itertools.count(epoch):
            share = self.epoch(number)[taken:]
            taken = 0
            for index in share:
                yield Pick(number, int(index))

    def _all(self, number: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.samples)
        # numpy keeps the streams of RandomState for ever, those of Generator only until there are better ones.
        twister = np.random.MT19937(np.random.SeedSequence([self.seed, number]))
        return np.random.RandomState(twister).permutation(self.samples)


class Arrange(Protocol):
    """Makes batches out of the samples of a window."""

    @property
    def name(self) -> str:
        """What tells its batches from those of another; kept in a checkpoint."""

    def __call__(self, picks: Sequence[Pick], number: int) -> list[list[Pick]]:
        """The batches of the window of that number, as many as a window has."""


class EndlessBatches:
    """A batch sampler for DataLoader, for which the epochs of an order are one stream: no batch is short.

    size: samples in a batch, or their mean where `arrange` makes batches. window: batches that are made together, out
    of window * size samples. start: batches of the stream to leave out. limit: batches of one pass; without it, passes
    do not end. Every pass begins at `start`.
    """

    def __init__(
        self,
        order: Order,
        size: int,
        *,
        window: int = 1,
        arrange: Arrange | None = None,
        start: int = 0,
        limit: int | None = None,
    ) -> None:
        if size < 1 or window < 1 or start < 0:
            raise UsageError(f"batches: size {size}, window {window}, start {start}; must be 1, 1, 0 or more")
        self.order, self.size, self.start = order, size, start
        self._window, self._arrange, self._limit = window, arrange, limit

    def __iter__(self) -> Iterator[list[Pick]]:
        return itertools.islice(self._stream(), self._limit)

    def state(self, taken: int) -> dict[str, Any]:
        """What a checkpoint keeps so that `resume` goes on behind the `taken` batches that were used since `start`.

        What a loader has asked this sampler for is no measure of that: it is ahead by what workers have prefetched,
        and those batches would be lost. The state is a few numbers, the same for all ranks.
        """
        return {"batches": self.start + taken} | self._identity()

    def resume(self, state: dict[str, Any]) -> "EndlessBatches":
        """The batches that follow those of `state`; UsageError if it was saved of another order.

        It costs what Order.resume does, and the batches of at most one window.
        """
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise UsageError(f"{name}: the order was saved with {state.get(name)}, and here it is {here}")
        return EndlessBatches(
            self.order,
            self.size,
            window=self._window,
            arrange=self._arrange,
            start=int(state["batches"]),
            limit=self._limit,
        )

    def _identity(self) -> dict[str, Any]:
        order = self.order
        return {
            "samples": order.samples,
            "seed": order.seed,
            "ranks": order.ranks,
            "shuffle": order.shuffle,
            "drop_last": order.drop_last,
            "size": self.size,
            "window": self._window,
            "batching": None if self._arrange is None else self._arrange.name,
        }

    def _stream(self) -> Iterator[list[Pick]]:
        windows, used = divmod(self.start, self._window)
        count = self._window * self.size
        picks = self.order.resume(self.order.position(windows * count))
        for number in itertools.count(windows):
            batches = self._batches(list(itertools.islice(picks, count)), number)
            yield from batches[used:]
            used = 0

    def _batches(self, picks: list[Pick], number: int) -> list[list[Pick]]:
        if self._arrange is not None:
            return self._arrange(picks, number)
        return [picks[low : low + self.size] for low in range(0, len(picks), self.size)]
