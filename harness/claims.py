"""What people believe of copies and streams: each claim with the reports it comes from, what is measured to settle it,
and the verdict on given numbers. harness/experiments.py measures, harness/myths.py asks it to.

Verdicts are about one machine and one software stack: `true here`, `false here`, or `depends`, with the reason.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from harness.families import MIB
from harness.sizes import format_size

TRUE, FALSE, DEPENDS = "true here", "false here", "depends"

# Turns of a race, and of the one whose report asks for more.
TURNS = 20
COMPILED_TURNS = 100

# Device work that is queued before a pageable copy.
QUEUED_MS = 1.0
PAGEABLE_SIZES = tuple(4 * 1024 * 4**step for step in range(8))  # 4 KiB to 64 MiB

# A pinned tensor of one byte more than a power of two.
PINNED_BYTES = 256 * MIB + 1

# Hidden fractions: from here on the shorter leg is as good as hidden; below, nothing is.
HIDES, NOTHING = 0.8, 0.15

# Times that differ by less are alike.
ALIKE = 0.1

Numbers = Mapping[str, float]


class Verdict(NamedTuple):
    """word: TRUE, FALSE or DEPENDS. because: what decides it; empty where the numbers say it all."""

    word: str
    because: str = ""


class Figure(NamedTuple):
    """A number that an experiment gives; `optional`: where the machine does not tell, it is left out."""

    words: str
    unit: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim:
    """text: what people believe. refs: the reports. judge: the verdict on the figures, given the version of torch."""

    name: str
    text: str
    refs: tuple[str, ...]
    figures: Mapping[str, Figure]
    judge: Callable[[Numbers, str], Verdict]
    advice: str

    def complaint(self, numbers: Numbers) -> str:
        """Why `numbers` are not this claim's figures; empty if they are."""
        for name, value in numbers.items():
            if name not in self.figures:
                return f"{name} is no figure of {self.name}"
            if not math.isfinite(value):
                return f"{name} is {value}"
        missing = [
            name for name, figure in self.figures.items() if not figure.optional and name not in numbers
        ]
        return f"{', '.join(missing)} not told" if missing else ""


def _race(numbers: Numbers, torch: str) -> Verdict:
    """A race shows without its wait, and not with it."""
    if numbers["waited"]:
        return Verdict(DEPENDS, "wrong even after the wait: doubt this machine, its driver or its torch")
    if numbers["at_once"]:
        return Verdict(FALSE)
    return Verdict(TRUE, "it never went wrong here, which nothing guarantees elsewhere")


def _compiled_read(numbers: Numbers, torch: str) -> Verdict:
    if numbers["compiled"]:
        return Verdict(FALSE, f"torch {torch} is affected: it reads before the copy has ended")
    if not numbers["eager"]:
        return Verdict(DEPENDS, "the race did not show without the compiler either")
    return Verdict(TRUE, f"torch {torch} is not affected: compiled code waits, eager code does not")


def _list_index(numbers: Numbers, torch: str) -> Verdict:
    if not numbers["slice"]:
        return Verdict(DEPENDS, "a slice was not written to either: doubt this torch")
    return (
        Verdict(TRUE) if numbers["list"] else Verdict(FALSE, "a list makes a temporary, which gets the copy")
    )


def _one_stream(numbers: Numbers, torch: str) -> Verdict:
    if numbers["pinned_side"] < HIDES:
        return Verdict(DEPENDS, "not even a side stream hides the copy here: see overlap doctor")
    if numbers["pinned_default"] <= NOTHING:
        return Verdict(FALSE, "one stream works in order: only the side stream hides the copy")
    return Verdict(TRUE if numbers["pinned_default"] >= HIDES else DEPENDS)


def _pageable_return(numbers: Numbers, torch: str) -> Verdict:
    waits = [numbers[str(size)] >= QUEUED_MS / 2 for size in PAGEABLE_SIZES]
    if not any(waits):
        return Verdict(TRUE)
    first = waits.index(True)
    if not first and all(waits):
        return Verdict(FALSE)
    waiting, returning = PAGEABLE_SIZES[first], PAGEABLE_SIZES[first - 1]
    if first and all(waits[first:]):
        return Verdict(
            DEPENDS,
            f"up to {format_size(returning)} it returns at once; {format_size(waiting)} waits for the queue",
        )
    return Verdict(DEPENDS, "there is no one size from which it waits")


