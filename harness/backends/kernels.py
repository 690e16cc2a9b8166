"""The two CUDA kernels of the harness, compiled at run time: a spin of known length and the gate.

They need torch.cuda's run-time compiler (`_compile_kernel`, torch 2.9 and newer); without it gated cases and the
controls that spin are skipped with that reason.
"""

from typing import Any

import torch

_SOURCE = r"""
__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

extern "C" __global__ void overlap_spin(int microseconds) {
    const unsigned long long end = now_ns() + (unsigned long long)microseconds * 1000ull;
    while (now_ns() < end) { }
}

// flag[0]: the last ticket the host has let through. flag[1]: the last ticket that ran into the limit.
extern "C" __global__ void overlap_gate(volatile int* flag, int ticket, int limit_ms) {
    const unsigned long long end = now_ns() + (unsigned long long)limit_ms * 1000000ull;
    while (flag[0] < ticket) {
        if (now_ns() > end) {
            flag[1] = ticket;
            return;
        }
    }
}
"""


def missing() -> str | None:
    """Why the kernels cannot be had with this torch; None if they can."""
    if hasattr(torch.cuda, "_compile_kernel"):
        return None
    return f"torch {torch.__version__} cannot compile the gate kernel (torch.cuda._compile_kernel, torch 2.9 or newer)"


def compile_kernel(name: str) -> Any:
    """The kernel of that name, a callable (grid, block, args)."""
    return torch.cuda._compile_kernel(_SOURCE, name)
