"""Controls: work whose answer is known, measured in every run by the same means (measurement.md, rule 6).

A control that fails makes the run's overlap numbers invalid, so each can fail: it is measured, never assumed.

known answer   a copy beside a timed spin takes as long as the longer of the two
same stream    spin and copy on one stream hide nothing
dependency     a copy that has to wait for the spin hides nothing, whatever its stream
null           a product against itself differs by nothing
sensitivity    5 % more bytes are seen as 5 % more time (50 % on a cpu, whose copies vary by more than 5 %)
race           the pipeline with its wait left out is caught by its check
bare copy      the harness's copy is as fast as a bare `copy_` between two events
sampler        readings beside the samples cost them less than half a percent
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.backends.base import Backend, Event
from harness.case import Case
from harness.errors import MeasurementError, Skip
from harness.families import H2D, MIB
from harness.profiles import Profile
from harness.record import Control
from harness.sampler import Telemetry
from harness.theory import hidden_fraction
from harness.workloads.h2d import H2DWorkload

ROUNDS = 20
MAX_VOID = 3
RACE_ROUNDS = 10

# Between two samples of the null control: products back to back run into the power cap, where the clock wanders by
# more than the control may.
PAUSE_S = 0.001

# Samples in a row with the sampler at work, or at rest: some 50 ms, ten of its looks. A renewal of the driver's
# readings, every 100 ms on an H200, falls into every other one.
SAMPLER_BLOCK = 5
SAMPLER_BLOCKS = 40
SAMPLER_COST = 0.005

# A control that fails is measured again before it condemns a run; `Control.detail` says how often.
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes and time of the controls' work on one kind of device; `more` is the share that sensitivity adds."""

    copy_bytes: int
    more: float
    spin_ms: float
    bare_bytes: int
    null_rounds: int
    memory: str


# Half a percent is asked of the null control, which the steps of a GPU's clock blur in fewer rounds.
_CUDA = _Sizes(
    copy_bytes=128 * MIB, more=0.05, spin_ms=3.0, bare_bytes=512 * MIB, null_rounds=250, memory="pinned"
)
_CPU = _Sizes(
    copy_bytes=64 * MIB, more=0.5, spin_ms=8.0, bare_bytes=64 * MIB, null_rounds=40, memory="pageable"
)


def run_controls(
    backend: Backend,
    profile: Profile,
    launch: int,
    telemetry: Telemetry | None = None,
    *,
    attempts: int = ATTEMPTS,
    only: str = "",
) -> Iterator[Control]:
    """Each control's last attempt, as it is measured. Left out are those that need kernels this torch lacks, and
    `sampler` where nothing is read."""
    bench = _Bench(backend, profile, telemetry)
    try:
        for name, control in bench.controls().items():
            if only not in ("", name):
                continue
            for attempt in range(1, attempts + 1):
                try:
                    value, low, high, unit = control()
                except Skip:
                    break
                value = float(value)  # a formula may give numpy's kind
                passed = low <= value <= high
                if passed or attempt == attempts:
                    detail = "" if attempt == 1 else f"attempt {attempt} of {attempts}"
                    yield Control(
                        name=name,
                        launch=launch,
                        passed=passed,
                        value=value,
                        low=low,
                        high=high,
                        unit=unit,
                        detail=detail,
                    )
                    break
    finally:
        bench.close()


_Result = tuple[float, float, float, str]


