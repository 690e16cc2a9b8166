"""A real worker with faults put into the samples of some cases: `python faulty_worker.py FD FAULTS`.

FAULTS is JSON, names of functions in `FAULTS` below by case key. With `sampler` as a key the worker starts a sampler
whatever the device.
"""

import contextlib
import ctypes
import json
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch

from harness import sampler, workloads

# The second sample of a case: its buffers are there, and something has run.
AT = 2

_KERNELS = r"""
extern "C" __global__ void overlap_stray(int address) { *(volatile int*)(unsigned long long)address = 1; }
extern "C" __global__ void overlap_endless(volatile int* flag) { while (*flag == 0) { } }
"""


def null_pointer() -> None:
    ctypes.string_at(0)


def hang() -> None:
    """In native code that keeps the interpreter to itself: no signal handler and no thread runs meanwhile."""
    ctypes.PyDLL(None).pause()


def no_memory() -> None:
    with _little_memory():
        torch.empty(1 << 30, dtype=torch.float32)


def no_memory_for_python() -> None:
    with _little_memory():
        bytearray(1 << 32)


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """256 MiB more than there is now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def no_device_memory() -> None:
    _, total = torch.cuda.mem_get_info()
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")


def stray_kernel() -> None:
    torch.cuda._compile_kernel(_KERNELS, "overlap_stray")((1, 1, 1), (1, 1, 1), [16])


def endless_kernel() -> None:
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda._compile_kernel(_KERNELS, "overlap_endless")((1, 1, 1), (1, 1, 1), [flag])
    torch.cuda.synchronize()


FAULTS = {
    made.__name__: made
    for made in (
        null_pointer, hang, no_memory, no_memory_for_python, no_device_memory, stray_kernel, endless_kernel,
    )
}  # fmt: skip


class Faulty:
    """A workload in one of whose samples a fault happens."""

    def __init__(self, workload: Any, fault: str) -> None:
        self._workload, self._fault, self._samples = workload, FAULTS[fault], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def sample(self, arm: str) -> Any:
        self._samples += 1
        if self._samples == AT:
            self._fault()
        return self._workload.sample(arm)


def main() -> int:
    faults = json.loads(sys.argv.pop(2))
    build, open_sampler = workloads.build, sampler.open_sampler

    def faulty(case: Any, *arguments: Any) -> Any:
        workload = build(case, *arguments)
        return Faulty(workload, faults[case.key]) if case.key in faults else workload

    workloads.build = faulty
    if "sampler" in faults:
        sampler.open_sampler = lambda uuid, *arguments, **options: open_sampler(
            "GPU-0", *arguments, **options
        )
    from harness import worker  # only now: it takes over these names

    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
