"""The parent of the launches: starts a worker for each, keeps the record, outlives whatever kills a worker.

This process imports no torch and opens no device, so no fault in a case can take the record with it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import machine, metrics, record
from harness.case import Case
from harness.devices import Device
from harness.profiles import Profile
from harness.protocol import EVENTS, Begin, ControlDone, Done, Event, Failed, Job, Ready
from harness.record import CaseResult, Record

# A worker that says nothing for this long, beyond what its case may take, hangs.
SILENCE_S = 120.0

# From the end of its last event to the end of the process.
END_S = 20.0

# Workers started for one launch before what is left of it is given up.
MAX_STARTS = 5

Watch = Callable[[Event, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. target: half-width of the headline's interval at which a case is settled, as a fraction."""

    cases: list[Case]
    profile: Profile
    device: Device
    launches: int
    seconds: float | None
    target: float
    controls: bool = True


def run(plan: Plan, kept: Record, path: Path, watch: Watch = lambda event, launch: None) -> Record:
    """Measure what `kept` still lacks of `plan`; the record is written to `path` after every case.

    Raises UsageError when the record cannot be written. Whatever happens to a worker ends in a labelled case.
    On KeyboardInterrupt the worker is stopped and the record keeps every finished case.
    """
    began = time.monotonic()
    earlier = kept.run.seconds

    def keep() -> None:
        kept.run.seconds = round(earlier + time.monotonic() - began, 3)
        record.write(path, kept)

    record.write(path, kept)
    for launch in range(plan.launches):
        waiting = _lacking(plan, kept, launch)
        if waiting:
            _launch(plan, kept, launch, waiting, keep, watch, began)
    _condemn(kept)
    metrics.derive_curves(kept)
    kept.run.finished = True
    keep()
    return kept


def _lacking(plan: Plan, kept: Record, launch: int) -> list[Case]:
    """The cases without this launch; a case skipped because it has no meaning here is not asked again."""
    known = {case.key: case for case in kept.cases}
    return [
        case
        for case in plan.cases
        if case.key not in known
        or (
            known[case.key].status != "skipped"
            and all(found.index != launch for found in known[case.key].launches)
        )
    ]


def _launch(
    plan: Plan,
    kept: Record,
    launch: int,
    waiting: list[Case],
    keep: Callable[[], None],
    watch: Watch,
    began: float,
) -> None:
    """One launch: one worker, or further ones for the cases left when a worker dies."""
    controls = plan.controls
    for _ in range(MAX_STARTS):
        job = _job(plan, launch, waiting, controls, time.monotonic() - began)
        current = None
        spent: dict[str, float] = {}
        with _Worker(job) as worker:
            for event in worker.events():
                watch(event, launch)
                if isinstance(event, Ready):
                    controls = False
                    machine.merge(kept.machine, kept.software, event.facts)
                    spent = kept.run.spent.setdefault(str(launch), {})
                    spent |= {"open_s": event.open_s, "launch_canary_us": event.canary_us}
                elif isinstance(event, ControlDone):
                    kept.controls.append(event.control)
                    spent["controls_s"] = round(spent.get("controls_s", 0.0) + event.seconds, 3)
                elif isinstance(event, Begin):
                    current = event.key
                elif isinstance(event, Done):
                    current = None
                    waiting = [case for case in waiting if case.key != event.key]
                    _merge(kept, _case(plan, event.key), launch, event)
                    keep()
            reason = worker.end()
        if not waiting:
            return
        # It ended before its job did. Blame the case it was in and go on with the others; a worker that got to
        # no case at all will not get further the next time.
        blamed = [case for case in waiting if case.key == current] or waiting
        for case in blamed:
            _merge(kept, case, launch, Done(key=case.key, status="error", reason=reason, launch=None))
        waiting = [case for case in waiting if case not in blamed]
        keep()
        if not waiting:
            return
    for case in waiting:
        given_up = f"given up: {MAX_STARTS} workers ended early in this launch, the last one: {reason}"
        _merge(kept, case, launch, Done(key=case.key, status="error", reason=given_up, launch=None))
    keep()


def _job(plan: Plan, launch: int, waiting: list[Case], controls: bool, elapsed: float) -> Job:
    seconds = None
    if plan.seconds is not None:
        seconds = max(0.0, (plan.seconds - elapsed) / (plan.launches - launch))
    return Job(
        device=plan.device.kind,
        uuid=plan.device.uuid,
        no_telemetry=plan.device.reason,
        profile=plan.profile,
        cases=[case.key for case in waiting],
        launch=launch,
        target=plan.target,
        seconds=seconds,
        controls=controls,
    )


def _case(plan: Plan, key: str) -> Case:
    return next(case for case in plan.cases if case.key == key)


def _merge(kept: Record, case: Case, launch: int, done: Done) -> None:
    """Add one launch's outcome to the case; the worst status of its launches is the case's."""
    found = next((known for known in kept.cases if known.key == case.key), None)
    if found is None:
        params: dict[str, str | int | float] = dict(case.params)
        found = CaseResult(
            key=case.key, family=case.family.name, params=params, status=done.status, reason=done.reason
        )
        kept.cases.append(found)
    elif _severity(done.status) > _severity(found.status) or not found.launches:
        prefix = f"launch {launch}: " if launch and done.reason else ""
        found.status, found.reason = done.status, prefix + done.reason
    if done.launch is not None:
        found.launches.append(done.launch)
        index = kept.cases.index(found)
        kept.cases[index] = metrics.derive(found)


def _severity(status: str) -> int:
    return record.STATUSES.index(status)


def _condemn(kept: Record) -> None:
    """A control that failed makes the overlap numbers of its run invalid (measurement.md, rule 6)."""
    failed = [control for control in kept.controls if not control.passed]
    if not failed:
        return
    named = "; ".join(
        f"{control.name}: {control.value:.3g}, want {control.low:.3g} to {control.high:.3g}"
        for control in failed
    )
    for case in kept.cases:
        if case.measured:
            case.status, case.reason = "invalid", f"control failed: {named}"


class _Worker:
    """The child process of one launch, in a process group of its own."""

    def __init__(self, job: Job) -> None:
        ours, theirs = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        environment = {"CUDA_MODULE_LOADING": "EAGER", **os.environ, "PYTHONUNBUFFERED": "1"}
        # The package may be a checkout that is not installed.
        root = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._events = os.fdopen(ours, "rb", buffering=0)
        self._limit = SILENCE_S + job.profile.case_seconds
        self._trouble = ""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(job))
            self._process.stdin.close()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._events.close()
        self._log.close()

    def events(self) -> Iterator[Event]:
        """Events until the child closes its pipe; one that is silent for too long is killed."""
        rest = b""
        while True:
            if not select.select([self._events], [], [], self._limit)[0]:
                self._trouble = f"no sign of life for {self._limit:g} s; ended"
                self._kill()
                return
            data = self._events.read(1 << 20)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = EVENTS.decode(line)
                if isinstance(event, Failed):
                    self._trouble = event.reason
                yield event

    def end(self) -> str:
        """Wait for the child to end and say why it ended: its own words, a signal's name, or its exit code."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._trouble = self._trouble or f"did not end within {END_S:g} s of its last event"
            self._kill()
            code = 0
        if self._trouble:
            return self._trouble
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}{_hint(-code)}"
        if code:
            return f"the worker ended with exit code {code}: {self._last_words()}"
        return "the worker ended before its work was done"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def _kill(self) -> None:
        """End the child's whole group, the sampler included, and reap the child."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _hint(signal_number: int) -> str:
    return " (out of memory, or killed by hand)" if signal_number == signal.SIGKILL else ""
