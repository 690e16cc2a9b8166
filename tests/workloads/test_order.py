"""Samples come in one order, whoever loads them, and go on in it after a stop."""

import itertools
import json
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from harness.errors import UsageError
from harness.workloads.order import EndlessBatches, Order, Pick, Position

# Loaders fork this process, whose other threads they do not use, and have more workers than a small machine has cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Echo(Dataset[Pick]):
    """Says what it was asked for."""

    def __getitem__(self, pick: Pick) -> Pick:
        return pick


def loaded(batches: EndlessBatches, workers: int) -> Iterator[list[Pick]]:
    prefetch = {"prefetch_factor": 4} if workers else {}
    context = "fork" if workers else None
    return iter(
        DataLoader(
            Echo(),
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=list,
            multiprocessing_context=context,
            **prefetch,
        )
    )


def first(batches: EndlessBatches, count: int) -> list[list[Pick]]:
    return list(itertools.islice(batches, count))


class Reversed:
    """Two batches of a window: all samples, backwards."""

    name = "reversed"

    def __call__(self, picks: Sequence[Pick], number: int) -> list[list[Pick]]:
        half = len(picks) // 2
        return [list(picks[half:][::-1]), list(picks[:half][::-1])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("samples", [8, 100, 1001])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_of_ranks_are_disjoint_and_complete(ranks: int, samples: int, shuffle: bool) -> None:
    orders = [
        Order(samples=samples, seed=5, rank=rank, ranks=ranks, shuffle=shuffle) for rank in range(ranks)
    ]
    for epoch in (0, 1, 7):
        shares = [order.epoch(epoch) for order in orders]
        assert sorted(np.concatenate(shares)) == list(range(samples))
        assert [len(share) for share in shares] == [len(order) for order in orders]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_drop_last_gives_every_rank_as_many_and_drops_others_each_epoch() -> None:
    orders = [Order(samples=11, seed=1, rank=rank, ranks=3, drop_last=True) for rank in range(3)]
    dropped = set()
    for epoch in range(20):
        shares = [order.epoch(epoch) for order in orders]
        assert [len(share) for share in shares] == [len(order) for order in orders] == [3, 3, 3]
        taken = set(np.concatenate(shares).tolist())
        assert len(taken) == 9
        dropped |= set(range(11)) - taken
    assert len(dropped) > 8, "the same samples were never seen"


def test_the_order_is_fixed_by_seed_and_epoch_for_good() -> None:
    """These very numbers: a checkpoint of another year, machine or numpy goes on in the same order."""
    assert Order(samples=10, seed=0).epoch(0).tolist() == [6, 1, 0, 5, 3, 8, 7, 9, 2, 4]
    assert Order(samples=10, seed=0).epoch(1).tolist() == [7, 3, 5, 0, 1, 4, 6, 8, 9, 2]
    assert Order(samples=10, seed=1).epoch(0).tolist() == [1, 0, 9, 8, 6, 3, 7, 4, 2, 5]
    assert Order(samples=4, seed=0, shuffle=False).epoch(3).tolist() == [0, 1, 2, 3]


def test_every_epoch_is_shuffled_anew_and_evenly() -> None:
    """Each sample is about as often in each place."""
    places = np.zeros((6, 6))
    for epoch in range(1200):
        places[np.arange(6), Order(samples=6, seed=3).epoch(epoch)] += 1
    assert np.abs(places - 200).max() < 5 * 200**0.5


def test_resuming_gives_what_was_left_wherever_it_stopped() -> None:
    order = Order(samples=23, seed=2, rank=1, ranks=2)
    stream = [Pick(epoch, int(index)) for epoch in range(3) for index in order.epoch(epoch)]
    for taken in range(2 * len(order)):
        rest = list(itertools.islice(order.resume(order.position(taken)), 10))
        assert rest == stream[taken : taken + 10]
    at_the_end = Position(0, len(order))
    assert next(order.resume(at_the_end)) == stream[len(order)]


@pytest.mark.parametrize("position", [Position(0, 13), Position(0, -1), Position(-1, 0)])
def test_a_position_that_cannot_be_is_refused(position: Position) -> None:
    with pytest.raises(UsageError, match="position"):
        next(Order(samples=12, seed=0).resume(position))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "ranks": 2},
        {"rank": -1},
        {"samples": 0},
        {"seed": -1},
        {"samples": 3, "rank": 3, "ranks": 4},
    ],
)
def test_an_order_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"rank|samples|seed"):
        Order(**{"samples": 10, "seed": 0} | wrong)


