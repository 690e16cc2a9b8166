"""`overlap gate` from what was asked to the comparison, with measuring scripted."""

import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_comparison import CASES, one

from harness import duel, record, runs, sides, trees, trial
from harness.devices import Device
from harness.errors import UsageError
from harness.trees import Tree
from harness.trial import Asked

HERE, THERE = Tree(Path("/new"), "", "head"), Tree(Path("/old"), "c" * 40, "base")


class Machine:
    """Writes the records that measuring would; `slow` are the cases that head loses, by stage. wavering: a case whose
    launches of the first stage differ by some percent."""

    def __init__(self, folder: Path, *slow: tuple[str, ...], wavering: str = "") -> None:
        self.folder, self.slow, self.wavering = folder, slow, wavering
        self.asked: list[duel.Terms] = []

    def measure(self, base: Tree, head: Tree, terms: duel.Terms, watch) -> tuple[list[Path], list[Path]]:
        assert (base, head) == (THERE, HERE)
        self.asked.append(terms)
        slow = self.slow[len(self.asked) - 1]
        cases = [case for case in CASES if not self.wanted or case.key in self.wanted]
        made: dict[str, list[Path]] = {"base": [], "head": []}
        for turn, name in enumerate(duel.turns(terms.launches)):
            at = 40 * (len(self.asked) - 1) + turn

            def change(case, name=name, turn=turn):
                if case.key == self.wavering and len(self.asked) == 1:
                    return {"scale": (1.0, 0.97, 1.04, 1.05, 0.96, 1.0)[turn]}
                return {"hidden": 0.3} if name == "head" and case.key in slow else {}

            kept = one(cases, at % 60, 11 + at, change)
            kept.run.spent = {"0": {"began": float(at)}}
            path = self.folder / f"{at}.json"
            record.write(path, kept)
            made[name].append(path)
        return made["base"], made["head"]

    @property
    def wanted(self) -> list[str]:
        words = self.asked[-1].arguments
        return [word for flag, word in itertools.pairwise(words) if flag == "--case"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def make(*slow: tuple[str, ...], wavering: str = "") -> Machine:
        made = Machine(tmp_path, *slow, wavering=wavering)
        monkeypatch.setattr(duel, "measure", made.measure)
        return made

    monkeypatch.setattr(trees, "tree", lambda given: contextlib.nullcontext(THERE))
    monkeypatch.setattr(trees, "here", lambda: HERE)
    planned = SimpleNamespace(cases=CASES, device=Device("cuda", "NVIDIA H200", 1))
    monkeypatch.setattr(runs, "planned", lambda options: (planned, None))
    return make


def verdict(made, key: str) -> str:
    return next(case.verdict for case in made.cases if case.key == key)


def test_both_trees_are_measured_and_compared(machine, tmp_path) -> None:
    bench = machine((CASES[2].key,))
    asked = Asked(
        against="main", suites=("h2d",), tier="nightly", device="cuda", machine="h200-1", commit="d" * 40
    )
    made = trial.run(asked)
    assert verdict(made, CASES[2].key) == "slower"
    assert [case.verdict for case in made.cases].count("same") == len(CASES) - 1
    (terms,) = bench.asked
    assert terms.arguments == (
        "--device",
        "cuda",
        "--tier",
        "nightly",
        "--suite",
        "h2d",
        "--machine",
        "h200-1",
    )
    assert (terms.launches, terms.commit) == (3, "d" * 40)


def test_what_trips_is_measured_again_and_must_trip_again(machine) -> None:
    bench = machine((CASES[2].key, CASES[4].key), (CASES[2].key,))
    said: list[str] = []
    made = trial.run(Asked(against="main", confirm=True), said.append)
    assert verdict(made, CASES[2].key) == "slower"
    assert verdict(made, CASES[4].key) != "slower"
    assert made.stages == 2
    assert len(bench.asked) == 2
    assert {CASES[2].key, CASES[4].key} <= set(bench.wanted)
    assert len(bench.wanted) < len(CASES), "only what tripped"
    assert any("tripped: measured again" in line for line in said)


def test_what_was_not_seen_is_measured_again_too(machine) -> None:
    bench = machine((), (), wavering=CASES[2].key)
    said: list[str] = []
    made = trial.run(Asked(against="main", confirm=True), said.append)
    assert said == ["of 7 cases 1 not seen: measured again"]
    assert bench.wanted == [CASES[2].key]
    assert {case.verdict for case in made.cases} == {"same"}
    machine((), wavering=CASES[2].key)
    once = trial.run(Asked(against="main"))
    assert verdict(once, CASES[2].key) == "inconclusive"


def test_where_nothing_trips_nothing_is_measured_again(machine) -> None:
    bench = machine(())
    made = trial.run(Asked(against="main", confirm=True))
    assert len(bench.asked) == 1
    assert {case.verdict for case in made.cases} == {"same"}


def test_cases_without_a_budget_are_refused_before_they_are_measured(machine, tmp_path) -> None:
    bench = machine()
    path = tmp_path / "none.toml"
    path.write_text('[default]\ntime = 0.02\nhost = 0.5\nunbudgeted = ["*"]\n')
    with pytest.raises(UsageError, match="none of the 7 cases has a budget"):
        trial.run(Asked(against="main", budgets=path))
    with pytest.raises(UsageError, match="across: got 'nope'"):
        trial.run(Asked(against="main", across=("nope",)))
    assert bench.asked == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(), "want BASE and HEAD, or --against REV"),
        (Asked(base="a"), "want BASE and HEAD, or --against REV"),
        (Asked(base="a", against="main"), "give BASE and HEAD, or --against alone"),
        (Asked(base="a", head="b", confirm=True), "it goes with --against"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(
    machine, asked: Asked, words: str
) -> None:
    machine()
    with pytest.raises(UsageError, match=words):
        trial.run(asked)


def test_records_that_are_there_are_compared(tmp_path) -> None:
    for name, turns in (("base", (0, 3, 4)), ("head", (1, 2, 5))):
        for at in turns:
            record.write(tmp_path / name / f"{at}.json", one(CASES, at, 5))
    made = trial.run(Asked(base=str(tmp_path / "base"), head=str(tmp_path / "head")))
    assert made.design == "interleaved"
    assert {case.verdict for case in made.cases} == {"same"}
    assert sides.load(str(tmp_path / "base"), tmp_path, None).launches == 3
