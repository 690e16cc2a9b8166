"""Does the loader keep up? What the cases of family feed say, as numbers: which of both sides waits, and what it takes.

Times are means over rounds: stalls come in bursts, and a median shows the batches between them.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.record import CaseResult, Metric, Record
from harness.views import metric, value

Verdict = Literal["input-bound", "compute-bound", "balanced", "slowed", "unclear"]

# A real step that is this close to the cached one loses nothing to its loader.
CLOSE = 0.05

# Of what a real step takes longer, the part that the device spends waiting for a batch.
WAITING_PART = 0.5

# Stalls come in bursts where the mean of rounds is so many times their median, or the longest wait of a sample so many
# times its mean one.
# Workers that run in step deliver in turns: the first of `workers` batches is waited for, the others are there.
BURST_OF_MEDIAN, BURST_OF_MEAN, IN_STEP = 2.0, 5.0, 2.0
# Shorter stalls, as a share of the cached step, are not worth a word.
WORTH = 0.02

_FACTS = (
    "samples", "batch_bytes", "stored_bytes", "read_ms", "decode_ms", "first_batch_ms", "second_epoch_ms",
    "worker_bytes", "tokens", "padded",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One measured case; ms of one batch, means over rounds.

    loader_ms, cached_ms, real_ms: the loader alone, the step on a batch that is on the device, both together. over:
    real / cached. gap: the device idle before a step; next_ms, next_max_ms: the host blocked in next(), on the mean
    and at the longest; None where the record does not tell. bursts: whether the stalls come in bursts. facts: what a
    batch is and costs (harness/workloads/feed.py), medians over launches. unpinned: what in a batch stayed unpinned
    though the case is pinned. busy: NVML's utilisation over the whole case, a share.
    """

    case: CaseResult
    loader_ms: float
    cached_ms: float
    real_ms: float
    over: Metric
    gap: Metric | None
    next_ms: float | None
    next_max_ms: float | None
    bursts: bool
    facts: Mapping[str, float]
    unpinned: tuple[str, ...]
    busy: float | None

    @classmethod
    def of(cls, case: CaseResult) -> "Feed | None":
        """None for a case of another family, or without its three arms."""
        over = metric(case, "overlapped_over_compute")
        times = [value(case, name) for name in ("transfer_ms", "compute_ms", "overlapped_ms")]
        loader, cached, real = times
        if case.family != "feed" or over is None or not loader or not cached or not real:
            return None
        return cls(
            case=case, loader_ms=loader, cached_ms=cached, real_ms=real, over=over, gap=metric(case, "gap_ms"),
            next_ms=value(case, "next_ms"), next_max_ms=value(case, "next_max_ms"),
            bursts=_bursts(case, cached), facts=_facts(case), unpinned=_unpinned(case), busy=_busy(case),
        )  # fmt: skip

    @property
    def workers(self) -> int:
        return int(self.case.params.get("workers", 0))

    @property
    def excess_ms(self) -> float:
        """What a real step takes longer than the cached one."""
        return self.real_ms - self.cached_ms

    @property
    def headroom(self) -> float:
        """How much faster than it must the loader is, alone: cached / loader - 1."""
        return self.cached_ms / self.loader_ms - 1

    @property
    def gap_ms(self) -> float | None:
        return None if self.gap is None else self.gap.value

    @property
    def verdict(self) -> Verdict:
        """input-bound: real steps take CLOSE longer than cached ones or more, mostly since the device waits for them.
        slowed: as long, but the device has its batches: the copy to it, or cores shared with the workers.
        compute-bound: they take no longer, and the loader alone is faster than they are; balanced: it is not, or
        hardly. unclear: the samples may as well be of another verdict.
        """
        if not self._sure:
            return "unclear"
        if self.over.value - 1 <= CLOSE:
            return "compute-bound" if self.headroom > CLOSE else "balanced"
        return "input-bound" if self._mostly_waits else "slowed"

    @property
    def _mostly_waits(self) -> bool:
        """Whether what a real step takes longer is a wait for most of it; without a gap in the record, all of it is."""
        return self.gap_ms is None or self.gap_ms >= WAITING_PART * self.excess_ms

    @property
    def _sure(self) -> bool:
        """Whether the intervals leave no doubt that real steps are longer, or are not. The gap is seen on the device,
        between two of its events: no noise of the steps is in it."""
        worth, gap, over = CLOSE * self.cached_ms, self.gap, self.over
        if over.value - 1 <= CLOSE:
            surely_fed = gap is not None and gap.high is not None and gap.high <= worth
            return surely_fed or (over.high is not None and over.high - 1 <= CLOSE)
        surely_late = gap is not None and gap.low is not None and gap.low > worth
        return (surely_late and self._mostly_waits) or (over.low is not None and over.low - 1 > CLOSE)

    @property
    def worker_ms(self) -> float | None:
        """What one worker needs for a batch: to get its bytes, and to make it of them."""
        if "read_ms" not in self.facts or "decode_ms" not in self.facts:
            return None
        return self.facts["read_ms"] + self.facts["decode_ms"]

    @property
    def read_part(self) -> float | None:
        """The share of `worker_ms` in which it gets the bytes."""
        return self.facts["read_ms"] / self.worker_ms if self.worker_ms else None

    @property
    def needed_rate(self) -> float | None:
        """Bytes a second that storage must give for steps as fast as cached ones."""
        stored = self.facts.get("stored_bytes")
        return stored / self.cached_ms * 1e3 if stored else None

    @property
    def reached_rate(self) -> float | None:
        stored = self.facts.get("stored_bytes")
        return stored / self.real_ms * 1e3 if stored else None

    @property
    def wasted(self) -> float | None:
        """The share of the step's tokens that are padding."""
        tokens, padded = self.facts.get("tokens"), self.facts.get("padded")
        return 1 - tokens / padded if tokens is not None and padded else None

    def per_token(self, ms: float) -> float | None:
        """Microseconds a real token, where a batch takes `ms`."""
        tokens = self.facts.get("tokens")
        return ms / tokens * 1e3 if tokens else None


