"""A history in words: tables and lines for a terminal, and the same for programs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from harness.history import History, Series, Step
from harness.labels import clean, count, number, percent, with_doubt
from harness.points import MISSING, Point
from harness.steps import FIT_POINTS
from harness.tables import STYLES, bare, plain

SHORT = 8


def table(history: History) -> RenderableType:
    """Every point of a lone series; of several, a line each."""
    if len(history.series) == 1:
        return PointTable(history.series[0], history.metric.label, history.metric.unit)
    return SeriesTable(history)


@dataclass(frozen=True)
class PointTable:
    """One row for each commit, and one for each break."""

    series: Series
    label: str
    unit: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = bare(options)
        drawn.padding = (0, 2, 0, 0)
        drawn.add_column("commit", no_wrap=True)
        drawn.add_column("time", no_wrap=True)
        drawn.add_column(self.unit, no_wrap=True, justify="right")
        drawn.add_column("status", no_wrap=True)
        drawn.add_column("note", overflow="fold")
        said = dict(notes(self.series))
        breaks = {each.at: each for each in self.series.breaks}
        for at, point in enumerate(self.series.points):
            if at in breaks:
                drawn.add_row("", "", "", "", Text(break_words(self.series, at), "magenta"))
            drawn.add_row(
                commit_name(point),
                clean(point.time[:16].replace("T", " ")),
                Text(plain(with_doubt(point.value), options)),
                Text(point.status, STYLES.get(point.status, "dim")),
                Text(said.get(at, ""), "bold" if any(step.at == at for step in self.series.steps) else ""),
            )
        yield Text(f"{self.label}, {self.unit}: {self.series.case} on {self.series.machine}", "bold")
        yield drawn


@dataclass(frozen=True)
class SeriesTable:
    """One row for each series: how much there is of it, and where it changed."""

    history: History

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = bare(options)
        drawn.padding = (0, 2, 0, 0)
        drawn.add_column("case", overflow="fold")
        drawn.add_column("machine", no_wrap=True)
        drawn.add_column(f"latest {self.history.metric.unit}", no_wrap=True, justify="right")
        drawn.add_column("points", no_wrap=True, justify="right")
        drawn.add_column("gaps", no_wrap=True, justify="right")
        drawn.add_column("breaks", no_wrap=True, justify="right")
        drawn.add_column("steps")
        for series in self.history.series:
            values = [point.value for point in series.points if point.value is not None]
            drawn.add_row(
                Text(series.case),
                series.machine,
                Text(plain(with_doubt(values[-1] if values else None), options)),
                str(len(values)),
                str(len(series.points) - len(values)),
                str(len(series.breaks)),
                Text("; ".join(_step_words(series, step) for step in series.steps)),
            )
        metric = self.history.metric
        yield Text(f"{metric.label}, {metric.unit}: {len(self.history.series)} series", "bold")
        yield drawn


def lines(history: History) -> Iterator[str]:
    """What the table leaves to be said; lines about what to doubt begin with `!`."""
    several = len(history.series) > 1
    for series in history.series:
        if not several:
            yield from (_sentence(series, step) for step in series.steps)
            if series.lone:
                since = f" since {commit_name(series.points[series.breaks[-1].at])}" if series.breaks else ""
                yield f"! {count(series.lone, 'point')}{since}: below {FIT_POINTS} no step is looked for"
            elif not series.steps:
                yield f"no step in {count(sum(point.fitted for point in series.points), 'point')}"
        if series.newest is not None:
            yield _newest(series, f"{series.case} on {series.machine}: " if several else "")
    if history.by_time:
        yield f"! {history.by_time}: in the order of time, where git does not know a commit"


def _newest(series: Series, of: str) -> str:
    newest, places = series.newest, newest_places(series)
    assert newest is not None
    before = max(at for at, point in enumerate(series.points[: places[0]]) if point.fitted)
    base, head = series.points[before].commit[:SHORT], series.points[places[-1]].commit[:SHORT]
    which = "newest point lies" if newest.points == 1 else f"{newest.points} newest points lie"
    way = "above" if newest.value > newest.level else "below"
    return (
        f"! {of}the {which} {_share(newest.value, newest.level)} {way} the level before: the fit finds a step only "
        f"when there are more points of it; with three launches of each at once: overlap compare {base} {head}"
    )


def newest_places(series: Series) -> list[int]:
    """The points that lie apart at the end, by their places."""
    fitted = [at for at, point in enumerate(series.points) if point.fitted]
    return fitted[len(fitted) - series.newest.points :] if series.newest else []


def as_json(history: History) -> dict[str, Any]:
    """For `--json`: every series with its points, steps and breaks; places are of points, from 0."""
    return {
        "metric": history.metric.name,
        "unit": history.metric.unit,
        "records": history.records,
        "broken": [str(error) for error in history.broken],
        "order": history.by_time or "git",
        "series": [_series_json(series) for series in history.series],
    }


def _series_json(series: Series) -> dict[str, Any]:
    return {
        "case": series.case,
        "machine": series.machine,
        "points": [
            {
                "commit": point.commit,
                "dirty": point.dirty,
                "time": point.time,
                "status": point.status,
                "reason": point.reason,
                "value": point.value and point.value.value,
                "low": point.value and point.value.low,
                "high": point.value and point.value.high,
                "launches": point.launches,
                "records": point.records,
            }
            for point in series.points
        ],
        "steps": [
            {
                "at": step.at,
                "commit": series.points[step.at].commit,
                "since": series.points[step.since].commit,
                "commits": step.commits,
                "before": step.before,
                "after": step.after,
                "change": step.change,
            }
            for step in series.steps
        ],
        "breaks": [
            {"at": each.at, "commit": series.points[each.at].commit,
             "differences": [difference._asdict() for difference in each.differences]}
            for each in series.breaks
        ],
        "newest": series.newest and {
            "points": series.newest.points, "level": series.newest.level, "value": series.newest.value
        },
    }  # fmt: skip


def commit_name(point: Point) -> str:
    """`0123abcd`, with `+dirty` where the tree was changed."""
    return point.commit[:SHORT] + ("+dirty" if point.dirty else "")


def _share(after: float, before: float) -> str:
    return percent(abs(after / before - 1), places=1) if before else f"{number(abs(after - before))}"


def step_size(step: Step) -> str:
    """`+5.0 %`"""
    if step.change is None:
        return f"{number(step.before)} to {number(step.after)}"
    return f"{'+' if step.change >= 0 else ''}{percent(step.change, places=1)}"


def _step_words(series: Series, step: Step) -> str:
    return f"{step_size(step)} at {commit_name(series.points[step.at])}"


def _sentence(series: Series, step: Step) -> str:
    point = series.points[step.at]
    between = ""
    if step.commits == 2:
        between = ", or with the commit before it, which has no number"
    elif step.commits is not None and step.commits > 2:
        between = f", or with one of the {step.commits - 1} commits before it, which have no number"
    elif step.commits is None:
        between = f", the first one measured after {commit_name(series.points[step.since])}"
    return (
        f"{step_size(step)} from {commit_name(point)} ({point.time[:10]}) on{between}: "
        f"{number(step.before)} to {number(step.after)}"
    )


def notes(series: Series) -> Iterator[tuple[int, str]]:
    """What is to be said of each point beside its number, by its place."""
    steps = {step.at: step for step in series.steps}
    for at, point in enumerate(series.points):
        words = []
        if at in steps:
            step = steps[at]
            words.append(f"step: {step_size(step)}, {number(step.before)} to {number(step.after)}")
        if point.dirty:
            words.append("uncommitted changes: not in the fit")
        if point.reason:
            words.append(clean(point.reason))
        elif point.status not in ("ok", MISSING) and point.value is None:
            words.append("no reason given")
        yield at, "; ".join(words)


def break_words(series: Series, at: int) -> str:
    """What changed before the point `at`."""
    found = itertools.chain.from_iterable(each.differences for each in series.breaks if each.at == at)
    return f"break: {clean('; '.join(map(str, found)))}"
