"""What the experiments do again and again: buffers, work that is still queued, times of the device and of the host."""

import statistics
import time
from collections.abc import Callable

from harness.backends.base import Backend, Stream, Tensor
from harness.claims import TURNS
from harness.errors import Skip

# Longer than the host needs from issuing a copy to reading or writing its memory.
SPIN_MS = 3.0

# What loads, compiles or allocates on first use does so in turns that are thrown away.
WARM = 3
ROUNDS = 7

# Floats of a row: 4 KiB.
WIDTH = 1024
ROW_BYTES = 4 * WIDTH


class Bench:
    """One device, with two streams and what the experiments do again and again."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._start, self._end, self._between = backend.event(), backend.event(), backend.event()

    def host(self, size: int, *, pinned: bool) -> Tensor:
        """Ones in host memory, `size` bytes in rows of ROW_BYTES."""
        return self.backend.host_tensor(size // ROW_BYTES, WIDTH, "float32", pinned=pinned).fill_(1.0)

    def device(self, size: int) -> Tensor:
        """Zeros on the device, shaped as `host`."""
        return self.backend.device_tensor(size // ROW_BYTES, WIDTH, "float32").fill_(0.0)

    def require_spin(self) -> None:
        """Skip where this torch cannot compile the spin, before anything is measured."""
        missing = self.backend.unsupported(memory="pinned", gate=True)
        if missing is not None:
            raise Skip(missing)

    def spin(self, milliseconds: float, stream: Stream | None = None) -> None:
        """Hold up `stream` (the main one)."""
        self.backend.spin(milliseconds, stream or self.backend.main)

    def wait_for(self, stream: Stream) -> None:
        """Block the host until what was issued to `stream` is done, and for nothing else."""
        self.backend.record(self._between, stream)
        self.backend.synchronize(self._between)

    def device_ms(self, issue: Callable[[], object]) -> float:
        """Median device time of what `issue` issues to the main stream, or joins to it."""

        def once() -> float:
            self.backend.synchronize()
            self.backend.record(self._start, self.backend.main)
            issue()
            self.backend.record(self._end, self.backend.main)
            self.backend.synchronize(self._end)
            return self.backend.elapsed_ms(self._start, self._end)

        return median(once)

    def beside(
        self, on_side: Callable[[], object], on_main: Callable[[], object], *, main_first: bool = False
    ) -> None:
        """Issue work to both streams, within `device_ms`: the side one starts with the main one and is joined to it."""
        backend = self.backend
        if main_first:
            on_main()
        backend.wait(backend.side, self._start)
        on_side()
        backend.record(self._between, backend.side)
        if not main_first:
            on_main()
        backend.wait(backend.main, self._between)

    def host_ms(
        self, issue: Callable[[], object], *, queued_ms: float = 0.0, rounds: int = ROUNDS, warm: int = WARM
    ) -> float:
        """Median time for which `issue` keeps the host, with that much device work queued before it."""

        def once() -> float:
            self.backend.synchronize()
            if queued_ms:
                self.spin(queued_ms)
            began = time.perf_counter()
            kept = issue()
            took = time.perf_counter() - began
            self.backend.synchronize()
            del kept  # freeing what was made is not what is timed
            return took * 1e3

        return median(once, rounds, warm)


def median(once: Callable[[], float], rounds: int = ROUNDS, warm: int = WARM) -> float:
    """Median over `rounds`, after `warm` that are thrown away."""
    return statistics.median([once() for _ in range(warm + rounds)][warm:])


def count(turn: Callable[[float], bool], turns: int = TURNS) -> float:
    """In how many turns something went wrong. Each is given a value that the one before it did not have."""
    return float(sum([turn(float(1 + number)) for number in range(WARM + turns)][WARM:]))
