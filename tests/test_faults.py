"""Faults that cost no finished case: real workers on a real device, and `overlap` in processes of its own.

tests/test_supervise.py has the many ways in which a worker dies, with a stand-in; here it is the worker itself, its
sampler, the disk and the machine's surroundings that fail.
"""

import ast
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import factories
import pytest
from fakes import MS, FakeWorkload, ScriptedClock
from processes import children, gone
from test_supervise import STAND_IN

import harness
from harness import child, measure, record, runs, statistics, supervise
from harness.record import MEASURED, Record

ROOT = Path(harness.__file__).parent.parent
FAULTY = Path(__file__).with_name("faulty_worker.py")
CPU_KEY = "h2d[memory=pageable,stream=side,chunks={},size=1MiB,ratio=1,gate=off]"
GPU_KEY = "h2d[memory=pinned,stream=side,chunks={},size=16MiB,ratio=1,gate=off]"


def within(seconds: float, condition: Callable[[], object]) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())


# Real workers in this process's care.


class Night(NamedTuple):
    """What came of each case, by its chunk count, and how many workers that took."""

    outcomes: dict[int, str]
    workers: int


def outcomes(kept: Record) -> dict[int, str]:
    """By chunk count: `measured`, the reason of a case that ended in an error, or any other status and its reason."""
    return {
        int(case.params["chunks"]): "measured"
        if case.status in MEASURED
        else case.reason
        if case.status == "error"
        else f"{case.status}: {case.reason}"
        for case in kept.cases
    }


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Runs cases of these chunk counts by real workers, with faults in some."""
    before = set(children(os.getpid()))
    started = []

    def run(device: str, key: str, faults: Mapping[int, str], *, case_s: float) -> Night:
        plan, kept, path = runs.prepare(
            runs.Options(
                device=device, patterns=tuple(key.format(n) for n in faults), target=0.2, controls=False,
                results=tmp_path / "results", machine="here",
            )
        )  # fmt: skip
        named = {case.key: fault for case, fault in zip(plan.cases, faults.values(), strict=True) if fault}

        def command(events: int) -> list[str]:
            started.append(events)
            return [sys.executable, "-P", str(FAULTY), str(events), json.dumps(named)]

        monkeypatch.setattr(child, "command", command)
        monkeypatch.setattr(child, "CASE_S", case_s)
        supervise.run(plan, kept, path)
        assert set(children(os.getpid())) == before, "a worker was left behind, or not reaped"
        read = record.read(path)
        assert read.run.finished
        return Night(outcomes(read), len(started))

    return run


def test_a_bad_night_on_the_cpu(night):
    """Each fault costs the case it was in; what is left when it ended the worker is measured by a fresh one."""
    faults = {1: "", 2: "no_memory", 4: "no_memory_for_python", 8: "null_pointer", 16: "", 32: "hang"}
    found, workers = night("cpu", CPU_KEY, faults, case_s=2.5)
    assert (found[1], found[16]) == ("measured", "measured")
    assert "can't allocate memory" in found[2]
    assert found[4] == "MemoryError"
    assert found[8] == "the worker was killed by SIGSEGV"
    assert found[32] == "no sign of life for 2.5 s; ended"
    assert workers == 2


def stands(outcome: str) -> bool:
    """Whether the case was measured. These tests' own process may hold the GPU open, which then is shared."""
    return outcome == "measured" or outcome.startswith("invalid: shared GPU")


@pytest.mark.gpu
def test_no_memory_on_the_device_costs_the_case_that_asked_for_it(night):
    found, workers = night("cuda", GPU_KEY, {1: "", 2: "no_device_memory", 4: ""}, case_s=60.0)
    assert "CUDA out of memory" in found[2]
    assert stands(found[1])
    assert stands(found[4])
    assert workers == 1


@pytest.mark.gpu
def test_an_illegal_access_of_a_kernel_costs_the_case_it_was_in(night):
    found, workers = night("cuda", GPU_KEY, {1: "", 2: "stray_kernel", 4: ""}, case_s=60.0)
    assert "CUDA error: an illegal memory access" in found[2]
    assert stands(found[1])
    assert stands(found[4])
    assert workers == 2


@pytest.mark.gpu
def test_a_kernel_that_never_ends_costs_the_case_it_was_in_and_leaves_the_gpu_usable(night):
    found, workers = night("cuda", GPU_KEY, {1: "", 2: "endless_kernel", 4: ""}, case_s=15.0)
    assert found[2] == "no sign of life for 15 s; ended"
    assert stands(found[1])
    assert stands(found[4])
    assert workers == 2


