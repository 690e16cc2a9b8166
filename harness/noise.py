"""How nights differ on a machine whose code did not change what is measured, from the records of its store."""

import math
from pathlib import Path

import numpy as np

from harness import evidence, store
from harness.comparable import comparable
from harness.evidence import History
from harness.record import Record
from harness.sides import QUANTITIES, Side, Times

# Records read back from the newest.
NIGHTS = 6
MIN_NIGHTS = 3


def histories(results: Path, base: Side, head: Side) -> dict[tuple[str, str], History]:
    """By (case, quantity), from the newest records of base's machine whose hard keys are base's.

    How launches of one night differ is told by base and head themselves. Head's commit tells nothing of unchanged
    code. Empty where fewer than three nights are left.
    """
    nights = _nights(results, base, head)
    launches = sum(made.run.launches for made in nights) / max(1, len(nights))
    found = {}
    for key in base.times:
        inside = _launch_variances(base.times[key], head.times.get(key))
        cases = [case for made in nights for case in made.cases if case.key == key and case.measured]
        for name in QUANTITIES:
            values = [case.metrics[name].value for case in cases if name in case.metrics]
            if len(values) >= MIN_NIGHTS and name in inside and min(values) > 0:
                told = evidence.history([[value] for value in values])
                night = math.sqrt(max(0.0, told.night**2 - inside[name] / launches))
                found[key, name] = History(launch=math.sqrt(inside[name]), night=night, freedom=told.freedom)
    return found


def _nights(results: Path, base: Side, head: Side) -> list[Record]:
    """In order of time, without their samples."""
    first = base.records[0]
    heads = {made.run.commit for made in head.records} - {made.run.commit for made in base.records}
    nights: list[Record] = []
    for _, made in store.newest(results, first.machine.name, base.times.__contains__):
        if made.run.finished and made.run.commit not in heads and not comparable(first, made)[0]:
            nights.append(made)
        if len(nights) == NIGHTS:
            break
    return nights[::-1]


def _launch_variances(*sides: Times | None) -> dict[str, float]:
    """By quantity, the variance of a launch within its night, relative; of those that have two launches or more."""
    found = {}
    for name in QUANTITIES:
        logs = [np.log(side.values[name]) for side in sides if side is not None and name in side.values]
        freedom = sum(len(log) - 1 for log in logs)
        if freedom > 0:
            found[name] = float(sum(((log - log.mean()) ** 2).sum() for log in logs)) / freedom
    return found
