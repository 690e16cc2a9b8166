import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import A, B, C, FakeGpu, install

import harness
from harness import devices
from harness.devices import Device, default_machine_name, detect, torch_build
from harness.errors import UsageError
from harness.record import safe_name

MASKS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@pytest.fixture(autouse=True)
def with_cuda_torch(monkeypatch):
    """A torch with CUDA, no mask, and no driver nodes, wherever the tests run."""
    monkeypatch.setattr(devices, "torch_build", lambda: {"version": "2.11.0+cu130", "cuda": "13.0"})
    monkeypatch.setattr(devices, "_DRIVER_NODES", ())
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)


def three(monkeypatch) -> None:
    """Three GPUs on buses 2, 5 and 7; NVML lists them in another order."""
    install(
        monkeypatch,
        FakeGpu(uuid=B, name="GPU on bus 5", bus=5),
        FakeGpu(uuid=C, name="GPU on bus 7", bus=7),
        FakeGpu(uuid=A, name="GPU on bus 2", bus=2),
    )


@pytest.mark.parametrize(
    ("mask", "first", "count"),
    [
        (None, A, 3),
        ("0", A, 1),
        ("1", B, 1),
        ("1,0", B, 2),
        ("0,2,-1,1", A, 2),
        ("2,7,0", C, 1),
        (" 2 , 1", C, 2),
        (B, B, 1),
        (f"{C},{A}", C, 2),
        ("GPU-b", B, 1),
        ("gpu-b", None, 0),
        (B.upper(), B, 1),
        ("GPU-", None, 0),  # begins the name of all three
        ("GPU-f", None, 0),
        (f"GPU-c,GPU-f,{A}", C, 1),
        ("", None, 0),
        ("-1", None, 0),
        ("none", None, 0),
        ("NoDevFiles", None, 0),
        ("1,1", None, 0),
    ],
)
def test_the_mask_decides_which_device_cuda_calls_0(monkeypatch, mask, first, count):
    three(monkeypatch)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    device = detect("auto")
    if first is None:
        assert device.kind == "cpu"
        assert device.reason == f"CUDA_VISIBLE_DEVICES={mask!r} shows none of the GPUs here (3)"
    else:
        assert (device.kind, device.uuid, device.count) == ("cuda", first, count)
        assert device.reason == ""


def test_cuda_puts_the_fastest_first_unless_told_otherwise(monkeypatch):
    install(
        monkeypatch,
        FakeGpu(uuid=A, name="NVIDIA T400", bus=2, capability=(7, 5), cores=384),
        FakeGpu(uuid=B, name="NVIDIA H200", bus=5),
    )
    assert detect("auto").uuid == B
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert detect("auto").name == "NVIDIA T400"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert detect("auto").name == "NVIDIA H200"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert detect("auto").uuid == A


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, (B, "NVIDIA H200", 1)),
        ("0", ("MIG-one", "NVIDIA H200 MIG 1g.18gb", 1)),
        ("MIG-two", ("MIG-two", "NVIDIA H200 MIG 1g.18gb", 1)),
        ("MIG-two,MIG-one", ("MIG-two", "NVIDIA H200 MIG 1g.18gb", 1)),
        ("MIG-t", ("MIG-two", "NVIDIA H200 MIG 1g.18gb", 1)),
        ("1", (B, "NVIDIA H200", 1)),
        ("1,0", (B, "NVIDIA H200", 1)),
        ("MIG-three", None),
    ],
)
def test_mig_slices(monkeypatch, mask, expected):
    install(monkeypatch, FakeGpu(uuid=A, bus=2, slices=["MIG-one", "MIG-two"]), FakeGpu(uuid=B, bus=5))
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    device = detect("auto")
    found = (device.uuid, device.name, device.count) if device.kind == "cuda" else None
    assert found == expected


def test_only_mig_gpus_show_one_slice(monkeypatch):
    install(monkeypatch, FakeGpu(uuid=A, slices=["MIG-one", "MIG-two"]))
    assert detect("auto").uuid == "MIG-one"


def test_a_gpu_whose_getters_fail_is_still_found(monkeypatch):
    getters = ("Name", "PciInfo", "CudaComputeCapability", "NumGpuCores", "MaxClockInfo", "MigMode")
    install(monkeypatch, FakeGpu(errors={f"nvmlDeviceGet{getter}": "Unknown" for getter in getters}))
    assert detect("auto") == Device("cuda", "unknown GPU", 1, A)


def test_a_wrong_choice_is_named():
    with pytest.raises(UsageError, match="device: got 'gpu', want auto, cuda or cpu"):
        detect("gpu")


