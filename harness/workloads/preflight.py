"""What a loader's workers need before they start, against what is there: /dev/shm, file handles, memory.

Workers hand their batches over in shared memory. Where that is full, the kernel ends a worker by SIGBUS in the middle
of a batch; where handles run out, one hangs or fails with a message about something else. Both are known beforehand.
"""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from harness import host

SHARED = Path("/dev/shm")
HANDLES = Path("/proc/self/fd")

MIB = 1 << 20

# Of /dev/shm, for whatever else this process shares.
SHARED_MARGIN = 4 * MIB

# In the process that trains, for each worker: the ends of its pipes. Seen: 4, and 4 more for all workers together.
HANDLES_A_WORKER = 5
# DataLoader itself gives up when fewer than 10 are left; the rest is for a source, telemetry and libraries.
HANDLES_MARGIN = 40

# Of a worker alone, besides its batches. Seen: 11 to 14 MiB forked and 150 MiB started afresh, which has torch
# imported for itself, and torch with CUDA is larger.
WORKER_BYTES = {"fork": 16 * MIB, "spawn": 300 * MIB, "forkserver": 300 * MIB}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """workers: how many, each with up to `prefetch` batches made or being made. batch_bytes: of the largest batch, in
    shared memory. tensors: in a batch; each is a file handle while it is on its way. start: how workers are started.
    """

    workers: int
    prefetch: int
    batch_bytes: int
    tensors: int
    start: str

    @property
    def batches(self) -> int:
        """Batches that exist at once: made ahead, and the one in use."""
        return self.workers * self.prefetch + 1

    @property
    def shared_bytes(self) -> int:
        return self.batches * self.batch_bytes + SHARED_MARGIN

    @property
    def handles(self) -> int:
        return self.workers * HANDLES_A_WORKER + self.batches * self.tensors + HANDLES_MARGIN

    @property
    def memory_bytes(self) -> int:
        """Of the host: shared memory counts too, and each worker makes one batch before it shares it."""
        alone = WORKER_BYTES[self.start] + self.batch_bytes
        return self.workers * alone + self.shared_bytes


@dataclass(frozen=True, kw_only=True)
class Free:
    """What is left of each; None where nobody says."""

    shared_bytes: int | None
    handles: int | None
    memory_bytes: int | None


def look(shared: Path = SHARED) -> Free:
    """What this process could still be given, now."""
    try:
        found = os.statvfs(shared)
        room: int | None = found.f_bavail * found.f_frsize
    except OSError:
        room = None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        handles = None if limit == resource.RLIM_INFINITY else limit - len(os.listdir(HANDLES))
    except OSError:
        handles = None
    return Free(shared_bytes=room, handles=handles, memory_bytes=host.free_bytes())


def shortage(needs: Needs, free: Free) -> str | None:
    """What is short, in one line with what to do; None if all is there. Without workers nothing is shared."""
    if not needs.workers:
        return None
    ahead = f"{needs.workers} workers with prefetch {needs.prefetch}"
    if free.shared_bytes is not None and needs.shared_bytes > free.shared_bytes:
        return (
            f"{ahead} may hold {_mib(needs.shared_bytes)} of batches in /dev/shm, and {_mib(free.shared_bytes)} are "
            "free there; take fewer workers or a larger /dev/shm (docker run --shm-size, or an emptyDir in memory)"
        )
    if free.handles is not None and needs.handles > free.handles:
        return (
            f"{ahead} may need {needs.handles} file handles, and {max(0, free.handles)} are left; "
            "take fewer workers or raise the limit (ulimit -n)"
        )
    if free.memory_bytes is not None and needs.memory_bytes > free.memory_bytes:
        return (
            f"{ahead}, started by {needs.start}, may need {_mib(needs.memory_bytes)} of memory, and "
            f"{_mib(free.memory_bytes)} are free; take fewer workers"
        )
    return None


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