def _two_kernels(numbers: Numbers, torch: str) -> Verdict:
    full, small = numbers["full"], numbers["small"]
    if full >= HIDES and small >= HIDES:
        return Verdict(TRUE)
    if full <= NOTHING and small >= HIDES:
        return Verdict(DEPENDS, "small ones do; two that fill the GPU take turns")
    if full <= NOTHING and small <= NOTHING:
        return Verdict(FALSE)
    return Verdict(DEPENDS, "they share the GPU in part")


def _pinned_size(numbers: Numbers, torch: str) -> Verdict:
    times = round(numbers["taken"] * MIB / PINNED_BYTES, 6)
    if times < 1:
        return Verdict(DEPENDS, "less than its bytes cannot be: doubt what torch tells of pinned memory")
    if times <= 1 + ALIKE:
        return Verdict(TRUE)
    return Verdict(FALSE, f"it takes {times:.2f} times that: torch rounds pinned memory up to a power of two")


def _pin_each_time(numbers: Numbers, torch: str) -> Verdict:
    plain = numbers["plain"]
    first, again = (numbers[name] < plain * (1 - ALIKE) for name in ("first", "again"))
    if first == again:
        return Verdict(TRUE if first else FALSE)
    if again:
        return Verdict(DEPENDS, "not with memory pinned for it; from torch's cache of pinned memory it does")
    return Verdict(DEPENDS, "only with memory pinned for it")


def _blocking_to(numbers: Numbers, torch: str) -> Verdict:
    half = numbers["copy"] / 2
    if numbers["non_blocking"] >= half:
        return Verdict(DEPENDS, "the host waits even with non_blocking=True: see overlap doctor")
    return Verdict(FALSE) if numbers["blocking"] >= half else Verdict(TRUE)


_TURNS = f"of {TURNS}"
_COMPILED = f"of {COMPILED_TURNS}"

