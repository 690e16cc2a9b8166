"""The suite in somebody else's repository, with commits of its own: one file of three lines, one line in asv's
configuration."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import factories
import pytest
import repositories

from harness import asv_plugin, asv_store, asv_suite, history, record, source

ROOT = Path(__file__).parents[1]
CASES = (factories.h2d_case(chunks=1), factories.h2d_case(chunks=8))

# As the README shows them.
CONF = """{
    "version": 1,
    "project": "theirs",
    "repo": ".",
    "branches": ["HEAD"],
    "environment_type": "existing",
    "pythons": ["same"],
    "results_dir": "results/asv",
    "html_dir": ".asv/html",
    "plugins": [".harness.asv_plugin"],
    "launch_method": "forkserver"
}
"""
BENCH = '''"""Do copies and compute still overlap on this stack?"""

from harness.asv_suite import *  # noqa: F403
'''


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("theirs")
    first = {
        "asv.conf.json": CONF,
        "benchmarks/__init__.py": "",
        "benchmarks/bench_overlap.py": BENCH,
        "model.py": "",
    }
    return folder, repositories.make(folder, [first, {"model.py": "x = 1\n"}, {"model.py": "x = 2\n"}])


def asv(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OVERLAP_", "ASV_"))}
    return subprocess.run(
        [sys.executable, "-m", "asv", *command],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "HOME": str(folder / "no-home")} | variables,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_readme_shows_these_files() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "from harness.asv_suite import *  # noqa: F403" in readme
    for line in CONF.splitlines()[-3:-1]:
        assert line.strip() in readme


def test_numbers_are_filed_under_the_commits_of_that_repository(theirs, tmp_path: Path) -> None:
    folder, commits = theirs
    checked = asv(folder, "check", "--python=same", OVERLAP_DEVICE="cpu")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for at, scale in ((0, 1.0), (2, 1.3)):
        results = [factories.h2d_result(case, scale=scale, seed=at) for case in CASES]
        made = factories.record(*results, commit=commits[at], time=f"2026-01-0{at + 1}T08:00:00Z")
        path = record.record_path(folder / "results", made)
        record.write(path, made)
        done = asv_store.ingest(path, config=folder / "asv.conf.json")
        assert done.values == 2 * len(asv_suite.TRACKED)
    stored = json.loads((folder / "results" / "asv" / "benchmarks.json").read_text())
    ours = [name for name in stored if name != "version"]
    assert sorted(ours) == sorted(f"bench_overlap.H2D.track_{metric}" for metric in asv_suite.TRACKED)
    compared = asv(folder, "compare", commits[0], commits[2])
    worse = [line for line in compared.stdout.splitlines() if "| +" in line and "track_overlapped_ms" in line]
    assert len(worse) == len(CASES), compared.stdout + compared.stderr
    (series,) = history.read(folder / "results", CASES[0].key, metric="overlapped_ms", repo=folder).series
    assert [point.commit for point in series.points] == [commits[0], commits[2]]


def test_a_changed_tree_of_that_repository_is_not_measured_as_a_commit(theirs) -> None:
    folder, commits = theirs
    (folder / "model.py").write_text("x = 3\n")
    try:
        ran = asv(folder, "run", "--python=same", "--set-commit-hash", commits[-1], OVERLAP_DEVICE="cpu")
    finally:
        repositories.git(folder, "checkout", "-q", "model.py")
    assert ran.returncode == 1
    assert re.search(r"the working tree differs from \w{8} in model\.py, so", ran.stdout + ran.stderr)


def test_what_is_measured_there_is_of_that_repositorys_commit(
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However this program itself came to be there: as a checkout with commits of its own, or installed."""
    folder, commits = theirs
    own = source.Checkout("f" * 40, True)
    whole = source.checkout

    def checkout(start: Path | None = None, **options: Path) -> source.Checkout:
        return own if start is None else whole(start, **options)

    monkeypatch.setattr(source, "checkout", checkout)
    monkeypatch.setenv("OVERLAP_ASV_REPO", str(folder))
    assert asv_suite._tree() == (source.Checkout(commits[-1], False), folder)
    own = source.Checkout("none", None, "not a git repository")
    assert asv_suite._tree() == (own, None), "asv's word stands"
    own = source.Checkout("e" * 40, False)
    monkeypatch.setattr(source, "package_root", lambda: folder)
    assert asv_suite._tree() == (own, None), "this project's own"


def test_paths_are_those_of_the_folder_that_asv_was_started_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"OVERLAP_RECORD": "a/b.json", "OVERLAP_RESULTS": "results", "OVERLAP_TIER": "quick"}
    asv_plugin.make_absolute(variables)
    assert variables == {
        "OVERLAP_RECORD": f"{tmp_path}/a/b.json", "OVERLAP_RESULTS": f"{tmp_path}/results", "OVERLAP_TIER": "quick",
    }  # fmt: skip
    asv_plugin.make_absolute(empty := {})
    assert empty == {}
