"""`overlap gate`: records that are there, or two trees measured now, in one stage or in two."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import budgets as budget_files
from harness import comparison, duel, noise, runs, sides, supervise, trees
from harness.budgets import Budgets
from harness.comparison import Comparison
from harness.differences import hard_names
from harness.duel import Watch
from harness.errors import UsageError
from harness.sides import Side
from harness.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asked for; see `overlap gate --help`."""

    base: str | None = None
    head: str | None = None
    against: str | None = None
    confirm: bool = False
    launches: int = 3
    suites: tuple[str, ...] = ()
    tier: str = "quick"
    patterns: tuple[str, ...] = ()
    device: str = "auto"
    profile: str | None = None
    machine: str | None = None
    results: Path = Path("results")
    commit: str | None = None
    across: tuple[str, ...] = ()
    budgets: Path | None = None

    def arguments(self, cases: tuple[str, ...]) -> tuple[str, ...]:
        """The options of `overlap run` for these cases (none: those of the suites and tier)."""
        words = ["--device", self.device, "--tier", self.tier]
        for name, values in (("suite", self.suites), ("case", cases or self.patterns)):
            words += [word for value in values for word in (f"--{name}", value)]
        for name, value in (("profile", self.profile), ("machine", self.machine)):
            words += [f"--{name}", value] if value is not None else []
        return tuple(words)


def run(asked: Asked, watch: Watch = lambda text: None) -> Comparison:
    """The comparison that was asked for; UsageError where it makes no sense, before anything is measured.

    MeasurementError when a side cannot be measured. The records of whatever was measured stay in the store.
    """
    known = budget_files.load(asked.budgets)
    hard_names(asked.across)
    with _trees(asked) as pair:
        if pair is not None:
            _check_cases(asked, known)
        if asked.against is None:
            assert asked.base is not None
            assert asked.head is not None
            base, head = (sides.load(name, asked.results, asked.machine) for name in (asked.base, asked.head))
        else:
            base, head = _measured(asked, pair, (), watch)
        made = judge(base, head, known, asked.results, across=asked.across, confirm=asked.confirm)
        tripped, unseen = (comparison.tripped(made), comparison.unseen(made)) if asked.confirm else ([], [])
        if tripped or unseen:
            words = [f"{len(tripped)} tripped"] * bool(tripped) + [f"{len(unseen)} not seen"] * bool(unseen)
            watch(f"of {len(made.cases)} cases {' and '.join(words)}: measured again")
            fresh = _measured(asked, pair, (*tripped, *unseen), watch)
            made = judge(
                base,
                head,
                known,
                asked.results,
                across=asked.across,
                confirm=True,
                fresh=fresh,
                pooled=unseen,
            )
    return made


def judge(
    base: Side,
    head: Side,
    known: Budgets,
    results: Path,
    *,
    across: Iterable[str] = (),
    confirm: bool = False,
    fresh: tuple[Side, Side] | None = None,
    pooled: Iterable[str] = (),
) -> Comparison:
    """As comparison.compare, with what the store under `results` knows of nights, for sides not measured in turns."""
    histories = {} if sides.interleaved(base, head) else noise.histories(results, base, head)
    return comparison.compare(
        base, head, known, across=across, histories=histories, confirm=confirm, fresh=fresh, pooled=pooled
    )


def _check_cases(asked: Asked, known: Budgets) -> None:
    """UsageError for what no run would take, and for cases none of which can fail the gate."""
    plan, _ = runs.planned(
        runs.Options(
            suites=asked.suites,
            tier=asked.tier,
            patterns=asked.patterns,
            device=asked.device,
            profile=asked.profile,
            machine=asked.machine,
            results=asked.results,
            commit=asked.commit,
        )
    )
    budgeted = [case for case in plan.cases if known.of(case.family.name).gates(case.key)]
    if plan.device.kind == "cpu":  # what has no meaning there is skipped on both sides
        budgeted = [case for case in budgeted if case.params.get("memory") != "pinned"]
    budgeted = [case for case in budgeted if supervise.no_ranks(case, plan.device) is None]
    if not budgeted:
        raise UsageError(
            f"gate: none of the {len(plan.cases)} cases has a budget and can be measured here; choose others, or give "
            "--budgets FILE with budgets for them"
        )


@contextlib.contextmanager
def _trees(asked: Asked) -> Iterator[tuple[Tree, Tree] | None]:
    """Base's and head's code, where something may have to be measured."""
    given = [name for name in (asked.base, asked.head) if name is not None]
    if asked.against is not None:
        if given:
            raise UsageError(f"gate: got {given[0]} and --against; give BASE and HEAD, or --against alone")
        with trees.tree(asked.against) as base:
            yield base, trees.here()
        return
    if len(given) < 2:
        raise UsageError("gate: want BASE and HEAD, or --against REV to measure both now")
    if asked.confirm:
        raise UsageError("gate: --confirm measures both sides again; it goes with --against")
    yield None


def _measured(
    asked: Asked, pair: tuple[Tree, Tree] | None, cases: tuple[str, ...], watch: Watch
) -> tuple[Side, Side]:
    assert pair is not None
    terms = duel.Terms(
        arguments=asked.arguments(cases), results=asked.results, launches=asked.launches, commit=asked.commit
    )
    made = duel.measure(*pair, terms, watch)
    base, head = (sides.of_files(tree.name, files) for tree, files in zip(pair, made, strict=True))
    return base, head
