import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import factories
import pytest
import repositories
from fake_nvml import A, B, FakeGpu, install

from harness import METHOD_VERSION, devices, host, profiles, record, runs, source
from harness.devices import Device
from harness.errors import RecordError, UsageError
from harness.record import Record
from harness.runs import Options, free_memory, planned, prepare, profile_of, resume

CPU = profiles.load_profile("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = "h2d[memory=pageable,stream=side,chunks=2,size=1MiB,ratio=1,gate=off]"
LARGE = "h2d[memory=pageable,stream=side,chunks=2,size=1GiB,ratio=1,gate=off]"
UUID = "GPU-0a1b2c3d-0000-0000-0000-000000000001"
H200 = Device("cuda", "NVIDIA H200", 1, UUID)


@pytest.fixture(autouse=True)
def no_history(tmp_path, monkeypatch):
    """A copied tree: git has no answer, wherever these tests run."""
    copied = tmp_path.parent / f"{tmp_path.name}-tree"
    copied.mkdir()
    monkeypatch.setattr(source, "package_root", lambda: copied)


def head(monkeypatch, commit: str, dirty: bool = False) -> None:
    """A tree with history."""
    state = source.Checkout(commit, dirty)
    monkeypatch.setattr(source, "checkout", lambda start=None, *, results=None: state)


def options(folder: Path, **chosen: object) -> Options:
    defaults = {"device": "cpu", "commit": COMMIT, "results": folder / "results"}
    return Options(**(defaults | chosen))  # type: ignore[arg-type]


def test_a_plan_and_an_empty_record_at_its_place(tmp_path):
    plan, kept, path = prepare(
        options(tmp_path, patterns=(SMALL,), launches=3, seconds=60.0, command=("run", "--launches", "3"))
    )
    (case,) = plan.cases
    assert case.key == SMALL.replace("]", f",profile={CPU.key}]")
    assert (plan.device.kind, plan.profile, plan.launches) == ("cpu", CPU, 3)
    assert (plan.seconds, plan.target, plan.controls) == (60.0, None, True)
    assert (plan.target_of("h2d"), plan.target_of("feed")) == (CPU.settled, CPU.feed_settled)
    assert (kept.run.planned, kept.run.launches, kept.run.tier) == ([case.key], 3, "quick")
    assert (kept.run.suites, kept.run.command) == (["h2d"], ["run", "--launches", "3"])
    assert (kept.schema, kept.method, kept.run.finished) == (record.SCHEMA, METHOD_VERSION, False)
    assert kept.cases == []
    assert kept.machine.name == f"cpu-{devices.cores()}"
    assert path == record.record_path(tmp_path / "results", kept)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]
    assert record.read(path) == kept


def test_without_patterns_it_is_the_suite(tmp_path):
    quick, _, _ = prepare(options(tmp_path))
    nightly, _, _ = prepare(options(tmp_path, tier="nightly"))
    assert 1 < len(quick.cases) < len(nightly.cases)
    assert set(quick.cases) <= set(nightly.cases)


def test_the_commit_can_be_that_of_another_repository(tmp_path):
    *_, head = repositories.make(tmp_path / "theirs", [{"model.py": "1"}, {"model.py": "2"}])
    theirs = {"commit": None, "repo": tmp_path / "theirs"}
    _, kept = planned(options(tmp_path, **theirs))
    assert (kept.run.commit, kept.run.dirty) == (head, False)
    (tmp_path / "theirs" / "model.py").write_text("3")
    assert planned(options(tmp_path, **theirs))[1].run.dirty is True


def test_who_only_plans_writes_nothing(tmp_path):
    plan, kept = planned(options(tmp_path))
    assert [case.key for case in plan.cases] == kept.run.planned
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "commit", "dirty"),
    [(COMMIT, COMMIT, False), (f"{COMMIT}+dirty", COMMIT, True), ("fedcba98", "fedcba98", False)],
)
def test_a_commit_that_is_given_is_taken(tmp_path, given, commit, dirty):
    _, kept, path = prepare(options(tmp_path, commit=given))
    assert (kept.run.commit, kept.run.dirty) == (commit, dirty)
    assert path.stem.endswith(f"-{commit[:8]}")


