"""Every metric, defined once.

A sink shows what harness/metrics.py took from the samples by these; it computes nothing.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from harness import theory
from harness.statistics import Array

# What decides whether a case is settled, over its rounds and over its launches.
HEADLINE = "overlapped_ms"

DDP_ONLY = ("ddp",)
FEED_ONLY = ("feed",)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a case; a time is of one batch.

    arms: the columns of a launch it is made from (metrics.py). of: that number from their medians (their `quantile`;
    None: their means) and the pieces in a sample, elementwise. asv: positive and lower is better; asv knows no other
    direction. families: those that have it; empty for all of them.
    """

    name: str
    unit: str
    label: str
    description: str
    arms: tuple[str, ...]
    of: Callable[[Mapping[str, Array], int], Array]
    quantile: float | None = 0.5
    asv: bool = False
    families: tuple[str, ...] = ()

    @property
    def per_round(self) -> bool:
        """Whether the rounds of one arm are samples of this metric, and not only a launch as a whole."""
        return len(self.arms) == 1 and self.quantile == 0.5


def _arm(
    name: str, arm: str, label: str, description: str, *, quantile: float | None = 0.5, asv: bool = False
) -> Metric:
    return Metric(
        name=name, unit="ms", label=label, description=description, arms=(arm,), of=lambda t, n: t[arm],
        quantile=quantile, asv=asv,
    )  # fmt: skip


