"""What people look at in a record: the 2x2 table and the chunk curves, picked from its cases."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.case import Value
from harness.labels import (
    USUAL,
    axis_text,
    axis_words,
    clean,
    number,
    percent,
    ratio,
    reason,
    with_interval,
    with_spread,
)
from harness.record import CaseResult, Metric, Record

MEMORIES = ("pinned", "pageable")
STREAMS = ("side", "default")

# With fewer chunks too much of the shorter leg lies bare at both ends, whatever the machine does.
TABLE_CHUNKS = 8

# Two points are no curve.
CURVE_POINTS = 3


def metric(case: CaseResult, name: str) -> Metric | None:
    """The metric of a measured case; None otherwise: a bad case is a gap, never a number."""
    return case.metrics.get(name) if case.measured else None


def value(case: CaseResult, name: str) -> float | None:
    found = metric(case, name)
    return None if found is None else found.value


def model(case: CaseResult, name: str) -> float | None:
    """The number `name` of a measured case's model; None where there is none."""
    return _number(case.model.get(name)) if case.measured else None


# How the table of a loader calls its arms.
_LOADER_ARMS = {"transfer": "loader", "compute": "cached step", "overlapped": "real step"}


@dataclass(frozen=True)
class Remark:
    """What a reader should know of a case beside its numbers: the same `text` for every case like it."""

    text: str
    detail: str = ""


def _arm(case: CaseResult, arm: object) -> str:
    """An arm as the table of its family calls it."""
    name = clean(arm)
    return _LOADER_ARMS.get(name, name) if case.family == "feed" else name


def remarks(case: CaseResult) -> list[Remark]:
    """The reason of a case's status, then what its checks found (metrics.derive says how)."""
    found = [Remark(text)] if (text := reason(case)) else []
    checks = case.checks if case.measured else {}
    if checks.get("launch_bound") is True:
        found.append(
            Remark("launch-bound: the host is as slow to enqueue the work as the device is to do it")
        )
    if checks.get("transfer_launch_bound") is True:
        found.append(
            Remark("its collectives alone are launch-bound: the host is as slow to start them as they are")
        )
    modes = checks.get("bimodal")
    for arm, seen in modes.items() if isinstance(modes, dict) else ():
        if isinstance(seen, list) and len(seen) == 3:
            low, high, share = map(_number, seen)
            times = (
                f"{number(low)} and {number(high)} ms, {percent(share or 0.0)} of the samples at the slower"
            )
            found.append(Remark(f"{_arm(case, arm)} alternates between two times", times))
    carried = checks.get("carry_over")
    if isinstance(carried, dict) and carried.get("found") is True:
        after, shift = _arm(case, carried.get("after")), _number(carried.get("shift")) or 0.0
        found.append(
            Remark(
                f"{_arm(case, carried.get('arm'))} depends on the arm before it",
                f"{percent(shift, places=1)} after {after}",
            )
        )
    warned = {
        clean(text)
        for launch in case.launches
        for text in launch.checks.get("warnings") or ()
        if isinstance(text, str)
    }
    found += [Remark(f"warned: {text}") for text in sorted(warned)] if case.measured else []
    tried = (
        {clean(tried.reason) for launch in case.launches for tried in launch.discarded}
        if case.measured
        else ()
    )
    found += [Remark(f"measured again after: {why}") for why in sorted(tried)]
    return found


def _number(given: object) -> float | None:
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None


@dataclass(frozen=True)
class Grid:
    """The 2x2 table: cells by (memory, stream); one that the record has no case for is absent."""

    chunks: int
    size: str
    cells: Mapping[tuple[str, str], CaseResult]

    @property
    def where(self) -> str:
        return f"{self.size} in {self.chunks} chunks, ungated"

    def cell(self, memory: str, stream: str) -> CaseResult | None:
        return self.cells.get((memory, stream))

    def measured(self, memory: str, stream: str) -> CaseResult | None:
        """The cell's case if it has numbers."""
        case = self.cell(memory, stream)
        return case if case is not None and value(case, "overlapped_ms") is not None else None

    def price(self, memory: str, stream: str) -> float | None:
        """Total time of the cell over that of pinned + side; None unless both were measured."""
        best, case = self.measured("pinned", "side"), self.measured(memory, stream)
        least = None if best is None else value(best, "overlapped_ms")
        total = None if case is None else value(case, "overlapped_ms")
        return total / least if total and least else None

    def facts(self, memory: str, stream: str) -> list[tuple[str, str]]:
        """What the cell shows, as (name, text); without numbers, its reason alone, named by its status."""
        case = self.cell(memory, stream)
        if case is None:
            return [("", "not in this run")]
        if self.measured(memory, stream) is None:
            return [(case.status, reason(case))]
        facts = [
            ("hidden fraction", with_interval(metric(case, "hidden_fraction"))),
            ("total ms", with_spread(metric(case, "overlapped_ms"))),
            ("host blocked ms", number(value(case, "host_blocked_ms"))),
            ("over pinned + side", ratio(self.price(memory, stream))),
        ]
        return facts if case.status == "ok" else [*facts, (case.status, reason(case))]


