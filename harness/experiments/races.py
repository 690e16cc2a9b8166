"""Experiments that come out right or wrong: how often, in so many turns."""

import importlib.util
import os
import tempfile
from collections.abc import Callable

import torch

from harness.backends.base import Tensor
from harness.claims import COMPILED_TURNS, QUEUED_MS, Numbers
from harness.errors import Skip
from harness.experiments.bench import ROW_BYTES, SPIN_MS, Bench, count
from harness.families import MIB
from harness.serving import one_line


def read_back(bench: Bench) -> Numbers:
    """The host reads what a copy from the device brings while the copy is still queued, and after an event's wait."""
    bench.require_spin()
    backend = bench.backend
    source, pageable = bench.device(4 * MIB), bench.host(4 * MIB, pinned=False)

    def stale(value: float, *, waits: bool = False, into: Tensor | None = None) -> bool:
        source.fill_(value)
        backend.synchronize()
        bench.spin(SPIN_MS)
        read = into.copy_(source, non_blocking=True) if into is not None else _copied_back(source)
        if waits:
            bench.wait_for(backend.main)
        found = not bool((read == value).all())
        backend.synchronize()
        return found

    return {
        "at_once": count(stale),
        "waited": count(lambda value: stale(value, waits=True)),
        "pageable": count(lambda value: stale(value, into=pageable)),
    }


def _copied_back(source: Tensor) -> Tensor:
    return source.to("cpu", non_blocking=True)


def edited_source(bench: Bench) -> Numbers:
    """The host writes to what a queued copy to the device is to read."""
    bench.require_spin()
    backend, target = bench.backend, bench.device(4 * MIB)
    pinned, pageable = (bench.host(4 * MIB, pinned=pinned) for pinned in (True, False))

    def edited(value: float, source: Tensor, *, waits: bool = False) -> bool:
        source.fill_(value)
        backend.synchronize()
        bench.spin(SPIN_MS)
        backend.copy(target, source, backend.main)
        if waits:
            bench.wait_for(backend.main)
        source[-1, -1] = -1.0
        backend.synchronize()
        return float(target[-1, -1]) != value

    return {
        "at_once": count(lambda value: edited(value, pinned)),
        "waited": count(lambda value: edited(value, pinned, waits=True)),
        "pageable": count(lambda value: edited(value, pageable)),
    }


def _read_item(x: Tensor) -> float:
    return float(_copied_back(x).item())


def compiled_read(bench: Bench) -> Numbers:
    """One expression that copies without blocking and reads, compiled and in eager mode."""
    bench.require_spin()
    if importlib.util.find_spec("triton") is None:
        raise Skip("torch.compile needs triton for a GPU, and it is not installed")
    x = torch.zeros(1, device="cuda")

    def stale(value: float, read: Callable[[Tensor], float]) -> bool:
        x.fill_(value)
        bench.backend.synchronize()
        bench.spin(QUEUED_MS)
        found = read(x) != value
        bench.backend.synchronize()
        return found

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Nothing is left behind, and nothing of an earlier torch is found; no pool of processes for one function.
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            compiled = torch.compile(_read_item)
            compiled(x)
        except Exception as error:  # of many kinds: no Python.h, no compiler, a Python that is too new
            bench.backend.synchronize()  # a device that is lost raises here again
            raise Skip(f"torch.compile cannot be used here: {one_line(error)}") from error
        return {
            "compiled": count(lambda value: stale(value, compiled), COMPILED_TURNS),
            "eager": count(lambda value: stale(value, _read_item), COMPILED_TURNS),
        }


def list_index(bench: Bench) -> Numbers:
    """Copies from the device into two rows of a pinned buffer."""
    buffer, x = bench.host(4 * ROW_BYTES, pinned=True), bench.device(2 * ROW_BYTES)
    x.fill_(2.0)

    def changed(write: Callable[[], object]) -> float:
        buffer.fill_(1.0)
        write()
        bench.backend.synchronize()
        return float((buffer == 2.0).all(dim=1).sum())

    return {
        "list": changed(lambda: buffer[[0, 1]].copy_(x)),
        "slice": changed(lambda: buffer[:2].copy_(x)),
    }


def no_wait(bench: Bench) -> Numbers:
    """The main stream reads what the side stream copies, with and without waiting for it."""
    bench.require_spin()
    backend, source = bench.backend, bench.host(4 * MIB, pinned=True)
    target, read = bench.device(4 * MIB), bench.device(4 * MIB)
    copied = backend.event()

    def stale(value: float, *, waits: bool = False) -> bool:
        source.fill_(value)
        backend.synchronize()
        bench.spin(SPIN_MS, backend.side)
        backend.copy(target, source, backend.side)
        backend.record(copied, backend.side)
        if waits:
            backend.wait(backend.main, copied)
        read.copy_(target)
        backend.synchronize()
        return not bool((read == value).all())

    return {"at_once": count(stale), "waited": count(lambda value: stale(value, waits=True))}
