"""feed: a DataLoader reads, decodes and collates real samples beside steps of fixed work that use them.

    source --workers: read, decode, collate--> queue (--pin thread-->) next() --copy--> device --step--> out

Arms: `transfer` is the loader alone, `compute` the step on batches that lie on the device, `overlapped` both: take a
batch, copy it, issue the step. The copy is issued to the stream of the step, as `batch.to(device, non_blocking=True)`
does. The host runs at most AHEAD steps ahead, as a loop does that reads its loss late, so that a wait in next() is
one for the loader.

Every sample begins in the steady state. `transfer`: what was made while another arm ran is used up before time is
taken. `overlapped`: as many batches lie ready as when it last ended, the rest is used up, so that its samples are one
long run with pauses: a loader that is slower than the steps has none ready, one that is faster all it may, and one that
is hardly faster gets there over many samples. What is used up sets all workers to work at the same moment, so a turn of
each is taken untimed, after which they are in step as in a long run. `compute` begins when the workers have nothing to
do. Both kinds of steps come after equally many untimed ones, as many as the profile asks for or more: a GPU that was
idle while the loader ran alone is faster at first than its power limit lets it be for long. No end of an epoch is a
pause: to the loader epochs are one stream, and what the start costs, and going on to a next epoch, is measured by
itself.

Every sample is checked: what was taken must follow the order, sample by sample; the last batch must equal one that is
made anew from memory; and the step must give what it gives for that.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from harness.backends.base import Backend, Event, Tensor
from harness.case import Case
from harness.errors import Skip
from harness.profiles import Profile
from harness.workloads.base import Sample
from harness.workloads.feed_batch import fields, unpinned
from harness.workloads.feed_data import COSTED, Collate, FeedData, FeedDataset, sendable
from harness.workloads.feed_loader import TIMEOUT_S, Loader, in_time
from harness.workloads.feed_steps import PictureStep, Step, TextStep, put, step_bytes
from harness.workloads.order import Pick
from harness.workloads.preflight import Needs, look, shortage

# Steps that are issued and not done, at most.
AHEAD = 2

# Steps of an arm before its time is taken, beside a turn of every worker.
WARM_STEPS = 2

# Largest difference of two sums of a result's row, in standard deviations of those sums. The same product of the same
# numbers may be summed in another order; another picture or token is off by about one.
TOLERANCE = 0.05


class FeedWorkload:
    """One feed case on one backend; Skip if it has no meaning there or what it needs is not there.

    dataset, collate: what the loader is given instead, for tests and controls: slow, faulty or unusual ones.
    extra_ms: a wait on the device after each step. timeout_s: for one batch.
    """

    arms: tuple[str, ...] = ("transfer", "compute", "overlapped")

    def __init__(
        self,
        case: Case,
        profile: Profile,
        backend: Backend,
        *,
        dataset: Callable[..., FeedDataset] = FeedDataset,
        collate: Callable[..., Any] = Collate,
        extra_ms: float = 0.0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        reason = backend.unsupported(memory=case.word("memory"), gate=False) or _meaningless(case)
        if reason is not None:
            raise Skip(reason)
        self._backend, self._pinned = backend, case.word("memory") == "pinned"
        with contextlib.ExitStack() as opened:
            self._data = data = FeedData(case, profile, dataset, collate)
            opened.callback(data.close)
            self._check_room(case, profile)
            self._loader = Loader(
                data.dataset,
                data.collate,
                iter(data.batches),
                workers=case.number("workers"),
                prefetch=case.number("prefetch"),
                persistent=case.word("persistent") == "on",
                start=case.word("start"),
                pinned=self._pinned,
                timeout_s=timeout_s,
            )
            opened.callback(self._loader.close)
            self._expected = iter(data.batches)
            self._last: Sequence[Pick] = ()
            self._seen: list[list[list[int]]] = []
            self._workers = case.number("workers")
            self._most_ahead, self._ahead = self._workers * case.number("prefetch"), 0
            self._conditioning = profile.feed.conditioning
            self._allocate(profile, extra_ms)
            flops = sum(map(self._step.flops, self._cached)) / len(self._cached)
            self._facts: dict[str, Any] = {
                "repeats": data.repeats,
                "flops": flops * data.repeats,
                **data.facts(),
                "unpinned": [],
            }
            self._facts["bytes"] = round(self._facts["batch_bytes"] * data.repeats)
            self._opened = opened.pop_all()

    @property
    def facts(self) -> dict[str, Any]:
        """The fixed work of a sample (harness/workloads/base.py), and what the loader's batches are and cost.

        samples, batch_bytes, stored_bytes, tokens, padded, read_ms, decode_ms: FeedData's. first_batch_ms,
        second_epoch_ms: from the begin of the first and of the second epoch to its first batch. worker_bytes: memory
        that a worker shares with nobody. unpinned: which tensors of a batch are not pinned though they should be.
        """
        return dict(self._facts)

    def warm_up(self) -> str | None:
        """What a batch costs by itself, and what starts cost; then every arm once."""
        with self._loader.telling():
            return self._warm_up()

    def _warm_up(self) -> str | None:
        said = f"{COSTED} batches could not be made without a worker in {TIMEOUT_S:g} s"
        with _one_thread(self._backend), in_time(TIMEOUT_S, said):
            self._facts |= self._data.costs()
        for batch in self._cached:
            self._step.run(batch)
            self._signatures.append(self._step.signature(batch))
        self._facts |= self._starts()
        failed = self._try_arms()
        if (size := self._loader.worker_bytes()) is not None:
            self._facts["worker_bytes"] = round(size)
        return failed

    def _try_arms(self) -> str | None:
        """Every arm once; where the loader is faster, real steps begin with all batches ready that may be."""
        tried: dict[str, Sample] = {}
        for arm in self.arms:
            if arm == "overlapped" and tried["transfer"].ms < tried["compute"].ms:
                self._ahead = self._most_ahead
            tried[arm] = self.sample(arm)
        return next((tried[arm].failed for arm in self.arms if tried[arm].failed), None)

    def sample(self, arm: str) -> Sample:
        """Prepare, run and check one arm."""
        with self._loader.telling():
            return self._loader_alone() if arm == "transfer" else self._steps(arm)

    def close(self) -> None:
        """End the workers, wait for the device, and give everything back; the workload is of no use afterwards."""
        try:
            self._opened.close()
        finally:
            self._backend.synchronize()
            self.__dict__.clear()

    def _check_room(self, case: Case, profile: Profile) -> None:
        """Skip where workers, or the step, would not get what they need."""
        data, backend = self._data, self._backend
        needs = Needs(
            workers=case.number("workers"),
            prefetch=case.number("prefetch"),
            batch_bytes=data.most_bytes,
            tensors=len(data.cached[0]),
            start=case.word("start"),
        )
        short = shortage(needs, look())
        free = backend.free_bytes()[0 if backend.kind == "cpu" else 1]
        need = step_bytes(data.kind, profile, data.most_items) + (len(data.cached) + 1) * data.most_bytes
        if short is None and free is not None and need > free:
            short = f"needs {need / 2**30:.2f} GiB of device memory, and {free / 2**30:.2f} GiB are free"
        if short is not None:
            raise Skip(short)

    def _whole(self, batches: int) -> int:
        """So many, or more to end with an epoch where samples are whole ones."""
        return -(-batches // self._data.epoch) * self._data.epoch

    def _allocate(self, profile: Profile, extra_ms: float) -> None:
        backend, data = self._backend, self._data
        make = PictureStep if data.kind == "jpeg" else TextStep
        self._step: Step = make(backend, profile, data.most_items, extra_ms)
        device = backend.device_tensor(1, 1, profile.dtype).device
        self._cached = [
            {name: tensor.to(device) for name, tensor in sendable(batch).items()} for batch in data.cached
        ]
        self._room = {
            name: torch.empty(
                max(batch[name].numel() for batch in self._cached), dtype=tensor.dtype, device=device
            )
            for name, tensor in self._cached[0].items()
        }
        self._signatures: list[Tensor] = []
        total = self._workers + WARM_STEPS + data.epoch - 1 + data.repeats
        self._ready: list[Event] = [backend.event() for _ in range(total)]
        self._done: list[Event] = [backend.event() for _ in range(total)]
        backend.synchronize()

    def _starts(self) -> dict[str, Any]:
        """Two epochs of as many batches as a sample has, and the begin of the one that does not end."""
        found: dict[str, Any] = {}
        for name in ("first_batch_ms", "second_epoch_ms"):
            began = time.perf_counter()
            self._loader.begin(self._data.repeats)
            batch = self._loader.next()
            found[name] = (time.perf_counter() - began) * 1e3
            self._note(batch)
            for _ in range(self._data.repeats - 1):
                self._note(self._loader.next())
            self._loader.finish()
        found["unpinned"] = unpinned(batch) if self._pinned else []
        self._loader.begin()
        return found

    def _note(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a batch that was taken; its samples are held against the order when the sample is over."""
        found = fields(batch)
        self._seen.append(found["index"].tolist())
        return found

    def _drain(self, batches: int) -> None:
        for _ in range(batches):
            self._note(self._loader.next())

    def _loader_alone(self) -> Sample:
        self._drain(self._whole(self._most_ahead + 2 * self._workers + WARM_STEPS))
        began, asked = time.monotonic(), time.perf_counter()
        for _ in range(self._data.repeats):
            batch = self._note(self._loader.next())
        ms = (time.perf_counter() - asked) * 1e3
        window = (began, time.monotonic())
        failed = self._out_of_order() or _difference(batch, self._data.reference(self._last), self._room)
        return Sample(ms=ms, host_ms=ms, window=window, failed=failed and f"transfer: {failed}")

    def _steps(self, arm: str) -> Sample:
        """Steps without time, then with: on what the loader gives, or on what lies on the device."""
        backend, main, real = self._backend, self._backend.main, arm == "overlapped"
        self._loader.settle()
        drained = self._most_ahead - self._ahead if real else 0
        first = self._whole(drained + self._workers + WARM_STEPS) - drained
        total = first + self._data.repeats
        self._condition(self._conditioning - first)
        self._drain(drained)
        waits, idle, began, issued = [0.0] * total, 0.0, 0.0, 0.0
        batch: Mapping[str, Tensor] = {}
        backend.synchronize()
        for index in range(total):
            if index == first:
                began, issued, idle = time.monotonic(), time.perf_counter(), 0.0
            if index >= AHEAD:
                before = time.perf_counter()
                backend.synchronize(self._done[index - AHEAD])
                idle += time.perf_counter() - before
            if real:
                before = time.perf_counter()
                taken = self._loader.next()
                waits[index] = time.perf_counter() - before
                backend.record(self._ready[index], main)
                batch = self._to_device(self._note(taken))
            else:
                batch = self._cached[index % len(self._cached)]
            self._step.run(batch)
            backend.record(self._done[index], main)
        if real:
            self._ahead = min(round(self._loader.ahead()), self._most_ahead)
        waits = waits[first:]
        host_ms = (time.perf_counter() - issued - idle - sum(waits)) * 1e3
        backend.synchronize(self._done[total - 1])
        window = (began, time.monotonic())
        backend.synchronize()
        spans = {}
        if real:
            gaps = [backend.elapsed_ms(self._done[at - 1], self._ready[at]) for at in range(first, total)]
            spans = {
                "overlapped.next": sum(waits) / len(waits) * 1e3,
                "overlapped.next_max": max(waits) * 1e3,
                "overlapped.gap": sum(gaps) / len(gaps),
            }
        failed = self._check_real(batch) if real else self._check_cached((total - 1) % len(self._cached))
        return Sample(
            ms=backend.elapsed_ms(self._done[first - 1], self._done[total - 1]),
            host_ms=host_ms,
            window=window,
            spans=spans,
            failed=failed and f"{arm}: {failed}",
        )

    def _condition(self, steps: int) -> None:
        """Steps whose time nobody takes, on what lies on the device: no worker goes on meanwhile."""
        for index in range(steps):
            self._step.run(self._cached[index % len(self._cached)])
        self._backend.synchronize()

    def _to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        views = {}
        for name, room in self._room.items():
            source = batch[name]
            views[name] = room[: source.numel()].view(source.shape)
            self._backend.copy(views[name], source, self._backend.main)
        return views

    def _out_of_order(self) -> str | None:
        """Whether the batches since the last look are those that the order has next."""
        seen, self._seen = self._seen, []
        failed = None
        for number, samples in enumerate(seen):
            self._last = next(self._expected)
            if samples != [[pick.epoch, pick.index] for pick in self._last] and failed is None:
                failed = f"batch {number + 1} of {len(seen)} has other samples than the order"
        return failed

    def _check_real(self, batch: Mapping[str, Tensor]) -> str | None:
        """The last batch as it came to the device, and the step on it."""
        failed = self._out_of_order()
        wanted = self._data.reference(self._last)
        failed = failed or _difference(batch, wanted, self._room)
        if failed is not None:
            return failed
        was = self._step.signature(batch)
        again = self._to_device(wanted)
        self._step.run(again)
        return _other_result(was, self._step.signature(again))

    def _check_cached(self, index: int) -> str | None:
        return _other_result(self._step.signature(self._cached[index]), self._signatures[index])


