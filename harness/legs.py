"""Which leg moved in a slower case: the copy, collective or loader, the compute, the host, or only how they overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

Leg = Literal["copy", "collective", "loader", "compute", "host", "overlap"]

# What the `transfer` arm of a family is, where it is no copy.
_TRANSFER: dict[str, Leg] = {"ddp": "collective", "feed": "loader"}

# Enqueueing that takes this share of a copy's time is held up by the copy.
HELD = 0.5
# From here on the device has nothing to do until the host enqueues it.
LAUNCH_BOUND = 0.9


class Told(Protocol):
    """What a test said of a quantity: a verdict, and its time (or ratio) in base and in head."""

    @property
    def verdict(self) -> str: ...
    @property
    def base(self) -> float: ...
    @property
    def head(self) -> float: ...


def transfer_leg(family: str) -> Leg:
    """What a case of that family moves its bytes by."""
    return _TRANSFER.get(family, "copy")


def legs(found: Mapping[str, Told], transfer: Leg = "copy") -> tuple[Leg, ...]:
    """The legs that the slower quantities of a case point to, by their names in METRICS; empty where they do not tell.

    transfer: what a case of this family moves its bytes by (`transfer_leg`); it, or compute: that leg is slower
    alone. host: `host_ms`, enqueueing the legs alone, is slower, and not because it waits for a copy, as it does for
    one from pageable memory. overlap: the overlapped time is slower by more than its legs explain. What they explain
    is the piece model (theory.py), so that `model_ratio`, overlapped over the model of the same launch, decides;
    where it is inconclusive or missing, overlap is named if no solo leg can have moved.
    """
    slower = {name for name, told in found.items() if told.verdict == "slower"}
    named: list[Leg] = []
    if "transfer_ms" in slower:
        named.append(transfer)
    if "compute_ms" in slower:
        named.append("compute")
    if "host_ms" in slower and not _waits(found, slower):
        named.append("host")
    if "overlapped_ms" in slower and _overlap_lost(found, slower) and not _host_bound(found, named):
        named.append("overlap")
    return tuple(named)


def _overlap_lost(found: Mapping[str, Told], slower: set[str]) -> bool:
    if "model_ratio" in slower:
        return True
    if "model_ratio" in found and found["model_ratio"].verdict != "inconclusive":
        return False
    solo = [found[name].verdict for name in ("transfer_ms", "compute_ms") if name in found]
    return len(solo) == 2 and not {"slower", "inconclusive"} & set(solo)


def _waits(found: Mapping[str, Told], slower: set[str]) -> bool:
    """Whether the host is slower for a copy that holds it up: now and not before, or before and now for longer.

    A host that is slow by itself, and holds up the device, makes the compute slower as well as the copy.
    """
    if "transfer_ms" not in found:
        return False
    host, copy = found["host_ms"], found["transfer_ms"]
    if host.head < HELD * copy.head:
        return False
    return "transfer_ms" in slower and (host.base < HELD * copy.base or "compute_ms" not in slower)


def _host_bound(found: Mapping[str, Told], named: list[Leg]) -> bool:
    """Whether the overlapped time is no more than what a slower host takes to enqueue, which explains it."""
    return "host" in named and found["host_ms"].head >= LAUNCH_BOUND * found["overlapped_ms"].head
