"""The asv suite without asv: its cases, its one measurement, its readers, and the configuration beside it."""

import contextlib
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import factories
import json5
import pytest
from factories_ddp import Machine, ddp_case, ddp_record, ddp_result
from factories_feed import feed_record, feed_result

from harness import METHOD_VERSION, asv_store, asv_suite, record, source, suites
from harness.errors import OverlapError
from harness.profiles import packaged

ROOT = Path(__file__).parents[1]
NAME = "bench_h2d.H2D"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# What `python -m harness run` is to the suite: an interpreter that ignores its arguments but --results.
STAND_IN = """#!{python}
import json, os, pathlib, subprocess, sys, time
arguments = sys.argv[1:]
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps([arguments, os.getcwd()]))
print("this is the log")
if child := os.environ.get("LEAVE_CHILD"):
    started = subprocess.Popen(["sleep", "60"])
    pathlib.Path(child).write_text(str(started.pid))
time.sleep(float(os.environ.get("SLEEP", "0")))
if source := os.environ.get("RECORD"):
    folder = pathlib.Path(arguments[arguments.index("--results") + 1], "records", "h200-1")
    folder.mkdir(parents=True)
    (folder / "20261130T080000Z-01234567.json").write_bytes(pathlib.Path(source).read_bytes())
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    for name in [name for name in os.environ if name.startswith(("OVERLAP_", "ASV"))]:
        monkeypatch.delenv(name)
    # As in asv's own environments, git has no answer there.
    monkeypatch.setattr(source, "package_root", lambda: tmp_path)
    monkeypatch.setenv("OVERLAP_ASV_RESULTS", str(tmp_path / "store"))
    monkeypatch.setenv("OVERLAP_DEVICE", "cpu")
    monkeypatch.syspath_prepend(ROOT)
    return asv_suite


@pytest.fixture
def stand_in(common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces the interpreter that `measure` starts; returns the file that tells how it was called."""
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(common.sys, "executable", str(script))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    made = tmp_path / "record.json"
    record.write(made, factories.record(*RESULTS))
    monkeypatch.setenv("RECORD", str(made))
    monkeypatch.setenv("OVERLAP_ASV_CASES", _list(tmp_path / "cases.json", [case.key for case in RESULTS]))
    return tmp_path / "seen.json"


RESULTS = [
    factories.h2d_result(factories.h2d_case()),
    factories.h2d_result(factories.h2d_case(chunks=4), status="unsettled", reason="budget"),
    factories.skipped(factories.h2d_case(chunks=2), "no pinned memory"),
    factories.h2d_result(factories.h2d_case(chunks=16), status="invalid", reason="thermal slowdown"),
]


def _list(path: Path, keys: list[str], version: str = f"method-{METHOD_VERSION}") -> str:
    """A list of benchmarks as asv writes it."""
    path.parent.mkdir(exist_ok=True)
    entry = {"params": [[repr(key) for key in keys]], "param_names": ["case"], "version": version}
    path.write_text(json.dumps({f"{NAME}.track_overlapped_ms": entry, "version": 2}))
    return str(path)


