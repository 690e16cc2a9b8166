"""NVML, thin and fully optional: every getter stands alone, and where it gives nothing, it says why.

The one module that touches pynvml, and only inside `Nvml`. Nothing here initialises CUDA (NVML does not call
cuInit), so a process that used it can still fork.
"""

import importlib
import importlib.metadata
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from harness.sampler import NullSampler, Sampler, open_sampler
from harness.validity import Sample, labels, summarise, verdict

__all__ = [
    "FIELDS",
    "NullSampler",
    "Nvml",
    "NvmlDevice",
    "Reading",
    "Sample",
    "Sampler",
    "labels",
    "open_sampler",
    "owners",
    "same_uuid",
    "summarise",
    "verdict",
]

# Distributions that install a top-level pynvml.py; only nvidia-ml-py is kept up to date.
_PACKAGES = ("nvidia-ml-py", "pynvml", "nvidia-ml-py3", "nvidia-ml-py2")

_WORDS = {
    "NotSupported": "not supported by this device",
    "Unknown": "unknown NVML error",
    "GpuIsLost": "GPU is lost",
    "FunctionNotFound": "not offered by this driver",
    "NoPermission": "no permission",
    "DriverNotLoaded": "the NVIDIA driver is not loaded",
    "LibraryNotFound": "no NVIDIA driver (NVML library not found)",
    "LibRmVersionMismatch": "the NVIDIA driver and its NVML library are of different versions",
}
# Asking again gives the same answer.
_NO_BINDING = "not offered by this nvidia-ml-py"
PERMANENT = frozenset({_WORDS["NotSupported"], _WORDS["FunctionNotFound"], _NO_BINDING})


class Reading(NamedTuple):
    """A value, or None and the reason why there is none."""

    value: Any
    reason: str | None = None


Getter = Callable[[Any, Any], Any]

_PCI_SLOTS = Path("/sys/bus/pci/devices")
# nvml.h, NVML_NVLINK_MAX_LINKS, in its newest version.
_MAX_NVLINKS = 36


def _text(value: str | bytes) -> str:
    """Old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _within(value: float, low: float, high: float) -> float:
    """`value` if it can be true; NVML marks unknown ones by the largest number of the type."""
    if not low <= value <= high:
        raise ValueError(f"out of range: {value}")
    return value


def _clock(kind: str, getter: str = "nvmlDeviceGetClockInfo") -> Getter:
    return lambda n, h: _within(getattr(n, getter)(h, getattr(n, kind)), 0, 20_000)


def _watts(getter: str) -> Getter:
    return lambda n, h: _within(getattr(n, getter)(h), 1, 100_000_000) / 1000


def _instant_power(n: Any, h: Any) -> float:
    field = n.nvmlDeviceGetFieldValues(h, [n.NVML_FI_DEV_POWER_INSTANT])[0]
    if field.nvmlReturn:
        raise n.NVMLError(field.nvmlReturn)
    return _within(field.value.uiVal, 1, 100_000_000) / 1000


def _memory(version: str | None, part: str) -> Getter:
    def read(n: Any, h: Any) -> int:
        options = {"version": getattr(n, version)} if version else {}
        info = n.nvmlDeviceGetMemoryInfo(h, **options)
        return int(_within(getattr(info, part), 1 if part == "total" else 0, 1 << 50))

    return read


def _count(getter: str, low: int, high: int) -> Getter:
    return lambda n, h: int(_within(getattr(n, getter)(h), low, high))


def _named(getter: str, names: Mapping[int, str]) -> Getter:
    def read(n: Any, h: Any) -> str:
        value = getattr(n, getter)(h)
        return names.get(value, f"unknown ({value})")

    return read


def _pids(n: Any, h: Any) -> list[int]:
    return sorted({int(process.pid) for process in n.nvmlDeviceGetComputeRunningProcesses(h)})


def _nvlinks(n: Any, h: Any) -> int:
    """How many NVLinks of the device are up."""
    active = 0
    for link in range(_MAX_NVLINKS):
        try:
            active += bool(n.nvmlDeviceGetNvLinkState(h, link))
        except n.NVMLError:
            if link == 0:  # none at all; later it is the end of those that there are
                raise
            break
    return active


def _near_cores(n: Any, h: Any) -> str:
    """Cores beside the device, as `0-31,64-95`."""
    words = -(-(os.cpu_count() or 1) // 64)
    mask = sum(int(word) << 64 * at for at, word in enumerate(n.nvmlDeviceGetCpuAffinity(h, words)))
    if not mask:
        raise ValueError("names no core")
    return ranges(core for core in range(mask.bit_length()) if mask >> core & 1)


def _numa_node_of_slot(n: Any, h: Any) -> int:
    """The kernel's answer; -1, where the machine has one node or does not tell, is none."""
    bus = n.nvmlDeviceGetPciInfo(h)
    slot = f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}.0"
    try:
        node = int((_PCI_SLOTS / slot / "numa_node").read_text())
    except OSError:
        raise ValueError("neither NVML nor the kernel tells") from None
    if node < 0:
        raise ValueError("the kernel knows of no node for this slot")
    return node


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as the kernel lists cores: `0-3,8`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_DRIVER_MODELS = {0: "WDDM", 1: "WDM (TCC)", 2: "MCDM"}
_VIRTUALISATION = {0: "none", 1: "passthrough", 2: "vGPU", 3: "host vGPU", 4: "host vSGA"}

