"""Figures of a record. Each function returns a Figure, or None where the record has nothing for it.

Drawn without pyplot, so no window system and no global figure list. Text of a record is never read as TeX.
"""

import atexit
import io
import math
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Where matplotlib cannot write in its own folders it complains on stderr, of what means nothing to its user.
try:
    for variable, below in (("XDG_CONFIG_HOME", "~/.config"), ("XDG_CACHE_HOME", "~/.cache")):
        place = os.path.join(os.environ.get(variable) or os.path.expanduser(below), "matplotlib")
        place = os.environ.get("MPLCONFIGDIR") or place
        if place.startswith("~"):
            raise OSError("a user without a home")
        os.makedirs(place, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
except OSError:
    os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="overlap-")
    atexit.register(shutil.rmtree, os.environ["MPLCONFIGDIR"], ignore_errors=True)

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from harness.labels import number, ratio, short_names
from harness.record import CaseResult, Metric, Record
from harness.views import (
    MEMORIES,
    STREAMS,
    Curve,
    metric,
    model,
    overlap_grid,
    overlapped_series,
    telemetry_series,
    value,
)

# Okabe and Ito's colours: apart from each other for every common kind of colour blindness.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY, INK = "#8A8A8A", "#222222"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE)
ARMS = {"transfer": BLUE, "compute": ORANGE, "serial": GREY, "overlapped": GREEN}

STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#B0B0B0",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",
    # Equal records give equal files.
    "svg.hashsalt": "overlap",
}
WIDTH = 9.0
# Longer names would leave no room for the axes.
LABEL = 60


@contextmanager
def _styled() -> Iterator[None]:
    # Numbers of a record may be of any size; numpy would complain on stderr of those that no axis can hold.
    with mpl.rc_context(STYLE), np.errstate(all="ignore"):
        yield


@contextmanager
def sheet(height: float) -> Iterator[Figure]:
    """A figure in the style of all figures, to be drawn on inside the `with` block; inches."""
    with _styled():
        yield Figure(figsize=(WIDTH, height))


def overlap_bars(record: Record) -> Figure | None:
    """The 2x2 table as bars: every arm in ms and the bound of each cell; None where no cell was measured."""
    grid = overlap_grid(record)
    memories = [m for m in MEMORIES if grid and any(grid.measured(m, stream) for stream in STREAMS)]
    if grid is None or not memories:
        return None
    with _styled():
        figure = Figure(figsize=(WIDTH, 3.8))
        axes = figure.subplots(1, len(memories), squeeze=False)[0]
        for ax, memory in zip(axes, memories, strict=True):
            ticks = []
            for at, stream in enumerate(STREAMS):
                case = grid.measured(memory, stream)
                ticks.append(f"{stream} stream")
                if case is None:
                    why = _wrapped(": ".join(filter(None, grid.facts(memory, stream)[-1])), 24)
                    ax.text(at, 0, why, ha="center", va="bottom", color=GREY)
                else:
                    _arm_bars(ax, at, case)
                    ticks[-1] += f"\nhidden fraction {ratio(value(case, 'hidden_fraction'))}{_status(case)}"
            ax.set_xticks(range(len(STREAMS)), ticks)
            ax.set_xlim(-0.55, len(STREAMS) - 0.45)
            ax.margins(y=0.12)
            ax.grid(axis="x", visible=False)
            ax.set_title(f"{memory} memory")
        axes[0].set_ylabel(f"device time, ms a batch\n({grid.where})")
        figure.legend(*legend(axes), loc="outside lower left", ncols=5)
        if len(memories) > 1:
            axes[-1].set_title("scale of its own", loc="right", fontsize=8, weight="normal", color=GREY)
    return figure


