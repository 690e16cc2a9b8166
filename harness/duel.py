"""Base and head measured in turns on one machine: base, head, head, base, ... one launch at a time.

Only so are launches alike but for the code: what the machine does in the hour of the measurement falls on both
sides. Each launch is a whole `overlap run` of that side's own tree, so that a base of another revision is measured
by its own code.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import MeasurementError
from harness.source import python_path
from harness.trees import Tree, here

# From an interrupt, which reaches the run as well, until it has stopped its worker and kept its record.
END_S = 30.0

SIDES = ("base", "head")
Watch = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What both sides measure. arguments: options of `overlap run` that say which cases, device and machine.

    commit: what this program's own tree holds, where git cannot tell.
    """

    arguments: tuple[str, ...]
    results: Path
    launches: int
    commit: str | None = None


def turns(launches: int) -> Iterator[str]:
    """The sides in turn: ABBA ABBA ..., so that a drift of the machine falls on both alike."""
    for launch in range(launches):
        yield from SIDES if launch % 2 == 0 else reversed(SIDES)


def measure(
    base: Tree, head: Tree, terms: Terms, watch: Watch = lambda text: None
) -> tuple[list[Path], list[Path]]:
    """The records of base and of head, one of each a launch.

    Args:
        watch: called with one line before each launch.

    MeasurementError when a run fails or measures nothing. A record with cases that are invalid or ended in an error is
    a record like any other. KeyboardInterrupt once the run in progress has ended.
    """
    made: dict[str, list[Path]] = {side: [] for side in SIDES}
    trees = dict(zip(SIDES, (base, head), strict=True))
    order = list(turns(terms.launches))
    for turn, side in enumerate(order):
        watch(f"launch {turn + 1} of {len(order)}: {side} ({trees[side].name})")
        made[side].append(_run(trees[side], terms, side))
    return made["base"], made["head"]


def _run(tree: Tree, terms: Terms, side: str) -> Path:
    commit = tree.commit or (terms.commit if tree.root == here().root else None)
    words = ["run", "--launches", "1", "--json", "--results", str(terms.results.resolve()), *terms.arguments]
    if commit:
        words += ["--commit", commit]
    with _started([sys.executable, "-P", "-m", "harness", *words], tree.root) as process:
        said, _ = process.communicate()
    if process.returncode not in (0, 4):
        why = {2: "see its message above", 3: "it measured nothing", 130: "it was interrupted"}
        reason = why.get(process.returncode, f"exit code {process.returncode}")
        raise MeasurementError(f"{side} ({tree.name}) could not be measured: {reason}")
    try:
        return Path(json.loads(said)["record"])
    except (ValueError, KeyError, TypeError):
        raise MeasurementError(f"{side} ({tree.name}) did not say where its record is") from None


@contextlib.contextmanager
def _started(command: Sequence[str], root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The run of a tree; an interrupt is awaited, so that its record is whole and no worker outlives it."""
    environment = {**os.environ, "PYTHONPATH": python_path(root)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    except BaseException:
        process.terminate()  # as Ctrl-C, for one that reached only this process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        raise
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
