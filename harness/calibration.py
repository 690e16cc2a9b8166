"""`overlap calibrate`: the fixed sizes of a new profile, found once on one device and then committed.

The parent asks a child process, which opens the device (`python -m harness.calibration FD`), for the tables of one
kind of device. Sizes come from measured times here and never again: every later run takes them from the profile.
"""

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import profiles, protocol
from harness.backends.base import Backend
from harness.case import Case
from harness.child import Process, module
from harness.devices import Device
from harness.errors import MeasurementError, OverlapError, Skip, UsageError
from harness.families import GIB, H2D, MIB
from harness.files import check_place, write_whole
from harness.profiles import H2DSizes, Profile
from harness.protocol import Failed
from harness.record import safe_name
from harness.serving import serve
from harness.sizes import format_size
from harness.workloads.base import Workload

Say = Callable[[str], None]

SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
SAMPLES = 9
STEPS = 3
# No size takes nearly as long.
SILENCE_S = 300.0
# Compute over copy that counts as balanced.
BALANCED = (0.8, 1.25)


class _Ask(msgspec.Struct):
    """What the child is to do: find sizes for a kind of device, from those of `start`."""

    kind: str
    start: Profile


class _Said(msgspec.Struct, tag="said"):
    """A line for people."""

    text: str


class _Found(msgspec.Struct, tag="found"):
    sizes: H2DSizes


_EVENTS = msgspec.json.Decoder(_Said | _Found | Failed)
_ASKED = msgspec.json.Decoder(_Ask)


def check_name(name: str) -> None:
    """UsageError for a name that is not fit for a profile and its file."""
    try:
        safe_name(name)
    except UsageError as error:
        raise UsageError(f"name: {str(error).partition(': ')[2]}") from None


