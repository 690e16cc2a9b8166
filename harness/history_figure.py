"""A history as a figure, in a file: series with their levels and steps, gaps and breaks drawn as such."""

import base64
import html
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness import figures
from harness.errors import UsageError
from harness.figures import BLUE, GREY, INK, ORANGE, PURPLE, RED
from harness.files import write_whole
from harness.history import History, Series
from harness.labels import clean, with_spread
from harness.points import Point
from harness.timeline import break_words, commit_name, lines, newest_places, notes, step_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".html")
PANELS = 30
TICKS = 16
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = "body{font-family:sans-serif;margin:2em auto;max-width:70em}img{width:100%}td,th{text-align:left}"
_GAP = {"invalid": RED, "error": RED, "skipped": GREY, "missing": GREY}


def check(path: Path, history: History | None = None) -> None:
    """UsageError where `write` could not: a file of another kind, or more series than can be seen."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"output: got {path}, want a file that ends in {' or '.join(SUFFIXES)}")
    if history is not None and len(history.series) > PANELS:
        raise UsageError(f"output: {len(history.series)} series, want {PANELS} at most; name fewer cases")


def write(history: History, path: Path) -> None:
    """Draw every series, one panel each, into a PNG image or a page, in one step."""
    check(path, history)
    figure = draw(history)
    data = figures.to_png(figure) if path.suffix == ".png" else _page(history, figure)
    write_whole(path, data, field="output")


def draw(history: History) -> "Figure":
    """The figure: commits to the right, the metric upwards, a panel for each series."""
    count = max(1, len(history.series))
    with figures.sheet(1.2 + 2.7 * count) as figure:
        axes = list(figure.subplots(count, 1, squeeze=False).flat)
        for ax, series in zip(axes, history.series, strict=False):
            _panel(ax, series)
            ax.set_ylabel(f"{history.metric.label}, {history.metric.unit}")
        figure.legend(
            *figures.legend(axes, first="measured", last="break"), loc="outside lower left", ncols=4
        )
    return figure


def _panel(ax: "Axes", series: Series) -> None:
    points = series.points
    for at, point in enumerate(points):
        if point.value is not None:
            _value(ax, at, point)
        else:
            ax.plot(
                at, 0.03, "x", color=_GAP.get(point.status, GREY), transform=ax.get_xaxis_transform(), clip_on=False,
                label=f"no number: {clean(point.status)}", linestyle="none",
            )  # fmt: skip
    for level in series.levels:
        ax.plot([level.first, level.last], [level.value] * 2, color=INK, linewidth=1.6, label="level")
    for step in series.steps:
        ax.axvline(step.at - 0.5, color=ORANGE, linewidth=1, label="step")
        ax.annotate(
            f"{step_size(step)}\n{commit_name(points[step.at])}", (step.at - 0.5, 0.98), (3, 0),
            xycoords=ax.get_xaxis_transform(), textcoords="offset points", va="top", fontsize=8, color=INK,
        )  # fmt: skip
    for at in newest_places(series):
        value = points[at].value
        if value is not None:
            ax.plot(at, value.value, "o", color=RED, markersize=9, fillstyle="none", linestyle="none",
                    label="apart: perhaps a step begun")  # fmt: skip
    for each in series.breaks:
        ax.axvline(
            each.at - 0.5, color=PURPLE, linewidth=1.4, linestyle="--", label="break: not comparable across"
        )
        words = textwrap.fill(figures.drawable("; ".join(map(str, each.differences))), 34)
        ax.annotate(
            words, (each.at - 0.5, 0.06), (3, 0), xycoords=ax.get_xaxis_transform(), textcoords="offset points",
            fontsize=7, color=PURPLE, va="bottom",
        )  # fmt: skip
    ax.set_xlim(-1, len(points))
    # Room above the numbers for the names of steps, below them for gaps and breaks.
    ax.margins(y=0.35)
    chosen = _ticks(series)
    ax.set_xticks(chosen, [commit_name(points[at]) for at in chosen], rotation=45, ha="right", fontsize=7)
    title = textwrap.fill(
        f"{clean(series.case)} on {series.machine}".encode("ascii", "replace").decode(), 105
    )
    ax.set_title(title, fontsize=8)


def _value(ax: "Axes", at: int, point: Point) -> None:
    value = point.value
    assert value is not None
    if point.dirty:
        form, fill, label = "D", "white", "uncommitted changes"
    elif point.status == "ok":
        form, fill, label = "o", BLUE, "measured, 95 % interval"
    else:
        form, fill, label = "o", "white", f"measured, {clean(point.status)}"
    error = None
    if value.low is not None and value.high is not None:
        error = [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]
    colour = GREY if point.dirty else BLUE
    ax.errorbar(
        at, value.value, yerr=error, fmt=form, color=colour, markerfacecolor=fill, markersize=4, linewidth=0.8,
        label=label,
    )  # fmt: skip


def _ticks(series: Series) -> list[int]:
    """Points to name: where something happened first, and others evenly between, without crowding."""
    total = len(series.points)
    apart = max(1, total // TICKS)
    chosen: list[int] = []
    marked = [step.at for step in series.steps] + [each.at for each in series.breaks]
    for at in [*marked, total - 1, 0, *range(0, total, apart)]:
        if all(abs(at - other) >= apart for other in chosen):
            chosen.append(at)
    return sorted(chosen)


def _page(history: History, figure: "Figure") -> bytes:
    """One file that needs no other and runs nothing; what records say is escaped."""
    image = base64.b64encode(figures.to_svg(figure)).decode()
    title = html.escape(f"{history.metric.label} over commits")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>",
            f'<img alt="{title}" src="data:image/svg+xml;base64,{image}">',
            "<ul>",
            *(f"<li>{html.escape(line)}</li>" for line in lines(history)),
            "</ul>",
            *(row for series in history.series for row in _rows(series, history.metric.unit)),
            "</html>\n",
        ]
    ).encode()


def _rows(series: Series, unit: str) -> Iterator[str]:
    yield f"<h2>{html.escape(clean(series.case))} on {html.escape(series.machine)}</h2>\n<table>"
    yield f"<tr><th>commit<th>time<th>{unit}<th>status<th>note</tr>"
    said, breaks = dict(notes(series)), {each.at for each in series.breaks}
    for at, point in enumerate(series.points):
        if at in breaks:
            yield f'<tr><td colspan="5">{html.escape(break_words(series, at))}</tr>'
        cells = (commit_name(point), point.time, with_spread(point.value), point.status, said[at])
        yield f"<tr>{''.join(f'<td>{html.escape(clean(cell))}' for cell in cells)}</tr>"
    yield "</table>"
