"""Tokens per GPU where overlap stops: measured, predicted and by the formula (theory.md 4); and the best bucket.

A set is the measured cases of a record that are alike but for their tokens. What differs between families is in LEGS.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness import buckets
from harness.case import Value
from harness.labels import axis_text, clean
from harness.record import CaseResult, Metric, Record
from harness.terms import Facts, Term, bandwidth, differ, formula_share, mixed, off, predicted_share, terms

SHARES = (0.10, 0.05)
FRACTION = "exposed_fraction"
LEAST_COUNTS = 3

# Where the model itself bends between two token counts so much, interpolating is said to be too coarse.
COARSE = 0.1


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A transfer of a family, and the compute that it can hide behind.

    moved: bytes through an all-gather or reduce-scatter for each parameter, from g, the bytes of a gradient in the
    reduction. work: FLOP of that compute for each parameter and token. law: what follows, as theory.md 4 writes it.
    prefix: what its metrics' names begin with, before `exposed_fraction`, `tail_ms` and `dilation_ms`. facts: what a
    case says of its collectives; ValueError where it says too little.
    """

    name: str
    moved: Callable[[float], float]
    work: float
    law: str
    prefix: str = ""
    facts: Callable[[CaseResult], Facts] = Facts.of

    def metrics(self, case: CaseResult) -> dict[str, Metric]:
        """The metrics of this leg, by their names without the prefix."""
        return {
            name.removeprefix(self.prefix): metric
            for name, metric in case.metrics.items()
            if name.startswith(self.prefix)
        }

    def threshold(self, gradient: float, ranks: int, rate: float, bandwidth: float) -> float:
        """T0 = (moved/work) r F u / W, see `buckets.tokens_threshold`."""
        return buckets.tokens_threshold(self.moved(gradient), self.work, ranks, rate, bandwidth)


# The families whose cases have tokens. An all-reduce moves each byte twice.
LEGS: dict[str, tuple[Leg, ...]] = {
    "ddp": (Leg(name="backward", moved=lambda gradient: 2 * gradient, work=4.0, law="(g/2) r F u / W"),),
}


