"""How nights differ on a machine whose code did not change what is measured, from the records of its store."""

from collections.abc import Iterable
from pathlib import Path

from harness import evidence, record, store
from harness.comparable import comparable
from harness.errors import RecordError
from harness.evidence import History
from harness.record import Record
from harness.sides import QUANTITIES, Side, times_of

# Records read back from the newest: each costs as much as one side.
NIGHTS = 10
MIN_NIGHTS = 3


def histories(results: Path, base: Side, head: Side) -> dict[tuple[str, str], History]:
    """By (case, quantity), from the newest records of base's machine whose hard keys are base's.

    Head's commit tells nothing of unchanged code. Empty where fewer than three nights are left.
    """
    first = base.records[0]
    heads = {made.run.commit for made in head.records} - {made.run.commit for made in base.records}
    nights: list[Record] = []
    for path in reversed(store.paths(results, first.machine.name)):
        try:
            made = record.read(path)
        except RecordError:
            continue
        if made.run.finished and made.run.commit not in heads and not comparable(first, made)[0]:
            nights.append(made)
        if len(nights) == NIGHTS:
            break
    nights.reverse()
    return dict(_histories(nights, [case.key for made in base.records for case in made.cases]))


def _histories(nights: list[Record], keys: Iterable[str]) -> Iterable[tuple[tuple[str, str], History]]:
    for key in dict.fromkeys(keys):
        times = [times_of(Side(made.run.time, (made,)), key) for made in nights]
        for name in QUANTITIES:
            launches = [found.values[name] for found in times if name in found.values]
            if len(launches) >= MIN_NIGHTS:
                yield (key, name), evidence.history(launches)
