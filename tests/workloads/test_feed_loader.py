"""The loader's workers: what they give, what is said when one ends, and that none outlives the loader."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from feeds import (
    CustomCollate,
    Failing,
    Killed,
    PinningCollate,
    Slow,
    Stuck,
    UsesCuda,
    case_of,
    profile_of,
    same,
)

from harness.backends import get_backend
from harness.errors import MeasurementError, Skip
from harness.workloads import feed_loader
from harness.workloads.feed_batch import fields, unpinned
from harness.workloads.feed_data import Collate, FeedData
from harness.workloads.feed_loader import Loader


class Opened:
    """A loader on small data, and what it should give."""

    def __init__(self, dataset: Any = None, collate: Any = Collate, **options: Any) -> None:
        given = {"dataset": dataset} if dataset else {}
        self.data = FeedData(case_of(), profile_of(), collate=collate, **given)
        self.picks = iter(self.data.batches)
        base = {
            "workers": 2,
            "prefetch": 2,
            "persistent": True,
            "start": "fork",
            "pinned": False,
            "timeout_s": 10.0,
        }
        self.loader = Loader(self.data.dataset, self.data.collate, iter(self.data.batches), **base | options)

    def take(self, count: int) -> int:
        """So many batches, each of which must be the next one; how many were."""
        for _ in range(count):
            assert same(fields(self.loader.next()), self.data.reference(next(self.picks)))
        return count

    def close(self) -> None:
        self.loader.close()
        self.data.close()


@pytest.fixture
def opened() -> Iterator[Any]:
    """Makes loaders, closes them, and sees that nothing of them is left."""
    made: list[Opened] = []

    def make(*args: Any, **options: Any) -> Opened:
        made.append(Opened(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert multiprocessing.active_children() == []


def go_on(here: Opened) -> None:
    """Until something is raised, or for a good while; waiting in turns for a batch and for idle workers."""
    for _ in range(50):
        here.loader.next()
        here.loader.settle()


def busy_while_one_dies(victim: int) -> None:
    os.kill(victim, signal.SIGKILL)
    time.sleep(5)


def workers() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 0},
        {"workers": 3, "prefetch": 4},
        {"persistent": False},
        {"start": "spawn"},
        {"start": "forkserver", "persistent": False},
    ],
    ids=str,
)
def test_passes_are_one_stream_whatever_was_made_ahead(opened: Any, options: dict[str, Any]) -> None:
    here = opened(**options)
    for _ in range(2):
        here.loader.begin(3)
        assert here.take(3) == 3
        here.loader.finish()
    here.loader.begin()
    assert here.take(10) == 10, "over the ends of epochs"


def test_workers_live_on_over_passes_only_where_they_should(opened: Any) -> None:
    for persistent in (True, False):
        here = opened(persistent=persistent)
        seen = []
        for _ in range(2):
            here.loader.begin(4)
            here.take(1)
            seen.append(workers())
            here.take(3)
            here.loader.finish()
        assert len(seen[0]) == len(seen[1]) == 2
        assert (seen[0] == seen[1]) == persistent
        here.close()


def test_settled_workers_have_made_all_they_may_and_no_more(opened: Any) -> None:
    here = opened(Slow, workers=2, prefetch=3)
    here.loader.begin()
    here.take(1)
    here.loader.settle()
    began = time.perf_counter()
    here.take(6)  # the six that were made ahead, each of which takes 20 ms to make
    assert time.perf_counter() - began < 0.06
    here.loader.settle()


class Pinning:
    """Counts as a queue does behind a thread that pins one batch after another; `left` looks until all are there."""

    def __init__(self, iterator: Any, left: int) -> None:
        self._iterator, self.left = iterator, left

    def qsize(self) -> int:
        self.left -= 1
        return int(self._iterator._tasks_outstanding) - max(0, self.left)


def test_what_is_ahead_counts_samples_of_batches_that_are_being_made(opened: Any) -> None:
    """A worker makes two batches of four samples, 5 ms each, and no more before one is taken."""
    here = opened(Slow, workers=1)
    here.loader.begin()
    seen = []
    until = time.monotonic() + 5
    while (ahead := here.loader.ahead()) < 2 and time.monotonic() < until:
        seen.append(ahead)
        time.sleep(5e-4)
    assert seen == sorted(seen)
    assert any(0 < ahead % 1 < 1 for ahead in seen), "quarters of a batch"
    here.loader.settle()
    assert here.loader.ahead() == 2.0
    here.take(1)
    assert 1.0 <= here.loader.ahead() <= 2.0
    alone = opened(workers=0)
    alone.loader.begin()
    alone.take(3)
    assert alone.loader.ahead() == 0.0


def test_a_socket_to_a_worker_that_is_gone_is_closed_when_its_end_is_told(opened: Any) -> None:
    """torch raises wherever the main thread is, such as between the opening of a socket and what would close it."""
    here = opened(workers=1)
    here.loader.begin()
    here.take(1)
    pid = int(here.loader._tally[0, 2])
    descriptors = []

    def fetch() -> None:
        link = socket.socket(socket.AF_UNIX)
        descriptors.append(link.fileno())
        raise RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: Killed. ")

    with pytest.raises(MeasurementError, match="was killed by SIGKILL"), here.loader.telling():
        fetch()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_loader_is_settled_when_all_is_pinned_too(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that pins takes turns with this one: beside it a step on a cached batch would take longer."""
    here = opened(workers=2, prefetch=2)
    here.loader.begin()
    here.take(1)
    with monkeypatch.context() as patch:
        queue = Pinning(here.loader._iterator, left=20)
        patch.setattr(here.loader._iterator, "_pin_memory_thread", object(), raising=False)
        patch.setattr(here.loader._iterator, "_data_queue", queue)
        here.loader.settle()
        assert queue.left <= 0
    here.take(5)


