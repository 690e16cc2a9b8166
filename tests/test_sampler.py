import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import A, B, FakeGpu, install, write_module

import harness
from harness import sampler as module
from harness.nvml_sampler import Poller
from harness.sampler import NullSampler, Sampler, open_sampler
from harness.telemetry import Nvml


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended but was not reaped does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """A function that puts a fake pynvml with the given GPUs before every child."""

    def write(*gpus: FakeGpu) -> None:
        write_module(tmp_path, *gpus)
        first = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(first))

    return write


def test_the_child_delivers_samples_of_the_right_gpu(nvml):
    nvml(
        FakeGpu(uuid=B, values={"nvmlDeviceGetTemperature": 90}),
        FakeGpu(
            uuid=A,
            values={"nvmlDeviceGetClockInfo": [1980, 3201, 1755, 3201], "nvmlDeviceGetTemperature": 36},
        ),
    )
    with Sampler(A, interval_s=0.005) as sampler:
        start = time.monotonic()
        assert sampler.since(start) != []  # up and running
        start = time.monotonic()
        time.sleep(0.5)
        end = time.monotonic()
        samples = sampler.since(start, end)
        assert sampler.missing == {}
    assert 30 <= len(samples) <= 101
    assert all(start <= sample.t <= end for sample in samples)
    assert [sample.t for sample in samples] == sorted(sample.t for sample in samples)
    assert {sample.temperature_c for sample in samples} == {36}
    assert {sample.sm_mhz for sample in samples} == {1980, 1755}
    looks = [sample for sample in samples if sample.others is not None]
    assert 1 <= len(looks) <= 3
    assert all(sample.after is not None and sample.after < sample.t for sample in samples)


def test_a_paused_sampler_takes_no_readings_and_goes_on_afterwards(nvml):
    nvml(FakeGpu(values={"nvmlDeviceGetTemperature": list(range(30, 60))}))
    with Sampler(A, interval_s=0.005) as sampler:
        assert sampler.since(0.0)
        with sampler.paused():
            time.sleep(0.05)  # the signal has arrived
            start = time.monotonic()
            time.sleep(0.3)
            end = time.monotonic()
        time.sleep(0.1)
        assert sampler.since(start, end) == []
        assert len(sampler.since(end)) > 5
    assert sampler.missing == {}


def test_asking_until_now_takes_one_more_look_at_everything(nvml):
    nvml(FakeGpu())
    with Sampler(A, interval_s=5.0) as sampler:
        sampler.since(0.0)
        start = time.monotonic()
        (sample,) = sampler.since(start)
    assert start <= sample.t <= time.monotonic()
    assert (sample.others, sample.pcie_generation, sample.energy_j) == (0, 5, 2000.0)


def test_the_child_ends_and_is_reaped_on_close(nvml):
    nvml(FakeGpu())
    sampler = Sampler(A)
    pid = sampler.pid
    assert pid is not None
    assert alive(pid)
    sampler.since(0.0)
    start = time.monotonic()
    sampler.close()
    assert time.monotonic() - start < module.END_S / 2  # asked to end, not killed
    assert not os.path.exists(f"/proc/{pid}")
    sampler.close()
    assert (sampler.since(0.0), sampler.pid) == ([], None)


