"""What is here, what will be skipped, and what will spoil overlap, each with the remedy. Reads only.

Nothing is imported that initialises CUDA; the GPU is seen through NVML.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness.devices import ASKED, Device, cores, torch_build
from harness.machine import memlock_bytes, shm_bytes
from harness.sizes import format_size
from harness.source import checkout
from harness.telemetry import Nvml, NvmlDevice, foreign, owners
from harness.validity import LABELS, SPOILING, reason_names

LEVELS = ("ok", "info", "warn", "fail")

MIB = 1 << 20
# Docker gives 64 MiB; workers and NCCL pass batches through it.
SHM_MIN_BYTES = 1024 * MIB
# Registering a batch for a network card needs it locked.
MEMLOCK_MIN_BYTES = 64 * MIB
BUSY_PERCENT = 5
# The first torch with torch.cuda._compile_kernel (harness/backends/kernels.py).
GATE_NEEDS = (2, 9)


@dataclass(frozen=True)
class Finding:
    """level: one of LEVELS; `fail` means that a run would measure nothing true. remedy: what to do, if anything."""

    name: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class _Variable:
    """A variable that spoils overlap when it has one of `values` (none: any value)."""

    values: tuple[str, ...]
    level: str
    effect: str


VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": _Variable(
        ("1",), "fail", "every launch waits for the device: nothing can overlap"
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": _Variable(
        ("1",), "warn", "one hardware queue: streams may wait for each other's launches"
    ),
    "CUDA_SCALE_LAUNCH_QUEUES": _Variable(
        ("0.25x", "0.5x"), "warn", "launch queues are short: the host blocks early"
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _Variable(
        (), "warn", "every tensor is a cudaMalloc, which waits for the device"
    ),
    "TORCH_NCCL_BLOCKING_WAIT": _Variable(("1",), "warn", "the host waits for every collective"),
    "NCCL_DEBUG": _Variable(("INFO", "TRACE"), "info", "NCCL writes logs while it works"),
}


def examine(device: Device) -> list[Finding]:
    """Everything there is to say about running on `device`, in the order in which people look."""
    findings = [*_device(device), *_packages(), *_variables(os.environ, device), *_host(device)]
    if device.kind == "cuda":
        findings += _gpu(device)
    return [*findings, _checkout()]


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether a run can measure something true."""
    return all(finding.level != "fail" for finding in findings)


