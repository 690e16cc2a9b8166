"""The cuda backend: torch.cuda streams and events, cuBLAS GEMMs through torch, the gate kernel."""

import ctypes
import re
import time
from pathlib import Path
from typing import Any

import torch

from harness import host
from harness.backends import kernels
from harness.backends.base import GATE_LIMIT_S
from harness.backends.tensors import DTYPES, gemm

_ASYNC_ENGINE_COUNT = 40  # cuda.h, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT


class CudaBackend:
    """The current device, which is 0 of what CUDA_VISIBLE_DEVICES leaves unless a rank has taken another one, behind
    the contract of `base.Backend`."""

    kind = "cuda"

    def __init__(self) -> None:
        torch.cuda.init()
        torch.set_grad_enabled(False)
        self._device = torch.cuda.current_device()
        self.main = torch.cuda.current_stream()
        self.side = torch.cuda.Stream()
        self._side = torch.cuda.stream(self.side)
        self._no_kernels = kernels.missing()
        if self._no_kernels is None:
            self._spin = kernels.compile_kernel("overlap_spin")
            self._gate = kernels.compile_kernel("overlap_gate")
        self._flag = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._ticket = 0

    def unsupported(self, *, memory: str, gate: bool) -> str | None:
        if gate and memory == "pageable":
            return "pageable copies block the host behind the gate, so they are never gated"
        return self._no_kernels if gate else None

    def host_tensor(self, rows: int, width: int, dtype: str, *, pinned: bool) -> torch.Tensor:
        tensor = torch.empty(rows, width, dtype=DTYPES[dtype], pin_memory=pinned)
        if not pinned:
            # Touch every page: the first copy must not pay for page faults.
            tensor.zero_()
        return tensor

    def device_tensor(self, rows: int, width: int, dtype: str) -> torch.Tensor:
        return torch.empty(rows, width, dtype=DTYPES[dtype], device="cuda")

    def fill_normal(self, tensor: torch.Tensor, seed: int, scale: float = 1.0) -> None:
        tensor.normal_(0.0, scale, generator=torch.Generator("cuda").manual_seed(seed))

    def free_bytes(self) -> tuple[int | None, int | None]:
        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return host.free_bytes(), free + cached

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def pending(self, event: torch.cuda.Event) -> bool:
        return not event.query()

    def synchronize(self, event: torch.cuda.Event | None = None) -> None:
        if event is None:
            torch.cuda.synchronize()
        else:
            event.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        if stream is self.side:
            with self._side:
                target.copy_(source, non_blocking=True)
        else:
            target.copy_(source, non_blocking=True)

    def gemm(self, x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor) -> None:
        gemm(x, weights, out)

    def spin(self, milliseconds: float, stream: torch.cuda.Stream) -> None:
        self._spin((1, 1, 1), (1, 1, 1), [round(milliseconds * 1e3)], stream=stream)

    def close_gate(self) -> None:
        self._ticket += 1
        self._gate(
            (1, 1, 1), (1, 1, 1), [self._flag, self._ticket, round(GATE_LIMIT_S * 1e3)], stream=self.main
        )

    def open_gate(self) -> bool:
        self._flag[0] = self._ticket
        return int(self._flag[1]) != self._ticket

    def allocations(self) -> int:
        stats = torch.cuda.memory_stats()
        if "num_device_alloc" in stats:
            return int(stats["num_device_alloc"] + stats["num_device_free"])
        return int(stats.get("segment.all.allocated", 0) + stats.get("segment.all.freed", 0))

    def canary_us(self, launches: int = 1000) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            torch.cuda._sleep(0)
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        return issued / launches * 1e6

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self._device)
        nccl = torch.cuda.nccl.version() if torch.distributed.is_available() else None
        return {
            "torch": str(torch.__version__),
            "torch_git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cublas": _cublas_version(),
            "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")) or None,
            "sm_count": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "copy_engines": _copy_engines(self._device),
            "pinned_numa_node": host.numa_node(self._flag.data_ptr()),
            "memory_bytes": properties.total_memory,
        }

    def close(self) -> None:
        self.open_gate()
        torch.cuda.synchronize()


def _copy_engines(index: int) -> int | None:
    """How many copies can run beside kernels and each other; None where the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetAttribute(
        ctypes.byref(value), _ASYNC_ENGINE_COUNT, device
    )
    return None if failed else value.value


def _cublas_version() -> str | None:
    """The version of the cuBLASLt that is loaded, from the library itself; None if it is not loaded yet."""
    torch.mm(*(torch.ones(2, 16, 16, device="cuda", dtype=torch.bfloat16)))
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"/\S*libcublasLt\.so\S*", line)
        if found:
            library = ctypes.CDLL(found[0])
            library.cublasLtGetVersion.restype = ctypes.c_size_t
            return str(library.cublasLtGetVersion())
    return None