def _arm_bars(ax: Axes, at: int, case: CaseResult) -> None:
    width = 0.2
    for place, (arm, colour) in enumerate(ARMS.items()):
        found = metric(case, f"{arm}_ms")
        if found is None:
            continue
        x = at + (place - 1.5) * width
        ax.bar(
            x, found.value, width * 0.92, color=colour, label=arm, yerr=_error(found), ecolor=INK, capsize=2
        )
        top = found.value if found.high is None else found.high
        ax.annotate(
            number(found.value), (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    bound = model(case, "bound_ms")
    if bound is not None:
        ends = at - 2 * width, at + 2 * width
        ax.hlines(bound, *ends, color=RED, linestyle="--", label="bound: longer leg, unsplit")


def _error(found: Metric) -> list[list[float]] | None:
    if found.low is None or found.high is None:
        return None
    return [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]


def _status(case: CaseResult) -> str:
    return "" if case.status == "ok" else f"\n({case.status})"


def drawable(text: str) -> str:
    """Text of a record as a label: short enough to leave room, without what the font lacks."""
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= LABEL else plain[: LABEL - 3] + "..."


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(drawable(text), width)[:6])


def legend(axes: Sequence[Axes], first: str = "", last: str = "bound") -> tuple[list[Artist], list[str]]:
    """Every label once: those that begin with `first`, the rest as drawn, those that begin with `last`."""
    handles: dict[str, Artist] = {}
    for ax in axes:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    labels = sorted(handles, key=lambda label: (not label.startswith(first), label.startswith(last)))
    return [handles[label] for label in labels], labels


def points(ax: Axes, cases: Iterable[tuple[int, CaseResult]], name: str, colour: str, label: str) -> None:
    """The metric with its intervals; hollow where a case is not settled."""
    found = [(at, case, seen) for at, case in cases if (seen := metric(case, name)) is not None]
    if not found:
        return
    ax.plot([at for at, _, _ in found], [seen.value for _, _, seen in found], color=colour, label=label)
    for at, case, seen in found:
        low = seen.value if seen.low is None else seen.low
        high = seen.value if seen.high is None else seen.high
        fill = colour if case.status == "ok" else "white"
        ax.errorbar(
            at, seen.value, yerr=[[seen.value - low], [high - seen.value]], fmt="o", color=colour,
            markerfacecolor=fill, markersize=4,
        )  # fmt: skip


def whole_ticks(ax: Axes, places: Sequence[int], texts: Sequence[str] | None = None) -> None:
    """A tick at each of these places and no other."""
    ax.set_xticks(places, texts or [f"{place:,}" for place in places], fontsize=7)
    ax.minorticks_off()


def plain_log(axis: Axis) -> None:
    """Ticks of a drawn logarithmic axis at 1, 2 and 5 of every decade, and more within one, in digits: powers would
    need TeX."""
    low, high = axis.get_view_interval()
    narrow = low > 0 and high < 10 * low
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if narrow else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))


def chunk_curve(curve: Curve) -> Figure | None:
    """Measured time over the number of chunks beside both models, the bound and serial; residuals below."""
    measured = curve.values("overlapped_ms")
    if not measured:
        return None
    with _styled():
        figure = Figure(figsize=(WIDTH, 5.2))
        ax, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for name, colour, form, label in (
            ("serial_ms", GREY, "-", "serial"),
            ("bound_ms", INK, "--", "bound: longer leg, unsplit"),
            ("piece_ms", ORANGE, "-", "piece model (no fit)"),
            ("curve_ms", PURPLE, "-.", f"curve model, fitted on n = {_fitted(curve)}"),
        ):
            points = curve.values(name)
            if points:
                ax.plot(list(points), list(points.values()), form, color=colour, label=label)
        _measured_points(ax, curve)
        _mark_advice(ax, curve, measured)
        _residuals(below, curve)
        ax.set_title(f"{drawable(curve.name)}: time over the number of chunks")
        ax.set_ylabel("overlapped, ms a batch")
        below.set_xscale("log", base=2)
        below.xaxis.set_major_locator(FixedLocator(curve.chunks))
        below.xaxis.set_minor_locator(NullLocator())
        below.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
        below.set_xlabel("chunks n (log scale)")
        figure.legend(*legend([ax, below], first="measured"), loc="outside right upper")
    return figure


