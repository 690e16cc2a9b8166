import importlib.metadata
import os
import subprocess
import sys
import types

import pytest
from fake_nvml import GETTERS, A, B, FakeGpu, install

from harness import telemetry
from harness.telemetry import FIELDS, Nvml, foreign, owners, same_uuid

# The getters behind each field, the best one first.
BEHIND = {
    "name": ["Name"],
    "uuid": ["UUID"],
    "pci": ["PciInfo"],
    "compute_capability": ["CudaComputeCapability"],
    "cores": ["NumGpuCores"],
    "memory_bytes": ["MemoryInfo"],
    "memory_used_bytes": ["MemoryInfo"],
    "ecc": ["EccMode"],
    "mig": ["MigMode"],
    "power_limit_w": ["EnforcedPowerLimit", "PowerManagementLimit"],
    "power_limit_default_w": ["PowerManagementDefaultLimit"],
    "vbios": ["VbiosVersion"],
    "pcie_generation": ["CurrPcieLinkGeneration"],
    "pcie_generation_max": ["MaxPcieLinkGeneration"],
    "pcie_generation_device": ["GpuMaxPcieLinkGeneration"],
    "pcie_width": ["CurrPcieLinkWidth"],
    "pcie_width_max": ["MaxPcieLinkWidth"],
    "pcie_replays": ["PcieReplayCounter"],
    "nvlinks": ["NvLinkState"],
    "nvlink_version": ["NvLinkVersion"],
    "cpu_affinity": ["CpuAffinity"],
    "persistence": ["PersistenceMode"],
    "compute_mode": ["ComputeMode"],
    "driver_model": ["CurrentDriverModel"],
    "virtualisation": ["VirtualizationMode"],
    # Where NVML does not tell, the kernel is asked about the slot.
    "numa_node": ["NumaNodeId", "PciInfo"],
    "sm_mhz_max": ["MaxClockInfo"],
    "mem_mhz_max": ["MaxClockInfo"],
    "sm_mhz": ["ClockInfo"],
    "mem_mhz": ["ClockInfo"],
    "power_w": ["FieldValues", "PowerUsage"],
    "temperature_c": ["Temperature"],
    "reasons": ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"],
    "utilisation_percent": ["UtilizationRates"],
    "energy_j": ["TotalEnergyConsumption"],
    "pids": ["ComputeRunningProcesses"],
}

VALUES = {
    "name": "NVIDIA H200",
    "memory_bytes": 140 << 30,
    "ecc": True,
    "mig": False,
    "power_limit_w": 700.0,
    "compute_mode": "default",
    "driver_model": "WDM (TCC)",
    "virtualisation": "passthrough",
    "sm_mhz": 1980,
    "mem_mhz": 3201,
    "power_w": 123.456,
    "temperature_c": 36,
    "reasons": 4,
    "energy_j": 2000.0,
    "pids": [],
    "nvlinks": 18,
    "nvlink_version": 4,
    "cpu_affinity": "0-3",
    "pcie_replays": 0,
}

WORDS = {
    "NotSupported": "not supported by this device",
    "Unknown": "unknown NVML error",
    "GpuIsLost": "GPU is lost",
}


def read(field: str) -> telemetry.Reading:
    with Nvml() as nvml:
        return nvml.devices()[0].read(field)


def test_every_field_is_covered_here():
    assert BEHIND.keys() == FIELDS.keys()


@pytest.mark.parametrize("field", VALUES)
def test_a_field_has_its_value_in_its_unit(monkeypatch, field):
    install(monkeypatch, FakeGpu())
    assert read(field) == (VALUES[field], None)


@pytest.mark.parametrize("error", WORDS)
@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_getter_that_fails_gives_none_with_the_reason_and_harms_no_other(monkeypatch, field, error):
    broken = {f"nvmlDeviceGet{name}": error for name in BEHIND[field]}
    install(monkeypatch, FakeGpu(errors=broken))
    with Nvml() as nvml:
        (device,) = nvml.devices()
        readings = {name: device.read(name) for name in FIELDS}
    assert readings[field] == (None, WORDS[error])
    untouched = [name for name in FIELDS if not set(BEHIND[name]) & set(BEHIND[field])]
    assert len(untouched) >= len(FIELDS) - 2
    assert all(readings[name].reason is None for name in untouched)


