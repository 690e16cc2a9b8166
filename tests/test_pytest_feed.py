"""pytest-benchmark on our cases: every test that runs pytest does so in a process of its own."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import factories
import pytest

from harness import pytest_feed, record, runs
from harness.errors import UsageError
from harness.pytest_feed import Asked, Feed, samples_s

ROOT = Path(__file__).parents[1]
SETTINGS = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--benchmark-only")

GOOD = factories.h2d_result(factories.h2d_case(), rounds=21)
UNSETTLED = factories.h2d_result(factories.h2d_case(chunks=4), status="unsettled", reason="budget")
PAGEABLE = factories.skipped(factories.h2d_case(memory="pageable"), "no room for it")
BAD = factories.h2d_result(factories.h2d_case(chunks=16), status="invalid", reason="thermal slowdown")
BROKEN = factories.unmeasured(factories.h2d_case(chunks=32), "error", "the worker was killed by SIGKILL")
DRIVER = {"driver": "580.1", "cublas": 120}

# Loaded into pytest by `-p`: a measurement that is quick, and says nothing of the machine.
HASTY = """
import dataclasses
from harness import pytest_feed
asked = pytest_feed.Asked.by
def by(variables):
    found = asked(variables)
    quick = dataclasses.replace(found.options, controls=False, target=0.2)
    return dataclasses.replace(found, options=quick)