def test_a_round_of_long_samples_says_that_it_lives():
    """Such as a gate that times out after ten seconds, in each of six arms: longer than a worker may be silent."""
    clock = ScriptedClock()
    long = {(arm, n): {"dropped": "gate timed out"} for arm in MS for n in range(40)}
    heard = [clock()]
    workload = FakeWorkload(clock, arms=tuple(MS), script=long, before=lambda: clock.advance(10))
    found = measure.measure(
        workload,
        statistics.StopRule(target=0.01, budget_s=10.0, limit_s=60.0),
        clock=clock,
        on_round=lambda rounds: heard.append(clock()),
    )
    assert "gate timed out" in found.failed
    assert max(b - a for a, b in itertools.pairwise(heard)) < 11 < child.CASE_S
    assert heard[-1] == clock()


# `overlap` in a process of its own, whose workers are replaced.

PARENT = """
import os, shlex, sys, time
worker, before = sys.argv[1:3]
del sys.argv[1:3]
from harness import child
child.command = lambda events: [sys.executable, *shlex.split(worker.replace("FD", str(events)))]
exec(before)
from harness.cli import main
main()
"""


def overlap(
    folder: Path,
    worker: str,
    *arguments: str,
    before: str = "",
    wrapped: tuple[str, ...] = (),
    **options: object,
) -> subprocess.Popen[str]:
    """`overlap` in `folder`, where there is no git, with `worker` as the program that measures.

    before: code that runs first. wrapped: a command that starts it.
    """
    return subprocess.Popen(
        [*wrapped, sys.executable, "-P", "-c", PARENT, worker, before, *arguments],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=str(ROOT), PATH=str(folder)),
        text=True,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),  # type: ignore[call-overload]
    )


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def run_options(key: str, *chunks: int, folder: str = "results") -> list[str]:
    listed = [word for n in chunks for word in ("--case", key.format(n))]
    return ["run", "--device", "cpu", "--no-controls", "--target", "0.2", "--machine", "here", "--results", folder,
            *listed]  # fmt: skip


def test_the_worker_and_its_sampler_end_with_a_parent_that_is_killed(tmp_path):
    """Even where the worker hangs in native code and cannot see that nobody listens any more."""
    key = CPU_KEY.replace("]", f",profile={runs.profiles.load_profile('cpu').key}]")
    faults = json.dumps({key.format(2): "hang", "sampler": ""})
    parent = overlap(tmp_path, shlex.join(["-P", str(FAULTY), "FD", faults]), *run_options(CPU_KEY, 1, 2))
    below: list[int] = []
    try:
        assert parent.stderr is not None
        assert any(line.startswith("[1/2]") for line in parent.stderr)
        (worker,) = children(parent.pid)
        (sampler,) = children(worker)
        below += worker, sampler
        assert b"nvml_sampler" in Path(f"/proc/{sampler}/cmdline").read_bytes()
        time.sleep(0.5)  # into the case that hangs
        assert not gone(worker)
        parent.kill()
        assert within(10, lambda: gone(worker)), "the worker outlived its parent"
        assert within(10, lambda: gone(sampler)), "the sampler outlived its worker"
    finally:
        parent.kill()
        for pid in below:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        parent.communicate(timeout=10)
    (path,) = tmp_path.glob("results/records/here/*.json")
    kept = record.read(path)
    assert (outcomes(kept), kept.run.finished) == ({1: "measured"}, False)


# A stand-in, whose cases are large, so that a small disk is soon full.


@pytest.fixture
def stand_in(tmp_path):
    """The command of a worker without torch: its cases have 300 rounds; and the numbers of its processes."""
    script, log = tmp_path / "stand_in.py", tmp_path / "log"
    script.write_text(STAND_IN.replace("n=20", "n=300"))
    log.touch()

    def pids() -> list[int]:
        lines = map(json.loads, log.read_text().splitlines())
        return [what for kind, what in lines if kind == "pid"]

    return shlex.join(["-I", "-S", str(script), "FD", "{}", str(log)]), pids


