"""A DataLoader with its workers: what they are given, how far they are, why one ended, and their end.

Batches reach the loop as torch's own loader makes them, of whatever type the collate function gives.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from harness import files
from harness.errors import MeasurementError, Skip
from harness.workloads.feed_faults import BY_ITSELF, exit_words, unheard, worker_words
from harness.workloads.order import Pick

PROC = Path("/proc")

# For one batch. Where one of several workers hangs, the others' batches come first and each begins this time anew; all
# of it must be less than a process that measures may be silent (harness/child.py), or nobody would say who hangs.
TIMEOUT_S = 30.0

# For workers to end by themselves. One that waits for a lock of another that was killed never does.
END_S = 3.0

# Columns of the tally, which workers write and the loop reads: batches made so far, those that failed, the process,
# samples that were got, and those of them that are in batches.
MADE, FAILED, PROCESS, GOT, USED = range(5)

# What torch and Python say of things that a case asks for by its very axes.
_KNOWN = (r"This DataLoader will create", r"This process .* is multi-threaded, use of fork")


class _Passes:
    """What the loader is to ask for in each pass, out of one stream of batches."""

    def __init__(self, batches: Iterator[list[Pick]]) -> None:
        self._batches = batches
        self.limit: int | None = None

    def __iter__(self) -> Iterator[list[Pick]]:
        limit = self.limit
        while limit is None or limit > 0:
            limit = None if limit is None else limit - 1
            yield next(self._batches)


class _Watched(Dataset[Any]):
    """A dataset that counts its samples, and where it fails: the loop hears of it only when it comes to that batch."""

    def __init__(self, dataset: Any, tally: Tensor) -> None:
        self._dataset, self._tally = dataset, tally

    def __getitem__(self, key: Any) -> Any:
        with _watching(self._tally):
            sample = self._dataset[key]
        _count(self._tally, GOT)
        return sample


class _Counted:
    """A collate function that counts its batches, each worker its own."""

    def __init__(self, collate: Any, tally: Tensor) -> None:
        self._collate, self._tally = collate, tally

    def __call__(self, samples: Any) -> Any:
        with _watching(self._tally):
            made = self._collate(samples)
        _count(self._tally, USED, len(samples))
        _count(self._tally, MADE)
        return made


@contextlib.contextmanager
def _watching(tally: Tensor) -> Iterator[None]:
    try:
        yield
    except Exception:
        _count(tally, FAILED)
        raise


def _count(tally: Tensor, what: int, more: int = 1) -> None:
    here = get_worker_info()
    if here is not None:
        tally.numpy()[here.id, what] += more  # a sixth of the time that the tensor's own indexing takes


def _shared(*shape: int) -> Tensor:
    """Zeros, int64, that workers write and this process reads."""
    made: Any = torch.zeros(shape, dtype=torch.int64)
    made.share_memory_()
    return cast(Tensor, made)


def _begin_worker(tally: Tensor, number: int) -> None:
    gc.enable()  # off while samples are taken (harness/measure.py), and a fork would leave it so here alone
    tally[number, PROCESS] = os.getpid()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """torch's own watch sees no parent that was gone before it began, nor does it look while a sample is read."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


