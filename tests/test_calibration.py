import io
import os
import subprocess
import sys

import msgspec
import pytest

from harness import calibration, profiles
from harness.backends import get_backend
from harness.case import Case
from harness.devices import Device
from harness.errors import MeasurementError, Skip, UsageError
from harness.families import H2D, MIB
from harness.profiles import H2DSizes, Profile, read_profile
from harness.workloads.h2d import H2DWorkload

CPU = Device("cpu", "cpu", 2)
PINNED = {"1MiB": 7, "4MiB": 9}


def sizes(columns, repeats):
    """Sizes of a start profile; what stands for pinned memory is seen to be kept on the cpu."""
    return H2DSizes(
        columns={"pinned": PINNED, "pageable": columns}, repeats={"pinned": PINNED, "pageable": repeats}
    )


def start(columns=32):
    """The cpu profile, with a pool small enough for a test."""
    return msgspec.structs.replace(
        profiles.packaged()["cpu"], rotate_bytes=8 * MIB, h2d=sizes({"1MiB": columns}, {"1MiB": 1})
    )


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(calibration, "SIZES", (MIB, 4 * MIB))
    monkeypatch.setattr(calibration, "SAMPLES", 5)


@pytest.fixture
def children(monkeypatch):
    """Every process that is started."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started


def stand_in(tmp_path, monkeypatch, script):
    """Let a shell script stand for the measuring child: it gets the start profile on stdin."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def gone(child):
    """Ended and waited for: no zombie is left either."""
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    return child.returncode is not None


def legs(profile, size):
    """Median times of the copy and of the compute of an unsplit case."""
    backend = get_backend("cpu")
    case = Case.of(
        H2D, memory="pageable", stream="side", chunks=1, size=size, ratio=1.0, gate="off", profile=profile.key
    )
    workload = H2DWorkload(case, profile, backend)
    copy, compute = (calibration._median(workload, arm) for arm in ("transfer", "compute"))
    workload.close()
    backend.close()
    return copy, compute


def model(monkeypatch, compute_ms, copy_ms=1.0):
    """Let a batch take `copy_ms` to copy and `compute_ms(columns)` to compute, whatever this machine takes."""

    def median(workload, arm):
        plan = workload.plan
        one = copy_ms if arm == "transfer" else compute_ms(plan.columns * plan.gemms)
        return one * plan.repeats

    monkeypatch.setattr(calibration, "_median", median)


@pytest.mark.parametrize("columns", [4, 32, 2048])
def test_legs_are_balanced_to_a_column_step_wherever_it_starts(little, monkeypatch, columns):
    model(monkeypatch, lambda columns: 0.011 * columns)
    found = calibration._tables("cpu", start(columns), lambda text: None)
    assert found.columns["pageable"] == {"1MiB": 92, "4MiB": 92}  # 1 / 0.011 = 90.9, in steps of 4


def test_a_choice_that_turned_out_worse_is_not_kept(little, monkeypatch):
    """Very narrow products take longer than wider ones: steps towards less compute end up with more of it."""
    model(monkeypatch, lambda columns: 3.0 if columns < 16 else 0.09 * columns)
    found = calibration._tables("cpu", start(16), lambda text: None)
    assert found.columns["pageable"]["1MiB"] == 16


@pytest.mark.parametrize(("copy_ms", "repeats"), [(0.03, 67), (1.9, 2), (2.0, 1), (50.0, 1)])
def test_a_sample_lasts_at_least_as_long_as_the_profile_asks(little, monkeypatch, copy_ms, repeats):
    model(monkeypatch, lambda columns: copy_ms * columns / 32, copy_ms)
    assert start().sample_ms == 2.0
    assert calibration._tables("cpu", start(32), lambda text: None).repeats["pageable"]["4MiB"] == repeats


def test_sizes_found_on_this_machine_balance_its_legs(little):
    """The start is off by twenty and more. Another program that takes the cores may spoil one try, not three."""
    far = msgspec.structs.replace(start(512), column_step=16)
    copy, compute = legs(far, 4 * MIB)
    assert compute / copy > 8
    for _ in range(3):
        said: list[str] = []
        found = calibration._tables("cpu", far, said.append)
        assert found.columns["pageable"].keys() == found.repeats["pageable"].keys() == {"1MiB", "4MiB"}
        assert sum("pageable" in line and "copy" in line for line in said) == 2
        copy, compute = legs(msgspec.structs.replace(far, h2d=found), 4 * MIB)
        if 0.2 < compute / copy < 5:
            break
    assert 0.2 < compute / copy < 5
    assert max(copy, compute) > far.sample_ms / 3


def test_what_has_no_meaning_here_is_said_and_keeps_the_sizes_of_the_start(little):
    said = []
    found = calibration._tables("cpu", start(), said.append)
    assert found.columns["pinned"] == found.repeats["pinned"] == PINNED
    assert [line for line in said if line.startswith("pinned")] == [
        "pinned: pinned memory has no meaning on the cpu backend: no device reads it"
    ]


def test_a_size_that_does_not_fit_is_named(little, monkeypatch):
    real = calibration._balance

    def balance(start, memory, size, backend):
        if memory == "pageable" and size == 4 * MIB:
            raise Skip("no room")
        return real(start, memory, size, backend)

    model(monkeypatch, lambda columns: columns / 32)
    monkeypatch.setattr(calibration, "_balance", balance)
    said: list[str] = []
    calibration._tables("cpu", start(), said.append)
    assert "pageable 4MiB: no room" in said


