"""Base against head, case by case: what changed, by how much, in which leg, and what could not be seen.

`compare` computes; harness/gate.py turns it into an exit code, harness/contest.py into text.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from harness import contrast, sides
from harness.budgets import Budget, Budgets
from harness.contrast import Contrast
from harness.differences import differences, hard_names, moved_ceilings
from harness.errors import UsageError
from harness.evidence import DISTURBED, LEAST_LAUNCHES, History, Pair, steady
from harness.legs import legs, transfer_leg
from harness.record import CaseResult
from harness.registry import HEADLINE, METRICS
from harness.sides import Side, Times

NO_TIMES = Times({}, {})


class Effect(msgspec.Struct, kw_only=True):
    """One quantity of a case, base against head, as harness/contrast.py has it."""

    quantity: str
    unit: str
    base: float
    head: float
    change: float
    low: float
    high: float
    visible: float
    verdict: str
    p: float
    tripped: bool = False


class CaseComparison(msgspec.Struct, kw_only=True):
    """verdict: same, faster, slower, inconclusive; missing (base has it, head has not), invalid (measured on one side
    at most), skipped (has no meaning on either), new (only head has it). legs: where a slower case lost its time.
    launches: of base and of head. base_ms, head_ms: HEADLINE, what `change` is made of; of a case that was not
    compared the median over launches. mean_change: of the mean of rounds instead, where every launch of head is slower
    by it than any of base. gated: whether it has a budget.
    """

    key: str
    family: str
    params: dict[str, str | int | float]
    verdict: str
    reason: str = ""
    legs: list[str] = []
    effects: dict[str, Effect] = {}
    launches: tuple[int, int] = (0, 0)
    base_ms: float | None = None
    head_ms: float | None = None
    mean_change: float | None = None
    budget: float = 0.0
    gated: bool = True


class SideFacts(msgspec.Struct, kw_only=True):
    name: str
    commit: str
    machine: str
    records: list[str]
    launches: int


class Comparison(msgspec.Struct, kw_only=True):
    """design: `interleaved` or `nights`. breaks: hard keys that differ, so that nothing is compared. crossed: those
    that `--across` allowed. warnings: one line each. stages: 2 where what trips or is not seen is measured
    again. fresh: base and head of that second stage, where there was one."""

    base: SideFacts
    head: SideFacts
    design: str
    breaks: list[str]
    crossed: list[str]
    warnings: list[str]
    cases: list[CaseComparison]
    stages: int = 1
    fresh: list[SideFacts] = []


def compare(
    base: Side,
    head: Side,
    budgets: Budgets,
    *,
    across: Iterable[str] = (),
    histories: Mapping[tuple[str, str], History] | None = None,
    confirm: bool = False,
    fresh: tuple[Side, Side] | None = None,
    pooled: Iterable[str] = (),
) -> Comparison:
    """Everything that can be said of head against base.

    Args:
        across: names of hard keys, such as `driver`, that may differ; UsageError for one that is none.
        histories: by (case, quantity), for sides that were not measured in turns; without one such a case stays
            inconclusive.
        confirm: in two stages. Without `fresh` this is the first: `tripped` and `unseen` name the cases to measure
            again, and what tripped is inconclusive.
        fresh: those cases of both sides measured again, in turns. What tripped must be slower in these alone.
        pooled: keys of cases that were not seen, to be judged by all their launches together.
    """
    _refuse_copies(base, head)
    interleaved = sides.interleaved(base, head)
    breaks, crossed, warnings = differences(base, head, hard_names(across))
    made = Comparison(
        base=_facts(base),
        head=_facts(head),
        design="interleaved" if interleaved else "nights",
        breaks=breaks,
        crossed=crossed,
        warnings=[*warnings, *moved_ceilings(base, head, interleaved=interleaved)],
        cases=[],
        stages=2 if confirm else 1,
        fresh=[_facts(side) for side in fresh or ()],
    )
    if breaks:
        return made
    pairs: list[Pair] = []
    for key in _keys(base, head):
        case, found = _case(base, head, key, budgets)
        made.cases.append(case)
        if not interleaved:
            found = _with_history(case, found, histories or {})
        pairs += found
    if not confirm:
        judged = contrast.compare(pairs, design="interleaved" if interleaved else "nights")
    else:
        judged = contrast.confirm(pairs, _fresh_pairs(pairs, *fresh, budgets) if fresh else [])
    told = list(zip(pairs, judged, strict=True))
    if fresh and pooled:
        told = _pooled(made.cases, told, (base, head), fresh, budgets, set(pooled))
    _judge(made.cases, told)
    return made


def _refuse_copies(base: Side, head: Side) -> None:
    """UsageError for a record that is there twice, in one side or in both: a launch counts once."""
    for side in (base, head):
        for at, made in enumerate(side.records):
            named = f"the record {made.run.time} of {made.run.commit[:8]}"
            if made.cases and made in side.records[:at]:
                raise UsageError(f"{side.name} holds {named} twice; a launch counts once")
            if made.cases and side is base and made in head.records:
                raise UsageError(f"base {base.name} and head {head.name} share {named}; give each its own")


def tripped(made: Comparison) -> list[str]:
    """Keys of the cases that a second stage must confirm."""
    return [case.key for case in made.cases if any(effect.tripped for effect in case.effects.values())]


def unseen(made: Comparison) -> list[str]:
    """Keys of the cases with a budget that neither tripped nor could be seen to keep it: more launches may tell."""
    return [
        case.key
        for case in made.cases
        if case.gated and case.verdict == "inconclusive" and HEADLINE in case.effects
        and not any(effect.tripped for effect in case.effects.values())
    ]  # fmt: skip


def _facts(side: Side) -> SideFacts:
    return SideFacts(
        name=side.name,
        commit=side.commit,
        machine=side.records[0].machine.name,
        records=[made.run.time for made in side.records],
        launches=side.launches,
    )


def _keys(base: Side, head: Side) -> list[str]:
    """Of every case that either side planned or holds, in order."""
    found: dict[str, None] = {}
    for side in (base, head):
        for made in side.records:
            found |= dict.fromkeys([*made.run.planned, *(case.key for case in made.cases)])
    return list(found)


def _case(base: Side, head: Side, key: str, budgets: Budgets) -> tuple[CaseComparison, list[Pair]]:
    """The case before any statistics, and what is to be compared of it: nothing where it was not measured enough."""
    family = key.partition("[")[0]
    budget = budgets.of(family)
    found = {name: side.results.get(key, []) for name, side in (("base", base), ("head", head))}
    case = CaseComparison(
        key=key,
        family=family,
        params=next((result.params for result in (*found["head"], *found["base"])), {}),
        verdict="inconclusive",
        budget=budget.time,
        gated=budget.gates(key),
    )
    lost = {name: _not_measured(results) for name, results in found.items()}
    if lost["base"] and lost["head"] and {r.status for r in (*found["base"], *found["head"])} == {"skipped"}:
        case.verdict, case.reason = "skipped", lost["head"]
    elif lost["head"]:
        gone = not found["head"] or {result.status for result in found["head"]} == {"skipped"}
        case.verdict, case.reason = "missing" if gone else "invalid", f"head: {lost['head']}"
    elif lost["base"]:
        gone = not found["base"] or {result.status for result in found["base"]} == {"skipped"}
        case.verdict, case.reason = "new" if gone else "invalid", f"base: {lost['base']}"
    elif empty := [name for name, side in (("base", base), ("head", head)) if not _timed(side, key)]:
        case.verdict, case.reason = "invalid", f"{' and '.join(empty)}: no round that all ranks have"
    else:
        times = {name: side.times.get(key, NO_TIMES) for name, side in (("base", base), ("head", head))}
        case.launches = (len(times["base"]), len(times["head"]))
        case.base_ms, case.head_ms = (float(np.median(found.values[HEADLINE])) for found in times.values())
        if min(case.launches) < LEAST_LAUNCHES:
            few = f"{case.launches[0]} against {case.launches[1]} launches, want {LEAST_LAUNCHES} or more of each"
            case.reason = "; ".join([few, *dict.fromkeys(_lost(found))])
        else:
            case.reason, case.mean_change = _aside(times), _mean_change(times)
            return case, list(_pairs(key, times["base"], times["head"], budget))
    return case, []


def _aside(times: Mapping[str, Times]) -> str:
    """Which launches the headline is judged without."""
    left = {name: steady(found.errors[HEADLINE] / found.values[HEADLINE]) for name, found in times.items()}
    return "; ".join(
        f"{name}: {np.sum(~kept)} of {len(kept)} launches left out, whose rounds scatter over {DISTURBED:g} times "
        "those of the others"
        for name, kept in left.items()
        if not kept.all()
    )


def _mean_change(times: Mapping[str, Times]) -> float | None:
    base, head = (found.values.get(sides.MEAN) for found in times.values())
    if base is None or head is None or head.min() <= base.max():
        return None
    return float(np.exp(np.log(head).mean() - np.log(base).mean())) - 1


def _timed(side: Side, key: str) -> bool:
    return HEADLINE in side.times.get(key, NO_TIMES).values


def _lost(found: Mapping[str, Sequence[CaseResult]]) -> Iterable[str]:
    """Why launches of a case that has others are not there."""
    for name, results in found.items():
        for result in results:
            if not result.measured:
                yield f"{name}: {_not_measured([result])}"


def _not_measured(results: Sequence[CaseResult]) -> str:
    """Why none of these has samples to compare; empty where one has."""
    if any(result.measured for result in results):
        return ""
    if not results:
        return "not measured"
    worst = results[-1]
    return f"{worst.status}: {worst.reason}" if worst.reason else worst.status


def _pairs(key: str, base: Times, head: Times, budget: Budget) -> Iterable[Pair]:
    for name in sides.QUANTITIES:
        if name in base.values and name in head.values:
            old, new = base.values[name], head.values[name]
            if min(len(old), len(new)) >= LEAST_LAUNCHES:
                base_errors, head_errors = base.errors[name] / old, head.errors[name] / new
                some, others = steady(base_errors), steady(head_errors)
                host = name == "host_ms"
                yield Pair(
                    case=key,
                    quantity=name,
                    base=old[some].tolist(),
                    head=new[others].tolist(),
                    base_errors=base_errors[some].tolist(),
                    head_errors=head_errors[others].tolist(),
                    budget=budget.host if host else budget.time,
                    population=f"{'host' if host else 'time'}{'' if budget.gates(key) else ', unbudgeted'}",
                )


def _with_history(
    case: CaseComparison, found: Sequence[Pair], histories: Mapping[tuple[str, str], History]
) -> list[Pair]:
    known = [pair for pair in found if (pair.case, pair.quantity) in histories]
    if found and not known:
        case.reason = (
            "base and head were not measured in turns, and the store does not tell how nights differ"
        )
    return [dataclasses.replace(pair, history=histories[pair.case, pair.quantity]) for pair in known]


def _fresh_pairs(pairs: Sequence[Pair], base: Side, head: Side, budgets: Budgets) -> list[Pair]:
    """The same quantities of the cases that were measured again."""
    keys = dict.fromkeys(pair.case for pair in pairs)
    found: list[Pair] = []
    for key in keys:
        found += _pairs(
            key,
            base.times.get(key, NO_TIMES),
            head.times.get(key, NO_TIMES),
            budgets.of(key.partition("[")[0]),
        )
    return found


def _pooled(
    cases: list[CaseComparison],
    told: Sequence[tuple[Pair, Contrast]],
    first: tuple[Side, Side],
    fresh: tuple[Side, Side],
    budgets: Budgets,
    keys: Collection[str],
) -> list[tuple[Pair, Contrast]]:
    """What is told, with these cases judged anew by the launches of both stages; `cases` get what those hold.

    They have another chance of LEVEL to be called by mistake: of 100 comparisons of unchanged code 1 at most says
    "slower" somewhere, with the confirmed ones.
    """
    base, head = (
        Side(side.name, (*side.records, *more.records)) for side, more in zip(first, fresh, strict=True)
    )
    kept = [(pair, one) for pair, one in told if pair.case not in keys]
    pairs = [pair for pair, _ in kept]
    for at, case in enumerate(cases):
        if case.key in keys:
            cases[at], found = _case(base, head, case.key, budgets)
            pairs += found
    return kept + list(zip(pairs, contrast.compare(pairs), strict=True))[len(kept) :]


def _judge(cases: Sequence[CaseComparison], found: Iterable[tuple[Pair, Contrast]]) -> None:
    """Fill in effects and verdicts, in place."""
    by_key = {case.key: case for case in cases}
    for pair, told in found:
        by_key[pair.case].effects[pair.quantity] = Effect(
            quantity=pair.quantity,
            unit=METRICS[pair.quantity].unit,
            base=told.base,
            head=told.head,
            change=told.effect,
            low=told.low,
            high=told.high,
            visible=told.visible,
            verdict=told.verdict,
            p=min(told.p_slower, told.p_faster),
            tripped=told.tripped,
        )
    for case in cases:
        if HEADLINE in case.effects:
            _conclude(case)


def _conclude(case: CaseComparison) -> None:
    """The verdict on a case from those on its quantities, in place."""
    headline = case.effects[HEADLINE]
    case.base_ms, case.head_ms = headline.base, headline.head
    verdicts = {name: effect.verdict for name, effect in case.effects.items()}
    # A leg that got faster makes the model faster, and nobody slower.
    timed = (verdict for name, verdict in verdicts.items() if name != "model_ratio")
    case.verdict = "slower" if "slower" in timed else verdicts[HEADLINE]
    if case.verdict == "slower":
        case.legs = list(legs(case.effects, transfer_leg(case.family)))
        return
    if case.verdict == "inconclusive":
        why = _not_seen(case, headline)
    elif case.mean_change is not None and case.mean_change > case.budget:
        case.verdict = "inconclusive"
        why = f"some rounds take long: their mean is {case.mean_change:+.1%}, their median {headline.change:+.1%}"
    else:
        why = "; ".join(_legs_not_seen(case))
    case.reason = "; ".join(filter(None, [why, case.reason]))


def _not_seen(case: CaseComparison, headline: Effect) -> str:
    if case.gated and headline.visible <= case.budget:
        return f"{headline.low:+.1%} to {headline.high:+.1%} reaches over the budget of {case.budget:.1%}"
    few = f"only a loss of {headline.visible:.1%} or more would have been called"
    return f"{few}, the budget is {case.budget:.1%}" if case.gated else few


def _legs_not_seen(case: CaseComparison) -> Iterable[str]:
    """Legs that may be slower, though the whole is not."""
    for name, leg in (("transfer_ms", transfer_leg(case.family)), ("compute_ms", "compute")):
        effect = case.effects.get(name)
        if effect is not None and effect.verdict == "inconclusive" and effect.high > case.budget:
            yield f"{leg} alone was not seen: {effect.low:+.1%} to {effect.high:+.1%}"
    host = case.effects.get("host_ms")
    if host is not None and host.verdict == "inconclusive" and host.tripped and host.low > 0:
        yield f"host may be slower: {host.low:+.0%} to {host.high:+.0%}"