def overlap_grid(record: Record) -> Grid | None:
    """The fullest set of ungated h2d cases of 8 or more chunks that differ in memory and stream alone.

    Of equally full sets: the one with more measured cells, a ratio nearer 1, a larger size, fewer chunks.
    """
    sets: dict[tuple[Value, ...], dict[tuple[str, str], CaseResult]] = {}
    for case in record.cases:
        chunks, place = case.params.get("chunks"), (case.params.get("memory"), case.params.get("stream"))
        if case.family != "h2d" or case.params.get("gate") != "off" or not isinstance(chunks, int):
            continue
        if chunks >= TABLE_CHUNKS and place[0] in MEMORIES and place[1] in STREAMS:
            alike = (given for axis, given in case.params.items() if axis not in ("memory", "stream"))
            sets.setdefault(tuple(alike), {})[str(place[0]), str(place[1])] = case
    if not sets:
        return None

    def fullness(cells: Mapping[tuple[str, str], CaseResult]) -> tuple[float, ...]:
        params = next(iter(cells.values())).params
        ratio, size, chunks = (_positive(params.get(axis)) for axis in ("ratio", "size", "chunks"))
        measured = sum(case.measured for case in cells.values())
        return len(cells), measured, -abs(math.log(ratio)), size, -chunks

    cells = max(sets.values(), key=fullness)
    params = next(iter(cells.values())).params
    return Grid(int(params["chunks"]), axis_text("h2d", "size", params.get("size", "")), cells)


def _positive(given: Value | None) -> float:
    return float(given) if isinstance(given, int | float) and given > 0 else 1.0


@dataclass(frozen=True)
class Curve:
    """Measured cases that differ in their chunks alone, fewest chunks first."""

    name: str
    cases: tuple[CaseResult, ...]

    @property
    def chunks(self) -> list[int]:
        return [int(case.params["chunks"]) for case in self.cases]

    @property
    def recommended(self) -> int | None:
        """The chunk count of the least overlapped_ms."""
        times = self.values("overlapped_ms")
        return min(times, key=lambda n: times[n]) if times else None

    @property
    def n_star(self) -> float | None:
        """The theory's best chunk count, sqrt(m/o); infinite where a chunk was fitted to cost nothing.

        None where the curve has no fit.
        """
        if not self.values("curve_ms"):
            return None
        return next(iter(self.values("n_star").values()), math.inf)

    def case(self, chunks: int | None) -> CaseResult | None:
        return next((case for case in self.cases if case.params["chunks"] == chunks), None)

    def values(self, name: str) -> dict[int, float]:
        """The metric or model number `name` by chunk count, where there is one."""
        pairs = ((int(case.params["chunks"]), _either(case, name)) for case in self.cases)
        return {n: found for n, found in pairs if found is not None}


def _either(case: CaseResult, name: str) -> float | None:
    found = value(case, name)
    return model(case, name) if found is None else found


def chunk_curves(record: Record) -> list[Curve]:
    """Every set of three or more measured chunk counts, in the record's order."""
    sets: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in record.cases:
        if isinstance(case.params.get("chunks"), int) and value(case, "overlapped_ms") is not None:
            alike = (case.family, *((axis, given) for axis, given in case.params.items() if axis != "chunks"))
            sets.setdefault(alike, []).append(case)
    return [
        Curve(_curve_name(cases[0]), tuple(sorted(cases, key=lambda case: int(case.params["chunks"]))))
        for cases in sets.values()
        if len(cases) >= CURVE_POINTS
    ]


def _curve_name(case: CaseResult) -> str:
    words = {axis: axis_words(case.family, axis, given) for axis, given in case.params.items()}
    return " ".join(
        text for axis, text in words.items() if axis not in ("chunks", "profile") and text != USUAL.get(axis)
    )


def overlapped_series(case: CaseResult) -> list[list[float]]:
    """Overlapped ms of one batch, by launch and round in order; the slowest rank: a step waits for it."""
    found = []
    for launch in case.launches:
        ranks = [
            [r.arms["overlapped"] for r in rank.rounds if "overlapped" in r.arms] for rank in launch.ranks
        ]
        slowest = [max(seen) / launch.repeats for seen in zip(*ranks, strict=False)]
        found += [slowest] if slowest else []
    return found


def telemetry_series(record: Record, launch: int, name: str) -> list[tuple[float, float]]:
    """(seconds, reading) of a launch's first rank; its cases stand end to end, each as long as it took."""
    points: list[tuple[float, float]] = []
    start = 0.0
    for taken in (found for case in record.cases for found in case.launches if found.index == launch):
        series = taken.ranks[0].telemetry.get("series") if taken.ranks else None
        if isinstance(series, dict):
            times, readings = (map(_number, series.get(key) or ()) for key in ("t", name))
            pairs = zip(times, readings, strict=False)
            points += [(start + at, seen) for at, seen in pairs if at is not None and seen is not None]
        start += taken.wall_s
    return points
