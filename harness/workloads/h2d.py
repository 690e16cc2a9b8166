"""h2d: a batch is copied to the device in n chunks while GEMMs read the chunks that have arrived.

    host pool (batches, rows, width) --copy--> ring of device buffers --GEMMs on main--> out (rows, columns)

Arms: `transfer` and `compute` alone in n chunks, `serial` (the same work in sequence on one stream), `overlapped`,
and for n > 1 the unsplit `transfer_1` and `compute_1`. Copies go to the stream that the case names, save in
`serial`; everything else that could differ between arms is the same. Several ranks do the same at once, each with
memory and a device of its own: they share what lies before the device.

Every sample is checked. What a copy left in the ring must equal its source. Products are checked by Freivalds'
method (R. Freivalds, "Probabilistic machines can use less running time", 1977): with a random sign vector v,
out @ v must equal batch @ (W @ v), at the price of one read of `out`. A row that was multiplied before it had
arrived, in part, or for some of the columns only, is off by many times the rounding error.
"""

import itertools
import time
from collections.abc import Iterator

import torch

from harness.backends.base import Backend, Event, Stream, Tensor
from harness.case import Case
from harness.group import Alone, Group
from harness.plans import Layout, plan_h2d, shortage
from harness.profiles import Profile
from harness.workloads import refusals
from harness.workloads.base import Sample

# Launches that one gated sample may queue: the driver blocks the host at about 1,000 behind a closed gate.
MAX_GATED_LAUNCHES = 500

# Largest |out @ v - expected| accepted, in standard deviations of out @ v. Rounding stays under a third of it;
# stale rows in a single 128-column tile of the widest product are off by twice as much.
TOLERANCE = 0.05


