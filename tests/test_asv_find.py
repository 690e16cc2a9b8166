"""`asv find` on the suite: its search by halves comes to the commit that `overlap history` names."""

import os
import subprocess
import sys
from pathlib import Path

import factories
import numpy as np
import repositories

from harness import history, record

ROOT = Path(__file__).parents[1]
CASE = factories.h2d_case()
FILES = ("asv.conf.json", "benchmarks/__init__.py", "benchmarks/bench_h2d.py")

# Checking out a commit brings its record, which stands for measuring it.
CHECKOUT = """
import os
from asv.environment import ExistingEnvironment
def install_project(self, conf, repo, commit_hash):
    os.environ["ASV_COMMIT"] = commit_hash
    os.environ["OVERLAP_RECORD"] = os.path.join(os.environ["RECORDS"], commit_hash + ".json")
ExistingEnvironment.install_project = install_project
"""


def test_it_comes_to_the_commit_that_history_names(tmp_path: Path) -> None:
    project = tmp_path / "project"
    files = {name: (ROOT / name).read_text() for name in FILES}
    plugin = '"plugins": [".checkout", '
    files["asv.conf.json"] = files["asv.conf.json"].replace('"plugins": [', plugin)
    files["checkout.py"] = CHECKOUT
    assert plugin in files["asv.conf.json"]
    commits = repositories.make(project, [files, *({"note": str(at)} for at in range(1, 60))])
    records = tmp_path / "results" / "records" / "h200-1"
    scales = 1 + 0.003 * np.random.default_rng(3).standard_normal(60)
    scales[40:] *= 1.05
    for at, commit in enumerate(commits):
        result = factories.h2d_result(CASE, scale=scales[at], rounds=8)
        time = f"2026-{1 + at // 28:02}-{1 + at % 28:02}T08:00:00Z"
        record.write(records / f"{commit}.json", factories.record(result, commit=commit, time=time))
    (series,) = history.read(tmp_path / "results", CASE.key, metric="overlapped_ms", repo=project).series
    assert [series.points[step.at].commit for step in series.steps] == [commits[40]]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("OVERLAP_", "ASV_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "asv", "find", f"{commits[0]}..{commits[-1]}", "--python=same", "--skip-save",
         "bench_h2d.H2D.track_overlapped_ms"],
        cwd=project,
        env=inherited
        | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "RECORDS": str(records),
           "OVERLAP_RECORD": str(records / f"{commits[0]}.json")},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert f"Greatest regression found: {commits[40][:8]}" in ran.stdout, ran.stdout + ran.stderr
