"""What a feed case's batches are, and that a sample of an arm is the same work every time."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from feeds import Slow, case_of, profile_of, same

from harness.workloads.feed_data import FeedData, sendable
from harness.workloads.samples import make_texts, token_counts


def data_of(
    batching: str = "padding", dataset: Any = None, sizes: dict[str, Any] | None = None, **axes: Any
) -> FeedData:
    case = case_of(**{"batching": batching} | axes)
    return FeedData(case, profile_of(**sizes or {}), **({"dataset": dataset} if dataset else {}))


def taken(data: FeedData, count: int) -> list[list[tuple[int, int]]]:
    return [[(p.epoch, p.index) for p in picks] for picks in itertools.islice(iter(data.batches), count)]


@pytest.mark.parametrize("batching", ["padding", "bucketing", "packing"])
def test_every_epoch_of_text_is_the_same_batches_in_a_new_order(batching: str) -> None:
    data = data_of(batching, data="text")
    try:
        epochs = [taken(data, 12)[low : low + 4] for low in (0, 4, 8)]
        assert data.repeats == 4
        assert data.epoch == 4
        contents = [[frozenset(index for _, index in batch) for batch in epoch] for epoch in epochs]
        assert len({frozenset(batches) for batches in contents}) == 1
        assert len({tuple(batches) for batches in contents}) > 1
        for number, epoch in enumerate(epochs):
            assert Counter(index for batch in epoch for _, index in batch) == Counter(range(16))
            assert {at for batch in epoch for at, _ in batch} == {number}
    finally:
        data.close()


def test_pictures_are_shuffled_anew_each_epoch_and_no_batch_is_short() -> None:
    data = data_of(sizes={"pool": 10})
    try:
        batches = taken(data, 5)
        assert [len(batch) for batch in batches] == [4] * 5
        flat = [pick for batch in batches for pick in batch]
        assert sorted(flat) == [(epoch, index) for epoch in range(2) for index in range(10)]
        assert [index for _, index in flat[:10]] != [index for _, index in flat[10:]]
        assert data.repeats == 4
        assert data.epoch == 1
    finally:
        data.close()


@pytest.mark.parametrize(
    ("axes", "batches"),
    [({"workers": 0}, 4), ({"workers": 1}, 4), ({"workers": 2}, 4), ({"workers": 3}, 6), ({"workers": 5}, 10),
     ({"workers": 2, "data": "text"}, 4), ({"workers": 3, "data": "text"}, 12)],
)  # fmt: skip
def test_a_sample_has_whole_turns_of_all_workers_and_of_text_whole_epochs(
    axes: dict[str, Any], batches: int
) -> None:
    data = data_of(**axes)
    try:
        assert data.repeats == batches
        assert len(data.cached) == 4, "more of the same need no more memory"
    finally:
        data.close()


def test_wasted_tokens_are_exact_and_less_with_bucketing_and_packing() -> None:
    """Counted from the texts alone, without the loader's own batches."""
    sizes = {"batches": 16, "documents": 8, "words": 30, "longest": 128}
    lengths = token_counts(make_texts(128, 30, profile_of().seed), 128)
    facts = {}
    for batching in ("padding", "bucketing", "packing"):
        data = data_of(batching, sizes=sizes, data="text")
        facts[batching] = data.facts()
        shapes = [tuple(batch["tokens"].shape) for batch in data.cached]
        assert facts[batching]["padded"] == sum(rows * length for rows, length in shapes) / 16
        if batching == "packing":
            assert {length for _, length in shapes} == {128}
        else:
            firsts = [[index for _, index in batch] for batch in taken(data, 16)]
            assert sorted(shapes) == sorted((8, max(lengths[index] for index in batch)) for batch in firsts)
        data.close()
    assert {facts[name]["tokens"] for name in facts} == {sum(lengths) / 16}
    assert {facts[name]["samples"] for name in facts} == {8}
    padded = [facts[name]["padded"] for name in ("padding", "bucketing", "packing")]
    assert padded[0] > padded[1] > padded[2] >= sum(lengths) / 16


@pytest.mark.parametrize("source", ["memory", "files", "shards", "store"])
@pytest.mark.parametrize("kind", ["jpeg", "text"])
def test_what_a_source_gives_is_what_the_reference_has(source: str, kind: str) -> None:
    data = data_of(source=source, data=kind)
    try:
        picks = next(iter(data.batches))
        made = data.collate([data.dataset[pick] for pick in picks])
        assert same(made, data.reference(picks))
        assert made["index"].tolist() == [[pick.epoch, pick.index] for pick in picks]
        assert set(sendable(made)) == ({"pixels"} if kind == "jpeg" else {"tokens"})
        facts = data.facts()
        assert facts["batch_bytes"] > 0
        # a shard's block of sixteen is read for one sample
        assert (facts["stored_bytes"] > data_of(data=kind).facts()["stored_bytes"] * 2) == (
            source == "shards"
        )
    finally:
        data.close()


def test_a_picture_is_cut_otherwise_in_another_epoch() -> None:
    data = data_of()
    try:
        first, *others = (
            [pick for pick in picks if pick.index == 3] for picks in itertools.islice(data.batches, 24)
        )
        found = [pick for picks in (first, *others) for pick in picks]
        assert len(found) == 4
        pictures = [data.dataset[pick][1] for pick in found]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(pictures, 2))
    finally:
        data.close()


def test_the_cost_of_a_batch_is_told_apart_by_reading_and_making() -> None:
    data = data_of(dataset=Slow)
    costs = data.costs()
    data.close()
    assert 4 * 5 <= costs["decode_ms"] < 60  # four samples, each asleep for 5 ms
    assert costs["read_ms"] < 5
    slow = data_of(source="store", sizes={"latency_ms": 8.0})
    costs = slow.costs()
    slow.close()
    assert 4 * 8 <= costs["read_ms"] < 100
    assert costs["decode_ms"] < 20


def test_close_leaves_no_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = data_of(source="shards")
    assert list(tmp_path.iterdir())
    data.close()
    assert not list(tmp_path.iterdir())
