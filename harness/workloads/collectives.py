"""All-reduces that do not hold up who starts them, and the clock that says when they end.

A collective is started with `all_reduce(buffer, done)`. The future it gives completes when the buffer may be read, and
`done` is called when the all-reduce has ended: `done(None)` means now, `done(stream)` when the stream gets there.
With last=False more are to come, and futures may stay open until the last one is started.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
import torch.distributed as dist

Future = Any  # torch.futures.Future[torch.Tensor]
Done = Callable[[Any], None]


class Timeline(Protocol):
    """Marks of one sample, all on one clock."""

    def begin(self) -> None:
        """Forget the marks of the last sample; what follows is timed from here."""

    def mark(self, name: Hashable, stream: Any = None) -> None:
        """On cuda when `stream`, or the stream that computes, gets there; on the cpu now. From any thread."""

    def ms(self, name: Hashable) -> float:
        """From `begin` to the mark, ms. The device must have got there; KeyError for none in this sample."""

    def synchronize(self) -> None:
        """Block the host until everything issued is done."""


class HostTimeline:
    """The clock of the host, for work that the host itself does."""

    def __init__(self) -> None:
        self._marks: dict[Hashable, float] = {}
        self._start = 0.0

    def begin(self) -> None:
        self._marks.clear()
        self._start = time.perf_counter()

    def mark(self, name: Hashable, stream: Any = None) -> None:
        self._marks[name] = time.perf_counter()

    def ms(self, name: Hashable) -> float:
        return (self._marks[name] - self._start) * 1e3

    def synchronize(self) -> None:
        pass


class CudaTimeline:
    """CUDA events, kept from sample to sample. main: the stream that computes."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._start = _event()
        self._events: dict[Hashable, torch.cuda.Event] = {}
        self._marked: set[Hashable] = set()

    def begin(self) -> None:
        self._marked.clear()
        self._start.record(self._main)

    def mark(self, name: Hashable, stream: Any = None) -> None:
        event = self._events.get(name)
        if event is None:
            event = self._events[name] = _event()
        event.record(self._main if stream is None else stream)
        self._marked.add(name)

    def ms(self, name: Hashable) -> float:
        if name not in self._marked:
            raise KeyError(name)
        return float(self._start.elapsed_time(self._events[name]))

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@functools.cache
def _watch(device: torch.device) -> torch.cuda.Stream:
    """A stream that only waits for collectives. One for all cases of a process: streams take turns on the few queues
    into a device, and what waits at the head of a queue holds up whatever shares it; in each case the same."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Collective(Protocol):
    """How buckets are reduced. averages: to the mean (else to the sum, and who starts it divides before). carries: the
    ranks' values really meet; else a buffer comes back as it was. in_order: one at a time, as they were started."""

    @property
    def averages(self) -> bool: ...

    @property
    def in_order(self) -> bool: ...

    @property
    def carries(self) -> bool: ...

    def all_reduce(self, buffer: torch.Tensor, done: Done, *, last: bool = True) -> Future: ...


class NcclCollective:
    """Of CUDA tensors by NCCL; the host never waits.

    What waits for a collective is issued behind the last one only. A wait holds up whatever shares its queue into the
    device (with CUDA_DEVICE_MAX_CONNECTIONS=1 everything), and before it the rest of the backward is to come.
    """

    averages, carries, in_order = True, True, True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._watch = _watch(device)
        self._open: list[tuple[torch.Tensor, Done, Future]] = []

    def all_reduce(self, buffer: torch.Tensor, done: Done, *, last: bool = True) -> Future:
        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
        future: Future = torch.futures.Future(devices=[self._device])
        self._open.append((buffer, done, future))
        if last:
            # A stream that does nothing else: what it waits for has ended when it goes on, and who waits for the
            # future waits for what stands on it now. They run in order, so all have ended with this one.
            with torch.cuda.stream(self._watch):
                work.wait()
                for ended, mark, waited in self._open:
                    mark(self._watch)
                    waited.set_result(ended)
            self._open.clear()
        return future


class GlooCollective:
    """Of host tensors by Gloo, whose own threads do the work, two collectives at a time."""

    averages, carries, in_order = False, True, False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, done: Done, *, last: bool = True) -> Future:
        def landed(future: Future) -> torch.Tensor:
            done(None)
            return future.value()[0]  # type: ignore[no-any-return]

        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        return work.get_future().then(landed)


class GlooCudaCollective:
    """Of CUDA tensors by Gloo, which takes them through host memory.

    Gloo's thread completes its future with the copy back only issued, on a stream of its own. `Work.wait` would block
    the host; `Work.synchronize`, from the future's callback, makes one stream wait for the copy instead.
    """

    averages, carries, in_order = False, True, False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._watch = _watch(device)

    def all_reduce(self, buffer: torch.Tensor, done: Done, *, last: bool = True) -> Future:
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: Future = torch.futures.Future(devices=[self._device])

        def landed(reduced: Future) -> None:
            try:
                reduced.value()  # raises what went wrong
                # The device first: going back from a stream of it to this thread's own device would open that one too.
                with torch.cuda.device(self._device), torch.cuda.stream(self._watch):
                    work.synchronize()
                    done(self._watch)
                    future.set_result(buffer)
            except Exception as error:
                future.set_exception(error)

        work.get_future().add_done_callback(landed)
        return future


class Scripted:
    """A link of known cost: alpha_ms + beta_ms_per_byte * bytes, one buffer after another, off-thread and asleep.

    before: the collective that is started when that time is over; without one nothing is carried.
    """

    in_order = True

    def __init__(self, alpha_ms: float, beta_ms_per_byte: float, *, before: Collective | None = None) -> None:
        self._alpha, self._beta, self._before = alpha_ms, beta_ms_per_byte, before
        self.averages = before is None or before.averages
        self.carries = before is not None and before.carries
        self._work: queue.SimpleQueue[tuple[float, torch.Tensor, Done, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="overlap-link", daemon=True)
        self._thread.start()

    def cost_ms(self, size: int) -> float:
        """Of a buffer of so many bytes on an idle link."""
        return self._alpha + self._beta * size

    def all_reduce(self, buffer: torch.Tensor, done: Done, *, last: bool = True) -> Future:
        future: Future = torch.futures.Future()
        self._work.put((time.perf_counter(), buffer, done, future))
        return future

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        free = 0.0
        while (asked := self._work.get()) is not None:
            issued, buffer, done, future = asked
            # From when it should have been free, not from when this thread noticed: its delays do not add up.
            free = max(issued, free) + self.cost_ms(buffer.numel() * buffer.element_size()) * 1e-3
            while (left := free - time.perf_counter()) > 0:
                time.sleep(left)
            try:
                if self._before is None:
                    done(None)
                else:
                    self._before.all_reduce(buffer, done).wait()
                future.set_result(buffer)
            except Exception as error:
                future.set_exception(error)


def completed(buffer: torch.Tensor) -> Future:
    """A future that is done: nothing was to be reduced."""
    future: Future = (
        torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()
    )
    future.set_result(buffer)
    return future


def real_collective(backend: str, group: dist.ProcessGroup, device: torch.device) -> Collective:
    """That of `nccl` or `gloo` for tensors on the device."""
    if backend == "nccl":
        return NcclCollective(group, device)
    return GlooCudaCollective(group, device) if device.type == "cuda" else GlooCollective(group)
