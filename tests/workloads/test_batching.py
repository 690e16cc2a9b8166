"""Every text comes once, and the tokens that are wasted are known to one."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.workloads.batching import (
    Plan,
    arrangement,
    batches_of,
    collate_packed,
    collate_padded,
)
from harness.workloads.order import EndlessBatches, Order, Pick
from harness.workloads.samples import make_texts, token_counts, tokenise

WAYS = ["padding", "bucketing", "packing"]

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=120)


def texts_of(plan: Plan) -> list[int]:
    return [text for rows in plan.batches for row in rows for text in row]


def naive_first_fit_decreasing(lengths: list[int], longest: int) -> list[int]:
    """Tokens in each row."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        for row, used in enumerate(rows):
            if used + length <= longest:
                rows[row] += length
                break
        else:
            rows.append(length)
    return rows


def test_waste_of_eight_texts_by_hand() -> None:
    """20 tokens. In order: 2x4, 2x3, 2x4, 2x1. By length: 2x1, 2x2, 2x4, 2x4. Packed: five rows of 4."""
    lengths = [4, 1, 3, 2, 4, 4, 1, 1]
    plans = {how: batches_of(lengths, how, 2, 4) for how in WAYS}
    assert {how: (plan.tokens, plan.padded) for how, plan in plans.items()} == {
        "padding": (20, 24),
        "bucketing": (20, 22),
        "packing": (20, 20),
    }
    assert plans["padding"].wasted == pytest.approx(4 / 24)
    assert plans["padding"].batches == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]
    assert sorted(plans["bucketing"].shapes) == [(2, 1), (2, 2), (2, 4), (2, 4)]


@pytest.mark.parametrize("n", [2, 8, 30])
def test_waste_of_lengths_1_to_n_over_and_over(n: int) -> None:
    """Padded, (n + 1)/2 of n tokens are real. By length, the n texts of each batch are alike. Rows of n + 1 tokens are
    filled by pairs: n and 1, n - 1 and 2, and so on."""
    lengths = list(range(1, n + 1)) * n
    assert batches_of(lengths, "padding", n, n).wasted == pytest.approx(1 - (n + 1) / (2 * n))
    assert batches_of(lengths, "bucketing", n, n, window=n).wasted == 0
    assert batches_of(lengths, "packing", n, n + 1, window=n).wasted == 0


