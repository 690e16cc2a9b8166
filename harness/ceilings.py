"""What the device reaches in one kind of work alone: the floor under every time, and a sign when the machine changes.

h2d, d2h   pinned copies in one direction, bytes copied per second
hbm        a copy inside device memory, bytes read and written per second
gemm       one large product, floating-point operations per second (2 per multiply-add)
memory     on a cpu, in place of the first three: a copy of host memory, read and written

The sizes are fixed per kind of device. They say what to expect, and are never fed back into a case's work.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.backends.base import Backend, Tensor
from harness.families import MIB
from harness.record import Ceiling

SAMPLES = 11
WIDTH = 2048


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of each copy, and the side of the square product; `batch`: pieces of work in one sample of it."""

    copy_bytes: int
    inner_bytes: int
    side: int
    dtype: str
    element_bytes: int
    batch: int


# Copies of more than the caches hold; products of several milliseconds in all.
_CUDA = _Sizes(
    copy_bytes=512 * MIB, inner_bytes=1024 * MIB, side=8192, dtype="bfloat16", element_bytes=2, batch=4
)
_CPU = _Sizes(copy_bytes=64 * MIB, inner_bytes=64 * MIB, side=512, dtype="float32", element_bytes=4, batch=4)


def run_ceilings(backend: Backend, launch: int) -> list[Ceiling]:
    """Every ceiling of this kind of device. One that cannot be measured has no value, and says why."""
    sizes = _CUDA if backend.kind == "cuda" else _CPU
    found = []
    for name, unit, work in _works(backend, sizes):
        try:
            low, middle, high = _rates(backend, work)
        except (RuntimeError, MemoryError) as error:  # torch has no memory left, of the host or of the device
            backend.synchronize()  # a device that is lost raises here again
            detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
            found.append(Ceiling(name=name, launch=launch, value=None, unit=unit, detail=detail[:200]))
            continue
        found.append(Ceiling(name=name, launch=launch, value=middle, unit=unit, low=low, high=high))
    return found


# Prepares a kind of work: what to issue, and its amount in billions or trillions.
_Work = Callable[[], tuple[Callable[[], None], float]]


def _works(backend: Backend, sizes: _Sizes) -> Iterator[tuple[str, str, _Work]]:
    def tensor(size: int, *, host: bool = False) -> Tensor:
        rows = size // (WIDTH * sizes.element_bytes)
        if host:
            return backend.host_tensor(rows, WIDTH, sizes.dtype, pinned=True)
        made = backend.device_tensor(rows, WIDTH, sizes.dtype)
        # Real values: some devices move and multiply zeros faster.
        backend.fill_normal(made, seed=1)
        return made

    def copy(
        *, source_on_host: bool, target_on_host: bool, size: int, touched: int
    ) -> tuple[Callable[[], None], float]:
        source, target = tensor(size, host=source_on_host), tensor(size, host=target_on_host)
        if source_on_host:
            source.copy_(target)
        return lambda: backend.copy(target, source, backend.main), touched * size / 1e9

    def product() -> tuple[Callable[[], None], float]:
        x, w, out = (backend.device_tensor(sizes.side, sizes.side, sizes.dtype) for _ in range(3))
        backend.fill_normal(x, seed=1)
        backend.fill_normal(w, seed=2, scale=sizes.side**-0.5)

        def issue() -> None:
            for _ in range(sizes.batch):
                backend.gemm(x, [w], out)

        return issue, sizes.batch * 2.0 * sizes.side**3 / 1e12

    outer, inner = sizes.copy_bytes, sizes.inner_bytes
    if backend.kind == "cuda":
        yield (
            "h2d",
            "GB/s",
            lambda: copy(source_on_host=True, target_on_host=False, size=outer, touched=1),
        )
        yield (
            "d2h",
            "GB/s",
            lambda: copy(source_on_host=False, target_on_host=True, size=outer, touched=1),
        )
    name = "hbm" if backend.kind == "cuda" else "memory"
    yield name, "GB/s", lambda: copy(source_on_host=False, target_on_host=False, size=inner, touched=2)
    yield "gemm", "TFLOP/s", product


def _rates(backend: Backend, prepare: _Work) -> tuple[float, float, float]:
    """Low, median and high rate over SAMPLES samples, after one that is thrown away."""
    issue, amount = prepare()
    start, end = backend.event(), backend.event()
    rates = []
    for _ in range(SAMPLES + 1):
        backend.synchronize()
        backend.record(start, backend.main)
        issue()
        backend.record(end, backend.main)
        backend.synchronize(end)
        rates.append(amount / (backend.elapsed_ms(start, end) * 1e-3))
    rates = sorted(rates[1:])
    return rates[1], statistics.median(rates), rates[-2]
