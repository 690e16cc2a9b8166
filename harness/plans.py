"""The fixed work of a case: its shapes, launches and memory, from the case and its profile alone.

Never from a timing of the same run: a slower copy would grow the compute and hide itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.case import Case
from harness.errors import UsageError
from harness.profiles import Profile
from harness.sizes import format_size, parse_size

# Rows of the pool that harness/workloads/h2d.py widens to float32 at a time.
WIDENED_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A batch in `chunks` chunks through a ring of `slots` device buffers of `longest` rows each."""

    chunks: int
    slots: int
    longest: int

    @property
    def rows(self) -> int:
        """Rows of the ring."""
        return self.slots * self.longest


@dataclass(frozen=True, kw_only=True)
class H2DPlan:
    """One sample of an h2d case: `repeats` batches of (rows, width), each row in `gemms` products of `columns`.

    pool_batches: batches in host memory (pinned or not), taken in turn. split, whole: the layouts in n chunks and
    in one.
    """

    rows: int
    width: int
    columns: int
    gemms: int
    repeats: int
    pool_batches: int
    split: Layout
    whole: Layout
    element_bytes: int
    pinned: bool

    @property
    def flops(self) -> float:
        """Floating-point operations of one sample (2 per multiply-add)."""
        return 2.0 * self.rows * self.width * self.columns * self.gemms * self.repeats

    @property
    def launches(self) -> int:
        """Launches of the overlapped arm on its busier stream: GEMMs, and an event and a wait a chunk."""
        return self.repeats * self.split.chunks * (self.gemms + 2)

    @property
    def ring_rows(self) -> int:
        return max(self.split.rows, self.whole.rows)

    @property
    def burn_rows(self) -> int:
        """Rows of the conditioning GEMM."""
        return min(self.ring_rows, self.width)

    @property
    def host_bytes(self) -> int:
        """Host memory; a pinned pool is rounded up to a power of two by torch's allocator."""
        pool = self.pool_batches * self.rows * self.width * self.element_bytes
        return 1 << (pool - 1).bit_length() if self.pinned else pool

    @property
    def device_bytes(self) -> int:
        """Device memory at the highest point, checks included."""
        pool_rows = self.pool_batches * self.rows
        inputs = (pool_rows + 2 * self.ring_rows + self.gemms * self.columns) * self.width
        outputs = (self.repeats * self.rows + self.burn_rows) * self.columns
        # Weights, and the pool block by block, are widened to float32 to know the products beforehand; a chunk is
        # compared with its source element by element. One such piece is alive at a time.
        widened = 4 * max(self.columns, min(pool_rows, WIDENED_ROWS)) if self.element_bytes < 4 else 0
        compared = self.whole.longest
        return (inputs + outputs) * self.element_bytes + max(widened, compared) * self.width


def plan_h2d(case: Case, profile: Profile) -> H2DPlan:
    """The work of an h2d case; UsageError where it has more chunks than rows."""
    memory, size, chunks = case.word("memory"), case.number("size"), case.number("chunks")
    rows = size // profile.row_bytes
    if chunks > rows or size % profile.row_bytes:
        raise UsageError(
            f"h2d: chunks: got {chunks} with size {format_size(size)}, want at most its {rows} rows of "
            f"{profile.row_bytes} bytes, and a size of whole rows (profile {profile.key})"
        )
    total = _at_size(profile.h2d.columns, memory, size, profile) * float(case["ratio"])
    gemms = max(1, math.ceil(total / profile.max_columns))
    columns = max(1, round(total / gemms / profile.column_step)) * profile.column_step
    repeats = _at_size(profile.h2d.repeats, memory, size, profile)
    rotated = max(2, math.ceil(profile.rotate_bytes / size))

    def layout(chunks: int, *, all_at_once: bool) -> Layout:
        longest = math.ceil(rows / chunks)
        # Two buffers pipeline two stages without loss; more of them keep their contents out of the cache.
        slots = max(2, math.ceil(profile.rotate_bytes / (longest * profile.row_bytes)))
        total = chunks * repeats
        return Layout(chunks=chunks, slots=total if all_at_once else min(slots, total), longest=longest)

    return H2DPlan(
        rows=rows,
        width=profile.width,
        columns=columns,
        gemms=gemms,
        repeats=repeats,
        pool_batches=rotated,
        split=layout(chunks, all_at_once=case.word("issue") == "copies-first"),
        whole=layout(1, all_at_once=False),
        element_bytes=profile.element_bytes,
        pinned=memory == "pinned",
    )


def _at_size(table: Mapping[str, Mapping[str, int]], memory: str, size: int, profile: Profile) -> int:
    """The entry of the largest listed size that is not above `size`; the smallest one below all of them."""
    if not table.get(memory):
        raise UsageError(
            f"profile {profile.key}: has no sizes for {memory} memory, only for {', '.join(table)}"
        )
    listed = sorted((parse_size(text), value) for text, value in table[memory].items())
    fitting = [value for at, value in listed if at <= size]
    return fitting[-1] if fitting else listed[0][1]


def shortage(plan: H2DPlan, device: str, *, free_host: int | None, free_device: int | None) -> str | None:
    """Why the plan does not fit in what is free, in words; None if it fits. A None is not checked.

    On the cpu backend device memory is host memory too.
    """
    on_host = plan.host_bytes + (plan.device_bytes if device == "cpu" else 0)
    on_device = 0 if device == "cpu" else plan.device_bytes
    for kind, need, free in (("host", on_host, free_host), ("device", on_device, free_device)):
        if free is not None and need > free:
            return f"needs {need / 2**30:.2f} GiB of {kind} memory, and {free / 2**30:.2f} GiB are free"
    return None
