"""`overlap compare` and `overlap gate` as people and scripts meet them."""

import json
from pathlib import Path

import pytest
from factories_sides import BASE_TURNS, CASES, HEAD_TURNS, one
from test_cli import Overlap

from harness import record


@pytest.fixture
def overlap(tmp_path, monkeypatch, capsys):
    return Overlap(tmp_path, monkeypatch, capsys)


def keep(folder: Path, turns, commit: str, change=lambda case: {}, **options) -> Path:
    """Launches of one side in a folder of their own and in the store."""
    for at in turns[:3]:
        made = one(CASES, at, 7, change, **options)
        made.run.commit = commit
        record.write(folder / f"side-{commit[0]}" / f"{at}.json", made)
        record.write(record.record_path(folder / "results", made), made)
    return folder / f"side-{commit[0]}"


@pytest.fixture
def sides(overlap):
    base = keep(overlap.folder, BASE_TURNS, "a" * 40)
    same = keep(overlap.folder, HEAD_TURNS, "b" * 40)
    return str(base), str(same)


def slow(folder: Path) -> str:
    return str(keep(folder, HEAD_TURNS, "c" * 40, lambda case: {"hidden": 0.3} if case == CASES[3] else {}))


def test_a_gate_says_how_it_ended_by_its_code(overlap, sides) -> None:
    base, same = sides
    fine = overlap("gate", base, same)
    assert fine.code == 0
    assert fine.out.rstrip().endswith("7 budgeted cases same or faster")
    regression = overlap("gate", base, slow(overlap.folder))
    assert regression.code == 1
    assert "slower: overlap" in regression.out


def test_commits_of_the_store_are_compared(overlap, sides) -> None:
    said = overlap("gate", "aaaaaaaa", "bbbbbbbb")
    assert (said.code, "measured in turns" in said.out) == (0, True)


def test_compare_tells_and_exits_0_unless_asked(overlap, sides) -> None:
    base, _ = sides
    head = slow(overlap.folder)
    assert overlap("compare", base, head).code == 0
    assert overlap("compare", base, head, "--exit-code").code == 1


def test_programs_get_everything(overlap, sides) -> None:
    base, _ = sides
    told = json.loads(overlap("compare", base, slow(overlap.folder), "--json").out)
    assert told["exit_code"] == 1
    assert told["design"] == "interleaved"
    (lost,) = (case for case in told["cases"] if case["verdict"] == "slower")
    assert lost["key"] == CASES[3].key
    assert lost["legs"] == ["overlap"]
    effect = lost["effects"]["overlapped_ms"]
    assert effect["low"] <= effect["change"] <= effect["high"]
    assert 0 < effect["visible"] < 0.05


def test_a_pull_request_gets_markdown(overlap, sides) -> None:
    said = overlap("compare", *sides, "--markdown")
    assert said.out.startswith("### overlap: 7 budgeted cases same or faster")
    both = overlap("compare", *sides, "--markdown", "--json")
    assert (both.code, both.out) == (2, "")
    assert "--markdown: goes with no --json" in both.err


def test_budgets_can_be_given(overlap, sides) -> None:
    base, _ = sides
    head = slow(overlap.folder)
    (overlap.folder / "wide.toml").write_text("[default]\ntime = 2.0\nhost = 2.0\n")
    assert overlap("gate", base, head, "--budgets", "wide.toml").code == 0
    (overlap.folder / "none.toml").write_text('[default]\ntime = 0.02\nhost = 0.5\nunbudgeted = ["*"]\n')
    assert overlap("gate", base, head, "--budgets", "none.toml").code == 3, (
        "nothing that has a budget was seen"
    )


def test_what_is_not_comparable_is_never_fine(overlap, sides) -> None:
    base, same = sides
    for path in Path(same).glob("*.json"):
        made = record.read(path)
        made.software["driver"] = "590"
        record.write(path, made)
    for path in Path(base).glob("*.json"):
        made = record.read(path)
        made.software["driver"] = "580"
        record.write(path, made)
    said = overlap("gate", base, same)
    assert said.code == 3
    assert "not comparable: driver: 580 vs 590" in said.out
    assert overlap("gate", base, same, "--across", "driver").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gate",), "want BASE and HEAD, or --against REV"),
        (("gate", "aaaaaaaa"), "want BASE and HEAD"),
        (("gate", "aaaaaaaa", "aaaaaaaa"), "share the record"),
        (("gate", "aaaaaaaa", "bbbbbbbb", "--against", "main"), "or --against alone"),
        (("gate", "aaaaaaaa", "bbbbbbbb", "--confirm"), "it goes with --against"),
        (("gate", "--against", "nosuch"), "not a git repository; mend that, or give a folder or records"),
        (("gate", "--against", ""), "against: got nothing, want a revision or a folder"),
        (("gate", "aaaaaaaa", "bbbbbbbb", "--launches", "5"), "--launches: says what to measure"),
        (("gate", "aaaaaaaa", "bbbbbbbb", "--case", "x"), "--case: says what to measure"),
        (("compare", "aaaaaaaa", "0123456"), "is not in the store"),
        (("compare", "aaaaaaaa", "bbbbbbbb", "--across", "colour"), "across: got 'colour', want one of"),
        (("compare", "aaaaaaaa", "bbbbbbbb", "--budgets", "none"), "budgets: cannot read"),
        (("compare", "aaaaaaaa", "bbbbbbbb", "--machine", "cpu-2"), "not in the store"),
    ],
)
def test_wrong_use_is_one_line(overlap, sides, arguments, words) -> None:
    assert words in overlap.refuses(*arguments)


def test_a_broken_record_is_one_line(overlap, sides) -> None:
    base, same = sides
    path = next(Path(same).glob("*.json"))
    path.write_bytes(path.read_bytes()[:-50])
    assert "not a readable record" in overlap.refuses("gate", base, same)
