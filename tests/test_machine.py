import importlib.metadata
import json

import msgspec
import pytest
from fake_nvml import A, B, FakeGpu, install

from harness import machine, record
from harness.devices import Device
from harness.machine import environment, identity, merge, software

DEVICE = Device("cuda", "NVIDIA H200", 1, A)


def test_a_gpu_is_described(monkeypatch):
    install(monkeypatch, FakeGpu(uuid=B, bus=1, values={"nvmlDeviceGetVbiosVersion": "wrong"}), FakeGpu())
    found = identity(DEVICE)
    assert (found.name, found.device) == ("h200-1", "cuda")
    expected = {
        "name": "NVIDIA H200",
        "uuid": A,
        "memory_bytes": 140 << 30,
        "memory_source": "NVML",
        "ecc": True,
        "mig": False,
        "power_limit_w": 700.0,
        "vbios": "96.00.A5.00.1A",
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "persistence": True,
        "compute_mode": "default",
        "virtualisation": "passthrough",
    }
    assert {name: found.gpu[name] for name in expected} == expected
    assert set(found.gpu["missing"]) == set(machine.OF_DEVICE)


def test_every_null_is_explained(monkeypatch):
    install(
        monkeypatch,
        FakeGpu(errors={"nvmlDeviceGetEccMode": "NotSupported", "nvmlDeviceGetNumaNodeId": "Unknown"}),
    )
    gpu = identity(DEVICE).gpu
    assert {name for name, value in gpu.items() if value is None} == set(gpu["missing"])
    assert gpu["missing"]["ecc"] == "not supported by this device"
    assert gpu["missing"]["numa_node"] == "neither NVML nor the kernel tells"


@pytest.mark.parametrize("fault", ["no driver", "all lost", "another device"])
def test_a_gpu_without_nvml_is_still_named(monkeypatch, fault):
    if fault == "no driver":
        install(monkeypatch, init_error="LibraryNotFound")
    else:
        install(monkeypatch, FakeGpu(uuid=B, errors={"*": "GpuIsLost"} if fault == "all lost" else {}))
    gpu = identity(DEVICE).gpu
    assert (gpu["name"], gpu["uuid"]) == ("NVIDIA H200", A)
    nulls = {name for name, value in gpu.items() if value is None}
    assert nulls - {"memory_source"} == set(gpu["missing"])
    words = (
        "no NVIDIA driver (NVML library not found)"
        if fault == "no driver"
        else "NVML lists no device of this UUID"
    )
    assert gpu["missing"]["power_limit_w"] == words


def test_a_cpu_is_described():
    found = identity(Device("cpu", "cpu", 2, reason="asked for"))
    assert (found.name, found.device, found.gpu) == ("cpu-2", "cpu", {})
    assert found.cpu["cores"] >= found.cpu["usable_cores"] >= 1
    assert {name for name, value in found.cpu.items() if value is None} == set(found.cpu["missing"])
    assert identity(Device("cpu", "cpu", 2), name="mine").name == "mine"


def test_a_machine_without_proc_and_sys_is_described(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: None)
    monkeypatch.setattr(machine.os.path, "isdir", lambda path: False)
    cpu = identity(Device("cpu", "cpu", 2)).cpu
    assert set(cpu["missing"]) == {"model", "memory_bytes", "numa_nodes", "hypervisor", "quota_cores"}
    assert cpu["model"] is None


def test_a_cpu_quota_is_told(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "150000 100000" if path.endswith("cpu.max") else None)
    assert identity(Device("cpu", "cpu", 2)).cpu["quota_cores"] == 1.5


def test_what_was_found_goes_into_a_record_and_back(monkeypatch):
    install(monkeypatch, FakeGpu())
    found = identity(DEVICE)
    assert msgspec.json.decode(msgspec.json.encode(found), type=record.Machine) == found
    assert json.loads(json.dumps(software())) == software()
    assert json.loads(json.dumps(environment())) == environment()


def test_software_is_told_by_version(monkeypatch):
    install(monkeypatch, FakeGpu())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.6")
    found = software()
    assert found["driver"] == "580.159.04"
    assert found["cuda_driver"] == "13.0"
    assert found["asv"] == "0.6.6"
    assert found["missing"] == {}


def test_missing_software_is_explained(monkeypatch):
    install(monkeypatch, init_error="DriverNotLoaded")
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    found = software()
    words = "the NVIDIA driver is not loaded"
    assert found["missing"] == {"no_such_package": "not installed", "driver": words, "cuda_driver": words}
    assert found["no_such_package"] is None


def test_what_torch_loaded_wins(monkeypatch):
    install(monkeypatch, FakeGpu())
    found, versions = identity(DEVICE), software()
    facts = {
        "torch": "2.11.0",
        "cuda": "13.0",
        "cublas": "13.1.0",
        "cudnn": None,
        "uuid": A.removeprefix("GPU-"),
    }
    of_device = {"sm_count": 132, "l2_bytes": 60 << 20, "copy_engines": 5, "pinned_numa_node": None}
    merge(found, versions, {**facts, **of_device, "memory_bytes": 1})
    assert (versions["torch"], versions["cublas"]) == ("2.11.0", "13.1.0")
    assert "cudnn" not in versions
    assert (found.gpu["sm_count"], found.gpu["copy_engines"]) == (132, 5)
    assert found.gpu["memory_bytes"] == 140 << 30
    assert found.gpu["uuid"] == A
    assert set(found.gpu["missing"]) == {"pinned_numa_node", *LINK_UNDER_LOAD}
    assert not {"sm_count", "copy_engines"} & set(versions)


