"""`make bench` with a stand-in for the interpreter: what it asks for, in which order, and what it leaves behind."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# `-c` asks what is installed; `-m harness COMMAND ...` is written down, and ends as the test says.
STAND_IN = """#!/bin/sh
[ "$1" = -c ] && exit 0
shift 2
echo "$@" | sed 's/--note-record [^ ]*/--note-record NOTE/' >> "$SEEN"
case $1 in
run)
    [ -z "$RECORD" ] || echo "$RECORD" > "$3"
    [ -z "$SIGNAL" ] || kill -s "$SIGNAL" $PPID
    exit "$RUN";;
ingest) exit "$INGEST";;
report) exit "$REPORT";;
esac
"""


class Made(NamedTuple):
    """How make ended, what was asked of the program, and what lies in the folder for temporary files."""

    said: str
    code: int
    asked: list[str]
    left: list[Path]


@pytest.fixture
def bench(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path / "Makefile")
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "tmp").mkdir()

    def bench(*, args: str = "--tier quick", **ends: str) -> Made:
        seen = tmp_path / "seen"
        seen.write_text("")
        given = {"RUN": "0", "INGEST": "0", "REPORT": "0", "RECORD": "results/records/m/x.json", "SIGNAL": ""}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        environment = inherited | given | ends | {"SEEN": str(seen), "TMPDIR": str(tmp_path / "tmp")}
        ran = subprocess.run(
            ["make", "bench", f"PYTHON={python}", "VENV=none", f"ARGS={args}"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        # make itself ends with 2; it says with what its recipe ended.
        code = int(ran.stderr.rpartition("Error ")[2].split()[0]) if ran.returncode else 0
        asked = seen.read_text().splitlines()
        return Made(ran.stdout + ran.stderr, code, asked, list((tmp_path / "tmp").iterdir()))

    return bench


def test_the_record_of_this_run_is_filed_and_shown(bench):
    made = bench(args="--tier nightly --machine m")
    assert (made.code, made.left) == (0, [])
    assert made.asked == [
        "run --note-record NOTE --tier nightly --machine m",
        "ingest results/records/m/x.json",
        "report --results results results/records/m/x.json",
    ]


@pytest.mark.parametrize(
    ("record", "store"),
    [
        ("else where/records/m/x.json", "else where"),
        ("records/m/x.json", "."),
        ("/a/records/records/x.json", "/a"),
        ("moved.json", "results"),
    ],
)
def test_a_store_elsewhere_is_filed_and_shown_too(bench, record, store):
    assert bench(RECORD=record).asked[1:] == [f"ingest {record}", f"report --results {store} {record}"]


@pytest.mark.parametrize("code", ["2", "3", "130"])
def test_a_run_without_numbers_ends_it(bench, code):
    made = bench(RUN=code)
    assert (made.code, len(made.asked), made.left) == (int(code), 1, [])


@pytest.mark.parametrize("code", ["0", "4"])
def test_a_run_that_noted_no_record_ends_it_with_its_own_code(bench, code):
    made = bench(RUN=code, RECORD="")
    assert (made.code, len(made.asked), made.left) == (int(code), 1, [])


@pytest.mark.parametrize(
    ("run", "ingest", "report", "code"),
    [
        ("4", "0", "0", 4),
        ("0", "2", "0", 0),
        ("4", "2", "0", 4),
        ("0", "4", "0", 4),
        ("0", "0", "2", 2),
    ],
)
def test_failed_cases_are_still_shown_and_what_asv_cannot_file_is_no_fault(bench, run, ingest, report, code):
    made = bench(RUN=run, INGEST=ingest, REPORT=report)
    assert (made.code, len(made.asked), made.left) == (code, 3, [])


def test_an_interrupt_leaves_no_note(bench):
    """Ctrl-C reaches the shell as well as the run."""
    made = bench(RUN="130", SIGNAL="INT")
    assert (made.code, len(made.asked), made.left) == (130, 1, [])
