"""ddp: DistributedDataParallel reduces its gradients bucket by bucket while the backward goes on.

    forward -> backward -> bucket 1 ready -> bucket 2 ready -> ... -> last bucket ready -> gradients copied out
                                 \\-- all-reduce 1 --> all-reduce 2 --> ...       tail --> all-reduce last

One comm hook serves every arm, so that the copy into the bucket and the division are compute in all of them:
`overlapped` starts each bucket's all-reduce and goes on; `compute` gives the bucket back as it is; `serial` does that
and replays the buckets when the backward is over; `transfer` replays them alone, and `transfer_1` all their bytes at
once. `native` is DDP without a hook, on a copy of the model: it shows what the hook costs.

Every sample is checked against gradients that were reduced without overlap and without DDP (gradients.py). What is
compared is read by the stream that computes, right behind the step and without another wait, as an optimizer would.
"""

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from harness.backends.base import Backend
from harness.case import Case
from harness.errors import MeasurementError, Skip
from harness.group import Group
from harness.profiles import Profile
from harness.workloads import refusals
from harness.workloads.base import Sample
from harness.workloads.collectives import Collective, CudaTimeline, HostTimeline, Timeline, real_collective
from harness.workloads.gradients import TOLERANCE, Known, Signs, wrong_blocks
from harness.workloads.hooks import BucketedDDP, BucketHook, expected_buckets, first_cap
from harness.workloads.models import make_batches, make_model, plan_model
from harness.workloads.replay import Replay

GRADIENTS = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Inputs that take turns.
ROTATED = 3

# Steps of every arm before the first sample: DDP orders its buckets anew after the first backward, and with a static
# graph after the second.
WARM_STEPS = 3

# Steps after which buckets that still change are an error.
MAX_STEPS = 10


class RankGroup(Group, Protocol):
    """Ranks that can reduce tensors."""

    def process_group(self, backend: str) -> dist.ProcessGroup: ...


