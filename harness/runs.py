"""From the options of `overlap run` to a plan and the record it fills, with every refusal before the first write.

A process has one run at a time, and holds its record: no other process goes on with it meanwhile.
"""

import contextlib
import datetime
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import METHOD_VERSION, devices, files, host, machine, profiles, record, source, suites, torchrun
from harness.case import Case
from harness.comparable import comparable
from harness.devices import Device
from harness.errors import RecordError, UsageError
from harness.families import FAMILIES, H2D
from harness.plans import plan_h2d, shortage
from harness.record import Record, Run
from harness.supervise import Plan
from harness.telemetry import Nvml, same_uuid

LATEST = "latest"

# A record written later than now is of a time before the clock was set back, if by more than clocks of one store
# differ.
CLOCKS_DIFFER_S = 60.0

_held = contextlib.ExitStack()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asked for; see `overlap run --help`. repo: None is the checkout that this program runs from."""

    suites: tuple[str, ...] = ()
    tier: str = "quick"
    patterns: tuple[str, ...] = ()
    device: str = "auto"
    machine: str | None = None
    launches: int = 1
    seconds: float | None = None
    results: Path = Path("results")
    commit: str | None = None
    repo: Path | None = None
    profile: str | None = None
    target: float | None = None
    controls: bool = True
    command: tuple[str, ...] = ()


def prepare(options: Options) -> tuple[Plan, Record, Path]:
    """The plan, an empty record, and its place, where it is written; UsageError, and nothing is, for anything that
    would fail later."""
    plan, kept = planned(options)
    return plan, kept, begin(options.results, kept)


def planned(options: Options) -> tuple[Plan, Record]:
    """As `prepare`, for who only looks or is to choose among the cases: nothing is written, nothing has begun."""
    device = devices.detect(options.device)
    profile = profile_of(options.profile, device)
    ranks = devices.ranks_of(device)
    cases = suites.select(options.suites, options.tier, profile, options.patterns, ranks)
    whole = [pattern for pattern in options.patterns if not set("*?") & set(pattern)]
    named = suites.select(options.suites, options.tier, profile, whole, ranks) if whole else []
    _check_cases(cases, profile, device, named)
    default = devices.default_machine_name(device, profile.name)
    name = record.safe_name(default if options.machine is None else options.machine)
    commit, dirty = source.commit(options.repo, options.commit, results=options.results)
    run = Run(
        time=record.utc_now(),
        commit=commit,
        dirty=dirty,
        command=list(options.command),
        suites=list(options.suites) or list(dict.fromkeys(case.family.name for case in cases)),
        tier=options.tier,
        launches=options.launches,
        planned=[case.key for case in cases],
    )
    kept = _empty(run, device, name)
    return _plan(options, cases, profile, device, options.launches), kept


def begin(results: Path, kept: Record) -> Path:
    """Write the record where no other is. It is named by the second it was begun in, and of several of one second,
    or where the clock was set back, by the next one that is free."""
    while True:
        path = record.record_path(results, kept)
        if _hold(path) and files.write_new(path, record.dumps(kept), field="results"):
            return path
        later = datetime.datetime.fromisoformat(kept.run.time) + datetime.timedelta(seconds=1)
        kept.run.time = later.isoformat().replace("+00:00", "Z")


def _hold(path: Path) -> bool:
    """Whether this process now has the record, and no other."""
    _held.close()
    hold = files.hold(path)
    if hold is not None:
        _held.enter_context(hold)
    return hold is not None


def resume(options: Options, which: str) -> tuple[Plan, Record, Path]:
    """The plan and record of an unfinished run: the newest one under `results`, or the one in a file.

    Cases that ended in an error are taken out, to be measured anew. UsageError where the run was begun on another
    commit, machine, software or method: the samples would not be comparable. Where neither git nor the options
    name a commit, the record's is taken.
    """
    if options.machine is not None:
        record.safe_name(options.machine)
    path = _newest_unfinished(options) if which == LATEST else Path(which)
    if not _hold(path):
        raise UsageError(f"resume: another process is measuring {path}; wait until it has ended")
    kept = record.read(path)
    if kept.run.finished:
        raise UsageError(f"resume: {path} is finished; begin a new run")
    device = devices.detect(kept.machine.device)
    # This run's results lie where the record does, whatever --results says.
    commit, dirty = source.commit(options.repo, options.commit, results=_store_of(path, options.results))
    if options.commit is None and commit == "none":
        commit, dirty = kept.run.commit, kept.run.dirty
    _check_same("commit", path, _commit_words(kept.run.commit, kept.run.dirty), _commit_words(commit, dirty))
    uuid = kept.machine.gpu.get("uuid")
    if not same_uuid(uuid, device.uuid):
        _check_same("GPU", path, str(uuid or "of no known UUID"), str(device.uuid or "of no known UUID"))
    hard, _ = comparable(kept, _empty(kept.run, device, kept.machine.name))
    for difference in hard:
        _check_same(difference.key.rpartition(".")[2], path, str(difference.a), str(difference.b))
    cases = [Case.parse(key, FAMILIES) for key in kept.run.planned]
    if not cases:
        raise UsageError(f"resume: {path} names no planned case")
    role = torchrun.role()
    for case in cases:
        if role is not None and case.ranks not in (None, role.size):
            raise UsageError(f"resume: {path} has cases of {case.ranks} ranks, torchrun started {role.size}")
    profile = _profile_of_key(options.profile, cases[0].word("profile"))
    _check_cases(cases, profile, device, ())
    kept.cases = [case for case in kept.cases if case.status != "error"]
    return _plan(options, cases, profile, device, kept.run.launches), kept, path


def _check_same(field: str, path: Path, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise UsageError(f"resume: {path} was begun with {field} {theirs}, this is {ours}; begin a new run")


def _store_of(path: Path, results: Path) -> Path:
    """The store that a record lies in; `results` for one that was moved out of its store."""
    folder = path.resolve().parent.parent
    return folder.parent if folder.name == "records" else results


def _commit_words(commit: str, dirty: bool | None) -> str:
    return f"{commit}+dirty" if dirty else commit


def _profile_of_key(given: str | None, key: str) -> profiles.Profile:
    """The profile given, else the packaged one of that key."""
    if given:
        return profiles.load_profile(given)
    try:
        return profiles.load_profile(key)
    except UsageError:
        raise UsageError(
            f"resume: its profile {key} is none of this program's; give its file with --profile"
        ) from None


def _empty(run: Run, device: Device, name: str) -> Record:
    return Record(
        schema=record.SCHEMA,
        method=METHOD_VERSION,
        run=run,
        machine=machine.identity(device, name),
        software=machine.software(),
        environment=machine.environment(),
    )


def profile_of(name: str | None, device: Device) -> profiles.Profile:
    """The profile asked for, else the device's own; UsageError for one of another kind of device."""
    if not name:
        return profiles.profile_for(device.kind, device.name)
    asked = profiles.load_profile(name)
    if asked.on_cpu != (device.kind == "cpu"):
        kind, other = ("the cpu backend", "a GPU") if asked.on_cpu else ("GPUs", "the cpu backend")
        raise UsageError(
            f"profile: {asked.name} has sizes for {kind}, and this is {other}; choose one for it"
        )
    return asked


