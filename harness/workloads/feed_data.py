"""The data of a feed case: samples, where they are kept, the batches that are made of them, and what those are.

A sample of an arm is a number of batches, TURNS or more of each worker: workers deliver in turns, often all of them at
about the same time, and a part of a turn would be all waiting or none. With text it is whole epochs besides, so that
all samples are the same work: which texts make a batch is found once, and batches come in a new order each epoch.
Pictures are all alike, so any batches of the stream will do.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from harness import files
from harness.case import Case
from harness.profiles import FeedSizes, Profile
from harness.workloads.batching import arrangement, collate_packed, collate_padded
from harness.workloads.order import EndlessBatches, Order, Pick
from harness.workloads.samples import decode_jpeg, make_jpegs, make_texts, rng_of, token_counts, tokenise
from harness.workloads.sources import Source, make_source

# Batches whose making is timed piece by piece.
COSTED = 3

# Batches of every worker in a sample, at least.
TURNS = 2

# Of a batch, what stays on the host: who its samples are.
ON_HOST = ("index", "count")


class FeedDataset(Dataset[Any]):
    """Samples of a source, made into what a batch is made of: bytes are read, then decoded or tokenised."""

    def __init__(self, source: Source, data: str, *, crop: int, longest: int, seed: int) -> None:
        self.source, self._data = source, data
        self._crop, self._longest, self._seed = crop, longest, seed

    def __len__(self) -> int:
        return len(self.source)

    def read(self, pick: Pick) -> bytes:
        return self.source.read(pick.index)

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        """A picture, uint8, shape (3, crop, crop), cut and mirrored by chance; or tokens, int64, shape (tokens,).

        Chance is of (seed, epoch, sample), so that every process makes the same of a pick.
        """
        if self._data == "jpeg":
            return decode_jpeg(data, self._crop, rng_of(self._seed, pick.epoch, pick.index))
        return tokenise(data, self._longest)

    def __getitem__(self, pick: Pick) -> tuple[Pick, Tensor]:
        return pick, self.decode(pick, self.read(pick))


class Collate:
    """Samples made into a batch: a dict of tensors. `index`: int64, shape (samples, 2), epoch and number of each."""

    def __init__(self, data: str, batching: str, longest: int) -> None:
        self._data, self._batching, self._longest = data, batching, longest

    def __call__(self, samples: Sequence[tuple[Pick, Tensor]]) -> dict[str, Tensor]:
        picks, values = [pick for pick, _ in samples], [value for _, value in samples]
        if self._data == "jpeg":
            batch = {"pixels": default_collate(values)}
        elif self._batching == "packing":
            batch = collate_packed(values, [pick.row for pick in picks], self._longest)
        else:
            batch = collate_padded(values)
        return batch | {"index": torch.tensor([(pick.epoch, pick.index) for pick in picks])}


@lru_cache(maxsize=2)
def _blobs(data: str, count: int, size: int, seed: int) -> list[bytes]:
    """Samples as they are stored. The cases of a launch share them."""
    return make_jpegs(count, size, seed) if data == "jpeg" else make_texts(count, size, seed)


class FeedData:
    """Samples, the loader's dataset and collate function, and batches to compare with.

    batches: the stream of batches that the loader is to ask for, and on a second pass again. repeats: how many are in a
    sample of an arm. epoch: a sample begins and ends where so many batches do; 1 where it may begin anywhere. cached:
    batches as they should be, made in this process from memory, an epoch of text or as many pictures as are usual in a
    sample; all shapes that text has are among them.
    """

    def __init__(
        self,
        case: Case,
        profile: Profile,
        dataset: Callable[..., FeedDataset] = FeedDataset,
        collate: Callable[..., Any] = Collate,
    ) -> None:
        sizes, seed, self.kind = profile.feed, profile.seed, case.word("data")
        blobs = self._stored(sizes, seed)
        self.batches, self._first = self._stream(sizes, blobs, case.word("batching"), seed)
        self.epoch = len(self._first) if self.kind == "text" else 1
        together = math.lcm(self.epoch, max(1, case.number("workers")))
        least = max(sizes.batches, TURNS * case.number("workers"))
        self.repeats = -(-least // together) * together
        made: dict[str, Any] = {"crop": sizes.crop, "longest": sizes.longest, "seed": seed}
        form = (self.kind, case.word("batching"), sizes.longest)
        folder = files.scratch()
        with contextlib.ExitStack() as opened:
            memory = make_source("memory", blobs, folder)
            opened.callback(memory.close)
            source = make_source(
                case.word("source"),
                blobs,
                folder,
                latency_ms=sizes.latency_ms,
                mib_per_s=sizes.mib_per_s,
            )
            opened.callback(source.close)
            self._known, self._collate = FeedDataset(memory, self.kind, **made), Collate(*form)
            self.cached = [self.reference(picks) for picks in self._first]
            self.dataset, self.collate = dataset(source, self.kind, **made), collate(*form)
            self._opened = opened.pop_all()

    def reference(self, picks: Sequence[Pick]) -> dict[str, Tensor]:
        """The batch as it should be, made in this process from memory."""
        return self._collate([self._known[pick] for pick in picks])

    @property
    def most_items(self) -> int:
        """Pictures, or tokens with padding, of the largest batch."""
        if self.kind == "jpeg":
            return max(int(batch["pixels"].shape[0]) for batch in self.cached)
        return max(int(batch["tokens"].numel()) for batch in self.cached)

    @property
    def most_bytes(self) -> int:
        """Of the largest batch."""
        return max(sum(tensor.nbytes for tensor in batch.values()) for batch in self.cached)

    def facts(self) -> dict[str, Any]:
        """Of a batch, on the mean: samples, batch_bytes (to the device), stored_bytes; tokens and padded of text."""
        count, source = len(self.cached), self.dataset.source
        samples = sum(len(batch["index"]) for batch in self.cached) / count
        stored = sum(source.stored_bytes(index) for index in range(len(source))) / len(source)
        sent = sum(tensor.nbytes for batch in self.cached for tensor in sendable(batch).values())
        facts: dict[str, Any] = {
            "samples": samples,
            "batch_bytes": sent / count,
            "stored_bytes": stored * samples,
        }
        if self.kind == "text":
            facts["tokens"] = sum(int(batch["count"]) for batch in self.cached) / count
            facts["padded"] = sum(batch["tokens"].numel() for batch in self.cached) / count
        return facts

    def costs(self) -> dict[str, float]:
        """read_ms, decode_ms: what one process needs to get the bytes of a batch, and to make the batch of them.

        The mean of a few batches: the fastest would leave out what they differ in.
        """
        batches = self._first[:COSTED]
        read = made = 0.0
        self.dataset.read(batches[0][0])  # a connection or a file is opened
        for picks in batches:
            began = time.perf_counter()
            blobs = [self.dataset.read(pick) for pick in picks]
            between = time.perf_counter()
            self._collate(
                [(pick, self.dataset.decode(pick, blob)) for pick, blob in zip(picks, blobs, strict=True)]
            )
            read += between - began
            made += time.perf_counter() - between
        return {"read_ms": read * 1e3 / len(batches), "decode_ms": made * 1e3 / len(batches)}

    def close(self) -> None:
        self._opened.close()

    def _stored(self, sizes: FeedSizes, seed: int) -> list[bytes]:
        if self.kind == "jpeg":
            return _blobs("jpeg", max(sizes.pool, sizes.pictures), sizes.image, seed)
        return _blobs("text", sizes.batches * sizes.documents, sizes.words, seed)

    def _stream(
        self, sizes: FeedSizes, blobs: Sequence[bytes], batching: str, seed: int
    ) -> tuple[EndlessBatches, list[list[Pick]]]:
        """The batches of all epochs, and the first of them: an epoch of text, or enough to look at of pictures."""
        order = Order(samples=len(blobs), seed=seed)
        if self.kind == "jpeg":
            endless = EndlessBatches(order, sizes.pictures)
            return endless, _first(endless, max(sizes.batches, COSTED))
        lengths, size, count = token_counts(blobs, sizes.longest), sizes.documents, sizes.batches
        arrange, window = arrangement(batching, lengths, size, sizes.longest, seed, window=count)
        composed = _first(EndlessBatches(order, size, window=window, arrange=arrange), count)
        return EndlessBatches(order, size, window=count, arrange=_Shuffled(composed, seed)), composed


class _Shuffled:
    """The batches of an epoch of text: always the same ones, in a new order each epoch."""

    name = "the same batches in a new order"

    def __init__(self, batches: Sequence[Sequence[Pick]], seed: int) -> None:
        self._batches, self._seed = batches, seed

    def __call__(self, picks: Sequence[Pick], number: int) -> list[list[Pick]]:
        order = rng_of(self._seed, number, len(self._batches)).permutation(len(self._batches))
        return [[replace(pick, epoch=number) for pick in self._batches[at]] for at in order]


def sendable(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch goes to the device."""
    return {name: tensor for name, tensor in batch.items() if name not in ON_HOST}


def _first(batches: EndlessBatches, count: int) -> list[list[Pick]]:
    stream = iter(batches)
    return [next(stream) for _ in range(count)]