def test_batches_go_on_over_the_end_of_an_epoch() -> None:
    """None is short, nothing is lost or repeated, and each sample says of which epoch it is."""
    order = Order(samples=10, seed=0)
    batches = first(EndlessBatches(order, 4), 5)
    assert [len(batch) for batch in batches] == [4] * 5
    picks = [pick for batch in batches for pick in batch]
    assert [pick.epoch for pick in picks] == [0] * 10 + [1] * 10
    assert [pick.index for pick in picks] == [*order.epoch(0), *order.epoch(1)]


def test_a_pass_has_its_limit_and_begins_again_at_the_start() -> None:
    order = Order(samples=10, seed=0)
    batches = EndlessBatches(order, 2, start=3, limit=5)
    assert len(list(batches)) == 5
    assert list(batches) == list(batches) == first(EndlessBatches(order, 2), 8)[3:]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("arrange", [None, Reversed()], ids=["plain", "windows"])
def test_after_a_stop_the_order_goes_on_with_any_number_of_workers(workers: int, arrange: Any) -> None:
    """Stopped in the middle of an epoch, and of a window, while two workers had batches prefetched."""
    order = Order(samples=50, seed=4)
    window = 1 if arrange is None else 2
    whole = first(EndlessBatches(order, 4, window=window, arrange=arrange), 40)
    asked: list[list[Pick]] = []

    class Counted(EndlessBatches):
        def __iter__(self) -> Iterator[list[Pick]]:
            for batch in super().__iter__():
                asked.append(batch)
                yield batch

    before = Counted(order, 4, window=window, arrange=arrange)
    stopped = loaded(before, workers=2)
    used = [next(stopped) for _ in range(17)]
    del stopped
    assert len(asked) > len(used), "nothing was prefetched, so that nothing could get lost"
    saved = json.loads(json.dumps(before.state(len(used))))

    later = EndlessBatches(order, 4, window=window, arrange=arrange).resume(saved)
    after = list(itertools.islice(loaded(later, workers), 20))
    assert used + after == whole[:37]
    again = later.resume(later.state(20))
    assert first(again, 3) == whole[37:40]


def test_one_state_serves_all_ranks() -> None:
    """Though their shares differ in length, and though it was saved by one of them."""
    batches = [EndlessBatches(Order(samples=20, seed=6, rank=rank, ranks=3), 3) for rank in range(3)]
    saved = batches[0].state(11)
    for each in batches:
        assert each.state(11) == saved
        assert first(each.resume(saved), 5) == first(each, 16)[11:]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("seed", EndlessBatches(Order(samples=20, seed=1), 4)),
        ("samples", EndlessBatches(Order(samples=21, seed=0), 4)),
        ("ranks", EndlessBatches(Order(samples=20, seed=0, ranks=2), 4)),
        ("shuffle", EndlessBatches(Order(samples=20, seed=0, shuffle=False), 4)),
        ("drop_last", EndlessBatches(Order(samples=20, seed=0, drop_last=True), 4)),
        ("size", EndlessBatches(Order(samples=20, seed=0), 5)),
        ("batching", EndlessBatches(Order(samples=20, seed=0), 4, arrange=Reversed())),
    ],
)
def test_a_state_of_another_order_is_refused_by_what_differs(field: str, other: EndlessBatches) -> None:
    saved = EndlessBatches(Order(samples=20, seed=0), 4).state(3)
    with pytest.raises(UsageError, match=rf"^{field}: the order was saved with"):
        other.resume(saved)


def test_a_state_is_small_and_so_is_a_sampler() -> None:
    batches = EndlessBatches(Order(samples=10**9, seed=0), 32)
    assert len(json.dumps(batches.state(10**6))) < 250
    assert len(pickle.dumps(batches)) < 500


@pytest.mark.timing
def test_resuming_costs_one_permutation_wherever_it_is() -> None:
    """And far less than to go through what was taken: here 999 of 1000 parts of an epoch of a million."""
    order = Order(samples=1_000_000, seed=0)

    def seconds(taken: int) -> float:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            next(iter(EndlessBatches(order, 10).resume(EndlessBatches(order, 10).state(taken // 10))))
            took.append(time.perf_counter() - began)
        return min(took)

    start, end, much_later = seconds(0), seconds(999_000), seconds(99_999_000)
    assert max(end, much_later) < 1.5 * start + 0.005
    began = time.perf_counter()
    for _ in itertools.islice(order.resume(Position(0, 0)), 999_000):
        pass
    assert time.perf_counter() - began > 5 * end