def _measured_points(ax: Axes, curve: Curve) -> None:
    for case in curve.cases:
        found, settled = metric(case, "overlapped_ms"), case.status == "ok"
        if found is not None:
            ax.errorbar(
                int(case.params["chunks"]), found.value, yerr=_error(found), fmt="o", color=GREEN, capsize=3,
                zorder=3, markerfacecolor=GREEN if settled else "white",
                label="measured, 95 % interval" if settled else "measured, unsettled",
            )  # fmt: skip


def _fitted(curve: Curve) -> str:
    return ", ".join(str(case.params["chunks"]) for case in curve.cases if case.model.get("curve_fitted"))


def _mark_advice(ax: Axes, curve: Curve, measured: dict[int, float]) -> None:
    best, theory = curve.recommended, curve.n_star
    if best in measured:
        label = f"recommended n = {best}"
        ax.plot(best, measured[best], "*", color=RED, markersize=15, zorder=4, label=label, linestyle="none")
    if theory is None:
        return
    inside = curve.chunks[0] <= theory <= curve.chunks[-1]
    label = f"theory n* = {number(theory)}" if math.isfinite(theory) else "theory n* without limit"
    ax.plot(*([[theory] * 2, ax.get_ylim()] if inside else [[], []]), ":", color=SKY, linewidth=2,
            label=label + ("" if inside else " (off the axis)"))  # fmt: skip


def _residuals(ax: Axes, curve: Curve) -> None:
    measured = curve.values("overlapped_ms")
    ax.axhline(0, color=GREY, linewidth=0.8)
    for name, colour, form in (("piece_ms", ORANGE, "o-"), ("curve_ms", PURPLE, "s-.")):
        off = {n: 100 * (measured[n] / by - 1) for n, by in curve.values(name).items() if by}
        ax.plot(list(off), list(off.values()), form, color=colour, markersize=4)
    ax.axhspan(-3, 3, color=SKY, alpha=0.15, linewidth=0, label="within 3 % of a model")
    ax.set_ylabel("measured\nover model, %")


def time_split(record: Record) -> Figure | None:
    """Per case: how much of the copy is exposed, and what the overlapped time holds beside its bound."""
    cases = [case for case in record.cases if value(case, "bound_ratio") is not None]
    if not cases:
        return None
    names = short_names(cases)
    with _styled():
        figure = Figure(figsize=(WIDTH, 1.5 + 0.23 * len(cases)))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
        for row, case in enumerate(cases):
            _dot(left, row, case, "exposed_fraction", BLUE)
            _split_row(right, row, case)
        left.axvline(0, color=GREEN, linewidth=1)
        left.axvline(1, color=RED, linewidth=1, linestyle="--")
        left.set_yticks(range(len(cases)), [drawable(names[case.key]) for case in cases], fontsize=8)
        left.set_ylim(len(cases) - 0.4, -0.6)
        left.set_title("Exposed fraction")
        left.set_xlabel("(overlapped - compute) / transfer\n0: hidden, 1: nothing hidden")
        right.set_title("Overlapped time over its bound")
        right.set_xlabel("overlapped / longer unsplit leg (log scale)")
        right.set_xscale("log")
        right.xaxis.set_major_locator(FixedLocator(_ticks(*right.get_xlim())))
        right.xaxis.set_minor_locator(NullLocator())
        right.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        figure.legend(*legend([right]), loc="outside lower right", ncols=4)
    return figure


def _split_row(ax: Axes, row: int, case: CaseResult) -> None:
    """From 1, the bound, to the piece model: the pipeline's ends; from there to the measurement: the rest."""
    found, bound, piece = value(case, "bound_ratio"), model(case, "bound_ms"), model(case, "piece_ms")
    if found and bound and piece:
        ends = piece / bound
        ax.plot([1, ends], [row, row], color=ORANGE, linewidth=5, solid_capstyle="butt",
                label="to the model")  # fmt: skip
        ax.plot([ends, found], [row, row], color=RED, linewidth=2.5, solid_capstyle="butt",
                label="beyond the model")  # fmt: skip
    _dot(ax, row, case, "bound_ratio", GREEN, "measured (hollow: unsettled)")
    ax.plot(1, row, "|", color=INK, markersize=9, label="bound")


