"""`overlap history` as people and scripts meet it."""

import json
import time

import factories
import pytest
import repositories
from test_cli import overlap
from test_history import NAME, Store, measured, noise

__all__ = ["overlap"]


@pytest.fixture
def filled(overlap):
    """60 commits with a step at the 40th, in the folder that the command runs in."""
    commits = repositories.make(overlap.folder, [{"value": str(at)} for at in range(60)])
    store = Store(overlap.folder)
    for at in range(60):
        store.add(commits[at], measured(noise(60)[at] * (1.05 if at >= 40 else 1), seed=at))
    return commits


def test_the_commit_of_a_planted_step_is_named(overlap, filled):
    said = overlap("history", NAME)
    assert (said.code, said.err) == (0, "")
    rows = [line for line in said.out.splitlines() if "step: +" in line]
    assert len(rows) == 1
    assert rows[0].startswith(filled[40][:8])
    assert f" % from {filled[40][:8]} (2026-02-13) on: 5." in said.out
    told = json.loads(overlap("history", NAME, "--json").out)
    assert [step["commit"] for step in told["series"][0]["steps"]] == [filled[40]]
    assert told["order"] == "git"


def test_a_broken_record_is_named_and_passed_over(overlap, filled):
    broken = overlap.folder / "results" / "records" / "h200-1" / "20260301T080000Z-00000000.json"
    broken.write_text("{")
    said = overlap("history", NAME, "--json")
    assert said.code == 0
    assert said.err.startswith(
        "overlap: passed over: results/records/h200-1/20260301T080000Z-00000000.json: not a"
    )
    assert said.err.count("\n") == 1
    assert len(json.loads(said.out)["broken"]) == 1


def test_a_figure_is_drawn_beside_the_table_or_the_json(overlap, filled):
    said = overlap("history", NAME, "--output", "new/a.html")
    assert said.out.endswith("figure: new/a.html\n")
    assert filled[40][:8] in (overlap.folder / "new" / "a.html").read_text()
    said = overlap("history", NAME, "--json", "--output", "a.png")
    json.loads(said.out)
    assert said.err == "figure: a.png\n"
    assert (overlap.folder / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "case: got 'nope', which matches none of the 1 cases in results/records"),
        ([NAME, "--metric", "speed"], "metric: got 'speed', want one of overlapped_ms, "),
        ([NAME, "--machine", "../up"], "machine: got '../up'"),
        ([NAME, "--output", "a.svg"], "output: got a.svg, want a file that ends in .png or .html"),
        ([NAME, "--output", "a.py/a.png"], "output: cannot write a.py/a.png: Not a directory"),
        ([NAME, "--repo", "nowhere.txt"], "matches none"),
        ([], "Missing argument 'CASE'"),
    ],
)
def test_wrong_use_is_one_line(overlap, arguments, words):
    store = Store(overlap.folder)
    store.add("0" * 40, measured(case=factories.h2d_case(chunks=2)) if "--repo" in arguments else measured())
    (overlap.folder / "a.py").write_text("")
    assert words in overlap.refuses("history", *arguments)


def test_where_there_is_nothing_to_show_the_code_is_3(overlap):
    said = overlap("history", NAME)
    assert (said.code, said.out) == (3, "")
    assert said.err == "overlap: history: no readable record under results/records\n"
    store = Store(overlap.folder)
    store.add("0" * 40, measured(status="invalid", reason="shared GPU"))
    said = overlap("history", NAME)
    assert said.code == 3
    assert "shared GPU" in said.out, "the reasons are shown all the same"
    assert overlap("history", NAME, "--machine", "h200-8").code == 3


def test_a_hundred_commits_of_two_hundred_cases_in_seconds(overlap):
    cases = [factories.h2d_case(chunks=1 + at % 64, size=(1 + at // 64) << 20) for at in range(200)]
    path = Store(overlap.folder).add("0" * 40, *(measured(case=case) for case in cases))
    text = path.read_text()
    for at in range(1, 100):
        (path.parent / f"{at}.json").write_text(text.replace("0" * 40, f"{at:040x}", 1))
    began = time.monotonic()
    said = overlap("history", cases[77].key, "--json")
    assert time.monotonic() - began < 10
    assert len(json.loads(said.out)["series"][0]["points"]) == 100
