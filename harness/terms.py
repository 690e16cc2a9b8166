"""Why the tokens per GPU that hide a transfer are not those of the formula: term by term.

From the formula to the measurement in steps; each step takes one measured thing in place of one assumed, and what it
moves the exposed share by is that term. The steps of one case::

    formula     1 - T/T0: backward and transfer both flow evenly, all of one touching all of the other
    work        the backward as long as it was, in place of 4 FLOP for each parameter and token
    tail        whole buckets, each ready when it was, at the formula's bandwidth: the last has nothing to hide behind
    latency     each bucket's own time, in place of its bytes at that bandwidth
                = what is predicted, with compute that grows with the tokens from the case with most
    rate        the compute of this case's own run, in place of that
    dilation    the compute slowed by what it ran beside
    bandwidth   the transfer slowed by what it ran beside
    unexplained what the sum of tail and dilation leaves open
                = what was measured

A term counts for what it does after those above it: slower compute at few tokens hides nothing more where, up to there,
all is hidden.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import buckets
from harness.record import CaseResult, Launch, Metric

TERMS = ("work", "tail", "latency", "rate", "dilation", "bandwidth", "unexplained")

# A term is named when it is this part of the gap, and this part of the share asked for.
PART_OF_GAP, PART_OF_SHARE = 0.2, 0.1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one case says of its buckets; ms, and (buckets,) in the order of the collectives.

    sizes: bytes. wire: bytes on a link for each of them. ready: from the start of the step alone; alone: each
    collective's own time, 0 for one that ended with another. gradient: g, bytes of a gradient in the reduction. flops:
    of one step of one rank. begins: where the compute begins that the transfer can hide behind.
    """

    tokens: int
    ranks: int
    sizes: tuple[int, ...]
    wire: float
    ready: tuple[float, ...]
    alone: tuple[float, ...]
    parameters: float
    gradient: float
    flops: float
    compute: float
    begins: float

    @classmethod
    def of(cls, case: CaseResult) -> "Facts":
        """Of an all-reduce behind a backward: the medians over the case's launches. ValueError where something is
        missing or cannot be."""
        launches = case.launches
        if not launches:
            raise ValueError("launches: it has none")
        sizes = _list(launches[0], "buckets")
        if any(_list(launch, "buckets") != sizes for launch in launches):
            raise ValueError("buckets: the launches differ")
        ready, alone = (_medians(launches, name, len(sizes)) for name in ("ready_ms", "alone_ms"))
        if any(later < earlier for earlier, later in itertools.pairwise(ready)):
            raise ValueError("ready_ms: not in the order of the buckets")
        if not all(sizes) or not any(alone):
            raise ValueError("buckets: some have no bytes, or none took any time")
        if "compute_ms" not in case.metrics or not case.metrics["compute_ms"].value:
            raise ValueError("compute_ms: was not measured")
        compute = case.metrics["compute_ms"].value
        begins = _begins(launches, compute)
        if not begins < ready[-1]:
            raise ValueError("ready_ms: the last bucket is ready before the backward begins")
        ranks, parameters = _whole(case, "ranks"), _median(launches, "parameters")
        return cls(
            tokens=_whole(case, "tokens"),
            ranks=ranks,
            sizes=tuple(int(size) for size in sizes),
            wire=buckets.wire(ranks),
            ready=ready,
            alone=alone,
            parameters=parameters,
            gradient=sum(sizes) / parameters,
            flops=_median(launches, "flops"),
            compute=compute,
            begins=begins,
        )

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def rate(self) -> float:
        """F u, FLOP/s."""
        return self.flops / self.compute * 1e3

    @property
    def window(self) -> float:
        """B: from where that compute begins until the last bucket is ready, ms."""
        return self.ready[-1] - self.begins

    @property
    def work(self) -> float:
        """FLOP in that window for each parameter and token, at the rate of the whole step."""
        return self.rate * self.window / 1e3 / (self.parameters * self.tokens)


@dataclass(frozen=True)
class Term:
    """What one term adds to the exposed share, and half the width of the interval of what it is made from.

    tokens: of the case that shows it best.
    """

    name: str
    share: float
    half: float
    tokens: int


def bandwidth(cases: Sequence[Facts]) -> float:
    """W, GB/s: the bus bandwidth at the size of the buckets. Half of all bytes moved slower, and half faster."""
    seen = sorted(
        (case.wire * size / ms / 1e6 if ms > 0 else math.inf, size)
        for case in cases
        for size, ms in zip(case.sizes, case.alone, strict=True)
    )
    half, moved = sum(size for _, size in seen) / 2, 0
    for reached, size in seen:
        moved += size
        if moved >= half and math.isfinite(reached):
            return reached
    raise ValueError("alone_ms: half of all bytes took no time")


def formula_share(tokens: float, threshold: float) -> float:
    """1 - T/T0, no less than 0: what is exposed of a transfer whose compute, T/T0 as long, hides all it can."""
    return max(0.0, 1 - tokens / threshold)


def predicted_share(case: Facts, most: Facts) -> float:
    """The tail by `buckets.schedule` as a share of the collectives' time, with the compute of the case with `most`
    tokens in proportion to the tokens."""
    ready = _scaled(most, case.tokens)
    return buckets.schedule(ready, case.alone, ready[-1]).tail / math.fsum(case.alone)


