"""A case over the commits of a store: its numbers, where they changed level, and what cannot be compared with what.

Levels are fitted stretch by stretch: none reaches across a break.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from harness import record, registry, source, steps, store, suites
from harness.errors import RecordError, UsageError
from harness.points import AXES, Break, Point, Seen, grouped, ordered, points_of, pool
from harness.source import Lineage


@dataclass(frozen=True)
class Level:
    """Points `first` to `last` lie about `value`, those apart that take part in no fit."""

    first: int
    last: int
    value: float


@dataclass(frozen=True)
class Step:
    """The level changed from `before` to `after` at point `at`, or at a commit after point `since` not measured.

    commits: how many lead from `since` to `at`; None where git does not know.
    """

    at: int
    since: int
    before: float
    after: float
    commits: int | None

    @property
    def change(self) -> float | None:
        """As a share of the level before; None where that is 0."""
        return self.after / self.before - 1 if self.before else None


@dataclass(frozen=True)
class Newest:
    """The last `points` of the fit lie apart from the `level` before them, about `value`: perhaps a step begun."""

    points: int
    level: float
    value: float


@dataclass
class Series:
    """One case on one machine. lone: points of the last stretch between breaks, if too few for a fit."""

    case: str
    machine: str
    points: list[Point]
    breaks: list[Break]
    levels: list[Level] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    newest: Newest | None = None
    lone: int = 0


@dataclass(kw_only=True)
class History:
    """records: how many were read. broken: those that could not be. by_time: why git's order was not to be had."""

    metric: registry.Metric
    series: list[Series] = field(default_factory=list)
    records: int = 0
    broken: list[RecordError] = field(default_factory=list)
    by_time: str = ""


def read(
    results: Path, pattern: str, *, metric: str, machine: str | None = None, repo: Path, by: str = "commit"
) -> History:
    """The series of every case of the store that `pattern` matches (suites.matches), by machine.

    A pattern that names no profile follows its cases from one profile to the next, with a break in between.

    Args:
        metric: a name of registry.METRICS.
        machine: only the records of this one.
        repo: a folder of the repository that the commits are of.
        by: a name of points.AXES; `torch` for the commits of PyTorch.

    Raises UsageError for a metric that there is not, and for a case that no record has.
    """
    if metric not in registry.METRICS:
        raise UsageError(f"metric: got {metric!r}, want one of {', '.join(registry.METRICS)}")
    if machine is not None:
        record.safe_name(machine)
    found = History(metric=registry.METRICS[metric])
    known: set[str] = set()

    def wanted(key: str) -> bool:
        known.add(key)
        return suites.matches(pattern, key)

    named: Callable[[str], str] = str if "profile=" in pattern else suites.without_profile
    axis = AXES[by]
    machines: dict[str, list[Seen]] = {}
    for path, outline in store.outlines(results, machine, wanted, found.broken.append):
        outline.run.planned = [named(key) for key in outline.run.planned if wanted(key)]
        machines.setdefault(outline.machine.name, []).append(Seen(path, outline, axis.commit(outline)))
        found.records += 1
    commits = {seen.commit for ours in machines.values() for seen in ours} - {"none"}
    lineage = source.lineage(commits, repo)
    found.by_time = lineage.reason
    for name, ours in machines.items():
        groups = grouped(ordered(ours, lineage), lineage, named, axis)
        for group in groups:
            found.broken += pool(group, metric)
        cases = dict.fromkeys(case for group in groups for case in group.held)
        planned = dict.fromkeys(case for seen in ours for case in seen.record.run.planned)
        for case in cases | planned:
            points, breaks = points_of(case, groups, metric)
            if points:
                found.series.append(_fitted(Series(case, name, points, breaks), lineage, repo))
    if found.records and not found.series:
        raise UsageError(
            f"case: got {pattern!r}, which matches none of the {len(known)} cases in {results / 'records'}"
        )
    return found


def _fitted(series: Series, lineage: Lineage, repo: Path) -> Series:
    """Fill levels, steps and what is said of the newest points, stretch by stretch between breaks."""
    ends = [*(each.at for each in series.breaks), len(series.points)]
    for first, end in zip([0, *ends], ends, strict=False):
        places = [at for at in range(first, end) if series.points[at].fitted]
        values = [each.value.value for each in (series.points[at] for at in places) if each.value is not None]
        levels = [Level(places[low], places[high], value) for low, high, value in steps.levels(values)]
        for before, after in itertools.pairwise(levels):
            series.steps.append(_step(series, before, after, lineage, repo))
        series.levels += levels
    series.lone = len(values) if len(values) < steps.FIT_POINTS else 0
    if levels and (count := steps.apart(tail := values[places.index(levels[-1].first) :])):
        series.newest = Newest(count, median(tail[:-count]), median(tail[-count:]))
    return series


def _step(series: Series, before: Level, after: Level, lineage: Lineage, repo: Path) -> Step:
    since, at = (series.points[place].commit for place in (before.last, after.first))
    known = since in lineage.places and at in lineage.places
    commits = source.distance(since, at, repo) if known else None
    return Step(after.first, before.last, before.value, after.value, commits)
