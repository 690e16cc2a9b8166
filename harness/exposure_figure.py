"""A record's collectives as a figure: what lies bare by tokens, and the step's time by bucket cap beside its model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness import best_bucket, exposure, figures, threshold
from harness.best_bucket import BestBucket
from harness.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY
from harness.labels import axis_text, axis_words
from harness.record import CaseResult, Record
from harness.threshold import SHARES, TokenSet
from harness.views import model, value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 6
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, INK)

# What the panels of one row differ in.
_WITHIN = ("tokens", "bucket", "profile", *exposure.OPTIONS["ddp"])


def draw(record: Record) -> Figure | None:
    """One row for each model, gradient and number of ranks; None where the record has no curve."""
    rows: dict[str, tuple[list[TokenSet], list[BestBucket]]] = {}
    for found in threshold.find(record).sets:
        rows.setdefault(_name(next(iter(found.cases.values()))), ([], []))[0].append(found)
    for best in best_bucket.find(record):
        rows.setdefault(_name(best.best.case), ([], []))[1].append(best)
    if not rows:
        return None
    shown = list(rows.items())[:ROWS]
    with figures.sheet(1.0 + 2.9 * len(shown)) as figure:
        axes = figure.subplots(len(shown), 2, squeeze=False)
        for (left, right), (name, (sets, bests)) in zip(axes, shown, strict=True):
            _by_tokens(left, sets, name)
            _by_cap(right, bests)
    return figure


def _name(case: CaseResult) -> str:
    return " ".join(
        axis_words(case.family, axis, given) for axis, given in case.params.items() if axis not in _WITHIN
    )


def _by_tokens(ax: Axes, sets: Sequence[TokenSet], name: str) -> None:
    ax.set_title(figures.drawable(name), fontsize=8)
    ax.set_xlabel("tokens per GPU (log scale)")
    ax.set_ylabel("exposed / transfer")
    if not sets:
        _empty(ax, "fewer than three token counts")
        return
    for at, found in enumerate(sets):
        label = _varying(found, sets)
        figures.points(ax, found.cases.items(), "exposed_fraction", COLOURS[at % len(COLOURS)], label)
    ax.set_xscale("log", base=2)
    figures.whole_ticks(ax, sorted({tokens for found in sets for tokens in found.cases}))
    for share in SHARES:
        ax.axhline(share, color=GREY, linewidth=1, linestyle=":")
    ax.axhline(0, color=GREEN, linewidth=1)
    _legend(ax)


def _legend(ax: Axes) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7)


def _empty(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", color=GREY)
    ax.grid(False)
    ax.set_xticks([])
    ax.set_yticks([])


def _varying(found: TokenSet, sets: Sequence[TokenSet]) -> str:
    """The words in which this set differs from the others."""
    params = [next(iter(each.cases.values())) for each in sets]
    case = next(iter(found.cases.values()))
    return " ".join(
        axis_words(case.family, axis, given)
        for axis, given in case.params.items()
        if axis != "tokens" and (axis == "bucket" or len({each.params.get(axis) for each in params}) > 1)
    )


def _by_cap(ax: Axes, bests: Sequence[BestBucket]) -> None:
    ax.set_title("Overlapped time over the compute alone", fontsize=8)
    ax.set_xlabel("bucket cap (log scale); dashed: their schedule")
    ax.set_ylabel("overlapped / compute")
    if not bests:
        _empty(ax, "fewer than two lists of buckets")
        return
    for at, best in enumerate(bests):
        colour = COLOURS[at % len(COLOURS)]
        cases = [(cap.cap, cap.case) for cap in best.caps]
        tokens = axis_words(best.best.case.family, "tokens", best.best.case.params["tokens"])
        figures.points(ax, cases, "overlapped_over_compute", colour, tokens)
        modelled = [(cap, _modelled(case)) for cap, case in cases]
        ax.plot(*zip(*modelled, strict=True), color=colour, linewidth=1, linestyle="--")
    ax.set_xscale("log", base=2)
    caps = sorted({cap.cap for best in bests for cap in best.caps})
    figures.whole_ticks(ax, caps, [axis_text("ddp", "bucket", cap) for cap in caps])
    ax.axhline(1, color=INK, linewidth=0.8)
    _legend(ax)


def _modelled(case: CaseResult) -> float:
    schedule, compute = model(case, "piece_ms"), value(case, "compute_ms")
    return schedule / compute if schedule and compute else math.nan
