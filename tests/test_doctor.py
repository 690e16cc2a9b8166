import importlib.metadata
import subprocess
import sys

import pytest
from fake_nvml import A, FakeGpu, install

from harness import doctor
from harness.devices import Device
from harness.doctor import LEVELS, Finding, examine, healthy
from harness.source import Checkout

H200 = Device("cuda", "NVIDIA H200", 1, A)
CPU = Device("cpu", "cpu", 2, reason="no NVIDIA driver")


@pytest.fixture(autouse=True)
def sound(monkeypatch):
    """A sound machine, whatever this one is like; each test spoils one thing."""
    monkeypatch.setattr(doctor, "torch_build", lambda: {"version": "2.11.0", "cuda": "13.0"})
    monkeypatch.setattr(doctor, "shm_bytes", lambda: 8 << 30)
    monkeypatch.setattr(doctor, "memlock_bytes", lambda: None)
    monkeypatch.setattr(doctor, "cores", lambda: 16)
    monkeypatch.setattr(doctor, "owners", lambda: ["nvidia-ml-py 13.0"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(
        doctor, "checkout", lambda: Checkout("0123456789abcdef0123456789abcdef01234567", False)
    )
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def gpu(**changes: object) -> FakeGpu:
    quiet = {"nvmlDeviceGetCurrentClocksEventReasons": 1}
    values = changes.pop("values", {})
    assert isinstance(values, dict)
    return FakeGpu(values={**quiet, **values}, **changes)


def spoiled(findings: list[Finding]) -> dict[str, str]:
    """Everything that is not in order, by name."""
    return {finding.name: finding.level for finding in findings if finding.level not in ("ok", "info")}


def one(findings: list[Finding], name: str, level: str) -> Finding:
    (found,) = [finding for finding in findings if (finding.name, finding.level) == (name, level)]
    return found


def test_a_package_that_is_not_there_is_named_with_what_it_costs(monkeypatch):
    def version(name: str) -> str:
        if name == "pillow":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    install(monkeypatch, gpu())
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = one(examine(H200), "pillow", "warn")
    assert (found.text, found.remedy) == (
        "not installed; no pictures for the cases of a loader", "pip install pillow"
    )  # fmt: skip


def test_a_sound_gpu_machine_has_nothing_to_mend(monkeypatch):
    install(monkeypatch, gpu())
    findings = examine(H200)
    assert spoiled(findings) == {}
    assert healthy(findings)
    assert one(findings, "device", "ok").text == "NVIDIA H200"
    assert (
        one(findings, "driver", "ok").text == "NVIDIA 580.159.04, for CUDA up to 13.0; 1 GPU in this machine"
    )
    assert one(findings, "commit", "ok").text == "0123456789ab"


def test_a_cpu_machine_is_healthy_and_told_what_is_skipped(monkeypatch):
    install(monkeypatch, init_error="LibraryNotFound")
    findings = examine(CPU)
    assert spoiled(findings) == {}
    assert "no NVIDIA driver" in one(findings, "device", "ok").text
    assert "pinned memory" in one(findings, "skipped", "info").text
    assert "NVML library not found" in one(findings, "nvml", "info").text


@pytest.mark.parametrize(
    ("name", "level", "changes"),
    [
        ("persistence", "warn", {"values": {"nvmlDeviceGetPersistenceMode": 0}}),
        ("compute mode", "fail", {"values": {"nvmlDeviceGetComputeMode": 2}}),
        ("driver model", "warn", {"values": {"nvmlDeviceGetCurrentDriverModel": 0}}),
        ("PCIe", "warn", {"values": {"nvmlDeviceGetMaxPcieLinkGeneration": 3}}),
        ("PCIe", "warn", {"values": {"nvmlDeviceGetCurrPcieLinkWidth": 8}}),
        ("clocks", "warn", {"values": {"nvmlDeviceGetCurrentClocksEventReasons": 0x40}}),
        ("busy GPU", "warn", {"pids": [1]}),
    ],
)
def test_what_spoils_overlap_on_the_gpu_is_found(monkeypatch, name, level, changes):
    install(monkeypatch, gpu(**changes))
    findings = examine(H200)
    assert spoiled(findings) == {name: level}
    assert healthy(findings) == (level != "fail")
    assert one(findings, name, level).remedy


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("compute mode", {"values": {"nvmlDeviceGetComputeMode": 3}}),
        ("clocks", {"values": {"nvmlDeviceGetCurrentClocksEventReasons": 4}}),
        ("MIG", {"slices": ["MIG-one"]}),
    ],
)
def test_what_is_only_worth_knowing_is_said(monkeypatch, name, changes):
    install(monkeypatch, gpu(**changes))
    findings = examine(H200)
    assert spoiled(findings) == {}
    assert one(findings, name, "info").text


@pytest.mark.parametrize(
    ("variable", "text", "level"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warn"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", None),
        ("CUDA_LAUNCH_BLOCKING", "1", "fail"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "", "warn"),
        ("CUDA_SCALE_LAUNCH_QUEUES", "0.25x", "warn"),
    ],
)
def test_variables_that_spoil_overlap_are_found(monkeypatch, variable, text, level):
    install(monkeypatch, gpu())
    monkeypatch.setenv(variable, text)
    findings = examine(H200)
    assert spoiled(findings) == ({variable: level} if level else {})
    assert healthy(findings) == (level != "fail")
    assert variable not in {finding.name for finding in examine(CPU)}


