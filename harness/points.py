"""The records of a store as the points of a series: one for each commit, in the order of git's history.

Where git does not know a commit, time decides. A change of a hard key (harness/comparable.py) is a break: beyond it the
numbers are of another experiment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness import comparable, metrics, record, store
from harness.comparable import UNKNOWN, Difference
from harness.errors import RecordError
from harness.record import CaseResult, Metric, Record
from harness.source import Lineage

MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class Point:
    """All records of one commit between which no hard key changed.

    commit: in full where git knows it; `none` where the record names none. time: of the first record. status: the
    worst of those with numbers, else of all; MISSING where the run should have had the case. value: None in a gap.
    launches: those in the value. dirty: of uncommitted changes, so that it is not the commit's and takes part in no
    fit.
    """

    commit: str
    dirty: bool
    time: str
    status: str
    reason: str
    value: Metric | None = None
    launches: int = 0
    records: int = 1

    @property
    def fitted(self) -> bool:
        return self.value is not None and not self.dirty


@dataclass(frozen=True)
class Break:
    """Point `at` differs in hard keys from those before it."""

    at: int
    differences: Sequence[Difference]


class Axis(NamedTuple):
    """What the commits of a history are of."""

    name: str
    commit: Callable[[Record], str]
    # What changes from point to point and is no break, and what must stay and is one.
    moves: tuple[str, ...] = ()
    stays: Callable[[Record], dict[str, Any]] = lambda kept: {}


AXES = {
    axis.name: axis
    for axis in (
        Axis("commit", lambda kept: kept.run.commit),
        # PyTorch's own, while the code that measures stands still.
        Axis(
            "torch",
            lambda kept: str(kept.software.get("torch_git") or "none"),
            moves=("software.torch",),
            stays=lambda kept: {"commit": kept.run.commit[:8]},
        ),
    )
}


class Seen(NamedTuple):
    """A record as an outline (harness/store.py), where it lies, and the commit that it is a point of."""

    path: Path
    record: Record
    commit: str


Held = list[tuple[Seen, CaseResult]]


@dataclass
class Group:
    """Neighbouring records of one commit without contradictions in `hard` keys.

    held: by the name of a series and then by case key, the records that have the case. pooled: by case key, its metric
    over the launches of several records.
    """

    commit: str
    dirty: bool
    hard: dict[str, Any]
    seen: list[Seen] = field(default_factory=list)
    held: dict[str, dict[str, Held]] = field(default_factory=dict)
    pooled: dict[str, tuple[Metric | None, int]] = field(default_factory=dict)

    def add(self, seen: Seen, hard: Mapping[str, Any], named: Callable[[str], str]) -> None:
        self.seen.append(seen)
        self.hard.update(hard)
        for case in seen.record.cases:
            self.held.setdefault(named(case.key), {}).setdefault(case.key, []).append((seen, case))


def ordered(seen: Iterable[Seen], lineage: Lineage) -> list[Seen]:
    """Parents before children, of one commit what was measured with uncommitted changes last, then by time.

    A commit that git does not know stands before the first record of a later time.
    """
    by_time = sorted(seen, key=lambda each: (each.record.run.dirty is True, each.record.run.time))
    places = [lineage.places.get(lineage.names.get(each.commit, "")) for each in by_time]
    known = [(place, each) for place, each in zip(places, by_time, strict=True) if place is not None]
    found = [each for _, each in sorted(known, key=lambda pair: pair[0])]
    unknown = [each for place, each in zip(places, by_time, strict=True) if place is None]
    for each in sorted(unknown, key=lambda each: each.record.run.time):
        later = (at for at, other in enumerate(found) if other.record.run.time > each.record.run.time)
        found.insert(next(later, len(found)), each)
    return found


def grouped(seen: Iterable[Seen], lineage: Lineage, named: Callable[[str], str], axis: Axis) -> list[Group]:
    """The records in that order, those of one commit together. named: the series that a case key belongs to."""
    groups: list[Group] = []
    for each in seen:
        commit, dirty = lineage.names.get(each.commit, each.commit), each.record.run.dirty is True
        told = comparable.told(each.record)[0] | axis.stays(each.record)
        left_out = ("profiles", *axis.moves)  # each case has its own profile
        hard = {key: value for key, value in told.items() if value != UNKNOWN and key not in left_out}
        last = groups[-1] if groups else None
        if (
            last is None
            or commit == "none"
            or (last.commit, last.dirty) != (commit, dirty)
            or comparable.contradictions(last.hard, hard)
        ):
            last = Group(commit, dirty, {})
            groups.append(last)
        last.add(each, hard, named)
    return groups


def pool(group: Group, metric: str) -> list[RecordError]:
    """Fill `pooled`, and return what could not be read: only where several records have numbers of a case are their
    samples needed."""
    every = [(key, held) for by_key in group.held.values() for key, held in by_key.items()]
    shared = {key for key, held in every if sum(case.measured for _, case in held) > 1}
    taken: dict[str, CaseResult] = {}
    broken = []
    for seen in group.seen if shared else ():
        try:
            excerpt = store.excerpt(seen.path, shared.__contains__)
        except RecordError as error:
            broken.append(error)
            continue
        for case in excerpt.cases:
            if case.measured and case.key in taken:
                taken[case.key].launches += case.launches
            elif case.measured:
                taken[case.key] = case
    for key, case in taken.items():
        group.pooled[key] = metrics.measured(case, metric), len(case.launches)
    return broken


def points_of(name: str, groups: Iterable[Group], metric: str) -> tuple[list[Point], list[Break]]:
    """The points of one series from its first record on, and where hard keys change."""
    points: list[Point] = []
    breaks: list[Break] = []
    hard: dict[str, Any] = {}
    kinds: set[tuple[str, ...]] = set()
    for group in groups:
        found: list[tuple[Point, dict[str, Any]]] = []
        for key, held in group.held.get(name, {}).items():
            params = held[0][1].params
            profile = {"profiles": params["profile"]} if "profile" in params else {}
            found.append((_point(group, key, held, metric), group.hard | profile))
            kinds |= {_kind(seen.record) for seen, _ in held}
        if not found and (why := _missing(name, group, kinds)):
            found.append((_gap(group, MISSING, why, 0), group.hard))
        for point, told in found:
            if differences := comparable.contradictions(hard, told):
                breaks.append(Break(len(points), differences))
            hard |= told
            points.append(point)
    return points, breaks


def _kind(kept: Record) -> tuple[str, ...]:
    """Records alike in this are expected to have the same cases."""
    return (kept.machine.device, kept.run.tier, *kept.run.suites)


def _missing(name: str, group: Group, kinds: set[tuple[str, ...]]) -> str:
    """Why a commit that should have the case lacks it; empty where nobody asked for it."""
    for seen in group.seen:
        if name in seen.record.run.planned:
            return "planned, and not measured" if seen.record.run.finished else "the run did not get to it"
    if any(_kind(seen.record) in kinds for seen in group.seen):
        return "not among the cases of this run"
    return ""


def _point(group: Group, key: str, held: list[tuple[Seen, CaseResult]], metric: str) -> Point:
    good = [case for _, case in held if case.measured]
    bad = [case for _, case in held if not case.measured]
    if not good:
        worst = max(bad, key=lambda case: record.STATUSES.index(case.status))
        return _gap(group, worst.status, worst.reason, len(held))
    value, launches = group.pooled.get(key, (good[0].metrics.get(metric), len(good[0].launches)))
    if value is None:
        return _gap(group, MISSING, f"the record has no {metric}", len(held))
    reasons = [f"{case.status}: {case.reason}" for case in bad] + [
        case.reason for case in good if case.reason
    ]
    if bad:
        reasons.insert(0, f"{len(bad)} of {len(held)} records left out")
    return Point(
        commit=group.commit,
        dirty=group.dirty,
        time=held[0][0].record.run.time,
        status=max((case.status for case in good), key=record.STATUSES.index),
        reason="; ".join(dict.fromkeys(reasons)),
        value=value,
        launches=launches,
        records=len(held),
    )


def _gap(group: Group, status: str, reason: str, records: int) -> Point:
    time = group.seen[0].record.run.time
    return Point(
        commit=group.commit, dirty=group.dirty, time=time, status=status, reason=reason, records=records
    )
