import io
import os
import sys
import time

import msgspec
import pytest

from harness import calibration, child, profiles
from harness.backends import get_backend
from harness.case import Case
from harness.devices import Device
from harness.errors import MeasurementError, Skip, UsageError
from harness.families import H2D, MIB
from harness.profiles import H2DSizes, read_profile
from harness.protocol import Failed
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

    class Noted(child.subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(child.subprocess, "Popen", Noted)
    return started


OUT = """
import json, os, sys, time
asked = json.loads(sys.stdin.read())
out = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

def say(**event):
    out.write(json.dumps(event).encode() + b"\\n")
"""


def stand_in(monkeypatch, code):
    """Let `code` stand for the measuring child."""
    monkeypatch.setattr(
        calibration, "command", lambda events: [sys.executable, "-I", "-S", "-c", OUT + code, str(events)]
    )


def gone(process):
    """Ended and waited for: no zombie is left either."""
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    return process.returncode is not None


def calibrate(output, device=CPU, say=lambda text: None):
    return calibration.calibrate("mine", device, output, say)


def served(monkeypatch, ask):
    """What the real child says, in this process, when it is asked that."""
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "argv", ["calibration", str(theirs)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(ask))))
    assert calibration.main() == 0
    with os.fdopen(ours, "rb") as said:
        return [calibration._EVENTS.decode(line) for line in said]


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


@pytest.mark.timing
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


@pytest.fixture
def no_death_with_parent(monkeypatch):
    """Served in the process of the tests, whose parent may end before it, and which has a fault handler of its own."""
    from harness import serving

    monkeypatch.setattr(serving, "end_with_parent", lambda: None)
    monkeypatch.setattr(serving.faulthandler, "enable", lambda: None)


def test_the_child_reads_a_profile_and_says_its_sizes(little, monkeypatch, no_death_with_parent):
    *said, found = served(monkeypatch, calibration._Ask("cpu", start()))
    assert found.sizes.columns["pageable"].keys() == {"1MiB", "4MiB"}
    assert any(line.text.startswith("pageable 4MiB: copy ") for line in said)


def test_a_profile_is_made_of_the_child_s_sizes_and_the_rest_of_the_start(tmp_path, monkeypatch, children):
    measured = sizes({"1MiB": 12, "64MiB": 24}, {"1MiB": 8, "64MiB": 1})
    stand_in(
        monkeypatch,
        f"""
say(type="said", text="asked for " + asked["kind"] + " from " + asked["start"]["name"])
say(type="found", sizes=json.loads({msgspec.json.encode(measured).decode()!r}))
""",
    )
    output, said = tmp_path / "made" / "mine.json", []
    made = calibrate(output, Device("cpu", "a model", 2), said.append)
    base = profiles.packaged()["cpu"]
    assert said == ["asked for cpu from cpu"]
    assert read_profile(output) == made
    assert made == msgspec.structs.replace(
        base, name="mine", summary="calibrated on a model", devices=["a model"], h2d=measured
    )
    assert made.key.startswith("mine.")
    assert output.read_text().count("\n") > 20, "written for people and for git"
    assert [gone(process) for process in children] == [True]


def test_what_the_child_finds_is_said_as_it_is_found(tmp_path, monkeypatch):
    """The child waits for a file that is written when its first line has been heard."""
    heard = tmp_path / "heard"
    stand_in(
        monkeypatch,
        f"""
say(type="said", text="first")
while not os.path.exists({str(heard)!r}): time.sleep(0.01)
""",
    )
    with pytest.raises(MeasurementError, match="the worker ended before its work was done"):
        calibrate(tmp_path / "mine.json", say=lambda text: heard.touch())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('first'); print('last words'); sys.exit(3)", "the worker ended with exit code 3: last words"),
        ("sys.exit(3)", "the worker ended with exit code 3: it printed nothing"),
        ("os.kill(os.getpid(), 11)", "the worker was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "the worker was killed by SIGKILL (out of memory, or killed by hand)"),
        ("say(type='found', sizes={'columns': {}})", "the worker sent what is no event: "),
        ("out.write(b'hello\\n')", "the worker sent what is no event: "),
        ("out.write(b'\\xff\\n')", "the worker sent what is no event: "),
        ("say(type='failed', reason='no device')", "no device"),
        ("pass", "the worker ended before its work was done"),
    ],
)
def test_a_child_that_fails_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, children, code, words):
    stand_in(monkeypatch, code)
    with pytest.raises(MeasurementError) as caught:
        calibrate(tmp_path / "mine.json")
    assert str(caught.value).startswith(f"calibrate: {words}")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []
    assert [gone(process) for process in children] == [True]


def test_sizes_of_a_child_that_then_died_are_not_believed(tmp_path, monkeypatch):
    found = msgspec.json.encode(sizes({"1MiB": 12}, {"1MiB": 8})).decode()
    stand_in(monkeypatch, f"say(type='found', sizes=json.loads({found!r})); os.kill(os.getpid(), 11)")
    with pytest.raises(MeasurementError, match="killed by SIGSEGV"):
        calibrate(tmp_path / "mine.json")
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch, children):
    monkeypatch.setattr(calibration, "SILENCE_S", 0.5)
    stand_in(monkeypatch, "time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(MeasurementError, match=r"calibrate: no sign of life for 0\.5 s; ended"):
        calibrate(tmp_path / "mine.json")
    assert time.monotonic() - began < 30
    assert [gone(process) for process in children] == [True]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_the_child_too(tmp_path, monkeypatch, children):
    def interrupt(text):
        raise KeyboardInterrupt

    stand_in(monkeypatch, "say(type='said', text='working'); time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path / "mine.json", say=interrupt)
    assert [gone(process) for process in children] == [True]


def test_a_child_that_cannot_be_started_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "command", lambda events: [str(tmp_path / "nothing")])
    with pytest.raises(MeasurementError, match="calibrate: no worker could be started: No such file"):
        calibrate(tmp_path / "mine.json")


def test_a_device_that_cannot_be_opened_is_said_by_the_real_child_in_one_line(tmp_path, capfd):
    with pytest.raises(MeasurementError, match=r"^calibrate: device: got 'tpu', want cuda or cpu$"):
        calibrate(tmp_path / "mine.json", Device("tpu", "a model", 1))
    assert capfd.readouterr() == ("", "")


def test_a_cpu_too_small_to_measure_on_is_said_in_words(monkeypatch, no_death_with_parent):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    (failed,) = served(monkeypatch, calibration._Ask("cpu", start()))
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("cpu backend: needs 2 cores")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", "a" * 65, "x\n"])
def test_a_bad_name_is_refused_before_anything_is_started(tmp_path, children, name):
    with pytest.raises(UsageError, match=r"^name: got .*, want up to 64 letters"):
        calibration.calibrate(name, CPU, tmp_path / "mine.json", lambda text: None)
    assert not children
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_started(tmp_path, children):
    (tmp_path / "file").write_bytes(b"")
    output = tmp_path / "file" / "mine.json"
    with pytest.raises(UsageError, match=r"^calibrate: cannot write .*: Not a directory$"):
        calibrate(output)
    assert not children