def _dot(ax: Axes, row: int, case: CaseResult, name: str, colour: str, label: str = "") -> None:
    """The metric with its interval; hollow where it is not settled."""
    found = metric(case, name)
    if found is not None:
        fill = colour if case.status == "ok" else "white"
        ax.errorbar(found.value, row, xerr=_error(found), fmt="o", color=colour, markerfacecolor=fill,
                    markersize=5, label=label)  # fmt: skip


def _ticks(low: float, high: float) -> list[float]:
    steps = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
    inside = [step for step in steps if low <= step <= high]
    return inside[:: max(1, math.ceil(len(inside) / 9))]


def overlapped_samples(record: Record) -> Figure | None:
    """Every sample of the overlapped arm in the order taken, one panel a case: drift and modes show here."""
    series = {case.key: found for case in record.cases if (found := overlapped_series(case))}
    if not series:
        return None
    cases = [case for case in record.cases if case.key in series]
    names = short_names(cases)
    columns = min(4, len(cases))
    rows = math.ceil(len(cases) / columns)
    with _styled():
        figure = Figure(figsize=(WIDTH, 0.6 + 1.45 * rows))
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, case in zip(axes, cases, strict=False):
            _sample_panel(ax, series[case.key])
            title = _wrapped(names[case.key] + _status(case).replace("\n", " "), 30)
            ax.set_title(title, fontsize=7, weight="normal")
        for ax in axes[len(cases) :]:
            ax.set_axis_off()
        text = "round; launches follow each other in their own colours; the line is the median"
        figure.supxlabel(text, fontsize=8)
        figure.supylabel("overlapped, ms a batch", fontsize=8)
    return figure


def _sample_panel(ax: Axes, launches: Sequence[Sequence[float]]) -> None:
    start = 0
    for at, taken in enumerate(launches):
        rounds = range(start, start + len(taken))
        # Points by the hundred make a large drawing; their picture is small.
        ax.plot(rounds, taken, ".", color=CYCLE[at % len(CYCLE)], markersize=3, rasterized=True)
        start += len(taken)
    ax.axhline(float(np.median(np.concatenate(launches))), color=INK, linewidth=0.8)
    ax.tick_params(labelsize=7)
    ax.yaxis.set_major_locator(MaxNLocator(3))
    ax.xaxis.set_major_locator(MaxNLocator(3, integer=True))


def telemetry_strip(record: Record) -> Figure | None:
    """SM clock, power and temperature over each launch, all cases in a row; None where none was read."""
    rows = {"sm_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, °C"}
    launches = sorted({launch.index for case in record.cases for launch in case.launches})
    lines = {name: {at: telemetry_series(record, at, name) for at in launches} for name in rows}
    shown = {name: by_launch for name, by_launch in lines.items() if any(by_launch.values())}
    if not shown:
        return None
    with _styled():
        figure = Figure(figsize=(WIDTH, 0.8 + 1.3 * len(shown)))
        axes = list(figure.subplots(len(shown), 1, sharex=True, squeeze=False).flat)
        for ax, (name, by_launch) in zip(axes, shown.items(), strict=True):
            for at, points in by_launch.items():
                if points:
                    ax.plot(*zip(*points, strict=True), color=CYCLE[at % len(CYCLE)], linewidth=1,
                            label=f"launch {at}")  # fmt: skip
            ax.set_ylabel(rows[name])
            ax.yaxis.set_major_locator(MaxNLocator(4))
        axes[-1].set_xlabel("seconds of measuring, cases end to end")
        figure.legend(*legend(axes), loc="outside right upper")
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG image, without the version of what drew it."""
    buffer = io.BytesIO()
    with _styled():
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: Figure) -> bytes:
    """The figure as an SVG document without a date, so that equal figures are equal bytes."""
    buffer = io.BytesIO()
    with _styled():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