def tail_alone(case: Facts, dilation: float) -> float:
    """The tail, ms, of a case whose compute was slowed by `dilation` ms and whose collectives were not."""
    slowed = _stretched(case.ready, dilation)
    return buckets.schedule(slowed, case.alone, slowed[-1]).tail


def terms(
    case: Facts, most: Facts, reached: float, threshold: float, metrics: Mapping[str, Metric]
) -> list[Term]:
    """Every term of a case, in the order of TERMS; their sum is what was measured less the formula's share.

    most: the case that the formula's rate is of, with the same buckets. reached: W. threshold: T0. metrics: without
    `tail_ms` and `dilation_ms`, `unexplained` is all that they are about.
    """
    wires = case.wire * case.total / reached / 1e6
    own = math.fsum(case.alone)
    evenly = [wires * size / case.total for size in case.sizes]
    ready = _scaled(most, case.tokens)
    steps = [
        formula_share(case.tokens, threshold),
        max(0.0, 1 - most.window * case.tokens / most.tokens / wires),
        buckets.schedule(ready, evenly, ready[-1]).tail / wires,
        predicted_share(case, most),
        buckets.schedule(case.ready, case.alone, case.ready[-1]).tail / own,
    ]
    tail, dilation = metrics.get("tail_ms"), metrics.get("dilation_ms")
    if tail is not None and dilation is not None:
        steps.append((tail_alone(case, dilation.value) + dilation.value) / own)
        steps.append((tail.value + dilation.value) / own)
    else:
        steps += [steps[-1]] * 2
    measured = metrics["exposed_fraction"]
    steps.append(measured.value)
    halves = {
        # Of this case's compute, and about as much of the other's.
        "rate": 2 * _half(metrics.get("compute_ms")) / own,
        "dilation": _half(dilation) / own,
        "bandwidth": _half(tail) / own,
        "unexplained": _half(measured) + (_half(tail) + _half(dilation)) / own,
    }
    return [
        Term(name, after - before, halves.get(name, 0.0), case.tokens)
        for name, (before, after) in zip(TERMS, itertools.pairwise(steps), strict=True)
    ]


def mixed(one: Sequence[Term], other: Sequence[Term], weight: float) -> list[Term]:
    """The terms between two cases, `weight` of the way from one to the other."""
    return [
        Term(
            a.name,
            (1 - weight) * a.share + weight * b.share,
            (1 - weight) * a.half + weight * b.half,
            max((a, b), key=lambda term: abs(term.share)).tokens,
        )
        for a, b in zip(one, other, strict=True)
    ]


def differ(found: Sequence[Term], share: float) -> bool:
    """Whether measurement and formula are so far apart, at a `share`, that it is worth a word."""
    return abs(sum(term.share for term in found)) >= PART_OF_SHARE * share


def off(found: Sequence[Term], share: float) -> list[Term]:
    """The terms that part measurement and formula at a `share`, the largest first."""
    least = max(PART_OF_GAP * abs(sum(term.share for term in found)), PART_OF_SHARE * share)
    named = [term for term in found if abs(term.share) >= max(least, term.half)]
    return sorted(named, key=lambda term: -abs(term.share))


def _scaled(most: Facts, tokens: int) -> list[float]:
    return [ready * tokens / most.tokens for ready in most.ready]


def _stretched(ready: Sequence[float], dilation: float) -> list[float]:
    """Ready times of a compute that lost `dilation` ms evenly from the first bucket on, when transfers begin."""
    first, last = ready[0], ready[-1]
    if last <= first:
        return [at + dilation for at in ready]
    return [at + dilation * (at - first) / (last - first) for at in ready]


def _half(metric: Metric | None) -> float:
    """Half the width of the interval; nothing is known of one that has none."""
    if metric is None or metric.low is None or metric.high is None:
        return 0.0
    return (metric.high - metric.low) / 2


def _begins(launches: Sequence[Launch], compute: float) -> float:
    """Where the backward begins, ms; by the FLOP of the two, a third of the way, where no round says."""
    seen = [
        round.spans["compute.backward"]
        for launch in launches
        for rank in launch.ranks
        for round in rank.rounds
        if "compute.backward" in round.spans
    ]
    return statistics.median(seen) if seen else compute / 3


def _number(value: Any, name: str) -> float:
    """A record may come from anywhere."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: got {value!r:.20}, want a number of 0 or more")
    return float(value)


def _list(launch: Launch, name: str) -> list[float]:
    found = launch.checks.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{name}: launch {launch.index} has none")
    return [_number(value, name) for value in found]


def _medians(launches: Sequence[Launch], name: str, count: int) -> tuple[float, ...]:
    found = [_list(launch, name) for launch in launches]
    for launch, times in zip(launches, found, strict=True):
        if len(times) != count:
            raise ValueError(f"{name}: launch {launch.index} has {len(times)} of {count} buckets")
    return tuple(map(statistics.median, zip(*found, strict=True)))


def _median(launches: Sequence[Launch], name: str) -> float:
    found = [_number(launch.checks.get(name), name) for launch in launches]
    if not all(found):
        raise ValueError(f"{name}: got 0, want more")
    return statistics.median(found)


def _whole(case: CaseResult, axis: str) -> int:
    found = case.params.get(axis)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{axis}: got {found!r:.20}, want a whole number")
    return found