@pytest.mark.parametrize("error", WORDS)
def test_all_getters_may_fail_at_once(monkeypatch, error):
    install(monkeypatch, FakeGpu(errors={"*": error}))
    with Nvml() as nvml:
        (device,) = nvml.devices()
        assert {device.read(name) for name in FIELDS} == {(None, WORDS[error])}
        assert nvml.device(A) is None


@pytest.mark.parametrize("field", ["power_limit_w", "power_w", "reasons"])
def test_a_second_getter_steps_in(monkeypatch, field):
    best, second = BEHIND[field]
    fake = install(monkeypatch, FakeGpu(errors={f"nvmlDeviceGet{best}": "NotSupported"}))
    assert read(field).reason is None
    assert fake.calls[-1] == f"nvmlDeviceGet{second}"


def test_an_error_inside_a_field_value_is_an_error(monkeypatch):
    failed = types.SimpleNamespace(nvmlReturn=3, value=types.SimpleNamespace(uiVal=999_000))
    install(monkeypatch, FakeGpu(values={"nvmlDeviceGetFieldValues": lambda h, ids: [failed]}))
    assert read("power_w") == (122.0, None)


def test_an_old_binding_without_the_new_names_still_reads(monkeypatch):
    absent = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlMemory_v2", "nvmlDeviceGetVbiosVersion")
    install(monkeypatch, FakeGpu(), absent=absent)
    assert read("reasons") == (4, None)
    assert read("memory_bytes") == (140 << 30, None)
    assert read("vbios") == (None, "not offered by this nvidia-ml-py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1\n", (1, None)),
        ("-1\n", (None, "the kernel knows of no node for this slot")),
        (None, (None, "neither NVML nor the kernel tells")),
    ],
)
def test_the_kernel_knows_the_node_of_a_slot(monkeypatch, tmp_path, text, expected):
    monkeypatch.setattr(telemetry, "_PCI_SLOTS", tmp_path)
    if text is not None:
        (tmp_path / "0000:06:00.0").mkdir()
        (tmp_path / "0000:06:00.0" / "numa_node").write_text(text)
    install(monkeypatch, FakeGpu(errors={"nvmlDeviceGetNumaNodeId": "NotSupported"}))
    assert read("numa_node") == expected


def test_nvlinks_are_counted_up_to_the_last_there_is(monkeypatch):
    fake = install(monkeypatch, FakeGpu())

    def state(handle: object, link: int) -> int:
        if link == 6:
            raise fake.error("NotSupported")
        return int(link != 2)

    fake.gpus[0].values["nvmlDeviceGetNvLinkState"] = state
    assert read("nvlinks") == (5, None)


def test_cores_beside_the_gpu_are_listed_as_the_kernel_lists_them(monkeypatch):
    install(monkeypatch, FakeGpu(values={"nvmlDeviceGetCpuAffinity": lambda h, words: [0b1011, 1]}))
    assert read("cpu_affinity") == ("0-1,3,64", None)
    install(monkeypatch, FakeGpu(values={"nvmlDeviceGetCpuAffinity": lambda h, words: [0]}))
    assert read("cpu_affinity") == (None, "names no core")


def test_an_old_binding_gives_bytes(monkeypatch):
    install(monkeypatch, FakeGpu(values={"nvmlDeviceGetName": b"NVIDIA H200"}))
    assert read("name").value == "NVIDIA H200"


@pytest.mark.parametrize(
    ("field", "getter", "wild"),
    [
        ("sm_mhz", "ClockInfo", 0xFFFFFFFF),
        ("temperature_c", "Temperature", 0xFFFFFFFF),
        ("power_limit_w", "EnforcedPowerLimit", 0),
        ("pcie_width", "CurrPcieLinkWidth", 0xFFFFFFFF),
        ("utilisation_percent", "UtilizationRates", types.SimpleNamespace(gpu=255)),
    ],
)
def test_a_value_that_cannot_be_true_is_none(monkeypatch, field, getter, wild):
    second = {"nvmlDeviceGetPowerManagementLimit": wild} if field == "power_limit_w" else {}
    install(monkeypatch, FakeGpu(values={f"nvmlDeviceGet{getter}": wild, **second}))
    value, reason = read(field)
    assert value is None
    assert reason is not None
    assert reason.startswith("out of range")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LibraryNotFound", "no NVIDIA driver (NVML library not found)"),
        ("DriverNotLoaded", "the NVIDIA driver is not loaded"),
    ],
)
def test_no_driver_is_a_reason_not_an_error(monkeypatch, error, words):
    install(monkeypatch, FakeGpu(), init_error=error)
    with Nvml() as nvml:
        assert nvml.reason == words
        assert nvml.devices() == []
        assert nvml.system("nvmlSystemGetDriverVersion") == (None, words)