def test_target_machine_and_controls_are_taken(tmp_path):
    plan, kept, path = prepare(options(tmp_path, target=0.005, machine="bench-7", controls=False))
    assert (plan.target, plan.target_of("feed"), plan.controls) == (0.005, 0.005, False)
    assert (kept.machine.name, path.parent.name) == ("bench-7", "bench-7")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"suites": ("nope",)}, "suite: got 'nope', want one of h2d"),
        ({"tier": "weekly"}, "tier: got 'weekly'"),
        ({"patterns": ("*chunks=3*",)}, "case: got '\\*chunks=3\\*', which matches none"),
        ({"patterns": (SMALL.replace("side", "middle"),)}, "h2d: stream: got 'middle', want side or default"),
        ({"patterns": (SMALL.replace("chunks=2", "chunks=0"),)}, "h2d: chunks: got 0, want a whole number"),
        ({"patterns": (SMALL.replace("]", ",colour=red]"),)}, "h2d: got axis 'colour', want one of memory"),
        (
            {"patterns": (SMALL.replace("]", ",profile=h200.0000]"),)},
            "is of profile h200.0000, this run uses",
        ),
        ({"device": "tpu"}, "device: got 'tpu'"),
        ({"profile": "nope"}, "profile: got 'nope'"),
        ({"profile": "/nowhere/x.json"}, "profile: cannot read /nowhere/x.json"),
        ({"machine": "../up"}, "machine: got '../up'"),
        ({"machine": ""}, "machine: got ''"),
        ({"commit": "HEAD"}, "commit: got 'HEAD', want 7 to 40 hex digits"),
        ({"seconds": float("nan")}, "budget: got nan, want a finite number above 0"),
        ({"seconds": float("inf")}, "budget: got inf"),
        ({"target": float("nan")}, "target: got nan"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_written(tmp_path, wrong, message):
    with pytest.raises(UsageError, match=message) as refused:
        prepare(options(tmp_path, **wrong))
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def custom(folder: Path, **changed: object) -> Path:
    """A profile of one's own: that of a cpu with other sizes."""
    content = json.loads((profiles.FOLDER / "cpu.json").read_text()) | {"name": "mine"} | changed
    (folder / "mine.json").write_text(json.dumps(content))
    return folder / "mine.json"


def test_a_profile_of_ones_own_is_used(tmp_path):
    path = custom(tmp_path, case_seconds=3.0)
    plan, kept, _ = prepare(options(tmp_path, profile=str(path)))
    assert (plan.profile.name, plan.profile.case_seconds) == ("mine", 3.0)
    assert all(case.word("profile") == plan.profile.key_of(case.family.name) for case in plan.cases)
    assert kept.run.planned[0].endswith(f",profile={plan.profile.key}]")


def test_a_profile_of_another_kind_of_device_is_refused(tmp_path):
    """Its sizes would take hours on a cpu, and no time on a GPU."""
    with pytest.raises(UsageError, match="profile: h200 has sizes for GPUs, and this is the cpu backend"):
        prepare(options(tmp_path, profile="h200"))
    gpu = Device("cuda", "NVIDIA H200", 1, A)
    with pytest.raises(UsageError, match="profile: cpu has sizes for the cpu backend, and this is a GPU"):
        profile_of("cpu", gpu)
    assert profile_of("generic", gpu).name == "generic"


def test_more_chunks_than_rows_are_refused(tmp_path):
    """Rows of 64 KiB: 1 MiB has 16 of them."""
    path = custom(tmp_path, width=16384)
    many = SMALL.replace("chunks=2", "chunks=32")
    with pytest.raises(UsageError, match="h2d: chunks: got 32 with size 1MiB, want at most its 16 rows"):
        prepare(options(tmp_path, profile=str(path), patterns=(many,)))
    prepare(options(tmp_path, profile=str(path), patterns=(SMALL.replace("chunks=2", "chunks=16"),)))


def test_a_profile_that_a_suite_cannot_be_made_of_is_refused(tmp_path):
    """Rows of 8 MiB: 128 MiB has 16 of them, and the nightly suite wants up to 64 chunks."""
    path = custom(tmp_path, width=1 << 21)
    with pytest.raises(UsageError, match="h2d: chunks: got"):
        prepare(options(tmp_path, profile=str(path), tier="nightly"))


def test_a_case_asked_for_by_name_must_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "free_bytes", lambda: 1 << 30)
    with pytest.raises(
        UsageError, match=r"h2d: size: needs .* GiB of host memory, and 1.00 GiB are free"
    ) as e:
        prepare(options(tmp_path, patterns=(LARGE,)))
    assert "choose a smaller size than in h2d[" in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_a_case_of_a_suite_is_not_refused_for_its_memory(tmp_path, monkeypatch):
    """It is skipped with the reason when its turn comes, and the others are measured."""
    monkeypatch.setattr(host, "free_bytes", lambda: 1)
    plan, _, _ = prepare(options(tmp_path))
    assert len(plan.cases) > 1
    by_glob, _, _ = prepare(options(tmp_path, patterns=("*chunks=8*",)))
    assert by_glob.cases
    with pytest.raises(UsageError, match="host memory"):
        prepare(options(tmp_path, patterns=("*chunks=8*", SMALL)))


