"""The fixed work of a step on a batch, without autograd: one matrix product after another.

A step on pictures cuts them into patches, as a vision transformer begins; one on text looks up a vector for every
token. What follows is products of those rows, so that work is in proportion to pictures, or to tokens with padding.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from harness.backends.base import Backend, Tensor
from harness.backends.tensors import DTYPES
from harness.profiles import FeedSizes, Profile
from harness.workloads.samples import VOCABULARY

# Distinct matrices that the products of a step take in turn.
WEIGHTS = 4

# Roughly the mean and deviation of a channel of a photograph, as every input path takes them out.
MEAN, DEVIATION = 120.0, 60.0


def put(backend: Backend, work: Callable[[], object]) -> None:
    """Issue `work` on `backend.main`: on a cpu by the thread that is its stream, on CUDA on torch's current stream."""
    if backend.kind == "cpu":
        backend.main.put(work)
    else:
        work()


class Step(Protocol):
    """A step on batches of up to so many rows of a product; memory is taken when it is made."""

    def run(self, batch: Mapping[str, Tensor]) -> None:
        """Issue it on `backend.main`, for a batch that is on the device, or will be when the stream gets there."""

    def rows(self, batch: Mapping[str, Tensor]) -> int:
        """Rows of the products of that batch."""

    def flops(self, batch: Mapping[str, Tensor]) -> float:
        """Floating-point operations of that batch (2 per multiply-add)."""

    def signature(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The sum of every row of the last result, on the host in float32, shape (rows,); waits for the device."""


class _Products:
    """`count` products of (rows, across) by (across, hidden), summed in `out`, and perhaps `extra_ms` of waiting."""

    def __init__(
        self, backend: Backend, profile: Profile, *, rows: int, across: int, count: int, extra_ms: float
    ) -> None:
        hidden, dtype = profile.feed.hidden, profile.dtype
        self.backend, self.across, self.count = backend, across, count
        self._hidden, self._extra_ms = hidden, extra_ms
        self.x = backend.device_tensor(rows, across, dtype)
        self.out = backend.device_tensor(rows, hidden, dtype)
        self._sums = backend.device_tensor(rows, 1, dtype)
        self._ones = backend.device_tensor(hidden, 1, dtype)
        self._ones.fill_(1.0)
        made = []
        for index in range(min(WEIGHTS, count)):
            weight = backend.device_tensor(across, hidden, dtype)
            backend.fill_normal(weight, profile.seed + 11 + index, across**-0.5 / count)
            made.append(weight)
        self._weights = [made[index % len(made)] for index in range(count)]

    def run(self, rows: int) -> None:
        self.backend.gemm(self.x[:rows], self._weights, self.out[:rows])
        if self._extra_ms:
            self.backend.spin(self._extra_ms, self.backend.main)

    def flops(self, rows: int) -> float:
        return 2.0 * rows * self.across * self._hidden * self.count

    def signature(self, rows: int) -> Tensor:
        self.backend.synchronize()
        torch.mm(self.out[:rows], self._ones, out=self._sums[:rows])
        return self._sums[:rows, 0].to("cpu", torch.float32, copy=True)


class PictureStep:
    """On `pixels`, uint8, shape (pictures, 3, side, side): a row for every whole patch of a picture."""

    def __init__(self, backend: Backend, profile: Profile, pictures: int, extra_ms: float = 0.0) -> None:
        sizes = profile.feed
        self._patch, self._grid = sizes.patch, _grid(sizes)
        self._products = _Products(
            backend,
            profile,
            rows=pictures * self._grid**2,
            across=3 * self._patch**2,
            count=sizes.picture_products,
            extra_ms=extra_ms,
        )

    def run(self, batch: Mapping[str, Tensor]) -> None:
        pixels = batch["pixels"]
        put(self._products.backend, lambda: self._patches(pixels))
        self._products.run(self.rows(batch))

    def rows(self, batch: Mapping[str, Tensor]) -> int:
        return int(batch["pixels"].shape[0]) * self._grid**2

    def flops(self, batch: Mapping[str, Tensor]) -> float:
        return self._products.flops(self.rows(batch))

    def signature(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._products.signature(self.rows(batch))

    def _patches(self, pixels: Tensor) -> None:
        grid, patch = self._grid, self._patch
        side = grid * patch
        cut = pixels[:, :, :side, :side].unflatten(3, (grid, patch)).unflatten(2, (grid, patch))
        x = self._products.x[: pixels.shape[0] * grid**2]
        x.view(-1, grid, grid, 3, patch, patch).copy_(cut.permute(0, 2, 4, 1, 3, 5))
        x.sub_(MEAN).mul_(1 / DEVIATION)


class TextStep:
    """On `tokens`, int64, shape (rows, length): a row of the products for each of them, padding too."""

    def __init__(self, backend: Backend, profile: Profile, tokens: int, extra_ms: float = 0.0) -> None:
        sizes = profile.feed
        self._table = backend.device_tensor(VOCABULARY, sizes.width, profile.dtype)
        backend.fill_normal(self._table, profile.seed + 10)
        self._products = _Products(
            backend,
            profile,
            rows=tokens,
            across=sizes.width,
            count=sizes.text_products,
            extra_ms=extra_ms,
        )

    def run(self, batch: Mapping[str, Tensor]) -> None:
        tokens, rows = batch["tokens"].view(-1), self.rows(batch)
        vectors = self._products.x[:rows]
        put(self._products.backend, lambda: torch.index_select(self._table, 0, tokens, out=vectors))
        self._products.run(rows)

    def rows(self, batch: Mapping[str, Tensor]) -> int:
        return int(batch["tokens"].numel())

    def flops(self, batch: Mapping[str, Tensor]) -> float:
        return self._products.flops(self.rows(batch))

    def signature(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._products.signature(self.rows(batch))


def step_bytes(data: str, profile: Profile, items: int) -> int:
    """Device memory of a step on `items` pictures, or tokens with padding."""
    sizes = profile.feed
    if data == "jpeg":
        rows, across, count, table = items * _grid(sizes) ** 2, 3 * sizes.patch**2, sizes.picture_products, 0
    else:
        rows, across, count, table = items, sizes.width, sizes.text_products, VOCABULARY * sizes.width
    weights = min(WEIGHTS, count) * across * sizes.hidden
    elements = table + weights + rows * (across + sizes.hidden + 1) + sizes.hidden
    return elements * DTYPES[profile.dtype].itemsize


def _grid(sizes: FeedSizes) -> int:
    """Patches along a side of a picture."""
    return sizes.crop // sizes.patch