# Every field, and the getters that give it, the best one first.
FIELDS: dict[str, tuple[Getter, ...]] = {
    "name": (lambda n, h: _text(n.nvmlDeviceGetName(h)),),
    "uuid": (lambda n, h: _text(n.nvmlDeviceGetUUID(h)),),
    "pci": (lambda n, h: (lambda p: (p.domain, p.bus, p.device))(n.nvmlDeviceGetPciInfo(h)),),
    "compute_capability": (lambda n, h: ".".join(map(str, n.nvmlDeviceGetCudaComputeCapability(h))),),
    "cores": (_count("nvmlDeviceGetNumGpuCores", 1, 1 << 24),),
    # v2 leaves out what the driver keeps for itself; devices of unified memory have neither.
    "memory_bytes": (_memory("nvmlMemory_v2", "total"), _memory(None, "total")),
    "memory_used_bytes": (_memory("nvmlMemory_v2", "used"), _memory(None, "used")),
    "ecc": (lambda n, h: bool(n.nvmlDeviceGetEccMode(h)[0]),),
    "mig": (lambda n, h: bool(n.nvmlDeviceGetMigMode(h)[0]),),
    "power_limit_w": (_watts("nvmlDeviceGetEnforcedPowerLimit"), _watts("nvmlDeviceGetPowerManagementLimit")),
    "power_limit_default_w": (_watts("nvmlDeviceGetPowerManagementDefaultLimit"),),
    "vbios": (lambda n, h: _text(n.nvmlDeviceGetVbiosVersion(h)),),
    "pcie_generation": (_count("nvmlDeviceGetCurrPcieLinkGeneration", 1, 15),),
    "pcie_generation_max": (_count("nvmlDeviceGetMaxPcieLinkGeneration", 1, 15),),
    "pcie_generation_device": (_count("nvmlDeviceGetGpuMaxPcieLinkGeneration", 1, 15),),
    "pcie_width": (_count("nvmlDeviceGetCurrPcieLinkWidth", 1, 64),),
    "pcie_width_max": (_count("nvmlDeviceGetMaxPcieLinkWidth", 1, 64),),
    "pcie_replays": (_count("nvmlDeviceGetPcieReplayCounter", 0, 1 << 62),),
    "nvlinks": (_nvlinks,),
    "nvlink_version": (lambda n, h: int(_within(n.nvmlDeviceGetNvLinkVersion(h, 0), 1, 20)),),
    "cpu_affinity": (_near_cores,),
    "persistence": (lambda n, h: bool(n.nvmlDeviceGetPersistenceMode(h)),),
    "compute_mode": (_named("nvmlDeviceGetComputeMode", _COMPUTE_MODES),),
    "driver_model": (_named("nvmlDeviceGetCurrentDriverModel", _DRIVER_MODELS),),
    "virtualisation": (_named("nvmlDeviceGetVirtualizationMode", _VIRTUALISATION),),
    "numa_node": (_count("nvmlDeviceGetNumaNodeId", 0, 1 << 16), _numa_node_of_slot),
    "sm_mhz_max": (_clock("NVML_CLOCK_SM", "nvmlDeviceGetMaxClockInfo"),),
    "mem_mhz_max": (_clock("NVML_CLOCK_MEM", "nvmlDeviceGetMaxClockInfo"),),
    "sm_mhz": (_clock("NVML_CLOCK_SM"),),
    "mem_mhz": (_clock("NVML_CLOCK_MEM"),),
    # The second is a mean over the last second on newer devices.
    "power_w": (_instant_power, _watts("nvmlDeviceGetPowerUsage")),
    "temperature_c": (
        lambda n, h: int(_within(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU), -50, 200)),
    ),
    "reasons": (
        lambda n, h: int(n.nvmlDeviceGetCurrentClocksEventReasons(h)),
        lambda n, h: int(n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    ),
    "utilisation_percent": (lambda n, h: int(_within(n.nvmlDeviceGetUtilizationRates(h).gpu, 0, 100)),),
    "energy_j": (lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1000,),
    "pids": (_pids,),
}
# What a MIG slice must answer itself: its parent's would be another device's.
_OF_SLICE = frozenset({"name", "uuid", "cores", "memory_bytes", "memory_used_bytes"})


