import json
from pathlib import Path

import factories
import pytest

from harness import record, store
from harness.errors import RecordError

ONE, TWO = factories.h2d_case(chunks=1), factories.h2d_case(chunks=2)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, record.Record]:
    made = factories.record(*(factories.h2d_result(case, launches=2) for case in (ONE, TWO)))
    path = record.record_path(tmp_path, made)
    record.write(path, made)
    return path, made


def test_an_outline_has_the_chosen_cases_without_samples(kept):
    path, made = kept
    found = store.outline(path, lambda key: "chunks=2" in key)
    (case,) = found.cases
    whole = made.case(TWO.key)
    assert (case.key, case.status, case.params, case.metrics) == (TWO.key, "ok", whole.params, whole.metrics)
    assert [(launch.index, launch.ranks) for launch in case.launches] == [(0, []), (1, [])]
    assert (found.run, found.machine, found.software, found.method) == (
        made.run, made.machine, made.software, made.method,
    )  # fmt: skip


def test_an_excerpt_has_all_there_is_of_the_chosen_cases(kept):
    path, _ = kept
    (case,) = store.excerpt(path, lambda key: key == ONE.key).cases
    assert case == record.read(path).case(ONE.key)
    assert case.launches[0].ranks[0].rounds


def test_records_are_listed_by_machine_and_time(tmp_path):
    for machine, time in (
        ("b", "2026-11-30T08:00:00Z"),
        ("a", "2026-11-30T09:00:00Z"),
        ("a", "2026-11-30T08:00:00Z"),
    ):
        made = factories.record(machine=machine, time=time)
        record.write(record.record_path(tmp_path, made), made)
    assert [path.parent.name + path.name[9:11] for path in store.paths(tmp_path)] == ["a08", "a09", "b08"]
    assert [path.parent.name for path in store.paths(tmp_path, "b")] == ["b"]
    assert store.paths(tmp_path / "nowhere") == []


def broken(path: Path, how: str) -> None:
    text = path.read_bytes()
    whole = json.loads(text)
    if how == "cut":
        path.write_bytes(text[:-100])
    elif how == "newer":
        path.write_text(json.dumps(whole | {"schema": 99}))
    elif how == "no record":
        path.write_text("[1]")
    elif how == "case":
        whole["cases"][1]["status"] = 3
        path.write_text(json.dumps(whole))
    elif how == "sense":
        whole["cases"][0]["status"] = "fine"
        path.write_text(json.dumps(whole))
    else:
        path.write_text('{"schema": 1, "cases": [[]]}')


@pytest.mark.parametrize("how", ["cut", "newer", "no record", "case", "sense", "bare"])
@pytest.mark.parametrize("reader", [store.outline, store.excerpt])
def test_a_broken_record_is_refused_with_its_name(kept, how, reader):
    path, _ = kept
    broken(path, how)
    with pytest.raises(RecordError) as refused:
        reader(path, lambda key: True)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    if how == "newer":
        assert "is newer than this program reads" in str(refused.value)


def test_one_that_is_broken_is_told_and_the_others_are_read(kept, tmp_path):
    path, made = kept
    made.run.time = "2026-12-01T08:00:00Z"
    record.write(record.record_path(tmp_path, made), made)
    path.write_text("{")
    told: list[RecordError] = []
    found = list(store.outlines(tmp_path, None, lambda key: True, told.append))
    assert [outline.run.time for _, outline in found] == ["2026-12-01T08:00:00Z"]
    assert [str(path) in str(error) for error in told] == [True]
