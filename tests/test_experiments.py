"""The measuring side of `overlap myths` where there is no GPU: its protocol, its instruments, and a race that a cpu's
threads have too. What each experiment gives on a GPU is in tests/test_myths.py."""

import mmap
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness import claims
from harness.backends import get_backend
from harness.backends.base import Backend
from harness.claims import CLAIMS, TURNS
from harness.errors import Skip
from harness.experiments import __main__ as experiments
from harness.experiments import bench as benches
from harness.experiments import races, times
from harness.experiments.bench import WARM, Bench
from harness.families import MIB
from harness.myths import Begun, Broke, Found, Unable


class Held:
    """The cpu backend, which can hold up its streams as a GPU can."""

    def __init__(self, real: Backend) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def unsupported(self, *, memory: str, gate: bool) -> str | None:
        return None


@pytest.fixture
def backend() -> Iterator[Any]:
    made = get_backend("cpu")
    yield Held(made)
    made.close()


@pytest.fixture
def bench(backend: Any) -> Bench:
    return Bench(backend)


class Lost(RuntimeError):
    pass


class Device:
    """A device of which nothing is known but whether it is lost."""

    def __init__(self, *, lost: bool = False) -> None:
        self._lost = lost

    def event(self) -> None:
        return None

    def synchronize(self) -> None:
        if self._lost:
            raise Lost("CUDA error: an illegal memory access was encountered")


def stage(monkeypatch: pytest.MonkeyPatch, **outcomes: Any) -> list[str]:
    """Let experiments come out as told: numbers, or an error."""

    def made(outcome: Any) -> Any:
        def run(bench: Bench) -> Any:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return run

    names = [name.replace("_", "-") for name in outcomes]
    table = {name: made(outcome) for name, outcome in zip(names, outcomes.values(), strict=True)}
    monkeypatch.setattr(experiments, "EXPERIMENTS", table)
    return names


def test_every_claim_has_its_experiment():
    assert experiments.EXPERIMENTS.keys() == CLAIMS.keys()


def test_one_line_is_said_of_each_experiment_as_it_ends(monkeypatch):
    names = stage(
        monkeypatch,
        found={"a": 1, "b": 0.12345678},
        unable=Skip("no compiler"),
        broke=torch.OutOfMemoryError("tried to allocate\nmore"),
        last={},
    )
    said: list[Any] = []
    experiments.experiment(names, Device(), said.append)  # type: ignore[arg-type]
    assert [event.name for event in said] == [name for name in names for _ in range(2)]
    assert all(isinstance(event, Begun) for event in said[::2])
    assert said[1::2] == [
        Found(name="found", numbers={"a": 1.0, "b": 0.123457}),
        Unable(name="unable", reason="no compiler"),
        Broke(name="broke", reason="OutOfMemoryError: tried to allocate"),
        Found(name="last", numbers={}),
    ]


def test_a_device_that_is_lost_ends_the_process_and_not_only_the_experiment(monkeypatch):
    names = stage(monkeypatch, first=RuntimeError("misaligned address"), second={})
    said: list[Any] = []
    with pytest.raises(Lost):
        experiments.experiment(names, Device(lost=True), said.append)  # type: ignore[arg-type]
    assert said == [Begun(name="first")]


@pytest.mark.parametrize(
    "name",
    [
        "read-back",
        "edited-source",
        "compiled-read",
        "one-stream",
        "pageable-return",
        "two-kernels",
        "no-wait",
    ],
)
def test_an_old_torch_is_the_reason_for_what_needs_a_spin(name):
    class Old(Device):
        def unsupported(self, *, memory: str, gate: bool) -> str | None:
            return "torch 2.8 cannot compile the gate kernel"

    with pytest.raises(Skip, match="cannot compile the gate kernel"):
        experiments.EXPERIMENTS[name](Bench(Old()))  # type: ignore[arg-type]


def test_a_source_that_is_edited_while_its_copy_waits_reaches_the_device_edited(bench):
    """A thread's copy races with the host as a GPU's does; it stages nothing, so no memory is safe."""
    found = races.edited_source(bench)
    assert CLAIMS["edited-source"].complaint(found) == ""
    assert found == {"at_once": TURNS, "waited": 0, "pageable": TURNS}


def test_device_time_is_that_of_the_work_and_not_of_issuing_it(bench):
    assert 3.9 < bench.device_ms(lambda: bench.spin(4.0)) < 12.0

    def late() -> None:
        bench.spin(4.0)
        time.sleep(0.002)  # the host is slow, the device is at work meanwhile

    assert 3.9 < bench.device_ms(late) < 12.0


