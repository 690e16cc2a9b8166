"""One launch: a fresh process that opens the device, runs the controls and measures the cases in turn.

`python -m harness.worker FD` reads a job from stdin and writes events to the file descriptor FD.
"""

import time

STARTED = time.monotonic()  # Before torch is imported, which is most of a worker's start.

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from harness import protocol, validity
from harness.backends import get_backend
from harness.backends.base import Backend
from harness.case import Case
from harness.ceilings import run_ceilings
from harness.controls import run_controls
from harness.errors import OverlapError, Skip
from harness.families import FAMILIES
from harness.group import Alone, Group
from harness.measure import Measured, measure
from harness.protocol import (
    JOBS,
    Begin,
    CeilingsDone,
    Closing,
    ControlDone,
    Done,
    Event,
    Job,
    Progress,
    Ready,
    Status,
)
from harness.record import Discarded, Launch, Rank
from harness.registry import HEADLINE, metrics_of
from harness.sampler import Telemetry, open_sampler
from harness.serving import one_line, serve
from harness.statistics import StopRule
from harness.telemetry import full_uuid, same_uuid
from harness.workloads import build
from harness.workloads.base import Workload

Say = Callable[[Event], None]

# A case whose first look takes this many times `case_seconds` ends before it.
SLOW = 6

# At least this much of a second between two progress events of a case.
PROGRESS_S = 0.25

# Of one case; a library that warns of everything says nothing.
MOST_WARNINGS = 5

# Before the second and third attempt at a case that was spoiled from outside.
WAITS_S = (1.0, 4.0)

# What waiting and measuring again may take in one launch.
PATIENCE_S = 30.0


def run_job(job: Job, say: Say, *, began: float = STARTED, group: Group | None = None) -> None:
    """Measure every case of `job`, saying each event as it happens.

    In a group every rank does so, with a `say` that only rank 0's parent hears. What is known beforehand of one device
    alone, ceilings and controls, is of rank 0's. What goes wrong on one rank in the middle of a case ends its process,
    and with it the job: the others would wait for it.

    began: monotonic seconds from which `job.seconds` counts, the start of this process. What a device that is lost
    raises ends the job; what goes wrong in a case ends only that case.
    """
    group = group or Alone()
    with contextlib.ExitStack() as opened:
        # The sampler first: it inherits this process's affinity and must not wait for the device to open.
        known = _ours(group)
        uuid = job.uuid if group.rank == 0 else None
        telemetry: Telemetry = open_sampler(uuid, job.no_telemetry, **known)
        opened.callback(lambda: telemetry.close())
        backend = get_backend(job.device)
        facts, canary = backend.facts(), backend.canary_us()
        # CUDA numbers the devices otherwise than was expected, or this rank has one of its own.
        if _another(facts.get("uuid"), job.uuid) or (group.rank and facts.get("uuid")):
            telemetry.close()
            telemetry = open_sampler(full_uuid(facts["uuid"]), job.no_telemetry, **known)
        say(Ready(facts=facts, canary_us=round(canary, 3), open_s=round(time.monotonic() - began, 3)))
        ready = time.monotonic()
        if job.ceilings and group.rank == 0:
            found = run_ceilings(backend, job.launch)
            link = validity.loaded_link(validity.summarise(telemetry.since(ready)))
            say(CeilingsDone(ceilings=found, link=link, seconds=round(time.monotonic() - ready, 3)))
        # Those of the cpu backend are about its streams, which ranks on a cpu do not use.
        if job.controls and group.rank == 0 and (job.ranks is None or job.device == "cuda"):
            before = time.monotonic()
            for control in run_controls(backend, job.profile, job.launch, telemetry):
                now = time.monotonic()
                say(ControlDone(control=control, seconds=round(now - before, 3)))
                before = now
        patience = Patience(say, None if job.seconds is None else began + job.seconds)
        for index, key in enumerate(job.cases):
            say(Begin(key=key))
            left = None if job.seconds is None else job.seconds - (time.monotonic() - began)
            left = group.share(left)[0]
            if left is not None and left <= 0:
                reason = "the time budget was used up"
                say(Done(key=key, status="skipped", reason=reason, launch=None, out_of_time=True))
                continue
            case = Case.parse(key, FAMILIES)
            rule = _rule(job, case.family.name, left, len(job.cases) - index)
            say(_run_case(case, job, backend, telemetry, rule, patience, say, group))
        energy_j, energy_s = validity.energy(telemetry.since(ready), {})
        say(Closing(energy_j=energy_j, energy_s=energy_s))
        backend.close()


def _ours(group: Group) -> dict[str, Any]:
    """The processes of the group that are no strangers on this rank's GPU, and how many of them use it."""
    here = group.share((os.getpid(), group.host, group.device))
    mine = [(pid, device) for pid, host, device in here if host == group.host]
    return {
        "own": [pid for pid, _ in mine],
        "contexts": sum(device == group.device for _, device in mine),
    }


def _rule(job: Job, family: str, left: float | None, cases: int) -> StopRule:
    """When sampling a case of that family ends, with `left` seconds for it and those after it, `cases` in all (None: as
    long as it takes)."""
    budget = job.profile.seconds_of(family)
    limit = SLOW * budget
    if left is not None:
        budget, limit = min(budget, left / cases), min(limit, left)
    return StopRule(
        target=job.profile.settled_of(family, job.target),
        quantile=metrics_of(family)[HEADLINE].quantile,
        budget_s=budget,
        limit_s=limit,
    )


def _another(used: str | None, expected: str | None) -> bool:
    # torch may name a MIG slice by its GPU, and a device that nobody named cannot be told from another.
    whole = used is not None and expected is not None and expected.startswith("GPU-")
    return whole and not same_uuid(used, expected)


