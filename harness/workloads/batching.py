"""Texts of varied length as batches of tensors: padded as they come, sorted by length first, or packed into rows.

What is computed on padding is wasted. Padding wastes what texts differ in length within a batch; bucketing makes them
alike; packing fills rows of the longest length with several texts, and needs a mask so that they do not see each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.errors import UsageError
from harness.workloads.order import Arrange, Pick
from harness.workloads.samples import PADDING

WINDOW = 50  # batches whose texts are sorted or packed together

Rows = list[list[int]]  # of a batch: the places in the list of lengths of the texts in each row


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Batches of rows of texts, and what they cost.

    shapes: (rows, length) of each batch. tokens: of the texts, each cut to the longest. padded: of the tensors, padding
    included.
    """

    batches: list[Rows]
    shapes: list[tuple[int, int]]
    tokens: int

    @property
    def padded(self) -> int:
        return sum(rows * length for rows, length in self.shapes)

    @property
    def wasted(self) -> float:
        """Share of the tensors' tokens that is padding."""
        return 1 - self.tokens / self.padded


def batches_of(
    lengths: Sequence[int], how: str, size: int, longest: int, *, window: int = WINDOW, seed: int = 0
) -> Plan:
    """Batches of texts of `lengths` tokens, at least 1 each, cut to `longest`.

    padding: `size` texts in the order given, padded to the longest of the batch. bucketing: as that, of texts sorted by
    length within each `window` batches, and the batches in a random order. packing: texts of a window put first-fit
    decreasing into rows of `longest`, and the rows, in a random order, shared out over as many batches; a batch has
    `size` texts on the mean. Where they are too few to fill a row for each batch, each is packed by itself.
    """
    if min(lengths, default=1) < 1:
        raise UsageError("lengths: a text without tokens; must have 1 or more")
    ways: dict[str, Callable[..., list[Rows]]] = {
        "padding": _padding,
        "bucketing": _bucketing,
        "packing": _packing,
    }
    if how not in ways:
        raise UsageError(f"batching: {how!r} is none; accepted: {', '.join(ways)}")
    cut = np.minimum(np.asarray(lengths, dtype=np.int64), longest)
    rng = np.random.default_rng([seed, len(cut)])
    batches: list[Rows] = []
    for low in range(0, len(cut), window * size):
        texts = np.arange(low, min(len(cut), low + window * size))
        batches += ways[how](texts, cut, size, longest, rng)
    shapes = [
        (len(rows), longest if how == "packing" else max(int(cut[row[0]]) for row in rows))
        for rows in batches
    ]
    return Plan(batches=batches, shapes=shapes, tokens=int(cut.sum()))


def arrangement(
    how: str, lengths: Sequence[int], size: int, longest: int, seed: int, *, window: int = WINDOW
) -> tuple[Arrange | None, int]:
    """The `arrange` and the `window` that EndlessBatches takes for batches of `size` texts; lengths: of all samples.

    What sorts or packs a window runs where batches are asked for, in the process that trains.
    """
    if how == "padding":
        return None, 1
    made = _Windows(how=how, lengths=lengths, size=size, longest=longest, seed=seed, window=window)
    return made, window


@dataclass(frozen=True, kw_only=True)
class _Windows:
    how: str
    lengths: Sequence[int]
    size: int
    longest: int
    seed: int
    window: int

    @property
    def name(self) -> str:
        return f"{self.how} to {self.longest} tokens"

    def __call__(self, picks: Sequence[Pick], number: int) -> list[list[Pick]]:
        lengths = [self.lengths[pick.index] for pick in picks]
        # A window's own seed: the batches of each would else come in the same order.
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        plan = batches_of(lengths, self.how, self.size, self.longest, window=self.window, seed=seed)
        return [
            [replace(picks[at], row=row) for row, texts in enumerate(rows) for at in texts]
            for rows in plan.batches
        ]


def collate_padded(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """A row for each text, padded to the longest. tokens: int64, shape (texts, longest of them). count: tokens that are
    not padding, int64, no dimensions."""
    rows = torch.full((len(texts), max(len(text) for text in texts)), PADDING)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return {"tokens": rows, "count": torch.tensor(sum(len(text) for text in texts))}


def collate_packed(texts: Sequence[Tensor], rows: Sequence[int], longest: int) -> dict[str, Tensor]:
    """Text i behind those before it in row rows[i], of max(rows) + 1 rows; ValueError where one does not fit.

    tokens, segments, positions: int64, shape (rows, longest). segments: 0 is padding, 1 and so on the texts of the row:
    two tokens may see each other where theirs are equal. positions: place within the text. count: as collate_padded's.
    """
    shape = (max(rows) + 1, longest)
    tokens, segments, positions = (
        torch.full(shape, PADDING),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
    )
    used, last = [0] * shape[0], [0] * shape[0]
    for text, row in zip(texts, rows, strict=True):
        low, high = used[row], used[row] + len(text)
        if high > longest:
            raise ValueError(f"row {row}: {high} tokens of {longest}")
        used[row], last[row] = high, last[row] + 1
        tokens[row, low:high] = text
        segments[row, low:high] = last[row]
        positions[row, low:high] = torch.arange(len(text))
    return {
        "tokens": tokens,
        "segments": segments,
        "positions": positions,
        "count": torch.tensor(sum(len(text) for text in texts)),
    }


Places = np.ndarray[tuple[int], np.dtype[np.int64]]


def _padding(texts: Places, cut: Places, size: int, longest: int, rng: np.random.Generator) -> list[Rows]:
    return [[[int(at)] for at in texts[low : low + size]] for low in range(0, len(texts), size)]


def _bucketing(texts: Places, cut: Places, size: int, longest: int, rng: np.random.Generator) -> list[Rows]:
    batches = _padding(texts[np.argsort(cut[texts], kind="stable")], cut, size, longest, rng)
    return [batches[at] for at in rng.permutation(len(batches))]


def _packing(texts: Places, cut: Places, size: int, longest: int, rng: np.random.Generator) -> list[Rows]:
    count = -(-len(texts) // size)
    rows = _first_fit_decreasing(texts, cut, longest)
    if len(rows) < count:
        return [
            _first_fit_decreasing(texts[low : low + size], cut, longest) for low in range(0, len(texts), size)
        ]
    return [[rows[at] for at in share] for share in np.array_split(rng.permutation(len(rows)), count)]


def _first_fit_decreasing(texts: Places, cut: Places, longest: int) -> Rows:
    """Texts in rows of `longest` tokens: from the longest text to the shortest, each into the first row that has room
    (Johnson 1973: at most 11/9 of the fewest rows, and a few)."""
    room = np.full(len(texts), longest)
    rows: Rows = []
    for at in texts[np.argsort(-cut[texts], kind="stable")]:
        row = int(np.argmax(room[: len(rows) + 1] >= cut[at]))  # the first that is so; a new row always is
        if row == len(rows):
            rows.append([])
        rows[row].append(int(at))
        room[row] -= cut[at]
    return rows