pytest_feed.Asked.by = by
"""

# Imported by every Python that starts, the workers too: there, each product is made four times; the later ones find
# their numbers in the cache.
SLOW = """
import importlib.abc, importlib.util, os, sys
class Again(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "harness.backends.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            once = module.CpuBackend._products
            def again(*arguments):
                for _ in range(4):
                    once(*arguments)
            module.CpuBackend._products = again
        spec.loader.exec_module = exec_module
        return spec
if os.environ.get("AGAIN"):
    sys.meta_path.insert(0, Again())
"""


class Pytest:
    """`pytest benchmarks/` of this checkout, its files in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hooks").mkdir()
        (folder / "hooks" / "hasty.py").write_text(HASTY)
        (folder / "hooks" / "sitecustomize.py").write_text(SLOW)

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith(("OVERLAP_", "PYTEST_"))
        }
        paths = filter(None, [str(self.folder / "hooks"), os.environ.get("PYTHONPATH")])
        kept |= {"OVERLAP_RESULTS": str(self.folder / "results"), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", *SETTINGS, f"--benchmark-storage={self.folder / 'saved'}"]
        return subprocess.run(
            [*command, *arguments, str(ROOT / "benchmarks")],
            cwd=ROOT,
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def on(self, kept: record.Record, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """On a record instead of a measurement."""
        path = self.folder / "record.json"
        record.write(path, kept)
        return self(*arguments, OVERLAP_RECORD=str(path), **variables)

    def json(self) -> dict[str, Any]:
        return json.loads((self.folder / "out.json").read_text(), parse_constant=pytest.fail)

    @property
    def to_json(self) -> str:
        return f"--benchmark-json={self.folder / 'out.json'}"


@pytest.fixture
def run(tmp_path: Path) -> Pytest:
    return Pytest(tmp_path)


def kept(*results: record.CaseResult, **options: Any) -> record.Record:
    made = factories.record(*results, controls=factories.controls(), **options)
    made.software |= DRIVER
    return made


# -- what it is given --------------------------------------------------------------------------------------


def test_the_median_of_the_samples_is_the_records_number() -> None:
    for launches in (1, 2, 3):
        case = factories.h2d_result(factories.h2d_case(), launches=launches, rounds=20, noise=0.05, repeats=3)
        samples = samples_s(case)
        assert len(samples) == (20 if launches == 1 else launches), (
            "launches are the unit where there are several"
        )
        assert statistics.median(samples) * 1e3 == pytest.approx(
            case.metrics["overlapped_ms"].value, rel=1e-12
        )


def test_samples_are_times_of_the_device_and_of_one_batch() -> None:
    """Never of enqueueing, and labelled with how many batches ran as one pipeline."""
    case = factories.h2d_result(factories.h2d_case(), rounds=20, repeats=4, host_ms=0.1)
    taken = [seen.arms["overlapped"] for seen in case.launches[0].ranks[0].rounds]
    assert samples_s(case) == pytest.approx([ms / 4 / 1e3 for ms in taken], rel=1e-12)
    assert pytest_feed.extra_info(case, factories.record(case), None)["repeats"] == 4


def test_the_clock_gives_back_exactly_what_it_is_shown() -> None:
    clock, taken = pytest_feed.Clock(), []
    given = iter(wanted := [0.1, 0.2, 3e-7])
    for _ in wanted:
        clock.reset()
        began = clock()
        clock.show(given)
        taken.append(clock() - began)
    assert taken == wanted


def test_the_environment_is_read_as_the_options_of_run(tmp_path: Path) -> None:
    asked = Asked.by(
        {"OVERLAP_CASE": " a*  b* ", "OVERLAP_TIER": "nightly", "OVERLAP_DEVICE": "cpu", "OVERLAP_LAUNCHES": "3",
         "OVERLAP_MACHINE": "m-1", "OVERLAP_RESULTS": "there"}
    )  # fmt: skip
    assert asked.record is None
    assert asked.options == runs.Options(
        tier="nightly", patterns=("a*", "b*"), device="cpu", launches=3, machine="m-1", results=Path("there")
    )
    assert Asked.by({}) == Asked(options=runs.Options())
    for wrong in ("0", "two", "-1", "²"):
        with pytest.raises(UsageError, match=r"OVERLAP_LAUNCHES: got .*, want a whole number from 1"):
            Asked.by({"OVERLAP_LAUNCHES": wrong})


def test_before_it_is_measured_a_run_tells_its_identity_and_writes_nothing(tmp_path: Path) -> None:
    feed = Feed(Asked(options=runs.Options(device="cpu", results=tmp_path)))
    assert len(feed.keys()) > 4
    hard = feed.identity()["hard"]
    assert hard["machine.device"] == "cpu"
    assert hard["profiles"].startswith("cpu."), "a profile decides the sizes, and is known before"
    assert "machine.cpu.usable_cores" in hard
    assert list(tmp_path.iterdir()) == []


# -- pytest itself, on records -----------------------------------------------------------------------------


def test_every_status_is_what_it_is_to_pytest_and_nothing_is_a_silent_number(run: Pytest) -> None:
    ran = run.on(kept(GOOD, UNSETTLED, PAGEABLE, BAD, BROKEN), run.to_json)
    assert ran.returncode == 1
    assert re.search(r"2 failed, 2 passed, 1 skipped", ran.stdout), ran.stdout + ran.stderr
    assert "invalid: thermal slowdown" in ran.stdout
    assert "error: the worker was killed by SIGKILL" in ran.stdout
    assert "no room for it" in ran.stdout
    saved = run.json()
    assert [each["name"] for each in saved["benchmarks"]] == [
        f"test_overlap[{case.key}]" for case in (GOOD, UNSETTLED)
    ]
    first, second = saved["benchmarks"]
    assert first["stats"]["rounds"] == 21
    assert first["stats"]["data"] == samples_s(GOOD)
    assert first["stats"]["median"] * 1e3 == pytest.approx(GOOD.metrics["overlapped_ms"].value, rel=1e-12)
    told = first["extra_info"]
    assert told["metrics"]["hidden_fraction"]["value"] == GOOD.metrics["hidden_fraction"].value
    assert (told["case"], told["status"], told["record"]) == (GOOD.key, "ok", "record.json")
    assert told["controls"] == {"positive": True, "negative": True, "null": True, "sensitivity": True}
    assert (second["extra_info"]["status"], second["extra_info"]["reason"]) == ("unsettled", "budget")
    assert saved["commit_info"]["id"] == "0123456789abcdef0123456789abcdef01234567"
    assert saved["machine_info"]["machine"] == "h200-1"
    assert saved["machine_info"]["overlap"]["hard"]["software.driver"] == "580.1"


def test_where_no_case_has_a_number_pytest_says_so_and_no_more(run: Pytest) -> None:
    ran = run.on(kept(BAD), run.to_json)
    assert ran.returncode == 1
    assert "invalid: thermal slowdown" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    assert not (run.folder / "out.json").exists()


def test_cases_are_chosen_by_pattern_and_by_keyword(run: Pytest) -> None:
    made = kept(GOOD, UNSETTLED, PAGEABLE)
    ran = run.on(made, "-k", "not pageable", run.to_json, OVERLAP_CASE="*chunks=8,*")
    assert "1 passed, 1 deselected" in ran.stdout
    ran = run.on(made, "--collect-only", "-q", OVERLAP_CASE=UNSETTLED.key.replace(",profile=h200.1a2b", ""))
    assert f"::test_overlap[{UNSETTLED.key}]" in ran.stdout
    assert "1 test collected" in ran.stdout


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OVERLAP_CASE": "nope"}, "case: nope matches none of the 1 cases of"),
        ({"OVERLAP_RECORD": "nowhere.json"}, "nowhere.json: cannot read: No such file"),
        ({"OVERLAP_RECORD": "", "OVERLAP_TIER": "weekly"}, "tier: got 'weekly', want quick or nightly"),
        ({"OVERLAP_LAUNCHES": "none"}, "OVERLAP_LAUNCHES: got 'none', want a whole number from 1"),
    ],
)
def test_wrong_use_is_one_line(run: Pytest, variables: dict[str, str], words: str) -> None:
    record.write(run.folder / "record.json", kept(GOOD))
    ran = run(**{"OVERLAP_RECORD": str(run.folder / "record.json"), "OVERLAP_DEVICE": "cpu"} | variables)
    assert ran.returncode == 4
    assert words in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr


SAVE, FAIL = "--benchmark-save=base", "--benchmark-compare-fail=median:5%"


def test_a_slower_run_fails_and_the_same_again_does_not(run: Pytest) -> None:
    assert run.on(kept(GOOD, UNSETTLED), SAVE).returncode == 0
    assert run.on(kept(GOOD, UNSETTLED), "--benchmark-compare", FAIL).returncode == 0
    slower = factories.h2d_result(factories.h2d_case(), rounds=21, scale=1.1)
    ran = run.on(kept(slower, UNSETTLED), "--benchmark-compare", FAIL)
    assert ran.returncode == 1
    assert "Performance has regressed" in ran.stderr
    assert f"test_overlap[{GOOD.key}] (0001_base) - Field 'median' has failed" in ran.stderr


def other(software: dict[str, Any], **options: Any) -> record.Record:
    """A run twice as slow as the first one, on something else."""
    made = kept(factories.h2d_result(factories.h2d_case(), rounds=21, scale=2.0), UNSETTLED, **options)
    made.software |= software
    return made


def test_a_run_on_something_else_is_refused_and_is_no_regression(run: Pytest) -> None:
    assert run.on(kept(GOOD, UNSETTLED), SAVE).returncode == 0
    newer = other({})
    newer.method += 1
    for made, words in (
        (other({"driver": "590.2"}), "driver: 580.1 vs 590.2"),
        (other({}, gpu_name="NVIDIA B200"), "name: NVIDIA H200 vs NVIDIA B200"),
        (newer, f"method: {newer.method - 1} vs {newer.method}"),
    ):
        ran = run.on(made, "--benchmark-compare", FAIL)
        assert ran.returncode == 4, "1 is a regression's"
        assert re.search(f"not comparable with the saved run of .* at commit 01234567: {words}", ran.stderr)
        assert "regress" not in ran.stdout + ran.stderr
        assert "Traceback" not in ran.stdout + ran.stderr


def test_what_only_the_measurement_tells_is_compared_after_it(run: Pytest) -> None:
    """As cuBLAS and NCCL, whose versions a worker knows."""
    blind = """
from harness import pytest_feed
whole = pytest_feed.Feed.identity
def identity(self):
    found = whole(self)
    if not self.taken:
        found["hard"]["software.driver"] = "unknown"
    return found
pytest_feed.Feed.identity = identity
"""
    (run.folder / "hooks" / "blind.py").write_text(blind)
    assert run.on(kept(GOOD, UNSETTLED), SAVE).returncode == 0
    ran = run.on(kept(GOOD, UNSETTLED), "-p", "blind", "--benchmark-compare", FAIL)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "machine_info is different" not in ran.stdout + ran.stderr
    ran = run.on(other({"driver": "590.2"}), "-p", "blind", "--benchmark-compare", FAIL)
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "driver: 580.1 vs 590.2" in ran.stdout + ran.stderr
    assert "regress" not in ran.stdout + ran.stderr


def test_a_run_that_does_not_tell_its_machine_is_no_baseline(run: Pytest) -> None:
    assert run.on(kept(GOOD), SAVE).returncode == 0
    (saved,) = (run.folder / "saved").rglob("*.json")
    foreign = json.loads(saved.read_text())
    foreign["machine_info"] = {"node": "a host"}
    saved.write_text(json.dumps(foreign))
    ran = run.on(kept(GOOD), "--benchmark-compare", FAIL)
    assert ran.returncode == 4
    assert "it does not tell what it was measured on" in ran.stderr


def test_what_a_comparison_leaves_out_is_said(run: Pytest) -> None:
    assert run.on(kept(GOOD, BAD), SAVE).returncode == 1
    made = kept(GOOD, UNSETTLED)
    made.software["kernel"] = "6.9"
    base = kept(GOOD)
    base.software["kernel"] = "6.8"
    assert run.on(base, SAVE).returncode == 0
    ran = run.on(made, "--benchmark-compare", FAIL)
    assert ran.returncode == 0
    assert re.search(rf"overlap: no number in .* for 1 cases: {re.escape(UNSETTLED.key)}", ran.stdout)
    assert re.search(r"overlap: the saved run of .* differs in kernel: 6.8 vs 6.9", ran.stdout)


def test_disabled_benchmarks_are_skipped_without_measuring(run: Pytest) -> None:
    command = [sys.executable, "-m", "pytest", "--benchmark-disable", "-p", "no:cacheprovider", "benchmarks"]
    env = dict(os.environ, OVERLAP_DEVICE="cpu", OVERLAP_RESULTS=str(run.folder / "results"))
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nothing to do without measuring" in ran.stdout
    assert not (run.folder / "results").exists()


# -- measuring ---------------------------------------------------------------------------------------------

SMALL = "h2d[memory=pageable,stream={},chunks=2,size=1MiB,ratio=1,gate=off]"


def test_listing_cases_imports_no_torch_and_measures_nothing(run: Pytest) -> None:
    tell = "import sys\ndef pytest_unconfigure(config):\n    print('torch' in sys.modules, file=sys.stderr)\n"
    (run.folder / "hooks" / "tell.py").write_text(tell)
    ran = run("-p", "tell", "--collect-only", "-q", OVERLAP_DEVICE="cpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr.strip().endswith("False")
    assert "test_overlap[h2d[memory=" in ran.stdout
    assert not (run.folder / "results").exists()


def newest(folder: Path) -> Path:
    return max((folder / "results").rglob("*.json"))


@pytest.mark.timing
def test_a_second_run_is_compared_and_one_with_more_work_fails(run: Pytest) -> None:
    """By the least of the samples: it is the one that other work on this machine does not move."""
    asked = {"OVERLAP_DEVICE": "cpu", "OVERLAP_CASE": f"{SMALL.format('side')} {SMALL.format('default')}"}
    hasty = ("-p", "hasty", "-k", "side")
    first = run(*hasty, SAVE, run.to_json, **asked)
    assert first.returncode == 0, first.stdout + first.stderr
    made = record.read(newest(run.folder))
    assert made.run.finished
    assert made.run.planned == [case.key for case in made.cases]
    assert len(made.cases) == 1, "what is not selected is not measured"
    assert f"overlap: record: {newest(run.folder)}" in first.stdout
    (timed,) = run.json()["benchmarks"]
    number = made.case(timed["extra_info"]["case"]).metrics["overlapped_ms"].value
    assert timed["stats"]["median"] * 1e3 == pytest.approx(number, rel=1e-12)
    compare = (*hasty, "--benchmark-compare", "--benchmark-compare-fail=min:50%")
    second = run(*compare, **asked)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "(0001_base)" in second.stdout
    assert "(NOW)" in second.stdout
    slow = run(*compare, **asked, AGAIN="1")
    assert slow.returncode == 1
    assert "Field 'min' has failed" in slow.stderr, slow.stdout + slow.stderr


@pytest.mark.gpu(alone=True)
@pytest.mark.timeout(300)
def test_on_a_gpu_its_median_is_that_of_overlap_run(run: Pytest) -> None:
    key = "h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on]"
    ran = run(run.to_json, OVERLAP_DEVICE="cuda", OVERLAP_CASE=key)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (timed,) = run.json()["benchmarks"]
    median = timed["stats"]["median"] * 1e3
    of_its_record = record.read(newest(run.folder)).cases[0].metrics["overlapped_ms"].value
    assert median == pytest.approx(of_its_record, rel=1e-12)
    command = [sys.executable, "-m", "harness", "run", "--device", "cuda", "--case", key]
    again = subprocess.run(
        [*command, "--results", str(run.folder / "again"), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (case,) = json.loads(again.stdout)["cases"]
    assert case["key"] == timed["extra_info"]["case"]
    assert median == pytest.approx(case["metrics"]["overlapped_ms"]["value"], rel=0.02)
