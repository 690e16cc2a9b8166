"""The best bucket cap: measured, of cases alike but for it, and by theory (theory.md 3)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness import buckets
from harness.labels import axis_text
from harness.record import CaseResult, Metric, Record
from harness.registry import HEADLINE
from harness.terms import Facts
from harness.threshold import LEGS, alike

# Bytes; families.py accepts none below.
LEAST_CAP = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Cap:
    """One list of buckets: the smallest cap that it came from, and the others that gave the same."""

    cap: int
    same: tuple[int, ...]
    count: int
    overlapped: Metric
    case: CaseResult


@dataclass(frozen=True, kw_only=True)
class Theory:
    """The best number of equal buckets, and what it is made from.

    count: best whole number; None where a bucket costs nothing by itself, and more never lose. cap: the bytes of one,
    G/b. alpha ms, bandwidth GB/s: fitted to every bucket's own time. backward: B,
    ms. default: how much longer a step takes with buckets of PyTorch's own cap, as a share.
    """

    count: int | None
    cap: float | None
    alpha: float
    bandwidth: float
    backward: float
    default: float


@dataclass(frozen=True, kw_only=True)
class BestBucket:
    """Cases alike but for their bucket cap, each list of buckets once, from the smallest cap up.

    best: the cap of the least overlapped time. as_good: those whose intervals touch its own. theory: None where the
    cases say too little, and `lacking` says what.
    """

    caps: tuple[Cap, ...]
    best: Cap
    as_good: tuple[Cap, ...]
    theory: Theory | None
    lacking: str = ""


def find(record: Record) -> list[BestBucket]:
    """Of every group of cases with two lists of buckets or more."""
    cases = [case for case in record.cases if case.family in LEGS and HEADLINE in case.metrics]
    return [found for group in alike(cases, "bucket") if (found := _best(group)) is not None]


def _best(group: Sequence[CaseResult]) -> BestBucket | None:
    facts, lacking = [], ""
    lists: dict[tuple[float, ...], list[tuple[CaseResult, Facts]]] = {}
    for case in group:
        try:
            said = Facts.of(case)
        except ValueError as error:
            lacking = f"at a cap of {axis_text(case.family, 'bucket', case.params['bucket'])}, {error}"
            continue
        facts.append(said)
        lists.setdefault(said.sizes, []).append((case, said))
    if len(lists) < 2:
        return None
    caps = tuple(_cap([case for case, _ in found], len(sizes)) for sizes, found in lists.items())
    best = min(caps, key=lambda cap: cap.overlapped.value)
    theory = None
    try:
        theory = _theory(facts)
    except ValueError as error:
        lacking = lacking or str(error)
    return BestBucket(
        caps=caps,
        best=best,
        as_good=tuple(cap for cap in caps if cap is not best and _touch(cap.overlapped, best.overlapped)),
        theory=theory,
        lacking=lacking,
    )


def _cap(cases: Sequence[CaseResult], count: int) -> Cap:
    first, *others = cases
    return Cap(
        cap=int(first.params["bucket"]),
        same=tuple(int(case.params["bucket"]) for case in others),
        count=count,
        overlapped=first.metrics[HEADLINE],
        case=first,
    )


def _touch(one: Metric, other: Metric) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high


def _theory(facts: Sequence[Facts]) -> Theory:
    """From all cases together: their buckets are of many sizes, and that is what the fit needs."""
    if facts[0].ranks < 2:
        raise ValueError("ranks: got 1, which has nobody to send anything to")
    pairs = [(size, ms) for each in facts for size, ms in zip(each.sizes, each.alone, strict=True) if ms > 0]
    alpha, beta = buckets.fit([size for size, _ in pairs], [ms for _, ms in pairs])
    if beta <= 0:
        raise ValueError("the fit sees no cost of a byte: the buckets are too small, or their times too wide")
    total = facts[0].total
    backward = statistics.median(each.window for each in facts)
    # Without a cost of each bucket the best is the longer of the two legs.
    # None smaller than a case can ask for.
    most = max(1, int(total // LEAST_CAP))
    count = min(most, buckets.best_whole_count(backward, total, alpha, beta)) if alpha > 0 else None
    least = buckets.step(backward, total, count, alpha, beta) if count else max(backward, total * beta)
    usual = max(1.0, total / buckets.DEFAULT_CAP)
    return Theory(
        count=count,
        cap=total / count if count else None,
        alpha=alpha,
        bandwidth=facts[0].wire / beta / 1e6,
        backward=backward,
        default=buckets.step(backward, total, usual, alpha, beta) / least - 1,
    )
