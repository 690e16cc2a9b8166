"""Which buckets to expect, and that a first cap is torch's own business again afterwards."""

import pytest
import torch.distributed as dist

from harness.workloads.hooks import expected_buckets, first_cap


@pytest.mark.parametrize(
    ("sizes", "first", "bucket", "expected"),
    [
        ([4, 4, 4, 4], 4, 8, [4, 8, 4]),
        ([4, 4, 4, 4], 5, 8, [8, 8]),  # a gradient is not split: it takes its bucket over the cap
        ([100, 1, 1], 4, 4, [100, 2]),
        ([1, 100], 4, 4, [101]),
        ([4, 4], 64, 64, [8]),
        ([4, 4, 4], 12, 4, [12]),
        ([], 4, 4, []),
    ],
)
def test_a_bucket_is_closed_by_what_takes_it_to_its_cap(
    sizes: list[int], first: int, bucket: int, expected: list[int]
) -> None:
    assert expected_buckets(sizes, first=first, bucket=bucket) == expected


def test_the_first_cap_holds_only_inside() -> None:
    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    seen = []

    def fail() -> None:
        with first_cap(12345):
            seen.append(dist._DEFAULT_FIRST_BUCKET_BYTES)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [12345]
    assert before == dist._DEFAULT_FIRST_BUCKET_BYTES
