"""One contract, held by every backend."""

import time
from collections.abc import Iterator

import pytest
import torch

from harness.backends import base, get_backend
from harness.backends.base import Backend
from harness.errors import MeasurementError, UsageError

ROWS, WIDTH = 512, 1024


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = get_backend(request.param)
    yield made
    made.close()


def filled(backend: Backend, value: float, *, device: bool) -> torch.Tensor:
    make = backend.device_tensor if device else backend.host_tensor
    options = {} if device else {"pinned": backend.kind == "cuda"}
    return make(ROWS, WIDTH, "float32", **options).fill_(value)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="want cuda or cpu"):
        get_backend("tpu")


def test_work_on_one_stream_runs_in_order(backend: Backend) -> None:
    target = filled(backend, 0.0, device=True)
    sources = [filled(backend, float(i), device=False) for i in range(1, 9)]
    for stream in (backend.main, backend.side):
        backend.spin(5.0, stream)
        for source in sources:
            backend.copy(target, source, stream)
        backend.synchronize()
        assert torch.all(target == 8.0)


def test_issuing_work_does_not_wait_for_it(backend: Backend) -> None:
    backend.spin(1.0, backend.main)  # loads what it needs
    backend.synchronize()
    began = time.perf_counter()
    backend.spin(200.0, backend.main)
    issued = time.perf_counter() - began
    backend.synchronize()
    assert issued < 0.1
    assert time.perf_counter() - began >= 0.19


def test_a_spin_lasts_as_long_as_asked(backend: Backend) -> None:
    start, end = backend.event(), backend.event()
    for _ in range(2):
        backend.record(start, backend.main)
        backend.spin(20.0, backend.main)
        backend.record(end, backend.main)
        backend.synchronize(end)
    assert 19.9 <= backend.elapsed_ms(start, end) < 40.0


def test_a_wait_holds_a_stream_back_until_the_event(backend: Backend) -> None:
    target = filled(backend, 0.0, device=True)
    source = filled(backend, 1.0, device=False)
    other = filled(backend, 2.0, device=False)
    event = backend.event()
    backend.spin(50.0, backend.side)
    backend.copy(target, source, backend.side)
    backend.record(event, backend.side)
    backend.wait(backend.main, event)
    backend.copy(target, other, backend.main)
    backend.synchronize()
    assert torch.all(target == 2.0), "main overtook what it had to wait for"


def test_without_a_wait_the_streams_run_at_the_same_time(backend: Backend) -> None:
    start, joined, end = backend.event(), backend.event(), backend.event()
    for _ in range(2):
        backend.record(start, backend.main)
        backend.wait(backend.side, start)
        backend.spin(40.0, backend.side)
        backend.record(joined, backend.side)
        backend.spin(40.0, backend.main)
        backend.wait(backend.main, joined)
        backend.record(end, backend.main)
        backend.synchronize(end)
    assert 39.9 <= backend.elapsed_ms(start, end) < 70.0


def test_waiting_for_an_event_never_recorded_is_no_wait(backend: Backend) -> None:
    backend.wait(backend.main, backend.event())
    backend.synchronize()
    assert not backend.pending(backend.event())


def test_a_wait_binds_to_the_record_before_it(backend: Backend) -> None:
    event, reached = backend.event(), backend.event()
    backend.record(event, backend.side)
    backend.wait(backend.main, event)
    backend.record(reached, backend.main)
    backend.spin(300.0, backend.side)
    backend.record(event, backend.side)  # a later record, which the wait above must not see
    backend.synchronize(reached)
    assert backend.pending(event)
    backend.synchronize()
    assert not backend.pending(event)


def test_products_are_right_and_leave_their_input_alone(backend: Backend) -> None:
    x = backend.device_tensor(1301, 128, "float32")
    weights = [backend.device_tensor(128, 64, "float32") for _ in range(3)]
    for seed, tensor in enumerate([x, *weights]):
        backend.fill_normal(tensor, seed)
    kept = x.clone()
    out = backend.device_tensor(1301, 64, "float32").fill_(float("nan"))
    backend.synchronize()
    backend.gemm(x, weights, out)
    backend.synchronize()
    expected = sum(x.double() @ weight.double() for weight in weights)
    assert torch.allclose(out.double(), expected, rtol=1e-3, atol=1e-2)
    assert torch.equal(x, kept)


def test_random_values_are_seeded(backend: Backend) -> None:
    a, b, c = (backend.device_tensor(64, 64, "float32") for _ in range(3))
    for tensor, seed in ((a, 1), (b, 1), (c, 2)):
        backend.fill_normal(tensor, seed, 2.0)
    backend.synchronize()
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert 1.8 < float(a.std()) < 2.2


def test_nothing_behind_a_closed_gate_runs_until_it_opens(backend: Backend) -> None:
    start = backend.event()
    target = filled(backend, 0.0, device=True)
    source = filled(backend, 1.0, device=False)
    backend.copy(target, source, backend.main)
    target.zero_()
    backend.synchronize()
    backend.close_gate()
    backend.record(start, backend.main)
    backend.wait(backend.side, start)
    backend.copy(target, source, backend.side)
    time.sleep(0.05)
    assert backend.pending(start)
    assert backend.open_gate()
    backend.synchronize()
    assert torch.all(target == 1.0)
    assert not backend.pending(start)


