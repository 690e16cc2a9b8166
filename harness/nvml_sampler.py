"""The child of `Sampler`: reads one GPU at a steady pace, keeps the readings, answers queries on stdin.

It ends when stdin closes or its parent is gone (a fork of the parent may hold the pipe open).
"""

import argparse
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from harness.sampler import Answer, Query
from harness.telemetry import PERMANENT, Nvml, NvmlDevice, foreign
from harness.validity import Sample

# Cheap while the driver's cached reading is current: 1 to 5 us each, 40 us from a cold cache (H200).
QUICK = ("sm_mhz", "mem_mhz", "power_w", "temperature_c", "reasons")
SLOW = ("utilisation_percent", "memory_used_bytes", "pcie_generation", "pcie_width", "pids")
# 3 ms and 0.4 ms on an H200. PCIe throughput takes 20 ms and is never read.
RARE = ("energy_j", "pcie_replays")
SLOW_S = 0.25
RARE_S = 1.0
# Half an hour of looks every 5 ms, should a device renew its readings at every one; days on an H200.
KEPT = 360_000


class Poller:
    """Turns looks at a device into samples: one for every new reading, and one for every slow look.

    A look that finds the reading of the last one adds nothing: drivers renew readings at their own pace.
    """

    def __init__(self, device: NvmlDevice, own: Sequence[int], contexts: int = 1) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self.missing: dict[str, str] = {}
        self._device, self._own, self._contexts = device, own, contexts
        self._last: tuple[Any, ...] | None = None
        self._looked: float | None = None
        self._slow_due = self._rare_due = 0.0

    def look(self, *, everything: bool = False) -> None:
        """One look now; `everything` does not wait for the slow fields to be due."""
        before = time.monotonic()
        slow, rare = everything or before >= self._slow_due, everything or before >= self._rare_due
        quick = tuple(self._read(field) for field in QUICK)
        at = (before + time.monotonic()) / 2
        if slow or quick != self._last:
            sample = Sample(t=at, after=self._looked, **dict(zip(QUICK, quick, strict=True)))
            if slow:
                self._slow_due = before + SLOW_S
                self._add(sample, SLOW)
            if rare:
                self._rare_due = before + RARE_S
                self._add(sample, RARE)
            self.samples.append(sample)
        self._last, self._looked = quick, at

    def answer(self, query: Query) -> Answer:
        if query.t1 is None:
            self.look(everything=True)
        last = float("inf") if query.t1 is None else query.t1
        return Answer([sample for sample in self.samples if query.t0 <= sample.t <= last], self.missing)

    def _add(self, sample: Sample, fields: Sequence[str]) -> None:
        for field in fields:
            value = self._read(field)
            if field == "pids":
                if value is not None:
                    sample.others, strangers = foreign(value, self._own, contexts=self._contexts)
                    sample.other_pids = tuple(strangers)
            else:
                setattr(sample, field, value)

    def _read(self, field: str) -> Any:
        # Asking in vain costs 30 to 80 us, far more than a reading.
        if self.missing.get(field) in PERMANENT:
            return None
        value, reason = self._device.read(field)
        if reason is None:
            self.missing.pop(field, None)
        else:
            self.missing[field] = reason
        return value


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="nvml_sampler")
    parser.add_argument("--uuid", required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--own", type=int, action="append", default=[])
    parser.add_argument("--contexts", type=int, default=1)
    options = parser.parse_args(arguments)
    # Ctrl-C reaches the whole group; the parent decides when its readings end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Nvml() as nvml:
        device = nvml.device(options.uuid)
        poller = None if device is None else Poller(device, options.own, options.contexts)
        absent = {"telemetry": nvml.reason or "NVML lists no device of this UUID"}
        _serve(poller, absent, options.interval, options.parent)
    return 0


def _serve(poller: Poller | None, absent: dict[str, str], interval: float, parent: int) -> None:
    pending = b""
    due = time.monotonic()
    while os.getppid() == parent:
        if poller is not None and time.monotonic() >= due:
            poller.look()
            # No catching up after a stall: looks in a burst would all see one reading.
            due = max(due + interval, time.monotonic())
        wait = 1.0 if poller is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([0], [], [], wait)
        if not ready:
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            query = msgspec.json.decode(line, type=Query)
            answer = Answer([], absent) if poller is None else poller.answer(query)
            if not _send(msgspec.json.encode(answer) + b"\n"):
                return


def _send(data: bytes) -> bool:
    """False once nobody reads."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