def _plan(
    options: Options, cases: list[Case], profile: profiles.Profile, device: Device, launches: int
) -> Plan:
    for name, given in (("budget", options.seconds), ("target", options.target)):
        # What is no number lies in no range, and outside of none.
        if given is not None and not (math.isfinite(given) and given > 0):
            raise UsageError(f"{name}: got {given:g}, want a finite number above 0")
    return Plan(
        cases=cases,
        profile=profile,
        device=device,
        launches=launches,
        seconds=options.seconds,
        target=options.target,
        controls=options.controls,
    )


def _check_cases(cases: list[Case], profile: profiles.Profile, device: Device, named: Iterable[Case]) -> None:
    """Every case must fit its profile; those in `named`, asked for one by one, must fit in memory too."""
    for case in cases:
        if case.word("profile") != (used := profile.key_of(case.family.name)):
            raise UsageError(f"case: {case.key} is of profile {case.word('profile')}, this run uses {used}")
        if case.family is H2D:
            plan_h2d(case, profile)
    free: tuple[int | None, int | None] | None = None
    for case in (case for case in named if case.family is H2D):
        free = free or free_memory(device)
        short = shortage(plan_h2d(case, profile), device.kind, free_host=free[0], free_device=free[1])
        if short is not None:
            raise UsageError(f"h2d: size: {short}; choose a smaller size than in {case.key}")


def free_memory(device: Device) -> tuple[int | None, int | None]:
    """Free (host, device) bytes without opening the device; None where nobody says."""
    if device.uuid is None:
        return host.free_bytes(), None
    with Nvml() as nvml:
        found = nvml.device(device.uuid)
        total = found.read("memory_bytes").value if found else None
        used = found.read("memory_used_bytes").value if found else None
    return host.free_bytes(), None if total is None or used is None else int(total) - int(used)


def _newest_unfinished(options: Options) -> Path:
    """The unfinished record that was last written, of those that no other process is measuring."""
    folder = options.results / "records"
    others = ""
    for path in sorted(folder.glob("*/*.json"), key=_written, reverse=True):
        if options.machine not in (None, path.parent.name):
            continue
        try:
            if record.read(path).run.finished:
                continue
        except RecordError as error:
            others = f" that can be read ({error})"
            continue
        if _hold(path):
            return path
        others = f" but {path}, which another process is measuring"
    raise UsageError(
        f"resume: no unfinished record under {folder}{others}; give the path of one, or begin a new run"
    )


def _written(path: Path) -> tuple[bool, float]:
    """A key by which the record last written is the largest; one of the future is older than all others."""
    try:
        written = path.stat().st_mtime
    except OSError:  # gone meanwhile, or a link to nowhere: who reads it is told
        return False, 0.0
    return written <= time.time() + CLOCKS_DIFFER_S, written
