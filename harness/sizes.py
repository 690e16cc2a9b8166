"""Byte sizes as people write them: `256MiB`."""

import re

from harness.errors import UsageError

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_PATTERN = re.compile(r"([0-9]{1,18})\s*(B|KiB|MiB|GiB)")


def parse_size(text: str, *, field: str = "size") -> int:
    """Bytes named by `text`, such as `64MiB`; UsageError for anything else."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{field}: got {text!r}, want a whole number and a unit of B, KiB, MiB or GiB, e.g. 64MiB"
        )
    return int(match[1]) * _UNITS[match[2]]


def format_size(size: int) -> str:
    """The shortest exact form of `size` bytes: 268435456 -> `256MiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _UNITS[unit] and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"