def _device(device: Device) -> Iterator[Finding]:
    if device.kind == "cuda":
        more = f", the first of {device.count} that CUDA shows" if device.count > 1 else ""
        yield Finding("device", "ok", f"{device.name}{more}")
        yield from _skipped_on_cuda()
    else:
        yield Finding("device", "ok", f"cpu, {device.count} cores usable ({device.reason})")
        yield Finding(
            "skipped",
            "info",
            "cases that have no meaning on a CPU, such as pinned memory, are skipped; no number compares with a GPU's",
            "run on a machine with an NVIDIA GPU and a torch with CUDA",
        )
    with Nvml() as nvml:
        if nvml.reason is not None:
            level = "warn" if device.kind == "cuda" else "info"
            text = f"not readable: {nvml.reason}; no clocks, power or throttle reasons beside the samples"
            missing = "nvidia-ml-py" if "nvidia-ml-py" in nvml.reason else "an NVIDIA driver"
            yield Finding("nvml", level, text, f"install {missing}")
            return
        driver = nvml.system("nvmlSystemGetDriverVersion").value
        cuda, _ = nvml.system("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
        count = len(nvml.devices())
    offered = f", for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    here = f"{_plural(count, 'GPU')} in this machine"
    yield Finding("driver", "ok", f"NVIDIA {driver or 'of unknown version'}{offered}; {here}")
    built = torch_build().get("cuda")
    if device.kind == "cuda" and built and cuda and int(built.partition(".")[0]) > cuda // 1000:
        text = f"torch is built for CUDA {built}, newer than the driver's"
        yield Finding("driver", "fail", text, "update the driver, or install a torch for its CUDA version")
    if device.kind == "cpu" and count and device.reason != ASKED:
        yield Finding(
            "hidden GPU",
            "warn",
            f"{_plural(count, 'GPU')} in this machine, but {device.reason}",
            "mend that, or use --device cpu",
        )


def _skipped_on_cuda() -> Iterator[Finding]:
    version = re.match(r"(\d+)\.(\d+)", torch_build().get("version") or "")
    if version and (int(version[1]), int(version[2])) < GATE_NEEDS:
        text = f"torch {version[0]} cannot compile the gate kernel: gated cases and the controls that spin"
        yield Finding("skipped", "info", text, f"install torch {GATE_NEEDS[0]}.{GATE_NEEDS[1]} or newer")


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())
    needed = dict.fromkeys(("torch", "numpy", "scipy"), "fail")
    needed |= dict.fromkeys(("asv", "nvidia-ml-py", "pillow"), "warn")
    lost = {
        "asv": "; records are written, but no asv results",
        "nvidia-ml-py": "; nothing is read beside the samples",
        "pillow": "; no pictures for the cases of a loader",
    }
    for package, level in needed.items():
        try:
            yield Finding(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            text = f"not installed{lost.get(package, '')}"
            yield Finding(package, level, text, f"pip install {package}")
    owning = owners()
    if len(owning) > 1:
        yield Finding(
            "pynvml.py",
            "warn",
            f"{len(owning)} packages own it and overwrite each other: {', '.join(owning)}",
            "uninstall them all, then install nvidia-ml-py",
        )


def _variables(variables: Mapping[str, str], device: Device) -> Iterator[Finding]:
    if device.kind != "cuda":
        return
    for name, known in VARIABLES.items():
        text = variables.get(name)
        if text is not None and (not known.values or text in known.values):
            yield Finding(name, known.level, f"{text or 'set'}: {known.effect}", f"unset {name}")


def _host(device: Device) -> Iterator[Finding]:
    usable = cores()
    if usable < 2:
        text = "one core usable: copies, launches and compute on the host take turns"
        yield Finding("cores", "warn", text, "give the process two cores or more (taskset, container limits)")
    shm = shm_bytes()
    if shm is not None and shm < SHM_MIN_BYTES:
        text = f"{_size(shm)}: data-loader workers and NCCL may end with a bus error"
        yield Finding("/dev/shm", "warn", text, "start the container with --shm-size=8g or --ipc=host")
    memlock = memlock_bytes()
    if device.kind == "cuda" and memlock is not None and memlock < MEMLOCK_MIN_BYTES:
        text = f"{_size(memlock)} may be locked: NCCL may fail to register memory with a network card"
        yield Finding("memlock", "warn", text, "ulimit -l unlimited, or --ulimit memlock=-1 for a container")


def _gpu(device: Device) -> Iterator[Finding]:
    with Nvml() as nvml:
        gpu = nvml.device(device.uuid) if device.uuid else None
        if gpu is None:
            if nvml.reason is None:
                yield Finding(
                    "nvml", "warn", "lists no device of this UUID; nothing is read beside the samples"
                )
            return
        yield from _settings(gpu)
        yield from _load(gpu)
        yield from _link(gpu)


def _settings(gpu: NvmlDevice) -> Iterator[Finding]:
    if gpu.read("persistence").value is False:
        text = "persistence mode is off: the driver may unload between runs, and clocks start cold"
        yield Finding("persistence", "warn", text, "sudo nvidia-smi -pm 1, or run nvidia-persistenced")
    mode = gpu.read("compute_mode").value
    if mode == "prohibited":
        yield Finding(
            "compute mode", "fail", "prohibited: no process may use this GPU", "sudo nvidia-smi -c DEFAULT"
        )
    elif mode not in (None, "default"):
        text = f"{mode}: only one process may use this GPU"
        yield Finding("compute mode", "info", text, "sudo nvidia-smi -c DEFAULT")
    if gpu.read("driver_model").value == "WDDM":
        text = "WDDM batches launches and copies: overlap is not comparable with other driver models"
        yield Finding("driver model", "warn", text, "use TCC or MCDM, or Linux")
    if gpu.read("mig").value:
        yield Finding("MIG", "info", "on: a slice is measured, and its clocks and power are the whole GPU's")


def _load(gpu: NvmlDevice) -> Iterator[Finding]:
    pids, _ = gpu.read("pids")
    others, _ = foreign(pids or [], [os.getpid()], contexts=0)
    if others:
        text = f"{_plural(others, 'process', 'es')} on this GPU: cases would be invalid (shared GPU)"
        yield Finding(
            "busy GPU", "warn", text, "wait for them, or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    busy = gpu.read("utilisation_percent").value
    if busy is not None and busy > BUSY_PERCENT and not others:
        text = f"{busy} % in use, though no process of this namespace shows"
        yield Finding("busy GPU", "warn", text, "look at nvidia-smi on the host")
    for name in reason_names(gpu.read("reasons").value or 0):
        if name in SPOILING:
            text = f"now: {SPOILING[name]}; cases would be invalid"
            yield Finding("clocks", "warn", text, "check cooling and power supply")
        elif name in LABELS:
            yield Finding("clocks", "info", f"now: {LABELS[name]}")


def _link(gpu: NvmlDevice) -> Iterator[Finding]:
    most, able = gpu.read("pcie_generation_max").value, gpu.read("pcie_generation_device").value
    width, widest = gpu.read("pcie_width").value, gpu.read("pcie_width_max").value
    if most and able and most < able:
        text = f"PCIe gen{most}, where the GPU can do gen{able}: copies are limited by the slot"
        yield Finding("PCIe", "warn", text, "use another slot, or set the slot's speed in the firmware")
    if width and widest and width < widest:
        text = f"PCIe x{width}, where x{widest} is possible (read at rest)"
        yield Finding("PCIe", "warn", text, "reseat the card, or use another slot")


def _checkout() -> Finding:
    state = checkout()
    if state.commit == "none":
        text = f"records will name no commit: {state.reason}"
        return Finding("commit", "warn", text, "pass --commit SHA, with +dirty for a changed tree")
    if state.dirty:
        text = f"{state.commit[:12]} with uncommitted changes, which records will say"
        return Finding("commit", "info", text, "commit before measuring for the history")
    return Finding("commit", "ok", state.commit[:12])


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def _size(size: int) -> str:
    return format_size(size // MIB * MIB or size)
