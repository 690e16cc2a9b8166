from pathlib import Path

import pytest
from test_comparison import CASES, one

from harness import noise, record
from harness.sides import Side


def night(at: int, *, commit: str = "0" * 40, shift: float = 1.0, launches: int = 1):
    """One night: a record whose launches all are `shift` times as long."""
    made = one(CASES[:2], at, 3, lambda case: {"scale": shift})
    made.run.commit, made.run.time = commit, f"2026-11-{10 + at:02}T08:00:00Z"
    return made


def store(folder: Path, nights) -> None:
    for made in nights:
        record.write(record.record_path(folder, made), made)


def test_nights_that_differ_are_found(tmp_path: Path) -> None:
    shifts = [1.0, 1.02, 0.99, 1.03, 0.98, 1.01]
    nights = [night(at, shift=shift) for at, shift in enumerate(shifts)]
    store(tmp_path, nights)
    head = night(9, commit="1" * 40), night(9, commit="1" * 40, shift=1.001)
    found = noise.histories(tmp_path, Side("b", (nights[0],)), Side("h", head))
    assert {key for key, _ in found} == {case.key for case in CASES[:2]}
    history = found[CASES[0].key, "overlapped_ms"]
    assert 0.015 < history.night < 0.045
    quiet = found[CASES[1].key, "model_ratio"]
    assert quiet.night < 0.005, "what moves all times moves no ratio"


def test_how_launches_of_one_night_differ_is_no_difference_of_nights(tmp_path: Path) -> None:
    """Three nights of one launch each differ only as launches of a night do."""
    nights = [night(at, shift=shift) for at, shift in enumerate([1.0, 1.004, 0.996, 1.002])]
    store(tmp_path, nights)
    head = tuple(night(9, commit="1" * 40, shift=shift) for shift in (1.0, 1.004, 0.996))
    found = noise.histories(tmp_path, Side("b", (nights[0],)), Side("h", head))
    history = found[CASES[0].key, "overlapped_ms"]
    assert 0.002 < history.launch < 0.008
    assert history.night < history.launch


def test_head_tells_nothing_of_unchanged_code(tmp_path: Path) -> None:
    nights = [night(at) for at in range(3)]
    heads = [night(at, commit="1" * 40, shift=2.0) for at in range(5, 8)]
    store(tmp_path, [*nights, *heads])
    found = noise.histories(tmp_path, Side("b", (nights[0],)), Side("h", tuple(heads[:2])))
    assert found[CASES[0].key, "overlapped_ms"].night < 0.01


@pytest.mark.parametrize("spoil", ["few", "driver", "unfinished", "broken"])
def test_too_few_comparable_nights_are_no_history(tmp_path: Path, spoil: str) -> None:
    nights = [night(at) for at in range(2 if spoil == "few" else 3)]
    for made in nights:
        made.software["driver"] = "580"
    if spoil == "driver":
        nights[2].software["driver"] = "590"
    if spoil == "unfinished":
        nights[2].run.finished = False
    store(tmp_path, nights)
    if spoil == "broken":
        record.record_path(tmp_path, nights[2]).write_text("{")
    head = night(9, commit="1" * 40)
    assert noise.histories(tmp_path, Side("b", (nights[0],)), Side("h", (head,))) == {}