NAMESPACE = (shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--mount")
# In namespaces of its own: a disk of $1 bytes at $2, whose content goes to $3 in the end.
SMALL_DISK = """
without=$PATH PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs -o size="$1" tmpfs "$2" || exit 99
at=$2 to=$3
shift 3
PATH=$without "$@"
code=$?
cp -r "$at/." "$to"
exit $code
"""


def can_mount() -> bool:
    try:
        done = subprocess.run(
            [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


@pytest.mark.parametrize("how", ["a disk that is full", "a limit on the size of files"])
def test_a_disk_that_fills_up_in_mid_run_keeps_the_finished_cases(tmp_path, stand_in, how):
    worker, pids = stand_in
    arguments = run_options(CPU_KEY, 1, 2, 4, 8)
    results = tmp_path / "results"
    if how == "a disk that is full":
        if not can_mount():
            pytest.skip("nothing can be mounted here")
        disk, results = results, tmp_path / "kept"
        disk.mkdir()
        results.mkdir()
        small = ("/bin/sh", "-c", SMALL_DISK, "sh", "260k", str(disk), str(results))
        process = overlap(tmp_path, worker, *arguments, wrapped=(*NAMESPACE, *small))
        words = "No space left on device"
    else:
        limit = (165 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        process = overlap(
            tmp_path, worker, *arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        )
        words = "File too large"
    code, out, err = said(process)
    (path,) = results.glob("records/here/*")
    *progress, last = err.splitlines()
    assert (code, out) == (2, "")
    assert last == f"overlap: results: cannot write results/records/here/{path.name}: {words}"
    assert [line.split(":")[0] for line in progress[1:]] == ["[1/4] n=1", "[2/4] n=2"]
    kept = record.read(path)
    assert (outcomes(kept), kept.run.finished) == ({1: "measured", 2: "measured"}, False)
    assert pids()
    assert all(map(gone, pids()))
    if how == "a limit on the size of files":  # with room again the run goes on
        options = ("--target", "0.2", "--no-controls", "--machine", "here")
        code, _, err = said(overlap(tmp_path, worker, "run", "--resume", *options))
        assert code == 0, err
        assert [case.status for case in record.read(path).cases] == ["ok"] * 4


TOGETHER = """
from harness import record
def utc_now():
    open(f"here-{os.getpid()}", "w").close()
    while sum(name.startswith("here-") for name in os.listdir()) < 2:
        time.sleep(0.001)
    return "2026-11-30T08:00:00Z"
record.utc_now = utc_now
"""


def test_two_runs_of_one_second_on_one_store_have_a_record_each(tmp_path, stand_in):
    worker, _ = stand_in
    processes = [
        overlap(tmp_path, worker, *run_options(CPU_KEY, 1, 2), "--json", before=TOGETHER) for _ in range(2)
    ]
    ended = [said(process) for process in processes]
    assert [code for code, _, _ in ended] == [0, 0], ended
    paths = sorted(Path(json.loads(out)["record"]) for _, out, _ in ended)
    assert [path.name for path in paths] == ["20261130T080000Z-none.json", "20261130T080001Z-none.json"]
    assert sorted((tmp_path / "results" / "records" / "here").iterdir()) == [
        tmp_path / path for path in paths
    ]
    for path in paths:
        kept = record.read(tmp_path / path)
        assert kept.run.finished
        assert [(case.status, len(case.launches)) for case in kept.cases] == [("ok", 1)] * 2


WRITER = """
import sys
from pathlib import Path
from harness import record
path, *parts = map(Path, sys.argv[1:])
kept = [record.read(part) for part in parts]
for at in range(200):
    record.write(path, kept[at % 2])
"""


def test_a_record_is_whole_whenever_it_is_read(tmp_path):
    """By a page that is built, or a person who looks, while a run writes it after every case."""
    small = factories.record(factories.skipped(factories.h2d_case()))
    large = factories.record(*factories.table_results(rounds=60))
    paths = [tmp_path / name for name in ("r.json", "small.json", "large.json")]
    for path, kept in zip(paths, (small, small, large), strict=True):
        record.write(path, kept)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, *map(str, paths)], cwd=ROOT)
    seen = []
    while writer.poll() is None:
        seen.append(len(record.read(paths[0]).cases))
    assert writer.returncode == 0
    assert len(seen) > 50
    assert set(seen) == {1, 4}


# Clocks.

WALL_CLOCK = re.compile(
    r"time\.(time|time_ns|localtime|gmtime|ctime|asctime|strftime)|.*\bdate(time)?\.(now|today|utcnow|fromtimestamp)"
    r"|.*\.st_[acm]time(_ns)?|.*\bgetmtime"
)


def wall_clock(source: str) -> set[str]:
    """What a module asks of the clock that people set."""
    names = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return {name for name in names if WALL_CLOCK.fullmatch(name)}


def test_durations_are_told_by_a_clock_that_nobody_sets():
    """The other clock dates a record and its launches, and tells which record was last written."""
    assert wall_clock("import time\nt = time.time() + path.stat().st_mtime") == {
        "time.time",
        "path.stat().st_mtime",
    }
    assert wall_clock("import datetime\ndatetime.datetime.now(datetime.UTC)") == {"datetime.datetime.now"}
    assert wall_clock("import time\ntime.monotonic(); time.perf_counter(); time.sleep(1)") == set()
    allowed = {
        "record": {"datetime.datetime.now"},
        "runs": {"time.time", "path.stat().st_mtime"},
        "supervise": {"time.time"},
    }
    for path in ROOT.glob("harness/**/*.py"):
        assert wall_clock(path.read_text()) <= allowed.get(path.stem, set()), path


SET_BACK = """
import datetime
from harness import record
class Clock(datetime.datetime):
    seconds = datetime.datetime.fromisoformat("2026-11-30T08:00:00Z").timestamp()
    @classmethod
    def now(cls, zone=None):
        cls.seconds -= 3600
        return datetime.datetime.fromtimestamp(cls.seconds + 3600, zone)
record.datetime = type("datetime", (), {"datetime": Clock, "UTC": datetime.UTC})
time.time = lambda: Clock.now().timestamp()
"""


def test_a_clock_that_is_set_back_changes_nothing(tmp_path, stand_in):
    """By an hour at every look at it, and once more before the second run."""
    worker, _ = stand_in
    ended = [
        said(overlap(tmp_path, worker, *run_options(CPU_KEY, *chunks), "--json", before=SET_BACK))
        for chunks in ((1, 2), (1,))
    ]
    assert [code for code, _, _ in ended] == [0, 0], ended
    one, other = (record.read(tmp_path / json.loads(out)["record"]) for _, out, _ in ended)
    assert [len(kept.cases) for kept in (one, other)] == [2, 1], "neither took the other's place"
    assert [kept.run.time for kept in (one, other)] == ["2026-11-30T08:00:00Z", "2026-11-30T08:00:01Z"]
    assert 0 < one.run.seconds < 60


# A machine that lacks things.


@pytest.fixture
def bare(tmp_path):
    """Runs `overlap` with no home that can be written, no git, no history, no NVML and no GPU."""
    tree, folder = tmp_path / "tree", tmp_path / "work"
    shutil.copytree(ROOT / "harness", tree / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "pynvml.py").write_text("raise ImportError('none here')\n")
    folder.mkdir()
    (tmp_path / "file").touch()
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("XDG_", "MPL", "GIT_", "OVERLAP_")) and name != "HOME"
    }
    environment = kept | {"PATH": str(folder), "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}

    def run(
        *arguments: str, home: str | None = str(tmp_path / "file" / "home")
    ) -> subprocess.CompletedProcess[str]:
        if (
            home is None
        ):  # and a user whom the system does not know, as in a container with any number for one
            (tree / "sitecustomize.py").write_text(
                "import pwd\ndef getpwuid(uid):\n    raise KeyError(uid)\npwd.getpwuid = getpwuid\n"
            )
        return subprocess.run(
            [sys.executable, "-m", "harness", *arguments],
            cwd=folder,
            env=environment if home is None else environment | {"HOME": home},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run, folder


def test_every_command_works_where_next_to_nothing_is_there(bare):
    run, folder = bare
    ran = run(
        "run",
        "--device",
        "auto",
        "--budget",
        "20",
        "--no-controls",
        "--target",
        "0.2",
        "--case",
        CPU_KEY.format(2),
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[-1] for line in ran.stderr.splitlines()[1:]] == [" ok"], ran.stderr
    (path,) = folder.glob("results/records/*/*.json")
    assert path.name.endswith("-none.json")
    assert record.read(path).run.dirty is None
    for arguments, words in (
        (("show", str(path)), "no commit"),
        (("report", str(path)), "report: results/reports/"),
        (("doctor",), "git is not installed"),
        (("list",), "Choose some with --case"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout
    assert {each.name for each in folder.iterdir()} == {"results"}


def test_a_user_without_a_home_gets_a_page_and_nothing_else(bare):
    run, folder = bare
    record.write(folder / "r.json", factories.record(*factories.curve_results(rounds=5, chunks=(1, 2))))
    done = run("report", "r.json", home=None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "report: results/reports/h200-1/r.html\n", "")
    assert {each.name for each in folder.iterdir()} == {"r.json", "results"}