class Collecting(Slow):
    """Says whether garbage is collected where samples are made."""

    def __getitem__(self, pick: Any) -> Any:
        assert gc.isenabled()
        return super().__getitem__(pick)


def test_workers_collect_garbage_though_the_loop_does_not_while_it_measures(opened: Any) -> None:
    gc.disable()
    try:
        here = opened(Collecting)
        here.loader.begin()
        assert here.take(2) == 2, "a sample that finds it off is an error of its worker"
    finally:
        gc.enable()


def test_memory_of_a_worker_is_its_own(opened: Any) -> None:
    def size(start: str) -> float:
        here = opened(start=start)
        here.loader.begin()
        here.take(3)
        found = here.loader.worker_bytes()
        assert found is not None
        return float(found)

    assert 1 << 20 < size("fork") < 100 << 20
    assert size("spawn") > 3 * size("fork")  # torch, imported anew
    assert opened(workers=0).loader.worker_bytes() is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_named_with_its_signal_at_once(opened: Any, workers: int) -> None:
    here = opened(Killed, workers=workers)
    here.loader.begin()
    began = time.monotonic()
    with pytest.raises(
        MeasurementError, match=rf"^loader worker [01] of {workers} was killed by SIGKILL \(out of"
    ):
        go_on(here)
    assert time.monotonic() - began < 8
    closing = time.monotonic()
    here.close()
    assert time.monotonic() - closing < 8
    assert workers_left() == []


def workers_left() -> list[Any]:
    return list(multiprocessing.active_children())


