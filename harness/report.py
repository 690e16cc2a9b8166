"""One self-contained page about one record: tables, figures and what to doubt, to read, print or mail.

Everything a record says is data: it is escaped, and the page forbids every script and every other host.
"""

import base64
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from harness import (
    __version__,
    best_bucket,
    exposure,
    exposure_figure,
    feeding,
    feeding_words,
    figures,
    findings,
    loader_figure,
    threshold,
    threshold_words,
)
from harness.files import write_whole
from harness.labels import clean, number, ratio, short_names, with_interval, with_spread
from harness.record import CaseResult, Record
from harness.registry import METRICS
from harness.views import MEMORIES, STREAMS, Curve, chunk_curves, metric, model, overlap_grid, remarks, value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns of what a terminal would be shown.
TEXT_WIDTH = 100


def write_report(record: Record, path: Path) -> None:
    """Write the page to `path` in one step; UsageError if it cannot be, and an old page stays as it was."""
    write_whole(path, render(record).encode(), field="report")


def render(record: Record) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "ratio": ratio, "clean": clean}
    return environment.get_template("report.html.j2").render(
        record=record,
        version=__version__,
        identity=findings.identity(record),
        summary=findings.summary(record)[1:],
        grid=_grid(record),
        bars=_image(figures.overlap_bars(record)),
        curves=[_curve(curve) for curve in chunk_curves(record)],
        collectives=_collectives(record),
        loaders=_loaders(record),
        controls=findings.controls(record),
        split=_image(figures.time_split(record)),
        common=short_names(record.cases).common,
        cases=_cases(record),
        doubts=findings.doubts(record),
        samples=_image(figures.overlapped_samples(record)),
        clocks=_image(figures.telemetry_strip(record)),
        facts=_facts(record),
        metrics=list(METRICS.values()),
        command=_command(record),
    )


def _image(figure: "Figure | None") -> str | None:
    """The figure as a data URI: an image can neither run anything nor clash with the page's own ids."""
    if figure is None:
        return None
    return "data:image/svg+xml;base64," + base64.b64encode(figures.to_svg(figure)).decode()


def _collectives(record: Record) -> dict[str, Any] | None:
    """What `overlap threshold` prints, and the figure of it; None where there is nothing of the kind."""
    found, best = threshold.find(record), best_bucket.find(record)
    if not found.sets and not best:
        return None
    blocks = ["\n".join(lines) for lines in threshold_words.blocks(found, best, TEXT_WIDTH)]
    return {"figure": _image(exposure_figure.draw(record)), "text": "\n\n".join(blocks)}


def _loaders(record: Record) -> dict[str, Any] | None:
    """What the table and its notes say in a terminal; None where no loader was measured."""
    found = feeding.feeds(record)
    if not found:
        return None
    names = short_names([feed.case for feed in found])
    rows = [
        {
            "name": names[feed.case.key],
            "verdict": feed.verdict,
            "loader": number(feed.loader_ms),
            "cached": number(feed.cached_ms),
            "real": with_spread(metric(feed.case, "overlapped_ms")),
            "over": with_interval(feed.over),
            "idle": number(feed.gap_ms),
            "next": number(feed.next_ms),
            "longest": number(feed.next_max_ms),
            "headroom": ratio(feed.headroom),
        }
        for feed in found
    ]
    verdicts = [text for text, _ in feeding_words.verdicts(record)]
    return {
        "figure": _image(loader_figure.draw(record)),
        "rows": rows,
        "notes": [*verdicts, *feeding_words.notes(record), *exposure.options(record, "feed")],
        "common": names.common,
        "alone": len(found) == sum(case.measured for case in record.cases),
    }


def _command(record: Record) -> str:
    words = record.run.command
    return clean(shlex.join(words if words[:1] == ["overlap"] else ["overlap", *words]))


def _grid(record: Record) -> dict[str, Any] | None:
    grid = overlap_grid(record)
    if grid is None:
        return None
    rows = [(memory, [grid.facts(memory, stream) for stream in STREAMS]) for memory in MEMORIES]
    return {"where": grid.where, "streams": STREAMS, "rows": rows}


def _curve(curve: Curve) -> dict[str, Any]:
    rows = [
        {
            "chunks": case.params["chunks"],
            "best": case.params["chunks"] == curve.recommended,
            "status": case.status,
            "overlapped": with_spread(metric(case, "overlapped_ms")),
            "bound": number(model(case, "bound_ms")),
            "over_bound": ratio(value(case, "bound_ratio")),
            "piece": number(model(case, "piece_ms")),
            "over_piece": ratio(value(case, "model_ratio")),
            "fit": number(model(case, "curve_ms")),
            "over_fit": ratio(model(case, "curve_ratio")),
            "fitted": case.model.get("curve_fitted") is True,
            "dropped": _dropped(case),
        }
        for case in curve.cases
    ]
    notes = [found for found in (findings.chunk_advice(curve), findings.model_check(curve)) if found]
    return {"name": curve.name, "figure": _image(figures.chunk_curve(curve)), "rows": rows, "notes": notes}


def _cases(record: Record) -> list[dict[str, Any]]:
    names = short_names(record.cases)
    return [
        {
            "name": names[case.key],
            "key": clean(case.key),
            "status": case.status,
            "transfer": number(value(case, "transfer_ms")),
            "compute": number(value(case, "compute_ms")),
            "serial": number(value(case, "serial_ms")),
            "overlapped": with_spread(metric(case, "overlapped_ms")),
            "hidden": with_interval(metric(case, "hidden_fraction")),
            "over_bound": ratio(value(case, "bound_ratio")),
            "over_model": ratio(value(case, "model_ratio")),
            "exposed": with_interval(metric(case, "exposed_fraction")),
            "tail": number(value(case, "tail_ms")),
            "dilation": number(value(case, "dilation_ms")),
            "host": number(value(case, "host_blocked_ms")),
            "rounds": sum(len(rank.rounds) for launch in case.launches for rank in launch.ranks[:1]),
            "dropped": _dropped(case),
            "remarks": remarks(case),
        }
        for case in record.cases
    ]


def _dropped(case: CaseResult) -> int:
    return sum(count for launch in case.launches for count in launch.dropped.values())


def _facts(record: Record) -> dict[str, list[tuple[str, str]]]:
    """Machine, software, environment and run as (name, text), nested names joined by a dot."""
    run = record.run
    described: dict[str, Mapping[str, Any]] = {
        "Run": {
            "time": run.time,
            "commit": run.commit,
            "uncommitted changes": {True: "yes", False: "no", None: "not known"}[run.dirty],
            "tier": run.tier,
            "suites": run.suites,
            "launches": run.launches,
            "seconds": number(run.seconds),
            "finished": "yes" if run.finished else "no",
            "method version": record.method,
            "record schema": record.schema,
            "report made by": f"overlap {__version__}",
        },
        "Machine": {
            "name": record.machine.name,
            "device": record.machine.device,
            "gpu": record.machine.gpu,
            "cpu": record.machine.cpu,
        },
        "Software": record.software,
        "Environment": record.environment,
    }
    return {title: list(_flat(facts)) for title, facts in described.items()}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, given in facts.items():
        if isinstance(given, Mapping):
            yield from _flat(given, f"{prefix}{clean(name)}.")
        elif isinstance(given, list | tuple):
            yield prefix + clean(name), ", ".join(map(clean, given)) or "-"
        else:
            yield prefix + clean(name), "-" if given in (None, "") else clean(given)
