"""The parent of the launches: starts a worker for each, keeps the record, outlives whatever kills a worker.

This process imports no torch and opens no device, so no fault in a case can take the record with it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness import machine, metrics, record, torchrun
from harness.case import Case
from harness.child import Child
from harness.devices import Device
from harness.profiles import Profile
from harness.protocol import Begin, CeilingsDone, Closing, ControlDone, Done, Event, Job, Ready, Status
from harness.record import CaseResult, Control, Record

# Workers started for one launch before what is left of it is given up.
MAX_STARTS = 5

Watch = Callable[[Event, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. target: half-width of the headline's interval at which a case is settled, as a fraction; None:
    what the profile says for its family."""

    cases: list[Case]
    profile: Profile
    device: Device
    launches: int
    seconds: float | None
    target: float | None = None
    controls: bool = True

    def target_of(self, family: str) -> float:
        return self.profile.settled_of(family, self.target)


def run(plan: Plan, kept: Record, path: Path, watch: Watch = lambda event, launch: None) -> Record:
    """Measure what `kept` still lacks of `plan`; the record is written to `path` after every case.

    Args:
        watch: called with every event and the launch it is of, once the record holds what the event brought.

    Raises UsageError when the record cannot be written. Whatever happens to a worker ends in a labelled case.
    On KeyboardInterrupt the worker is stopped and the record keeps every finished case.
    """
    return _Run(plan, kept, path, watch).run()


def lacking(plan: Plan, kept: Record, launch: int) -> list[Case]:
    """The cases to measure in this launch: those that `kept` has no samples of from it.

    A case that was skipped has no meaning here, and one that ended in an error stays an error: neither is asked
    again.
    """
    known = {case.key: case for case in kept.cases}
    return [
        case
        for case in plan.cases
        if case.key not in known
        or (
            known[case.key].status not in ("skipped", "error")
            and all(found.index != launch for found in known[case.key].launches)
        )
    ]


def kinds(cases: list[Case]) -> list[list[Case]]:
    """The cases in sets that the same processes can measure: as many of them, started in the same environment."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        found.setdefault((case.ranks, *sorted(environment_of(case).items())), []).append(case)
    return list(found.values())


def no_ranks(case: Case, device: Device) -> str | None:
    """Why no such group of processes can be had here; None if it can. Known before any of them is started."""
    if case.ranks is None:
        return None
    role, backend = torchrun.role(), case.params.get("backend")
    if backend == "nccl" and device.kind == "cpu":
        return "NCCL has no meaning on the cpu backend: it reduces on GPUs"
    if role is not None and role.size != case.ranks:
        return f"is a case of {case.ranks} ranks, and torchrun started {role.size}"
    # Gloo's ranks may share a GPU. NCCL's cannot, and copies that did would share its link and its copy engines.
    if role is None and device.kind == "cuda" and backend != "gloo" and case.ranks > device.count:
        return f"needs {case.ranks} GPUs, one a rank; {device.count} here"
    return None


def environment_of(case: Case) -> dict[str, str]:
    """What the case's processes must be started with: CUDA reads it when it makes a context, and never again."""
    if "connections" not in case.params:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": str(case.number("connections"))}


@dataclass
class _Heard:
    """What one worker said: the cases it finished, the last one it began, and why it ended."""

    ready: bool = False
    finished: set[str] = field(default_factory=set)
    current: str | None = None
    reason: str = ""