class _Bench:
    """The buffers and arms the controls share."""

    def __init__(self, backend: Backend, profile: Profile, telemetry: Telemetry | None) -> None:
        self._backend = backend
        self._telemetry = telemetry
        self._profile = profile
        self._sizes = sizes = _CUDA if backend.kind == "cuda" else _CPU
        self._gated = backend.unsupported(memory=sizes.memory, gate=True) is None
        width, dtype = profile.width, profile.dtype
        self._rows = sizes.copy_bytes // profile.row_bytes
        self._more_rows = more = round(self._rows * (1 + sizes.more))
        self._host = backend.host_tensor(more, width, dtype, pinned=sizes.memory == "pinned")
        self._device = backend.device_tensor(more, width, dtype)
        backend.fill_normal(self._device, profile.seed)
        self._host.copy_(self._device)
        columns = min(profile.h2d.columns[sizes.memory].values())
        self._product_rows = self._rows // 2
        self._weight = backend.device_tensor(width, columns, dtype)
        backend.fill_normal(self._weight, profile.seed, width**-0.5)
        self._out = backend.device_tensor(self._product_rows, columns, dtype)
        self._start, self._end, self._between = backend.event(), backend.event(), backend.event()
        backend.synchronize()

    def close(self) -> None:
        self._backend.synchronize()
        self.__dict__.clear()

    def controls(self) -> dict[str, Callable[[], _Result]]:
        return {
            "known answer": self._known_answer,
            "same stream": self._same_stream,
            "dependency": self._dependency,
            "null": self._null,
            "sensitivity": self._sensitivity,
            "race": self._race,
            "bare copy": self._bare_copy,
            "sampler": self._sampler,
        }

    # The arms. Each issues its work between start and end on `main`.

    def _copy(self, rows: int) -> None:
        self._backend.copy(self._device[:rows], self._host[:rows], self._backend.main)

    def _copy_on_side(self, after: Event) -> None:
        backend = self._backend
        backend.wait(backend.side, after)
        backend.copy(self._device[: self._rows], self._host[: self._rows], backend.side)
        backend.record(self._between, backend.side)

    def _spin(self) -> None:
        self._backend.spin(self._sizes.spin_ms, self._backend.main)

    def _beside(self) -> None:
        self._copy_on_side(self._start)
        self._spin()
        self._backend.wait(self._backend.main, self._between)

    def _after_each_other(self) -> None:
        self._spin()
        self._copy(self._rows)

    def _dependent(self) -> None:
        self._spin()
        spun = self._backend.event()
        self._backend.record(spun, self._backend.main)
        self._copy_on_side(spun)
        self._backend.wait(self._backend.main, self._between)

    def _products(self) -> None:
        for _ in range(2):
            self._backend.gemm(self._device[: self._product_rows], [self._weight], self._out)

    def _timed(self, issue: Callable[[], None], *, gated: bool) -> float | None:
        """Device time of one arm, ms; None if the gate leaked."""
        backend = self._backend
        backend.synchronize()
        if gated:
            backend.close_gate()
        backend.record(self._start, backend.main)
        issue()
        backend.record(self._end, backend.main)
        held = True
        if gated:
            held = backend.pending(self._start)
            held = backend.open_gate() and held
        backend.synchronize(self._end)
        return backend.elapsed_ms(self._start, self._end) if held else None

    def _medians(self, rounds: int, *, pause_s: float = 0.0, **arms: Callable[[], None]) -> dict[str, float]:
        """Median time of every arm over `rounds` rounds, the order reversed each round, idle before each sample."""
        times: dict[str, list[float]] = {name: [] for name in arms}
        order = list(arms)
        for name in order:
            self._timed(arms[name], gated=False)  # what loads on first use must not load behind the gate
        void = 0
        for _ in range(rounds):
            order.reverse()
            for name in order:
                time.sleep(pause_s)
                ms = self._timed(arms[name], gated=self._gated)
                if ms is not None:
                    times[name].append(ms)
                void = 0 if ms is not None else void + 1
                if void == MAX_VOID:  # a gate that runs into its limit takes ten seconds
                    raise MeasurementError(f"controls: the gate did not hold in {void} samples in a row")
        return {name: statistics.median(values) for name, values in times.items()}

    # The controls: value, lowest and highest accepted, unit.

    def _copy_and_spin(self, both: Callable[[], None]) -> dict[str, float]:
        """Medians of the copy, the spin and `both`; Skip where this torch cannot compile the spin."""
        if not self._gated:
            raise Skip("no kernels")
        return self._medians(ROUNDS, copy=lambda: self._copy(self._rows), spin=self._spin, both=both)

    def _known_answer(self) -> _Result:
        ms = self._copy_and_spin(self._beside)
        tolerance = self._profile.tolerances.known
        return ms["both"] / max(ms["copy"], ms["spin"]), 1 - tolerance, 1 + tolerance, "of the longer leg"

    def _hidden(self, both: Callable[[], None]) -> _Result:
        ms = self._copy_and_spin(both)
        tolerance = self._profile.tolerances.hidden
        return hidden_fraction(ms["copy"], ms["spin"], ms["both"]), -tolerance, tolerance, "hidden fraction"

    def _same_stream(self) -> _Result:
        return self._hidden(self._after_each_other)

    def _dependency(self) -> _Result:
        return self._hidden(self._dependent)

    def _null(self) -> _Result:
        ms = self._medians(self._sizes.null_rounds, pause_s=PAUSE_S, a=self._products, b=self._products)
        tolerance = self._profile.tolerances.null
        return ms["b"] / ms["a"] - 1, -tolerance, tolerance, "relative difference"

    def _sensitivity(self) -> _Result:
        ms = self._medians(
            2 * ROUNDS, base=lambda: self._copy(self._rows), more=lambda: self._copy(self._more_rows)
        )
        added = self._sizes.more
        tolerance = self._profile.tolerances.sensitivity * added
        return (
            ms["more"] / ms["base"] - 1,
            added - tolerance,
            added + tolerance,
            f"more time for {added:.0%} more bytes",
        )

    def _race(self) -> _Result:
        workload = self._pipeline(chunks=4, size=self._sizes.copy_bytes // 4, leave_out="stream_wait")
        workload.warm_up()
        caught = sum(workload.sample("overlapped").failed is not None for _ in range(RACE_ROUNDS))
        workload.close()
        return caught / RACE_ROUNDS, 0.95, 1.0, "of the rounds caught"

    def _bare_copy(self) -> _Result:
        workload = self._pipeline(chunks=1, size=self._sizes.bare_bytes)
        workload.warm_up()
        source, target = workload.transfer_buffers()
        repeats = workload.plan.repeats
        ours, bare = [], []
        for _ in range(ROUNDS):
            ours.append(workload.sample("transfer").ms)
            ms = self._timed(
                lambda: self._backend.copy(target, source, self._backend.main), gated=self._gated
            )
            if ms is not None:
                bare.append(ms)
        workload.close()
        ratio = statistics.median(bare) * repeats / statistics.median(ours)
        # Faster than the bare copy, beyond the noise, would be as wrong as slower.
        tolerance = max(0.05, self._profile.tolerances.known)
        return ratio, 1 - tolerance, 1 + tolerance, "of the bare copy's rate"

    def _sampler(self) -> _Result:
        """The pipeline with the sampler at work over the pipeline with the sampler stopped, in turns.

        Each turn has a turn of the other kind before and after it: a drift of the clock cancels.
        """
        telemetry = self._telemetry
        if telemetry is None or "telemetry" in telemetry.missing:
            raise Skip("nothing is read")
        workload = self._pipeline(chunks=4, size=self._sizes.bare_bytes)
        workload.warm_up()
        times: dict[bool, list[float]] = {True: [], False: []}
        for block in range(SAMPLER_BLOCKS):
            at_work = block % 4 in (0, 3)
            with contextlib.nullcontext() if at_work else telemetry.paused():
                samples = [workload.sample("overlapped") for _ in range(SAMPLER_BLOCK)]
            times[at_work] += [sample.ms for sample in samples if sample.dropped is None]
        workload.close()
        if not all(times.values()):
            raise MeasurementError("controls: every sample beside the sampler was void")
        cost = statistics.median(times[True]) / statistics.median(times[False]) - 1
        return cost, -SAMPLER_COST, SAMPLER_COST, "more time with the sampler"

    def _pipeline(self, *, chunks: int, size: int, leave_out: str = "") -> H2DWorkload:
        case = Case.of(
            H2D, memory=self._sizes.memory, stream="side", chunks=chunks, size=size, ratio=1.0,
            gate="on" if self._gated else "off", profile=self._profile.key,
        )  # fmt: skip
        # Behind a delay on its own stream the copy is late for certain, however fast it is.
        delay = self._sizes.spin_ms if leave_out and self._gated else 0.0
        return H2DWorkload(case, self._profile, self._backend, leave_out=leave_out, delay_copies_ms=delay)