def _meaningless(case: Case) -> str | None:
    """Why a case is none of its own: another one does exactly the same."""
    if case.word("data") == "jpeg" and case.word("batching") != "padding":
        return "pictures are all of one shape, so batching is for text alone"
    if not case.number("workers"):
        plain = {"prefetch": 2, "persistent": "on", "start": "fork"}
        other = [name for name, value in plain.items() if case[name] != value]
        if other:
            return f"without workers there is nothing to set by {' and '.join(other)}"
    return None


def _difference(
    batch: Mapping[str, Tensor], wanted: Mapping[str, Tensor], names: Mapping[str, Tensor]
) -> str | None:
    """Compared on the host, so that a check takes no device memory while samples are taken."""
    for name in names:
        if not torch.equal(batch[name].cpu(), wanted[name]):
            return f"{name} of the last batch are not those of its samples"
    return None


def _other_result(was: Tensor, wanted: Tensor) -> str | None:
    limit = TOLERANCE * float(wanted.std(correction=0)) + 1e-6
    wrong = int((~((was - wanted).abs() <= limit)).sum())  # `~` so that NaN is wrong too
    return f"{wrong} of {len(wanted)} rows of the last step's result are wrong" if wrong else None


@contextlib.contextmanager
def _one_thread(backend: Backend) -> Iterator[None]:
    """As in a worker, where torch has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        # MKL keeps one number for the process: on a cpu, that of the threads that compute.
        if backend.kind == "cpu":
            put(backend, lambda: torch.set_num_threads(torch.get_num_threads()))
            backend.synchronize()