class Patience:
    """When a case that was spoiled from outside is measured again, within limits of the case and of the launch.

    Whoever shares the GPU may be gone in a second, or stay for the night: then every case is measured once more
    only until PATIENCE_S have gone by, and the rest of the launch is not held up. until: when the launch should end,
    monotonic seconds.
    """

    def __init__(self, say: Say, until: float | None = None) -> None:
        self._say, self._until = say, until
        self._left = PATIENCE_S

    def wait(self, key: str, attempt: int, took: float) -> float | None:
        """Wait before the next attempt, after `attempt` of them, the last of which took so many seconds.

        Gives the seconds waited; None, at once, for no further attempt.
        """
        self._left -= took if attempt > 1 else 0.0
        if attempt > len(WAITS_S) or self._left < WAITS_S[attempt - 1] + took:
            return None
        waited = WAITS_S[attempt - 1]
        if self._until is not None and time.monotonic() + waited + took > self._until:
            return None
        self._left -= waited
        self._say(Progress(key=key, rounds=0))
        time.sleep(waited)
        return waited


def _run_case(
    case: Case,
    job: Job,
    backend: Backend,
    telemetry: Telemetry,
    rule: StopRule,
    patience: Patience,
    say: Say,
    group: Group,
) -> Done:
    """The case measured, again if it was spoiled from outside; what goes wrong in it is told in its status and ends
    only this case."""
    discarded: list[Discarded] = []
    while True:
        began = time.monotonic()
        done, spoiled = _attempt(case, job, backend, telemetry, rule, say, group)
        took = time.monotonic() - began
        waited = patience.wait(case.key, len(discarded) + 1, took) if spoiled and group.rank == 0 else None
        waited = group.share(waited)[0]
        if waited is None or done.launch is None:
            break
        rounds = sum(len(rank.rounds) for rank in done.launch.ranks)
        discarded.append(
            Discarded(reason=done.reason, rounds=rounds, wall_s=round(took, 3), waited_s=round(waited, 3))
        )
    if done.launch is not None:
        done.launch.discarded = discarded
    if discarded and spoiled:
        done.reason += f" (and {len(discarded)} attempts before)"
    return done


def _attempt(
    case: Case, job: Job, backend: Backend, telemetry: Telemetry, rule: StopRule, say: Say, group: Group
) -> tuple[Done, bool]:
    """The case measured once, and whether something outside of it spoiled the samples."""
    began = time.monotonic()
    last = began

    def on_round(rounds: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            say(Progress(key=case.key, rounds=rounds))

    workload = None
    heard: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("default")
            built = _built(case, job, backend, group)
            if isinstance(built, Done):
                return built, False
            workload = built
            telemetry.since(began)  # a look at everything: counters need a reading from before
            found = measure(workload, rule, allocations=backend.allocations, on_round=on_round, group=group)
            facts = workload.facts
    except BrokenPipeError:
        raise  # from `say`: the parent is gone
    except Exception as error:  # torch raises its own kinds: out of memory, a CUDA error
        if group.size > 1:
            raise  # the other ranks are in the middle of the case
        backend.synchronize()  # a device that is lost raises here again, and ends this worker
        return _not_measured(case, error), False
    finally:
        if workload is not None:
            workload.close()
    summary = validity.summarise(telemetry.since(began), found.windows, telemetry.missing)
    summary["labels"] = validity.labels(summary)
    spoiling = validity.verdict(summary, job.best_link, waits=case.family.waits)
    spoilt = group.share((spoiling, summary, group.host))
    spoiled = list(dict.fromkeys(reason for reasons, _, _ in spoilt for reason in reasons))
    status, reason = judge(found, spoiled, rule)
    launch = Launch(
        index=job.launch,
        ranks=[
            Rank(rounds=rounds, telemetry=summary, host=host)
            for rounds, (_, summary, host) in zip(found.by_rank or [[]], spoilt, strict=False)
        ],
        stop=found.stop,
        wall_s=round(time.monotonic() - began, 4),
        timed_s=round(found.timed_s, 4),
        dropped=found.dropped,
        checks={
            **facts,
            **found.checks,
            "sampling_s": round(found.wall_s, 4),
            **({"warnings": said} if (said := _warnings(heard)) else {}),
        },
    )
    return Done(key=case.key, status=status, reason=reason, launch=launch), bool(spoiled) and not found.failed


def _warnings(heard: Sequence[warnings.WarningMessage]) -> list[str]:
    """What torch, or another library, warned of while the case was measured: each once, in one line."""
    lines = dict.fromkeys(protocol.reason(str(each.message)) for each in heard)
    return list(lines)[:MOST_WARNINGS]


def _built(case: Case, job: Job, backend: Backend, group: Group) -> Workload | Done:
    """The workload, if every rank has one; else what the first that has none says of the case."""
    made: Workload | Done
    try:
        made = build(case, job.profile, backend, group)
    except OverlapError as error:
        made = _not_measured(case, error)
    refused = [said for said in group.share(made if isinstance(made, Done) else None) if said is not None]
    if refused and not isinstance(made, Done):
        made.close()
    return refused[0] if refused else made


def _not_measured(case: Case, error: Exception) -> Done:
    status: Status = "skipped" if isinstance(error, Skip) else "error"
    reason = str(error) if isinstance(error, OverlapError) else one_line(error)
    return Done(key=case.key, status=status, reason=reason, launch=None)


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


def main() -> int:
    """Entry of the child process; 0 when every case of the job was told."""
    return serve(lambda asked, say: run_job(JOBS.decode(asked), say))


if __name__ == "__main__":
    sys.exit(main())