PARENT = """
import os, sys, time
from harness.sampler import Sampler
sampler = Sampler(sys.argv[1])
sampler.since(0.0)
if len(sys.argv) > 2 and os.fork() == 0:
    time.sleep(60)  # holds the pipe to the sampler open
print(sampler.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("forked", [[], ["forked"]])
def test_the_child_ends_when_its_parent_is_killed(nvml, forked):
    nvml(FakeGpu())
    root = str(Path(harness.__file__).parent.parent)
    path = os.pathsep.join([os.environ["PYTHONPATH"], root])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, A, *forked],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not alive(child))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()


def test_ctrl_c_leaves_the_sampler_to_its_parent(nvml):
    nvml(FakeGpu())
    with Sampler(A) as sampler:
        sampler.since(0.0)
        assert sampler.pid is not None
        os.kill(sampler.pid, signal.SIGINT)
        assert sampler.since(0.0) != []


def test_a_killed_sampler_is_named_and_costs_nothing_else(nvml):
    nvml(FakeGpu())
    with Sampler(A) as sampler:
        sampler.since(0.0)
        assert sampler.pid is not None
        os.kill(sampler.pid, signal.SIGKILL)
        assert sampler.since(0.0) == []
        assert sampler.missing == {"telemetry": "the sampler was killed by SIGKILL"}
        assert sampler.pid is None
        assert sampler.since(0.0) == []


def test_a_sampler_that_hangs_is_given_up(nvml, monkeypatch):
    nvml(FakeGpu())
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    with Sampler(A) as sampler:
        wait_until(lambda: False, 0.5)
        pid = sampler.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        assert sampler.since(0.0) == []
        assert time.monotonic() - start < 0.3 + module.END_S / 2
        assert sampler.missing == {"telemetry": "the sampler gave no answer within 0.3 s"}
    assert not os.path.exists(f"/proc/{pid}")


def test_a_child_that_cannot_start_is_a_reason(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with Sampler(A) as sampler:
        assert sampler.since(0.0) == []
        assert sampler.missing == {"telemetry": "the sampler did not start: No such file or directory"}


def test_a_child_that_breaks_is_a_reason(nvml, tmp_path):
    nvml(FakeGpu())
    (tmp_path / "pynvml.py").write_text("raise SystemExit(7)")
    with Sampler(A) as sampler:
        assert sampler.since(0.0) == []
        assert sampler.missing == {"telemetry": "the sampler ended with exit code 7"}


def test_a_gpu_that_nvml_does_not_list_is_a_reason(nvml):
    nvml(FakeGpu(uuid=B))
    with Sampler(A) as sampler:
        assert sampler.since(0.0) == []
        assert sampler.missing == {"telemetry": "NVML lists no device of this UUID"}


def test_a_lost_gpu_gives_empty_samples_and_the_reason(nvml):
    nvml(FakeGpu(errors={"nvmlDeviceGetClockInfo": "GpuIsLost", "nvmlDeviceGetTemperature": "NotSupported"}))
    with Sampler(A) as sampler:
        samples = sampler.since(0.0)
        assert {sample.sm_mhz for sample in samples} == {None}
        assert samples[-1].power_w == 123.456
        assert sampler.missing == {
            "sm_mhz": "GPU is lost",
            "mem_mhz": "GPU is lost",
            "temperature_c": "not supported by this device",
        }


def test_a_stranger_on_the_gpu_is_counted_and_we_are_not(nvml):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        nvml(FakeGpu(pids=[os.getpid(), stranger.pid]))
        with Sampler(A) as sampler:
            assert sampler.since(0.0)[-1].others == 0  # a child of ours
        with Sampler(A, own=[stranger.pid]) as sampler:
            assert sampler.since(0.0)[-1].others == 1
            assert sampler.since(0.0)[-1].other_pids == (os.getpid(),)
        stranger.communicate(b"\n")


def test_ranks_that_share_a_gpu_are_no_strangers_though_a_container_hides_them(nvml):
    """Ids of another namespace name no process here: as many of them are ours as there are ranks on this GPU."""
    nvml(FakeGpu(pids=[(1 << 22) + 1, (1 << 22) + 2]))
    for contexts, others in ((2, 0), (1, 1)):
        with open_sampler(A, own=[os.getpid()], contexts=contexts) as sampler:
            assert sampler.since(0.0)[-1].others == others


def test_without_a_gpu_nothing_is_started():
    with open_sampler(None, "no NVIDIA driver") as sampler:
        assert isinstance(sampler, NullSampler)
        assert (sampler.since(0.0), sampler.missing) == ([], {"telemetry": "no NVIDIA driver"})


def poller(monkeypatch, gpu: FakeGpu) -> Poller:
    install(monkeypatch, gpu)
    nvml = Nvml().__enter__()
    device = nvml.device(A)
    assert device is not None
    return Poller(device, [os.getpid()])


def test_a_reading_seen_before_is_kept_once(monkeypatch):
    clocks = [1980, 3201] * 3 + [1755, 3201] * 3
    looking = poller(monkeypatch, FakeGpu(values={"nvmlDeviceGetClockInfo": clocks}))
    for _ in range(6):
        looking.look()
    assert [sample.sm_mhz for sample in looking.samples] == [1980, 1755]
    first, second = looking.samples
    assert first.after is None
    assert second.after is not None
    assert first.t < second.after < second.t


def test_slow_getters_are_called_seldom(monkeypatch):
    fake = install(monkeypatch, FakeGpu(errors={"nvmlDeviceGetTemperature": "NotSupported"}))
    with Nvml() as nvml:
        device = nvml.device(A)
        assert device is not None
        fake.calls.clear()
        looking = Poller(device, [])
        for _ in range(50):
            looking.look()
    assert fake.calls.count("nvmlDeviceGetClockInfo") == 100
    for rare in ("ComputeRunningProcesses", "CurrPcieLinkWidth", "TotalEnergyConsumption", "Temperature"):
        assert fake.calls.count(f"nvmlDeviceGet{rare}") <= 2, rare
    assert "nvmlDeviceGetPcieThroughput" not in fake.calls


def test_the_slowest_getter_has_a_pace_of_its_own(monkeypatch):
    monkeypatch.setattr("harness.nvml_sampler.SLOW_S", 0.0)
    looking = poller(monkeypatch, FakeGpu())
    for _ in range(20):
        looking.look()
    samples = list(looking.samples)
    assert [sample.energy_j for sample in samples] == [2000.0] + [None] * 19
    assert all(sample.others == 0 for sample in samples)


def test_a_getter_that_comes_back_is_no_longer_missing(monkeypatch):
    gpu = FakeGpu(errors={"nvmlDeviceGetTemperature": "Unknown"})
    looking = poller(monkeypatch, gpu)
    looking.look()
    assert looking.missing == {"temperature_c": "unknown NVML error"}
    gpu.errors.clear()
    looking.look()
    assert looking.missing == {}
    assert looking.samples[-1].temperature_c == 36
