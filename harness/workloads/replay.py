"""The buckets to replay without a backward: one behind the other in one piece of memory, with contents known before
and after."""

from collections.abc import Sequence

import torch

from harness.workloads.gradients import Known, Signs

# Where a bucket begins, bytes: where torch's allocator would let it.
ALIGNED = 512

# Elements of the values that are written over and over.
PATTERN = 1 << 16


class Replay:
    """pieces: the buckets. whole: all their bytes in one. Filled before a sample with a seeded pattern times a factor
    that is never the mean of the ranks'."""

    def __init__(
        self, buckets: Sequence[int], device: torch.device, dtype: torch.dtype, seed: int, signs: Signs
    ) -> None:
        offsets, at = [], 0
        for size in buckets:
            offsets.append(at // dtype.itemsize)
            at += -(-size // ALIGNED) * ALIGNED
        flat = torch.empty(-(-at // dtype.itemsize // PATTERN) * PATTERN, device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        self._pattern = torch.randn(PATTERN, generator=generator).to(device=device, dtype=dtype)
        self._rows = flat.view(-1, PATTERN)
        self.pieces = [
            flat[low : low + size // dtype.itemsize] for low, size in zip(offsets, buckets, strict=True)
        ]
        self.whole = [flat[: sum(buckets) // dtype.itemsize]]
        self._rows.copy_(self._pattern.expand_as(self._rows))
        self._known = {"transfer": signs.know(self.pieces), "transfer_1": signs.know(self.whole)}

    def buffers(self, arm: str) -> list[torch.Tensor]:
        return self.pieces if arm == "transfer" else self.whole

    def fill(self, rank: int, turn: int) -> None:
        self._rows.copy_((self._pattern * factor(rank, turn)).expand_as(self._rows))

    def known(self, arm: str, ranks: Sequence[int], turn: int, *, averages: bool) -> Known:
        """What the buffers hold when those of the ranks have been reduced."""
        total = sum(factor(rank, turn) for rank in ranks)
        return self._known[arm].times(total / len(ranks) if averages else total)


def factor(rank: int, turn: int) -> float:
    """Powers of two, so that nothing is rounded: 4 apart for neighbours, 2 from one sample to the next."""
    return float(4 ** (rank % 2) * 2 ** (turn % 2))
