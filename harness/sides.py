"""The two sides of a comparison: which records they are, and what each launch of a case says."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from harness import metrics, store
from harness import record as records
from harness.errors import UsageError
from harness.record import CaseResult, Record
from harness.statistics import Array

# From one launch to the next, in turns; what lies further apart may be another state of the machine.
TURN_S = 1800.0

_COMMIT = re.compile(r"[0-9a-f]{7,40}", re.IGNORECASE)

# What is compared of a case: the headline, its legs, and how far the schedule is from its model.
QUANTITIES = ("overlapped_ms", "transfer_ms", "compute_ms", "host_ms", "model_ratio")
# Beside the headline, which is a median in most families: rounds that are slower now and then move it alone.
MEAN = "overlapped_mean_ms"


@dataclass(frozen=True)
class Times:
    """What the launches of one case say, one entry a launch. values: by quantity, the value in that launch (ms of one
    batch, or a ratio). errors: its standard error from within the launch."""

    values: dict[str, Array]
    errors: dict[str, Array]

    def __len__(self) -> int:
        return max(map(len, self.values.values()), default=0)


@dataclass(frozen=True, eq=False)
class Side:
    """name: as it was asked for. records: in order of time, never none."""

    name: str
    records: tuple[Record, ...]

    @cached_property
    def results(self) -> dict[str, list[CaseResult]]:
        """What its records hold of every case, by key."""
        found: dict[str, list[CaseResult]] = {}
        for made in self.records:
            for case in made.cases:
                found.setdefault(case.key, []).append(case)
        return found

    @cached_property
    def times(self) -> dict[str, Times]:
        """What its launches say of every case that one of them measured."""
        return {key: found for key, results in self.results.items() if len(found := _times(results))}

    @property
    def commit(self) -> str:
        """The commits measured, `+dirty` where uncommitted changes were."""
        found = dict.fromkeys(f"{r.run.commit[:8]}{'+dirty' if r.run.dirty else ''}" for r in self.records)
        return ", ".join(found)

    @property
    def launches(self) -> int:
        """Launches of all its records together."""
        return sum(made.run.launches for made in self.records)

    def began(self) -> list[float]:
        """When each launch began, seconds since 1970; empty where one does not tell."""
        found = [spent.get("began") for made in self.records for spent in made.run.spent.values()]
        return sorted(at for at in found if at is not None) if None not in found else []


def load(asked: str, results: Path, machine: str | None) -> Side:
    """The side that `asked` names: a record, a folder with records, or a commit of which the store has some.

    UsageError where it names none, or those of several machines; RecordError for one that cannot be read.
    """
    path = Path(asked)
    if path.is_dir():
        inside = sorted(path.rglob("*.json"))
        if not inside:
            raise UsageError(f"side: {asked} holds no record")
        return _side(asked, [records.read(file) for file in inside], machine)
    if path.exists() or asked.endswith(".json"):
        return _side(asked, [records.read(path)], machine)
    if _COMMIT.fullmatch(asked) is None:
        raise UsageError(
            f"side: got {asked!r}, want a record, a folder of records, or a commit of 7 to 40 hex digits"
        )
    files = store.paths(results, machine)
    # A record's file is named by the beginning of its commit: no other need be read.
    named = [file for file in files if _commit_of(file).startswith(asked[:8].lower())]
    found = [made for made in map(records.read, named) if made.run.commit.startswith(asked.lower())]
    if not found:
        known = list(dict.fromkeys(map(_commit_of, files)))
        listed = f"; it has {', '.join(known[-10:])}" if known else ", which holds no record"
        raise UsageError(f"side: commit {asked} is not in the store {results}{listed}")
    return _side(asked, found, machine)


def of_files(name: str, paths: Iterable[Path]) -> Side:
    """The side of these records."""
    return _side(name, [records.read(path) for path in paths], None)


def _commit_of(file: Path) -> str:
    return file.stem.rpartition("-")[2]


def _side(asked: str, found: list[Record], machine: str | None) -> Side:
    if machine is not None:
        found = [made for made in found if made.machine.name == machine]
    names = sorted({made.machine.name for made in found})
    if not names:
        raise UsageError(f"side: {asked} has no record of machine {machine}")
    if len(names) > 1:
        raise UsageError(f"side: {asked} has records of {', '.join(names)}; choose one with --machine")
    # A run that was stopped before its first case has nothing to compare, unless it is all there is.
    begun = [made for made in found if made.cases] or found
    return Side(asked, tuple(sorted(begun, key=lambda made: made.run.time)))


def interleaved(base: Side, head: Side) -> bool:
    """Whether both sides were measured in turns on one machine, so that a launch is the unit of comparison: one after
    the other, two by two a launch of each."""
    if len({_device(made) for side in (base, head) for made in side.records}) > 1:
        return False
    times = sorted((at, side is head) for side in (base, head) for at in side.began())
    if len(base.began()) != len(head.began()) or len(base.began()) < 2:
        return False  # one launch of each stands beside the other, in whatever order
    if any(later - earlier > TURN_S for (earlier, _), (later, _) in itertools.pairwise(times)):
        return False
    return all(one[1] != other[1] for one, other in zip(times[::2], times[1::2], strict=True))


def _device(made: Record) -> str:
    return str(made.machine.gpu.get("uuid") or made.machine.name)


def _times(results: Iterable[CaseResult]) -> Times:
    found: dict[str, list[tuple[float, float]]] = {}
    for case in results:
        if case.measured:
            for name, pairs in metrics.launch_estimates(case, (*QUANTITIES, MEAN)).items():
                found.setdefault(name, []).extend(pairs)
    return Times(
        {name: np.array([value for value, _ in pairs]) for name, pairs in found.items()},
        {name: np.array([error for _, error in pairs]) for name, pairs in found.items()},
    )
