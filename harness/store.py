"""The records of a store, results/records/<machine>/<time>-<commit>.json, read no further than a question needs."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from harness import record
from harness.errors import RecordError
from harness.record import Record

# What is Raw is passed by, and stands as it was.
_NOTHING = msgspec.Raw(b"[]")


class _Launch(msgspec.Struct):
    index: int
    ranks: msgspec.Raw = _NOTHING


class _Case(msgspec.Struct):
    key: str
    family: str
    params: msgspec.Raw
    status: str
    reason: str = ""
    launches: list[_Launch] = []
    metrics: msgspec.Raw = msgspec.Raw(b"{}")


class _Head(msgspec.Struct):
    schema: int
    method: int
    run: msgspec.Raw
    machine: msgspec.Raw
    software: msgspec.Raw = msgspec.Raw(b"{}")
    environment: msgspec.Raw = msgspec.Raw(b"{}")


class _Outline(_Head):
    cases: list[_Case] = []


class _Excerpt(_Head):
    cases: list[msgspec.Raw] = []


class _Named(msgspec.Struct):
    key: str


_Kind = TypeVar("_Kind", _Outline, _Excerpt)


def paths(results: Path, machine: str | None = None) -> list[Path]:
    """The files of all records, or of one machine's, by machine and then by time."""
    folder = results / "records"
    return sorted(path for path in folder.glob(f"{machine or '*'}/*.json") if path.is_file())


def outlines(
    results: Path,
    machine: str | None,
    wanted: Callable[[str], bool],
    passed_over: Callable[[RecordError], object],
) -> Iterator[tuple[Path, Record]]:
    """Every record of the store as `outline` has it; one that cannot be read is told and passed over."""
    for path in paths(results, machine):
        try:
            yield path, outline(path, wanted)
        except RecordError as error:
            passed_over(error)


def newest(results: Path, machine: str, wanted: Callable[[str], bool]) -> Iterator[tuple[Path, Record]]:
    """Every record of a machine as `outline` has it, from the newest; one that cannot be read is passed over."""
    for path in reversed(paths(results, machine)):
        with contextlib.suppress(RecordError):
            yield path, outline(path, wanted)


def outline(path: Path, wanted: Callable[[str], bool]) -> Record:
    """The record with only those cases whose key is wanted, and without samples: launches have no ranks.

    A fraction of the time that reading it takes. RecordError as of record.read, if for a fault in what is left.
    """
    whole = _decoded(path, _Outline)
    whole.cases = [case for case in whole.cases if wanted(case.key)]
    for case in whole.cases:
        for launch in case.launches:
            launch.ranks = _NOTHING
    return record.loads(msgspec.json.encode(whole), source=str(path))


def excerpt(path: Path, wanted: Callable[[str], bool]) -> Record:
    """As `outline`, with all there is to know of those cases."""
    whole = _decoded(path, _Excerpt)
    try:
        whole.cases = [case for case in whole.cases if wanted(msgspec.json.decode(case, type=_Named).key)]
    except msgspec.DecodeError as error:
        raise RecordError(f"{path}: not a readable record: cases: {error}") from None
    return record.loads(msgspec.json.encode(whole), source=str(path))


def _decoded(path: Path, kind: type[_Kind]) -> _Kind:
    data = record.content(path)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        record.loads(data, source=str(path))  # which says in its own words what is wrong
        raise RecordError(f"{path}: not a readable record: {error}") from None
