"""History by PyTorch's commits: nightlies change while this project stands still."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import factories
import json5
import numpy as np
import pytest
import repositories
from test_cli import overlap

from harness import asv_store, history, record
from harness.errors import UsageError

__all__ = ["overlap"]

ROOT = Path(__file__).parents[1]
CASE = factories.h2d_case()
OURS = "0123456789abcdef0123456789abcdef01234567"


class Nightlies:
    """A checkout of this project beside a repository that stands for PyTorch, and records of its nightlies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / ".asv" / "pytorch.git"
        self.config = folder / "benchmarks" / "asv.torch.conf.json"
        upstream = folder / "upstream"
        self.commits = repositories.make(upstream, [{"aten": str(at)} for at in range(20)])
        repositories.git(upstream, "branch", "-m", "main", "nightly")
        repositories.git(upstream, "config", "uploadpack.allowFilter", "true")
        # As the configuration says it is made.
        repositories.git(
            folder, "clone", "-q", "--bare", "--filter=tree:0", "--single-branch", "--branch", "nightly",
            upstream.as_uri(), str(self.clone),
        )  # fmt: skip
        self.config.parent.mkdir()
        for name in ("__init__.py", "bench_h2d.py", "asv.torch.conf.json"):
            (self.config.parent / name).write_text((ROOT / "benchmarks" / name).read_text())

    def add(self, at: int, scale: float = 1.0, *, ours: str = OURS, **software: str | None) -> Path:
        result = factories.h2d_result(CASE, scale=scale, rounds=8, seed=at)
        made = factories.record(result, commit=ours, time=f"2026-01-{1 + at:02}T08:00:00Z")
        made.software |= {"torch": f"2.12.0.dev202601{1 + at:02}+cu130", "cuda": "13.0"}
        made.software |= {"torch_git": self.commits[at]} | software
        path = record.record_path(self.folder / "results", made)
        record.write(path, made)
        return path

    def ingest(self, path: Path) -> asv_store.Ingested:
        return asv_store.ingest(path, config=self.config)

    def asv(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("OVERLAP_", "ASV_"))}
        return subprocess.run(
            [sys.executable, "-m", "asv", *command, "--config", str(self.config)],
            cwd=self.folder,
            env=kept | {"PYTHONPATH": str(ROOT), "HOME": str(self.folder)} | variables,
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    def series(self, **options: str) -> history.Series:
        (only,) = history.read(
            self.folder / "results", CASE.key, metric="overlapped_ms", repo=self.clone, by="torch", **options
        ).series
        return only


@pytest.fixture
def nightlies(tmp_path_factory: pytest.TempPathFactory) -> Nightlies:
    return Nightlies(tmp_path_factory.mktemp("nightlies"))


def test_the_second_configuration_follows_the_same_suite_with_the_same_thresholds() -> None:
    first = json5.loads((ROOT / "asv.conf.json").read_text())
    second = json5.loads((ROOT / "benchmarks" / "asv.torch.conf.json").read_text())
    for name in ("plugins", "launch_method", "default_benchmark_timeout", "regressions_thresholds"):
        assert second[name] == first[name], name
    there = (ROOT / "benchmarks").resolve()
    assert (there / second["benchmark_dir"]).resolve() == ROOT / first["benchmark_dir"]
    assert (there / second["results_dir"]).resolve() != ROOT / first["results_dir"]
    ignored = (ROOT / ".gitignore").read_text().split()
    for name in ("repo", "html_dir"):
        assert (there / second[name]).resolve().relative_to(ROOT).parts[0] + "/" in ignored


def test_asv_has_one_series_over_the_commits_of_torch(nightlies: Nightlies) -> None:
    for at, scale in ((3, 1.0), (5, 1.3)):
        done = nightlies.ingest(nightlies.add(at, scale))
        assert done.commit == nightlies.commits[at]
        # Without torch's version, with which each night would be a series of its own.
        assert done.file.name == f"{nightlies.commits[at][:8]}-existing-py3.12-cuda13.0.json"
        assert done.file.parent == nightlies.folder / "results" / "asv-torch" / "h200-1"
        assert json.loads(done.file.read_text())["commit_hash"] == nightlies.commits[at]
    compared = nightlies.asv("compare", nightlies.commits[3], nightlies.commits[5])
    assert re.search(r"\| \+ .*bench_h2d\.H2D\.track_overlapped_ms", compared.stdout), compared.stdout
    published = nightlies.asv("publish", "--no-pull")
    assert published.returncode == 0, published.stdout + published.stderr
    html = nightlies.folder / ".asv" / "html-torch"
    graphs = (html / "graphs").rglob("*track_overlapped_ms.json")
    (graph,) = (path for path in graphs if "branch-nightly" in path.parts and "summary" not in path.parts)
    assert len(json.loads(graph.read_text())) == 2, "two points of one line"


def test_a_record_is_filed_under_its_own_torch_alone(nightlies: Nightlies) -> None:
    path = nightlies.add(3)
    asked = ("run", "--python=same", "--set-commit-hash", nightlies.commits[4])
    ran = nightlies.asv(*asked, OVERLAP_RECORD=str(path))
    assert ran.returncode == 1
    want = f"measured with torch at commit {nightlies.commits[3]}, asv was given {nightlies.commits[4]}"
    assert want in ran.stdout + ran.stderr


def test_what_cannot_be_filed_is_refused(nightlies: Nightlies) -> None:
    for path, words in (
        (
            nightlies.add(1, torch_git=None),
            "commit: the record does not tell the commit that its torch was built from",
        ),
        (
            nightlies.add(2, torch_git="f" * 40),
            "of the record is not in the repository of asv.torch.conf.json",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            nightlies.ingest(path)
    nightlies.clone.rename(nightlies.folder / "elsewhere")
    with pytest.raises(
        UsageError, match=r"names \.\./\.asv/pytorch\.git, which is not there; clone PyTorch to it"
    ):
        nightlies.ingest(nightlies.add(3))


def test_history_names_the_commit_of_torch(nightlies: Nightlies) -> None:
    scales = 1 + 0.003 * np.random.default_rng(0).standard_normal(20)
    scales[12:] *= 1.05
    for at in range(20):
        nightlies.add(at, scales[at])
    series = nightlies.series()
    assert [point.commit for point in series.points] == nightlies.commits
    assert series.breaks == [], "another torch is what the axis is of"
    assert [series.points[step.at].commit for step in series.steps] == [nightlies.commits[12]]


def test_whatever_else_changes_between_nightlies_is_a_break(nightlies: Nightlies) -> None:
    nightlies.add(0)
    nightlies.add(1, ours="fedcba98" * 5)
    nightlies.add(2, ours="fedcba98" * 5, cuda="13.1")
    found = [str(difference) for each in nightlies.series().breaks for difference in each.differences]
    assert found == ["commit: 01234567 vs fedcba98", "cuda: 13.0 vs 13.1"]


def test_the_command_line_takes_the_second_configuration(nightlies: Nightlies, overlap) -> None:
    overlap.folder.joinpath("x.json").write_bytes(nightlies.add(3).read_bytes())
    assert "config: no benchmarks/asv.torch.conf.json" in overlap.refuses("ingest", "--by", "torch", "x.json")
    for at in (3, 4):
        nightlies.add(at)
    asked = ("--by", "torch", "--repo", str(nightlies.clone), "--results", str(nightlies.folder / "results"))
    told = json.loads(overlap("history", CASE.key, "--json", *asked).out)
    assert [point["commit"] for point in told["series"][0]["points"]] == nightlies.commits[3:5]
    assert told["order"] == "git"
