"""Two sides as a whole: what forbids to compare them, what is worth a warning, and whether the machine moved."""

from collections.abc import Iterable

from harness import comparable
from harness.errors import UsageError
from harness.sides import Side

# A ceiling that moved by more than this, and beyond all its launches, is another state of the machine.
CEILING_MOVED = 0.02


def hard_names(across: Iterable[str]) -> set[str]:
    """The hard keys of these names; UsageError for one that is none."""
    known = {key.rpartition(".")[2] for key in (*comparable.HARD_KEYS, *comparable.CPU_HARD_KEYS)}
    names = set(across)
    for name in sorted(names - known):
        raise UsageError(f"across: got {name!r}, want one of {', '.join(sorted(known))}")
    return names


def differences(base: Side, head: Side, across: set[str]) -> tuple[list[str], list[str], list[str]]:
    """Hard keys that differ and forbid the comparison, those allowed by `across`, and what is worth a warning."""
    first = base.records[0]
    breaks: dict[str, None] = {}
    crossed: dict[str, None] = {}
    warnings: dict[str, None] = {}
    for made in (*base.records[1:], *head.records):
        hard, soft = comparable.comparable(first, made)
        within = made in base.records
        for difference in hard:
            # Records of one side that differ are no launches of one thing, whatever may be crossed.
            allowed = difference.key.rpartition(".")[2] in across and not within
            (crossed if allowed else breaks)[f"{'within base: ' if within else ''}{difference}"] = None
        warnings |= dict.fromkeys(f"{'within base: ' if within else ''}{difference}" for difference in soft)
    for side, words in ((base, "base"), (head, "head")):
        if any(made.run.dirty for made in side.records):
            warnings[f"{words} was measured with uncommitted changes"] = None
        if not all(made.run.finished for made in side.records):
            warnings[f"{words} holds a run that did not finish"] = None
        warnings |= dict.fromkeys(f"{words}{text}" for text in _vouching(side))
    machines = [side.records[0].machine.name for side in (base, head)]
    if machines[0] != machines[1]:
        warnings[f"base is of machine {machines[0]}, head of {machines[1]}"] = None
    uuids = {made.machine.gpu.get("uuid") for side in (base, head) for made in side.records} - {None}
    if len(uuids) > 1:
        warnings[f"{len(uuids)} GPUs of one model were used: they differ by more than launches of one"] = None
    return list(breaks), list(crossed), list(warnings)


def _vouching(side: Side) -> Iterable[str]:
    """What its controls leave open: nothing vouches for numbers beside one that is not there, or that failed."""
    if not all(made.controls for made in side.records):
        yield " was measured without controls"
    failed = {control.name for made in side.records for control in made.controls if not control.passed}
    if failed:
        yield f": controls failed: {', '.join(sorted(failed))}"


def moved_ceilings(base: Side, head: Side, *, interleaved: bool) -> list[str]:
    """What the device reaches alone, where it moved beyond what its launches differ by.

    Between nights that is the machine. In turns the machine is the same, so it is what the cases stand on: the
    backend, torch, the libraries.
    """
    rates: list[dict[str, list[float]]] = []
    for side in (base, head):
        found: dict[str, list[float]] = {}
        for made in side.records:
            for ceiling in made.ceilings:
                if ceiling.value is not None:
                    found.setdefault(ceiling.name, []).append(ceiling.value)
        rates.append(found)
    said = []
    for name in rates[0].keys() & rates[1].keys():
        old, new = sorted(rates[0][name]), sorted(rates[1][name])
        change = new[len(new) // 2] / old[len(old) // 2] - 1
        if abs(change) > CEILING_MOVED and (old[-1] < new[0] or new[-1] < old[0]):
            if interleaved:
                said.append(
                    f"{name} alone moved by {change:+.1%} with the side: below the cases, in backend or libraries"
                )
            else:
                said.append(f"machine changed: {name} alone is {change:+.1%}")
    return sorted(said)