class _Run:
    """One `run`: see there."""

    def __init__(self, plan: Plan, kept: Record, path: Path, watch: Watch) -> None:
        self._plan, self._kept, self._path, self._watch = plan, kept, path, watch
        self._began = time.monotonic()
        self._earlier = kept.run.seconds
        # Why a launch of a case was left out, by key. Such a case stands in the record only at the end of the
        # run: before, it is one that a later launch, or the run resumed, may still measure.
        self._left_out: dict[str, str] = {}
        # Controls that failed in this process's launches.
        self._failed: dict[int, list[Control]] = {}

    def run(self) -> Record:
        self._keep()
        try:
            for launch in range(self._plan.launches):
                waiting = lacking(self._plan, self._kept, launch)
                if waiting:
                    self._launch(launch, waiting)
        except KeyboardInterrupt:
            self._keep()  # The interrupt may have come while the last case was being written.
            raise
        self._note_left_out()
        metrics.judge_launches(self._kept, self._plan.target_of)
        metrics.derive_curves(self._kept)
        order = {case.key: place for place, case in enumerate(self._plan.cases)}
        self._kept.cases.sort(key=lambda case: order.get(case.key, len(order)))
        self._kept.run.finished = True
        self._keep()
        return self._kept

    def _keep(self) -> None:
        self._kept.run.seconds = round(self._earlier + self._elapsed(), 3)
        record.write(self._path, self._kept)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _launch(self, launch: int, waiting: list[Case]) -> None:
        """One launch: the cases that the same processes can measure together, kind by kind."""
        here = []
        for case in waiting:
            if reason := no_ranks(case, self._plan.device):
                self._tell(case, launch, "skipped", reason)
            else:
                here.append(case)
        for place, alike in enumerate(kinds(here)):
            self._measure(launch, alike, ceilings=place == 0)

    def _measure(self, launch: int, waiting: list[Case], *, ceilings: bool) -> None:
        """One set of processes, or further ones for the cases left when one ends before its work is done."""
        controls, reason = self._plan.controls, ""
        for _ in range(MAX_STARTS):
            job = self._job(launch, waiting, controls=controls, ceilings=ceilings)
            heard = self._follow(job, launch)
            waiting = [case for case in waiting if case.key not in heard.finished]
            if not waiting:
                return
            # Blame the case it was in. A worker that got to no case will not get further the next time.
            blamed = [case for case in waiting if case.key == heard.current]
            if not blamed and not heard.finished:
                blamed = waiting
            self._blame(blamed, launch, heard.reason)
            waiting = [case for case in waiting if case not in blamed]
            if not waiting:
                return
            controls, ceilings = controls and not heard.ready, ceilings and not heard.ready
            reason = heard.reason
        self._blame(
            waiting,
            launch,
            f"given up: {MAX_STARTS} workers ended early in this launch, the last one: {reason}",
        )

    def _job(self, launch: int, waiting: list[Case], *, controls: bool, ceilings: bool) -> Job:
        plan, seconds = self._plan, None
        if plan.seconds is not None:
            seconds = max(0.0, (plan.seconds - self._elapsed()) / (plan.launches - launch))
        return Job(
            device=plan.device.kind,
            uuid=plan.device.uuid,
            no_telemetry="the cpu backend has no GPU to read"
            if plan.device.kind == "cpu"
            else plan.device.reason,
            profile=plan.profile,
            cases=[case.key for case in waiting],
            launch=launch,
            target=plan.target,
            seconds=seconds,
            controls=controls,
            ceilings=ceilings,
            ranks=waiting[0].ranks,
            environment=environment_of(waiting[0]),
            best_link=machine.best_link(self._kept.machine),
        )

    def _follow(self, job: Job, launch: int) -> _Heard:
        """Start a worker for `job` and take in what it says until it ends."""
        heard = _Heard()
        try:
            child = Child(job)
        except OSError as error:
            heard.reason = f"no worker could be started: {error.strerror}"
            return heard
        with child:
            for event in child.events():
                event = self._judged(event, launch)
                self._take(event, launch, heard)
                self._watch(event, launch)
            heard.reason = child.end()
        return heard

    def _judged(self, event: Event, launch: int) -> Event:
        """The event, and of a case measured after a control of its launch has failed, that it is invalid.

        Controls vouch for what the same processes measure (measurement.md, rule 6): a run resumed later has its own.
        """
        if isinstance(event, ControlDone) and not event.control.passed:
            self._failed.setdefault(launch, []).append(event.control)
        if isinstance(event, Done) and event.status in record.MEASURED and launch in self._failed:
            named = "; ".join(_words(control) for control in self._failed[launch])
            return msgspec.structs.replace(event, status="invalid", reason=f"control failed: {named}")
        return event

    def _take(self, event: Event, launch: int, heard: _Heard) -> None:
        kept = self._kept
        spent = kept.run.spent.setdefault(str(launch), {})
        if isinstance(event, Ready):
            heard.ready = True
            machine.merge(kept.machine, kept.software, event.facts)
            spent |= {"open_s": event.open_s, "launch_canary_us": event.canary_us}
            spent.setdefault("began", round(time.time(), 3))
        elif isinstance(event, CeilingsDone):
            kept.ceilings += event.ceilings
            spent["ceilings_s"] = event.seconds
            machine.merge_link(kept.machine, event.link)
        elif isinstance(event, Closing):
            if event.energy_j is not None:
                spent |= {"energy_j": event.energy_j, "energy_s": event.energy_s}
        elif isinstance(event, ControlDone):
            kept.controls.append(event.control)
            spent["controls_s"] = round(spent.get("controls_s", 0.0) + event.seconds, 3)
        elif isinstance(event, Begin):
            heard.current = event.key
        elif isinstance(event, Done):
            heard.finished.add(event.key)
            self._merge(event, launch)
            self._keep()

    def _blame(self, cases: list[Case], launch: int, reason: str) -> None:
        for case in cases:
            self._tell(case, launch, "error", reason)

    def _tell(self, case: Case, launch: int, status: Status, reason: str) -> None:
        """That a case was not measured, as if a worker had said so."""
        done = Done(key=case.key, status=status, reason=reason, launch=None)
        self._merge(done, launch)
        self._keep()
        self._watch(done, launch)

    def _merge(self, done: Done, launch: int) -> None:
        """Add one launch's outcome to the case; the worst status of its launches is the case's."""
        kept = self._kept
        found = next((known for known in kept.cases if known.key == done.key), None)
        if done.out_of_time or (done.status == "skipped" and found is not None):
            self._left_out[done.key] = done.reason
            return
        reason = done.reason
        if reason and self._plan.launches > 1 and done.status != "skipped":
            reason = f"launch {launch + 1} of {self._plan.launches}: {reason}"
        if found is None:
            found = self._result(done.key, done.status, reason)
        elif _severity(done.status) > _severity(found.status):
            found.status, found.reason = done.status, reason
        if done.launch is not None:
            found.launches.append(done.launch)
            kept.cases[kept.cases.index(found)] = metrics.derive(found)

    def _result(self, key: str, status: str, reason: str) -> CaseResult:
        case = next(case for case in self._plan.cases if case.key == key)
        params: dict[str, str | int | float] = dict(case.params)
        added = CaseResult(key=key, family=case.family.name, params=params, status=status, reason=reason)
        self._kept.cases.append(added)
        return added

    def _note_left_out(self) -> None:
        """Say of every case that lacks a launch why it does."""
        known = {case.key: case for case in self._kept.cases}
        for key, reason in self._left_out.items():
            case = known.get(key)
            if case is None:
                self._result(key, "skipped", reason)
            elif case.measured and len(case.launches) < self._plan.launches:
                share = f"measured in {len(case.launches)} of {self._plan.launches} launches: {reason}"
                case.reason = f"{case.reason}; {share}" if case.reason else share


def _severity(status: str) -> int:
    return record.STATUSES.index(status)


def _words(control: Control) -> str:
    value = "no number" if control.value is None else f"{control.value:.3g}"
    return f"{control.name}: {value}, want {control.low:.3g} to {control.high:.3g}"
