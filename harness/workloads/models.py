"""The models of the ddp family: a stack of transformer blocks, and one that is mostly a table of embeddings.

    ids (batch, sequence) --table--> x (batch, sequence, width) --blocks--> norm --dot with targets' rows--> loss

`blocks`: the table is frozen, so that no gradient is larger than one matrix of a block and the buckets are as even as
the caps make them. `embedding`: the table is large and trained, and a quarter of the blocks follow it. Its gradient is
one tensor, which no bucket splits, and the last one ready: it sets the tail (theory.md 3).

The loss is linear in the normalised output: no matrix of the vocabulary's size stands at the end, whose gradient would
be ready first and large.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.profiles import DDPSizes

# Rows of the frozen tables.
ROWS = 1024

# The embedding-heavy model has one block for so many of the other's.
FEWER = 4


class Block(nn.Module):
    """Pre-norm causal self-attention and a GELU MLP; (batch, sequence, width) to the same shape. No biases: a key's
    bias has a gradient of zero, of which only rounding can be compared."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, sequence, width))
        x = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return x


class Stack(nn.Module):
    """Table, blocks, norm and loss; the forward gives the loss, a float32 scalar."""

    def __init__(self, sizes: "DDPSizes", *, blocks: int, rows: int, trained: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, sizes.width), requires_grad=trained)
        self.goals = nn.Parameter(torch.empty(ROWS, sizes.width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.hidden, sizes.heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(sizes.width)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids: rows of the table, targets: rows of the goals, both (batch, sequence); weight: of the loss, scalar."""
        x = functional.embedding(ids, self.table)
        for block in self.blocks:
            x = block(x)
        reached: torch.Tensor = self.norm(x).float() * functional.embedding(targets, self.goals).float()
        return reached.sum() * (weight / targets.numel())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step of a model is, from its sizes alone. parameters: how many are trained. frozen: and how many not.
    batch sequences of `sequence` tokens each make the tokens of a step."""

    sizes: "DDPSizes"
    blocks: int
    rows: int
    trained: bool
    batch: int
    sequence: int

    @property
    def _matrices(self) -> int:
        return self.sizes.width * (4 * self.sizes.width + 2 * self.sizes.hidden)

    @property
    def parameters(self) -> int:
        block = self._matrices + 2 * self.sizes.width
        return self.blocks * block + self.sizes.width * (1 + (self.rows if self.trained else 0))

    @property
    def frozen(self) -> int:
        return self.sizes.width * (ROWS + (0 if self.trained else self.rows))

    @property
    def largest(self) -> int:
        """Elements of the largest trained tensor."""
        width = self.sizes.width
        return max(3 * width * width, width * self.sizes.hidden, width * self.rows if self.trained else 0)

    @property
    def flops(self) -> float:
        """Of forward and backward: 6 a parameter of a matrix and token, and the causal half of the attention's two
        products; what a fused attention computes twice is not counted."""
        attention = 2 * self.sequence * self.sizes.width
        return 3.0 * (2 * self._matrices + attention) * self.blocks * self.batch * self.sequence

    def activation_bytes(self, element: int) -> int:
        """About what the forward keeps for the backward: in a block 9 vectors of a token and 3 of the MLP, the norms'
        in float32, and 8 float32 vectors around the loss."""
        tokens, width, hidden = self.batch * self.sequence, self.sizes.width, self.sizes.hidden
        block = (9 * width + 3 * hidden) * element + 2 * width * 4
        return tokens * (self.blocks * block + 8 * width * 4)


def plan_model(model: str, tokens: int, sizes: "DDPSizes") -> Plan:
    """The model called `blocks` or `embedding` at so many tokens a step; UsageError for sizes that do not fit it."""
    sequence = min(tokens, sizes.sequence)
    if tokens % sequence:
        raise UsageError(
            f"ddp: tokens: got {tokens}, want a multiple of {sizes.sequence}, the profile's sequence, or fewer"
        )
    if sizes.width % sizes.heads:
        raise UsageError(f"ddp: heads: got {sizes.heads}, want a divisor of the width {sizes.width}")
    heavy = model == "embedding"
    return Plan(
        sizes=sizes,
        blocks=max(1, sizes.blocks // FEWER) if heavy else sizes.blocks,
        rows=sizes.vocabulary if heavy else ROWS,
        trained=heavy,
        batch=tokens // sequence,
        sequence=sequence,
    )


def make_model(plan: Plan, device: torch.device, dtype: torch.dtype, seed: int) -> Stack:
    """The model with seeded values: the same on every rank of the same kind of device."""
    with torch.device("meta"):
        model = Stack(plan.sizes, blocks=plan.blocks, rows=plan.rows, trained=plan.trained)
    model = model.to_empty(device=device).to(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:  # what a token's vector is, and what a matrix makes of it, is N(0, 1)
                inputs = 1 if parameter is model.table or parameter is model.goals else parameter.shape[1]
                parameter.normal_(0.0, 1 / math.sqrt(inputs), generator=generator)
    return model


def make_batches(
    plan: Plan, device: torch.device, *, seed: int, rank: int, count: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`count` fixed inputs of a rank: ids, targets and the weight of the loss.

    The weights set every gradient apart from what could stand in its place, however many tokens average the rest out:
    by 4 from those of the neighbouring ranks, by 2 or more from the same rank's before.
    """
    generator = torch.Generator().manual_seed(seed + 7919 * rank)
    shape = (plan.batch, plan.sequence)
    batches = []
    for index in range(count):
        ids = torch.randint(plan.rows, shape, generator=generator)
        targets = torch.randint(ROWS, shape, generator=generator)
        weight = torch.tensor(float(4 ** (rank % 2) * 2**index))
        batches.append((ids.to(device), targets.to(device), weight.to(device)))
    return batches