LINK_UNDER_LOAD = {"pcie_generation_loaded", "pcie_width_loaded"}


def test_the_link_is_told_as_it_is_under_load(monkeypatch):
    install(monkeypatch, FakeGpu(values={"nvmlDeviceGetCurrPcieLinkGeneration": 1}))
    found = identity(DEVICE)
    assert machine.best_link(found) == (5, 16)
    assert found.gpu["pcie_generation"] == 1
    machine.merge_link(found, None)
    assert found.gpu["pcie_generation_loaded"] is None
    machine.merge_link(found, (5, 16))
    assert (found.gpu["pcie_generation_loaded"], found.gpu["pcie_width_loaded"]) == (5, 16)
    assert not LINK_UNDER_LOAD & set(found.gpu["missing"])


def test_a_machine_without_a_link_to_ask_about_has_no_best_one(monkeypatch):
    install(monkeypatch, FakeGpu(errors={"nvmlDeviceGetMaxPcieLinkWidth": "NotSupported"}))
    assert machine.best_link(identity(DEVICE)) is None
    assert machine.best_link(identity(Device("cpu", "cpu", 2))) is None


def test_torch_steps_in_where_nvml_has_no_memory_to_tell(monkeypatch):
    install(monkeypatch, FakeGpu(errors={"nvmlDeviceGetMemoryInfo": "NotSupported"}))
    found = identity(DEVICE)
    assert found.gpu["missing"]["memory_bytes"] == "not supported by this device"
    merge(found, {}, {"memory_bytes": 128 << 30})
    assert (found.gpu["memory_bytes"], found.gpu["memory_source"]) == (128 << 30, "torch")
    assert "memory_bytes" not in found.gpu["missing"]


def test_the_device_that_torch_used_is_the_one_described(monkeypatch):
    install(
        monkeypatch, FakeGpu(), FakeGpu(uuid=B, name="NVIDIA L4", values={"nvmlDeviceGetVbiosVersion": "95"})
    )
    found = identity(DEVICE)
    merge(found, {}, {"name": "NVIDIA L4", "uuid": B.removeprefix("GPU-")})
    assert (found.gpu["name"], found.gpu["uuid"], found.gpu["vbios"]) == ("NVIDIA L4", B, "95")


def test_torch_on_the_cpu_tells_versions_only():
    found, versions = identity(Device("cpu", "cpu", 2)), {}
    merge(found, versions, {"torch": "2.11.0", "sm_count": 132})
    assert (versions, found.gpu) == ({"torch": "2.11.0"}, {})


def test_variables_that_change_overlap_are_kept_and_others_are_not():
    given = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": A,
        "NCCL_ALGO": "Ring,Tree",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8",
        "OMP_NUM_THREADS": "8",
        "HOME": "/home/someone",
        "HOSTNAME": "node7",
        "AWS_SECRET_ACCESS_KEY": "abc",
        "MY_CUDA_THING": "1",
    }
    found = environment(given)
    kept = {name: text for name, text in found.items() if name.isupper()}
    assert kept == {name: given[name] for name in list(given)[:5]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CUDA_HOME", "/usr/local/cuda"),
        ("LD_PRELOAD", "/opt/lib/libjemalloc.so"),
        ("NCCL_TOPO_FILE", "topo/file.xml"),
        ("CUDA_MPS_PIPE_DIRECTORY", "~/mps"),
        ("NCCL_COMM_ID", "node7.cluster.local:4242"),
        ("NCCL_HOSTID", "node7"),
        ("TORCH_API_TOKEN", "hunter2"),
        ("NCCL_CONF", "user@host"),
        ("TRITON_CACHE", "C:\\cache"),
        ("TORCH_X", "ghp0123456789abcdefghijklmnopqrstuv"),
        ("OMP_X", "a" * 500),
    ],
)
def test_what_could_be_a_path_or_a_secret_is_not_recorded(name, text):
    assert environment({name: text})[name] == "(set)"


def test_host_settings_are_read(monkeypatch):
    files = {"scaling_governor": "performance", "enabled": "always [madvise] never"}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path.rpartition("/")[2]))
    found = environment({})
    assert (found["governor"], found["transparent_hugepages"]) == ("performance", "madvise")
    assert {"memlock_bytes", "shm_bytes"} <= set(found)


@pytest.mark.parametrize(
    ("variables", "files", "kind"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, "kubernetes"),
        ({"APPTAINER_CONTAINER": "image"}, {}, "apptainer"),
        ({}, {"/.dockerenv"}, "docker"),
        ({}, {"/run/.containerenv"}, "podman"),
        ({}, {"/proc/1/cgroup"}, "lxc"),
        ({}, set(), None),
    ],
)
def test_a_container_is_noticed(monkeypatch, variables, files, kind):
    monkeypatch.setattr(machine.os.path, "exists", lambda path: path in files)
    monkeypatch.setattr(machine, "_read", lambda path: "0::/lxc/box" if path in files else "0::/")
    assert machine.container(variables) == kind
