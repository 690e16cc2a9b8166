"""What the parent and a worker say to each other: one job in on stdin, JSON lines of events out.

Events go over a pipe of their own, so that whatever a library prints cannot garble them.
"""

import re
from typing import Any, Literal

import msgspec

from harness.profiles import Profile
from harness.record import Ceiling, Control, Launch

# record.STATUSES, so that a worker cannot say another word.
Status = Literal["ok", "unsettled", "skipped", "invalid", "error"]

# /dev/shm is the same on every machine.
_PATH = re.compile(r"(?!/dev/shm(?![\w./-]))(?<![^\s'\"`(\[{<=:,])(?:~|\.{1,2})?/(?!/)[^\s'\"`()\[\]{}<>:,]+")
_LONGEST = 300


class Job(msgspec.Struct, kw_only=True):
    """One launch: the cases in order, on one device, with the ceilings and the controls first.

    seconds: when the whole launch should end, from the worker's start; a case begun before then gets its first
    look all the same. target: as in supervise.Plan. best_link: the PCIe generation and width that device and slot can
    do, where they are known. ranks: the processes that measure every case of it together; None for one alone.
    environment: what its processes are started with besides the parent's.
    """

    device: str
    uuid: str | None
    no_telemetry: str
    profile: Profile
    cases: list[str]
    launch: int
    target: float | None = None
    seconds: float | None = None
    controls: bool = True
    ceilings: bool = True
    best_link: tuple[int, int] | None = None
    ranks: int | None = None
    environment: dict[str, str] = {}


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """The device is open. facts: what only this process can know; canary_us: host time of an empty launch;
    open_s: seconds from the worker's start, imports included."""

    facts: dict[str, Any]
    canary_us: float
    open_s: float


class CeilingsDone(msgspec.Struct, tag="ceilings", kw_only=True):
    """What the device reaches alone. link: PCIe generation and width while it did, where they are known."""

    ceilings: list[Ceiling]
    link: tuple[int, int] | None
    seconds: float


class ControlDone(msgspec.Struct, tag="control", kw_only=True):
    """seconds: what this control took, its failed attempts included."""

    control: Control
    seconds: float


class Begin(msgspec.Struct, tag="begin", kw_only=True):
    key: str


class Progress(msgspec.Struct, tag="progress", kw_only=True):
    """Rounds so far."""

    key: str
    rounds: int


class Done(msgspec.Struct, tag="done", kw_only=True):
    """One case of this launch, with the status this launch gives it.

    out_of_time: skipped because the time budget was used up, so that a later launch may still measure it.
    """

    key: str
    status: Status
    reason: str
    launch: Launch | None
    out_of_time: bool = False


class Closing(msgspec.Struct, tag="closing", kw_only=True):
    """Every case of the job was told. energy_j: what the device used in `energy_s` seconds; None where unknown."""

    energy_j: float | None
    energy_s: float


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """The worker itself cannot go on."""

    reason: str


Event = Ready | CeilingsDone | ControlDone | Begin | Progress | Done | Closing | Failed
EVENTS = msgspec.json.Decoder(Event)
JOBS = msgspec.json.Decoder(Job)


def reason(text: str) -> str:
    """`text` as a record may keep it: one line, of printable characters, without paths of this machine."""
    line = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
    line = _PATH.sub("(path)", line)
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