class DDPWorkload:
    """One ddp case on this rank; Skip, on every rank alike, if it has no meaning here or does not fit.

    collective: in the place of the real one, for tests; there is no `native` arm then. delay_ms: this rank is late by
    as much for `transfer` and `overlapped`: it sleeps between the ranks' meeting and the start of its own sample.
    leave_out: a fault on purpose: `wait` tells DDP that a bucket is reduced as soon as its all-reduce has started.
    """

    def __init__(
        self,
        case: Case,
        profile: Profile,
        backend: Backend,
        group: Group,
        *,
        collective: Collective | None = None,
        delay_ms: float = 0.0,
        leave_out: str = "",
    ) -> None:
        self._backend, self._delay_ms, self._option = backend, delay_ms, case.word("option")
        self._gradients = GRADIENTS[case.word("gradients")]
        self._plan = plan_model(case.word("model"), case.number("tokens"), profile.ddp)
        self._autocast = self._gradients == torch.float32 and profile.dtype == "bfloat16"
        self._tolerance = TOLERANCE[torch.bfloat16 if self._autocast else self._gradients]
        cuda = backend.kind == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        refusals.skip_alike(group, self._reasons(case, group))
        self._group: RankGroup = group  # type: ignore[assignment]  # as `unsupported` has seen
        self._reducing = self._group.process_group(case.word("backend"))
        self._timeline: Timeline = CudaTimeline(backend.main) if cuda else HostTimeline()
        self._collective = collective or real_collective(case.word("backend"), self._reducing, self._device)
        self.arms: tuple[str, ...] = ("transfer", "compute", "serial", "overlapped", "transfer_1")
        if collective is None:
            self.arms += ("native",)
        self._turn = 0
        self._ready: list[list[float]] = []
        self._alone: list[list[float]] = []
        with torch.enable_grad(), first_cap(case.number("first")):
            self._make(case, profile.seed, leave_out)
            self.buckets = self._settle(case)
        self._replay = Replay(self.buckets, self._device, self._gradients, profile.seed + 3, self._signs)
        self._tiny = torch.ones(1, device=self._device)
        self._burn: list[Any] = []
        if cuda and profile.conditioning_gemms:
            self._burn = self._conditioning(profile)
        self._timeline.synchronize()

    def _reasons(self, case: Case, group: Group) -> Iterator[str | None]:
        kind, sharing = self._backend.kind, refusals.sharing(group, self._backend.kind)
        yield refusals.unsupported(case, kind, group, sharing)
        need = refusals.needed_bytes(self._plan, self._gradients.itemsize, autocast=self._autocast)
        yield refusals.shortage(need, self._backend.free_bytes()[1], sharing)
        yield refusals.uncompilable(case, self._device)

    def _make(self, case: Case, seed: int, leave_out: str) -> None:
        module = make_model(self._plan, self._device, self._gradients, seed)
        self._inputs = make_batches(
            self._plan, self._device, seed=seed + 1, rank=self._group.rank, count=ROTATED
        )
        self._signs = Signs(self._device, self._gradients, seed + 2)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._native_parameters: list[torch.Tensor] = []
        self._know(module)
        options: dict[str, Any] = {
            "process_group": self._reducing,
            "bucket": case.number("bucket"),
            "first": case.number("first"),
            "static_graph": self._option == "static-graph",
            "gradient_as_bucket_view": self._option == "bucket-view",
        }
        twin = copy.deepcopy(module) if "native" in self.arms else None
        self._hook = BucketHook(
            self._collective, self._timeline, self._group.size, self._parameters, leave_out
        )
        ddp = BucketedDDP(module, **options)
        ddp.register_comm_hook(None, self._hook.ready)
        self._model = self._compiled(ddp)
        if twin is not None:
            self._native_parameters = [p for p in twin.parameters() if p.requires_grad]
            self._native = self._compiled(BucketedDDP(twin, **options))

    def _compiled(self, ddp: BucketedDDP) -> Callable[..., torch.Tensor]:
        return torch.compile(ddp, dynamic=False) if self._option == "compile" else ddp

    def _know(self, module: torch.nn.Module) -> None:
        """The gradients of every input, of this rank and of all, before DDP has a hand in them."""
        self._local: list[Known] = []
        self._reduced: list[Known] = []
        for inputs in self._inputs:
            self._forget()
            self._backward(module, inputs)
            local = self._signs.know(_grads(self._parameters))
            self._local.append(local if self._collective.averages else local.times(1 / self._group.size))
            if self._collective.carries:
                for gradient in _grads(self._parameters):
                    mean = gradient.float()
                    dist.all_reduce(mean, group=self._reducing)
                    gradient.copy_(mean.div_(self._group.size))
                local = self._signs.know(_grads(self._parameters))
            self._reduced.append(local)
        self._forget()

    def _settle(self, case: Case) -> list[int]:
        """Bytes of DDP's buckets, in the order of their collectives, once they change no more.

        MeasurementError if they do not settle or differ between ranks; Skip if they are not what the caps ask for, or
        if nothing was compiled.
        """
        before: list[int] = []
        graphs = refusals.compiled_graphs() if self._option == "compile" else 0
        for step in range(1, MAX_STEPS + 1):
            self._forget()
            self._hook.begin(layout=True)
            self._backward(self._model, self._inputs[0])
            found = [buffer.nbytes for buffer in self._hook.buffers]
            by_rank = self._group.share(found)
            if any(other != found for other in by_rank):
                raise MeasurementError(f"ddp: buckets differ between ranks: {by_rank}")
            if step >= WARM_STEPS and found == before:
                break
            before = found
            if step == 1 and "native" in self.arms:
                self._backward(self._native, self._inputs[0])  # compiled now, where the first cap is known
        else:
            raise MeasurementError(f"ddp: buckets still change after {MAX_STEPS} steps: {before}")
        if self._option == "compile" and refusals.compiled_graphs() == graphs:
            raise Skip(f"torch.compile compiled nothing of the model (torch {torch.__version__})")
        sizes = [piece.count * self._gradients.itemsize for piece in self._hook.pieces]
        first, bucket = case.number("first"), case.number("bucket")
        wanted = expected_buckets(sizes, first=first, bucket=bucket)
        if found != wanted:
            raise Skip(
                f"torch {torch.__version__} does not heed a first cap of {first} bytes and {bucket} for the others: "
                f"want buckets of {_shown(wanted)}, got {_shown(found)}"
            )
        return found

    def _conditioning(self, profile: Profile) -> list[tuple[Any, list[Any], Any]]:
        """GEMMs that bring the device into the state of a step, also before an arm that computes nothing."""
        width, hidden = profile.ddp.width, profile.ddp.hidden
        x, weight, out = (
            self._backend.device_tensor(rows, columns, profile.dtype)
            for rows, columns in ((width, width), (width, hidden), (width, hidden))
        )
        for tensor in (x, weight):
            self._backend.fill_normal(tensor, profile.seed + 4)
        return [(x, [weight], out)] * profile.conditioning_gemms

    @property
    def facts(self) -> dict[str, Any]:
        """The fixed work of a sample (base.py), and what this case's buckets are. Every rank asks, or none.

        buckets: bytes, in the order of their collectives. ready_ms: from the start of `compute` until a bucket is
        ready on the last rank. alone_ms: its own cost on the fastest rank: what it adds in `transfer` to those before
        it, or where collectives run beside each other, what it takes by itself. Both are medians over the samples
        since `warm_up`, and empty without any.
        """
        return {
            "bytes": self._plan.parameters * self._gradients.itemsize,
            "flops": self._plan.flops,
            "repeats": 1,
            "parameters": self._plan.parameters,
            "buckets": self.buckets,
            "ready_ms": self._over_ranks(self._ready, dist.ReduceOp.MAX),
            "alone_ms": self._over_ranks(self._alone, dist.ReduceOp.MIN),
        }

    def _over_ranks(self, samples: list[list[float]], op: Any) -> list[float]:
        common = min(self._group.share(len(samples)))
        if not common:
            return []
        seen = torch.tensor(samples[:common], dtype=torch.float64)
        dist.all_reduce(seen, op=op, group=self._group.process_group("gloo"))
        return [round(float(ms), 6) for ms in seen.quantile(0.5, dim=0)]

    def warm_up(self) -> str | None:
        """Every arm several times; what a check found. Not cut short by a fault: the other ranks may have none."""
        failed = [self.sample(arm).failed for arm in self.arms for _ in range(WARM_STEPS)]
        self._ready.clear()
        self._alone.clear()
        return next((found for found in failed if found is not None), None)

    def sample(self, arm: str) -> Sample:
        """Prepare, run and check one arm."""
        self._turn += 1  # Other inputs than the last sample's: what is left of that one is wrong now.
        timeline = self._timeline
        self._prepare(arm)
        if self._delay_ms and arm in ("transfer", "overlapped"):
            time.sleep(self._delay_ms * 1e-3)
        began, issued = time.monotonic(), time.perf_counter()
        timeline.begin()
        with torch.enable_grad():
            self._issue(arm)
        timeline.mark("end")
        host_ms = (time.perf_counter() - issued) * 1e3
        seen = self._look(arm)
        for future in self._hook.started:  # only a wait that was left out is still open
            future.wait()
        timeline.synchronize()
        ms = timeline.ms("end")
        sample = Sample(
            ms=ms,
            host_ms=host_ms,
            window=(began, began + ms * 1e-3),
            spans=self._spans(arm),
            failed=self._check(arm, seen),
        )
        if arm == "transfer" and not self._collective.in_order:
            self._alone[-1] = self._one_by_one()
        return sample

    def close(self) -> None:
        """Wait for the device and give the memory back; the workload is of no use afterwards."""
        self._timeline.synchronize()
        if self._option == "compile":
            torch._dynamo.reset()
        self.__dict__.clear()

    def _forget(self) -> None:
        """Gradients are set to None, not filled: a backward would add to what it finds, which is other work than that
        of a training loop after `zero_grad()`. Those of the last sample are wrong for this one's inputs."""
        for parameter in (*self._parameters, *self._native_parameters):
            parameter.grad = None

    def _prepare(self, arm: str) -> None:
        """Untimed: forget or fill what the arm writes, bring the device into its usual state, let the ranks meet.

        The meeting comes last, and a small collective behind it: what one rank's preparation takes must not become
        waiting in another's sample.
        """
        self._forget()
        self._hook.begin()
        if arm.startswith("transfer"):
            self._replay.fill(self._group.rank, self._turn)
        for x, weights, out in self._burn:
            self._backend.gemm(x, weights, out)
        self._timeline.synchronize()
        self._group.meet()
        dist.all_reduce(self._tiny.fill_(1.0), group=self._reducing)
        self._timeline.synchronize()

    def _issue(self, arm: str) -> None:
        if arm.startswith("transfer"):
            self._hook.replay(self._replay.buffers(arm))
            return
        self._hook.reduce = arm == "overlapped"
        inputs = self._inputs[self._turn % ROTATED]
        self._backward(self._native if arm == "native" else self._model, inputs)
        if arm == "serial":
            self._hook.replay(self._hook.buffers)

    def _backward(self, model: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        narrow = (
            torch.autocast(self._device.type, torch.bfloat16) if self._autocast else contextlib.nullcontext()
        )
        with narrow:
            loss = model(*inputs)
        self._timeline.mark("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def _one_by_one(self) -> list[float]:
        """What each bucket takes, ms, started when the one before has ended: untimed, behind a sample."""
        costs = []
        for at, buffer in enumerate(self._replay.pieces):
            began = time.perf_counter()
            self._hook.start(buffer, at).wait()
            self._timeline.synchronize()
            costs.append((time.perf_counter() - began) * 1e3)
        return costs

    def _look(self, arm: str) -> torch.Tensor:
        """Projections of what the arm made, read on the computing stream without a further wait."""
        if arm.startswith("transfer"):
            return self._signs.project(self._replay.buffers(arm))
        if arm == "serial":  # replayed were the buckets; the gradients had been copied out before
            return self._signs.project(self._hook.gradients())
        return self._signs.project(_grads(self._native_parameters if arm == "native" else self._parameters))

    def _check(self, arm: str, seen: torch.Tensor) -> str | None:
        collective, turn = self._collective, self._turn
        if arm.startswith("transfer"):
            ranks = range(self._group.size) if collective.carries else [self._group.rank]
            known = self._replay.known(arm, ranks, turn, averages=collective.averages)
            what = "what was replayed is not reduced"
        elif arm == "compute":
            known, what = self._local[turn % ROTATED], "gradients are not this rank's own"
        else:
            known, what = self._reduced[turn % ROTATED], "gradients are not the mean of all ranks'"
        found = [buffer.nbytes for buffer in self._hook.buffers]
        if arm in ("compute", "serial", "overlapped") and found != self.buckets:
            return f"{arm}: buckets changed from {_shown(self.buckets)} to {_shown(found)} bytes"
        wrong = wrong_blocks(seen, known, self._tolerance)
        return f"{arm}: {what} in {wrong} of {seen.numel()} blocks" if wrong else None

    def _spans(self, arm: str) -> dict[str, float]:
        ms, count = self._timeline.ms, len(self.buckets)
        if arm == "transfer":
            ends = [0.0]
            for at in range(count):
                ends.append(max(ends[-1], ms(("done", at))))
            self._alone.append([end - before for before, end in itertools.pairwise(ends)])
        if arm not in ("compute", "overlapped") or len(self._hook.buffers) != count:
            return {}
        ready = [ms(("ready", at)) for at in range(count)]
        spans = {"backward": ms("backward"), "last_ready": ready[-1]}
        if arm == "compute":
            self._ready.append(ready)
        else:
            done = max(ms(("done", at)) for at in range(count))
            spans |= {"first_ready": ready[0], "last_done": done, "tail": done - ready[-1]}
        return {f"{arm}.{name}": value for name, value in spans.items()}


def _grads(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; NaN for one that was not made, so that it is seen."""
    return [p.grad if p.grad is not None else torch.full_like(p, torch.nan) for p in parameters]


def _shown(sizes: Sequence[int], most: int = 8) -> str:
    text = ", ".join(map(str, sizes[:most]))
    return f"{text}, ... ({len(sizes)} in all)" if len(sizes) > most else text