def _measured(common: ModuleType, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return common.measure("h2d", folder)


# -- the suite ---------------------------------------------------------------------------------------------


def test_the_metrics_are_those_that_asv_is_to_follow(common: ModuleType) -> None:
    assert asv_store.tracked() == common.TRACKED


def test_the_class_is_as_asv_needs_it(common: ModuleType) -> None:
    from benchmarks.bench_h2d import H2D

    assert {name for name in vars(H2D) if name.startswith("track_")} == {f"track_{m}" for m in common.TRACKED}
    for metric, unit in common.TRACKED.items():
        assert getattr(H2D, f"track_{metric}").unit == unit
    assert "setup_cache" in vars(H2D), "asv runs an inherited setup_cache once for all classes"
    assert H2D.setup_cache.timeout > common.TIMEOUT
    assert H2D.version == f"method-{METHOD_VERSION}"


def test_importing_the_suite_imports_no_torch_no_numpy_and_touches_no_cuda() -> None:
    code = (
        "import sys, benchmarks.bench_h2d as suite\n"
        "assert suite.H2D().params\n"
        "print(*sorted({'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_the_tests_beside_the_suite_can_be_imported_without_pytest() -> None:
    """asv imports all of benchmarks/, where there may be no pytest, and of old commits no module they use."""
    code = (
        "import sys\nsys.modules['pytest'] = sys.modules['harness'] = None\n"
        "import benchmarks.conftest, benchmarks.test_overlap"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# -- which cases -------------------------------------------------------------------------------------------


def test_cases_are_those_of_the_suite(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [case.key for case in suites.select(["h2d"], "quick", packaged()["cpu"])]
    assert common.cases("h2d") == quick
    monkeypatch.setenv("OVERLAP_TIER", "nightly")
    assert set(common.cases("h2d")) > set(quick)


def test_cases_are_those_of_the_record(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.write(tmp_path / "record.json", factories.record(*RESULTS))
    monkeypatch.setenv("OVERLAP_RECORD", str(tmp_path / "record.json"))
    assert common.cases("h2d") == [case.key for case in RESULTS]


def test_cases_in_the_store_stay_and_keep_their_place(common: ModuleType, tmp_path: Path) -> None:
    new = common.cases("h2d")
    _list(tmp_path / "store" / "benchmarks.json", ["h2d[of=another]", new[2]])
    assert common.cases("h2d") == ["h2d[of=another]", new[2], *(key for key in new if key != new[2])]


def test_while_asv_runs_the_list_is_the_one_that_it_numbered(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = common.cases("h2d")
    monkeypatch.setenv("OVERLAP_ASV_CASES", _list(tmp_path / "cases.json", new[3:1:-1]))
    assert common.cases("h2d") == new[3:1:-1]


# -- measuring ---------------------------------------------------------------------------------------------


def test_one_run_in_a_folder_of_its_own_serves_every_reader(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TIER", "nightly"), ("LAUNCHES", "3"), ("RESULTS", str(tmp_path / "kept"))):
        monkeypatch.setenv(f"OVERLAP_{name}", value)
    monkeypatch.setenv("ASV_COMMIT", COMMIT)
    folder = tmp_path / "asv"
    cache = _measured(common, folder)
    arguments, where = json.loads(stand_in.read_text())
    assert " ".join(arguments) == (
        f"-m harness run --suite h2d --tier nightly --results {folder}/results --json --device cpu "
        f"--launches 3 --commit {COMMIT}"
    )
    # From the root of the tree, `-m harness` would be the tree's and not the commit's.
    assert where == str(folder)
    assert set(cache) == {case.key for case in RESULTS}
    assert len(json.dumps(cache)) < 1000, "every reader unpickles this"
    assert len(list((tmp_path / "kept" / "records").glob("*/*.json"))) == 1


@pytest.mark.parametrize(
    ("dirty", "accepted", "given"),
    [(None, "", COMMIT), (False, "", COMMIT), (True, "", f"{COMMIT}+dirty"), (False, "1", f"{COMMIT}+dirty")],
)
def test_the_run_is_given_a_commit_that_it_takes(
    common: ModuleType,
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dirty,
    accepted,
    given,
) -> None:
    """A tree that is changed elsewhere than in what is measured: asv's plugin has let it pass."""
    state = source.Checkout("none" if dirty is None else COMMIT, dirty)
    monkeypatch.setattr(source, "checkout", lambda start=None, *, results=None: state)
    monkeypatch.setenv("ASV_COMMIT", COMMIT)
    monkeypatch.setenv("OVERLAP_ACCEPT_DIRTY", accepted)
    _measured(common, tmp_path / "asv")
    arguments, _ = json.loads(stand_in.read_text())
    assert arguments[-2:] == ["--commit", given]
    assert source.commit(None, given) == (COMMIT, given != COMMIT)


def test_a_tree_at_another_commit_is_told_before_anything_is_measured(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "checkout", lambda: source.Checkout("f" * 40, False))
    monkeypatch.setenv("ASV_COMMIT", COMMIT)
    with pytest.raises(RuntimeError, match=f"under {COMMIT}, but the tree is at {'f' * 40}"):
        _measured(common, tmp_path / "asv")
    assert not stand_in.exists()


@pytest.mark.parametrize("code", ["0", "3", "4"])
def test_a_run_with_a_record_is_read(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("CODE", code)
    assert len(_measured(common, tmp_path / "asv")) == len(RESULTS)


@pytest.mark.parametrize("code", ["1", "2", "130"])
def test_a_run_that_failed_is_told_with_its_log(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("CODE", code)
    with pytest.raises(RuntimeError, match=rf"harness run .* exit code {code}\n.*this is the log"):
        _measured(common, tmp_path / "asv")


def test_a_run_without_a_record_is_told(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECORD")
    with pytest.raises(RuntimeError, match="exit code 0"):
        _measured(common, tmp_path / "asv")


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent's notice does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while _alive(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("sleep", ["0", "30"], ids=["ended", "too slow"])
def test_no_child_outlives_the_measurement(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep: str
) -> None:
    monkeypatch.setenv("LEAVE_CHILD", str(tmp_path / "child"))
    monkeypatch.setenv("SLEEP", sleep)
    monkeypatch.setattr(common, "TIMEOUT", 1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no end after 1 s") if sleep != "0" else contextlib.nullcontext():
        _measured(common, tmp_path / "asv")
    assert time.monotonic() - began < 8
    assert _gone(int((tmp_path / "child").read_text()))


def test_numbers_of_another_commit_are_refused(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASV_COMMIT", "f" * 40)
    with pytest.raises(RuntimeError, match=f"measured at commit {COMMIT}, asv files it under fff"):
        _measured(common, tmp_path / "asv")


def test_numbers_of_another_method_are_refused(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [case.key for case in RESULTS]
    monkeypatch.setenv("OVERLAP_ASV_CASES", _list(tmp_path / "cases.json", keys, version="method-0"))
    with pytest.raises(
        RuntimeError, match=f"as method-0, but this commit measures with method-{METHOD_VERSION}"
    ):
        _measured(common, tmp_path / "asv")


def test_a_commit_whose_cases_asv_does_not_list_is_told(
    common: ModuleType, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_ASV_CASES", _list(tmp_path / "cases.json", ["h2d[of=another]"]))
    with pytest.raises(RuntimeError, match="none of the 2 measured cases is one that asv lists"):
        _measured(common, tmp_path / "asv")


# -- readers -----------------------------------------------------------------------------------------------


@pytest.fixture
def read(common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that does what asv does for one reader: setup, then the method."""
    record.write(tmp_path / "record.json", factories.record(*RESULTS))
    monkeypatch.setenv("OVERLAP_RECORD", str(tmp_path / "record.json"))
    from benchmarks.bench_h2d import H2D

    monkeypatch.chdir(tmp_path)
    cache = common.measure("h2d")

    def read(case: str, metric: str = "overlapped_ms") -> object:
        suite = H2D()
        suite.setup(cache, case)
        return getattr(suite, f"track_{metric}")(cache, case)

    return read


def test_ranks_without_gpus_are_n_a_with_their_reason_and_measured_ones_give_samples(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.bench_ddp import DDP

    measured, lacking = ddp_result(Machine()), ddp_case(ranks=8)
    made = ddp_record(measured, factories.skipped(lacking, "needs 8 GPUs, one a rank; 1 here"), *RESULTS[:1])
    record.write(tmp_path / "record.json", made)
    monkeypatch.setenv("OVERLAP_RECORD", str(tmp_path / "record.json"))
    monkeypatch.chdir(tmp_path)
    suite, cache = DDP(), DDP().setup_cache()
    assert suite.params == [[measured.key, lacking.key]]
    suite.setup(cache, measured.key)
    assert suite.track_overlapped_ms(cache, measured.key)["samples"]
    with pytest.raises(NotImplementedError, match="needs 8 GPUs, one a rank; 1 here"):
        suite.setup(cache, lacking.key)


def test_every_family_has_a_class_of_its_own_in_a_file_of_its_own(common: ModuleType) -> None:
    """asv shares one run between classes that inherit `setup_cache`, and finds only what a file of its suite has."""
    assert sorted(name.lower() for name in common.__all__) == sorted(suites.SUITES)
    for name in common.__all__:
        module = importlib.import_module(f"benchmarks.bench_{name.lower()}")
        assert getattr(module, name) is getattr(common, name)
        assert "setup_cache" in vars(getattr(common, name))


def test_loaders_give_samples_of_every_metric_that_asv_follows(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.bench_feed import FEED

    case = feed_result()
    record.write(tmp_path / "record.json", feed_record(case, *RESULTS[:1]))
    monkeypatch.setenv("OVERLAP_RECORD", str(tmp_path / "record.json"))
    monkeypatch.chdir(tmp_path)
    suite, cache = FEED(), FEED().setup_cache()
    assert suite.params == [[case.key]]
    suite.setup(cache, case.key)
    assert all(getattr(suite, f"track_{name}")(cache, case.key)["samples"] for name in common.TRACKED)


def test_a_measured_case_gives_samples(read) -> None:
    for case in RESULTS[:2]:
        given = read(case.key)
        assert given["number"] == 1
        assert (
            given["samples"] == asv_store.rows(factories.record(case))[case.key]["samples"]["overlapped_ms"]
        )


def test_a_skipped_case_and_one_of_another_device_are_not_available(read) -> None:
    with pytest.raises(NotImplementedError, match="no pinned memory"):
        read(RESULTS[2].key)
    with pytest.raises(NotImplementedError, match="not measured on this device"):
        read("h2d[of=another]")


def test_a_bad_case_fails_with_its_reason(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)
    with pytest.raises(OverlapError, match="invalid: thermal slowdown"):
        read(RESULTS[3].key)


def test_a_metric_without_samples_is_not_available(read, common: ModuleType, tmp_path: Path) -> None:
    key = RESULTS[0].key
    for file in tmp_path.glob("case-*.json"):
        row = json.loads(file.read_text())
        if row["samples"]:
            row["samples"]["bound_ratio"] = []
        file.write_text(json.dumps(row))
    assert math.isnan(read(key, "bound_ratio"))


# -- asv.conf.json -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conf() -> dict:
    return json5.loads((ROOT / "asv.conf.json").read_text())


def _names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


def test_the_torch_of_asvs_environments_is_that_of_the_constraints(conf: dict) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert conf["matrix"]["req"] == {"torch": [pins["torch"]]}


def test_asvs_environments_get_every_requirement_once_and_torch_from_the_matrix_alone(conf: dict) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, second = conf["install_command"]
    installed = set(first.partition("constraints.txt ")[2].split())
    # torch is the matrix's; the others belong to who runs asv or pytest.
    assert installed == _names(project["dependencies"]) - {"torch", "asv", "pytest-benchmark", "virtualenv"}
    for command in (*conf["build_command"], second):
        assert " --no-deps " in command
    assert project["name"] == conf["project"], "asv uninstalls the project by its name"


def test_thresholds_match_every_metric(conf: dict, common: ModuleType) -> None:
    for metric in common.TRACKED:
        matching = [
            text for text in conf["regressions_thresholds"] if re.match(text, f"{NAME}.track_{metric}")
        ]
        assert len(matching) == 1, metric
    assert all(
        any(re.match(text, f"{NAME}.track_{m}") for m in common.TRACKED)
        for text in conf["regressions_thresholds"]
    )


def test_nothing_that_asv_makes_beside_results_is_tracked(conf: dict) -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {Path(conf[name]).parts[0] + "/" for name in ("env_dir", "html_dir")} <= set(ignored)
