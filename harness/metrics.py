"""What a case's launches say: its metrics (harness/registry.py), its model, reasons to doubt them.

`derive` fills a case result, `derive_curves` a record. Sinks render what these left there; they compute
nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from harness import buckets, theory
from harness import record as records
from harness.doubts import NAMES, doubts
from harness.evidence import launch_error, mean_error
from harness.families import grouped
from harness.record import CaseResult, Launch, Record, Round
from harness.registry import HEADLINE, Metric, metrics_of
from harness.statistics import Array, Bootstrap

# Enqueueing that takes this share of the device's time leaves the device waiting for the host.
LAUNCH_BOUND = 0.9
_DERIVED_CHECKS = (*NAMES, "launch_bound", "transfer_launch_bound", "ranks_misaligned")
_CURVE_NEEDS = {"overlapped_ms", "transfer_ms", "compute_ms"}
_CURVE_KEYS = (
    "curve_ms",
    "curve_ratio",
    "curve_overhead_ms",
    "curve_transfer_ms",
    "curve_compute_ms",
    "curve_fitted",
    "n_star",
    "recommended_chunks",
)


def launch_values(case: CaseResult, name: str) -> list[float]:
    """The value of a metric in every launch that has samples; empty where they lack an arm it needs."""
    metric, launches = _covered(case, name)
    if metric is None:
        return []
    return [
        float(value) for value in Bootstrap(launches).values(_of(metric, case), metric.arms, metric.quantile)
    ]


def launch_estimates(case: CaseResult, names: Iterable[str]) -> dict[str, list[tuple[float, float]]]:
    """As `launch_values`, of several metrics, each value with its standard error from within the launch: of
    independent arms, to first order. A metric whose arms the launches lack is left out."""
    launches = _columns(case)
    found: dict[str, list[tuple[float, float]]] = {}
    known = metrics_of(case.family)
    wanted = [known[name] for name in names if name in known and _covers(launches, known[name].arms)]
    arms = dict.fromkeys(arm for metric in wanted for arm in metric.arms)
    if not wanted:
        return found
    together = [np.column_stack([columns[arm] for arm in arms]) for columns in launches]

    def by_arm(of: Callable[[Array], Any]) -> dict[str, Array]:
        return dict(zip(arms, np.array([of(rounds) for rounds in together]).T, strict=True))

    # A metric of means has the error of a mean (registry.py).
    medians = by_arm(lambda rounds: np.median(rounds, axis=0)), by_arm(launch_error)
    means = by_arm(lambda rounds: rounds.mean(axis=0)), by_arm(mean_error)
    for metric in wanted:
        of = _of(metric, case)
        middle, shares = means if metric.quantile is None else medians
        values = of(middle)
        moved = [of(middle | {arm: middle[arm] * (1 + shares[arm])}) - values for arm in metric.arms]
        errors = np.sqrt(sum(shift**2 for shift in moved))
        found[metric.name] = list(zip(values.tolist(), errors.tolist(), strict=True))
    return found


def samples(case: CaseResult, name: str) -> list[float]:
    """What a store of samples gets: every round for the time of one arm, else one value per launch."""
    metric, launches = _covered(case, name)
    if metric is None or not metric.per_round:
        return launch_values(case, name)
    return [float(sample) for columns in launches for sample in columns[metric.arms[0]]]


def measured(case: CaseResult, name: str) -> records.Metric | None:
    """One metric with its interval over all launches of `case`, as `derive` has it; None where they lack an arm."""
    metric, launches = _covered(case, name)
    return None if metric is None else _measure(metric, case, Bootstrap(launches))


def derive(case: CaseResult) -> CaseResult:
    """A copy of `case` with metrics, model and checks taken from its launches; without samples, as it was.

    checks: see doubts.doubts; `launch_bound` for ungated pinned cases: the host needs LAUNCH_BOUND of the
    device's time to enqueue it; `transfer_launch_bound`: the same of NCCL's collectives alone; `ranks_misaligned`:
    launches left out because their ranks' rounds differ.
    """
    launches = _columns(case)
    checks = {name: value for name, value in case.checks.items() if name not in _DERIVED_CHECKS}
    misaligned = [launch.index for launch in case.launches if _rounds(launch) is None]
    if misaligned:
        checks["ranks_misaligned"] = misaligned
    if not launches:
        return msgspec.structs.replace(case, metrics={}, checks=checks)
    bootstrap = Bootstrap(launches)
    found = {
        metric.name: _measure(metric, case, bootstrap)
        for metric in metrics_of(case.family).values()
        if _covers(launches, metric.arms)
    }
    checks |= doubts(launches, [seen[0].order for _, rounds in _measured(case) for seen in rounds])
    bound = _launch_bound(case, found)
    if bound is not None:
        checks["launch_bound"] = bound
    if case.params.get("backend") == "nccl" and _covers(launches, ("transfer", "host.transfer")):
        checks["transfer_launch_bound"] = _slow_to_start(launches)
    return msgspec.structs.replace(
        case,
        metrics=found,
        model=case.model | _model(case, launches, bootstrap),
        checks=checks,
    )


def _covered(case: CaseResult, name: str) -> tuple[Metric | None, list[dict[str, Array]]]:
    """The metric of that name and the columns of every launch; None where the family has no such metric, or they lack
    an arm of it."""
    metric, launches = metrics_of(case.family).get(name), _columns(case)
    return (metric if metric is not None and _covers(launches, metric.arms) else None), launches


def _measure(metric: Metric, case: CaseResult, bootstrap: Bootstrap) -> records.Metric:
    found = bootstrap.interval(_of(metric, case), metric.arms, metric.quantile)
    low, high = found.low, found.high
    if metric.quantile in (0.0, 1.0):  # resampling never shows what is beyond the longest
        low = high = None
    elif low is not None and metric.unit == "ms" and len(metric.arms) == 1 and found.value >= 0:
        low = max(low, 0.0)  # few blocks widen an interval to where no duration is
    return records.Metric(value=found.value, unit=metric.unit, low=low, high=high)


def _of(metric: Metric, case: CaseResult) -> Callable[[Mapping[str, Array]], Array]:
    pieces = _pieces(case)
    return lambda t: metric.of(t, pieces)


def _chunks(case: CaseResult) -> int:
    found = case.params.get("chunks", 1)
    return int(found) if isinstance(found, int) else 1


def _repeats(case: CaseResult) -> int:
    """Batches in one sample; the launches of a case have the same."""
    return next((launch.repeats for launch in case.launches if "repeats" in launch.checks), 1)


def _pieces(case: CaseResult) -> int:
    """Pieces of a sample: chunks of all its batches, or buckets."""
    if grouped(case.family):
        return next((len(found) for launch in case.launches if (found := _list(launch, "buckets"))), 1)
    return _chunks(case) * _repeats(case)


def _list(launch: Launch, name: str) -> list[float]:
    """The numbers `name` that the workload told of this launch; empty where it told none."""
    found = launch.checks.get(name)
    told = found if isinstance(found, list) else []
    return [float(each) for each in told if isinstance(each, int | float)]


def _covers(launches: Sequence[Mapping[str, Array]], arms: Sequence[str]) -> bool:
    return bool(launches) and all(arm in columns for columns in launches for arm in arms)


def _rounds(launch: Launch) -> list[list[Round]] | None:
    """The rounds, each as its ranks saw it; None where the ranks did not run the same rounds."""
    by_rank = [rank.rounds for rank in launch.ranks]
    if len({len(rounds) for rounds in by_rank}) > 1:
        return None
    together = [list(seen) for seen in zip(*by_rank, strict=True)]
    return together if all(len({tuple(r.order) for r in seen}) == 1 for seen in together) else None


def _measured(case: CaseResult) -> list[tuple[Launch, list[list[Round]]]]:
    """Every launch that has samples, with its rounds."""
    found = ((launch, _rounds(launch)) for launch in case.launches)
    return [
        (launch, rounds)
        for launch, rounds in found
        if rounds and _slowest([[r.arms for r in seen] for seen in rounds])
    ]


def _columns(case: CaseResult) -> list[dict[str, Array]]:
    """What a metric may ask for of each such launch, (rounds,) ms of one batch.

    The arms and the `host.` times: the slowest rank of each round, since a step waits for it. A collective's own cost
    is the fastest rank's: the others waited for a peer, for `waiting` (measurement.md, rule 11). The spans named
    `arm.span`: as they are, of the rank that was slowest in that arm. `model`: what the launch's own times predict.
    """
    return [
        found | _spans(rounds) | _collective(case, launch, rounds, found)
        for launch, rounds, found in _by_launch(case)
    ]


def _by_launch(case: CaseResult) -> Iterator[tuple[Launch, list[list[Round]], dict[str, Array]]]:
    for launch, rounds in _measured(case):
        columns = _slowest([[r.arms for r in seen] for seen in rounds])
        host = _slowest([[r.host for r in seen] for seen in rounds])
        columns |= {f"host.{arm}": column for arm, column in host.items()}
        if _chunks(case) == 1:
            for arm in ("transfer", "compute"):
                if arm in columns:
                    columns.setdefault(f"{arm}_1", columns[arm])
        yield launch, rounds, {name: column / launch.repeats for name, column in columns.items()}


def _spans(rounds: list[list[Round]]) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    for name in rounds[0][0].spans:
        arm, named, _ = name.partition(".")
        slowest = [max(seen, key=lambda rank: rank.arms.get(arm, 0.0)) for seen in rounds]
        if named and all(name in rank.spans for rank in slowest):
            columns[name] = np.array([rank.spans[name] for rank in slowest])
    return columns


def _collective(
    case: CaseResult, launch: Launch, rounds: list[list[Round]], found: Mapping[str, Array]
) -> dict[str, Array]:
    """The columns of a launch of a grouped family that differ from those of one process, or come beside them."""
    if not grouped(case.family):
        return {}
    columns: dict[str, Array] = {}
    for arm in ("transfer", "transfer_1"):
        if arm in found and all(arm in rank.arms for seen in rounds for rank in seen):
            by_rank = np.array([[rank.arms[arm] for rank in seen] for seen in rounds])
            columns[arm] = by_rank.min(axis=1)
            if arm == "transfer":
                columns["waiting"] = by_rank.max(axis=1) - by_rank.min(axis=1)
    ready, alone = _list(launch, "ready_ms"), _list(launch, "alone_ms")
    if ready and len(ready) == len(alone) and "compute" in found:
        end = buckets.schedule(ready, alone, float(np.median(found["compute"]))).end
        columns["model"] = np.full(len(rounds), end)
    return columns


def _slowest(rounds: list[list[dict[str, float]]]) -> dict[str, Array]:
    """The arms that every rank has in every round, (rounds,) each; no time of work is 0 or less."""
    arms = list(rounds[0][0])
    times = np.array(
        [[[rank.get(arm, 0.0) for arm in arms] for rank in seen] for seen in rounds], dtype=np.float64
    )
    there = (times.min(axis=1) > 0).min(axis=0)
    slowest = times.max(axis=1)
    return {arm: slowest[:, at].copy() for at, arm in enumerate(arms) if there[at]}


def _model(case: CaseResult, launches: list[dict[str, Array]], bootstrap: Bootstrap) -> dict[str, Any]:
    pieces = _pieces(case)
    known = metrics_of(case.family)
    piecewise, quantile = "model_ratio" in known, known["bound_ratio"].quantile
    wanted: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Array]], Array]]] = {
        "piece_ms": (
            ("transfer", "compute"),
            lambda t: theory.piece_model(t["transfer"], t["compute"], pieces),
        )
        if not grouped(case.family)
        else (("model",), lambda t: t["model"]),
        "bound_ms": (("transfer_1", "compute_1"), lambda t: theory.bound(t["transfer_1"], t["compute_1"])),
        "realised_ratio": (("transfer_1", "compute_1"), lambda t: t["transfer_1"] / t["compute_1"]),
    }
    found = {
        name: float(np.median(bootstrap.values(of, arms, quantile)))
        for name, (arms, of) in wanted.items()
        if _covers(launches, arms) and (piecewise or name != "piece_ms")
    }
    return ({"pieces": pieces} if piecewise else {}) | found


def _launch_bound(case: CaseResult, found: Mapping[str, records.Metric]) -> bool | None:
    """Whether the device waits for the host; None where that is not the question.

    A gated sample is enqueued beforehand, and a pageable copy blocks the host by its nature.
    """
    ungated = case.params.get("memory") == "pinned" and case.params.get("gate") != "on"
    if not (ungated or case.params.get("backend") == "nccl") or "host_blocked_ms" not in found:
        return None
    return found["host_blocked_ms"].value >= LAUNCH_BOUND * found["overlapped_ms"].value


def _slow_to_start(launches: Sequence[Mapping[str, Array]]) -> bool:
    """Whether the collectives alone take as long as the host needs to start them: small buckets."""
    slow = [
        bool(np.median(launch["host.transfer"]) >= LAUNCH_BOUND * np.median(launch["transfer"]))
        for launch in launches
    ]
    return 2 * sum(slow) > len(slow)


def judge_launches(record: Record, target_of: Callable[[str], float]) -> None:
    """Make a case `unsettled`, in place, whose launches settled each by itself and yet disagree.

    target_of: by family, the largest Metric.spread of HEADLINE over all launches, as the stop rule asks of each.
    """
    for case in record.cases:
        found = case.metrics.get(HEADLINE)
        spread = None if found is None else found.spread
        target = target_of(case.family)
        if case.status == "ok" and len(case.launches) > 1 and spread is not None and spread > target:
            wide = f"{100 * spread:.{1 if spread < 0.0995 else 0}f}"
            why = (
                f"{len(case.launches)} launches differ: the interval is +-{wide} % of the value, "
                f"target {100 * target:g} %"
            )
            case.status, case.reason = "unsettled", f"{case.reason}; {why}" if case.reason else why


def derive_curves(record: Record) -> None:
    """Fill the curve model of every measured case in a chunk curve, in place (measurement.md h2d (b)).

    A curve: measured cases alike but for `chunks`, with every n of theory.FIT_CHUNKS and two or more others
    to test the fit on. `n_star` is None where the fit sees no cost per chunk: more chunks then never lose.
    """
    curves: dict[tuple[Any, ...], dict[int, CaseResult]] = {}
    for case in record.cases:
        for key in _CURVE_KEYS:
            case.model.pop(key, None)
        if case.measured and "chunks" in case.params and case.metrics.keys() >= _CURVE_NEEDS:
            alike = (case.family, *sorted((k, v) for k, v in case.params.items() if k != "chunks"))
            curves.setdefault(alike, {})[_chunks(case)] = case
    for curve in curves.values():
        tested = len(curve) - len(theory.FIT_CHUNKS)
        if all(n in curve for n in theory.FIT_CHUNKS) and tested >= 2:
            _fill_curve(curve)


def _fill_curve(curve: Mapping[int, CaseResult]) -> None:
    points = {n: case.metrics["overlapped_ms"].value for n, case in sorted(curve.items())}
    whole = curve[1].metrics
    fit = theory.fit_curve(points, whole["transfer_ms"].value, whole["compute_ms"].value, _repeats(curve[1]))
    for n, case in curve.items():
        case.model |= {
            "curve_ms": fit.predict(n),
            "curve_ratio": points[n] / fit.predict(n),
            "curve_overhead_ms": fit.o,
            "curve_transfer_ms": fit.c,
            "curve_compute_ms": fit.k,
            "curve_fitted": n in theory.FIT_CHUNKS,
            "n_star": fit.n_star if math.isfinite(fit.n_star) else None,
            "recommended_chunks": min(points, key=lambda chunks: points[chunks]),
        }