def test_only_the_case_that_was_named_has_to_fit(tmp_path, monkeypatch):
    """Beside a glob that brings larger ones."""
    small, large = (
        runs.plan_h2d(case, CPU) for case in prepare(options(tmp_path, patterns=(SMALL, LARGE)))[0].cases
    )
    need = small.host_bytes + small.device_bytes
    assert need < large.host_bytes
    monkeypatch.setattr(host, "free_bytes", lambda: need)
    plan, _, _ = prepare(options(tmp_path, patterns=(SMALL, "*size=128MiB*")))
    assert len(plan.cases) > 1


def test_free_device_memory_is_what_nvml_says_of_this_very_device(tmp_path, monkeypatch):
    full = {"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 << 30, used=139 << 30)}
    install(monkeypatch, FakeGpu(uuid=A), FakeGpu(uuid=B, bus=7, values=full))
    monkeypatch.setattr(host, "free_bytes", lambda: 1 << 50)
    assert free_memory(Device("cuda", "NVIDIA H200", 2, A)) == (1 << 50, 139 << 30)
    device = Device("cuda", "NVIDIA H200", 1, B)
    assert free_memory(device) == (1 << 50, 1 << 30)
    monkeypatch.setattr(runs.devices, "detect", lambda requested: device)
    with pytest.raises(UsageError, match=r"GiB of device memory, and 1\.00 GiB are free"):
        prepare(options(tmp_path, patterns=(LARGE,)))


def test_what_nobody_tells_of_memory_refuses_nothing(tmp_path, monkeypatch):
    install(monkeypatch, init_error="DriverNotLoaded")
    monkeypatch.setattr(host, "free_bytes", lambda: None)
    monkeypatch.setattr(runs.devices, "detect", lambda requested: H200)
    assert free_memory(H200) == (None, None)
    assert free_memory(Device("cpu", "cpu", 2)) == (None, None)
    plan, _, _ = prepare(options(tmp_path, patterns=(LARGE,)))
    assert len(plan.cases) == 1


def test_records_of_one_second_do_not_share_a_file(tmp_path, monkeypatch):
    """Nor where the clock stands still, or was set back to an hour of which there are records."""
    monkeypatch.setattr(record, "utc_now", lambda: "2026-12-31T23:59:59Z")
    made = [prepare(options(tmp_path)) for _ in range(3)]
    assert [path.name for _, _, path in made] == [
        "20261231T235959Z-01234567.json", "20270101T000000Z-01234567.json", "20270101T000001Z-01234567.json",
    ]  # fmt: skip
    for _, kept, path in made:
        assert record.read(path) == kept
        assert path == record.record_path(tmp_path / "results", kept)


def test_a_record_that_another_run_of_this_second_began_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """The other one comes between this run's look at the place and its first write."""
    monkeypatch.setattr(record, "utc_now", lambda: "2026-11-30T08:00:00Z")
    dumps, other = record.dumps, []

    def slow(kept: Record) -> bytes:
        if not other:
            other.append(record.record_path(tmp_path / "results", kept))
            other[0].parent.mkdir(parents=True)
            other[0].write_bytes(b"another's")
        return dumps(kept)

    monkeypatch.setattr(record, "dumps", slow)
    _, kept, path = prepare(options(tmp_path))
    assert other[0].read_bytes() == b"another's"
    assert path.name == "20261130T080001Z-01234567.json"
    assert record.read(path) == kept


def test_the_profile_is_the_one_asked_for_or_the_devices_own():
    assert profile_of(None, H200).name == "h200"
    assert profile_of(None, Device("cuda", "Unknown 9000", 1)).name == "generic"
    assert profile_of(None, Device("cpu", "cpu", 2)).name == "cpu"
    assert profile_of("generic", H200).name == "generic"


# Going on with a record.


def begun(folder: Path, **chosen: object) -> tuple[Record, Path]:
    """A record on disk of a run that was killed before its first case."""
    _, kept, path = prepare(options(folder, **{"patterns": (SMALL, LARGE), "launches": 2, **chosen}))
    record.write(path, kept)
    return kept, path


def test_an_unfinished_run_goes_on_as_it_was_planned(tmp_path):
    kept, path = begun(tmp_path)
    plan, again, where = resume(options(tmp_path, seconds=9.0, target=0.2, controls=False), str(path))
    assert (again, where) == (kept, path)
    assert [case.key for case in plan.cases] == kept.run.planned
    assert (plan.launches, plan.profile, plan.device.kind) == (2, CPU, "cpu")
    assert (plan.seconds, plan.target, plan.controls) == (9.0, 0.2, False)


def test_ranks_that_are_not_those_of_the_record_cannot_go_on_with_it(tmp_path, monkeypatch):
    """Its cases would all be skipped, and the record be finished without them."""
    ddp = "ddp[model=blocks,bucket=1MiB,tokens=32,gradients=fp32,ranks=2,backend=gloo]"
    kept, path = begun(tmp_path, patterns=(ddp,))
    before = path.read_bytes()
    started = {"size": 3}
    monkeypatch.setattr(runs.torchrun, "role", lambda: SimpleNamespace(**started))
    with pytest.raises(UsageError, match=r"cases of 2 ranks, torchrun started 3"):
        resume(options(tmp_path), str(path))
    assert path.read_bytes() == before
    started["size"] = 2
    assert [case.key for case in resume(options(tmp_path), str(path))[0].cases] == kept.run.planned


def test_cases_that_ended_in_an_error_are_measured_anew(tmp_path):
    kept, path = begun(tmp_path)
    plan, _, _ = resume(options(tmp_path), str(path))
    small, large = plan.cases
    half = factories.h2d_result(small, launches=1, status="error", reason="launch 2 of 2: died")
    kept.cases = [half, factories.skipped(large)]
    record.write(path, kept)
    _, again, _ = resume(options(tmp_path), str(path))
    assert [case.key for case in again.cases] == [large.key]


@pytest.mark.parametrize("status", ["ok", "unsettled", "skipped", "invalid"])
def test_other_results_stay(tmp_path, status):
    kept, path = begun(tmp_path)
    plan, _, _ = resume(options(tmp_path), str(path))
    made = factories.h2d_result if status in record.MEASURED else factories.unmeasured
    kept.cases = [made(plan.cases[0], status=status, reason="a reason")]
    record.write(path, kept)
    _, again, _ = resume(options(tmp_path), str(path))
    assert [case.status for case in again.cases] == [status]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: setattr(kept.run, "finished", True), "is finished; begin a new run"),
        (
            lambda kept: setattr(kept.run, "commit", "f" * 40),
            f"begun with commit {'f' * 40}, this is {COMMIT}",
        ),
        (
            lambda kept: setattr(kept.run, "dirty", True),
            f"begun with commit {COMMIT}\\+dirty, this is {COMMIT};",
        ),
        (lambda kept: setattr(kept, "method", METHOD_VERSION + 1), f"begun with method {METHOD_VERSION + 1}"),
        (lambda kept: kept.software.update(torch="1.0"), "begun with torch 1.0, this is"),
        (lambda kept: kept.machine.cpu.update(model="another CPU"), "begun with model another CPU, this is"),
        (lambda kept: setattr(kept.run, "planned", []), "names no planned case"),
        (lambda kept: setattr(kept.run, "planned", ["h2d[chunks=0]"]), "h2d: axes are missing: 'memory'"),
        (lambda kept: setattr(kept.machine, "device", "tpu"), "device: got 'tpu'"),
        (
            lambda kept: setattr(
                kept.run, "planned", [key.replace(CPU.key, "cpu.0000") for key in kept.run.planned]
            ),
            "profile cpu.0000 is none of this program's; give its file with --profile",
        ),
    ],
)
def test_a_run_that_cannot_go_on_is_refused(tmp_path, change, message):
    kept, path = begun(tmp_path)
    change(kept)
    record.write(path, kept)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=message) as refused:
        resume(options(tmp_path), str(path))
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("given", [COMMIT, f"{COMMIT}+dirty"])
def test_without_history_a_run_goes_on_with_the_commit_it_was_begun_with(tmp_path, given):
    _, path = begun(tmp_path, commit=given)
    _, again, _ = resume(options(tmp_path, commit=None), str(path))
    assert (again.run.commit, again.run.dirty) == (COMMIT, given != COMMIT)
    with pytest.raises(UsageError, match=r"begun with commit .*, this is fedcba98;"):
        resume(options(tmp_path, commit="fedcba98"), str(path))


