"""Which leg moved in a slower case: the copy, the compute, the host, or only how they overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from harness.contrast import Contrast

Leg = Literal["copy", "compute", "host", "overlap"]

OVERLAPPED, TRANSFER, COMPUTE, HOST, MODEL = (
    "overlapped_ms",
    "transfer_ms",
    "compute_ms",
    "host_blocked_ms",
    "model_ratio",
)
# A host that enqueues for this share of the overlapped time is held up: by the device, or by its own slowness.
HELD = 0.5
# From here on the device has nothing to do until the host enqueues it.
LAUNCH_BOUND = 0.9


def legs(found: Mapping[str, Contrast]) -> tuple[Leg, ...]:
    """The legs that a case's slower quantities point to, by the names of its contrasts; empty where none does.

    copy, compute: that leg is slower alone. host: enqueueing is slower, and not because the host now waits for the
    device. overlap: the overlapped time is slower by more than its legs explain. The piece model says what they
    explain (theory.py), and so `model_ratio`, overlapped over its model in every launch, decides; where it is
    inconclusive or missing, overlap is blamed when both solo legs are the same.
    """
    slower = {name for name, contrast in found.items() if contrast.verdict == "slower"}
    blamed: list[Leg] = []
    if TRANSFER in slower:
        blamed.append("copy")
    if COMPUTE in slower:
        blamed.append("compute")
    if HOST in slower and not _waits(found, slower):
        blamed.append("host")
    if OVERLAPPED in slower and _overlap_lost(found, slower) and not _host_bound(found, blamed):
        blamed.append("overlap")
    return tuple(blamed)


def _overlap_lost(found: Mapping[str, Contrast], slower: set[str]) -> bool:
    if MODEL in slower:
        return True
    explained = MODEL in found and found[MODEL].verdict != "inconclusive"
    return not explained and all(
        leg in found and found[leg].verdict in ("same", "faster") for leg in (TRANSFER, COMPUTE)
    )


def _waits(found: Mapping[str, Contrast], slower: set[str]) -> bool:
    """Whether the host is slower for waiting on the device: a synchronisation, or a copy that blocks.

    It was free before and is held up now; or it was held up before, and the copy that holds it is what got slower.
    A slow host that holds up the device makes the compute slower too.
    """
    if OVERLAPPED not in found or found[HOST].head < HELD * found[OVERLAPPED].head:
        return False
    was_free = found[HOST].base < HELD * found[OVERLAPPED].base
    return was_free or (TRANSFER in slower and COMPUTE not in slower)


def _host_bound(found: Mapping[str, Contrast], blamed: list[Leg]) -> bool:
    """Whether the slower host explains the overlapped time, which then is no more than what it takes to enqueue."""
    return "host" in blamed and found[HOST].head >= LAUNCH_BOUND * found[OVERLAPPED].head
