"""Histories of synthetic stores beside real, if small, git repositories."""

from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
import repositories

from harness import history, metrics, record
from harness.errors import UsageError
from harness.history import History, Series
from harness.points import MISSING
from harness.steps import FIT_POINTS

CASE = factories.h2d_case()
OTHER = factories.h2d_case(chunks=4)
NAME = CASE.key.replace(",profile=h200.1a2b", "")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("project")
    return folder, repositories.make(folder, [{"value": str(at)} for at in range(60)])


def noise(count: int, seed: int = 5) -> np.ndarray:
    """Between commits, as an H200 has from night to night."""
    return 1 + 0.003 * np.random.default_rng(seed).standard_normal(count)


class Store:
    """Records in a folder, one a day from 2026-01-01."""

    def __init__(self, folder: Path) -> None:
        self.results = folder / "results"
        self.days = 0

    def add(
        self, commit: str, *results: record.CaseResult, software: dict[str, Any] | None = None, day: int | None = None,
        **options: Any,
    ) -> Path:  # fmt: skip
        day = self.days if day is None else day
        time = f"2026-{1 + day // 28:02}-{1 + day % 28:02}T08:00:00Z"
        dirty, finished = options.pop("dirty", False), options.pop("finished", True)
        planned = options.pop("planned", ())
        made = factories.record(*results, commit=commit, time=time, dirty=dirty, **options)
        made.software |= {"driver": "580.1"} | (software or {})
        made.run.finished, made.run.planned = finished, [case.key for case in planned]
        path = record.record_path(self.results, made)
        record.write(path, made)
        self.days = day + 1
        return path

    def series(self, pattern: str = NAME, **options: Any) -> Series:
        (only,) = self.read(pattern, **options).series
        return only

    def read(self, pattern: str = NAME, *, metric: str = "overlapped_ms", **options: Any) -> History:
        return history.read(self.results, pattern, metric=metric, **options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def measured(scale: float = 1.0, case=CASE, **options: Any) -> record.CaseResult:
    return factories.h2d_result(case, scale=scale, rounds=8, **options)


def statuses(series: Series) -> list[str]:
    return [point.status for point in series.points]


# -- steps -------------------------------------------------------------------------------------------------


def test_a_planted_step_is_found_with_its_commit(store, repository):
    folder, commits = repository
    scales = noise(60)
    scales[40:] *= 1.05
    # In whatever order they were measured, git's history counts.
    for at in np.random.default_rng(0).permutation(60):
        store.add(commits[at], measured(scales[at], seed=int(at)))
    series = store.series(repo=folder)
    assert [point.commit for point in series.points] == commits
    (step,) = series.steps
    assert series.points[step.at].commit == commits[40]
    assert series.points[step.since].commit == commits[39]
    assert step.commits == 1
    assert step.change == pytest.approx(0.05, abs=0.003)
    assert series.newest is None
    assert [(level.first, level.last) for level in series.levels] == [(0, 39), (40, 59)]


def test_a_step_between_measured_commits_names_how_many_were_not(store, repository):
    folder, commits = repository
    for at in range(0, 60, 4):
        store.add(commits[at], measured(noise(60)[at] * (1.05 if at >= 30 else 1)))
    (step,) = (series := store.series(repo=folder)).steps
    assert series.points[step.at].commit == commits[32]
    assert (series.points[step.since].commit, step.commits) == (commits[28], 4)


def test_the_newest_points_are_told_where_they_lie_apart(store, repository):
    folder, commits = repository
    for at in range(20):
        store.add(commits[at], measured(noise(60)[at] * (1.02 if at == 19 else 1)))
    series = store.series(repo=folder)
    assert series.steps == []
    assert series.newest is not None
    assert series.newest.points == 1
    assert series.newest.value / series.newest.level == pytest.approx(1.02, abs=0.01)


def test_no_step_is_looked_for_across_a_break(store, repository):
    """The driver changed as the time did: whose doing it was, nobody can tell."""
    folder, commits = repository
    for at in range(40):
        software = {"driver": "580.1" if at < 20 else "590.2"}
        store.add(commits[at], measured(noise(60)[at] * (1.05 if at >= 20 else 1)), software=software)
    series = store.series(repo=folder)
    assert series.steps == []
    (only,) = series.breaks
    assert only.at == 20
    assert list(map(str, only.differences)) == ["driver: 580.1 vs 590.2"]
    assert [(level.first, level.last) for level in series.levels] == [(0, 19), (20, 39)]


def test_a_step_after_a_break_is_found_all_the_same(store, repository):
    folder, commits = repository
    for at in range(60):
        software = {"driver": "580.1" if at < 20 else "590.2"}
        store.add(commits[at], measured(noise(60)[at] * (1.05 if at >= 40 else 1)), software=software)
    (step,) = store.series(repo=folder).steps
    assert step.at == 40


def test_too_few_points_since_a_break_are_said(store, repository):
    folder, commits = repository
    for at in range(FIT_POINTS + 3):
        store.add(commits[at], measured(), software={"driver": "580.1" if at < FIT_POINTS else "590.2"})
    assert store.series(repo=folder).lone == 3


def test_what_one_record_does_not_tell_is_no_break(store, repository):
    folder, commits = repository
    for at, driver in enumerate(["580.1", None, "580.1", None, "590.2"]):
        store.add(commits[at], measured(), software={"driver": driver})
    assert [each.at for each in store.series(repo=folder).breaks] == [4]


def test_another_profile_is_a_break_for_who_asks_without_one(store, repository):
    folder, commits = repository
    newer = factories.h2d_case(profile="h200.9f9f")
    for at in range(4):
        store.add(commits[at], measured(case=CASE if at < 2 else newer))
    series = store.series(repo=folder)
    assert (series.case, len(series.points)) == (NAME, 4)
    assert [str(each.differences[0]) for each in series.breaks] == ["profiles: h200.1a2b vs h200.9f9f"]
    for key in (CASE.key, newer.key):
        assert store.series(key, repo=folder).breaks == []
    assert statuses(store.series(newer.key, repo=folder)) == ["ok", "ok"], (
        "it begins where it was first measured"
    )


# -- points ------------------------------------------------------------------------------------------------


def test_launches_of_one_commit_are_pooled(store, repository):
    folder, commits = repository
    for seed, scale in enumerate((1.0, 1.02, 1.3)):
        store.add(commits[0], measured(scale, seed=seed, launches=1 if seed else 2))
    (point,) = store.series(repo=folder).points
    assert (point.launches, point.records, point.status) == (4, 3, "ok")
    whole = [record.read(path).cases[0] for path in sorted(store.results.rglob("*.json"))]
    pooled = whole[0]
    pooled.launches += [launch for case in whole[1:] for launch in case.launches]
    assert point.value == metrics.derive(pooled).metrics["overlapped_ms"]


def test_what_cannot_be_compared_is_not_pooled_though_of_one_commit(store, repository):
    """Nights on one commit, and the driver was changed between two of them."""
    folder, commits = repository
    for driver in ("580.1", "580.1", "590.2"):
        store.add(commits[0], measured(), software={"driver": driver})
    series = store.series(repo=folder)
    assert [(point.commit, point.records) for point in series.points] == [(commits[0], 2), (commits[0], 1)]
    assert [each.at for each in series.breaks] == [1]


def test_a_bad_record_is_left_out_of_the_pool_and_told(store, repository):
    folder, commits = repository
    store.add(commits[0], measured())
    store.add(commits[0], measured(9.0, status="invalid", reason="thermal slowdown"))
    (point,) = store.series(repo=folder).points
    assert point.value is not None
    assert point.value.value < 6
    assert point.launches == 1
    assert point.reason == "1 of 2 records left out; invalid: thermal slowdown"
    store.add(commits[0], measured(9.0, status="invalid", reason="thermal slowdown"))
    (point,) = store.series(repo=folder).points
    assert point.reason == "2 of 3 records left out; invalid: thermal slowdown", "each reason once"


def test_gaps_have_their_reason_and_no_number(store, repository):
    folder, commits = repository
    store.add(commits[0], measured())
    store.add(commits[1], measured(status="invalid", reason="shared GPU"))
    store.add(commits[2], factories.unmeasured(CASE, "error", "the worker was killed"))
    store.add(commits[3], factories.skipped(CASE, "no room"))
    store.add(commits[4], measured(case=OTHER))
    store.add(commits[5], measured(case=OTHER), finished=False, planned=[OTHER, CASE])
    store.add(commits[6], measured(status="unsettled", reason="budget"))
    points = store.series(repo=folder).points
    assert [(point.status, point.reason) for point in points] == [
        ("ok", ""),
        ("invalid", "shared GPU"),
        ("error", "the worker was killed"),
        ("skipped", "no room"),
        (MISSING, "not among the cases of this run"),
        (MISSING, "the run did not get to it"),
        ("unsettled", "budget"),
    ]
    assert [point.value is None for point in points] == [False, *[True] * 5, False]


def test_a_case_is_missed_only_where_it_was_asked_for(store, repository):
    folder, commits = repository
    store.add(commits[0], measured(case=OTHER))
    store.add(commits[1], measured(), tier="nightly")
    store.add(commits[2], measured(case=OTHER))
    assert statuses(store.series(repo=folder)) == ["ok"], "the quick tier never had it"


def test_a_changed_tree_is_a_point_of_its_own_outside_of_the_fit(store, repository):
    folder, commits = repository
    for at in range(20):
        store.add(commits[at], measured(noise(60)[at]))
    store.add(commits[10], measured(2.0), dirty=True)
    series = store.series(repo=folder)
    (place,) = (at for at, point in enumerate(series.points) if point.dirty)
    assert place == 11, "after the commit that it was made from"
    assert not series.points[place].fitted
    assert (series.steps, series.newest) == ([], None)


def test_commits_that_git_does_not_know_stand_where_their_time_is(store, repository):
    folder, commits = repository
    store.add(commits[1], measured(), day=5)
    store.add(commits[0], measured(), day=2)
    store.add("f" * 40, measured(), day=3)
    store.add("none", measured(), day=8)
    store.add("none", measured(), day=9)
    found = store.read(repo=folder)
    assert [point.commit[:4] for point in found.series[0].points] == [
        commits[0][:4],
        "ffff",
        commits[1][:4],
        "none",
        "none",
    ]
    assert found.by_time == "the repository lacks 1 of 3 commits"


def test_without_git_time_decides(store, tmp_path):
    for at in (3, 1, 2):
        store.add(f"{at}" * 40, measured(), day=at)
    found = store.read(repo=tmp_path)
    assert [point.commit[0] for point in found.series[0].points] == ["1", "2", "3"]
    assert found.by_time == "not a git repository"


def test_a_short_hash_is_the_commit_that_it_begins(store, repository):
    folder, commits = repository
    store.add(commits[0][:9], measured())
    store.add(commits[0], measured())
    (point,) = store.series(repo=folder).points
    assert (point.commit, point.records) == (commits[0], 2)


# -- what is asked for -------------------------------------------------------------------------------------


def test_a_glob_gives_every_series_of_every_machine(store, repository):
    folder, commits = repository
    store.add(commits[0], measured(), measured(case=OTHER))
    store.add(commits[0], measured(), machine="h200-8")
    found = store.read("h2d[*stream=side*]", repo=folder)
    assert {(series.machine, series.case) for series in found.series} == {
        ("h200-1", NAME), ("h200-1", OTHER.key.replace(",profile=h200.1a2b", "")), ("h200-8", NAME),
    }  # fmt: skip
    assert store.series(machine="h200-8", repo=folder).machine == "h200-8"


@pytest.mark.parametrize("metric", ["transfer_ms", "hidden_fraction"])
def test_any_metric_has_a_history(store, repository, metric):
    folder, commits = repository
    store.add(commits[0], case := measured())
    assert store.series(metric=metric, repo=folder).points[0].value == case.metrics[metric]


def test_a_record_without_the_metric_is_a_gap(store, repository):
    folder, commits = repository
    case = measured()
    del case.metrics["host_blocked_ms"]
    store.add(commits[0], case)
    (point,) = store.series(metric="host_blocked_ms", repo=folder).points
    assert (point.status, point.reason, point.value) == (MISSING, "the record has no host_blocked_ms", None)


def test_wrong_use_is_refused(store, repository):
    folder, commits = repository
    store.add(commits[0], measured())
    with pytest.raises(UsageError, match="metric: got 'speed', want one of overlapped_ms, "):
        store.read(metric="speed", repo=folder)
    with pytest.raises(
        UsageError, match=r"case: got 'nope', which matches none of the 1 cases in .*results/records"
    ):
        store.read("nope", repo=folder)
    with pytest.raises(UsageError, match=r"machine: got '\.\./up'"):
        store.read(machine="../up", repo=folder)


def test_an_empty_store_is_an_empty_history(store, tmp_path):
    found = store.read(repo=tmp_path)
    assert (found.series, found.records) == ([], 0)


def faulty_samples(path: Path) -> None:
    """What only who reads the samples finds."""
    text = path.read_text()
    path.write_text(text.replace('"arms":{"', '"arms":{"x":-1,"', 1))


def test_a_broken_record_is_told_and_passed_over(store, repository):
    folder, commits = repository
    store.add(commits[0], measured())
    first = store.add(commits[1], measured())
    first.write_text("{")
    store.add(commits[2], measured())
    second = store.add(commits[2], measured())
    faulty_samples(second)
    found = store.read(repo=folder)
    assert [point.commit for point in found.series[0].points] == [commits[0], commits[2]]
    assert [str(path) in str(error) for path, error in zip((first, second), found.broken, strict=True)] == [
        True,
        True,
    ]
    assert found.series[0].points[1].launches == 1
