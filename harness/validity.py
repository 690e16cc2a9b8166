"""What the readings taken beside the samples say about them: a summary, reasons for invalid, labels.

Pure functions over `Sample`s; harness/telemetry.py takes those. All of it is optional: a quantity that was
never read is null, and `missing` says why.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec

# Bits of NVML's clocks event reasons (formerly: throttle reasons), nvml.h.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}

# A reason that spoils every number beside it, in the words people see.
SPOILING = {
    "hw_thermal_slowdown": "thermal slowdown (hardware)",
    "sw_thermal_slowdown": "thermal slowdown (driver)",
    "hw_power_brake_slowdown": "hardware slowdown (external power brake)",
    "hw_slowdown": "hardware slowdown",
}
LABELS = {
    "sw_power_cap": "software power cap",
    "sync_boost": "clocks held back by sync boost",
    "applications_clocks_setting": "application clocks set",
    "display_clock_setting": "clocks set by the display",
    "board_limit": "board limit",
    "reliability": "clocks held back for reliability",
}

QUANTITIES = (
    "sm_mhz",
    "mem_mhz",
    "power_w",
    "temperature_c",
    "utilisation_percent",
    "memory_used_bytes",
    "pcie_generation",
    "pcie_width",
)
LINK = ("pcie_generation", "pcie_width")
SERIES = ("sm_mhz", "power_w", "temperature_c")
SERIES_POINTS = 100

# The power sensor of some GPUs sees a quarter of the time (arXiv 2312.02741): short windows mean nothing.
ENERGY_MIN_S = 10.0
# A longer gap between two readings says that the sampler stalled, not that the state held.
MAX_HOLD_S = 1.0

DRIFT_FRACTION = 0.01
CLOCK_STEP_MHZ = 15.0
# Under a power cap readings scatter by up to 5 % (H200), so medians of a few differ by far more than 1 % by
# chance alone. The clock follows the load within 20 to 50 ms there: shorter arms in turn share one clock.
DRIFT_MIN_READINGS = 8
DRIFT_SIGMAS = 5.0
# The time of a copy does not follow the SM clock.
CLOCK_FREE_ARMS = ("transfer",)


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One reading of a GPU; what could not be read, or was not due, is None.

    t: monotonic seconds at which the reading was first seen; after: those of the look before, so the device
    made it in (after, t]. reasons: NVML's bit mask. others: compute processes on the device, ours left out.
    energy_j, pcie_replays: the device's counters, which only grow; the latter is of packets sent again over PCIe.
    """

    t: float
    after: float | None = None
    sm_mhz: int | None = None
    mem_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    reasons: int | None = None
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    others: int | None = None
    other_pids: tuple[int, ...] = ()
    energy_j: float | None = None
    pcie_replays: int | None = None

    @property
    def made(self) -> float:
        """The best guess of when the device made the reading, monotonic seconds."""
        return self.t if self.after is None else (self.after + self.t) / 2


Windows = Mapping[str, Sequence[tuple[float, float]]]


def reason_names(mask: int) -> list[str]:
    """The reasons set in `mask`; a bit that is not known is named by its number."""
    return [REASONS.get(1 << bit, f"bit_{bit}") for bit in range(mask.bit_length()) if mask >> bit & 1]


