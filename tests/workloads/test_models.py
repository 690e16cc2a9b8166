"""The ddp models are what they say of themselves, and their gradients get ready in the order that is meant."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import UsageError
from harness.profiles import DDPSizes
from harness.workloads.models import Plan, Stack, make_batches, make_model, plan_model

CPU = torch.device("cpu")
SIZES = DDPSizes(width=64, hidden=192, heads=2, blocks=4, sequence=32, vocabulary=4096)


def made(model: str = "blocks", tokens: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Plan, Stack]:
    plan = plan_model(model, tokens, SIZES)
    return plan, make_model(plan, CPU, dtype, seed=1)


def gradients(model: Stack, inputs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["blocks", "embedding"])
def test_parameters_are_counted_before_any_is_made(kind: str) -> None:
    plan, model = made(kind)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    assert plan.parameters == sum(trained)
    assert plan.frozen == sum(p.numel() for p in model.parameters()) - sum(trained)
    assert plan.largest == max(trained)


@pytest.mark.parametrize("kind", ["blocks", "embedding"])
def test_every_parameter_has_a_gradient_of_some_size(kind: str) -> None:
    """A gradient of zero could not be told from one that was forgotten."""
    plan, model = made(kind)
    found = gradients(model, make_batches(plan, CPU, seed=2, rank=0, count=1)[0])
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    for gradient in found:
        assert gradient.isfinite().all()
        assert gradient.norm() > 1e-3


def test_flops_are_those_that_torch_counts() -> None:
    """Attention as plain products computes the whole square, of which a causal one needs half."""
    plan, model = made(tokens=128)
    inputs = make_batches(plan, CPU, seed=2, rank=0, count=1)[0]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(*inputs).backward()
    by_name = {str(op): flops for op, flops in counted.get_flop_counts()["Global"].items()}
    assert plan.flops == by_name.pop("aten.mm") + by_name.pop("aten.bmm") / 2
    assert not by_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_take_about_what_is_said_beforehand(dtype: torch.dtype) -> None:
    plan, model = made(tokens=512, dtype=dtype)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*make_batches(plan, CPU, seed=2, rank=0, count=1)[0])
    taken = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert loss.requires_grad
    assert 0.9 * taken <= plan.activation_bytes(dtype.itemsize) <= 1.6 * taken


def ready(model: Stack, inputs: Any) -> list[str]:
    """Names of the parameters in the order of their gradients."""
    order: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(*inputs).backward()
    return order


def test_the_trained_table_is_large_and_ready_last() -> None:
    plan, model = made("embedding")
    order = ready(model, make_batches(plan, CPU, seed=2, rank=0, count=1)[0])
    assert order[-1] == "table"
    assert model.table.numel() > plan.parameters / 2
    assert len(model.blocks) == 1


def test_no_gradient_of_the_blocks_is_larger_than_one_of_their_matrices() -> None:
    plan, model = made("blocks")
    order = ready(model, make_batches(plan, CPU, seed=2, rank=0, count=1)[0])
    assert "table" not in order
    assert order[0] == "norm.weight"
    assert plan.largest == max(3 * SIZES.width * SIZES.width, SIZES.width * SIZES.hidden)


def test_a_token_sees_none_that_comes_after_it() -> None:
    _, model = made()
    x = torch.randn(1, 32, SIZES.width)
    changed = x.clone()
    changed[0, 20:] += 1
    with torch.no_grad():
        before, after = model.blocks[0](x), model.blocks[0](changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


def test_the_same_seed_makes_the_same_model_and_another_one_does_not() -> None:
    plan, model = made()
    state = torch.get_rng_state()
    same, other = make_model(plan, CPU, torch.float32, seed=1), make_model(plan, CPU, torch.float32, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    weights = [each.blocks[0].qkv.weight for each in (model, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_no_gradient_passes_for_another_rank_s_or_another_input_s() -> None:
    """However many tokens average the differences out: the weights of the losses keep them apart."""
    plan, model = made(tokens=2048)
    found = {}
    for rank in (0, 1):
        for index, inputs in enumerate(make_batches(plan, CPU, seed=2, rank=rank, count=3)):
            found[rank, index] = torch.cat([g.flatten() for g in gradients(model, inputs)])
    for index in range(3):
        mean = (found[0, index] + found[1, index]) / 2
        for rank in (0, 1):
            assert (found[rank, index] - mean).norm() > 0.5 * mean.norm()
            later = found[rank, (index + 1) % 3]
            assert (found[rank, index] - later).norm() > 0.4 * later.norm()


@pytest.mark.parametrize(("tokens", "batch", "sequence"), [(16, 1, 16), (32, 1, 32), (96, 3, 32)])
def test_tokens_are_whole_sequences_or_one_short_one(tokens: int, batch: int, sequence: int) -> None:
    plan = plan_model("blocks", tokens, SIZES)
    assert (plan.batch, plan.sequence) == (batch, sequence)
    ids, targets, _ = make_batches(plan, CPU, seed=2, rank=0, count=1)[0]
    assert ids.shape == targets.shape == (batch, sequence)


def test_sizes_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"tokens: got 40, want a multiple of 32"):
        plan_model("blocks", 40, SIZES)
    with pytest.raises(UsageError, match=r"heads: got 3, want a divisor of the width 64"):
        plan_model("blocks", 32, DDPSizes(width=64, hidden=64, heads=3, blocks=1, sequence=32, vocabulary=8))
