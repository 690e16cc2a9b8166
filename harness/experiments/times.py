"""Experiments that take time, or memory: how much."""

import re
from collections.abc import Callable
from pathlib import Path

import torch

from harness.backends import kernels
from harness.backends.base import Stream, Tensor
from harness.claims import PAGEABLE_SIZES, PINNED_BYTES, QUEUED_MS, Numbers
from harness.errors import Skip
from harness.experiments.bench import ROW_BYTES, SPIN_MS, Bench
from harness.families import MIB
from harness.theory import hidden_fraction

_BLOCK = 1024  # threads of a block, the most there can be


def one_stream(bench: Bench) -> Numbers:
    """The 2x2 table of memory and stream, for one copy and one kernel that needs nothing of it."""
    bench.require_spin()
    return {**_streams(bench, "pinned"), **_streams(bench, "pageable")}


def _streams(bench: Bench, memory: str) -> dict[str, float]:
    """A copy and a kernel as long as the copy, on two streams and on one; the copy is issued first."""
    backend = bench.backend
    source, target = bench.host(64 * MIB, pinned=memory == "pinned"), bench.device(64 * MIB)

    def copy(stream: Stream) -> None:
        backend.copy(target, source, stream)

    def on_side() -> None:
        copy(backend.side)

    def kernel() -> None:
        bench.spin(copy_ms)

    def in_order() -> None:
        copy(backend.main)
        kernel()

    copy_ms = bench.device_ms(lambda: copy(backend.main))
    kernel_ms = bench.device_ms(kernel)

    def hidden(both: Callable[[], None]) -> float:
        return hidden_fraction(copy_ms, kernel_ms, bench.device_ms(both))

    found = {
        f"{memory}_ms": copy_ms,
        f"{memory}_side": hidden(lambda: bench.beside(on_side, kernel)),
        f"{memory}_default": hidden(in_order),
    }
    if memory == "pageable":
        found["kernel_first"] = hidden(lambda: bench.beside(on_side, kernel, main_first=True))
    return found


def pageable_return(bench: Bench) -> Numbers:
    """For how long a pageable copy behind queued work keeps the host, by size."""
    bench.require_spin()
    backend, largest = bench.backend, max(PAGEABLE_SIZES)
    source, target = bench.host(largest, pinned=False), bench.device(largest)

    def blocked(size: int) -> float:
        rows = size // ROW_BYTES
        part, place = source[:rows], target[:rows]
        return bench.host_ms(lambda: backend.copy(place, part, backend.main), queued_ms=QUEUED_MS)

    return {str(size): blocked(size) for size in PAGEABLE_SIZES}


def two_kernels(bench: Bench) -> Numbers:
    """Pairs on two streams: kernels that fill the GPU, kernels of one block, and a copy beside one that fills it."""
    bench.require_spin()
    backend = bench.backend
    source, target = bench.host(128 * MIB, pinned=True), bench.device(128 * MIB)
    properties = torch.cuda.get_device_properties(0)
    # Blocks that fill every multiprocessor once: a further one has to wait for the end of one of them.
    full = properties.multi_processor_count * max(1, properties.max_threads_per_multi_processor // _BLOCK)
    launch = kernels.compile_kernel("overlap_spin")

    def kernel(blocks: int, stream: Stream) -> None:
        launch((blocks, 1, 1), (_BLOCK, 1, 1), [round(SPIN_MS * 1e3)], stream=stream)

    def pair(blocks: int) -> float:
        alone = bench.device_ms(lambda: kernel(blocks, backend.main))
        both = bench.device_ms(
            lambda: bench.beside(lambda: kernel(blocks, backend.side), lambda: kernel(blocks, backend.main))
        )
        return hidden_fraction(alone, alone, both)

    def copy(stream: Stream) -> None:
        backend.copy(target, source, stream)

    copy_ms = bench.device_ms(lambda: copy(backend.main))
    kernel_ms = bench.device_ms(lambda: kernel(full, backend.main))
    both = bench.device_ms(
        lambda: bench.beside(lambda: copy(backend.side), lambda: kernel(full, backend.main))
    )
    return {"full": pair(full), "small": pair(1), "copy": hidden_fraction(copy_ms, kernel_ms, both)}


def pinned_size(bench: Bench) -> Numbers:
    """What torch takes from the host for a pinned tensor of one byte more than a power of two."""
    before, resident = _pinned_bytes(), _resident_bytes()
    kept = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    after, grown = _pinned_bytes(), _resident_bytes() - resident
    del kept
    if before is None or after is None:
        if grown < PINNED_BYTES:
            raise Skip("neither this torch nor the kernel tells what pinned memory takes")
        before, after = 0, grown
    found = {"asked": PINNED_BYTES / MIB, "taken": (after - before) / MIB}
    if grown >= PINNED_BYTES / 2:  # some drivers' pages count for no process
        found["resident"] = grown / MIB
    return found


def _pinned_bytes() -> int | None:
    """Bytes of all pinned blocks that torch has handed out so far; None where it does not tell."""
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return stats.get("allocated_bytes.allocated")


def _resident_bytes() -> int:
    """Host memory of this process by the largest of the kernel's counts that hold pinned memory, bytes."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * max(
        (int(kib) for kib in re.findall(r"^Vm(?:RSS|Lck|Pin):\s+(\d+) kB", text, re.M)), default=0
    )


def pin_each_time(bench: Bench) -> Numbers:
    """Ways to bring a batch from ordinary memory to the device, and one from memory that was pinned before."""
    backend, x = bench.backend, bench.host(256 * MIB, pinned=False)
    held: list[Tensor] = []

    def pinned_for_it() -> Tensor:
        held.append(x.pin_memory())
        return moved(held[-1])

    def pinned_again() -> Tensor:
        return moved(x.pin_memory())

    def moved(pinned: Tensor) -> Tensor:
        there = pinned.to("cuda", non_blocking=True)
        backend.synchronize()
        return there

    plain = bench.host_ms(lambda: x.to("cuda"))
    first = bench.host_ms(pinned_for_it, rounds=3, warm=0)  # held, so that each has to be pinned anew
    buffer = held.pop()
    held.clear()
    return {
        "plain": plain,
        "first": first,
        "again": bench.host_ms(pinned_again),
        "reused": bench.host_ms(lambda: moved(buffer)),
    }


def blocking_to(bench: Bench) -> Numbers:
    """For how long `.to` keeps the host, with and without non_blocking, from pinned memory."""
    x = bench.host(64 * MIB, pinned=True)
    return {
        "blocking": bench.host_ms(lambda: x.to("cuda")),
        "non_blocking": bench.host_ms(lambda: x.to("cuda", non_blocking=True)),
        "copy": bench.device_ms(lambda: x.to("cuda", non_blocking=True)),
    }
