"""On what a record was measured: device, machine, software and environment.

Every fact is optional: one that cannot be read is None, and `missing` says why. No host name, no serial
number and no path is ever recorded. Facts that only torch knows come from the worker (`merge`).
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
from harness.comparable import CPU_HARD_KEYS, HARD_KEYS, SOFT_KEYS, Difference, comparable
from harness.devices import Device, cores, default_machine_name, detect, torch_build
from harness.record import Machine
from harness.source import Checkout, checkout, commit
from harness.telemetry import Nvml, full_uuid, owners, ranges, same_uuid

__all__ = [
    "CPU_HARD_KEYS",
    "HARD_KEYS",
    "SOFT_KEYS",
    "Checkout",
    "Device",
    "Difference",
    "checkout",
    "commit",
    "comparable",
    "default_machine_name",
    "detect",
    "environment",
    "identity",
    "merge",
    "software",
]

# Fields of telemetry.FIELDS that tell what a GPU is. The link is read at rest, where it may be slower; the worker
# reads it again under load.
GPU_FIELDS = (
    "uuid",
    "compute_capability",
    "cores",
    "memory_bytes",
    "ecc",
    "mig",
    "power_limit_w",
    "power_limit_default_w",
    "sm_mhz_max",
    "mem_mhz_max",
    "vbios",
    "pcie_generation",
    "pcie_generation_max",
    "pcie_generation_device",
    "pcie_width",
    "pcie_width_max",
    "persistence",
    "compute_mode",
    "driver_model",
    "virtualisation",
    "numa_node",
    "cpu_affinity",
    "nvlinks",
    "nvlink_version",
    "pcie_replays",
)

# What only a process that has the device open can tell of it, and those missing before one was.
OF_DEVICE = (
    "sm_count",
    "l2_bytes",
    "copy_engines",
    "pinned_numa_node",
    "pcie_generation_loaded",
    "pcie_width_loaded",
)

PACKAGES = ("torch", "asv", "asv_runner", "numpy", "scipy", "msgspec", "nvidia-ml-py")

# Every variable that changes overlap, or the speed of a leg.
VARIABLES = re.compile(
    r"(CUDA|CUBLAS|CUBLASLT|CUDNN|NCCL|GLOO|NVSHMEM|UCX|FI|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|GOMP|KMP|MKL"
    r"|OPENBLAS|NVIDIA_TF32|MALLOC)_\w+|LD_PRELOAD|GLIBC_TUNABLES|NVIDIA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE"
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|HOST|ADDR|COMM_ID|URL", re.IGNORECASE)
_PLAIN_VALUE = re.compile(r"[\w.,:;=+\-\[\]() ]{0,200}", re.ASCII)
# A long run of letters and digits is a token or a hash; the UUID of a device has hyphens.
_OPAQUE = re.compile(r"(?=[A-Za-z_]*\d)[A-Za-z0-9_]{25,}")
HIDDEN = "(set)"


def identity(device: Device, name: str | None = None) -> Machine:
    """The machine of a record; `name` is its kind of machine, by default the one that `device` gives."""
    gpu: dict[str, Any] = {}
    if device.kind == "cuda":
        gpu = _gpu(device)
    return Machine(name=name or default_machine_name(device), device=device.kind, gpu=gpu, cpu=_cpu())


def software() -> dict[str, Any]:
    """Versions of what takes part, none of it imported; the worker adds what torch alone knows.

    `torch`, `torch_git` and `cuda` are those that torch was built with.
    """
    found: dict[str, Any] = {"overlap": harness.__version__, "python": platform.python_version()}
    missing: dict[str, str] = {}
    for package in PACKAGES:
        name = package.replace("-", "_")
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name], missing[name] = None, "not installed"
    build = torch_build()
    found |= {"torch": build.get("version") or found["torch"], "torch_git": build.get("git_version")}
    found["cuda"] = build.get("cuda")
    found["nvml_package"] = ", ".join(owners()) or None
    found["system"] = platform.system()
    found["kernel"] = platform.release()
    found["libc"] = " ".join(platform.libc_ver()).strip() or None
    found["container"] = container()
    with Nvml() as nvml:
        for name, getters in {
            "driver": ("nvmlSystemGetDriverVersion",),
            "cuda_driver": ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"),
        }.items():
            found[name], reason = nvml.system(*getters)
            if reason is not None:
                missing[name] = reason
    if isinstance(found["driver"], bytes):
        found["driver"] = found["driver"].decode(errors="replace")
    if found["cuda_driver"] is not None:
        found["cuda_driver"] = f"{found['cuda_driver'] // 1000}.{found['cuda_driver'] % 1000 // 10}"
    found["missing"] = missing
    return found


def merge(machine: Machine, versions: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Put what the worker's torch knows into a record's machine and software: it is what was loaded and used.

    Args:
        facts: any of the versions torch, torch_git, cuda, cublas, cudnn, nccl, and of the device its name, uuid,
            memory_bytes and those of OF_DEVICE; None is no fact. A uuid other than the expected one is the device that
            was used, so NVML is asked again about that one. memory_bytes is taken only where NVML gives none
            (unified memory); `memory_source` says whose it is.
    """
    known = {name: fact for name, fact in facts.items() if fact is not None}
    of_gpu: dict[str, Any] = {
        name: known.pop(name) for name in ("name", "uuid", "memory_bytes", *OF_DEVICE) if name in known
    }
    _fill(versions, known)
    if machine.device != "cuda":
        return
    uuid = of_gpu.pop("uuid", None)
    if uuid is not None and not same_uuid(uuid, machine.gpu.get("uuid")):
        machine.gpu = _gpu(Device("cuda", of_gpu.get("name") or machine.gpu["name"], 1, full_uuid(uuid)))
    if machine.gpu.get("memory_bytes") is not None:
        of_gpu.pop("memory_bytes", None)
    elif "memory_bytes" in of_gpu:
        of_gpu["memory_source"] = "torch"
    _fill(machine.gpu, of_gpu)