def _span(
    name: str, column: str, label: str, description: str, families: tuple[str, ...] = DDP_ONLY
) -> Metric:
    return replace(_arm(name, column, label, description), families=families)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _arm("overlapped_ms", "overlapped", "overlapped", "transfer and compute, free to overlap", asv=True),
        _arm("overlapped_p10_ms", "overlapped", "overlapped p10", "a fast overlapped sample", quantile=0.1),
        _arm(
            "overlapped_mean_ms", "overlapped", "overlapped mean", "above the median where some rounds take long",
            quantile=None,
        ),
        _arm("transfer_ms", "transfer", "transfer", "the copies, collectives or loader alone, in pieces", asv=True),
        _arm("compute_ms", "compute", "compute", "the compute alone, in pieces", asv=True),
        _arm("serial_ms", "serial", "serial", "the same work, forced in sequence"),
        _arm("transfer_unsplit_ms", "transfer_1", "transfer unsplit", "the transfer alone, in one piece (T1)"),
        _arm("compute_unsplit_ms", "compute_1", "compute unsplit", "the compute alone, in one piece (K1)"),
        Metric(
            name="exposed_ms", unit="ms", label="exposed",
            description="what the transfer adds to the compute: overlapped - compute",
            arms=("compute", "overlapped"), of=lambda t, n: theory.exposed(t["compute"], t["overlapped"]),
        ),
        Metric(
            name="exposed_fraction", unit="fraction", label="exposed share",
            description="exposed / transfer: 0 hidden, 1 nothing hidden, above 1 overlap lost time",
            arms=("transfer", "compute", "overlapped"),
            of=lambda t, n: theory.exposed_fraction(t["transfer"], t["compute"], t["overlapped"]),
        ),
        Metric(
            name="hidden_fraction", unit="fraction", label="hidden",
            description="(transfer + compute - overlapped) / the shorter: 1 hidden, negative lost time",
            arms=("transfer", "compute", "overlapped"),
            of=lambda t, n: theory.hidden_fraction(t["transfer"], t["compute"], t["overlapped"]),
        ),
        Metric(
            name="bound_ratio", unit="ratio", label="over bound",
            description="overlapped / the longer unsplit leg: 1 is the limit of any overlap",
            arms=("transfer_1", "compute_1", "overlapped"),
            of=lambda t, n: t["overlapped"] / theory.bound(t["transfer_1"], t["compute_1"]), asv=True,
        ),
        Metric(
            name="model_ratio", unit="ratio", label="over model",
            description="overlapped / the model of the same pieces: 1 when the schedule works",
            arms=("transfer", "compute", "overlapped"),
            of=lambda t, n: t["overlapped"] / theory.piece_model(t["transfer"], t["compute"], n),
        ),
        Metric(
            name="overlapped_over_compute", unit="ratio", label="over compute",
            description="overlapped / compute: the price of feeding the compute",
            arms=("compute", "overlapped"), of=lambda t, n: t["overlapped"] / t["compute"], asv=True,
        ),
        Metric(
            name="overlapped_over_serial", unit="ratio", label="over serial",
            description="overlapped / serial: below 1 overlap won time",
            arms=("serial", "overlapped"), of=lambda t, n: t["overlapped"] / t["serial"],
        ),
        _arm(
            "host_blocked_ms", "host.overlapped", "host blocked",
            "time the host needs to enqueue the overlapped work", asv=True,
        ),
        Metric(
            name="host_ms", unit="ms", label="host",
            description="time the host needs to enqueue both legs, each alone: its own pace",
            arms=("host.transfer", "host.compute"), of=lambda t, n: t["host.transfer"] + t["host.compute"],
        ),
        _span(
            "tail_ms", "overlapped.tail", "tail",
            "from the last bucket's hook to the end of the last collective: what no backward is left to hide",
        ),
        Metric(
            name="dilation_ms", unit="ms", label="dilation",
            description="how much later the last bucket is ready than without collectives: what they cost the compute",
            arms=("overlapped.last_ready", "compute.last_ready"), families=DDP_ONLY,
            of=lambda t, n: t["overlapped.last_ready"] - t["compute.last_ready"],
        ),
        Metric(
            name="unexplained_ms", unit="ms", label="unexplained",
            description="exposed - tail - dilation: 0 where they are all that the collectives add",
            arms=("compute", "overlapped", "overlapped.tail", "overlapped.last_ready", "compute.last_ready"),
            families=DDP_ONLY,
            of=lambda t, n: t["overlapped"] - t["compute"] - t["overlapped.tail"]
            - (t["overlapped.last_ready"] - t["compute.last_ready"]),
        ),
        Metric(
            name="start_fraction", unit="fraction", label="first start",
            description="how far the backward is when the first collective can start: near 1, nothing overlaps",
            arms=("overlapped.first_ready", "overlapped.backward", "overlapped.last_ready"), families=DDP_ONLY,
            of=lambda t, n: (t["overlapped.first_ready"] - t["overlapped.backward"])
            / (t["overlapped.last_ready"] - t["overlapped.backward"]),
        ),
        _span(
            "waiting_ms", "waiting", "waiting",
            "slowest rank - fastest rank of the collectives alone: time spent waiting for peers",
        ),
        Metric(
            name="over_native", unit="ratio", label="over native",
            description="overlapped / DistributedDataParallel without a hook: 1 where measuring costs nothing",
            arms=("native", "overlapped"), of=lambda t, n: t["overlapped"] / t["native"], families=DDP_ONLY,
        ),
        Metric(
            name="headroom", unit="fraction", label="headroom",
            description="mean cached step / mean batch of the loader alone - 1: negative, the loader is too slow",
            arms=("transfer", "compute"), of=lambda t, n: t["compute"] / t["transfer"] - 1,
            families=FEED_ONLY,
        ),
        _span("gap_ms", "overlapped.gap", "gap", "time the device is idle before a real step", FEED_ONLY),
        Metric(
            name="stall_share", unit="fraction", label="stalled",
            description="gap / real step, of means: the share of the time in which the device waits for input",
            arms=("overlapped.gap", "overlapped"), of=lambda t, n: t["overlapped.gap"] / t["overlapped"],
            families=FEED_ONLY,
        ),
        _span(
            "next_ms", "overlapped.next", "in next()",
            "time the host is blocked in next(), of a batch; no loss where the device has work queued meanwhile",
            FEED_ONLY,
        ),
        replace(
            _arm(
                "next_max_ms", "overlapped.next_max", "longest next()", "the longest single wait in next()",
                quantile=1.0,
            ),
            families=FEED_ONLY,
        ),
    )
}  # fmt: skip


# What a family has otherwise, or for None not at all. `model`: the schedule of unequal buckets (buckets.py). A loader
# and a step are no pieces of one pipeline: their model is the bound. What its host does is the loader's own time.
_OTHERWISE: dict[tuple[str, str], Metric | None] = {
    ("ddp", "model_ratio"): replace(
        METRICS["model_ratio"], arms=("model", "overlapped"), of=lambda t, n: t["overlapped"] / t["model"]
    ),
    **dict.fromkeys(
        itertools.product(
            FEED_ONLY, ("serial_ms", "overlapped_over_serial", "transfer_unsplit_ms", "compute_unsplit_ms",
                        "model_ratio", "host_ms",
                        "overlapped_mean_ms"),  # its headline is that already
        )
    ),
}  # fmt: skip


def metrics_of(family: str) -> dict[str, Metric]:
    """The metrics that a family has, by name.

    Those of a loader are made of means: where it stalls in bursts most batches come at once, and a median shows
    nothing.
    """
    found = (
        _OTHERWISE.get((family, name), metric)
        for name, metric in METRICS.items()
        if not metric.families or family in metric.families
    )
    means = family in FEED_ONLY
    return {
        metric.name: replace(metric, quantile=None) if means and metric.quantile == 0.5 else metric
        for metric in found
        if metric is not None
    }