def test_texts_are_cut_to_the_longest_before_anything_is_counted() -> None:
    for how in WAYS:
        plan = batches_of([100, 3, 7], how, 3, 5)
        assert plan.tokens == 5 + 3 + 5
        assert plan.padded == 15


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4), st.integers(40, 60), st.integers(0, 5))
def test_every_text_comes_once_in_as_many_batches_whatever_the_way(
    lengths: list[int], size: int, window: int, longest: int, seed: int
) -> None:
    for how in WAYS:
        plan = batches_of(lengths, how, size, longest, window=window, seed=seed)
        assert sorted(texts_of(plan)) == list(range(len(lengths)))
        assert len(plan.batches) == -(-len(lengths) // size)
        assert plan.tokens == sum(lengths)
        for rows, (count, length) in zip(plan.batches, plan.shapes, strict=True):
            assert len(rows) == count
            assert all(row for row in rows)
            assert max(sum(lengths[text] for text in row) for row in rows) <= length <= longest
        # What a window has is made out of the texts of that window alone.
        for at, rows in enumerate(plan.batches):
            assert {text // (window * size) for row in rows for text in row} == {at // window}


@given(LENGTHS, st.integers(1, 9), st.integers(40, 60))
def test_what_a_plan_counts_is_what_its_tensors_hold(lengths: list[int], size: int, longest: int) -> None:
    texts = [torch.full((length,), 1 + at) for at, length in enumerate(lengths)]
    for how in WAYS:
        plan = batches_of(lengths, how, size, longest)
        padded = tokens = 0
        for rows in plan.batches:
            picked = [texts[text] for row in rows for text in row]
            places = [place for place, row in enumerate(rows) for _ in row]
            packed = how == "packing"
            batch = collate_packed(picked, places, longest) if packed else collate_padded(picked)
            padded += batch["tokens"].numel()
            tokens += int((batch["tokens"] != 0).sum())
            assert int(batch["count"]) == int((batch["tokens"] != 0).sum())
        assert (padded, tokens) == (plan.padded, plan.tokens)


@given(LENGTHS, st.integers(40, 60))
def test_packing_is_first_fit_decreasing(lengths: list[int], longest: int) -> None:
    plan = batches_of(lengths, "packing", len(lengths), longest)
    rows = [sum(lengths[text] for text in row) for row in plan.batches[0]]
    assert sorted(rows) == sorted(naive_first_fit_decreasing(lengths, longest))


def test_few_texts_are_packed_batch_by_batch() -> None:
    """Together they would fill one row, and four batches need a row each."""
    plan = batches_of([1] * 8, "packing", 2, 100)
    assert plan.batches == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert plan.padded == 400


def test_on_texts_of_lognormal_length_packing_wastes_least_and_padding_most() -> None:
    lengths = token_counts(make_texts(1600, 100, seed=1), 512)
    padding, bucketing, packing = (batches_of(lengths, how, 32, 512).wasted for how in WAYS)
    assert padding > 0.5
    assert bucketing < 0.1
    assert packing < 0.02


def test_batches_of_one_seed_are_the_same_and_do_not_come_by_length() -> None:
    lengths = token_counts(make_texts(800, 100, seed=1), 512)
    for how in ("bucketing", "packing"):
        plan = batches_of(lengths, how, 16, 512, seed=1)
        assert plan == batches_of(lengths, how, 16, 512, seed=1)
        assert plan.batches != batches_of(lengths, how, 16, 512, seed=2).batches
        means = [np.mean([lengths[text] for row in rows for text in row]) for rows in plan.batches]
        assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5


def test_what_cannot_be_batched_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"batching: 'sorting' is none; accepted: padding, bucketing, packing"
    ):
        batches_of([1, 2], "sorting", 1, 4)
    with pytest.raises(UsageError, match="without tokens"):
        batches_of([1, 0], "padding", 1, 4)


@pytest.mark.parametrize("how", WAYS)
def test_in_the_endless_stream_every_text_comes_once_an_epoch(how: str) -> None:
    """Whether or not windows end where epochs do."""
    lengths = [1 + index % 13 for index in range(60)]
    arrange, window = arrangement(how, lengths, 4, 13, seed=3, window=6)
    batches = EndlessBatches(Order(samples=60, seed=1), 4, window=window, arrange=arrange)
    found = list(itertools.islice(batches, 30))  # two epochs, five windows
    seen = Counter((pick.epoch, pick.index) for batch in found for pick in batch)
    assert seen == Counter((epoch, index) for epoch in (0, 1) for index in range(60))
    for batch in found:
        if how == "packing":
            rows = Counter[int]()
            for pick in batch:
                rows[pick.row] += lengths[pick.index]
            assert set(rows) == set(range(len(rows)))
            assert max(rows.values()) <= 13
        else:
            assert len(batch) == 4


@pytest.mark.parametrize("how", ["bucketing", "packing"])
def test_a_stop_within_a_window_loses_and_repeats_nothing(how: str) -> None:
    lengths = [1 + index % 13 for index in range(60)]
    arrange, window = arrangement(how, lengths, 4, 13, seed=3, window=6)
    batches = EndlessBatches(Order(samples=60, seed=1), 4, window=window, arrange=arrange)
    whole = list(itertools.islice(batches, 40))
    for taken in (0, 1, 6, 8, 17):
        assert list(itertools.islice(batches.resume(batches.state(taken)), 20)) == whole[taken : taken + 20]


def test_a_stop_is_not_taken_up_by_another_way_of_batching() -> None:
    def endless(how: str, longest: int) -> EndlessBatches:
        arrange, window = arrangement(how, [5] * 20, 4, longest, seed=3)
        return EndlessBatches(Order(samples=20, seed=1), 4, window=window, arrange=arrange)

    saved = endless("packing", 10).state(1)
    with pytest.raises(UsageError, match=r"batching: .*packing to 10 tokens, and here it is bucketing to 10"):
        endless("bucketing", 10).resume(saved)
    with pytest.raises(UsageError, match="packing to 12 tokens"):
        endless("packing", 12).resume(saved)


def test_windows_do_not_share_one_shuffle_of_their_batches() -> None:
    """Of texts in one order, so that windows differ by their number alone."""
    arrange, _ = arrangement("bucketing", list(range(1, 41)), 4, 100, seed=3, window=10)
    assert arrange is not None
    picks = [Pick(0, index) for index in range(40)]
    assert arrange(picks, 0) == arrange(picks, 0)
    assert arrange(picks, 0) != arrange(picks, 1)


def test_padded_texts_keep_their_tokens() -> None:
    batch = collate_padded([torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert batch["tokens"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["tokens"].dtype == torch.int64
    assert int(batch["count"]) == 4


def test_packed_texts_lie_one_behind_the_other() -> None:
    texts = [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8, 9])]
    batch = collate_packed(texts, [0, 1, 0], 5)
    assert batch["tokens"].tolist() == [[5, 6, 8, 9, 0], [7, 0, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 2, 2, 0], [1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert int(batch["count"]) == 5


def test_a_row_that_is_too_full_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0: 6 tokens of 5"):
        collate_packed([torch.ones(3), torch.ones(3)], [0, 0], 5)


def test_attention_masked_by_segments_gives_what_each_text_gives_alone() -> None:
    texts = [tokenise(text, 12) for text in make_texts(6, 5, seed=1)]
    plan = batches_of([len(text) for text in texts], "packing", 6, 16)
    order = texts_of(plan)
    places = [place for place, row in enumerate(plan.batches[0]) for _ in row]
    batch = collate_packed([texts[text] for text in order], places, 16)
    assert len(set(places)) < len(places), "no row has two texts"

    vectors = torch.nn.Embedding(1 << 15, 8)
    placed = torch.nn.Embedding(16, 8)

    def attended(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = vectors(tokens) + placed(positions)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    segments = batch["segments"]
    together = attended(batch["tokens"], batch["positions"], segments[:, :, None] == segments[:, None, :])
    for text, row in zip(order, places, strict=True):
        tokens = texts[text]
        size = len(tokens)
        alone = attended(tokens[None], torch.arange(size)[None], torch.ones(1, size, size, dtype=torch.bool))
        starts = [
            low
            for low in range(17 - size)
            if torch.equal(batch["tokens"][row, low : low + size], tokens)
            and int(batch["positions"][row, low]) == 0
        ]
        assert any(torch.allclose(together[row, low : low + size], alone[0], atol=1e-5) for low in starts)