def test_with_history_a_run_goes_on_at_its_own_commit_only(tmp_path, monkeypatch):
    _, path = begun(tmp_path)
    head(monkeypatch, COMMIT)
    resume(options(tmp_path, commit=None), str(path))
    head(monkeypatch, "f" * 40)
    with pytest.raises(UsageError, match=f"begun with commit {COMMIT}, this is {'f' * 40};"):
        resume(options(tmp_path, commit=None), str(path))
    head(monkeypatch, COMMIT, dirty=True)
    with pytest.raises(UsageError, match=f"begun with commit {COMMIT}, this is {COMMIT}\\+dirty;"):
        resume(options(tmp_path, commit=None), str(path))


def test_results_in_the_clone_leave_the_tree_clean(tmp_path, monkeypatch):
    asked = []

    def checkout(start=None, *, results=None):
        asked.append(results)
        return source.Checkout(COMMIT, False)

    monkeypatch.setattr(source, "checkout", checkout)
    _, path = begun(tmp_path, results=tmp_path / "kept")
    resume(options(tmp_path, results=tmp_path / "kept"), "latest")
    resume(options(tmp_path), str(path))
    assert asked == [tmp_path / "kept"] * 3, "a record's own store, whatever --results says"


def test_a_commit_that_is_not_head_is_refused(tmp_path, monkeypatch):
    head(monkeypatch, "f" * 40)
    with pytest.raises(UsageError, match=f"commit: got {COMMIT}, but HEAD is {'f' * 40}"):
        prepare(options(tmp_path))


