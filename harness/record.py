"""The record as a file. Records are the source of truth.

A record is written whole and atomically after every finished case, so a killed run leaves a readable one.
Reading validates every field; nothing read from a record is ever executed.
"""

import datetime
import re
from pathlib import Path

import msgspec

from harness import sense
from harness.errors import RecordError, UsageError
from harness.files import write_whole
from harness.schema import (
    MEASURED,
    SCHEMA,
    STATUSES,
    CaseResult,
    Ceiling,
    Control,
    Discarded,
    Launch,
    Machine,
    Metric,
    Rank,
    Record,
    Round,
    Run,
)

__all__ = [
    "MEASURED", "SCHEMA", "STATUSES", "CaseResult", "Ceiling", "Control", "Discarded", "Launch", "Machine", "Metric",
    "Rank", "Record", "Round", "Run", "dumps", "loads", "read", "record_path", "safe_name", "utc_now", "write",
]  # fmt: skip

# A record of 500 cases is about 10 MB; anything far beyond is not one of ours.
MAX_BYTES = 512 << 20


def utc_now() -> str:
    """Now, as records write it: `2026-11-30T08:00:00Z`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def record_path(results: Path, record: Record) -> Path:
    """results/records/<machine>/<UTC time>-<commit8>.json"""
    stamp = re.sub(r"[-:]", "", record.run.time)
    return results / "records" / safe_name(record.machine.name) / f"{stamp}-{record.run.commit[:8]}.json"


def safe_name(name: str) -> str:
    """`name` if it is safe as a folder of the store; UsageError otherwise."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        raise UsageError(
            f"machine: got {name!r}, want up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


def dumps(record: Record) -> bytes:
    """The record as strict JSON, which `loads` reads back.

    A non-finite number becomes null. Where null is not allowed the entry is left out (a metric, the time of an
    arm), or stands at its default: readers take what is missing for unknown. So does a time or an interval that
    cannot be, which `loads` would refuse: a fault in one number must not cost the whole record.
    """
    whole = sense.writable(record)
    try:
        data = msgspec.json.encode(whole)
    except UnicodeEncodeError:
        # A word of the command line or of the environment that is not UTF-8.
        data = msgspec.json.encode(sense.printable(msgspec.to_builtins(whole)))
    return data + b"\n"


def loads(data: bytes, *, source: str = "record") -> Record:
    """The record in `data`; RecordError says what is wrong and where."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema < 1:
            raise RecordError(f"{source}: schema: got {head.schema}, want 1 to {SCHEMA}")
        if head.schema > SCHEMA:
            raise RecordError(
                f"{source}: schema {head.schema} is newer than this program reads ({SCHEMA}); update overlap"
            )
        record = msgspec.json.decode(data, type=Record)
        # Seldom true, and the search for its place is slow; a pattern would search three times as long as this.
        if b"0" * sense.MAX_DIGITS in data.translate(_DIGITS):
            for place in sense.long_numbers(record):
                raise RecordError(f"{source}: {place}: a whole number of more than {sense.MAX_DIGITS} digits")
    except msgspec.DecodeError as error:
        raise RecordError(f"{source}: not a readable record: {error}") from None
    except RecursionError:
        raise RecordError(f"{source}: not a readable record: nested too deeply") from None
    try:
        safe_name(record.machine.name)
    except UsageError as error:
        raise RecordError(f"{source}: {error}") from None
    if re.fullmatch(r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z", record.run.time) is None:
        raise RecordError(f"{source}: run.time: got {record.run.time!r}, want UTC, as 2026-11-30T08:00:00Z")
    if re.fullmatch(r"[0-9a-f]{7,40}|none", record.run.commit) is None:
        raise RecordError(f"{source}: run.commit: got {record.run.commit!r}, want 7 to 40 hex digits or none")
    try:
        datetime.datetime.fromisoformat(record.run.time)
    except ValueError:
        raise RecordError(f"{source}: run.time: got {record.run.time!r}, which is no time") from None
    for fault in sense.faults(record):
        raise RecordError(f"{source}: {fault}")
    return record


_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


class _Head(msgspec.Struct):
    schema: int


def read(path: Path) -> Record:
    """The record in `path`; RecordError if it cannot be read, is truncated, of wrong types, or newer."""
    return loads(content(path), source=str(path))


def content(path: Path) -> bytes:
    """What stands in `path`; RecordError if it cannot be read or is larger than any record."""
    try:
        too_large = path.stat().st_size > MAX_BYTES
        if not too_large:
            with path.open("rb") as file:
                # A device or a pipe may have no end, and says nothing of its size.
                data = file.read(MAX_BYTES + 1)
            too_large = len(data) > MAX_BYTES
    except OSError as error:
        raise RecordError(f"{path}: cannot read: {error.strerror}") from None
    if too_large:
        raise RecordError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which no record is")
    return data


def write(path: Path, record: Record) -> None:
    """Replace `path` by `record` in one step; a reader sees the old record or the new one, never a part.

    Raises UsageError if the folder cannot be written or the disk is full; the old file is then untouched.
    """
    write_whole(path, dumps(record), field="results")
