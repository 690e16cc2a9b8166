from factories import h2d_case
from factories_sides import CASES, TIMES, side
from rich.console import Console
from test_comparison import judged

from harness import contest
from harness.comparison import Comparison


def shown(made: Comparison, width: int = 160) -> str:
    console = Console(width=width, record=True, force_terminal=False, highlight=False, markup=False)
    console.print(contest.table(made))
    return console.export_text()


def slower() -> Comparison:
    return judged(side("head", change=lambda case: {"hidden": 0.3} if case == CASES[3] else {}))


def test_what_to_look_at_comes_first_with_its_leg() -> None:
    made = slower()
    text = shown(made)
    rows = [line for line in text.splitlines() if line.startswith("n=")]
    assert "slower: overlap" in rows[0]
    assert "n=8" in rows[0]
    assert all("same" in row for row in rows[1:])
    effect = next(case for case in made.cases if case.verdict == "slower").effects["overlapped_ms"]
    assert f"{100 * effect.change:+.1f} %" in rows[0]


def test_a_narrow_terminal_keeps_verdict_and_change() -> None:
    text = shown(slower(), width=70)
    assert "slower: overlap" in text
    assert "No room here for" in text


def test_the_lines_say_what_was_compared_and_how_it_ended() -> None:
    told = contest.lines(slower())
    assert told[0].startswith(
        "base 01234567 (3 launches) against head 01234567 (3 launches), measured in turns"
    )
    assert told[-2:] == ["cases: 1 slower, 6 same", "1 of 7 budgeted cases slower"]


def test_warnings_are_marked() -> None:
    head = side("head")
    head.records[0].run.dirty = True
    assert "! head was measured with uncommitted changes" in contest.lines(judged(head))


def test_markdown_shows_findings_and_folds_the_rest() -> None:
    text = contest.markdown(slower())
    top, folded = text.split("<details>")
    assert text.startswith("### overlap: 1 of 7 budgeted cases slower\n")
    assert "slower: overlap" in top
    assert "same" not in top.partition("| case")[2]
    assert folded.count("| same |") == 6
    assert "6 cases without a finding" in folded


def test_markdown_says_what_cannot_fail_the_gate() -> None:
    cases = [*CASES, h2d_case(memory="pageable", gate="off", chunks=8)]
    made = judged(side("head", cases=cases), side("base", cases=cases))
    text = contest.markdown(made)
    assert text.count("not budgeted: shown, and never fails the gate") == 1


def test_markdown_cannot_be_steered_by_a_record() -> None:
    head = side("head", cases=CASES[:-1])
    made = judged(head)
    lost = next(case for case in made.cases if case.verdict == "missing")
    lost.reason = "<script>|x|`y`\n# z"
    text = contest.markdown(made)
    assert "<script>" not in text
    assert "\\<script\\>\\|x\\|" in text
    assert "\n# z" not in text


def test_a_change_that_is_nothing_has_no_sign() -> None:
    made = judged(side("head"))
    made.cases[0].effects["overlapped_ms"].change = -1e-9
    assert contest.change(made.cases[0], "overlapped_ms") == "0.00 %"
    assert contest.change(made.cases[0], "no such quantity") == "-"


def test_a_comparison_of_nothing_is_said() -> None:
    head = side("head", change=lambda case: {"c_ms": TIMES["c_ms"]})
    for kept in head.records:
        kept.machine.gpu["name"] = "NVIDIA H100"
    told = contest.lines(judged(head))
    assert told[-1] == "not comparable: name: NVIDIA H200 vs NVIDIA H100"
