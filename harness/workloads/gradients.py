"""Whether tensors hold what they should, by random signs: block by block, on the device, for one read of each.

A block e of errors projects to a number whose size is about |e|, whatever its elements are; so a block that is wrong by
half of its length is seen three times in four, and a few such blocks always. That is Freivalds' method (see h2d.py)
for vectors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# Elements that share one projection.
BLOCK = 4096

# Blocks that are multiplied at a time, so that the products stay small.
AT_A_TIME = 4096

# Largest distance accepted, in lengths of the block. What is rounded to bfloat16 on its way differs by a few
# hundredths where a compiler fuses the rounding away (on an H200 by over 0.1 in 1 of 131,105 blocks); a gradient that
# is not the mean of all ranks' by a half or more (models.make_batches).
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}

# A block is at least so long, in the usual length of its tensor's: where nearly all cancels, rounding does not.
FLOOR = 0.1


@dataclass(frozen=True, kw_only=True)
class Known:
    """Projections of what is right, and the lengths of its blocks; both (blocks of all tensors,), float32."""

    projected: torch.Tensor
    lengths: torch.Tensor

    def times(self, factor: float) -> "Known":
        return Known(projected=self.projected * factor, lengths=self.lengths * abs(factor))


class Signs:
    """Seeded signs and what they make of tensors of one type on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (BLOCK,), generator=generator) * 2 - 1
        self._signs = signs.to(device=device, dtype=dtype)

    def project(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One number for each block, issued on the current stream; (blocks of all tensors,), float32.

        A product with a sign is exact in every type, and the sum is taken in float32.
        """
        return torch.cat(
            [
                (rows * self._signs[: rows.shape[1]]).sum(1, dtype=torch.float32)
                for tensor in tensors
                for rows in _blocks(tensor)
            ]
        )

    def know(self, tensors: Sequence[torch.Tensor]) -> Known:
        lengths = []
        for tensor in tensors:
            squares = torch.cat([rows.float().square().sum(1) for rows in _blocks(tensor)])
            lengths.append(squares.sqrt() + FLOOR * squares.mean().sqrt())
        return Known(projected=self.project(tensors).to(self._signs.device), lengths=torch.cat(lengths))


def wrong_blocks(projected: torch.Tensor, known: Known, tolerance: float) -> int:
    """How many blocks are not what is known; waits for the device."""
    error = (projected - known.projected).abs()
    return int((~(error <= tolerance * known.lengths)).sum())  # `~` so that NaN is wrong too


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's elements in order as rows of BLOCK, some rows at a time; the rest of them as one short row."""
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    for low in range(0, whole, BLOCK * AT_A_TIME):
        yield flat[low : min(low + BLOCK * AT_A_TIME, whole)].view(-1, BLOCK)
    if whole < flat.numel():
        yield flat[whole:].view(1, -1)
