"""`overlap calibrate`: the fixed sizes of a new profile, found once on one device and then committed.

The parent asks a child process, which opens the device (`python -m harness.calibration`), for the tables of one
kind of device. Sizes come from measured times here and never again: every later run takes them from the profile.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from harness import profiles
from harness.case import Case
from harness.devices import Device
from harness.errors import MeasurementError, Skip, UsageError
from harness.families import GIB, H2D, MIB
from harness.files import write_whole
from harness.profiles import H2DSizes, Profile
from harness.record import safe_name
from harness.sizes import format_size
from harness.workloads.base import Workload

Say = Callable[[str], None]

SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
SAMPLES = 9
STEPS = 3
SECONDS = 900


def calibrate(name: str, device: Device, output: Path, *, say: Say) -> Profile:
    """Measure and write the profile `name`; UsageError for a bad name, MeasurementError if the child fails."""
    safe_name(name)
    start = profiles.profile_for(device.kind, device.name)
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    child = subprocess.Popen(
        [sys.executable, "-m", "harness.calibration", device.kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ, CUDA_MODULE_LOADING="EAGER", PYTHONPATH=path),
    )
    try:
        tables, _ = child.communicate(msgspec.json.encode(start), SECONDS)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"calibrate: not done after {SECONDS} s; ended") from None
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        raise MeasurementError(f"calibrate: the measuring process ended with exit code {child.returncode}")
    say(f"legs balanced on {device.name}")
    made = msgspec.structs.replace(
        start,
        name=name,
        summary=f"calibrated on {device.name}",
        devices=[device.name],
        h2d=msgspec.json.decode(tables, type=H2DSizes),
    )
    write_whole(output, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n", field="calibrate")
    return made


def _tables(kind: str, start: Profile, say: Say) -> H2DSizes:
    """Columns that balance copy and compute, and repeats that fill a sample, for every memory and size."""
    from harness.backends import get_backend
    from harness.workloads.h2d import H2DWorkload

    backend = get_backend(kind)
    columns: dict[str, dict[str, int]] = {}
    repeats: dict[str, dict[str, int]] = {}
    for memory in ("pinned", "pageable"):
        for size in SIZES:
            try:
                tried = {"columns": start.h2d.columns[memory]["1MiB"], "repeats": 1}
                for _ in range(STEPS):
                    trial = _with(start, memory, tried)
                    case = Case.of(
                        H2D, memory=memory, stream="side", chunks=1, size=size, ratio=1.0, gate="off",
                        profile=trial.key,
                    )  # fmt: skip
                    workload = H2DWorkload(case, trial, backend)
                    copy, compute = (
                        _median(workload, arm) / tried["repeats"] for arm in ("transfer", "compute")
                    )
                    workload.close()
                    per_sample = max(
                        1, -(-int(start.sample_ms * 1e3) // max(1, int(min(copy, compute) * 1e3)))
                    )
                    step = start.column_step
                    tried = {
                        "columns": max(step, round(tried["columns"] * copy / compute / step) * step),
                        "repeats": per_sample,
                    }
            except Skip as reason:
                say(f"{memory} {format_size(size)}: {reason}")
                continue
            say(f"{memory} {format_size(size)}: copy {copy:.3f} ms, compute {compute:.3f} ms, {tried}")
            columns.setdefault(memory, {})[format_size(size)] = tried["columns"]
            repeats.setdefault(memory, {})[format_size(size)] = tried["repeats"]
    backend.close()
    for memory in ("pinned", "pageable"):  # a memory without meaning here keeps the start's sizes
        columns.setdefault(memory, start.h2d.columns[memory])
        repeats.setdefault(memory, start.h2d.repeats[memory])
    return H2DSizes(columns=columns, repeats=repeats)


def _with(start: Profile, memory: str, tried: dict[str, int]) -> Profile:
    """`start` with these numbers for every size of one memory."""
    return msgspec.structs.replace(
        start,
        h2d=H2DSizes(
            columns={**start.h2d.columns, memory: {"1MiB": tried["columns"]}},
            repeats={**start.h2d.repeats, memory: {"1MiB": tried["repeats"]}},
        ),
    )


def _median(workload: Workload, arm: str) -> float:
    for _ in range(2):
        workload.sample(arm)
    return statistics.median(workload.sample(arm).ms for _ in range(SAMPLES))


def main() -> int:
    """Entry of the child: the start profile on stdin, the tables as JSON on stdout, progress on stderr."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=Profile)

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")

    try:
        sys.stdout.buffer.write(msgspec.json.encode(_tables(sys.argv[1], start, say)))
    except UsageError as error:
        say(f"calibrate: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
