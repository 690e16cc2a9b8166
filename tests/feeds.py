"""Small cases of family feed, and datasets that are slow, faulty or unusual. Spawned workers import this module."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from harness.case import Case
from harness.families import FEED
from harness.profiles import Profile, packaged
from harness.workloads.feed_data import Collate, FeedDataset
from harness.workloads.order import Pick

SMALL = {
    "pool": 24, "batches": 4, "image": 48, "crop": 32, "pictures": 4, "documents": 4, "words": 20, "longest": 64,
    "patch": 8, "width": 32, "hidden": 64, "picture_products": 2, "text_products": 2, "latency_ms": 1.0,
    "mib_per_s": 100.0, "conditioning": 0,
}  # fmt: skip


def profile_of(device: str = "cpu", **sizes: Any) -> Profile:
    """The device's profile with samples and steps so small that workers and waits are all the time there is."""
    profile = packaged()["cpu" if device == "cpu" else "h200"]
    return msgspec.structs.replace(profile, feed=msgspec.structs.replace(profile.feed, **SMALL | sizes))


def case_of(device: str = "cpu", **axes: Any) -> Case:
    memory = "pageable" if device == "cpu" else "pinned"
    base = {"data": "jpeg", "source": "memory", "workers": 2, "memory": memory, "profile": "p"}
    return Case.of(FEED, **base | axes)


class Slow(FeedDataset):
    """A fixed cost for each sample that needs no core, so that workers scale on any machine."""

    SECONDS = 0.005

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        time.sleep(self.SECONDS)
        return super().decode(pick, data)


class Stalling(FeedDataset):
    """No cost, save that every 24th sample takes long: a loader that stalls in bursts."""

    SECONDS = 0.12

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        if pick.index == 0:
            time.sleep(self.SECONDS)
        return super().decode(pick, data)


class Swapped(FeedDataset):
    """A sample's bytes are now and then those of another one."""

    def read(self, pick: Pick) -> bytes:
        return self.source.read((pick.index + 1) % len(self.source))


class Repeating(FeedDataset):
    """One sample stands for another, and says so."""

    def __getitem__(self, pick: Pick) -> tuple[Pick, Tensor]:
        return super().__getitem__(Pick(pick.epoch, 3 if pick.index == 5 else pick.index, pick.row))


class Failing(FeedDataset):
    """What a broken file does to a worker."""

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        if pick.epoch >= 1:
            raise ValueError("a broken file\nand what to do about it")
        return super().decode(pick, data)


class Killed(FeedDataset):
    """The worker that reads sample 7 in the second epoch or later is killed, as one is when memory runs out."""

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        if pick.epoch >= 1 and pick.index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(pick, data)


class Stuck(FeedDataset):
    """A store that does not answer any more."""

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        if pick.epoch >= 1:
            time.sleep(1000)
        return super().decode(pick, data)


class UsesCuda(FeedDataset):
    """Decodes on the device that the parent computes on."""

    def decode(self, pick: Pick, data: bytes) -> Tensor:
        return super().decode(pick, data).to("cuda").cpu()


@dataclass
class PictureBatch:
    """A type of batch that DataLoader does not know."""

    pixels: Tensor
    index: Tensor


class CustomCollate(Collate):
    def __call__(self, samples: Any) -> Any:
        return PictureBatch(**super().__call__(samples))


class PinnedBatch(PictureBatch):
    """The same with the method that DataLoader asks for."""

    def pin_memory(self) -> "PinnedBatch":
        return PinnedBatch(self.pixels.pin_memory(), self.index.pin_memory())


class PinningCollate(Collate):
    def __call__(self, samples: Any) -> Any:
        return PinnedBatch(**super().__call__(samples))


def processes_with(mark: str) -> list[int]:
    """Processes whose environment has the variable `mark`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{mark}=".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
