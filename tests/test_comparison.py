"""Base against head on synthetic launches: verdicts, legs, coverage; and what the gate makes of them."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from factories import h2d_case, record, skipped
from factories_sides import BASE_TURNS, CASES, HEAD_TURNS, TIMES, Change, one, side

from harness import budgets, comparison, gate
from harness import record as records
from harness.case import Case
from harness.comparison import Comparison, compare
from harness.errors import UsageError
from harness.evidence import Pair
from harness.record import Record
from harness.sides import Side


def judged(head: Side, base: Side | None = None, **options: object) -> Comparison:
    return compare(base or side("base"), head, budgets.load(), **options)  # type: ignore[arg-type]


def verdicts(made: Comparison) -> dict[str, str]:
    return {case.key: case.verdict for case in made.cases}


def test_unchanged_code_is_the_same_and_fine() -> None:
    made = judged(side("head"))
    assert made.design == "interleaved"
    assert set(verdicts(made).values()) == {"same"}
    assert gate.exit_code(made) == 0
    assert gate.why(made) == "7 budgeted cases same or faster"
    effect = made.cases[0].effects["overlapped_ms"]
    assert effect.low < 0 < effect.high or abs(effect.change) < 0.005
    assert effect.visible < 0.05


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda case: {"c_ms": 1.05 * TIMES["c_ms"]}, ["copy"]),
        (lambda case: {"k_ms": 1.05 * TIMES["k_ms"]}, ["compute"]),
        (lambda case: {"hidden": 0.3}, ["overlap"]),
        (lambda case: {"c_ms": 1.3 * TIMES["c_ms"], "hidden": 0.3}, ["copy", "overlap"]),
    ],
)
def test_a_slower_case_is_called_with_its_leg(change: Change, expected: list[str]) -> None:
    case = CASES[3]
    changed = judged(side("head", change=lambda one: change(one) if one == case else {}))
    found = verdicts(changed)
    assert found.pop(case.key) == "slower"
    assert set(found.values()) == {"same"}
    (slower,) = (found for found in changed.cases if found.key == case.key)
    assert slower.legs == expected
    assert gate.exit_code(changed) == 1
    assert gate.why(changed) == "1 of 7 budgeted cases slower"


def test_a_slower_host_is_a_leg_of_its_own() -> None:
    base = side("base", change=lambda case: {"host_ms": 0.2})
    changed = judged(side("head", change=lambda case: {"host_ms": 0.6}), base)
    assert {tuple(case.legs) for case in changed.cases} == {("host",)}


def test_a_copy_that_got_faster_behind_the_compute_is_no_loss() -> None:
    """The overlapped time stays, and so is more over its model than before."""
    base = side("base", change=lambda case: {"c_ms": 3.0, "k_ms": 3.0, "hidden": 0.9})
    head = side("head", change=lambda case: {"c_ms": 2.0, "k_ms": 3.0, "hidden": 0.85})
    made = judged(head, base)
    assert "slower" in {case.effects["model_ratio"].verdict for case in made.cases}
    assert "slower" not in verdicts(made).values()


def test_a_faster_case_is_called_and_fine() -> None:
    made = judged(
        side("head", change=lambda case: {"c_ms": 0.9 * TIMES["c_ms"], "k_ms": 0.9 * TIMES["k_ms"]})
    )
    assert set(verdicts(made).values()) == {"faster"}
    assert gate.exit_code(made) == 0


def test_a_case_that_vanished_or_was_skipped_is_never_fine() -> None:
    made = judged(side("head", cases=CASES[:-1]))
    assert verdicts(made)[CASES[-1].key] == "missing"
    assert gate.exit_code(made) == 3
    assert "1 of 7 budgeted cases not seen" in gate.why(made)
    head = side("head", cases=CASES[:-1])
    for kept in head.records:
        kept.cases.append(skipped(CASES[-1], "needs 100 GiB of device memory"))
    made = judged(head)
    (case,) = (found for found in made.cases if found.key == CASES[-1].key)
    assert (case.verdict, case.reason) == ("missing", "head: skipped: needs 100 GiB of device memory")
    assert gate.exit_code(made) == 3


def test_what_is_invalid_is_never_fine() -> None:
    head = side("head")
    for kept in head.records:
        for result in kept.cases:
            result.status, result.reason = "invalid", "shared GPU: 1 other process"
    made = judged(head)
    assert set(verdicts(made).values()) == {"invalid"}
    assert made.cases[0].reason == "head: invalid: shared GPU: 1 other process"
    assert gate.exit_code(made) == 3
    assert "no budgeted case could be compared" in gate.why(made)


def test_what_was_skipped_on_both_sides_is_no_loss() -> None:
    both = [side(name, cases=CASES[:-1]) for name in ("base", "head")]
    for kept in (*both[0].records, *both[1].records):
        kept.cases.append(skipped(CASES[-1]))
    made = compare(*both, budgets.load())
    assert verdicts(made)[CASES[-1].key] == "skipped"
    assert gate.exit_code(made) == 0


def test_a_case_that_only_head_has_is_new() -> None:
    made = judged(side("head"), side("base", cases=CASES[:-1]))
    assert verdicts(made)[CASES[-1].key] == "new"
    assert gate.exit_code(made) == 0


def test_too_few_launches_are_said_and_not_fine() -> None:
    made = judged(side("head", launches=2))
    assert {case.reason for case in made.cases} == {"3 against 2 launches, want 3 or more of each"}
    assert gate.exit_code(made) == 3
    assert all(case.base_ms and case.head_ms and not case.effects for case in made.cases), "the numbers stand"


def test_a_launch_that_is_not_there_says_why() -> None:
    head = side("head")
    for result in head.records[1].cases:
        result.status, result.reason = "invalid", "control failed: null"
    reason = "3 against 2 launches, want 3 or more of each; head: invalid: control failed: null"
    assert {case.reason for case in judged(head).cases} == {reason}


def test_a_record_on_both_sides_is_refused() -> None:
    base, head = side("base"), side("head")
    both = Side("head", (*head.records, base.records[0]))
    with pytest.raises(UsageError, match="share the record"):
        compare(base, both, budgets.load())


def test_a_launch_counts_once() -> None:
    head = side("head")
    twice = Side("head", (*head.records, records.loads(records.dumps(head.records[0]))))
    with pytest.raises(UsageError, match="head holds the record 2026-11-30T08:00:01Z of 01234567 twice"):
        judged(twice)


def test_an_empty_record_is_not_fine() -> None:
    made = judged(Side("head", (record(),)))
    assert set(verdicts(made).values()) == {"missing"}
    assert gate.exit_code(made) == 3
    nothing = compare(
        Side("base", (record(),)), Side("head", (record(time="2026-11-30T09:00:00Z"),)), budgets.load()
    )
    assert nothing.cases == []
    assert gate.exit_code(nothing) == 3


def test_a_case_whose_noise_hides_its_budget_is_not_fine() -> None:
    noisy = {name: side(name, noise=0.1) for name in ("base", "head")}
    made = compare(noisy["base"], noisy["head"], budgets.load())
    assert "slower" not in verdicts(made).values()
    assert "inconclusive" in verdicts(made).values()
    assert gate.exit_code(made) == 3
    case = next(case for case in made.cases if case.verdict == "inconclusive")
    assert case.effects["overlapped_ms"].visible > 0.05
    assert "would have been called, the budget is 5.0%" in case.reason


DISTURBED = {"noise": 0.06, "scale": 1.05}
LONG = {"c_ms": 5.0, "k_ms": 40.0, "overhead_ms": 0.003}


def disturbed(given: Side, at: int) -> Side:
    turns = BASE_TURNS if given.name == "base" else HEAD_TURNS
    records = list(given.records)
    records[at] = one(CASES, turns[at], 7, lambda case: DISTURBED)
    return Side(given.name, tuple(records))


@pytest.mark.parametrize("name", ["base", "head"])
def test_a_launch_disturbed_from_outside_hides_nothing_and_is_said(name: str) -> None:
    """As on a host that others use: one launch in four is slower, and its rounds scatter."""
    sides = {name: side(name, launches=4) for name in ("base", "head")}
    sides[name] = disturbed(sides[name], 1)
    made = judged(sides["head"], sides["base"])
    assert set(verdicts(made).values()) == {"same"}
    assert gate.exit_code(made) == 0
    assert {case.reason for case in made.cases} == {
        f"{name}: 1 of 4 launches left out, whose rounds scatter over 4 times those of the others"
    }


def test_no_side_is_judged_by_two_launches_nor_without_two_that_scatter() -> None:
    """Rounds that scatter may be what changed."""
    few = judged(disturbed(side("head"), 1))
    assert gate.exit_code(few) == 3
    many = judged(disturbed(disturbed(side("head", launches=5), 1), 3), side("base", launches=5))
    assert gate.exit_code(many) == 3
    for made in (few, many):
        assert not any("left out" in case.reason for case in made.cases)


def test_rounds_that_take_long_now_and_then_are_not_the_same() -> None:
    """Every third round of head takes twice as long: no median moves."""
    head = side("head")
    for kept in head.records:
        for at, seen in enumerate(kept.cases[0].launches[0].ranks[0].rounds):
            seen.arms["overlapped"] *= 2 if at % 3 == 2 else 1
    made = judged(head)
    case, *others = made.cases
    assert case.verdict == "inconclusive"
    assert case.effects["overlapped_ms"].verdict != "slower"
    assert re.match(r"some rounds take long: their mean is \+3\d\.\d%, their median [+-]\d\.\d%", case.reason)
    assert gate.exit_code(made) == 3
    assert {other.verdict for other in others} == {"same"}


def test_a_leg_that_was_not_seen_is_said() -> None:
    """Hidden behind the compute a copy may have become slower, and nothing else."""
    quiet = h2d_case(chunks=8, ratio=8.0)
    pace = {1: 1.0, 2: 1.1, 5: 1.2}
    base = Side("base", tuple(one([quiet], at, 7, lambda case: LONG) for at in BASE_TURNS[:3]))
    head = Side(
        "head",
        tuple(
            one([quiet], at, 7, lambda case, at=at: {**LONG, "c_ms": pace[at] * LONG["c_ms"]})
            for at in HEAD_TURNS[:3]
        ),
    )
    (case,) = compare(base, head, budgets.load()).cases
    assert case.verdict == "same"
    assert re.match(r"copy alone was not seen: [+-][\d.]+% to \+[\d.]+%", case.reason)


def test_times_are_those_that_the_change_is_made_of() -> None:
    made = judged(side("head", noise=0.05))
    for case in made.cases:
        assert case.base_ms is not None
        assert case.head_ms is not None
        assert case.head_ms / case.base_ms - 1 == pytest.approx(case.effects["overlapped_ms"].change)


def test_cases_that_were_skipped_are_not_counted_among_the_budgeted() -> None:
    left_out = h2d_case(chunks=64)
    sides = {
        name: side(
            name, change=lambda case, name=name: {"c_ms": 1.2 * TIMES["c_ms"]} if name == "head" else {}
        )
        for name in ("base", "head")
    }
    for each in sides.values():
        for kept in each.records:
            kept.cases.append(skipped(left_out, "needs 2 GPUs"))
            kept.run.planned.append(left_out.key)
    made = judged(sides["head"], sides["base"])
    assert verdicts(made)[left_out.key] == "skipped"
    assert gate.why(made) == "7 of 7 budgeted cases slower"


def test_launches_that_all_scatter_are_all_compared() -> None:
    made = judged(side("head", change=lambda case: DISTURBED))
    assert not any("left out" in case.reason for case in made.cases)
    assert "same" not in verdicts(made).values()


def test_a_case_without_a_budget_is_shown_and_fails_nothing() -> None:
    pageable = h2d_case(memory="pageable", gate="off", chunks=8)
    cases = [*CASES, pageable]
    made = judged(
        side("head", cases=cases, change=lambda case: {"hidden": 0.0} if case == pageable else {}),
        side("base", cases=cases),
    )
    assert verdicts(made)[pageable.key] == "slower"
    assert gate.exit_code(made) == 0


def test_a_record_is_not_compared_with_itself() -> None:
    base = side("base")
    with pytest.raises(UsageError, match="share the record 2026-11-30T08:00:00Z of 01234567"):
        compare(base, base, budgets.load())


def test_sides_of_different_nights_need_a_history() -> None:
    late = Side("head", tuple(one(CASES, at, 7) for at in (11, 12, 13)))
    made = judged(late)
    assert made.design == "nights"
    assert {case.reason for case in made.cases} == {
        "base and head were not measured in turns, and the store does not tell how nights differ"
    }
    assert gate.exit_code(made) == 3


def test_a_second_stage_decides_what_tripped() -> None:
    slow = CASES[3]

    def change(case: Case) -> dict[str, object]:
        return {"hidden": 0.6} if case == slow else {}

    base, head = side("base"), side("head", change=change)
    first = compare(base, head, budgets.load(), confirm=True)
    assert slow.key in comparison.tripped(first)
    assert verdicts(first)[slow.key] != "slower", "not before it was measured again"
    again = [one([slow], at, 8) for at in (20, 23, 24)], [one([slow], at, 8, change) for at in (21, 22, 25)]
    fresh = Side("base", tuple(again[0])), Side("head", tuple(again[1]))
    second = compare(base, head, budgets.load(), confirm=True, fresh=fresh)
    assert verdicts(second)[slow.key] == "slower"
    calm = Side("head", tuple(one([slow], at, 8) for at in (21, 22, 25)))
    third = compare(base, head, budgets.load(), confirm=True, fresh=(fresh[0], calm))
    assert verdicts(third)[slow.key] != "slower", "it did not trip again"


WAVERING = (1.0, 1.05, 0.96, 0.97, 1.04, 1.0)


def wavering(
    turns: tuple[int, ...], scales: tuple[float, ...], case: Case, cases: Iterable[Case]
) -> tuple[Record, ...]:
    """Launches of which that of `case` is as many times as long."""
    return tuple(
        one(cases, at, 7, lambda asked, scale=scale: {"scale": scale} if asked == case else {})  # type: ignore[misc]
        for at, scale in zip(turns, scales, strict=True)
    )


def test_a_second_stage_judges_what_was_not_seen_by_all_launches_together() -> None:
    case = CASES[3]
    base = Side("base", wavering((0, 3, 4), WAVERING[:3], case, CASES))
    head = Side("head", wavering((1, 2, 5), WAVERING[3:], case, CASES))
    first = compare(base, head, budgets.load(), confirm=True)
    assert comparison.unseen(first) == [case.key]
    assert gate.exit_code(first) == 3
    calm = 1.0, 1.001, 0.999
    fresh = tuple(
        Side(name, wavering(turns, calm, case, [case]))
        for name, turns in (("base", (20, 23, 24)), ("head", (21, 22, 25)))
    )
    made = compare(base, head, budgets.load(), confirm=True, fresh=fresh, pooled=[case.key])  # type: ignore[arg-type]
    assert set(verdicts(made).values()) == {"same"}
    assert gate.exit_code(made) == 0
    (again,) = (found for found in made.cases if found.key == case.key)
    assert again.launches == (6, 6)
    assert {found.launches for found in made.cases if found.key != case.key} == {(3, 3)}


def test_a_loss_that_was_not_seen_is_called_by_all_launches_together() -> None:
    case = CASES[3]
    base = Side("base", wavering((0, 3, 4), WAVERING[:3], case, CASES))
    head = Side("head", wavering((1, 2, 5), WAVERING[3:], case, CASES))
    calm = 1.0, 1.001, 0.999
    fresh = (
        Side("base", wavering((20, 23, 24), calm, case, [case])),
        Side("head", wavering((21, 22, 25), tuple(1.3 * scale for scale in calm), case, [case])),
    )
    assert comparison.unseen(compare(base, head, budgets.load(), confirm=True)) == [case.key]
    made = compare(base, head, budgets.load(), confirm=True, fresh=fresh, pooled=[case.key])
    assert verdicts(made)[case.key] != "same"
    assert gate.exit_code(made) != 0


def test_what_has_no_budget_is_not_measured_again_for_not_being_seen() -> None:
    noisy = {name: side(name, noise=0.1) for name in ("base", "head")}
    made = compare(noisy["base"], noisy["head"], budgets.load(), confirm=True)
    assert comparison.unseen(made) != []
    for case in made.cases:
        case.gated = False
    assert comparison.unseen(made) == []


# As recorded on an NVIDIA H200, in turns: the nightly suite of one commit twice, and 5 % more bytes copied in head

GATES = Path(__file__).parent.parent / "results" / "gate"


def recorded(name: str) -> tuple[Side, Side]:
    base, head = (
        Side(side, tuple(records.read(path) for path in sorted((GATES / name / side).glob("*.json"))))
        for side in ("base", "head")
    )
    return base, head


def test_one_commit_twice_on_an_h200_is_the_same() -> None:
    made = compare(*recorded("same"), budgets.load())
    gated = [case.verdict for case in made.cases if case.gated and case.verdict != "skipped"]
    assert gated == ["same"] * 28
    assert "slower" not in verdicts(made).values()
    assert gate.exit_code(made) == 0


def test_5_percent_more_bytes_on_an_h200_are_a_loss_of_the_copy() -> None:
    made = compare(*recorded("bytes"), budgets.load())
    assert [case.verdict for case in made.cases] == ["slower"] * 8
    assert all("copy" in case.legs and "compute" not in case.legs for case in made.cases)
    assert gate.exit_code(made) == 1


def test_a_loss_of_5_percent_in_any_case_of_a_whole_h200_suite_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 3 launches a side, in one stage, beside pageable and launch-bound cases that differ by 20 %."""
    base, head = recorded("same")
    real = comparison._pairs
    gated = [
        case.key
        for case in compare(base, head, budgets.load()).cases
        if case.gated and case.verdict != "skipped"
    ]
    for lost in gated[::4]:

        def planted(key: str, *given: object, lost: str = lost) -> Iterator[Pair]:
            for pair in real(key, *given):  # type: ignore[arg-type]
                slow = key == lost and pair.quantity in ("overlapped_ms", "transfer_ms")
                yield dataclasses.replace(pair, head=[1.05 * ms for ms in pair.head]) if slow else pair

        monkeypatch.setattr(comparison, "_pairs", planted)
        made = compare(base, head, budgets.load())
        assert [case.key for case in made.cases if case.verdict == "slower"] == [lost]
        assert next(case for case in made.cases if case.key == lost).legs == ["copy"]