@pytest.mark.parametrize(
    ("name", "reader", "size", "text"),
    [
        ("/dev/shm", "shm_bytes", 64 << 20, "64MiB"),
        ("memlock", "memlock_bytes", 65536, "64KiB"),
        ("memlock", "memlock_bytes", (8 << 20) + 17, "8MiB"),
        ("cores", "cores", 1, "one core"),
    ],
)
def test_small_limits_of_the_host_are_found(monkeypatch, name, reader, size, text):
    install(monkeypatch, gpu())
    monkeypatch.setattr(doctor, reader, lambda: size)
    findings = examine(H200)
    assert spoiled(findings) == {name: "warn"}
    assert one(findings, name, "warn").text.startswith(text)
    assert one(findings, name, "warn").remedy


def test_two_packages_that_own_pynvml_are_found(monkeypatch):
    install(monkeypatch, gpu())
    monkeypatch.setattr(doctor, "owners", lambda: ["nvidia-ml-py 13.0", "nvidia-ml-py3 7.352"])
    text = one(examine(H200), "pynvml.py", "warn").text
    assert "nvidia-ml-py 13.0, nvidia-ml-py3 7.352" in text


@pytest.mark.parametrize(("package", "level"), [("torch", "fail"), ("numpy", "fail"), ("asv", "warn")])
def test_a_package_that_is_missing_is_found(monkeypatch, package, level):
    install(monkeypatch, gpu())

    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    findings = examine(H200)
    assert spoiled(findings) == {package: level}
    assert one(findings, package, level).remedy == f"pip install {package}"


@pytest.mark.parametrize(("version", "found"), [("2.8.1+cu128", True), ("2.11.0", False), ("3.0", False)])
def test_a_torch_that_cannot_compile_the_gate_is_told_what_it_skips(monkeypatch, version, found):
    install(monkeypatch, gpu())
    monkeypatch.setattr(doctor, "torch_build", lambda: {"version": version, "cuda": "12.8"})
    told = [finding for finding in examine(H200) if finding.name == "skipped"]
    assert bool(told) is found
    if found:
        assert "gated cases" in told[0].text
        assert told[0].remedy == "install torch 2.9 or newer"


def test_a_driver_too_old_for_torch_is_found(monkeypatch):
    install(monkeypatch, gpu())
    monkeypatch.setattr(doctor, "torch_build", lambda: {"version": "3.0", "cuda": "14.1"})
    findings = examine(H200)
    assert spoiled(findings) == {"driver": "fail"}
    assert "CUDA 14.1" in one(findings, "driver", "fail").text


def test_a_gpu_that_cannot_be_used_is_pointed_at(monkeypatch):
    install(monkeypatch, gpu())
    findings = examine(Device("cpu", "cpu", 2, reason="torch 2.13.0+cpu is built without CUDA"))
    assert spoiled(findings) == {"hidden GPU": "warn"}
    assert spoiled(examine(Device("cpu", "cpu", 2, reason="asked for"))) == {}


def test_nvml_that_cannot_be_read_on_a_gpu_machine_is_found(monkeypatch):
    install(monkeypatch, init_error="Unknown")
    findings = examine(H200)
    assert spoiled(findings) == {"nvml": "warn"}
    assert healthy(findings)


def test_a_gpu_whose_getters_all_fail_does_not_end_the_doctor(monkeypatch):
    install(monkeypatch, gpu(errors={"*": "GpuIsLost"}))
    assert spoiled(examine(H200)) == {"nvml": "warn"}
    getters = "PersistenceMode ComputeMode ComputeRunningProcesses UtilizationRates CurrPcieLinkWidth MigMode"
    install(monkeypatch, gpu(errors={f"nvmlDeviceGet{getter}": "NotSupported" for getter in getters.split()}))
    assert spoiled(examine(H200)) == {}


@pytest.mark.parametrize(
    ("state", "level", "words"),
    [
        (Checkout("none", None, "git is not installed"), "warn", "git is not installed"),
        (Checkout("a" * 40, True), "info", "uncommitted changes"),
    ],
)
def test_the_state_of_the_commit_is_told(monkeypatch, state, level, words):
    install(monkeypatch, gpu())
    monkeypatch.setattr(doctor, "checkout", lambda: state)
    assert words in one(examine(H200), "commit", level).text


def test_our_own_children_do_not_make_the_gpu_busy(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        install(monkeypatch, gpu(pids=[child.pid]))
        assert spoiled(examine(H200)) == {}
        child.communicate(b"\n")


def test_levels_are_known_and_texts_are_one_line(monkeypatch):
    install(monkeypatch, gpu(values={"nvmlDeviceGetPersistenceMode": 0}, pids=[1]))
    for finding in [*examine(H200), *examine(CPU)]:
        assert finding.level in LEVELS
        assert finding.text
        assert "\n" not in finding.text + finding.remedy
