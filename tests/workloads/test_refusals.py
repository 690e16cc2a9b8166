"""What does not fit, and who decides it."""

from typing import Any

import pytest
import torch

from harness.errors import Skip
from harness.group import Alone
from harness.profiles import DDPSizes
from harness.workloads.models import plan_model
from harness.workloads.refusals import needed_bytes, sharing, shortage, skip_alike

SIZES = DDPSizes(width=64, hidden=128, heads=2, blocks=4, sequence=32, vocabulary=4096)


class Others(Alone):
    """A group of which the other ranks say something else."""

    host = "a"

    def __init__(self, *said: Any) -> None:
        self._said = said

    def share(self, value: Any) -> list[Any]:
        return [value, *self._said]


def test_another_rank_s_reason_is_this_one_s_too() -> None:
    skip_alike(Others(None), [None, None])
    with pytest.raises(Skip, match="no room there"):
        skip_alike(Others(None, "no room there"), [None])
    with pytest.raises(Skip, match="no room here"):
        skip_alike(Others("no room there"), [None, "no room here"])


def test_reasons_are_found_up_to_the_first() -> None:
    def reasons() -> Any:
        yield "the first"
        raise AssertionError("one was enough")

    with pytest.raises(Skip, match="the first"):
        skip_alike(Alone(), reasons())


@pytest.mark.parametrize(("gpus", "expected"), [(1, 3), (2, 2), (3, 1), (8, 1)])
def test_ranks_share_what_their_own_host_has(
    monkeypatch: pytest.MonkeyPatch, gpus: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    group = Others("a", "b", "a")
    assert sharing(group, "cuda") == expected
    assert sharing(group, "cpu") == 3


def test_what_does_not_fit_is_said_with_what_there_is() -> None:
    assert shortage(2**30, None, 4) is None
    assert shortage(2**30, 2**32, 4) is None
    assert shortage(2**30, 2**32 - 1, 4) == (
        "needs 4.00 GiB of memory for 4 ranks on one device, and 4.00 GiB are free"
    )
    assert shortage(2**30, 0, 1) == "needs 1.00 GiB of memory, and 0.00 GiB are free"


def test_two_models_their_buckets_gradients_and_replay_are_counted() -> None:
    plan = plan_model("embedding", 32, SIZES)
    trained = plan.parameters * 4
    assert needed_bytes(plan, 4, autocast=False) >= 6 * trained
    assert needed_bytes(plan, 4, autocast=True) - needed_bytes(plan, 4, autocast=False) < trained
    longer = plan_model("embedding", 320, SIZES)
    more = needed_bytes(longer, 4, autocast=False) - needed_bytes(plan, 4, autocast=False)
    assert more == pytest.approx(9 * plan.activation_bytes(4))
