"""Real ranks whose workload is small and in which faults happen: `python faulty_ranks.py MODULE FAULTS FD ...`.

It stands in for `python -m harness.MODULE FD ...`, MODULE being launching or ranks. FAULTS is JSON: `at` has names of
functions in `FAULTS` by case key and rank ("KEY 1"), or by "start 1" for before the ranks meet; `limits` replaces
constants of harness.ranks; `log` is a file that gets a line for every rank that starts.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from harness import serving

if __name__ == "__main__" and sys.argv[1] == "ranks":
    serving.end_with_parent(int(sys.argv[4]))

import torch
import torch.distributed as dist

from harness import child, workloads
from harness.group import Group
from harness.workloads.base import Sample

# The second sample of a case: its process group is there, and something has run.
AT = 2

MS = {"transfer": 2.0, "compute": 4.0, "serial": 6.0, "overlapped": 5.0, "transfer_1": 1.5}


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def null_pointer() -> None:
    ctypes.string_at(0)


def hang() -> None:
    """In native code that keeps the interpreter to itself: no signal handler and no thread runs meanwhile."""
    ctypes.PyDLL(None).pause()


def raises() -> None:
    raise RuntimeError("device-side assert\nsecond line")


def no_gpu() -> None:
    """This rank sees none, and the others do."""
    torch.cuda.device_count = lambda: 0


def a_gpu() -> None:
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_name = lambda device: "a GPU"


FAULTS = {made.__name__: made for made in (killed, null_pointer, hang, raises, no_gpu, a_gpu)}


class Work:
    """All ranks reduce a number in every sample, whose times are written down. Rank r takes r % longer."""

    arms = tuple(MS)

    def __init__(self, key: str, group: Group, fault: str | None) -> None:
        self.facts = {"bytes": 8, "flops": 1.0, "repeats": 1, "pid": os.getpid()}
        self._group, self._fault, self._samples = group, fault, 0
        self._all: Any = group.process_group("gloo")  # type: ignore[attr-defined]

    def warm_up(self) -> None:
        pass

    def sample(self, arm: str) -> Sample:
        self._samples += 1
        if self._samples == AT and self._fault:
            FAULTS[self._fault]()
        self._group.meet()
        start, number = time.monotonic(), torch.ones(1)
        dist.all_reduce(number, group=self._all)
        assert number.item() == self._group.size
        ms = MS[arm] * (1 + self._group.rank / 100)
        return Sample(ms=ms, host_ms=0.1, window=(start, time.monotonic()))

    def close(self) -> None:
        pass


def main(module: str, faults: str) -> int:
    told = json.loads(faults)
    if module == "launching":
        from harness import launching

        launching.command = lambda: (
            sys.executable, "-P", __file__, "ranks", faults, "1", str(os.getpid()), "0",
        )  # fmt: skip
        return launching.main()
    rank = os.environ["RANK"]
    with Path(told["log"]).open("a") as log:
        print(rank, os.getpid(), os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), file=log)

    def build(case: Any, profile: object, backend: object, group: Group) -> Work:
        return Work(case.key, group, told["at"].get(f"{case.key} {rank}"))

    workloads.build = build  # type: ignore[assignment]
    from harness import ranks  # only now: it takes over this name

    for name, value in told.get("limits", {}).items():
        setattr(ranks, name, value)
    if fault := told["at"].get(f"start {rank}"):
        FAULTS[fault]()
    return ranks.main()


def stand_in(faults: str) -> Any:
    """What takes the place of harness.child.module."""
    real = child.module

    def module(name: str, events: int) -> list[str]:
        if name in ("launching", "ranks"):
            return [sys.executable, "-P", __file__, name, faults, str(events)]
        return real(name, events)

    return module


if __name__ == "__main__":
    module, faults = sys.argv[1:3]
    del sys.argv[1:3]
    if code := main(module, faults):
        os._exit(code)