def best_link(machine: Machine) -> tuple[int, int] | None:
    """PCIe generation and width that device and slot can do; None where they are not known."""
    generation, width = machine.gpu.get("pcie_generation_max"), machine.gpu.get("pcie_width_max")
    return (generation, width) if isinstance(generation, int) and isinstance(width, int) else None


def merge_link(machine: Machine, link: tuple[int, int] | None) -> None:
    """Put the PCIe generation and width that were read under load into a record's machine."""
    if link is not None:
        _fill(machine.gpu, {"pcie_generation_loaded": link[0], "pcie_width_loaded": link[1]})


def _fill(into: dict[str, Any], facts: Mapping[str, Any]) -> None:
    into.update(facts)
    for name in facts:
        into.get("missing", {}).pop(name, None)


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Variables that change overlap (what could be a path or a secret is `(set)`), and host settings.

    Host settings have names in lower case: cpu governor, transparent huge pages, locked-memory limit and size
    of /dev/shm in bytes (None: no limit, or not known here).
    """
    found: dict[str, Any] = {
        name: _harmless(name, text) for name, text in sorted(variables.items()) if VARIABLES.fullmatch(name)
    }
    found["governor"] = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    pages = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    found["transparent_hugepages"] = pages[1] if pages else None
    found["memlock_bytes"] = memlock_bytes()
    found["shm_bytes"] = shm_bytes()
    return found


def memlock_bytes() -> int | None:
    """Bytes this process may lock in memory; None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def shm_bytes() -> int | None:
    """Size of /dev/shm; None where there is none."""
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return None
    return state.f_blocks * state.f_frsize


def container(variables: Mapping[str, str] = os.environ) -> str | None:
    """The kind of container this process seems to be in; None for none that shows."""
    if "APPTAINER_CONTAINER" in variables or "SINGULARITY_CONTAINER" in variables:
        return "apptainer"
    if "KUBERNETES_SERVICE_HOST" in variables:
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    named = re.search(r"kubepods|docker|containerd|lxc", _read("/proc/1/cgroup") or "")
    return named[0] if named else None


def _gpu(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {"name": device.name, "uuid": device.uuid, **dict.fromkeys(OF_DEVICE)}
    missing = dict.fromkeys(OF_DEVICE, "not told by a process that has the device open")
    with Nvml() as nvml:
        reader = nvml.device(device.uuid) if device.uuid else None
        reason: str | None = nvml.reason or "NVML lists no device of this UUID"
        for field in GPU_FIELDS:
            value = None
            if reader is not None:
                value, reason = reader.read(field)
            if value is None and found.get(field) is None:
                missing[field] = reason or "no value"
            found[field] = found.get(field) if value is None else value
    found["memory_source"] = None if found["memory_bytes"] is None else "NVML"
    found["missing"] = missing
    return found


def _cpu() -> dict[str, Any]:
    found: dict[str, Any] = {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": cores(),
        "affinity": ranges(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
    missing: dict[str, str] = {}
    info = _read("/proc/cpuinfo")
    facts: dict[str, Callable[[], Any]] = {
        "model": lambda: _search(r"^(?:model name|cpu model|Hardware)\s*:\s*(.+)$", info),
        "memory_bytes": lambda: int(_search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))) << 10,
        "numa_nodes": lambda: len(list(_existing("/sys/devices/system/node").glob("node[0-9]*"))),
        "hypervisor": lambda: "hypervisor" in _search(r"^flags\s*:(.*)$", info).split(),
        "quota_cores": _quota_cores,
    }
    for name, read in facts.items():
        try:
            found[name] = read()
        except (OSError, LookupError, ValueError) as error:
            found[name], missing[name] = None, str(error).strip("'\"")
    found["missing"] = missing
    return found


def _quota_cores() -> float:
    """Cores' worth of time that the container may use (cgroup v2)."""
    text = _read("/sys/fs/cgroup/cpu.max")
    if text is None:
        raise LookupError("no cgroup limit to read")
    quota, _, period = text.partition(" ")
    if quota == "max":
        raise LookupError("no limit")
    return int(quota) / int(period)


def _search(pattern: str, text: str | None) -> str:
    match = re.search(pattern, text or "", re.MULTILINE)
    if match is None:
        raise LookupError("the kernel does not tell")
    return match[1].strip()


def _existing(path: str) -> Path:
    if not os.path.isdir(path):
        raise LookupError("the kernel does not tell")
    return Path(path)


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return None


def _harmless(name: str, text: str) -> str:
    if _SECRET_NAME.search(name) or not _PLAIN_VALUE.fullmatch(text):
        return HIDDEN
    return HIDDEN if _OPAQUE.search(text) else text