class Loader:
    """A DataLoader over one stream of batches, pass by pass.

    Skip where a start method is not to be had here. timeout_s: for one batch, with workers.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Any,
        batches: Iterator[list[Pick]],
        *,
        workers: int,
        prefetch: int,
        persistent: bool,
        start: str,
        pinned: bool,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if start not in multiprocessing.get_all_start_methods():
            raise Skip(f"this system cannot start a process by {start}")
        self._workers, self._prefetch, self._timeout_s = workers, prefetch, timeout_s
        self._tally = _shared(max(1, workers), 5)
        self._passes = _Passes(batches)
        self._iterator: Any = None
        self._children: list[Any] = []
        self._taken = 0
        if files.SCRATCH in os.environ:
            # For the sockets of a fork server, else in a folder of its own that stays where this process is killed.
            current: Any = multiprocessing.current_process()
            current._config.setdefault("tempdir", str(files.scratch()))
        options: dict[str, Any] = {}
        if workers:
            options = {
                "prefetch_factor": prefetch,
                "persistent_workers": persistent,
                "multiprocessing_context": start,
                "timeout": timeout_s,
                "worker_init_fn": functools.partial(_begin_worker, self._tally),
            }
        with _known():
            self._loader: Any = DataLoader(
                _Watched(dataset, self._tally),
                batch_sampler=self._passes,
                collate_fn=_Counted(collate, self._tally),
                num_workers=workers,
                pin_memory=pinned,
                **options,
            )

    def begin(self, limit: int | None = None) -> None:
        """Begin a pass of so many batches, or one without end; workers start, save those that live on."""
        self._passes.limit = limit
        self._children = [child for child in self._children if child.is_alive()]
        before = set(multiprocessing.active_children())
        with _known(), self.telling():
            try:
                self._iterator = iter(self._loader)
            finally:
                self._children += set(multiprocessing.active_children()) - before

    def next(self) -> Any:
        """The next batch of the pass. MeasurementError where a worker ended, failed, or took too long."""
        with self.telling(), in_time(self._timeout_s, f"the loader gave no batch for {self._timeout_s:g} s"):
            batch = next(self._iterator)
        self._taken += 1
        return batch

    def finish(self) -> None:
        """The end of a pass whose batches were all taken: workers that do not live on end here."""
        with self.telling():
            if next(self._iterator, None) is not None:
                raise MeasurementError("the loader gave a batch more than it was asked for")

    def settle(self) -> None:
        """Wait until the workers have made all that they may make ahead, a thread has pinned it where that is asked
        for, and neither has anything to do.

        A worker that failed is told of by `next`, and is not waited for.
        """
        ahead, until = self._taken + self._workers * self._prefetch, time.monotonic() + self._timeout_s
        with self.telling():
            while self._workers:
                made, failed, *_ = self._tally.sum(dim=0).tolist()
                if failed or (made >= ahead and self._handed_over()):
                    break
                if (said := self._ended()) is not None:
                    raise MeasurementError(said)
                if time.monotonic() > until:
                    raise MeasurementError(f"the loader made no batch for {self._timeout_s:g} s")
                time.sleep(1e-3)
            time.sleep(2e-3)  # a batch that is made is still to be handed over

    def _handed_over(self) -> bool:
        """Whether the thread that pins, if there is one, has brought the loop all that was asked for: it takes batches
        one by one, and holds the interpreter meanwhile."""
        iterator = self._iterator
        if not hasattr(iterator, "_pin_memory_thread"):
            return True
        return bool(iterator._data_queue.qsize() >= iterator._tasks_outstanding)

    def ahead(self) -> float:
        """Batches that are made and not taken, with the samples of those that are being made."""
        if not self._workers:
            return 0.0
        made, _, _, got, used = self._tally.sum(dim=0).tolist()
        return float(made - self._taken + (got - used) * made / max(1, used))

    def worker_bytes(self) -> float | None:
        """Memory of a worker that it shares with nobody, mean; None where the kernel does not say."""
        found = [_private_bytes(pid) for pid in self._tally[:, PROCESS].tolist() if self._workers]
        known = [size for size in found if size is not None]
        return sum(known) / len(known) if known else None

    def close(self) -> None:
        """End every worker that was started, whatever state it is in."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        children, self._children = self._children, []
        with unheard():
            killer = threading.Timer(END_S, lambda: [child.kill() for child in children])
            killer.start()
            try:
                # A pinned iterator whose workers live on is kept by torch until the process ends.
                if hasattr(iterator, "_shutdown_workers"):
                    iterator._shutdown_workers()
            finally:
                killer.cancel()
                for child in children:
                    if child.is_alive():
                        child.kill()
                    child.join()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """MeasurementError, in words of what a worker did, for what is raised because of it.

        torch raises that of a worker that was killed in whatever the main thread does just then.
        """
        try:
            yield
        except Exception as error:
            with unheard():
                said = worker_words(str(error), self._tally[:, PROCESS].tolist())
                # What a worker that is gone had to give may fail before torch hears of its end.
                if isinstance(error, OSError | EOFError) or (said and BY_ITSELF in said):
                    said = self._ended(patience_s=1.0) or said
            if said is None:
                raise
            _let_go(error)
            raise MeasurementError(said) from error

    def _ended(self, patience_s: float = 0.0) -> str | None:
        """Which worker has ended and how, in words. It is reaped, so that torch raises it no more."""
        until = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(RuntimeError):  # of torch, which heard of it just now, for the last time
                for child in self._children:
                    if child.exitcode is not None:
                        return exit_words(child.pid, child.exitcode, self._tally[:, PROCESS].tolist())
            if time.monotonic() >= until:
                return None
            time.sleep(5e-3)


@contextlib.contextmanager
def in_time(limit_s: float, said: str) -> Iterator[None]:
    """MeasurementError, as `said`, where it takes longer; a little is left to torch to say so itself.

    torch's own limit holds for the wait for a batch, but not while the loop fetches it from a worker, which may have
    stopped, nor where the loop makes its batches itself.
    """

    def late(*_: object) -> None:
        raise MeasurementError(said)

    outer, _ = signal.getitimer(signal.ITIMER_REAL)  # of a test's own limit; there is one timer for all
    began, limit = time.monotonic(), limit_s + END_S
    # Signals reach no other thread.
    if threading.current_thread() is not threading.main_thread() or 0 < outer <= limit:
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer - (time.monotonic() - began)))


def _let_go(error: BaseException) -> None:
    """Close what was being opened when torch raised: it does so wherever the main thread is, and a socket on its way to
    a worker that is gone stays open with the frame that was to close it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        traceback.clear_frames(error.__traceback__)


def _private_bytes(pid: int) -> int | None:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """Without the warnings that more workers than cores, or a fork beside threads, bring: workers run no CUDA, and
    torch starts its own threads anew in them."""
    with warnings.catch_warnings():
        for message in _KNOWN:
            warnings.filterwarnings("ignore", message=message)
        yield