def test_cpu_is_never_refused(monkeypatch):
    three(monkeypatch)
    device = detect("cpu")
    assert (device.kind, device.name, device.reason) == ("cpu", "cpu", "asked for")
    assert device.count == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ({}, "torch is not installed"),
        ({"version": "2.13.0+cpu", "cuda": None}, "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_a_torch_without_cuda_means_cpu(monkeypatch, build, words):
    three(monkeypatch)
    monkeypatch.setattr(devices, "torch_build", lambda: build)
    assert detect("auto").reason == words
    with pytest.raises(
        UsageError, match=f"got cuda, but {words.replace('+', '.')}; install a torch with CUDA"
    ):
        detect("cuda")


def test_no_driver_means_cpu_and_one_line_for_cuda(monkeypatch):
    install(monkeypatch, init_error="LibraryNotFound")
    monkeypatch.setattr(devices, "_ask_torch", lambda: None)
    assert detect("auto").reason == "no NVIDIA driver (NVML library not found)"
    with pytest.raises(UsageError) as caught:
        detect("cuda")
    assert "\n" not in str(caught.value)
    assert "install an NVIDIA driver" in str(caught.value)
    assert "--device cpu" in str(caught.value)


def fake_torch(folder: Path, monkeypatch, body: str) -> None:
    (folder / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


TORCH = """
import types
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda index: types.SimpleNamespace(name="Orin", uuid="aaaa-bbbb"))
"""


def test_without_nvml_a_child_asks_torch(monkeypatch, tmp_path):
    install(monkeypatch, init_error="LibraryNotFound")
    fake_torch(tmp_path, monkeypatch, TORCH)
    assert detect("auto").kind == "cpu"  # nothing says that a driver is here: torch is not started in vain
    assert detect("cuda") == Device("cuda", "Orin", 2, "GPU-aaaa-bbbb")
    monkeypatch.setattr(devices, "_DRIVER_NODES", (str(tmp_path),))
    assert detect("auto").name == "Orin"


def test_a_torch_that_breaks_in_the_child_means_no_device(monkeypatch, tmp_path):
    install(monkeypatch, init_error="LibraryNotFound")
    fake_torch(tmp_path, monkeypatch, "raise RuntimeError('broken')")
    with pytest.raises(UsageError, match="no NVIDIA driver"):
        detect("cuda")


def test_torch_is_read_without_being_imported(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\n"
        "cuda: Optional[str] = '13.0'\ngit_version = '70d99e9'\nhip: Optional[str] = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    expected = {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None, "git_version": "70d99e9"}
    assert torch_build() == expected
    (tmp_path / "torch" / "version.py").unlink()
    assert torch_build() == {"version": None}


@pytest.mark.parametrize(
    ("device", "profile", "name"),
    [
        (Device("cuda", "NVIDIA H200", 1), "h200", "h200-1"),
        (Device("cuda", "NVIDIA H200", 8), "generic", "h200-8"),
        (Device("cuda", "NVIDIA A100-SXM4-80GB", 4), "generic", "a100-sxm4-80gb-4"),
        (Device("cuda", "NVIDIA H200 MIG 1g.18gb", 1), "generic", "h200-mig-1g.18gb-1"),
        (Device("cuda", "NVIDIA", 1), "generic", "cuda-1"),
        (Device("cuda", "GPU (é/..)" * 20, 1), "generic", None),
        (Device("cpu", "cpu", 2), "cpu", "cpu-2"),
        (Device("cpu", "cpu", 2), "h200", "cpu-2"),
    ],
)
def test_the_machine_is_named_by_its_kind(device, profile, name):
    given = default_machine_name(device, profile)
    assert safe_name(given) == given
    assert name in (None, given)


def test_looking_for_a_device_initialises_no_cuda():
    """A process that looked can still fork and use CUDA in the child."""
    code = """
import ctypes, json, sys
import harness.devices, harness.doctor, harness.machine, harness.telemetry
early = [name for name in ("torch", "pynvml", "numpy", "rich") if name in sys.modules]
device = harness.devices.detect("auto")
harness.machine.identity(device)
harness.machine.software()
harness.doctor.examine(device)
not_initialised = 3
state = not_initialised
if "libcuda.so" in open("/proc/self/maps").read():
    state = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
print(json.dumps([early, "torch" in sys.modules, state == not_initialised]))
"""
    root = Path(harness.__file__).parent.parent
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=root, check=True)
    assert json.loads(answer.stdout) == [[], False, True]


@pytest.mark.gpu
def test_after_import_list_and_doctor_a_fork_can_use_cuda():
    code = """
import ctypes, os, sys, warnings
from click.testing import CliRunner
import harness.cli
for words in (["list"], ["list", "--json", "--tier", "nightly"], ["doctor"], ["doctor", "--json"]):
    said = CliRunner().invoke(harness.cli.cli, words)
    assert said.exit_code == 0, (words, said.output)
    assert said.output
driver = ctypes.CDLL("libcuda.so.1")  # loading it initialises nothing
state = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
assert state == 3, f"cuDeviceGetCount: {state}, want 3 (CUDA_ERROR_NOT_INITIALIZED)"
child = os.fork()
if not child:
    import torch
    total = torch.ones(1000, device="cuda").sum().item()
    os._exit(0 if total == 1000 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "CUDA does not work after a fork"
print("fine")
"""
    root = Path(harness.__file__).parent.parent
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=root, text=True)
    assert answer.stdout == "fine\n", answer.stderr