_ALL = (
    Claim(
        name="read-back",
        text="After x.to('cpu', non_blocking=True) the values are there to be read.",
        refs=("pytorch/pytorch#140296", "pytorch/pytorch#86264"),
        figures={
            "at_once": Figure("stale when read at once", _TURNS),
            "waited": Figure("after an event's wait", _TURNS),
            "pageable": Figure("copied into pageable memory and read at once", _TURNS),
        },
        judge=_race,
        advice="Record an event behind the copy and synchronize with it before the host reads.",
    ),
    Claim(
        name="edited-source",
        text="After a non_blocking copy was issued its host source may be written again.",
        refs=("pytorch/pytorch#127612",),
        figures={
            "at_once": Figure("edits that reached the device when made at once", _TURNS),
            "waited": Figure("after an event's wait", _TURNS),
            "pageable": Figure("made at once in pageable memory", _TURNS),
        },
        judge=_race,
        advice="Wait for an event behind the copy before you fill the buffer again; two buffers in turn hide the wait.",
    ),
    Claim(
        name="compiled-read",
        text="torch.compile makes x.to('cpu', non_blocking=True).item() wait for its copy.",
        refs=("pytorch/pytorch#182190", "pytorch/pytorch#185252"),
        figures={
            "compiled": Figure("stale when compiled", _COMPILED),
            "eager": Figure("stale in eager mode", _COMPILED),
        },
        judge=_compiled_read,
        advice="Leave non_blocking out where the next thing is to read: x.item() waits by itself.",
    ),
    Claim(
        name="list-index",
        text="buffer[[0, 1]].copy_(x) writes into the buffer.",
        refs=("pytorch/pytorch#137878",),
        figures={
            "list": Figure("rows changed through a list", "of 2"),
            "slice": Figure("through a slice", "of 2"),
        },
        judge=_list_index,
        advice="Copy into a slice, or assign: buffer[[0, 1]] = x. Check what arrived, not only that it took time.",
    ),
    Claim(
        name="one-stream",
        text="Pinned memory and non_blocking=True are enough for a copy to run beside compute.",
        refs=("PyTorch forum 38234/31",),
        figures={
            "pinned_side": Figure("hidden of the shorter leg: pinned, side stream", ""),
            "pinned_default": Figure("pinned, default stream", ""),
            "pageable_side": Figure("pageable, side stream", ""),
            "pageable_default": Figure("pageable, default stream", ""),
            "kernel_first": Figure("pageable, side stream, kernel issued before the copy", ""),
            "pinned_ms": Figure("the copy alone: pinned", "ms"),
            "pageable_ms": Figure("pageable", "ms"),
        },
        judge=_one_stream,
        advice="Copy on a stream of its own, and have the compute stream wait for an event behind the copy.",
    ),
    Claim(
        name="pageable-return",
        text="With non_blocking=True a copy returns at once, from pageable memory too.",
        refs=("NVIDIA forum t/238833",),
        figures={
            str(size): Figure(
                f"host blocked behind {QUEUED_MS:g} ms of queued work: {format_size(size)}"
                if size == PAGEABLE_SIZES[0]
                else format_size(size),
                "ms",
            )
            for size in PAGEABLE_SIZES
        },
        judge=_pageable_return,
        advice="Pin what is copied in a loop; small pageable copies are staged by the driver and may go as they are.",
    ),
    Claim(
        name="two-kernels",
        text="Kernels on two streams run at the same time.",
        refs=("NVIDIA forum t/334237",),
        figures={
            "full": Figure("hidden of the shorter leg: two kernels that fill the GPU", ""),
            "small": Figure("two kernels of one block", ""),
            "copy": Figure("a copy beside a kernel that fills the GPU", ""),
        },
        judge=_two_kernels,
        advice="Put copies and small kernels beside a large kernel: a second large one waits for room.",
    ),
    Claim(
        name="no-wait",
        text="A kernel issued after a copy on another stream reads what was copied.",
        refs=("ROCm/pytorch#3194",),
        figures={
            "at_once": Figure("stale without a wait between the streams", _TURNS),
            "waited": Figure("with it", _TURNS),
        },
        judge=_race,
        advice="torch.cuda.current_stream().wait_stream(side), or an event's wait, before the first use.",
    ),
    Claim(
        name="pinned-size",
        text="A pinned tensor takes as much host memory as it has bytes.",
        refs=("pytorch/pytorch#95823", "pytorch/pytorch#171662"),
        figures={
            "asked": Figure("asked for", "MiB"),
            "taken": Figure("taken", "MiB"),
            "resident": Figure("by which the process grew", "MiB", optional=True),
        },
        judge=_pinned_size,
        advice="Make pinned pools a power of two in size, or several of them.",
    ),
    Claim(
        name="pin-each-time",
        text="Pinning a batch right before its copy makes the copy faster.",
        refs=("allenai/allennlp#4670",),
        figures={
            "plain": Figure("256MiB to the device: as it is", "ms"),
            "first": Figure("pinned for it", "ms"),
            "again": Figure("pinned into memory that torch had pinned before", "ms"),
            "reused": Figure("from a pinned buffer that is there", "ms"),
        },
        judge=_pin_each_time,
        advice="Have the loader write into pinned buffers that are used again.",
    ),
    Claim(
        name="blocking-to",
        text="From pinned memory, x.to(device) does not hold up the host.",
        refs=("Lightning-AI/pytorch-lightning#620",),
        figures={
            "blocking": Figure("host blocked by x.to(device)", "ms"),
            "non_blocking": Figure("by x.to(device, non_blocking=True)", "ms"),
            "copy": Figure("the copy itself", "ms"),
        },
        judge=_blocking_to,
        advice="Pass non_blocking=True, and wait where the data is used.",
    ),
)

CLAIMS: Mapping[str, Claim] = {claim.name: claim for claim in _ALL}
