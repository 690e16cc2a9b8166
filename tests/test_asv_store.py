"""Records into asv, with asv itself: every test that runs it does so in a small git repository of its own."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import factories
import pytest

from harness import asv_store, record, source
from harness.errors import MeasurementError, OverlapError, UsageError

ROOT = Path(__file__).parents[1]
MACHINE = "h200-1"


@pytest.fixture
def own_suite(project: "Project", monkeypatch: pytest.MonkeyPatch) -> Path:
    """The suite that asv's readers get, in the project's own copy of the package."""
    monkeypatch.setattr(source, "package_root", lambda: project.root)
    return project.root / "harness" / "asv_suite.py"


def rows(*results: record.CaseResult, **options: int) -> dict[str, dict]:
    return asv_store.rows(factories.record(*results), **options)


# -- what asv is given -------------------------------------------------------------------------------------


def test_the_median_of_a_launchs_samples_is_its_value_of_every_metric() -> None:
    case = factories.h2d_result(factories.h2d_case(), rounds=40, noise=0.02, seed=3)
    given = rows(case)[case.key]["samples"]
    assert set(given) == {name for name, unit in asv_store.tracked().items()}
    for name, samples in given.items():
        assert statistics.median(samples) == pytest.approx(case.metrics[name].value, rel=1e-5), name
        assert len(samples) == asv_store.SAMPLES_PER_LAUNCH
        assert max(samples) > min(samples), "a ratio too has the scatter of its numerator"


@pytest.mark.parametrize("rounds", [1, 2, 20, 22, 333])
def test_samples_are_few_and_odd_and_use_every_round(rounds: int) -> None:
    case = factories.h2d_result(factories.h2d_case(), rounds=rounds)
    samples = rows(case)[case.key]["samples"]["overlapped_ms"]
    assert len(samples) % 2 == 1
    assert len(samples) <= min(rounds, asv_store.SAMPLES_PER_LAUNCH)
    assert sum(len(block) for block in asv_store._blocks(list(range(rounds)))) == rounds


def test_launches_are_pooled_or_picked() -> None:
    case = factories.h2d_result(factories.h2d_case(), launches=3)
    pooled = rows(case)[case.key]["samples"]["transfer_ms"]
    picked = [rows(case, launch=index)[case.key]["samples"]["transfer_ms"] for index in range(3)]
    assert [sample for each in picked for sample in each] == pooled
    assert len(pooled) == 3 * 19
    with pytest.raises(UsageError, match="launch: got 3, want one of 0, 1, 2"):
        rows(case, launch=3)


@pytest.mark.parametrize("status", ["skipped", "invalid", "error"])
def test_a_case_without_numbers_has_its_reason_and_no_samples(status: str) -> None:
    case = factories.h2d_result(factories.h2d_case(), status=status, reason="thermal slowdown")
    assert rows(case)[case.key] == {"status": status, "reason": "thermal slowdown", "samples": None}


def test_asv_is_given_times_of_one_batch() -> None:
    """So that a profile with other repeats is no step, and sizes can be compared."""
    case = factories.h2d_case()
    one = rows(factories.h2d_result(case, noise=0.0))[case.key]["samples"]
    four = rows(factories.h2d_result(case, noise=0.0, repeats=4))[case.key]["samples"]
    for name in ("transfer_ms", "compute_ms", "host_blocked_ms"):
        assert four[name] == pytest.approx(one[name])
    # The ends of the pipeline are shared by four batches.
    assert four["overlapped_ms"] < one["overlapped_ms"]
    assert four["overlapped_ms"] == pytest.approx(one["overlapped_ms"], rel=0.15)


def test_an_unsettled_case_counts() -> None:
    case = factories.h2d_result(factories.h2d_case(), status="unsettled", reason="budget")
    assert rows(case)[case.key]["samples"]["overlapped_ms"]


# -- asv itself --------------------------------------------------------------------------------------------


@dataclass
class Project:
    """A clone with this project's suite and configuration, and two commits."""

    root: Path
    commits: list[str]

    def git(self, *command: str) -> str:
        ran = subprocess.run(["git", *command], cwd=self.root, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    def asv(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run asv as a person would, without a home folder it could write to."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAP_", "ASV_"))}
        return subprocess.run(
            [sys.executable, "-m", "asv", *command],
            cwd=self.root,
            env=inherited | {"PYTHONPATH": str(ROOT), "HOME": str(self.root / "no-home")} | env,
            capture_output=True,
            text=True,
            check=False,
        )

    def record(self, *results: record.CaseResult, **options: object) -> Path:
        path = self.root / "records" / f"{len(list(self.root.glob('records/*')))}.json"
        options = {"machine": MACHINE, "commit": self.commits[0], **options}
        record.write(path, factories.record(*results, **options))  # type: ignore[arg-type]
        return path

    def ingest(self, path: Path, **options: bool) -> asv_store.Ingested:
        return asv_store.ingest(path, config=self.root / "asv.conf.json", **options)

    @property
    def store(self) -> Path:
        return self.root / "results" / "asv"

    def values(self, metric: str, file: Path) -> dict[str, float | None]:
        """asv's numbers of one metric by case; not-a-number is n/a and None is failed."""
        found = json.loads(file.read_text())
        entry = dict(
            zip(found["result_columns"], found["results"][f"bench_h2d.H2D.track_{metric}"], strict=False)
        )
        keys = [text.strip("'") for text in entry["params"][0]]
        return dict(zip(keys, entry["result"] or [None] * len(keys), strict=True))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("project")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("benchmarks", "harness"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
    for file in ("asv.conf.json", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, root / file)
    project = Project(root, [])
    project.git("init", "-q", "-b", "main")
    project.git("config", "user.email", "nobody@example.invalid")
    project.git("config", "user.name", "nobody")
    for message in ("first", "second"):
        (root / "note.txt").write_text(message)
        project.git("add", "benchmarks", "harness", "note.txt", "pyproject.toml", "asv.conf.json")
        project.git("commit", "-qm", message)
        project.commits.append(project.git("rev-parse", "HEAD"))
    return project


@pytest.fixture
def project(template: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in [name for name in os.environ if name.startswith(("OVERLAP_", "ASV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))
    root = tmp_path / "project"
    shutil.copytree(template.root, root)
    return Project(root, template.commits)


CASES = (factories.h2d_case(chunks=1), factories.h2d_case(chunks=8))


def measured(**options: object) -> list[record.CaseResult]:
    return [factories.h2d_result(case, **options) for case in CASES]  # type: ignore[arg-type]


def everything(store: Path) -> str:
    """All that asv wrote, file names too."""
    files = [file for file in store.rglob("*") if file.is_file()]
    return "\n".join(f"{file.relative_to(store)}\n{file.read_text()}" for file in files)


def test_every_number_is_stored_and_no_path_is(project: Project) -> None:
    path = project.record(*measured(), factories.skipped(factories.h2d_case(memory="pageable")))
    done = project.ingest(path)
    assert (done.cases, done.values) == (2, 2 * len(asv_store.tracked()))
    assert done.file == project.store / MACHINE / f"{project.commits[0][:8]}-existing-py3.12-torch2.11.0.json"
    assert "OVERLAP_RECORD=" in str(done)
    assert f"--set-commit-hash {project.commits[0]}" in str(done)
    made = record.read(path)
    for metric in asv_store.tracked():
        for key, value in project.values(metric, done.file).items():
            if "memory=pageable" in key:
                assert value is not None
                assert math.isnan(value), "a skipped case is n/a, not failed"
            else:
                assert value == pytest.approx(made.case(key).metrics[metric].value, rel=1e-5)
    written = everything(project.store)
    for folder in (project.root, ROOT, Path(sys.executable).parent, Path(sys.prefix)):
        assert str(folder) not in written
        assert str(folder).replace("/", "_").strip("_") not in written


def test_the_machine_and_the_software_are_the_records(project: Project) -> None:
    done = project.ingest(project.record(*measured()))
    described = json.loads((project.store / MACHINE / "machine.json").read_text())
    assert described["machine"] == MACHINE
    assert described["gpu"] == "NVIDIA H200"
    assert (described["cpu"], described["num_cpu"]) == ("a CPU", "16")
    stored = json.loads(done.file.read_text())
    assert stored["python"] == stored["params"]["python"] == "3.12"
    assert stored["requirements"] == {"torch": "2.11.0"}
    assert not (project.root.parent / "no-home").exists(), "asv's file in the home folder is left alone"


def test_the_users_words_for_a_machine_win_and_their_file_is_not_written(project: Project) -> None:
    home = project.root / "home"
    home.mkdir()
    mine = json.dumps({MACHINE: {"machine": MACHINE, "cpu": "my words"}, "version": 1})
    (home / ".asv-machine.json").write_text(mine)
    commit = project.commits[0]
    path = project.record(*measured()).relative_to(project.root)
    given = {"OVERLAP_RECORD": str(path), "HOME": str(home)}
    ran = project.asv("run", "--python=same", "--set-commit-hash", commit, "-m", MACHINE, **given)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    described = json.loads((project.store / MACHINE / "machine.json").read_text())
    assert (described["cpu"], described["gpu"]) == ("my words", "NVIDIA H200")
    assert (home / ".asv-machine.json").read_text() == mine


def test_a_further_record_is_appended_and_a_plain_one_replaces(project: Project) -> None:
    first, second = project.record(*measured(seed=1)), project.record(*measured(seed=2))

    def samples(done: asv_store.Ingested) -> list[float]:
        found = json.loads(done.file.read_text())
        entry = found["results"]["bench_h2d.H2D.track_overlapped_ms"]
        return dict(zip(found["result_columns"], entry, strict=False))["samples"][0]

    one = samples(project.ingest(first))
    both = samples(project.ingest(second, append=True))
    assert both[: len(one)] == one
    assert len(both) == 2 * len(one)
    assert samples(project.ingest(second)) == both[len(one) :]


def assert_refused_and_unchanged(project: Project, path: Path, match: str) -> None:
    """Appending is refused in one line, and asv's store stays as it was."""
    before = everything(project.store)
    with pytest.raises(UsageError, match=match) as refused:
        project.ingest(path, append=True)
    assert "\n" not in str(refused.value)
    assert everything(project.store) == before


def plain(project: Project, path: Path) -> None:
    """File a record as `asv run` does by itself, without samples."""
    asked = ("run", "--python=same", "--set-commit-hash", project.commits[0], "-m", MACHINE)
    ran = project.asv(*asked, OVERLAP_RECORD=str(path))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_numbers_without_samples_are_not_replaced_by_appending(project: Project) -> None:
    first, second = project.record(*measured(seed=1)), project.record(*measured(seed=2))
    plain(project, first)
    assert_refused_and_unchanged(
        project, second, "append: asv holds no samples of h2d.*: overlap ingest RECORD"
    )
    project.ingest(first)
    project.ingest(second, append=True)


def test_nothing_to_append_to_is_refused(project: Project) -> None:
    first, second = project.record(*measured(seed=1)), project.record(*measured(seed=2))
    match = "append: asv holds no numbers of its cases; .*: overlap ingest RECORD"
    assert_refused_and_unchanged(project, first, match)
    project.ingest(first)
    other = record.read(second)
    other.software["torch"] = "2.12.0"
    record.write(second, other)
    assert_refused_and_unchanged(project, second, match)
    cases = [factories.h2d_result(factories.h2d_case(chunks=64), seed=2)]
    assert_refused_and_unchanged(project, project.record(*cases), match)


def test_samples_of_another_method_are_not_replaced_by_appending(project: Project) -> None:
    file = project.ingest(project.record(*measured(seed=1))).file
    found = json.loads(file.read_text())
    at = found["result_columns"].index("version")
    for cells in found["results"].values():
        cells[at] = "method-0"
    file.write_text(json.dumps(found))
    assert_refused_and_unchanged(
        project, project.record(*measured(seed=2)), "append: asv holds no samples of h2d"
    )


def test_a_case_that_failed_in_the_first_record_gets_its_samples_from_the_second(project: Project) -> None:
    good = factories.h2d_result(CASES[0], seed=1)
    bad = factories.h2d_result(CASES[1], status="invalid", reason="thermal slowdown")
    project.ingest(project.record(good, bad))
    done = project.ingest(project.record(*measured(seed=2)), append=True)
    assert done.cases == 2


def test_no_launch_is_appended_twice(project: Project) -> None:
    first, second = project.record(*measured(seed=1)), project.record(*measured(seed=2))
    project.ingest(first)
    assert_refused_and_unchanged(
        project, first, "append: asv holds the samples of launch 0 of .* already .*append each record once"
    )
    project.ingest(second, append=True)
    for path in (first, second):
        assert_refused_and_unchanged(project, path, "append: asv holds the samples of launch 0")
    # The same launch within a record of more of them.
    whole = record.read(project.record(*measured(seed=3, launches=2)))
    for case, held in zip(whole.cases, record.read(second).cases, strict=True):
        case.launches[1].ranks = held.launches[0].ranks
    path = project.record()
    record.write(path, whole)
    assert_refused_and_unchanged(project, path, "append: asv holds the samples of launch 1 of")


def test_a_run_of_samples_is_found_anywhere_and_whole_only() -> None:
    held = asv_store._is_run_in
    assert all(held(run, [1.0, 2.0, 3.0]) for run in ([1.0], [2.0, 3.0], [1.0, 2.0, 3.0]))
    assert not any(held(run, [1.0, 2.0, 3.0]) for run in ([1.0, 3.0], [3.0, 2.0], [1.0, 2.0, 3.0, 4.0]))
    assert not held([1.0], [])


def test_a_bad_case_is_a_failure_of_its_own(project: Project) -> None:
    bad = factories.h2d_result(factories.h2d_case(chunks=4), status="invalid", reason="thermal slowdown")
    path = project.record(*measured(), bad)
    done = project.ingest(path)
    assert done.cases == 2
    assert project.values("overlapped_ms", done.file)[bad.key] is None
    ran = project.asv(*done.command[3:], "--show-stderr", **done.environment)
    assert ran.returncode == 2
    assert f"{bad.key}: invalid: thermal slowdown" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr


def test_show_compare_and_publish_work_on_it(project: Project) -> None:
    base, head = project.commits
    project.ingest(project.record(*measured(), commit=base))
    project.ingest(project.record(*measured(scale=1.3), commit=head))
    shown = project.asv("show", head)
    assert "bench_h2d.H2D.track_bound_ratio [h200-1/existing-py3.12-torch2.11.0]" in shown.stdout
    compared = project.asv("compare", base, head)
    worse = [line for line in compared.stdout.splitlines() if "| +" in line]
    assert sum("track_overlapped_ms" in line for line in worse) == len(CASES), compared.stdout
    assert not any("track_bound_ratio" in line for line in worse), "everything is slower alike"
    published = project.asv("publish")
    assert published.returncode == 0, published.stdout + published.stderr
    graphs = list((project.root / ".asv" / "html" / "graphs").rglob("*track_overlapped_ms.json"))
    assert graphs
    assert any("gpu-NVIDIA H200" in str(graph) for graph in graphs)


def test_a_store_of_several_machines_keeps_every_series(project: Project) -> None:
    ours = project.ingest(project.record(*measured()))
    theirs = [factories.h2d_result(factories.h2d_case(memory="pageable", profile="cpu.aaaa"))]
    other = project.ingest(project.record(*theirs, machine="cpu-2", device="cpu"))
    listed = json.loads((project.store / "benchmarks.json").read_text())["bench_h2d.H2D.track_overlapped_ms"]
    assert listed["params"] == [[repr(case.key) for case in (*CASES, *theirs)]]
    assert set(project.values("overlapped_ms", ours.file)) == {case.key for case in CASES}
    numbers = project.values("overlapped_ms", other.file)
    assert all(math.isnan(numbers[case.key]) for case in CASES), "a GPU's case is n/a here, not failed"


@pytest.mark.parametrize(
    "edit",
    [
        ("# asv shares", "# Reworded: asv shares"),
        ('"""Before each reader', '"""Another text; before each reader'),
        ("def setup_cache(self", "# New.\n    def setup_cache(self"),
    ],
    ids=["comment", "docstring", "lines"],
)
def test_editing_the_suite_does_not_cut_the_history(
    project: Project, own_suite: Path, edit: tuple[str, str]
) -> None:
    old, new = edit
    base, head = project.commits
    project.ingest(project.record(*measured(), commit=base))
    assert old in own_suite.read_text()
    own_suite.write_text(own_suite.read_text().replace(old, new))
    project.ingest(project.record(*measured(), commit=head))
    compared = project.asv("compare", base, head)
    assert compared.returncode == 0
    lines = [line for line in compared.stdout.splitlines() if "track_overlapped_ms" in line]
    assert len(lines) == len(CASES)
    # asv marks a benchmark whose version changed by an x, and shows no ratio for it.
    assert not any(line.startswith("| x") or "n/a" in line for line in lines), compared.stdout


def test_a_reader_gets_its_case_where_its_commit_lists_others_first(
    project: Project, own_suite: Path
) -> None:
    # asv tells a reader the index of a case in the list that it made when it looked for benchmarks.
    listed = "return list(dict.fromkeys([*_listed(_store()"
    elsewhere = """if "discover" not in sys.argv:
        return list(_new_cases(suite))[::-1]
    """
    assert listed in own_suite.read_text()
    own_suite.write_text(own_suite.read_text().replace(listed, elsewhere + listed))
    path = project.record(*measured())
    numbers = project.values("overlapped_ms", project.ingest(path).file)
    for case in record.read(path).cases:
        assert numbers[case.key] == pytest.approx(case.metrics["overlapped_ms"].value, rel=1e-5)


def test_a_reader_costs_asv_less_than_50_ms(project: Project) -> None:
    cases = [factories.h2d_result(factories.h2d_case(chunks=n)) for n in (1, 2, 4, 8, 16, 32, 64)]
    done = project.ingest(project.record(*cases))
    found = json.loads(done.file.read_text())
    at = found["result_columns"].index("duration")
    seconds = sum(entry[at] for entry in found["results"].values())
    assert seconds / (len(cases) * len(asv_store.tracked())) < 0.05


def refused(project: Project, path: Path, error: type[OverlapError], match: str, **options: bool) -> None:
    with pytest.raises(error, match=match):
        project.ingest(path, **options)
    assert not project.store.exists()


def test_a_record_that_asv_cannot_file_is_refused_and_nothing_written(project: Project) -> None:
    refused(project, project.record(*measured(), commit="none"), UsageError, "commit: the record names none")
    refused(project, project.record(*measured(), dirty=True), UsageError, "commit: .* uncommitted changes")
    refused(
        project, project.record(*measured(), commit="f" * 40), UsageError, "f{40} of the record is not in"
    )
    killed = project.record(*measured())
    half = record.read(killed)
    half.run.finished = False
    record.write(killed, half)
    refused(project, killed, UsageError, "overlap run --resume")
    skipped = project.record(factories.skipped(CASES[0]))
    refused(project, skipped, UsageError, "no measured case")
    with pytest.raises(UsageError, match="config: no "):
        asv_store.ingest(project.record(*measured()), config=project.root / "other.json")


def test_a_dirty_record_can_be_accepted(project: Project) -> None:
    assert project.ingest(project.record(*measured(), dirty=True), accept_dirty=True).cases == 2


def test_a_short_commit_is_filed_under_its_full_hash(project: Project) -> None:
    done = project.ingest(project.record(*measured(), commit=project.commits[0][:7]))
    assert json.loads(done.file.read_text())["commit_hash"] == project.commits[0]


def test_what_asv_did_not_store_is_an_error(project: Project, own_suite: Path) -> None:
    own_suite.write_text(own_suite.read_text().replace('    "bound_ratio": "ratio",\n', ""))
    with pytest.raises(MeasurementError, match="stored 10 of 12 numbers; first missing: bound_ratio of h2d"):
        project.ingest(project.record(*measured()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            ["--python=same", "--set-commit-hash", "main", "-m", MACHINE],
            "measured at commit .*, asv was given",
        ),
        (["--python=same", "--set-commit-hash", "main~1", "-m", "other"], "measured on machine 'h200-1'"),
        (["--python=same", "--set-commit-hash", "nothing"], "no commit 'nothing'"),
        (["--python=same"], "asv then needs --python=same and --set-commit-hash="),
        (["NEW"], "asv then needs --python=same and --set-commit-hash="),
    ],
    ids=["commit", "machine", "name", "unsaved", "own environment"],
)
def test_asv_refuses_to_misfile_a_record(project: Project, options: list[str], match: str) -> None:
    path = project.record(*measured())
    ran = project.asv("run", *options, OVERLAP_RECORD=str(path.relative_to(project.root)))
    assert ran.returncode == 1
    assert re.search(match, ran.stdout + ran.stderr), ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
    assert not list(project.store.glob("*/*-existing*"))


def test_asv_refuses_what_is_no_record(project: Project) -> None:
    (project.root / "broken.json").write_text("{")
    for name, match in (("broken.json", "is not a record"), ("none.json", "cannot read")):
        ran = project.asv("run", "--python=same", "--set-commit-hash", "HEAD", OVERLAP_RECORD=name)
        assert ran.returncode == 1
        assert match in ran.stdout + ran.stderr
        assert "Traceback" not in ran.stdout + ran.stderr


def test_measuring_a_changed_tree_as_a_commit_is_refused(project: Project) -> None:
    file = project.root / "harness" / "case.py"
    file.write_text(file.read_text() + "\n# changed\n")
    ran = project.asv("run", "--python=same", "--set-commit-hash", "HEAD")
    assert ran.returncode == 1
    assert "the working tree differs from" in ran.stdout + ran.stderr
    assert "harness/case.py" in ran.stdout + ran.stderr
