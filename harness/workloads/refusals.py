"""Why a ddp case has no meaning here or does not fit, found out before any memory is taken, for all ranks alike."""

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist

from harness.case import Case
from harness.errors import Skip
from harness.group import Group
from harness.workloads.models import Plan


def skip_alike(group: Group, reasons: Iterable[str | None]) -> None:
    """Skip on every rank with the first reason of the first rank that has one. The reasons are found one by one, up to
    the first that is not None."""
    mine = next((reason for reason in reasons if reason is not None), None)
    for reason in group.share(mine):
        if reason is not None:
            raise Skip(reason)


def sharing(group: Group, kind: str) -> int:
    """How many ranks of this host take their memory from one device, at most. Every rank asks, or none."""
    local = group.share(group.host).count(group.host)
    return -(-local // max(1, torch.cuda.device_count())) if kind == "cuda" else local


def unsupported(case: Case, kind: str, group: Group, sharing: int) -> str | None:
    """Why these ranks cannot run the case; None if they can."""
    ranks, backend = case.number("ranks"), case.word("backend")
    if group.size != ranks:
        return f"needs {ranks} ranks, and {group.size} measure together here"
    if not hasattr(group, "process_group"):
        return "needs processes that are launched as ranks"
    if backend == "gloo":
        return None if dist.is_gloo_available() else "this torch has no Gloo"
    if kind != "cuda":
        return "NCCL reduces tensors of CUDA devices only, and this is the cpu backend"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    if sharing > 1:
        return f"NCCL needs a GPU for each rank, and here are {torch.cuda.device_count()}"
    return None


def needed_bytes(plan: Plan, element: int, *, autocast: bool, copies: int = 2) -> int:
    """Device memory of a rank at the highest point: `copies` of the model with their buckets; once, since they take
    turns, gradients, activations, casts and the replayed buckets; and a gradient widened to float32."""
    trained = plan.parameters * element
    widened = 4 * plan.largest
    casts = 2 * plan.parameters if autocast else 0
    activations = plan.activation_bytes(2 if autocast else element)
    models = copies * (2 * trained + plan.frozen * element)
    return models + 2 * trained + widened + casts + activations


def shortage(need: int, free: int | None, sharing: int) -> str | None:
    """Why `need` bytes for each of the ranks that share a device do not fit; None if they do, or nobody knows."""
    if free is None or need * sharing <= free:
        return None
    whose = f" for {sharing} ranks on one device" if sharing > 1 else ""
    return f"needs {need * sharing / 2**30:.2f} GiB of memory{whose}, and {free / 2**30:.2f} GiB are free"


def uncompilable(case: Case, device: torch.device) -> str | None:
    """Why torch.compile cannot do the case here, found by trying; None where it can, or is not asked to."""
    if case.word("option") != "compile":
        return None
    first, bucket = case.number("first"), case.number("bucket")
    if first > bucket:
        return (
            f"torch.compile wants no first bucket above the others: its cap is {first} bytes, theirs {bucket}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch has against itself is no refusal
            torch._dynamo.reset()
            torch.compile(_small, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # whatever the compiler behind it raises
        lines = str(error).strip().splitlines() or [""]
        return f"torch.compile does not work here: {type(error).__name__}: {lines[0]}"
    return None


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process; what resets it leaves this count as it is."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _small(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