@dataclass(frozen=True)
class Crossing:
    """Where an exposed share last falls under one that is asked for.

    tokens: None where that is not between the token counts measured; `side` is then `above` or `below` them. near: the
    token counts on both sides, or the one at the edge.
    """

    tokens: float | None
    side: str
    near: tuple[int, ...]

    @property
    def place(self) -> float:
        """The tokens, or the end of the numbers that they are towards."""
        return self.tokens if self.tokens is not None else math.inf if self.side == "above" else -math.inf

    @property
    def weight(self) -> float:
        """How far it is from the first of `near` to the second, in log tokens."""
        if self.tokens is None:
            return 0.0
        return math.log(self.tokens / self.near[0]) / math.log(self.near[1] / self.near[0])


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Tokens per GPU from which on no more than `share` of a transfer is exposed.

    low, high: from the ends of the cases' intervals; None where a case has none. predicted: by `buckets.schedule`,
    with compute in proportion to tokens; infinite where no number of tokens is enough. formula: (1 - share) T0. Both
    None where the cases say too little. coarse: the prediction as these token counts and this way of interpolating
    would give it, where that is another number. off: why measurement and formula differ; empty where they agree
    within the intervals. unseen: they differ, and no term is larger than its own interval.
    """

    share: float
    measured: Crossing
    low: Crossing | None = None
    high: Crossing | None = None
    predicted: float | None = None
    formula: float | None = None
    coarse: float | None = None
    off: tuple[Term, ...] = ()
    unseen: bool = False


@dataclass(frozen=True, kw_only=True)
class Derived:
    """T0 of the formula and what it is made from: g bytes, F u in FLOP/s at the most tokens, W in GB/s.

    whole: the bus bandwidth of all bytes in one transfer, GB/s; None where that was not measured.
    """

    tokens: float
    gradient: float
    ranks: int
    rate: float
    bandwidth: float
    whole: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """Cases alike but for tokens, by their tokens, and what they say of one leg.

    lacking: why there is nothing to set beside the measured numbers; `derived` is then None and `facts` empty.
    """

    leg: Leg
    cases: dict[int, CaseResult]
    thresholds: tuple[Threshold, ...]
    derived: Derived | None = None
    facts: dict[int, Facts] = field(default_factory=dict)
    lacking: str = ""

    @property
    def shares(self) -> dict[int, float]:
        return {tokens: self.leg.metrics(case)[FRACTION].value for tokens, case in self.cases.items()}

    def crossings(self, share: float) -> int:
        """How often the exposed share falls under `share` from one case to the next, or rises over it."""
        under = [value < share for value in self.shares.values()]
        return sum(before != after for before, after in itertools.pairwise(under))


@dataclass(frozen=True)
class Found:
    """The sets of a record; `lacking`: why there is none."""

    sets: tuple[TokenSet, ...]
    lacking: str = ""


def find(record: Record) -> Found:
    """Every set of three token counts or more, in the order of the record."""
    groups = [
        (leg, group)
        for family, legs in LEGS.items()
        for leg in legs
        for group in alike(
            (case for case in record.cases if case.family == family and FRACTION in leg.metrics(case)),
            "tokens",
        )
    ]
    sets = tuple(_set(leg, group) for leg, group in groups if len(group) >= LEAST_COUNTS)
    return Found(sets, "" if sets else _lacking([group for _, group in groups]))


def alike(cases: Iterable[CaseResult], axis: str) -> list[list[CaseResult]]:
    """The measured of `cases` in groups that differ in `axis` alone, each from its lowest value up."""
    groups: dict[tuple[tuple[str, Value], ...], list[CaseResult]] = {}
    for case in cases:
        value = case.params.get(axis)
        if case.measured and isinstance(value, int) and value > 0:
            same = tuple(sorted((name, given) for name, given in case.params.items() if name != axis))
            groups.setdefault(same, []).append(case)
    return [sorted(group, key=lambda case: case.params[axis]) for group in groups.values()]


def crossing(points: Sequence[tuple[int, float]], share: float) -> Crossing:
    """Where a share over tokens last falls under `share`, straight in log tokens between two neighbours.

    points: (tokens, share) from few tokens to many.
    """
    over = [at for at, (_, value) in enumerate(points) if value >= share]
    if not over:
        return Crossing(None, "below", (points[0][0],))
    if over[-1] == len(points) - 1:
        return Crossing(None, "above", (points[-1][0],))
    (few, before), (many, after) = points[over[-1] : over[-1] + 2]
    weight = (before - share) / (before - after)
    return Crossing(few * (many / few) ** weight, "in", (few, many))


def _set(leg: Leg, group: Sequence[CaseResult]) -> TokenSet:
    cases = {int(case.params["tokens"]): case for case in group}
    metrics = {tokens: leg.metrics(case) for tokens, case in cases.items()}
    try:
        facts = _facts(leg, cases)
        derived, lacking = _derived(leg, facts, metrics), ""
    except ValueError as error:
        facts, derived, lacking = {}, None, str(error)
    made = tuple(_threshold(metrics, facts, derived, share) for share in SHARES)
    return TokenSet(leg=leg, cases=cases, thresholds=made, derived=derived, facts=facts, lacking=lacking)


def _facts(leg: Leg, cases: Mapping[int, CaseResult]) -> dict[int, Facts]:
    found = {}
    for tokens, case in cases.items():
        try:
            found[tokens] = leg.facts(case)
        except ValueError as error:
            raise ValueError(f"at {tokens:,} tokens, {error}") from None
    if len({facts.sizes for facts in found.values()}) > 1:
        raise ValueError("buckets: not the same at every number of tokens")
    return found


def _derived(leg: Leg, facts: Mapping[int, Facts], metrics: Mapping[int, Mapping[str, Metric]]) -> Derived:
    most = facts[max(facts)]
    if most.ranks < 2:
        raise ValueError("ranks: got 1, which has nobody to send anything to")
    reached = bandwidth(list(facts.values()))
    whole = metrics[most.tokens].get("transfer_unsplit_ms")
    return Derived(
        tokens=leg.threshold(most.gradient, most.ranks, most.rate, reached),
        gradient=most.gradient,
        ranks=most.ranks,
        rate=most.rate,
        bandwidth=reached,
        whole=most.wire * most.total / whole.value / 1e6 if whole is not None and whole.value > 0 else None,
    )


def _threshold(
    metrics: Mapping[int, Mapping[str, Metric]],
    facts: Mapping[int, Facts],
    derived: Derived | None,
    share: float,
) -> Threshold:
    fractions = {tokens: each[FRACTION] for tokens, each in metrics.items()}
    measured = crossing([(tokens, each.value) for tokens, each in fractions.items()], share)
    lows = {tokens: each.low for tokens, each in fractions.items() if each.low is not None}
    highs = {tokens: each.high for tokens, each in fractions.items() if each.high is not None}
    whole = len(lows) == len(highs) == len(fractions)
    low, high = (crossing(list(ends.items()), share) if whole else None for ends in (lows, highs))
    if derived is None:
        return Threshold(share=share, measured=measured, low=low, high=high)
    most = facts[max(facts)]
    predicted = most.tokens * buckets.scale_for_share(most.ready, most.alone, share)
    coarse = crossing([(at, predicted_share(each, most)) for at, each in facts.items()], share).tokens
    bent = coarse is not None and predicted > 0 and abs(coarse / predicted - 1) > COARSE
    found = [terms(facts[at], most, derived.bandwidth, derived.tokens, metrics[at]) for at in measured.near]
    parts = mixed(found[0], found[-1], measured.weight)
    # The formula's shares at the same token counts, crossed the same way: what interpolating costs, both pay.
    by_formula = crossing([(at, formula_share(at, derived.tokens)) for at in facts], share)
    agree = (low or measured).place <= by_formula.place <= (high or measured).place
    named = () if agree else tuple(off(parts, share))
    return Threshold(
        share=share,
        measured=measured,
        low=low,
        high=high,
        predicted=predicted,
        formula=(1 - share) * derived.tokens,
        coarse=coarse if bent else None,
        off=named,
        unseen=not agree and not named and differ(parts, share),
    )


def _lacking(groups: Sequence[Sequence[CaseResult]]) -> str:
    wanted = f"no cases alike but for tokens are measured at {LEAST_COUNTS} token counts or more"
    if not groups:
        return f"{wanted}, and none of {' or '.join(LEGS)} is measured at all"
    most = max(groups, key=len)
    counts = " and ".join(axis_text(case.family, "tokens", case.params["tokens"]) for case in most)
    return f"{wanted}; the most are of {clean(most[0].family)} at {counts} tokens"
