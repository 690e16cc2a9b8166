"""Steps do the work they say, on the numbers they are given."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from feeds import profile_of

from harness.backends import get_backend
from harness.backends.base import Backend
from harness.profiles import Profile
from harness.workloads.feed_steps import DEVIATION, MEAN, PictureStep, TextStep, step_bytes
from harness.workloads.samples import VOCABULARY


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = get_backend(request.param)
    yield made
    made.close()


def device_of(backend: Backend) -> torch.device:
    device: torch.device = backend.device_tensor(1, 1, "float32").device
    return device


def profile(backend: Backend, **sizes: Any) -> Profile:
    return profile_of(backend.kind, **sizes)


def weights(backend: Backend, profile: Profile, across: int, products: int) -> torch.Tensor:
    """The sum of a step's matrices, made as it makes them, in float64."""
    total = torch.zeros(across, profile.feed.hidden, dtype=torch.float64)
    for index in range(products):
        made = backend.device_tensor(across, profile.feed.hidden, profile.dtype)
        backend.fill_normal(made, profile.seed + 11 + index % 4, across**-0.5 / products)
        total += made.cpu().double()
    return total


def test_a_row_for_every_whole_patch_of_a_picture(backend: Backend) -> None:
    small = profile(backend, crop=35, patch=8, picture_products=6)  # 35: three pixels of each side are over
    step = PictureStep(backend, small, pictures=3)
    pixels = torch.randint(0, 256, (3, 3, 35, 35), dtype=torch.uint8, device=device_of(backend))
    batch = {"pixels": pixels}
    step.run(batch)
    found = step.signature(batch)
    patches = torch.nn.functional.unfold(pixels[:, :, :32, :32].double().cpu(), 8, stride=8)
    rows = (patches.transpose(1, 2).reshape(-1, 3 * 64) - MEAN) / DEVIATION
    wanted = (rows @ weights(backend, small, 3 * 64, 6)).sum(dim=1)
    assert found.shape == (3 * 16,)
    assert step.rows(batch) == 48
    scale = 0.05 if small.dtype == "bfloat16" else 1e-4
    assert float((found - wanted).abs().max()) < scale * float(wanted.std())


def test_a_row_for_every_token_with_padding(backend: Backend) -> None:
    small = profile(backend, text_products=3)
    step = TextStep(backend, small, tokens=200)
    tokens = torch.randint(0, VOCABULARY, (4, 30), device=device_of(backend))
    batch = {"tokens": tokens}
    step.run(batch)
    found = step.signature(batch)
    table = backend.device_tensor(VOCABULARY, small.feed.width, small.dtype)
    backend.fill_normal(table, small.seed + 10)
    rows = table.cpu().double()[tokens.cpu().flatten()]
    wanted = (rows @ weights(backend, small, small.feed.width, 3)).sum(dim=1)
    assert found.shape == (120,)
    scale = 0.05 if small.dtype == "bfloat16" else 1e-4
    assert float((found - wanted).abs().max()) < scale * float(wanted.std())


def test_another_batch_gives_another_signature(backend: Backend) -> None:
    step = TextStep(backend, profile(backend), tokens=8)
    device = device_of(backend)
    one, other = ({"tokens": torch.tensor([[1, 2, 3, last]], device=device)} for last in (4, 5))
    step.run(one)
    first = step.signature(one)
    step.run(other)
    assert torch.equal(first[:3], step.signature(other)[:3])
    assert not torch.allclose(first[3:], step.signature(other)[3:])


def test_work_is_in_proportion_to_tokens_with_padding(backend: Backend) -> None:
    step = TextStep(backend, profile(backend, width=32, hidden=64, text_products=5), tokens=100)
    flops = [step.flops({"tokens": torch.zeros(rows, 10, dtype=torch.int64)}) for rows in (1, 4)]
    assert flops == [2.0 * 10 * 32 * 64 * 5, 4 * flops[0]]


def test_an_extra_wait_is_on_the_device(backend: Backend) -> None:
    step = PictureStep(backend, profile(backend), pictures=1, extra_ms=5.0)
    batch = {"pixels": torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device=device_of(backend))}
    step.run(batch)
    start, end = backend.event(), backend.event()
    backend.record(start, backend.main)
    step.run(batch)
    backend.record(end, backend.main)
    backend.synchronize()
    assert backend.elapsed_ms(start, end) >= 4.9


@pytest.mark.gpu
@pytest.mark.parametrize("data", ["jpeg", "text"])
def test_memory_is_no_more_than_was_said(data: str) -> None:
    backend = get_backend("cuda")
    sizes = profile_of("cuda", image=256, crop=224, patch=16, hidden=4096, width=1024)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step = (PictureStep if data == "jpeg" else TextStep)(backend, sizes, 64 if data == "jpeg" else 4096)
    taken = torch.cuda.memory_allocated() - before
    said = step_bytes(data, sizes, 64 if data == "jpeg" else 4096)
    assert said * 0.9 <= taken <= said + (4 << 20)
    del step
    backend.close()
