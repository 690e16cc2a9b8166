from pathlib import Path

import numpy as np
import pytest
from factories import h2d_case, h2d_result, record, table_results

from harness import record as records
from harness import sides
from harness.errors import RecordError, UsageError
from harness.record import Record
from harness.sides import Side, load

A, B = "a" * 40, "a" * 12 + "b" * 28


def made(
    commit: str = A, time: str = "2026-11-30T08:00:00Z", machine: str = "h200-1", **options: object
) -> Record:
    return record(*table_results(**options), commit=commit, time=time, machine=machine)  # type: ignore[arg-type]


def store(folder: Path, *kept: Record) -> list[Path]:
    paths = [records.record_path(folder, one) for one in kept]
    for path, one in zip(paths, kept, strict=True):
        records.write(path, one)
    return paths


def test_a_side_is_a_record_a_folder_or_a_commit(tmp_path: Path) -> None:
    first, second = made(time="2026-11-30T09:00:00Z"), made(time="2026-11-30T08:00:00Z", seed=1)
    paths = store(tmp_path, first, second, made(commit="c" * 40, time="2026-11-30T10:00:00Z"))
    assert [one.run.time for one in load(str(paths[0]), tmp_path, None).records] == [first.run.time]
    assert len(load(str(paths[0].parent), tmp_path, None).records) == 3
    by_commit = load("aaaaaaaa", tmp_path, None)
    assert [one.run.time for one in by_commit.records] == [second.run.time, first.run.time], (
        "in order of time"
    )
    assert by_commit.commit == "aaaaaaaa"


def test_a_commit_is_told_from_another_with_the_same_beginning(tmp_path: Path) -> None:
    store(tmp_path, made(A), made(B, time="2026-11-30T09:00:00Z"))
    (found,) = load(B[:16], tmp_path, None).records
    assert found.run.commit == B


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("main", "want a record, a folder of records, or a commit of 7 to 40 hex digits"),
        ("0123456", "is not in the store .* it has aaaaaaaa"),
        ("none.json", "cannot read"),
    ],
)
def test_what_names_no_side_is_refused(tmp_path: Path, asked: str, words: str) -> None:
    store(tmp_path, made())
    with pytest.raises(UsageError, match=words):
        load(asked, tmp_path, None)


def test_an_empty_folder_and_an_empty_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no record"):
        load(str(tmp_path), tmp_path, None)
    with pytest.raises(UsageError, match="which holds no record"):
        load("0123456", tmp_path, None)


def test_a_broken_record_is_not_passed_over(tmp_path: Path) -> None:
    (path,) = store(tmp_path, made())
    path.write_text(path.read_text()[:-100])
    with pytest.raises(RecordError):
        load("aaaaaaaa", tmp_path, None)


def test_records_of_two_machines_are_no_side(tmp_path: Path) -> None:
    store(tmp_path, made(), made(machine="h200-2"))
    with pytest.raises(UsageError, match="has records of h200-1, h200-2; choose one with --machine"):
        load("aaaaaaaa", tmp_path, None)
    assert load("aaaaaaaa", tmp_path, "h200-2").records[0].machine.name == "h200-2"
    with pytest.raises(UsageError, match="not in the store"):
        load("aaaaaaaa", tmp_path, "cpu-2")


def began(*times: float, uuid: str = "GPU-1") -> Side:
    kept = []
    for at in times:
        one = made()
        one.run.spent, one.machine.gpu["uuid"] = {"0": {"began": at}}, uuid
        kept.append(one)
    return Side("x", tuple(kept))


@pytest.mark.parametrize(
    ("base", "head", "in_turns"),
    [
        ((1, 4, 5), (2, 3, 6), True),  # ABBA AB
        ((1, 3, 5), (2, 4, 6), True),
        ((1, 2, 3), (4, 5, 6), False),
        ((1, 2, 6), (3, 4, 5), False),  # base before and after is not in turns
        ((1, 86401, 172801), (86400, 172800, 259200), False),  # a night apart
        ((1, 3, 5, 7), (2, 4, 6), False),
    ],
)
def test_sides_in_turns_are_told_from_nights(
    base: tuple[float, ...], head: tuple[float, ...], in_turns: bool
) -> None:
    assert sides.interleaved(began(*base), began(*head)) is in_turns


def test_two_gpus_or_launches_without_a_time_are_not_in_turns() -> None:
    assert not sides.interleaved(began(1, 4, 5), began(2, 3, 6, uuid="GPU-2"))
    silent = began(2, 3, 6)
    silent.records[0].run.spent = {"0": {"open_s": 1.0}}
    assert not sides.interleaved(began(1, 4, 5), silent)


def test_times_are_one_number_a_launch_of_every_record() -> None:
    case = h2d_case(chunks=8)
    two = [record(h2d_result(case, launches=n, seed=n, repeats=4)) for n in (1, 2)]
    found = Side("x", tuple(two)).times[case.key]
    assert len(found) == 3
    assert set(found.values) == {*sides.QUANTITIES, sides.MEAN}
    launches = [launch for one in two for launch in one.cases[0].launches]
    expected = [np.median([r.arms["overlapped"] for r in launch.ranks[0].rounds]) / 4 for launch in launches]
    assert found.values["overlapped_ms"] == pytest.approx(expected)
    assert found.values["model_ratio"] == pytest.approx(np.ones(3), abs=0.02)
    relative = found.errors["overlapped_ms"] / found.values["overlapped_ms"]
    assert ((relative > 1e-4) & (relative < 5e-3)).all()


def test_what_was_not_measured_has_no_times() -> None:
    case = h2d_case(chunks=8)
    spoiled = h2d_result(case)
    spoiled.status = "invalid"
    assert Side("x", (record(spoiled),)).times == {}
    assert Side("x", (record(),)).times == {}
