"""Which device a run will use, found without initialising CUDA in this process, so that it can still fork.

NVML lists the devices; CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER say which of them CUDA will call 0. Devices
are matched by UUID: an NVML index is not a CUDA index.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import torchrun
from harness.errors import UsageError
from harness.telemetry import Nvml, NvmlDevice

CHOICES = ("auto", "cuda", "cpu")

# Why it is the cpu, where nothing else is to blame.
ASKED = "asked for"

# One of these is there wherever a CUDA driver is: Linux, WSL, Jetson.
_DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvmap")

# The last resort where NVML is missing: CUDA is initialised in a child, never here.
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
first = torch.cuda.get_device_properties(0) if count else None
print(json.dumps([count, getattr(first, "name", ""), str(getattr(first, "uuid", ""))]))
"""
_ASK_TORCH_S = 120


@dataclass(frozen=True)
class Device:
    """What a run measures on.

    kind: `cuda` or `cpu`. name: the model, `cpu` for the cpu backend. count: devices CUDA will see, or cores
    that this process may use. uuid: of the device CUDA will call 0. reason: why it is the cpu.
    """

    kind: str
    name: str
    count: int
    uuid: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Gpu:
    """What decides the place of one GPU, or MIG slice, in CUDA's order."""

    uuid: str
    name: str
    speed: tuple[float, ...] = ()
    slices: tuple["Gpu", ...] = ()
    mig: bool = False


def detect(requested: str) -> Device:
    """The device of `--device requested`; UsageError for `cuda` where there is none, with the reason."""
    if requested not in CHOICES:
        raise UsageError(f"device: got {requested!r}, want {', '.join(CHOICES[:-1])} or {CHOICES[-1]}")
    if requested == "cpu":
        return _cpu(ASKED)
    device, reason, remedy = _cuda(insist=requested == "cuda")
    if device is not None:
        return device
    if requested == "cuda":
        raise UsageError(f"device: got cuda, but {reason}; {remedy}, or use --device cpu")
    return _cpu(reason)


def ranks_of(device: Device) -> int:
    """How many processes measure a case of several here: those that torchrun started, else one a GPU, at least 2."""
    role = torchrun.role()
    if role is not None:
        return role.size
    return max(2, device.count) if device.kind == "cuda" else 2


def cores() -> int:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_build() -> dict[str, str | None]:
    """{version, cuda, hip, git_version} of the installed torch, read without importing it; {}: none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return {}
    if spec is None or spec.origin is None:
        return {}
    try:
        tree = ast.parse((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {"version": None}
    found: dict[str, str | None] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value if isinstance(value.value, str) else None
    wanted = {"__version__": "version", "cuda": "cuda", "hip": "hip", "git_version": "git_version"}
    return {name: found[key] for key, name in wanted.items() if key in found}


def default_machine_name(device: Device, profile_name: str = "generic") -> str:
    """A name for this kind of machine, the same every night: `h200-1`, `cpu-2`.

    Args:
        profile_name: the profile of this model of device (profiles.profile_for); the model itself names
            the machine where that is `generic`.
    """
    kind = profile_name
    if device.kind == "cpu" or profile_name in ("generic", "cpu"):
        kind = (
            re.sub(r"[^a-z0-9.]+", "-", device.name.lower().replace("nvidia", "")).strip("-.")[:48]
            or device.kind
        )
    return f"{kind}-{device.count}"


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA will number 0, 1, ...

    Args:
        gpus: in the order of the PCI bus.
        environment: CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES are read.

    Follows the CUDA C++ Programming Guide, "CUDA Environment Variables": the list ends at the first entry
    that names no device; an entry may be a UUID's beginning if no other device shares it. A device named
    twice leaves none, as torch.cuda has it. Of GPUs in MIG mode CUDA sees one slice only (MIG User Guide).
    """
    ordered = list(gpus)
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # FASTEST_FIRST: CUDA's own measure of speed is not published; equal models keep the order of the bus.
        ordered.sort(key=lambda gpu: gpu.speed, reverse=True)
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        chosen = [gpu for gpu in ordered if not gpu.mig] or ordered
    else:
        chosen = []
        for entry in text.split(","):
            gpu = _named(entry.strip(), ordered)
            if gpu is None:
                break
            chosen.append(gpu)
        if len(set(chosen)) < len(chosen):
            return []
    if chosen and (chosen[0].mig or chosen[0].uuid.startswith("MIG-")):
        return list(chosen[0].slices[:1]) if chosen[0].mig else chosen[:1]
    return [gpu for gpu in chosen if not gpu.mig]


def _named(entry: str, ordered: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith(("GPU-", "MIG-")):
        everything = [*ordered, *(piece for gpu in ordered for piece in gpu.slices)]
        matching = [gpu for gpu in everything if gpu.uuid.lower().startswith(entry.lower())]
        return matching[0] if len(matching) == 1 else None
    digits = re.match(r"\+?(\d+)", entry)
    if digits is None or int(digits[1]) >= len(ordered):
        return None
    return ordered[int(digits[1])]


def _cpu(reason: str) -> Device:
    return Device(kind="cpu", name="cpu", count=cores(), reason=reason)


def _cuda(*, insist: bool) -> tuple[Device | None, str, str]:
    """The CUDA device, or None, why there is none, and what to do."""
    build = torch_build()
    if not build:
        return None, "torch is not installed", "install a torch with CUDA"
    if "cuda" in build and build["cuda"] is None:
        return None, f"torch {build.get('version')} is built without CUDA", "install a torch with CUDA"
    with Nvml() as nvml:
        if nvml.reason is None:
            gpus = [_gpu(device) for device in nvml.devices()]
            seen = visible(gpus, os.environ)
            if seen:
                return Device("cuda", seen[0].name, len(seen), seen[0].uuid), "", ""
            if gpus:
                hidden = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r} shows none"
                return None, f"{hidden} of the GPUs here ({len(gpus)})", "change CUDA_VISIBLE_DEVICES"
            return None, "the NVIDIA driver lists no GPU", "check `nvidia-smi`"
        reason = nvml.reason
    if insist or any(os.path.exists(node) for node in _DRIVER_NODES):
        device = _ask_torch()
        if device is not None:
            return device, "", ""
    return None, reason, "install an NVIDIA driver and nvidia-ml-py"


def _gpu(device: NvmlDevice) -> Gpu:
    capability = device.read("compute_capability").value or "0.0"
    cores_times_clock = (device.read("cores").value or 0) * (device.read("sm_mhz_max").value or 0)
    return Gpu(
        uuid=device.read("uuid").value or "",
        name=device.read("name").value or "unknown GPU",
        speed=(*map(float, capability.split(".")), float(cores_times_clock)),
        slices=tuple(_gpu(piece) for piece in device.slices()) if device.parent is None else (),
        mig=device.parent is None and bool(device.read("mig").value),
    )


def _ask_torch() -> Device | None:
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, timeout=_ASK_TORCH_S, check=True
        )
        count, name, uuid = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return Device("cuda", name, count, f"GPU-{uuid}" if uuid else None) if count else None