def test_a_gate_nobody_opens_opens_by_itself_and_says_so(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(backend).__module__
    monkeypatch.setattr(f"{module}.GATE_LIMIT_S", 0.05)
    backend.close_gate()
    began = time.perf_counter()
    backend.synchronize()
    assert 0.04 < time.perf_counter() - began < base.GATE_LIMIT_S / 2
    assert not backend.open_gate()
    monkeypatch.undo()
    backend.close_gate()
    assert backend.open_gate()
    backend.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_back_is_right_only_after_its_wait(backend: Backend, waits: bool) -> None:
    """The host reads what a device-to-host copy left, behind 2 ms of other work on that stream."""
    device = filled(backend, 0.0, device=True)
    back = filled(backend, 0.0, device=False)
    landed = backend.event()
    backend.copy(back, device, backend.side)
    wrong = 0
    for turn in range(1, 101):
        device.fill_(float(turn))
        backend.synchronize()
        backend.spin(2.0, backend.side)
        backend.copy(back, device, backend.side)
        backend.record(landed, backend.side)
        if waits:
            backend.synchronize(landed)
        wrong += not torch.all(back == float(turn))
        backend.synchronize()
    assert wrong == 0 if waits else wrong >= 95


@pytest.mark.parametrize("waits", [True, False])
def test_a_source_may_be_written_again_only_after_its_copy(backend: Backend, waits: bool) -> None:
    """The host writes to what a copy, behind 2 ms of other work on its stream, has yet to read."""
    source = filled(backend, 0.0, device=False)
    target = filled(backend, 0.0, device=True)
    read = backend.event()
    wrong = 0
    for turn in range(1, 101):
        source.fill_(float(turn))
        backend.spin(2.0, backend.side)
        backend.copy(target, source, backend.side)
        backend.record(read, backend.side)
        if waits:
            backend.synchronize(read)
        source[-1, -1] = -1.0
        backend.synchronize()
        wrong += float(target[-1, -1]) != float(turn)
    assert wrong == 0 if waits else wrong >= 95


def test_memory_and_facts_are_told(backend: Backend) -> None:
    host, device = backend.free_bytes()
    assert host is not None
    assert host > 1 << 20
    assert device is not None
    assert device > 1 << 20
    facts = backend.facts()
    assert facts["torch"] == torch.__version__
    assert isinstance(facts["torch"], str)
    assert type(facts["torch"]) is str
    assert 0.0 < backend.canary_us(100) < 5000.0


def test_the_cpu_backend_keeps_errors_of_its_threads() -> None:
    backend = get_backend("cpu")
    narrow, wide = torch.empty(2, 2), torch.empty(3, 3)
    backend.copy(narrow, wide, backend.side)
    with pytest.raises(MeasurementError, match="RuntimeError"):
        backend.synchronize()
    backend.copy(narrow, torch.ones(2, 2), backend.side)  # and goes on
    backend.synchronize()
    assert torch.all(narrow == 1.0)
    backend.close()


def test_the_cpu_backend_has_no_pinned_memory() -> None:
    backend = get_backend("cpu")
    assert "pinned" in str(backend.unsupported(memory="pinned", gate=False))
    assert backend.unsupported(memory="pageable", gate=True) is None
    backend.close()


@pytest.mark.gpu
def test_cuda_refuses_to_gate_pageable_copies() -> None:
    backend = get_backend("cuda")
    assert "block the host" in str(backend.unsupported(memory="pageable", gate=True))
    assert backend.unsupported(memory="pageable", gate=False) is None
    assert backend.unsupported(memory="pinned", gate=True) is None


@pytest.mark.gpu
def test_cuda_counts_what_it_takes_from_the_driver() -> None:
    backend = get_backend("cuda")
    torch.cuda.empty_cache()
    before = backend.allocations()
    # More than what earlier tests may have left in torch's cache.
    rows = (torch.cuda.memory_reserved() >> 12) + (64 << 10)
    kept = backend.device_tensor(rows, 1024, "float32")
    assert backend.allocations() > before
    held = backend.allocations()
    del kept
    again = backend.device_tensor(64 << 10, 1024, "float32")
    assert backend.allocations() == held, "memory from torch's cache is not taken from the driver"
    del again


@pytest.mark.gpu
def test_cuda_pinned_memory_is_pinned() -> None:
    backend = get_backend("cuda")
    assert backend.host_tensor(4, 4, "bfloat16", pinned=True).is_pinned()
    assert not backend.host_tensor(4, 4, "bfloat16", pinned=False).is_pinned()


@pytest.mark.gpu
def test_cuda_tells_the_versions_that_make_records_comparable() -> None:
    facts = get_backend("cuda").facts()
    for name in ("torch_git", "cuda", "cublas", "nccl", "sm_count", "uuid"):
        assert facts[name], name