def summarise(
    samples: Sequence[Sample], windows: Windows | None = None, missing: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """All that a record keeps of `samples` (in order of time), ready for JSON.

    Args:
        windows: monotonic (start, end) of every time each arm ran, for the clock of each arm.
        missing: what could not be read, and why.

    Quantities are {min, median, max}; `reasons` maps each clock reason to the seconds it was seen for; `arms`
    maps each arm to its SM clock {sm_mhz, spread_mhz, readings}; `series` holds at most SERIES_POINTS points,
    t in seconds from the first sample.
    """
    gone = dict(missing or {})
    if not samples:
        gone.setdefault("telemetry", "no reading in this time")
        return {"samples": 0, "missing": gone}
    summary: dict[str, Any] = {"samples": len(samples), "seconds": round(samples[-1].t - samples[0].t, 3)}
    for name in QUANTITIES:
        summary[name] = _range(samples, name)
        if summary[name] is None:
            gone.setdefault(name, "no reading in this time")
    summary["reasons"] = _held(samples)
    summary["arms"] = _arm_clocks(samples, windows or {})
    summary["processes"] = _processes(samples)
    summary["energy_j"], _ = energy(samples, gone)
    summary["pcie_replays"] = _replays(samples, gone)
    summary["series"] = _series(samples)
    summary["missing"] = gone
    return summary


def verdict(
    summary: Mapping[str, Any], best_link: tuple[int, int] | None = None, *, waits: bool = False
) -> list[str]:
    """Why the numbers beside these readings are invalid; empty when nothing speaks against them.

    Args:
        best_link: the PCIe generation and width that device and slot can do. A link below it in half of the
            readings or more was so under load: one that rests is seldom caught twice.
        waits: the arms leave the device without work, by their nature: clocks that differ and a link at rest say
            nothing.

    A software power cap is never a reason (`labels`). Arms drifted apart when the medians of their SM clocks
    differ by more than 1 %, by more than a clock step, and by more than chance: DRIFT_SIGMAS standard errors,
    from at least DRIFT_MIN_READINGS readings each.
    """
    processes = summary.get("processes") or {}
    looks, shared = processes.get("looks", 0), processes.get("shared_looks", 0)
    reasons = []
    # A process that is just ending can still be listed, so one look among several proves nothing.
    if shared >= 2 or (shared and looks == shared):
        count = processes["others"]
        reasons.append(f"shared GPU: {count} other process{'es' if count > 1 else ''}")
    seen = set(summary.get("reasons") or {})
    # NVML sets hw_slowdown beside the reason that explains it.
    if seen & {"hw_thermal_slowdown", "hw_power_brake_slowdown"}:
        seen.discard("hw_slowdown")
    reasons += [text for name, text in SPOILING.items() if name in seen]
    if waits:
        return reasons
    drift = _drift(summary.get("arms") or {})
    if drift is not None:
        reasons.append(drift)
    link = loaded_link(summary)
    if best_link is not None and link is not None and (link[0] < best_link[0] or link[1] < best_link[1]):
        reasons.append(f"PCIe link at {link_words(link)} under load, below its {link_words(best_link)}")
    return reasons


def loaded_link(summary: Mapping[str, Any]) -> tuple[int, int] | None:
    """PCIe generation and width in most of the readings; None where they were not read."""
    ranges = [summary.get(name) for name in LINK]
    if None in ranges:
        return None
    generation, width = (int(found["median"]) for found in ranges if found)
    return generation, width


def link_words(link: tuple[int, int]) -> str:
    """A link as people write it: `gen5 x16`."""
    return f"gen{link[0]} x{link[1]}"


def labels(summary: Mapping[str, Any]) -> list[str]:
    """What a reader should know, though the numbers stand: `software power cap`."""
    seen = summary.get("reasons") or {}
    found = [text for name, text in LABELS.items() if name in seen]
    return [*found, "PCIe packets sent again"] if summary.get("pcie_replays") else found


def _range(samples: Iterable[Sample], name: str) -> dict[str, float] | None:
    values = [value for sample in samples if (value := getattr(sample, name)) is not None]
    if not values:
        return None
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _held(samples: Sequence[Sample]) -> dict[str, float]:
    """Seconds under each reason: a reading holds until the next one."""
    known = [sample for sample in samples if sample.reasons is not None]
    held: dict[str, float] = {}
    for index, sample in enumerate(known):
        until = known[index + 1].t if index + 1 < len(known) else sample.t
        for name in reason_names(sample.reasons or 0):
            held[name] = held.get(name, 0.0) + min(until - sample.t, MAX_HOLD_S)
    return {name: round(seconds, 3) for name, seconds in held.items()}


def fresh(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that brought a new reading of clock and power, which are renewed together.

    A driver renews its readings at its own pace (100 ms on an H200); a look in between sees the old one,
    which says nothing about the arm that runs by then.
    """
    kept: list[Sample] = []
    last: tuple[object, ...] | None = None
    for sample in samples:
        state = (sample.sm_mhz, sample.power_w)
        if state != last and sample.after is not None:
            kept.append(sample)
        last = state
    return kept


def _arm_clocks(samples: Sequence[Sample], windows: Windows) -> dict[str, dict[str, float]]:
    readings = [(sample.made, sample.sm_mhz) for sample in fresh(samples) if sample.sm_mhz is not None]
    clocks = {}
    for arm, spans in windows.items():
        inside = _between(readings, spans)
        if inside:
            clocks[arm] = {
                "sm_mhz": statistics.median(inside),
                "spread_mhz": round(statistics.stdev(inside), 3) if len(inside) > 1 else 0.0,
                "readings": len(inside),
            }
    return clocks


def _between(readings: Sequence[tuple[float, int]], spans: Sequence[tuple[float, float]]) -> list[int]:
    """The readings made within any of `spans`; both are in order of time."""
    inside = []
    ordered = iter(sorted(spans))
    span = next(ordered, None)
    for at, value in readings:
        while span is not None and span[1] < at:
            span = next(ordered, None)
        if span is None:
            break
        if span[0] <= at:
            inside.append(value)
    return inside


def _drift(arms: Mapping[str, Mapping[str, float]]) -> str | None:
    clocks = [
        clock
        for arm, clock in arms.items()
        if not arm.startswith(CLOCK_FREE_ARMS) and clock["readings"] >= DRIFT_MIN_READINGS
    ]
    if len(clocks) < 2:
        return None
    clocks.sort(key=itemgetter("sm_mhz"))
    slow, fast = clocks[0], clocks[-1]
    apart = fast["sm_mhz"] - slow["sm_mhz"]
    # The standard error of a median is 1.25 times that of a mean (normal scatter, many readings).
    error = 1.25 * sum(clock["spread_mhz"] ** 2 / clock["readings"] for clock in (slow, fast)) ** 0.5
    if apart <= max(DRIFT_FRACTION * fast["sm_mhz"], CLOCK_STEP_MHZ, DRIFT_SIGMAS * error):
        return None
    return f"clock drift between arms: {fast['sm_mhz']:.0f} vs {slow['sm_mhz']:.0f} MHz"


def _processes(samples: Iterable[Sample]) -> dict[str, int]:
    """looks: how often the list of processes was read; shared_looks: how often it held others."""
    counts = [sample.others for sample in samples if sample.others is not None]
    return {
        "looks": len(counts),
        "shared_looks": sum(count > 0 for count in counts),
        "others": max(counts, default=0),
    }


def energy(samples: Iterable[Sample], missing: dict[str, str]) -> tuple[float | None, float]:
    """Joules over the seconds between the first and the last reading; None, and why in `missing`, where unknown."""
    known = [(sample.t, sample.energy_j) for sample in samples if sample.energy_j is not None]
    if not known:
        missing.setdefault("energy_j", "no reading in this time")
        return None, 0.0
    (start, first), (end, last) = known[0], known[-1]
    if end - start < ENERGY_MIN_S:
        missing.setdefault("energy_j", f"shorter than {ENERGY_MIN_S:.0f} s")
        return None, round(end - start, 3)
    if last < first:
        missing.setdefault("energy_j", "the counter was reset")
        return None, round(end - start, 3)
    return round(last - first, 3), round(end - start, 3)


def _replays(samples: Iterable[Sample], missing: dict[str, str]) -> int | None:
    known = [sample.pcie_replays for sample in samples if sample.pcie_replays is not None]
    if len(known) < 2:
        missing.setdefault("pcie_replays", "fewer than two readings in this time")
        return None
    return max(0, known[-1] - known[0])


def _series(samples: Sequence[Sample]) -> dict[str, list[float | None]]:
    """A thinned series of real readings: of each bucket the lowest clock, which a mean would hide."""
    known = [sample for sample in samples if sample.sm_mhz is not None or sample.power_w is not None]
    step = max(1, -(-len(known) // SERIES_POINTS))
    kept = [min(known[at : at + step], key=_clock) for at in range(0, len(known), step)]
    series: dict[str, list[float | None]] = {"t": [round(sample.t - samples[0].t, 3) for sample in kept]}
    for name in SERIES:
        series[name] = [getattr(sample, name) for sample in kept]
    return series


def _clock(sample: Sample) -> float:
    return float("inf") if sample.sm_mhz is None else sample.sm_mhz
