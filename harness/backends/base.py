"""What a backend offers a workload: two streams, events between them, copies, GEMMs, a spin and a gate.

Semantics are CUDA's. Work on one stream runs in the order it was issued; `wait(stream, event)` holds back what is
issued to `stream` afterwards until the event's latest `record` before that call has been reached, and is no wait
for an event never recorded. `main` is the stream that the program computes on (torch's current stream), `side`
another one. Tensors are torch tensors; this module does not need torch to say so.
"""

from typing import Any, Protocol

# torch.Tensor, without importing torch where only the contract is needed.
Tensor = Any
Stream = Any
Event = Any

# A gate left closed for this long opens by itself, so that no mistake hangs the device.
GATE_LIMIT_S = 10.0


class Backend(Protocol):
    """One device of one kind, used from one thread."""

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`."""

    @property
    def main(self) -> Stream: ...

    @property
    def side(self) -> Stream: ...

    def unsupported(self, *, memory: str, gate: bool) -> str | None:
        """Why a case with this memory and gate has no meaning here; None if it has."""

    def host_tensor(self, rows: int, width: int, dtype: str, *, pinned: bool) -> Tensor:
        """Uninitialised host memory of shape (rows, width)."""

    def device_tensor(self, rows: int, width: int, dtype: str) -> Tensor:
        """Uninitialised device memory of shape (rows, width)."""

    def fill_normal(self, tensor: Tensor, seed: int, scale: float = 1.0) -> None:
        """Fill a device tensor with seeded N(0, scale^2) values."""

    def free_bytes(self) -> tuple[int | None, int | None]:
        """Free (host, device) bytes now; None where nobody says."""

    def event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None: ...

    def pending(self, event: Event) -> bool:
        """True while the latest record of `event` has not been reached."""

    def synchronize(self, event: Event | None = None) -> None:
        """Block the host until `event` (everything, for None) is done."""

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Device time between two reached events, ms."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Issue `target.copy_(source, non_blocking=True)` on `stream`."""

    def gemm(self, x: Tensor, weights: list[Tensor], out: Tensor) -> None:
        """Issue out = sum over weights of x @ w on `main`, one GEMM per weight; `x` is never written."""

    def spin(self, milliseconds: float, stream: Stream) -> None:
        """Issue work that lasts that long and leaves the copy engines and memory alone."""

    def close_gate(self) -> None:
        """Issue a wait on `main` that `open_gate` ends; GATE_LIMIT_S ends it too."""

    def open_gate(self) -> bool:
        """Open the gate; False if it had opened by itself, so that the sample is void."""

    def allocations(self) -> int:
        """How often device memory was taken from or given back to the driver so far."""

    def canary_us(self, launches: int = 1000) -> float:
        """Host time to issue one empty piece of work, mean over `launches`, microseconds."""

    def facts(self) -> dict[str, Any]:
        """What only a process with the device open can say: versions, UUID, SM count, copy engines."""

    def close(self) -> None:
        """Give back threads and memory."""
