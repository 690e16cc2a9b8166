"""A record's loaders as a figure: a batch, a step and both together by the number of workers, beside theory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness import feeding, feeding_words, figures
from harness.feeding import Scale
from harness.figures import ARMS, GREY, INK, SKY
from harness.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS, COLUMNS = 6, 2
# A curve by workers has so many points or more.
LEAST = 3

# Theory is drawn at every number of workers up to this one, beyond at those that were measured.
SMOOTH = 64

LABELS = {"transfer": "loader alone", "compute": "cached step", "overlapped": "real step"}


def draw(record: Record) -> Figure | None:
    """A panel for each set of cases alike but for their workers; None where the record has none of LEAST or more."""
    scales = [scale for scale in feeding.scales(feeding.feeds(record)) if len(scale.feeds) >= LEAST][:PANELS]
    if not scales:
        return None
    rows = math.ceil(len(scales) / COLUMNS)
    with figures.sheet(0.6 + 2.7 * rows) as figure:
        axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        for ax, scale in zip(axes, scales, strict=False):
            _panel(ax, scale)
        for ax in axes[len(scales) :]:
            ax.remove()
        figure.legend(
            *figures.legend(axes[: len(scales)], last="theory"), loc="outside lower center", ncols=3
        )
    return figure


def _panel(ax: Axes, scale: Scale) -> None:
    ax.set_title(figures.drawable(feeding_words.case_name(scale.best, "workers")), fontsize=8)
    for arm, label in LABELS.items():
        figures.points(ax, [(feed.workers, feed.case) for feed in scale.feeds], f"{arm}_ms", ARMS[arm], label)
    cost, cached = scale.worker_ms, scale.cached_ms
    if cost is not None:
        few = range(1, min(scale.workers[-1], SMOOTH) + 1)
        shared = sorted({*few, *(workers for workers in scale.workers if workers)})
        ax.plot(shared, [max(cost / workers, cached) for workers in shared], "--", color=INK, linewidth=1,
                label="theory: the longer of t_batch / W and the cached step")  # fmt: skip
        least, most = scale.needed_between or (0, 0)
        ax.axvspan(
            least, most, color=SKY, alpha=0.2, linewidth=0, label="theory: workers needed, case to case"
        )
        ax.axvline(scale.needed or 0, color=GREY, linewidth=1, linestyle=":", label="theory: workers needed")
    ax.set_yscale("log")
    ax.autoscale_view()
    figures.plain_log(ax.yaxis)
    figures.whole_ticks(ax, scale.workers)
    ax.set_xlabel("workers W")
    ax.set_ylabel("ms a batch (log scale)")
