"""Facts of the host that more than one layer asks for."""

import contextlib
import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Memory this process can be given without swapping, bytes; None where the kernel does not say.

    A container's limit counts as well as what the host has left.
    """
    known = [left for left in (_host_left(), *_containers_left()) if left is not None]
    return min(known, default=None)


def _host_left() -> int | None:
    try:
        return _fields(PROC / "meminfo")["MemAvailable:"] << 10
    except (OSError, ValueError, KeyError):
        return None


def oom_kills() -> int | None:
    """How many processes of this control group the kernel has ended so far for want of memory; None where nobody says.

    Such a process counts in the group it belongs to, whether the memory of the group or of the host was short.
    """
    for version, groups in _memory_groups():
        for folder in groups:
            try:
                return _fields(folder / ("memory.events" if version == 2 else "memory.oom_control"))[
                    "oom_kill"
                ]
            except (OSError, ValueError, KeyError):  # a group without the controller, or an old kernel
                pass
    return None


def group_lives(group: int) -> bool:
    """Whether a process of that process group runs; one that has ended and was not asked why does not."""
    for file in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The name before the last bracket may hold anything.
            state, _, owner = file.read_text().rpartition(")")[2].split()[:3]
            if int(owner) == group and state not in "ZX":
                return True
    return False


def _containers_left() -> Iterator[int]:
    """What is left under the limit of every control group around this process that has one.

    Pages of files that nobody uses are given back before a limit bites, so they count as free.
    """
    for version, groups in _memory_groups():
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for folder in groups:
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                yield max(0, limit - used + _fields(folder / "memory.stat").get(names[2], 0))
            except (OSError, ValueError):  # no limit here ("max"), or a group that this process cannot see
                pass


def _memory_groups() -> Iterator[tuple[int, list[Path]]]:
    """Version of the control groups, and the folders of those around this process, its own first.

    Version 2 has one tree, version 1 a tree per resource.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            version, root = 2, CGROUPS
        elif "memory" in controllers.split(","):
            version, root = 1, CGROUPS / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        around = [group, *group.parents]
        yield version, around[: around.index(root) + 1]


def _fields(file: Path) -> dict[str, int]:
    """The lines `name number ...` of a file of the kernel."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


# Numbers of the system call get_mempolicy, and its flags "the node of this address" (linux/mempolicy.h).
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_NODE_OF_ADDRESS = 1 | 2


def numa_node(address: int) -> int | None:
    """The NUMA node of the page at `address` of this process; None where the kernel does not tell."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return None
    node = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        number, ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address), _NODE_OF_ADDRESS
    )
    return None if failed or node.value < 0 else node.value