def _facts(case: CaseResult) -> dict[str, float]:
    found = {}
    for name in _FACTS:
        told = [
            number for launch in case.launches if (number := _number(launch.checks.get(name))) is not None
        ]
        if told:
            found[name] = statistics.median(told)
    return found


def _number(told: Any) -> float | None:
    there = isinstance(told, int | float) and not isinstance(told, bool) and math.isfinite(told) and told >= 0
    return float(told) if there else None


def _unpinned(case: CaseResult) -> tuple[str, ...]:
    told = [launch.checks.get("unpinned") for launch in case.launches]
    return tuple(
        dict.fromkeys(
            word for words in told if isinstance(words, list) for word in words if isinstance(word, str)
        )
    )


def _busy(case: CaseResult) -> float | None:
    """NVML's readings are of up to a second each, longer than a sample: they cannot be told apart by arm."""
    seen = [rank.telemetry.get("utilisation_percent") for launch in case.launches for rank in launch.ranks]
    told = [
        number
        for each in seen
        if isinstance(each, dict) and (number := _number(each.get("median"))) is not None
    ]
    return statistics.median(told) / 100 if told else None


def _rounds(case: CaseResult, span: str) -> list[float]:
    every = (seen for launch in case.launches for rank in launch.ranks for seen in rank.rounds)
    return [seen.spans[span] for seen in every if span in seen.spans]


def _bursts(case: CaseResult, cached_ms: float) -> bool:
    waits = _rounds(case, "overlapped.gap") or _rounds(case, "overlapped.next")
    if not waits or statistics.fmean(waits) <= WORTH * cached_ms:
        return False
    if statistics.fmean(waits) > BURST_OF_MEDIAN * statistics.median(waits):
        return True
    mean, longest = (
        statistics.fmean(_rounds(case, span) or [0.0]) for span in ("overlapped.next", "overlapped.next_max")
    )
    return longest > max(BURST_OF_MEAN, IN_STEP * int(case.params.get("workers", 0))) * mean


