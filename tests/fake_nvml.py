"""A scripted NVML. `install` puts it in place of pynvml in this process, `write_module` in a folder for a child."""

import itertools
import json
import sys
import textwrap
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-{letter * 12}" for letter in "abc")

ERRORS = {"NotSupported": 3, "NoPermission": 4, "DriverNotLoaded": 9, "LibraryNotFound": 12}
ERRORS |= {"FunctionNotFound": 13, "GpuIsLost": 15, "Unknown": 999}


@dataclass
class FakeGpu:
    """One GPU. `values` overrides what a getter gives; a list is given item by item, over and over.

    errors: getter name, or `*` for every getter of this GPU, to the name of the error it raises.
    slices: UUIDs of its MIG slices, which turn MIG mode on.
    """

    uuid: str = A
    name: str = "NVIDIA H200"
    bus: int = 6
    capability: tuple[int, int] = (9, 0)
    cores: int = 16896
    pids: list[int] = field(default_factory=list)
    slices: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass
class _Slice:
    uuid: str
    parent: FakeGpu


class FakeNvml:
    """The functions of pynvml that the harness calls; `absent` are those that this version does not have."""

    def __init__(
        self, gpus: list[FakeGpu], *, init_error: str | None = None, absent: tuple[str, ...] = ()
    ) -> None:
        self.gpus, self.init_error, self.absent = gpus, init_error, absent
        self.open = 0
        self.calls: list[str] = []
        self._cycles: dict[tuple[str, str], Any] = {}

        class NVMLError(Exception):
            def __init__(self, value: int) -> None:
                super().__init__(value)
                self.value = value

        self.NVMLError = NVMLError
        self.classes = {name: type(f"NVMLError_{name}", (NVMLError,), {}) for name in ERRORS}

    def error(self, name: str) -> Exception:
        return self.classes[name](ERRORS[name])

    def namespace(self) -> dict[str, Any]:
        """Everything to put in a module called pynvml."""
        names: dict[str, Any] = {"NVMLError": self.NVMLError}
        names |= {kind.__name__: kind for kind in self.classes.values()}
        names |= {
            "NVML_CLOCK_SM": 1,
            "NVML_CLOCK_MEM": 2,
            "NVML_TEMPERATURE_GPU": 0,
            "nvmlMemory_v2": 0x2000028,
        }
        names |= {"NVML_FI_DEV_POWER_INSTANT": 186}
        names |= {"nvmlInit": self.init, "nvmlShutdown": self.shutdown}
        names |= {"nvmlSystemGetDriverVersion": lambda: "580.159.04"}
        names |= {"nvmlSystemGetCudaDriverVersion_v2": lambda: 13000}
        names |= {"nvmlDeviceGetCount": lambda: len(self.gpus)}
        names |= {"nvmlDeviceGetHandleByIndex": lambda index: self.gpus[index]}
        names |= {getter: self.getter(getter, default) for getter, default in GETTERS.items()}
        return {name: value for name, value in names.items() if name not in self.absent}

    def init(self) -> None:
        if self.init_error:
            raise self.error(self.init_error)
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def getter(self, name: str, default: Any) -> Any:
        def get(handle: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            gpu = handle.parent if isinstance(handle, _Slice) else handle
            broken = gpu.errors.get(name) or gpu.errors.get("*")
            if broken is None and isinstance(handle, _Slice) and name not in OF_SLICES:
                broken = "NotSupported"
            if broken:
                raise self.error(broken)
            given = gpu.values.get(name, default)
            if callable(given):
                given = given(handle, *arguments, **options)
            elif isinstance(given, list) and name in gpu.values:
                cycle = self._cycles.setdefault((gpu.uuid, name), itertools.cycle(given))
                given = next(cycle)
            return given

        return get


def _slice_handle(gpu: FakeGpu, index: int) -> _Slice:
    return _Slice(gpu.slices[index], gpu)


def _memory(handle: Any, version: int | None = None) -> SimpleNamespace:
    total = 18 << 30 if isinstance(handle, _Slice) else 140 << 30
    return SimpleNamespace(total=total, used=1 << 30, free=total - (1 << 30), version=version)


GETTERS: dict[str, Any] = {
    "nvmlDeviceGetName": lambda h: f"{h.parent.name} MIG 1g.18gb" if isinstance(h, _Slice) else h.name,
    "nvmlDeviceGetUUID": lambda h: h.uuid,
    "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(domain=0, bus=h.bus, device=0),
    "nvmlDeviceGetCudaComputeCapability": lambda h: h.capability,
    "nvmlDeviceGetNumGpuCores": lambda h: h.cores,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetPcieReplayCounter": 0,
    "nvmlDeviceGetNvLinkState": lambda h, link: int(link < 18),
    "nvmlDeviceGetNvLinkVersion": lambda h, link: 4,
    "nvmlDeviceGetCpuAffinity": lambda h, words: [0b1111, *[0] * (words - 1)],
    "nvmlDeviceGetEccMode": (1, 1),
    "nvmlDeviceGetMigMode": lambda h: (bool(h.slices), bool(h.slices)),
    "nvmlDeviceGetMaxMigDeviceCount": lambda h: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _slice_handle,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetVbiosVersion": "96.00.A5.00.1A",
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetCurrentDriverModel": 1,
    "nvmlDeviceGetVirtualizationMode": 1,
    "nvmlDeviceGetNumaNodeId": 0,
    "nvmlDeviceGetMaxClockInfo": lambda h, kind: {1: 1980, 2: 3201}[kind],
    "nvmlDeviceGetClockInfo": lambda h, kind: {1: 1980, 2: 3201}[kind],
    "nvmlDeviceGetFieldValues": lambda h, ids: [
        SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=123_456)) for _ in ids
    ],
    "nvmlDeviceGetPowerUsage": 122_000,
    "nvmlDeviceGetTemperature": lambda h, sensor: 36,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
    "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=0, memory=0),
    "nvmlDeviceGetTotalEnergyConsumption": 2_000_000,
    "nvmlDeviceGetComputeRunningProcesses": lambda h: [SimpleNamespace(pid=pid) for pid in h.pids],
}

OF_SLICES = ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo")


def install(monkeypatch: Any, *gpus: FakeGpu, **options: Any) -> FakeNvml:
    """Make `import pynvml` in this process give a fake with these GPUs, in NVML's order."""
    fake = FakeNvml(list(gpus), **options)
    module = types.ModuleType("pynvml")
    module.__dict__.update(fake.namespace())
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return fake


def write_module(folder: Path, *gpus: FakeGpu) -> None:
    """Write a pynvml.py into `folder` with these GPUs, for a child that has the folder first on PYTHONPATH."""
    (folder / "gpus.json").write_text(json.dumps([asdict(gpu) for gpu in gpus]))
    source = f"""
        import json, sys
        sys.path.append({str(Path(__file__).parent)!r})
        from fake_nvml import FakeGpu, FakeNvml
        gpus = [FakeGpu(**gpu) for gpu in json.loads(open({str(folder / "gpus.json")!r}).read())]
        globals().update(FakeNvml(gpus).namespace())
        """
    (folder / "pynvml.py").write_text(textwrap.dedent(source))
