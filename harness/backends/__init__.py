"""Backends: one contract (`base`), a real device (`cuda`) and real threads (`cpu`) behind it."""

from harness.backends.base import Backend
from harness.errors import UsageError


def get_backend(kind: str) -> Backend:
    """The backend of that kind, with torch imported only now; UsageError for another word."""
    if kind == "cuda":
        from harness.backends.cuda import CudaBackend

        return CudaBackend()
    if kind == "cpu":
        from harness.backends.cpu import CpuBackend

        return CpuBackend()
    raise UsageError(f"device: got {kind!r}, want cuda or cpu")