def test_no_binding_is_a_reason_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Nvml() as nvml:
        assert nvml.reason == "nvidia-ml-py is not installed"


def test_another_package_called_pynvml_is_a_reason_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    with Nvml() as nvml:
        assert nvml.reason == "not offered by this nvidia-ml-py"


def test_reasons_name_no_path(monkeypatch):
    fake = install(monkeypatch, FakeGpu())

    def refuse() -> None:
        raise OSError("cannot load /home/someone/lib/libnvidia-ml.so")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", refuse)
    with Nvml() as nvml:
        assert nvml.reason == "OSError: cannot load (path)"
    assert fake.open == 0


def test_nvml_is_shut_down_again(monkeypatch):
    fake = install(monkeypatch, FakeGpu())
    with Nvml():
        assert fake.open == 1
    assert fake.open == 0


def test_devices_come_in_the_order_of_the_bus_and_are_found_by_uuid(monkeypatch):
    install(monkeypatch, FakeGpu(uuid=B, bus=9), FakeGpu(uuid=A, bus=2))
    with Nvml() as nvml:
        assert [device.read("uuid").value for device in nvml.devices()] == [A, B]
        for uuid in (A, B, B.removeprefix("GPU-"), B.upper()):
            device = nvml.device(uuid)
            assert device is not None
            assert same_uuid(device.read("uuid").value, uuid)


def test_a_lost_neighbour_does_not_hide_a_device(monkeypatch):
    install(monkeypatch, FakeGpu(uuid=B, errors={"*": "GpuIsLost"}), FakeGpu(uuid=A))
    with Nvml() as nvml:
        assert nvml.device(A) is not None


def test_a_mig_slice_has_its_own_memory_and_its_parents_clocks(monkeypatch):
    install(monkeypatch, FakeGpu(slices=["MIG-one", "MIG-two"]))
    with Nvml() as nvml:
        device = nvml.device("MIG-two")
        assert device is not None
        assert device.read("name").value == "NVIDIA H200 MIG 1g.18gb"
        assert device.read("memory_bytes").value == 18 << 30
        assert device.read("sm_mhz").value == 1980
        assert device.read("cores") == (None, WORDS["NotSupported"])


def test_torch_writes_a_uuid_without_its_prefix():
    assert same_uuid(A, A.removeprefix("GPU-"))
    assert not same_uuid(A, B)
    assert not same_uuid(None, None)


def test_all_getters_of_the_fake_are_used():
    """A getter nobody calls would make the tests above prove less than they seem to."""
    used = {f"nvmlDeviceGet{name}" for names in BEHIND.values() for name in names}
    assert used | {"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"} == GETTERS.keys()


def distributions(monkeypatch, owning: dict[str, str]) -> None:
    def find(name: str) -> object:
        if name not in owning:
            raise importlib.metadata.PackageNotFoundError(name)
        files = [importlib.metadata.PackagePath(owning[name])]
        return types.SimpleNamespace(version="1.0", files=files)

    monkeypatch.setattr(importlib.metadata, "distribution", find)


def test_packages_that_own_the_same_module_are_named(monkeypatch):
    distributions(monkeypatch, {"nvidia-ml-py": "pynvml.py", "nvidia-ml-py3": "pynvml.py"})
    assert owners() == ["nvidia-ml-py 1.0", "nvidia-ml-py3 1.0"]


def test_the_newer_pynvml_package_owns_another_module(monkeypatch):
    distributions(monkeypatch, {"nvidia-ml-py": "pynvml.py", "pynvml": "pynvml_utils/__init__.py"})
    assert owners() == ["nvidia-ml-py 1.0"]


def test_this_process_and_its_children_are_ours():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pids = [os.getpid(), child.pid]
        assert foreign(pids, [os.getpid()]) == (0, [])
        # Seen from the child, its parent is a stranger.
        assert foreign(pids, [child.pid]) == (1, [os.getpid()])
        child.communicate(b"\n")


def test_ids_of_another_namespace_count_beyond_our_own_contexts():
    unseen = [2**22 + 1, 2**22 + 2]
    assert foreign(unseen[:1], [os.getpid()]) == (0, [])
    assert foreign(unseen, [os.getpid()]) == (1, [])
    assert foreign([os.getpid(), *unseen], [os.getpid()]) == (2, [])
    assert foreign(unseen[:1], [os.getpid()], contexts=0) == (1, [])
