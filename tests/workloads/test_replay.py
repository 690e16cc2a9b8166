"""What is replayed is known before and after it is reduced."""

import pytest
import torch

from harness.workloads.gradients import Signs, wrong_blocks
from harness.workloads.replay import ALIGNED, Replay, factor

CPU = torch.device("cpu")
BUCKETS = [4 * 5000, 4 * 17, 4 * 70000]


def replay_of(dtype: torch.dtype = torch.float32) -> tuple[Replay, Signs]:
    signs = Signs(CPU, dtype, 1)
    return Replay(BUCKETS, CPU, dtype, 2, signs), signs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_lie_apart_and_aligned_and_the_whole_has_all_their_bytes(dtype: torch.dtype) -> None:
    replay, _ = replay_of(dtype)
    assert [piece.nbytes for piece in replay.pieces] == BUCKETS
    assert [whole.nbytes for whole in replay.whole] == [sum(BUCKETS)]
    starts = [piece.data_ptr() - replay.whole[0].data_ptr() for piece in replay.pieces]
    assert all(start % ALIGNED == 0 for start in starts)
    assert all(b - a >= size for a, b, size in zip(starts, starts[1:], BUCKETS, strict=False))


@pytest.mark.parametrize("arm", ["transfer", "transfer_1"])
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("turn", [1, 2])
def test_the_reduction_is_known_and_nothing_else_passes_for_it(arm: str, averages: bool, turn: int) -> None:
    ranks = range(3)
    replay, signs = replay_of()
    known = replay.known(arm, ranks, turn, averages=averages)
    total = sum(factor(rank, turn) for rank in ranks)
    for rank in ranks:
        replay.fill(rank, turn)
        buffers = replay.buffers(arm)
        assert wrong_blocks(signs.project(buffers), known, 1e-3) > 0, "not reduced"
        for buffer in buffers:
            buffer.mul_(total / factor(rank, turn) / (3 if averages else 1))
        assert wrong_blocks(signs.project(buffers), known, 1e-3) == 0
        other = replay.known(arm, ranks, turn + 1, averages=averages)
        assert wrong_blocks(signs.project(buffers), other, 1e-3) > 0, "of the sample before"


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("turn", [1, 2])
def test_no_rank_starts_with_the_mean(size: int, turn: int) -> None:
    factors = [factor(rank, turn) for rank in range(size)]
    mean = sum(factors) / size
    assert min(abs(each - mean) / mean for each in factors) >= 0.3
