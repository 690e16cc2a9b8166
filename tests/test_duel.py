"""Base and head in turns: against trees whose program says what it was asked, fails, or is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import duel
from harness.duel import Terms, measure, turns
from harness.errors import MeasurementError
from harness.trees import Tree

PROGRAM = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent.parent
log = here.parent / "log"
with log.open("a") as file:
    print(json.dumps([here.name, sys.argv[1:]]), file=file)
exec((here / "fault").read_text() if (here / "fault").exists() else "")
print(json.dumps({"record": f"{here.name}-{sum(1 for _ in log.open())}.json"}))
sys.exit(CODE)
"""


def stub(folder: Path, name: str, *, code: int = 0, fault: str = "", commit: str = "") -> Tree:
    root = folder / name
    (root / "harness").mkdir(parents=True)
    (root / "harness" / "__init__.py").touch()
    (root / "harness" / "__main__.py").write_text(PROGRAM.replace("CODE", str(code)))
    if fault:
        (root / "fault").write_text(fault)
    return Tree(root, commit, name)


def terms(folder: Path, launches: int = 3, commit: str | None = None) -> Terms:
    return Terms(arguments=("--suite", "h2d"), results=folder / "results", launches=launches, commit=commit)


def asked(folder: Path) -> list[tuple[str, list[str]]]:
    return [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]


def test_sides_take_turns_so_that_a_drift_falls_on_both() -> None:
    assert list(turns(4)) == ["base", "head", "head", "base", "base", "head", "head", "base"]
    assert list(turns(1)) == ["base", "head"]


def test_each_launch_is_a_run_of_that_sides_own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    base, head = stub(tmp_path, "old", commit="a" * 40), stub(tmp_path, "new", code=4)
    monkeypatch.setattr(duel, "here", lambda: head)
    made = measure(base, head, terms(tmp_path, commit="b" * 40), said.append)
    assert [name for name, _ in asked(tmp_path)] == ["old", "new", "new", "old", "old", "new"]
    assert made == (
        [Path("old-1.json"), Path("old-4.json"), Path("old-5.json")],
        [Path("new-2.json"), Path("new-3.json"), Path("new-6.json")],
    ), "a record with invalid cases (exit code 4) is a record"
    common = ["run", "--launches", "1", "--json", "--results", str(tmp_path / "results"), "--suite", "h2d"]
    words = dict(asked(tmp_path))
    assert words["old"] == [*common, "--commit", "a" * 40]
    assert words["new"] == [*common, "--commit", "b" * 40]
    assert said[:2] == ["launch 1 of 6: base (old)", "launch 2 of 6: head (new)"]


def test_a_tree_with_its_own_history_is_not_told_its_commit(tmp_path: Path) -> None:
    measure(stub(tmp_path, "old"), stub(tmp_path, "new"), terms(tmp_path, 1, commit="b" * 40))
    assert all("--commit" not in words for _, words in asked(tmp_path)), (
        "the commit given is this tree's alone"
    )


def test_this_tree_against_itself_is_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = stub(tmp_path, "new")
    monkeypatch.setattr(duel, "here", lambda: tree)
    measure(tree, tree, terms(tmp_path, 1, commit="b" * 40))
    assert [words[-1] for _, words in asked(tmp_path)] == ["b" * 40] * 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "base (old) could not be measured: see its message above"),
        (3, "base (old) could not be measured: it measured nothing"),
        (77, "base (old) could not be measured: exit code 77"),
    ],
)
def test_a_run_that_fails_ends_the_comparison(tmp_path: Path, code: int, words: str) -> None:
    with pytest.raises(MeasurementError) as said:
        measure(stub(tmp_path, "old", code=code), stub(tmp_path, "new"), terms(tmp_path))
    assert str(said.value) == words
    assert said.value.exit_code == 4
    assert len(asked(tmp_path)) == 1, "nothing more is measured in vain"


def test_a_program_that_says_no_record_is_refused(tmp_path: Path) -> None:
    silent = stub(tmp_path, "old", fault="print('hello'); sys.exit(0)")
    with pytest.raises(MeasurementError, match="did not say where its record is"):
        measure(silent, stub(tmp_path, "new"), terms(tmp_path))


def test_an_interrupt_waits_for_the_run_to_keep_its_record(tmp_path: Path) -> None:
    """The run gets a SIGTERM, as if Ctrl-C had not reached it, and is awaited."""
    fault = (
        "import signal, time\n"
        "def end(*_):\n"
        "    time.sleep(0.3); (here.parent / 'kept').touch(); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "(here.parent / 'up').touch()\n"
        "time.sleep(60)\n"
    )
    stub(tmp_path, "old", fault=fault)
    stub(tmp_path, "new")
    code = f"""
import sys
from pathlib import Path
from harness.duel import Terms, measure
from harness.trees import Tree
folder = Path({str(tmp_path)!r})
terms = Terms(arguments=(), results=folder / "results", launches=1)
try:
    measure(Tree(folder / "old", "", "old"), Tree(folder / "new", "", "new"), terms)
except KeyboardInterrupt:
    sys.exit(130)
"""
    root = Path(duel.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        until = time.monotonic() + 20
        while not (tmp_path / "up").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "kept").exists()
    assert len(asked(tmp_path)) == 1