def test_streams_side_by_side_take_as_long_as_the_longer_one(bench):
    side = bench.backend.side
    beside = bench.device_ms(lambda: bench.beside(lambda: bench.spin(20.0, side), lambda: bench.spin(20.0)))
    first = bench.device_ms(
        lambda: bench.beside(lambda: bench.spin(20.0, side), lambda: bench.spin(20.0), main_first=True)
    )
    assert 19.9 < beside < 35.0
    assert 19.9 < first < 35.0


def test_a_join_waits_for_the_side_stream(bench):
    """Else a pair would seem as quick as its shorter half."""
    took = bench.device_ms(lambda: bench.beside(lambda: bench.spin(20.0, bench.backend.side), lambda: None))
    assert took > 19.9


def test_host_time_is_what_the_host_waits_and_no_more(bench):
    assert bench.host_ms(lambda: None, queued_ms=5.0) < 4.0
    assert bench.host_ms(bench.backend.synchronize, queued_ms=5.0) > 4.0
    assert 4.9 < bench.host_ms(lambda: time.sleep(0.005)) < 20.0


def test_first_turns_are_thrown_away(monkeypatch):
    turns = iter([100.0] * WARM + [1.0, 2.0, 9.0])
    assert benches.median(lambda: next(turns), rounds=3) == 2.0
    assert next(turns, None) is None
    values: list[float] = []

    def turn(value: float) -> bool:
        values.append(value)
        return value <= WARM + 2

    assert benches.count(turn, 10) == 2.0
    assert len(set(values)) == len(values) == WARM + 10


def test_a_compiler_that_is_missing_is_the_reason(bench, monkeypatch):
    monkeypatch.setattr(races.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skip, match="needs triton"):
        races.compiled_read(bench)


def test_a_compiler_that_does_not_work_is_the_reason(bench, monkeypatch):
    def compile(function: Any) -> Any:
        raise RuntimeError("Failed to find C compiler\nPlease specify via CC environment variable")

    real = torch.zeros
    monkeypatch.setattr(races.importlib.util, "find_spec", lambda name: "here")
    monkeypatch.setattr(races.torch, "compile", compile)
    monkeypatch.setattr(races.torch, "zeros", lambda *shape, device: real(*shape))
    with pytest.raises(Skip, match=r"cannot be used here: RuntimeError: Failed to find C compiler$"):
        races.compiled_read(bench)


@pytest.mark.parametrize("grown", [0, claims.PINNED_BYTES - 1])
def test_memory_that_nobody_counts_is_the_reason(bench, monkeypatch, grown):
    resident = iter([0, grown])
    monkeypatch.setattr(times, "_pinned_bytes", lambda: None)
    monkeypatch.setattr(times, "_resident_bytes", lambda: next(resident))
    monkeypatch.setattr(times.torch, "empty", lambda *_, **__: None)
    with pytest.raises(Skip, match="neither this torch nor the kernel"):
        times.pinned_size(bench)


@pytest.mark.parametrize(
    ("pinned", "resident", "found"),
    [
        ([100, 100 + 512 * MIB], [7, 7 + 512 * MIB], {"taken": 512.0, "resident": 512.0}),
        ([100, 100 + 512 * MIB], [7, 9], {"taken": 512.0}),
        ([None, None], [0, 512 * MIB], {"taken": 512.0, "resident": 512.0}),
    ],
)
def test_what_pinned_memory_takes_is_told_by_torch_or_else_by_the_kernel(
    bench, monkeypatch, pinned, resident, found
):
    pinned, resident = iter(pinned), iter(resident)
    monkeypatch.setattr(times, "_pinned_bytes", lambda: next(pinned))
    monkeypatch.setattr(times, "_resident_bytes", lambda: next(resident))
    monkeypatch.setattr(times.torch, "empty", lambda *_, **__: None)
    told = times.pinned_size(bench)
    assert told == {"asked": claims.PINNED_BYTES / MIB, **found}
    assert CLAIMS["pinned-size"].complaint(told) == ""


@pytest.mark.skipif(not times.Path("/proc/self/status").exists(), reason="the kernel is asked in Linux's way")
def test_the_kernel_s_count_follows_the_memory_of_the_process():
    before = times._resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as kept:  # past every allocator, which may have that much at hand
        kept.write(b"1" * 64 * MIB)
        assert times._resident_bytes() - before > 60 * MIB