def test_another_gpu_is_refused_and_the_same_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.devices, "detect", lambda requested: H200)
    monkeypatch.setattr(runs, "free_memory", lambda device: (None, None))
    kept, path = begun(tmp_path, device="cuda")
    assert kept.machine.gpu["uuid"] == UUID
    plan, _, _ = resume(options(tmp_path), str(path))
    assert plan.device == H200
    other = Device("cuda", "NVIDIA H200", 1, UUID[:-1] + "2")
    monkeypatch.setattr(runs.devices, "detect", lambda requested: other)
    with pytest.raises(UsageError, match=f"begun with GPU {UUID}, this is {other.uuid}"):
        resume(options(tmp_path), str(path))


def test_the_device_is_the_one_of_the_record(tmp_path, monkeypatch):
    """Whatever --device would choose."""
    _, path = begun(tmp_path)
    asked = []
    real = devices.detect
    monkeypatch.setattr(runs.devices, "detect", lambda requested: asked.append(requested) or real(requested))
    resume(options(tmp_path, device="auto"), str(path))
    assert asked == ["cpu"]


def test_a_profile_of_ones_own_is_asked_for_again(tmp_path):
    mine = custom(tmp_path)
    kept, path = begun(tmp_path, profile=str(mine))
    with pytest.raises(UsageError, match=r"its profile mine\.[0-9a-f]+ is none of this program's"):
        resume(options(tmp_path), str(path))
    plan, _, _ = resume(options(tmp_path, profile=str(mine)), str(path))
    assert plan.profile.name == "mine"
    custom(tmp_path, seed=7)
    with pytest.raises(
        UsageError, match=f"{kept.run.planned[0].split('profile=')[1][:-1]}, this run uses mine"
    ):
        resume(options(tmp_path, profile=str(mine)), str(path))


@pytest.mark.parametrize("text", ["", "{", '{"schema": 99}', "[]", "null"])
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=str(path)):
        resume(options(tmp_path), str(path))
    with pytest.raises(RecordError, match="cannot read"):
        resume(options(tmp_path), str(tmp_path / "nowhere.json"))


def age(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_atime - seconds,) * 2)


