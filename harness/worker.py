"""One launch: a fresh process that opens the device, runs the controls and measures the cases in turn.

`python -m harness.worker FD` reads a job from stdin and writes events to the file descriptor FD.
"""

import time

STARTED = time.monotonic()  # Before torch is imported, which is most of a worker's start.

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from harness import validity
from harness.backends import get_backend
from harness.backends.base import Backend
from harness.case import Case
from harness.controls import run_controls
from harness.errors import OverlapError, Skip
from harness.families import FAMILIES
from harness.measure import Measured, measure
from harness.protocol import (
    JOBS,
    Begin,
    ControlDone,
    Done,
    Event,
    Failed,
    Job,
    Progress,
    Ready,
    Status,
)
from harness.record import Launch, Rank
from harness.sampler import Telemetry, open_sampler
from harness.statistics import StopRule
from harness.workloads import build

Say = Callable[[Event], None]

# A case whose first look takes this many times `case_seconds` ends before it.
SLOW = 6

# At least this much of a second between two progress events of a case.
PROGRESS_S = 0.25

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_job(job: Job, say: Say, *, began: float = STARTED) -> None:
    """Measure every case of `job`, saying each event as it happens.

    began: monotonic seconds from which `job.seconds` counts, the start of this process. What a device that is lost
    raises ends the job; what goes wrong in a case ends only that case.
    """
    # The sampler first: it inherits this process's affinity and must not wait for the device to open.
    with open_sampler(job.uuid, job.no_telemetry) as telemetry:
        backend = get_backend(job.device)
        facts, canary = backend.facts(), backend.canary_us()
        say(Ready(facts=facts, canary_us=round(canary, 3), open_s=round(time.monotonic() - began, 3)))
        if job.controls:
            before = time.monotonic()
            for control in run_controls(backend, job.profile, job.launch):
                now = time.monotonic()
                say(ControlDone(control=control, seconds=round(now - before, 3)))
                before = now
        for index, key in enumerate(job.cases):
            say(Begin(key=key))
            left = None if job.seconds is None else job.seconds - (time.monotonic() - began)
            if left is not None and left <= 0:
                reason = "the time budget was used up"
                say(Done(key=key, status="skipped", reason=reason, launch=None, out_of_time=True))
                continue
            rule = _rule(job, left, len(job.cases) - index)
            say(_run_case(Case.parse(key, FAMILIES), job, backend, telemetry, rule, say))
        backend.close()


def _rule(job: Job, left: float | None, cases: int) -> StopRule:
    """When sampling a case ends, with `left` seconds for it and those after it, `cases` in all (None: no budget)."""
    budget, limit = job.profile.case_seconds, SLOW * job.profile.case_seconds
    if left is not None:
        budget, limit = min(budget, left / cases), min(limit, left)
    return StopRule(target=job.target, budget_s=budget, limit_s=limit)


def _run_case(case: Case, job: Job, backend: Backend, telemetry: Telemetry, rule: StopRule, say: Say) -> Done:
    """The case measured once; what goes wrong in it is told in its status and ends only this case."""
    began = time.monotonic()
    last = began

    def on_round(rounds: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            say(Progress(key=case.key, rounds=rounds))

    workload = None
    try:
        workload = build(case, job.profile, backend)
        found = measure(workload, rule, allocations=backend.allocations, on_round=on_round)
        facts = workload.facts
    except Skip as skip:
        return Done(key=case.key, status="skipped", reason=str(skip), launch=None)
    except OverlapError as error:
        return Done(key=case.key, status="error", reason=str(error), launch=None)
    except BrokenPipeError:
        raise  # from `say`: the parent is gone
    except Exception as error:  # torch raises its own kinds: out of memory, a CUDA error
        backend.synchronize()  # a device that is lost raises here again, and ends this worker
        return Done(key=case.key, status="error", reason=one_line(error), launch=None)
    finally:
        if workload is not None:
            workload.close()
    summary = validity.summarise(telemetry.since(began), found.windows, telemetry.missing)
    status, reason = judge(found, validity.verdict(summary), rule)
    summary["labels"] = validity.labels(summary)
    launch = Launch(
        index=job.launch,
        ranks=[Rank(rounds=found.rounds, telemetry=summary)],
        stop=found.stop,
        wall_s=round(time.monotonic() - began, 4),
        timed_s=round(found.timed_s, 4),
        dropped=found.dropped,
        checks={**facts, **found.checks, "sampling_s": round(found.wall_s, 4)},
    )
    return Done(key=case.key, status=status, reason=reason, launch=launch)


def judge(found: Measured, spoiled: list[str], rule: StopRule) -> tuple[Status, str]:
    """Status and reason of one launch of a case, given what telemetry holds against it."""
    rounds = len(found.rounds)
    if found.failed:
        return "invalid", found.failed
    if spoiled:
        return "invalid", "; ".join(spoiled)
    if found.stop == "settled":
        return "ok", ""
    if rounds < rule.looks[0]:
        return (
            "unsettled",
            f"its time was over after {rounds} rounds, before the first look at {rule.looks[0]}",
        )
    return "unsettled", f"the interval was wider than {rule.target:.1%} of the value after {rounds} rounds"


def one_line(error: BaseException) -> str:
    """The error's kind and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def main() -> int:
    """Entry of the child process; 0 when every case of the job was told."""
    faulthandler.enable()
    _end_with_parent()
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as out:

        def say(event: Event) -> None:
            out.write(msgspec.json.encode(event) + b"\n")

        try:
            run_job(JOBS.decode(sys.stdin.buffer.read()), say)
        except BrokenPipeError:
            return 1  # The parent is gone: there is nobody left to measure for.
        except Exception as error:
            say(Failed(reason=one_line(error)))
            raise
    return 0


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, for one that hangs notices no closed pipe."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