def test_a_worker_killed_while_nobody_asks_is_told_too(opened: Any) -> None:
    here = opened(workers=2)
    here.loader.begin()
    here.take(2)
    victim = min(workers())
    # torch's workers end well when they are asked to, and so without a word of theirs.
    os.kill(victim, signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(MeasurementError, match=r"^loader worker \d of 2 ended by itself with exit code 0$"):
        go_on(here)
    assert time.monotonic() - began < 5


def test_a_worker_that_dies_while_this_process_does_other_things_is_told_by_the_surroundings(
    opened: Any,
) -> None:
    here = opened(workers=2)
    here.loader.begin()
    here.take(2)
    here.loader.settle()
    victim = max(workers())
    with pytest.raises(MeasurementError, match=r"was killed by SIGKILL"), here.loader.telling():
        busy_while_one_dies(victim)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_dataset_is_told_by_its_own_words(opened: Any, workers: int) -> None:
    here = opened(Failing, workers=workers)
    here.loader.begin()
    here.take(6)
    began = time.monotonic()
    with pytest.raises(MeasurementError, match=r"^loader worker \d of \d: ValueError: a broken file$"):
        go_on(here)
    assert time.monotonic() - began < 5


def test_without_workers_an_error_is_the_datasets_own(opened: Any) -> None:
    here = opened(Failing, workers=0)
    here.loader.begin()
    here.take(6)
    with pytest.raises(ValueError, match="a broken file"):
        here.loader.next()


def test_a_loader_that_hangs_has_a_limit_and_an_end(opened: Any) -> None:
    here = opened(Stuck, timeout_s=1.0)
    here.loader.begin()
    with pytest.raises(MeasurementError, match=r"^the loader gave no batch for 1 s$"):
        here.take(10)
    with pytest.raises(MeasurementError, match=r"^the loader made no batch for 1 s$"):
        here.loader.settle()
    closing = time.monotonic()
    here.close()
    assert time.monotonic() - closing < 10
    assert workers_left() == []


def test_a_worker_that_stops_with_batches_made_has_a_limit_too(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop knows of a batch, and fetches its memory from the worker that made it: torch waits without a limit."""
    monkeypatch.setattr(feed_loader, "END_S", 0.5)
    handler, (outer, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    here = opened(workers=1, timeout_s=1.0)
    here.loader.begin()
    here.loader.settle()
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    go_on_after = threading.Timer(8, os.kill, (worker.pid, signal.SIGCONT))
    go_on_after.start()
    try:
        with pytest.raises(MeasurementError, match=r"^the loader gave no batch for 1 s$"):
            here.loader.next()
        here.close()
        assert workers_left() == []
    finally:
        go_on_after.cancel()
    assert signal.getsignal(signal.SIGALRM) is handler
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert max(0.0, outer - 10) <= left <= outer, "the limit of this test is as it was"


def test_a_loop_that_makes_its_batches_itself_has_a_limit_too(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_loader, "END_S", 0.1)
    here = opened(Stuck, workers=0, timeout_s=0.4)
    here.loader.begin()
    with pytest.raises(MeasurementError, match=r"^the loader gave no batch for 0\.4 s$"):
        here.take(10)


def test_a_start_method_that_is_not_there_is_a_reason_to_skip(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(Skip, match="cannot start a process by fork"):
        opened()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("collate", "found"),
    [
        (Collate, []),
        (CustomCollate, ["pixels in PictureBatch", "index in PictureBatch"]),
        (PinningCollate, []),
    ],
)
def test_a_type_that_the_loader_does_not_know_stays_unpinned_and_is_reported(
    opened: Any, collate: Any, found: list[str]
) -> None:
    torch.cuda.init()
    here = opened(collate=collate, pinned=True)
    here.loader.begin()
    batch = here.loader.next()
    assert unpinned(batch) == found
    assert same(fields(batch), here.data.reference(next(here.picks)))


@pytest.mark.gpu
def test_cuda_in_a_forked_worker_is_told_as_what_it_is_and_works_in_a_spawned_one(opened: Any) -> None:
    torch.zeros(1, device="cuda")
    here = opened(UsesCuda, start="fork")
    here.loader.begin()
    with pytest.raises(
        MeasurementError, match=r"^loader worker \d of 2: RuntimeError: Cannot re-initialize CUDA in"
    ):
        here.loader.next()
    here.close()
    here = opened(UsesCuda, start="spawn", workers=1, timeout_s=60.0)
    here.loader.begin()
    here.take(2)


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_process_that_uses_cuda_do_their_work(opened: Any, start: str) -> None:
    backend = get_backend("cuda")
    here = opened(start=start, pinned=True, timeout_s=60.0)
    here.loader.begin()
    assert here.take(8) == 8
    here.close()
    backend.close()
