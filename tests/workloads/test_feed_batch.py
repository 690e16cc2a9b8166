"""Tensors are found in batches of any type."""

import collections
from typing import Any, NamedTuple

import torch
from feeds import PictureBatch

from harness.workloads.feed_batch import fields, unpinned


class Named(NamedTuple):
    a: Any
    b: Any


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.again = self  # a cycle


class Slotted:
    __slots__ = ("kept", "unset")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


def test_every_tensor_of_a_batch_is_found_by_its_path() -> None:
    t = [torch.full((1,), float(i)) for i in range(9)]
    batch = {
        "x": t[0],
        "pair": Named(t[1], [t[2], "text", None]),
        "tuple": (t[3], 4),
        "data": PictureBatch(t[4], {"deep": t[5]}),  # type: ignore[arg-type]
        "plain": Plain(t[6]),
        "slots": Slotted(t[7]),
        "mapping": collections.OrderedDict(y=t[8]),
    }
    paths = [
        "x",
        "pair.a",
        "pair.b.0",
        "tuple.0",
        "data.pixels",
        "data.index.deep",
        "plain.inner",
        "slots.kept",
    ]
    found = fields(batch)
    assert list(found) == [*paths, "mapping.y"]
    assert all(found[path] is t[i] for i, path in enumerate([*paths, "mapping.y"]))
    assert fields(t[0]) == {"": t[0]}


def test_tensors_that_are_not_pinned_are_named_with_their_type() -> None:
    """No memory is pinned without a GPU, so that all are named here."""
    batch = PictureBatch(torch.zeros(1), torch.zeros(1))
    if torch.cuda.is_available():
        batch.index = batch.index.pin_memory()
    pinned = [] if torch.cuda.is_available() else ["index in PictureBatch"]
    assert unpinned(batch) == ["pixels in PictureBatch", *pinned]
    assert unpinned(torch.zeros(1)) == ["the batch"]
    assert unpinned([torch.zeros(1)]) == ["0 in list"]
