"""Facts of the host that more than one layer asks for."""

from pathlib import Path


def free_bytes() -> int | None:
    """Memory the host can give without swapping, bytes; None where the kernel does not say."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None
