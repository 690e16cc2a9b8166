"""Projections see what is wrong, and let rounding pass."""

import pytest
import torch

from harness.workloads import gradients
from harness.workloads.gradients import BLOCK, TOLERANCE, Signs, wrong_blocks

MANY = 128
CPU = torch.device("cpu")
SHAPES = [(BLOCK * 3 + 17,), (5,), (64, 64), (BLOCK * MANY + 1,)]


def tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_is_one_number_for_each_block_and_the_tensors_are_left_alone(dtype: torch.dtype) -> None:
    signs, here = Signs(CPU, dtype, 1), tensors(dtype)
    known = signs.know(here)
    assert all(torch.equal(a, b) for a, b in zip(here, tensors(dtype), strict=True))
    assert known.projected.shape == known.lengths.shape == (4 + 1 + 1 + MANY + 1,)
    first = here[0][:BLOCK].double() * signs._signs.double()
    assert float(known.projected[0]) == pytest.approx(float(first.sum()), abs=1e-2)
    assert wrong_blocks(signs.project(here), known, TOLERANCE[dtype]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_tensor_that_was_not_reduced_is_seen(dtype: torch.dtype, factor: float) -> None:
    """In all its blocks but the few whose projection happens to be small."""
    signs, here = Signs(CPU, dtype, 1), tensors(dtype)
    known = signs.know(here)
    here[3] *= factor
    wrong = wrong_blocks(signs.project(here), known, TOLERANCE[dtype])
    assert 0.7 * MANY < wrong <= MANY + 1


def test_a_few_wrong_blocks_of_many_are_seen() -> None:
    signs = Signs(CPU, torch.bfloat16, 1)
    for seed in range(20):
        here = tensors(torch.bfloat16, seed)
        known = signs.know(here)
        here[3][BLOCK * 7 : BLOCK * 15] *= 2.5
        assert 1 <= wrong_blocks(signs.project(here), known, TOLERANCE[torch.bfloat16]) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_wrong(dtype: torch.dtype) -> None:
    """A reduction in float32, rounded once, against one that rounds after every rank."""
    signs = Signs(CPU, dtype, 1)
    by_rank = [tensors(dtype, seed) for seed in range(8)]
    exact = [sum(t.float() for t in same).div(8).to(dtype) for same in zip(*by_rank, strict=True)]  # type: ignore
    rounded = [torch.zeros_like(t) for t in exact]
    for rank in by_rank:
        for total, tensor in zip(rounded, rank, strict=True):
            total.add_(tensor)
    rounded = [total.div_(8) for total in rounded]
    assert wrong_blocks(signs.project(rounded), signs.know(exact), TOLERANCE[dtype]) == 0


def test_how_many_blocks_are_multiplied_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    signs, here = Signs(CPU, torch.float32, 1), tensors(torch.float32)
    known = signs.know(here)
    monkeypatch.setattr(gradients, "AT_A_TIME", 50)
    assert torch.equal(signs.project(here), known.projected)


def test_what_is_not_a_number_is_wrong() -> None:
    signs, here = Signs(CPU, torch.float32, 1), tensors(torch.float32)
    known = signs.know(here)
    here[1][2] = torch.nan
    assert wrong_blocks(signs.project(here), known, 1e-3) == 1


def test_where_all_cancels_rounding_is_measured_by_the_tensor_s_usual_length() -> None:
    """Rows of a table that no token of a sample names have no gradient, and noise in one is no fault."""
    signs = Signs(CPU, torch.float32, 1)
    table = torch.zeros(100 * BLOCK)
    table[: 50 * BLOCK].normal_(generator=torch.Generator().manual_seed(1))
    known = signs.know([table])
    assert float(known.lengths.min()) > 0
    table[60 * BLOCK] = 1e-4
    assert wrong_blocks(signs.project([table]), known, 1e-3) == 0
    table[60 * BLOCK] = 10.0
    assert wrong_blocks(signs.project([table]), known, 1e-3) == 1


def test_known_values_can_be_scaled() -> None:
    signs, here = Signs(CPU, torch.float32, 1), tensors(torch.float32)
    known = signs.know(here).times(-0.5)
    assert wrong_blocks(signs.project([tensor * -0.5 for tensor in here]), known, 1e-3) == 0
    assert bool((known.lengths > 0).all())
