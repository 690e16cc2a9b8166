import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from harness import ceilings
from harness.backends import get_backend
from harness.backends.base import Backend
from harness.ceilings import SAMPLES, run_ceilings
from harness.families import MIB

SMALL = dataclasses.replace(
    ceilings._CPU, copy_bytes=4 * MIB, inner_bytes=4 * MIB, side=64, batch=2, dtype="float32"
)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setattr(ceilings, "_CPU", SMALL)
    backend = get_backend("cpu")
    yield backend
    backend.close()


class Timed:
    """The cpu backend on which the n-th sample takes `ms[n]`."""

    def __init__(self, real: Backend, ms: list[float], kind: str = "cpu") -> None:
        self._real, self._ms, self.kind = real, iter(ms), kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return next(self._ms)


def test_rates_are_of_the_bytes_and_operations_that_were_done(cpu: Backend) -> None:
    slow_first = [1e9, *([2.0] * SAMPLES)]
    memory, gemm = run_ceilings(Timed(cpu, [*slow_first, *slow_first]), 2)
    assert (memory.name, memory.launch, memory.unit) == ("memory", 2, "GB/s")
    assert memory.value == pytest.approx(2 * 4 * MIB / 1e9 / 2e-3), "read and written"
    assert (gemm.name, gemm.unit) == ("gemm", "TFLOP/s")
    assert gemm.value == pytest.approx(2 * 2 * 64**3 / 1e12 / 2e-3)
    assert memory.low == memory.value == memory.high


def test_the_spread_leaves_out_one_sample_at_either_end(cpu: Backend) -> None:
    times = [5.0, *(float(ms) for ms in range(1, SAMPLES + 1))]
    memory, _ = run_ceilings(Timed(cpu, times * 2), 0)
    rate = 2 * 4 * MIB / 1e6
    assert (memory.low, memory.value, memory.high) == pytest.approx(
        (rate / (SAMPLES - 1), rate / ((SAMPLES + 1) // 2), rate / 2)
    )


def test_both_directions_are_told_apart_on_a_device(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CUDA", SMALL)
    asked: list[bool] = []
    real = cpu.host_tensor
    monkeypatch.setattr(
        cpu, "host_tensor", lambda *a, pinned: asked.append(pinned) or real(*a, pinned=pinned)
    )
    found = run_ceilings(Timed(cpu, [1.0] * 4 * (SAMPLES + 1), kind="cuda"), 0)
    assert [ceiling.name for ceiling in found] == ["h2d", "d2h", "hbm", "gemm"]
    assert found[0].value == pytest.approx(4 * MIB / 1e6), "a copy over the link moves its bytes once"
    assert found[2].value == pytest.approx(2 * found[0].value)
    assert asked == [True, True], "from and to pinned memory"


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. Tried\nmore"), MemoryError()])
def test_one_that_does_not_fit_says_why_and_the_others_are_measured(
    cpu: Backend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = cpu.copy

    def fails(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(cpu, "copy", fails)
    memory, gemm = run_ceilings(cpu, 0)
    assert memory.value is None
    assert memory.detail == (str(error).splitlines() or ["MemoryError"])[0]
    assert gemm.value is not None
    assert gemm.value > 0
    monkeypatch.setattr(cpu, "copy", real)


@pytest.mark.gpu
def test_on_a_gpu_they_are_what_such_a_device_reaches() -> None:
    backend = get_backend("cuda")
    found = {ceiling.name: ceiling for ceiling in run_ceilings(backend, 0)}
    print(", ".join(f"{name} {ceiling.value} {ceiling.unit}" for name, ceiling in found.items()))
    assert list(found) == ["h2d", "d2h", "hbm", "gemm"]
    assert all(ceiling.value is not None for ceiling in found.values()), found
    # Bytes in device memory move many times faster than over any link.
    assert found["hbm"].value > 5 * found["h2d"].value > 0  # type: ignore[operator]