class Nvml:
    """NVML for the length of a `with` block. It never raises; `reason` says why it is not there, if so."""

    def __init__(self) -> None:
        self.module: Any = None
        self.reason: str | None = "NVML is not open"

    def __enter__(self) -> "Nvml":
        try:
            with warnings.catch_warnings():
                # The deprecated package `pynvml` warns on import; `overlap doctor` says so in its own words.
                warnings.simplefilter("ignore")
                module = importlib.import_module("pynvml")
            module.nvmlInit()
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
        except Exception as error:
            self.reason = _reason(error)
        else:
            self.module, self.reason = module, None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.module is not None:
            _isolated(self.module.nvmlShutdown)
        self.module, self.reason = None, "NVML is not open"

    def system(self, *names: str) -> Reading:
        """What the first of these getters without an argument gives, such as nvmlSystemGetDriverVersion."""
        return self.first(partial(self.call, name) for name in names)

    def call(self, name: str, *arguments: Any) -> Any:
        """Exactly pynvml's function of that name, errors and all."""
        return getattr(self.module, name)(*arguments)

    def devices(self) -> list["NvmlDevice"]:
        """Every device that answers, in the order of the PCI bus (CUDA_DEVICE_ORDER=PCI_BUS_ID)."""
        count, _ = self.system("nvmlDeviceGetCount")
        found = []
        for index in range(count or 0):
            handle, _ = _isolated(partial(self.call, "nvmlDeviceGetHandleByIndex", index))
            if handle is not None:
                found.append(NvmlDevice(self, handle))
        return sorted(found, key=lambda device: device.read("pci").value or (1 << 32,))

    def device(self, uuid: str) -> "NvmlDevice | None":
        """The device, or MIG slice, of that UUID; never found by index, which need not be CUDA's."""
        for device in self.devices():
            for candidate in (device, *device.slices()):
                if same_uuid(candidate.read("uuid").value, uuid):
                    return candidate
        return None

    def first(self, getters: Iterable[Callable[[], Any]]) -> Reading:
        """What the first getter that works gives, else the reason of the last."""
        if self.module is None:
            return Reading(None, self.reason)
        reading = Reading(None, "no getter")
        for getter in getters:
            reading = _isolated(getter)
            if reading.reason is None:
                break
        return reading


class NvmlDevice:
    """One device, or one MIG slice of `parent`."""

    def __init__(self, nvml: Nvml, handle: Any, parent: "NvmlDevice | None" = None) -> None:
        self._nvml, self._handle, self.parent = nvml, handle, parent

    def read(self, field: str) -> Reading:
        """One of FIELDS. A MIG slice has no clocks, power or link of its own: those are its parent's."""
        getters = (partial(getter, self._nvml.module, self._handle) for getter in FIELDS[field])
        reading = self._nvml.first(getters)
        if reading.reason is not None and self.parent is not None and field not in _OF_SLICE:
            return self.parent.read(field)
        return reading

    def slices(self) -> list["NvmlDevice"]:
        """The MIG slices of this device, in order."""
        if not self.read("mig").value:
            return []
        nvml = self._nvml
        most, _ = _isolated(partial(nvml.call, "nvmlDeviceGetMaxMigDeviceCount", self._handle))
        handles = (
            _isolated(partial(nvml.call, "nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index)).value
            for index in range(most or 0)
        )
        return [NvmlDevice(nvml, handle, parent=self) for handle in handles if handle is not None]


def same_uuid(one: str | None, other: str | None) -> bool:
    """Whether both name one device; torch leaves out the `GPU-` that NVML writes."""
    if not one or not other:
        return False
    return one.removeprefix("GPU-").lower() == other.removeprefix("GPU-").lower()


def full_uuid(uuid: str) -> str:
    """As NVML writes it; torch leaves out the `GPU-`."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def owners() -> list[str]:
    """`name version` of every installed distribution that owns pynvml.py; two overwrite each other's."""
    found = {}
    for name in _PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if any(file.as_posix() == "pynvml.py" for file in distribution.files or ()):
            found[name] = f"{name} {distribution.version}"
    return list(found.values())


def foreign(pids: Iterable[int], own: Iterable[int], *, contexts: int = 1) -> tuple[int, list[int]]:
    """How many of the processes on a device are not ours, and the ids of those that can be seen.

    Ours are `own` and all that descend from them. In a container NVML may list ids of another namespace,
    which name no process here: `contexts` of those are taken to be ours as long as none of ours is listed.
    """
    roots, ours, strangers, hidden = set(own), 0, [], 0
    for pid in pids:
        if not os.path.exists(f"/proc/{pid}"):
            hidden += 1
        elif _descends(pid, roots):
            ours += 1
        else:
            strangers.append(pid)
    return len(strangers) + max(0, hidden - (0 if ours else contexts)), strangers


def _descends(pid: int, own: set[int]) -> bool:
    seen: set[int] = set()
    while pid > 0 and pid not in seen:
        if pid in own:
            return True
        seen.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                # The name of the program, in brackets, may hold blanks and brackets itself.
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False


def _isolated(getter: Callable[[], Any]) -> Reading:
    """What `getter` gives, or the reason it gives nothing: no fault of NVML's may end a measurement."""
    try:
        return Reading(getter())
    except Exception as error:
        return Reading(None, _reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return _NO_BINDING
    if isinstance(error, ValueError):
        return str(error)
    name = type(error).__name__.removeprefix("NVMLError_")
    # Text of unknown errors may hold paths of this machine.
    return _WORDS.get(name) or re.sub(r"\S*/\S*", "(path)", f"{name}: {error}")[:120]
