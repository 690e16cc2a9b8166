"""Facts of the host that more than one layer asks for."""

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


def _containers_left() -> Iterator[int]:
    """What is left under the limit of every control group around this process that has one.

    Pages of files that nobody uses are given back before a limit bites, so they count as free. Version 2 of
    control groups has one tree, version 1 a tree per resource.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                yield max(0, limit - used + _fields(folder / "memory.stat").get(names[2], 0))
            except (OSError, ValueError):  # no limit here ("max"), or a group that this process cannot see
                pass
            if folder == root:
                break


def _fields(file: Path) -> dict[str, int]:
    """The lines `name number ...` of a file of the kernel."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
