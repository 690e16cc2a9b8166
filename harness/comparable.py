"""What makes two records comparable (measurement.md): keys that must be equal, keys worth a warning."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from harness.record import Record

# Dotted names into a record. A difference in one of these is another experiment.
HARD_KEYS = (
    "method",
    "profiles",
    "machine.device",
    "machine.gpu.name",
    "machine.gpu.power_limit_w",
    "machine.gpu.ecc",
    "machine.gpu.mig",
    "machine.gpu.driver_model",
    "software.driver",
    "software.cuda",
    "software.cublas",
    "software.nccl",
    "software.torch",
)
SOFT_KEYS = (
    "machine.gpu.vbios",
    "machine.gpu.virtualisation",
    "machine.gpu.numa_node",
    "machine.gpu.pcie_generation_max",
    "machine.gpu.pcie_width_max",
    "machine.gpu.pcie_generation_loaded",
    "machine.gpu.pcie_width_loaded",
    "machine.gpu.pinned_numa_node",
    "machine.gpu.nvlinks",
    "machine.cpu.model",
    "machine.cpu.usable_cores",
    "machine.cpu.numa_nodes",
    "machine.cpu.hypervisor",
    "software.torch_git",
    "software.kernel",
    "software.container",
    "environment.NCCL_ALGO",
    "environment.NCCL_PROTO",
    "environment.NCCL_MIN_NCHANNELS",
    "environment.NCCL_MAX_NCHANNELS",
    "environment.NCCL_MIN_CTAS",
    "environment.NCCL_MAX_CTAS",
    "environment.CUDA_DEVICE_MAX_CONNECTIONS",
    "environment.CUDA_DEVICE_MAX_COPY_CONNECTIONS",
    "environment.CUDA_SCALE_LAUNCH_QUEUES",
    "environment.PYTORCH_ALLOC_CONF",
    "environment.PYTORCH_CUDA_ALLOC_CONF",
    "environment.OMP_NUM_THREADS",
    "environment.MKL_NUM_THREADS",
)
# Where the CPU is the device under test, these decide as the GPU's model does.
CPU_HARD_KEYS = (
    "machine.cpu.model",
    "machine.cpu.usable_cores",
    "environment.OMP_NUM_THREADS",
    "environment.MKL_NUM_THREADS",
)

# NVML names one on Windows alone: Linux has no other.
DRIVER_MODEL, LINUX = "machine.gpu.driver_model", "Linux"

UNKNOWN = "unknown"
UNSET = "unset"


class Difference(NamedTuple):
    """One key on which two records differ; `unknown` where one does not tell, `unset` for a variable."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key.rpartition('.')[2]}: {_words(self.a)} vs {_words(self.b)}"


def comparable(a: Record, b: Record) -> tuple[list[Difference], list[Difference]]:
    """The differences that make `a` and `b` not comparable, and those worth a warning.

    A hard key that only one record tells cannot be shown to differ: that is a warning. So are other sizes of one family
    beside another whose sizes are the same: keys of cases carry them, and only that family's cases are others.
    """
    hard_keys, soft_keys = list(HARD_KEYS), list(SOFT_KEYS)
    if "cpu" in (a.machine.device, b.machine.device):
        hard_keys += CPU_HARD_KEYS
        soft_keys = [key for key in soft_keys if key not in CPU_HARD_KEYS]
    seen = (f"environment.{name}" for name in sorted({*a.environment, *b.environment} - {"missing"}))
    soft_keys += [key for key in seen if key not in (*hard_keys, *soft_keys)]
    hard: list[Difference] = []
    soft: list[Difference] = []
    for difference in _differences(a, b, hard_keys):
        found = difference if difference.key != "profiles" else _of_shared_families(a, b, difference)
        if found is not None:
            # A part of the families that differs leaves the others to compare.
            (soft if UNKNOWN in found or found != difference else hard).append(found)
    return hard, soft + list(_differences(a, b, soft_keys))


def value(record: Record, key: str) -> Any:
    """What `record` tells under a dotted key of this module; `unknown` or `unset` for nothing."""
    if key == "profiles":
        return _named(_profiles(record)) or UNKNOWN
    root, _, rest = key.partition(".")
    found: Any = getattr(record, root)
    for name in filter(None, rest.split(".")):
        found = found.get(name) if isinstance(found, dict) else getattr(found, name)
    if found is not None:
        return found
    if key == DRIVER_MODEL and record.software.get("system") == LINUX:
        return LINUX
    return UNSET if root == "environment" else UNKNOWN


def told(record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hard and the soft keys of one record with their values, for stores that keep no record beside a number."""
    hard, soft = list(HARD_KEYS), list(SOFT_KEYS)
    if record.machine.device == "cpu":
        hard += CPU_HARD_KEYS
        soft = [key for key in soft if key not in CPU_HARD_KEYS]
    return {key: value(record, key) for key in hard}, {key: value(record, key) for key in soft}


def contradictions(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Where two of what `told` gives contradict each other; what one of them does not know is no contradiction."""
    found = (Difference(key, a.get(key, UNKNOWN), b.get(key, UNKNOWN)) for key in dict.fromkeys([*a, *b]))
    return [each for each in found if each.a != each.b and UNKNOWN not in (each.a, each.b)]


def _differences(a: Record, b: Record, keys: Iterable[str]) -> Iterable[Difference]:
    for key in keys:
        difference = Difference(key, value(a, key), value(b, key))
        if difference.a != difference.b:
            yield difference


def _of_shared_families(a: Record, b: Record, whole: Difference) -> Difference | None:
    """Of the profiles of two records, what matters: `whole` where no family of both has the same one, else those of
    the families that differ; None where no family does, as with suites that only one of them ran."""
    first, second = _profiles(a), _profiles(b)
    if not first or not second:
        return whole
    shared = [family for family in first if family in second]
    other = [family for family in shared if first[family] != second[family]]
    if not other:
        return None
    if other == shared:
        return whole
    return Difference(
        "profiles", *(_named({family: each[family] for family in other}) for each in (first, second))
    )


def _profiles(record: Record) -> dict[str, set[str]]:
    """By family, the profiles of its cases."""
    found: dict[str, set[str]] = {}
    for case in record.cases:
        if "profile" in case.params:
            found.setdefault(case.family, set()).add(str(case.params["profile"]))
    return found


def _named(profiles: Mapping[str, set[str]]) -> str:
    return ", ".join(sorted(set().union(*profiles.values())))


def _words(item: Any) -> str:
    return {True: "on", False: "off"}[item] if isinstance(item, bool) else str(item)
