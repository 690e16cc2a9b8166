"""Two sides as a whole: another device, driver or method, and a machine that moved."""

from collections.abc import Callable

import pytest
from factories import controls
from factories_sides import CASES, one, side

from harness import budgets, gate
from harness.comparison import compare
from harness.errors import UsageError
from harness.record import Ceiling, Record
from harness.sides import Side


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda made: made.machine.gpu.update(name="NVIDIA H100"), "name: NVIDIA H200 vs NVIDIA H100"),
        (lambda made: made.software.update(driver="590"), "driver: 580 vs 590"),
        (lambda made: setattr(made, "method", made.method + 1), "method: "),
    ],
)
def test_another_gpu_driver_or_method_is_not_compared(spoil: Callable[[Record], object], words: str) -> None:
    base, head = side("base"), side("head")
    for kept in (*base.records, *head.records):
        kept.software["driver"] = "580"
    for kept in head.records:
        spoil(kept)
    made = compare(base, head, budgets.load())
    assert any(words in text for text in made.breaks)
    assert made.cases == []
    assert gate.exit_code(made) == 3
    assert gate.why(made).startswith("not comparable: ")


def test_a_break_may_be_crossed_by_name_and_is_then_said() -> None:
    base, head = side("base"), side("head")
    for kept in base.records:
        kept.software["driver"] = "580"
    for kept in head.records:
        kept.software["driver"] = "590"
    made = compare(base, head, budgets.load(), across=["driver"])
    assert made.breaks == []
    assert made.crossed == ["driver: 580 vs 590"]
    assert gate.exit_code(made) == 0
    with pytest.raises(UsageError, match=r"across: got 'vbios', want one of .*driver"):
        compare(base, head, budgets.load(), across=["vbios"])


def test_records_of_one_side_that_differ_are_no_side() -> None:
    base = side("base")
    base.records[0].software["driver"], base.records[1].software["driver"] = "580", "590"
    made = compare(base, side("head"), budgets.load(), across=["driver"])
    assert made.breaks == ["within base: driver: 580 vs 590"]


def test_what_the_device_reaches_alone_tells_a_changed_machine() -> None:
    base, head = side("base"), side("head")
    for kept, rate in [*((kept, 55.4) for kept in base.records), *((kept, 50.0) for kept in head.records)]:
        kept.ceilings = [Ceiling(name="h2d", launch=0, value=rate, unit="GB/s")]
    made = compare(base, head, budgets.load())
    words = "h2d alone moved by -9.7% with the side: below the cases, in backend or libraries"
    assert words in made.warnings, "in turns the machine is the same"
    later = Side("head", tuple(one(CASES, at, 7) for at in (11, 12, 13)))
    for kept in later.records:
        kept.ceilings = [Ceiling(name="h2d", launch=0, value=50.0, unit="GB/s")]
    assert "machine changed: h2d alone is -9.7%" in compare(base, later, budgets.load()).warnings


def test_numbers_that_no_control_vouches_for_are_said() -> None:
    base, head = side("base"), side("head")
    for kept in (*base.records, *head.records):
        kept.controls = controls()
    assert compare(base, head, budgets.load()).warnings == []
    head.records[1].controls = []
    base.records[0].controls[0].passed = False
    name = base.records[0].controls[0].name
    assert compare(base, head, budgets.load()).warnings == [
        f"base: controls failed: {name}",
        "head was measured without controls",
    ]


def test_two_kinds_of_machine_are_said() -> None:
    base, head = side("base"), side("head")
    for kept in head.records:
        kept.machine.name = "other-1"
    made = compare(base, head, budgets.load())
    assert f"base is of machine {base.records[0].machine.name}, head of other-1" in made.warnings


def test_a_variable_that_only_one_side_has_is_said() -> None:
    base, head = side("base"), side("head")
    for kept in head.records:
        kept.environment["CUDA_LAUNCH_BLOCKING"] = "1"
    assert "CUDA_LAUNCH_BLOCKING: unset vs 1" in compare(base, head, budgets.load()).warnings
