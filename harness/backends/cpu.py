"""The cpu backend: streams are threads, copies are memory copies, GEMMs run on the remaining cores.

The same contract as CUDA's, so that the same pipeline runs and every check works, on any machine. Its numbers
say how well a copy thread and compute threads share one CPU and its memory; they are never comparable with a
GPU's.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from harness import host
from harness.backends.base import GATE_LIMIT_S
from harness.backends.tensors import DTYPES, gemm
from harness.errors import MeasurementError

# Rows of one product and compute thread.
BLOCK_ROWS = 512


class _Stream:
    """A thread that runs what is put to it in order."""

    def __init__(self, name: str, threads: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(threads,), name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(GATE_LIMIT_S)

    def _run(self, threads: int) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                try:
                    work()
                except (
                    BaseException
                ) as error:  # Kept for `synchronize`; the stream goes on so that nothing hangs.
                    self.error = self.error or error


@dataclass
class _Ticket:
    """One record of an event: waits bind to the ticket that was the latest when they were issued."""

    reached: threading.Event = field(default_factory=threading.Event)
    at: float = 0.0


@dataclass
class _Event:
    ticket: _Ticket | None = None


class CpuBackend:
    """Real threads behind the contract of `base.Backend`."""

    kind = "cpu"

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        if cores < 2:
            raise MeasurementError(
                "cpu backend: needs 2 cores, one to copy and one to compute; this process has 1"
            )
        # `side` first: MKL keeps one number of threads for the process, and the last caller sets it.
        self.side = _Stream("overlap-copy", 1)
        self.main = _Stream("overlap-compute", cores - 1)
        self._block = BLOCK_ROWS * (cores - 1)
        self._gate = threading.Event()
        self._gate_expired = False
        self._drain()

    def unsupported(self, *, memory: str, gate: bool) -> str | None:
        if memory == "pinned":
            return "pinned memory has no meaning on the cpu backend: no device reads it"
        return None

    def host_tensor(self, rows: int, width: int, dtype: str, *, pinned: bool) -> torch.Tensor:
        return torch.empty(rows, width, dtype=DTYPES[dtype])

    def device_tensor(self, rows: int, width: int, dtype: str) -> torch.Tensor:
        return torch.empty(rows, width, dtype=DTYPES[dtype])

    def fill_normal(self, tensor: torch.Tensor, seed: int, scale: float = 1.0) -> None:
        tensor.normal_(0.0, scale, generator=torch.Generator().manual_seed(seed))

    def free_bytes(self) -> tuple[int | None, int | None]:
        return host.free_bytes(), host.free_bytes()

    def event(self) -> _Event:
        return _Event()

    def record(self, event: _Event, stream: _Stream) -> None:
        ticket = event.ticket = _Ticket()

        def reach() -> None:
            ticket.at = time.perf_counter()
            ticket.reached.set()

        stream.put(reach)

    def wait(self, stream: _Stream, event: _Event) -> None:
        if event.ticket is not None:
            stream.put(event.ticket.reached.wait)

    def pending(self, event: _Event) -> bool:
        return event.ticket is not None and not event.ticket.reached.is_set()

    def synchronize(self, event: _Event | None = None) -> None:
        if event is None:
            self._drain()
        elif event.ticket is not None:
            event.ticket.reached.wait()
        for stream in (self.main, self.side):
            if stream.error is not None:
                error, stream.error = stream.error, None
                raise MeasurementError(f"cpu backend: {type(error).__name__}: {error}") from error

    def _drain(self) -> None:
        for stream in (self.main, self.side):
            reached = threading.Event()
            stream.put(reached.set)
            reached.wait()

    def elapsed_ms(self, start: _Event, end: _Event) -> float:
        assert start.ticket is not None
        assert end.ticket is not None
        return (end.ticket.at - start.ticket.at) * 1e3

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: _Stream) -> None:
        stream.put(lambda: target.copy_(source))

    def gemm(self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor) -> None:
        self.main.put(lambda: self._products(x, weights, out))

    def _products(self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor) -> None:
        # In blocks of rows that stay in the cache: else one large product is slower, row for row, than many small
        # ones, and splitting a batch would seem to make its compute faster.
        for low in range(0, x.shape[0], self._block):
            rows = slice(low, low + self._block)
            gemm(x[rows], weights, out[rows])

    def spin(self, milliseconds: float, stream: _Stream) -> None:
        def sleep() -> None:
            # Sleeping, not spinning: a spin in Python would take the interpreter from the copy thread.
            end = time.perf_counter() + milliseconds * 1e-3
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left)

        stream.put(sleep)

    def close_gate(self) -> None:
        self._gate = gate = threading.Event()
        self._gate_expired = False

        def hold() -> None:
            self._gate_expired = not gate.wait(GATE_LIMIT_S)

        self.main.put(hold)

    def open_gate(self) -> bool:
        expired = self._gate_expired
        self._gate.set()
        return not expired

    def allocations(self) -> int:
        return 0

    def canary_us(self, launches: int = 1000) -> float:
        start = time.perf_counter()
        for _ in range(launches):
            self.main.put(_nothing)
        issued = time.perf_counter() - start
        self._drain()
        return issued / launches * 1e6

    def facts(self) -> dict[str, Any]:
        return {
            "torch": str(torch.__version__),
            "torch_git": torch.version.git_version,
            "threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        self._gate.set()
        self.main.close()
        self.side.close()


def _nothing() -> None:
    pass