def calibrate(name: str, device: Device, output: Path, say: Say) -> Profile:
    """Measure and write the profile `name`, saying what is found as it is found.

    UsageError for a bad name or an output that cannot be written, MeasurementError if the child fails.
    """
    check_name(name)
    check_place(output, field="calibrate")  # minutes before there is something to write
    start = profiles.profile_for(device.kind, device.name)
    made = msgspec.structs.replace(
        start,
        name=name,
        summary=f"calibrated on {device.name}",
        devices=[device.name],
        h2d=_ask(_Ask(device.kind, start), say),
    )
    write_whole(output, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n", field="calibrate")
    return made


def command(events: int) -> list[str]:
    """The program that reads what to do and writes what it finds."""
    return module("calibration", events)


def _ask(ask: _Ask, say: Say) -> H2DSizes:
    """The child's sizes; MeasurementError, in its own words where it has some, if it has none."""
    found = None
    try:
        process = Process(command, msgspec.json.encode(ask), SILENCE_S)
    except OSError as error:
        raise MeasurementError(f"calibrate: no worker could be started: {error.strerror}") from None
    with process:
        for line in process.lines():
            event = process.heard(line, _EVENTS)
            if isinstance(event, _Said):
                say(protocol.reason(event.text))
            elif isinstance(event, _Found):
                found = event.sizes
            else:
                break
        trouble = process.end()
    if trouble or found is None:
        raise MeasurementError(f"calibrate: {trouble or 'the worker ended before its work was done'}")
    return found


def _tables(kind: str, start: Profile, say: Say) -> H2DSizes:
    """Columns that balance copy and compute, and repeats that fill a sample, for every memory and size.

    Says what was found for each, and in the end whether all are in balance.
    """
    from harness.backends import get_backend

    backend = get_backend(kind)
    columns: dict[str, dict[str, int]] = {}
    repeats: dict[str, dict[str, int]] = {}
    ratios: list[float] = []
    for memory in ("pinned", "pageable"):
        skipped: dict[str, list[str]] = {}
        for size in SIZES:
            name = format_size(size)
            try:
                found = _balance(start, memory, size, backend)
            except Skip as reason:
                skipped.setdefault(str(reason), []).append(name)
                continue
            say(
                f"{memory} {name}: copy {found.copy_ms:.3f} ms, compute {found.compute_ms:.3f} ms at "
                f"{found.columns} columns, {found.repeats} in a sample"
            )
            columns.setdefault(memory, {})[name] = found.columns
            repeats.setdefault(memory, {})[name] = found.repeats
            ratios.append(found.compute_ms / found.copy_ms)
        for text, names in skipped.items():
            say(f"{memory}{'' if len(names) == len(SIZES) else ' ' + ', '.join(names)}: {text}")
    backend.close()
    say(_balance_words(ratios))
    for memory in ("pinned", "pageable"):  # a memory without meaning here keeps the start's sizes
        columns.setdefault(memory, start.h2d.columns[memory])
        repeats.setdefault(memory, start.h2d.repeats[memory])
    return H2DSizes(columns=columns, repeats=repeats)


def _balance_words(ratios: Sequence[float]) -> str:
    """How far the choices kept are from compute that takes as long as the copy."""
    if not ratios:
        return "nothing was measured; all sizes are those it started from"
    low, high = BALANCED
    span = f"compute over copy is {min(ratios):.2f} to {max(ratios):.2f}"
    off = sum(not low <= ratio <= high for ratio in ratios)
    if not off:
        return f"legs balanced: {span}"
    return f"{span}: {off} of {len(ratios)} sizes lie outside {low:g} to {high:g}"


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One choice of columns: what one pass over a batch took with it, and passes that fill a sample."""

    columns: int
    repeats: int
    copy_ms: float
    compute_ms: float

    @property
    def off(self) -> float:
        """How far the legs are from balance, either way."""
        return abs(math.log(self.compute_ms / self.copy_ms))


def _balance(start: Profile, memory: str, size: int, backend: Backend) -> _Tried:
    """The best choice that was measured. A narrow GEMM can be slower than a wider one, so that the last step, let
    alone the next one, need not be the best; Skip where the memory has no meaning or the size does not fit."""
    from harness.workloads.h2d import H2DWorkload

    columns, repeats, step = start.h2d.columns[memory]["1MiB"], 1, start.column_step
    tried = []
    for attempt in range(1 + STEPS):
        trial = _with(start, memory, columns, repeats)
        case = Case.of(
            H2D, memory=memory, stream="side", chunks=1, size=size, ratio=1.0, gate="off", profile=trial.key
        )
        with contextlib.closing(H2DWorkload(case, trial, backend)) as workload:
            copy, compute = (_median(workload, arm) / repeats for arm in ("transfer", "compute"))
        repeats = max(1, math.ceil(start.sample_ms / min(copy, compute)))
        if not attempt:
            continue  # a single pass tells how many it takes; what starting it costs is still in its times
        tried.append(_Tried(columns=columns, repeats=repeats, copy_ms=copy, compute_ms=compute))
        columns = max(step, round(columns * copy / compute / step) * step)
    return min(tried, key=lambda choice: choice.off)


def _with(start: Profile, memory: str, columns: int, repeats: int) -> Profile:
    """`start` with these numbers for every size of one memory."""
    return msgspec.structs.replace(
        start,
        h2d=H2DSizes(
            columns={**start.h2d.columns, memory: {"1MiB": columns}},
            repeats={**start.h2d.repeats, memory: {"1MiB": repeats}},
        ),
    )


def _median(workload: Workload, arm: str) -> float:
    for _ in range(2):
        workload.sample(arm)
    return statistics.median(workload.sample(arm).ms for _ in range(SAMPLES))


def main() -> int:
    """Entry of the child process; 0 when the sizes were told."""

    def work(asked: bytes, say: Callable[[msgspec.Struct], None]) -> None:
        ask = _ASKED.decode(asked)
        try:
            say(_Found(_tables(ask.kind, ask.start, lambda text: say(_Said(text)))))
        except OverlapError as error:
            say(Failed(reason=str(error)))

    return serve(work)


if __name__ == "__main__":
    sys.exit(main())