@dataclass(frozen=True)
class Scale:
    """Cases alike but for their workers, fewest first."""

    feeds: tuple[Feed, ...]

    @property
    def workers(self) -> list[int]:
        return [feed.workers for feed in self.feeds]

    @property
    def knee(self) -> int | None:
        """The fewest workers that the step does not wait for; None where it waits for all that were measured."""
        return next((feed.workers for feed in self.feeds if fed(feed)), None)

    @property
    def late(self) -> list[Feed]:
        """Those whose steps wait for their batches."""
        return [feed for feed in self.feeds if feed.verdict == "input-bound"]

    @property
    def unclear(self) -> list[int]:
        """Numbers of workers of which the samples do not tell."""
        return [feed.workers for feed in self.feeds if feed.verdict == "unclear"]

    @property
    def again(self) -> list[int]:
        """Larger numbers of workers for which it waits all the same: more of them can be slower."""
        knee = self.knee
        return [] if knee is None else [feed.workers for feed in self.late if feed.workers > knee]

    @property
    def grows(self) -> bool:
        """Whether the loader alone is still faster with the most workers than with any fewer."""
        *fewer, most = (feed.loader_ms for feed in self.feeds)
        return (1 + CLOSE) * most < min(fewer, default=math.inf)

    @property
    def needed(self) -> int | None:
        """Workers that the formula asks for, W >= t_batch / t_step (theory.md, 8), before cores, memory or storage run
        out, for steps within CLOSE of cached ones. None where the record does not tell what a batch costs."""
        return None if self.worker_ms is None else _needed(self.worker_ms, self.cached_ms)

    @property
    def needed_between(self) -> tuple[int, int] | None:
        """The fewest and the most that a single case would say: cores whose speed changes."""
        said = [_needed(feed.worker_ms, feed.cached_ms) for feed in self.feeds if feed.worker_ms is not None]
        return (min(said), max(said)) if said else None

    @property
    def worker_ms(self) -> float | None:
        """What one worker needs for a batch; the median of the cases."""
        costs = [feed.worker_ms for feed in self.feeds if feed.worker_ms is not None]
        return statistics.median(costs) if costs else None

    @property
    def lone_ms(self) -> float | None:
        """From batch to batch of the loader alone with a single worker, handing over included."""
        return next((feed.loader_ms for feed in self.feeds if feed.workers == 1), None)

    @property
    def cached_ms(self) -> float:
        return statistics.median(feed.cached_ms for feed in self.feeds)

    @property
    def best(self) -> Feed:
        """The one whose real steps are fastest beside its cached ones."""
        return min(self.feeds, key=lambda feed: feed.over.value)


def _needed(worker_ms: float, cached_ms: float) -> int:
    return math.ceil(worker_ms / cached_ms / (1 + CLOSE))


def fed(feed: Feed) -> bool:
    """Whether the device has its batches, whatever else its steps take."""
    return feed.verdict in ("compute-bound", "balanced", "slowed")


def feeds(record: Record) -> list[Feed]:
    """Every measured case of the family, in the record's order."""
    found = (Feed.of(case) for case in record.cases)
    return [feed for feed in found if feed is not None]


def scales(given: Iterable[Feed]) -> list[Scale]:
    """The cases by what they are alike in but for their workers; a lone case is a scale of one."""
    found: dict[tuple[object, ...], list[Feed]] = {}
    for feed in given:
        found.setdefault(_alike(feed, "workers"), []).append(feed)
    return [Scale(tuple(sorted(alike, key=lambda feed: feed.workers))) for alike in found.values()]


def batchings(given: Iterable[Feed]) -> list[list[Feed]]:
    """Cases alike but for how texts of unequal length become batches, two or more that tell their tokens."""
    found: dict[tuple[object, ...], list[Feed]] = {}
    for feed in given:
        if feed.wasted is not None:
            found.setdefault(_alike(feed, "batching"), []).append(feed)
    return [alike for alike in found.values() if len(alike) > 1]


def _alike(feed: Feed, *but: str) -> tuple[object, ...]:
    return tuple(sorted((axis, given) for axis, given in feed.case.params.items() if axis not in but))


def storage_bound(feed: Feed, given: Iterable[Feed]) -> bool:
    """Whether it is input-bound by where its bytes come from: to get them is most of a worker's time, or the same case
    from memory is not input-bound."""
    if feed.verdict != "input-bound":
        return False
    twins = [
        other
        for other in given
        if other.case.params.get("source") == "memory" and _alike(other, "source") == _alike(feed, "source")
    ]
    from_memory = feed.case.params.get("source") != "memory" and any(map(fed, twins))
    return from_memory or (feed.read_part or 0.0) > 0.5