@pytest.mark.parametrize(
    ("compute_ms", "words"),
    [
        (lambda columns: columns / 32, "legs balanced: compute over copy is 1.00 to 1.00"),
        (lambda columns: 1.24, "legs balanced: compute over copy is 1.24 to 1.24"),
        (lambda columns: 1.26, "compute over copy is 1.26 to 1.26: 2 of 2 sizes lie outside 0.8 to 1.25"),
        (lambda columns: 0.5, "compute over copy is 0.50 to 0.50: 2 of 2 sizes lie outside 0.8 to 1.25"),
    ],
)
def test_balance_is_said_only_of_legs_that_are_balanced(little, monkeypatch, compute_ms, words):
    model(monkeypatch, compute_ms)
    said: list[str] = []
    calibration._tables("cpu", start(), said.append)
    assert said[-1] == words


def test_the_range_over_all_sizes_is_said():
    words = calibration._balance_words([0.5, 1.0, 1.5])
    assert words == "compute over copy is 0.50 to 1.50: 2 of 3 sizes lie outside 0.8 to 1.25"
    assert "nothing was measured" in calibration._balance_words([])


def test_the_child_reads_a_profile_and_writes_its_sizes(little, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["calibration", "cpu"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(start()))))
    assert calibration.main() == 0
    out, err = capfd.readouterr()
    assert msgspec.json.decode(out, type=H2DSizes).columns["pageable"].keys() == {"1MiB", "4MiB"}
    assert "pageable 4MiB: copy " in err


def test_a_profile_is_made_of_the_child_s_sizes_and_the_rest_of_the_start(tmp_path, monkeypatch, children):
    measured = sizes({"1MiB": 12, "64MiB": 24}, {"1MiB": 8, "64MiB": 1})
    (tmp_path / "sizes").write_bytes(msgspec.json.encode(measured))
    stand_in(
        tmp_path,
        monkeypatch,
        f'cat > "{tmp_path}/given"; cat "{tmp_path}/sizes"; echo "$@" > "{tmp_path}/asked"',
    )
    output = tmp_path / "made" / "mine.json"
    made = calibration.calibrate("mine", Device("cpu", "a model", 2), output)
    base = profiles.packaged()["cpu"]
    assert msgspec.json.decode((tmp_path / "given").read_bytes(), type=Profile) == base
    assert (tmp_path / "asked").read_text() == "-m harness.calibration cpu\n"
    assert read_profile(output) == made
    assert made == msgspec.structs.replace(
        base, name="mine", summary="calibrated on a model", devices=["a model"], h2d=measured
    )
    assert made.key.startswith("mine.")
    assert output.read_text().count("\n") > 20, "written for people and for git"
    assert [gone(child) for child in children] == [True]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "calibrate: the measuring process ended with exit code 3"),
        ("kill -9 $$", "calibrate: the measuring process ended with exit code -9"),
        ("cat > /dev/null; echo '{\"columns\": {}}'", "calibrate: the measuring process said no sizes: "),
        ("cat > /dev/null; echo hello", "calibrate: the measuring process said no sizes: "),
        ("cat > /dev/null; printf '\\377'", "calibrate: the measuring process said no sizes: "),
    ],
)
def test_a_child_that_fails_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, children, script, words):
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(MeasurementError) as caught:
        calibration.calibrate("mine", CPU, tmp_path / "mine.json")
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "mine.json").exists()
    assert [gone(child) for child in children] == [True]


def test_a_child_that_never_ends_is_ended(tmp_path, monkeypatch, children):
    monkeypatch.setattr(calibration, "SECONDS", 0.2)
    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    with pytest.raises(MeasurementError, match=r"calibrate: not done after 0\.2 s; ended"):
        calibration.calibrate("mine", CPU, tmp_path / "mine.json")
    assert [gone(child) for child in children] == [True]
    assert not (tmp_path / "mine.json").exists()


def test_an_interrupt_ends_the_child_too(tmp_path, monkeypatch, children):
    def interrupt(self, *args, **options):
        raise KeyboardInterrupt

    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibration.calibrate("mine", CPU, tmp_path / "mine.json")
    assert [gone(child) for child in children] == [True]


def test_a_device_that_cannot_be_opened_is_said_by_the_real_child_without_a_traceback(tmp_path, capfd):
    with pytest.raises(MeasurementError, match="ended with exit code 2"):
        calibration.calibrate("mine", Device("tpu", "a model", 1), tmp_path / "mine.json")
    assert capfd.readouterr().err == "calibrate: device: got 'tpu', want cuda or cpu\n"


def test_a_cpu_too_small_to_measure_on_is_said_without_a_traceback(monkeypatch, capfd):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(sys, "argv", ["calibration", "cpu"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(start()))))
    assert calibration.main() == MeasurementError.exit_code
    assert capfd.readouterr().err.startswith("calibrate: cpu backend: needs 2 cores")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", "a" * 65, "x\n"])
def test_a_bad_name_is_refused_before_anything_is_started(tmp_path, children, name):
    with pytest.raises(UsageError, match=r"^name: got .*, want up to 64 letters"):
        calibration.calibrate(name, CPU, tmp_path / "mine.json")
    assert not children
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_started(tmp_path, children):
    (tmp_path / "file").write_bytes(b"")
    output = tmp_path / "file" / "mine.json"
    with pytest.raises(UsageError, match=r"^calibrate: cannot write .*: Not a directory$"):
        calibration.calibrate("mine", CPU, output)
    assert not children
