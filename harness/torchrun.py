"""What torchrun has told this process: which rank it is, of how many, and where they find each other."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import UsageError

# Exit codes of a rank's process (harness/ranks.py): an error of its own, or one for which another rank is to blame.
OWN, ANOTHERS = 3, 4

# What a rank says of one that it waited for in vain.
LATE = "did not come within"

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Role:
    """One rank of `size`, the `local_rank`-th of `local_size` on its host; rank 0's host is at `address`.

    agent_store: whether torchrun keeps the key-value store at `port`; else rank 0 has to. attempt: how often torchrun
    has started the ranks anew.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    agent_store: bool = False
    attempt: int = 0

    def name(self, host: str, rank: int | None = None) -> str:
        """This rank, or another one, as people are told of it: with its host where there are several."""
        rank = self.rank if rank is None else rank
        return f"rank {rank} on {host}" if self.local_size < self.size and host else f"rank {rank}"


def role(variables: Mapping[str, str] = os.environ) -> Role | None:
    """The role that torchrun, or who speaks as it does, has given this process; None for a process alone.

    Some job managers set the same variables for a launcher to read: one process of one is alone unless torchrun
    started it. UsageError for values that make no sense.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in variables
    missing = [name for name in _NEEDED if not variables.get(name)]
    if missing:
        if by_torchrun:
            raise UsageError(
                f"{missing[0]}: not set, though torchrun's other variables are; start with torchrun"
            )
        return None
    size = _number(variables, "WORLD_SIZE", low=1)
    if size == 1 and not by_torchrun:
        return None
    local_size = _number(variables, "LOCAL_WORLD_SIZE", low=1, high=size, default=size)
    rank = _number(variables, "RANK", high=size - 1)
    return Role(
        rank=rank,
        size=size,
        local_rank=_number(variables, "LOCAL_RANK", high=local_size - 1, default=rank % local_size),
        local_size=local_size,
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT", low=1, high=65535),
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def check(role: Role) -> None:
    """UsageError where this host does not know the name of rank 0's: nobody would say so for minutes."""
    try:
        socket.getaddrinfo(role.address, role.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR: got {role.address!r}, which this host cannot find: {error.strerror or error}"
        ) from None


def _number(
    variables: Mapping[str, str], name: str, *, low: int = 0, high: int = 1 << 31, default: int | None = None
) -> int:
    text = variables.get(name)
    if not text and default is not None:
        return default
    if not (text and text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise UsageError(f"{name}: got {text!r}, want a number from {low} to {high}; start with torchrun")
    return int(text)