class _Views:
    """The pieces of one layout, cut once: slicing costs the host more than a launch does."""

    def __init__(
        self, layout: Layout, *, rows: int, repeats: int, host: Tensor, ring: Tensor, out: Tensor
    ) -> None:
        self.layout = layout
        bounds = [chunk * rows // layout.chunks for chunk in range(layout.chunks + 1)]
        spans = list(itertools.pairwise(bounds))
        batches = host.shape[0] // rows
        self.sources = [
            [host[b * rows + low : b * rows + high] for low, high in spans] for b in range(batches)
        ]
        self.pieces: list[tuple[int, Tensor, Tensor]] = []  # (chunk of its batch, slot, rows of out)
        self.ring_rows: list[tuple[int, int]] = []
        for index in range(repeats * layout.chunks):
            chunk = index % layout.chunks
            low, high = spans[chunk]
            first = index % layout.slots * layout.longest
            base = index // layout.chunks * rows
            self.pieces.append((chunk, ring[first : first + high - low], out[base + low : base + high]))
            self.ring_rows.append((first, first + high - low))


class H2DWorkload:
    """One h2d case on one backend; Skip, on every rank alike, if it has no meaning there or does not fit.

    group: the ranks that begin every sample together. leave_out: a fault on purpose, for tests and controls:
    `stream_wait` leaves out a GEMM's wait for its chunk, `reuse_wait` a copy's wait for the GEMMs that still read its
    buffer. delay_copies_ms: a spin before the first copy of `overlapped`, so that a wait left out shows however fast
    the copies are.
    """

    def __init__(
        self,
        case: Case,
        profile: Profile,
        backend: Backend,
        *,
        group: Group | None = None,
        leave_out: str = "",
        delay_copies_ms: float = 0.0,
    ) -> None:
        self._group = group = group or Alone()
        memory, self._gated = case.word("memory"), case.word("gate") == "on"
        self.plan = plan = plan_h2d(case, profile)
        self._backend = backend
        here = group.share(group.host).count(group.host)
        refusals.skip_alike(group, self._reasons(memory, here))
        self.arms: tuple[str, ...] = ("transfer", "compute", "serial", "overlapped")
        if plan.split.chunks > 1:
            self.arms += ("transfer_1", "compute_1")
        self._copy_stream: Stream = backend.side if case.word("stream") == "side" else backend.main
        self._copies_first = case.word("issue") == "copies-first"
        self._leave_out = leave_out
        self._delay_copies_ms = delay_copies_ms
        self._conditioning = profile.conditioning_gemms
        self._turn = 0
        self._allocate(profile, pinned=memory == "pinned")
        total = plan.repeats * plan.split.chunks
        self._copied: list[Event] = [backend.event() for _ in range(total)]
        self._computed: list[Event] = [backend.event() for _ in range(total)]
        self._start, self._end, self._copies_end = backend.event(), backend.event(), backend.event()

    def _reasons(self, memory: str, here: int) -> Iterator[str | None]:
        """here: ranks that take their host memory from this host."""
        plan, backend = self.plan, self._backend
        yield backend.unsupported(memory=memory, gate=self._gated)
        if self._gated and plan.launches > MAX_GATED_LAUNCHES:
            yield f"one sample queues {plan.launches} launches; at most {MAX_GATED_LAUNCHES} fit behind a gate"
        free_host, free_device = backend.free_bytes()
        yield shortage(plan, backend.kind, free_host=free_host and free_host // here, free_device=free_device)

    def _allocate(self, profile: Profile, *, pinned: bool) -> None:
        plan, backend, dtype, seed = self.plan, self._backend, profile.dtype, profile.seed
        pool_rows, ring_rows = plan.pool_batches * plan.rows, plan.ring_rows

        def normal(rows: int, width: int, seed: int, scale: float = 1.0) -> Tensor:
            tensor = backend.device_tensor(rows, width, dtype)
            backend.fill_normal(tensor, seed, scale)
            return tensor

        # The device keeps the pool to compare with, and decoy rows that stand for data that has not arrived: of
        # the same distribution, so that nothing but their values tells them from a batch.
        self._pool = normal(pool_rows, plan.width, seed)
        self._decoy = normal(ring_rows, plan.width, seed + 1)
        self._host = backend.host_tensor(pool_rows, plan.width, dtype, pinned=pinned)
        self._host.copy_(self._pool)
        self._ring = backend.device_tensor(ring_rows, plan.width, dtype)
        self._out = backend.device_tensor(plan.repeats * plan.rows, plan.columns, dtype)
        scale = (plan.width * plan.gemms) ** -0.5  # out ~ N(0, 1)
        self._weights = [
            normal(plan.width, plan.columns, seed + 3 + index, scale) for index in range(plan.gemms)
        ]
        self._signs = torch.sign(normal(plan.columns, 1, seed + 2)).add_(0.5).sign_()  # no zeros
        product = torch.zeros(plan.width, 1, device=self._signs.device)
        for weight in self._weights:
            product += weight.float() @ self._signs.float()
        self._expected_pool = _product(self._pool, product)
        expected_decoy = _product(self._decoy, product)
        self._split, self._whole = (
            _Views(
                layout, rows=plan.rows, repeats=plan.repeats, host=self._host, ring=self._ring, out=self._out
            )
            for layout in (plan.split, plan.whole)
        )
        # `compute` reads what stands in the ring before the copies: the decoy.
        self._expected_compute = {
            id(views): torch.cat([expected_decoy[low:high] for low, high in views.ring_rows])
            for views in (self._split, self._whole)
        }
        self._burn_x = self._decoy[: plan.burn_rows]
        self._burn_out = backend.device_tensor(plan.burn_rows, plan.columns, dtype)
        backend.synchronize()

    @property
    def facts(self) -> dict[str, int | float]:
        """The fixed work of a sample (harness/workloads/base.py)."""
        plan = self.plan
        return {
            "bytes": plan.repeats * plan.rows * plan.width * plan.element_bytes,
            "flops": plan.flops,
            "repeats": plan.repeats,
            "buffers": plan.split.slots,
        }

    def warm_up(self) -> str | None:
        """Every arm once, ungated: a kernel that loads behind a closed gate would wait for the gate's limit."""
        gated, self._gated = self._gated, False
        try:
            # Not cut short by a fault: another rank may have none, and meets this one in the next sample.
            found = [self.sample(arm).failed for arm in self.arms]
            return next((failed for failed in found if failed is not None), None)
        finally:
            self._gated = gated

    def sample(self, arm: str) -> Sample:
        """Prepare, run and check one arm."""
        backend, views = self._backend, self._whole if arm.endswith("_1") else self._split
        self._turn += 1  # Each sample starts at another batch of the pool: its payload is not the last one's.
        self._prepare(arm)
        if self._gated:
            backend.close_gate()
        for _ in range(self._conditioning):
            backend.gemm(self._burn_x, self._weights[:1], self._burn_out)
        if not self._gated:
            backend.synchronize()
            self._group.meet()
        backend.record(self._start, backend.main)
        began, issued = time.monotonic(), time.perf_counter()
        self._issue(arm, views)
        backend.record(self._end, backend.main)
        host_ms = (time.perf_counter() - issued) * 1e3
        dropped = None
        if self._gated:
            self._group.meet()
            leaked = not backend.pending(self._start)
            began = time.monotonic()
            held = backend.open_gate()
            dropped = "gate leaked" if leaked else None if held else "gate timed out"
        backend.synchronize(self._end)
        ended = time.monotonic()
        spans = {}
        if arm == "overlapped":
            spans["transfer_in_overlapped"] = backend.elapsed_ms(self._start, self._copies_end)
        backend.synchronize()
        return Sample(
            ms=backend.elapsed_ms(self._start, self._end),
            host_ms=host_ms,
            window=(began, ended),
            spans=spans,
            dropped=dropped,
            failed=self._check(arm, views),
        )

    def transfer_buffers(self) -> tuple[Tensor, Tensor]:
        """One batch of host memory and the device memory that the unsplit transfer copies it to."""
        return self._whole.sources[0][0], self._whole.pieces[0][1]

    def close(self) -> None:
        """Wait for the device and give the memory back; the workload is of no use afterwards."""
        self._backend.synchronize()
        self.__dict__.clear()

    def _prepare(self, arm: str) -> None:
        """Fill what the arm writes with plausible wrong values."""
        self._ring.copy_(self._decoy)
        if not arm.startswith("transfer"):
            self._out.fill_(0.25 * (self._turn % 7 + 1))
        self._backend.synchronize()

    def _sources(self, views: _Views) -> Iterator[Tensor]:
        for repeat in range(self.plan.repeats):
            yield from views.sources[self._batch(repeat)]

    def _batch(self, repeat: int) -> int:
        return (self._turn + repeat) % self.plan.pool_batches

    def _issue(self, arm: str, views: _Views) -> None:
        kind = arm.removesuffix("_1")
        if kind == "transfer":
            self._issue_transfer(views)
        elif kind == "compute":
            for _, slot, out in views.pieces:
                self._backend.gemm(slot, self._weights, out)
        elif kind == "serial":
            for source, (_, slot, out) in zip(self._sources(views), views.pieces, strict=True):
                self._backend.copy(slot, source, self._backend.main)
                self._backend.gemm(slot, self._weights, out)
        else:
            self._issue_overlapped(views)

    def _issue_transfer(self, views: _Views) -> None:
        backend, stream = self._backend, self._copy_stream
        if stream is not backend.main:
            backend.wait(stream, self._start)
        for source, (_, slot, _) in zip(self._sources(views), views.pieces, strict=True):
            backend.copy(slot, source, stream)
        if stream is not backend.main:
            backend.record(self._copies_end, stream)
            backend.wait(backend.main, self._copies_end)

    def _issue_overlapped(self, views: _Views) -> None:
        backend, stream, slots = self._backend, self._copy_stream, views.layout.slots
        same = stream is backend.main
        total = len(views.pieces)
        if not same:
            backend.wait(stream, self._start)
        if self._delay_copies_ms:
            backend.spin(self._delay_copies_ms, stream)

        def copy(index: int, source: Tensor) -> None:
            if not same and index >= slots and self._leave_out != "reuse_wait":
                backend.wait(stream, self._computed[index - slots])
            backend.copy(views.pieces[index][1], source, stream)
            if not same:
                backend.record(self._copied[index], stream)
            if index == total - 1:
                backend.record(self._copies_end, stream)

        def compute(index: int) -> None:
            if not same and self._leave_out != "stream_wait":
                backend.wait(backend.main, self._copied[index])
            _, slot, out = views.pieces[index]
            backend.gemm(slot, self._weights, out)
            if not same and index + slots < total:
                backend.record(self._computed[index], backend.main)

        if self._copies_first:
            for index, source in enumerate(self._sources(views)):
                copy(index, source)
            for index in range(total):
                compute(index)
        else:
            for index, source in enumerate(self._sources(views)):
                copy(index, source)
                compute(index)
        if self._leave_out == "stream_wait" and not same:
            # The sample still ends with its last copy: only the order of the chunks is at fault.
            backend.wait(backend.main, self._copies_end)

    def _check(self, arm: str, views: _Views) -> str | None:
        kind, plan = arm.removesuffix("_1"), self.plan
        if kind == "transfer":
            return self._check_ring(views)
        if kind == "compute":
            expected = self._expected_compute[id(views)]
        else:
            batches = [self._batch(repeat) * plan.rows for repeat in range(plan.repeats)]
            expected = torch.cat([self._expected_pool[row : row + plan.rows] for row in batches])
        error = (torch.mm(self._out, self._signs).float() - expected).abs()
        wrong = int((~(error <= TOLERANCE * plan.columns**0.5)).sum())  # `~` so that NaN is wrong too
        return f"{arm}: {wrong} of {expected.shape[0]} rows of the product are wrong" if wrong else None

    def _check_ring(self, views: _Views) -> str | None:
        plan, layout = self.plan, views.layout
        total = len(views.pieces)
        wrong = torch.zeros((), dtype=torch.int64, device=self._ring.device)
        for index in range(max(0, total - layout.slots), total):
            chunk, slot, _ = views.pieces[index]
            base = self._batch(index // layout.chunks) * plan.rows + chunk * plan.rows // layout.chunks
            source = self._pool[base : base + slot.shape[0]]
            # On a cpu comparing element by element takes ten times as long; on a GPU `equal` would wait each time.
            if slot.device.type != "cpu" or not torch.equal(slot, source):
                wrong += (slot != source).any(dim=1).sum()
        return f"transfer: {int(wrong)} rows differ from their source" if int(wrong) else None


def _product(rows: Tensor, vector: Tensor, block: int = 1 << 14) -> Tensor:
    """rows @ vector in float32, block by block so that the widened copy stays small; shape (rows, 1)."""
    return torch.cat([rows[low : low + block].float() @ vector for low in range(0, rows.shape[0], block)])
