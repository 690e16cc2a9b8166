"""Builders of synthetic ddp launches, case results and records, of a machine whose every number is known.

    machine = Machine(alpha_ms=0.02, bandwidth=303.0, rate=600e12)
    whole = ddp_record(*token_results(machine, (512, 1024, 2048)), *bucket_results(machine, (1 << 20, 25 << 20)))

Times are ms. The truth behind them: gradients become ready evenly over the backward; the collectives take turns on one
link; exposed = tail + dilation. Metrics are set from these, with an interval of `half` of the value either way.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import factories

from harness.case import Case, Value
from harness.families import DDP, MIB
from harness.record import CaseResult, Launch, Metric, Rank, Record, Round

DEFAULTS: dict[str, Value] = {
    "model": "blocks",
    "bucket": 25 * MIB,
    "tokens": 2048,
    "gradients": "bf16",
    "ranks": 2,
    "backend": "nccl",
    "profile": "h200.1a2b",
}

# Many alike, so that whole buckets are nearly even flow.
EVEN = (2 * MIB,) * 512


def ddp_case(**axes: Value) -> Case:
    """blocks of bf16 gradients between two GPUs over NCCL, with `axes` replaced."""
    return Case.of(DDP, **{**DEFAULTS, **axes})


def pack(tensors: Iterable[int], cap: int, first: int = MIB) -> list[int]:
    """Bytes of the buckets that DDP makes of gradients in the order they come: a bucket closes once it holds its cap,
    and a tensor is never split."""
    made, held, limit = [], 0, first
    for size in tensors:
        held += size
        if held >= limit:
            made.append(held)
            held, limit = 0, cap
    return [*made, held] if held else made


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a step costs, and what is wrong with it.

    alpha_ms, bandwidth (bus, GB/s): of a collective; rate: FLOP/s; work: FLOP of a step for each parameter and token,
    two thirds of them in the backward. fixed_ms: of a step, whatever its tokens. dilation: what the backward loses for
    each ms of collectives beside it; load: factor by which the collectives slow; unexplained_ms: exposed beyond tail
    and dilation.
    """

    alpha_ms: float = 0.0
    bandwidth: float = 303.0
    rate: float = 600e12
    work: float = 6.0
    fixed_ms: float = 0.0
    dilation: float = 0.0
    load: float = 1.0
    unexplained_ms: float = 0.0

    def times(self, sizes: tuple[int, ...], tokens: int, ranks: int, gradient: int) -> "Times":
        """One step with buckets of these bytes."""
        total = sum(sizes)
        parameters = total // gradient
        flops = self.work * parameters * tokens
        compute = self.fixed_ms + flops / self.rate * 1e3
        begins = compute / 3
        ready = [begins + (compute - begins) * done / total for done in itertools.accumulate(sizes)]
        wire = 2 * (ranks - 1) / ranks / self.bandwidth / 1e6
        alone = [self.alpha_ms + wire * size for size in sizes]
        window = ready[-1] - ready[0]
        slowed = 1 + self.dilation * min(1, sum(alone) / window) if window else 1
        late = [ready[0] + slowed * (at - ready[0]) for at in ready]
        end = 0.0
        for at, cost in zip(late, alone, strict=True):
            end = max(end, at) + self.load * cost
        return Times(
            tokens=tokens, parameters=parameters, flops=flops, compute=compute, begins=begins, ready=ready,
            alone=alone, whole=self.alpha_ms + wire * total, tail=end - late[-1], dilation=late[-1] - ready[-1],
            unexplained=self.unexplained_ms,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Times:
    """The noise-free truth of one step."""

    tokens: int
    parameters: int
    flops: float
    compute: float
    begins: float
    ready: list[float] = field(repr=False)
    alone: list[float] = field(repr=False)
    whole: float
    tail: float
    dilation: float
    unexplained: float

    @property
    def transfer(self) -> float:
        return sum(self.alone)

    @property
    def exposed(self) -> float:
        return self.tail + self.dilation + self.unexplained

    @property
    def share(self) -> float:
        return self.exposed / self.transfer


def ddp_result(
    machine: Machine, sizes: tuple[int, ...] = EVEN, *, half: float = 0.002, launches: int = 1, status: str = "ok",
    **axes: Value,
) -> CaseResult:  # fmt: skip
    """A measured case with buckets of these bytes."""
    case = ddp_case(**axes)
    gradient = {"bf16": 2, "fp32": 4}[case.word("gradients")]
    true = machine.times(sizes, case.number("tokens"), case.number("ranks"), gradient)
    made = [_launch(true, sizes, index, case.number("ranks")) for index in range(launches)]
    result = factories.unmeasured(case, status, launches=made)
    values = {
        "overlapped_ms": true.compute + true.exposed,
        "transfer_ms": true.transfer,
        "transfer_unsplit_ms": true.whole,
        "compute_ms": true.compute,
        "exposed_ms": true.exposed,
        "tail_ms": true.tail,
        "dilation_ms": true.dilation,
    }
    result.metrics = {name: _metric(value, "ms", half) for name, value in values.items()}
    result.metrics["exposed_fraction"] = _metric(true.share, "fraction", half)
    return result


def token_results(
    machine: Machine, tokens: Iterable[int], sizes: tuple[int, ...] = EVEN, **axes: object
) -> list[CaseResult]:
    """Cases that differ in their tokens alone."""
    return [ddp_result(machine, sizes, tokens=each, **axes) for each in tokens]  # type: ignore[arg-type]


def bucket_results(
    machine: Machine, caps: Iterable[int], tensors: Iterable[int], **axes: object
) -> list[CaseResult]:
    """Cases that differ in their bucket cap alone; `tensors` are packed as DDP does."""
    tensors = list(tensors)
    return [
        ddp_result(machine, tuple(pack(tensors, cap)), bucket=cap, **axes)  # type: ignore[arg-type]
        for cap in caps
    ]


def ddp_record(*results: CaseResult) -> Record:
    """A finished record of these cases."""
    made = factories.record(*results, machine="h200-2")
    made.run.suites = ["ddp"]
    return made


def _metric(value: float, unit: str, half: float) -> Metric:
    wide = half * abs(value)
    return Metric(value=value, unit=unit, low=value - wide, high=value + wide)


def _launch(true: Times, sizes: tuple[int, ...], index: int, ranks: int) -> Launch:
    arms = {
        "transfer": true.transfer,
        "compute": true.compute,
        "serial": true.transfer + true.compute,
        "overlapped": true.compute + true.exposed,
        "transfer_1": true.whole,
    }
    spans = {
        "compute.backward": true.begins,
        "compute.last_ready": true.ready[-1],
        "overlapped.backward": true.begins,
        "overlapped.first_ready": true.ready[0],
        "overlapped.last_ready": true.ready[-1] + true.dilation,
        "overlapped.last_done": true.ready[-1] + true.dilation + true.tail,
        "overlapped.tail": true.tail,
    }
    return Launch(
        index=index,
        ranks=[
            Rank(
                rounds=[
                    Round(order=list(arms), arms=dict(arms), spans=dict(spans), start=at * 0.05)
                    for at in range(3)
                ],
                host="host-a",
            )
            for _ in range(ranks)
        ],
        stop="settled",
        checks={
            "repeats": 1,
            "bytes": sum(sizes),
            "flops": true.flops,
            "parameters": true.parameters,
            "buckets": list(sizes),
            "ready_ms": list(true.ready),
            "alone_ms": list(true.alone),
        },
    )