def test_the_newest_unfinished_record_is_found(tmp_path):
    paths = []
    for at, machine in enumerate(("bench-1", "bench-1", "bench-2")):
        kept, path = begun(tmp_path, machine=machine, commit=f"{COMMIT[:-1]}{at}")
        age(path, 100 - at)
        paths.append((path, kept.run.commit))
    (old, a), (newer, b), (newest, c) = paths
    assert resume(options(tmp_path, commit=c), "latest")[2] == newest
    assert resume(options(tmp_path, commit=b, machine="bench-1"), "latest")[2] == newer
    kept = record.read(newer)
    kept.run.finished = True
    record.write(newer, kept)
    assert resume(options(tmp_path, commit=a, machine="bench-1"), "latest")[2] == old
    with pytest.raises(
        UsageError,
        match=r"resume: no unfinished record under .*results/records; give the path of one, or begin a new run",
    ):
        resume(options(tmp_path, machine="bench-3"), "latest")


def test_an_unreadable_record_does_not_hide_the_others(tmp_path):
    _, path = begun(tmp_path)
    (path.parent / "broken.json").write_text("{")
    assert resume(options(tmp_path), "latest")[2] == path
    path.unlink()
    with pytest.raises(UsageError, match=r"no unfinished record under .* that can be read \(.*broken\.json"):
        resume(options(tmp_path), "latest")


@pytest.mark.parametrize("which", ["latest", "path"])
def test_no_name_for_a_machine_is_refused_when_going_on_too(tmp_path, which):
    _, path = begun(tmp_path)
    with pytest.raises(UsageError, match="machine: got ''"):
        resume(options(tmp_path, machine=""), str(path) if which == "path" else which)


def test_where_there_are_no_records_none_is_found(tmp_path):
    with pytest.raises(UsageError, match="no unfinished record"):
        resume(options(tmp_path), "latest")


def test_a_record_from_before_the_clock_was_set_back_is_not_the_newest(tmp_path):
    """Its time lies ahead of every other, and will for months."""
    _, ahead = begun(tmp_path)
    age(ahead, -100 * 86400)
    assert resume(options(tmp_path), "latest")[2] == ahead
    _, now = begun(tmp_path)
    assert resume(options(tmp_path), "latest")[2] == now


def test_a_clock_of_the_store_that_is_a_little_ahead_changes_nothing(tmp_path):
    _, old = begun(tmp_path)
    age(old, 10)
    _, now = begun(tmp_path)
    age(now, -10)
    assert resume(options(tmp_path), "latest")[2] == now


def test_a_link_to_nowhere_among_the_records_hides_no_other(tmp_path):
    _, path = begun(tmp_path)
    (path.parent / "gone.json").symlink_to(tmp_path / "nowhere")
    assert resume(options(tmp_path), "latest")[2] == path
    path.unlink()
    with pytest.raises(UsageError, match=r"no unfinished record under .* that can be read \(.*gone\.json"):
        resume(options(tmp_path), "latest")


# A run in another process.

RUN = """
import sys, time
from pathlib import Path
from harness.runs import Options, prepare, resume
which, options = sys.argv[1], Options(device="cpu", commit=sys.argv[2], results=Path(sys.argv[3]))
print((resume(options, which) if which else prepare(options))[2], flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def running(folder: Path, which: str = "") -> Iterator[Path]:
    """A process with a run of its own, begun or gone on with, and its record."""
    root = Path(runs.__file__).parent.parent
    shutil.copytree(
        root / "harness", folder / "tree" / "harness"
    )  # without history, as no_history has it here
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, which, COMMIT, str(folder / "results")],
        env=dict(os.environ, PYTHONPATH=str(folder / "tree")),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder / "tree")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps no names of sockets")
def test_a_record_that_is_being_measured_is_not_gone_on_with_elsewhere(tmp_path):
    with running(tmp_path) as path:
        with pytest.raises(
            UsageError, match=rf"^resume: another process is measuring {path}; wait until it has"
        ):
            resume(options(tmp_path), str(path))
        with pytest.raises(
            UsageError, match=rf"no unfinished record under .* but {path}, which another process"
        ):
            resume(options(tmp_path), "latest")
        _, own = begun(tmp_path, machine="another")
        age(own, 100)
        assert resume(options(tmp_path), "latest")[2] == own, "the newest that nobody is measuring"
        assert record.read(path).cases == []
    assert resume(options(tmp_path), str(path))[2] == path, "its process is gone, and so is its hold"
    prepare(options(tmp_path))  # with which this process lets go of it
    with running(tmp_path, str(path)) as again:
        assert again == path
        with pytest.raises(UsageError, match="another process is measuring"):
            resume(options(tmp_path), str(path))
