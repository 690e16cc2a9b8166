"""From the options of `overlap run` to a plan and the record it fills, with every refusal before the first write."""

from dataclasses import dataclass
from pathlib import Path

from harness import METHOD_VERSION, devices, host, machine, profiles, record, source, suites
from harness.case import Case
from harness.devices import Device
from harness.errors import UsageError
from harness.families import FAMILIES
from harness.plans import plan_h2d, shortage
from harness.record import Record, Run
from harness.supervise import Plan
from harness.telemetry import Nvml

LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asked for; see `overlap run --help`."""

    suites: tuple[str, ...] = ()
    tier: str = "quick"
    patterns: tuple[str, ...] = ()
    device: str = "auto"
    machine: str | None = None
    launches: int = 1
    seconds: float | None = None
    results: Path = Path("results")
    commit: str | None = None
    profile: str | None = None
    target: float | None = None
    controls: bool = True
    command: tuple[str, ...] = ()


def prepare(options: Options) -> tuple[Plan, Record, Path]:
    """The plan, an empty record and its place; UsageError for anything that would fail later, nothing written."""
    device = devices.detect(options.device)
    profile = profile_of(options.profile, device)
    cases = suites.select(options.suites, options.tier, profile, options.patterns)
    named = {pattern for pattern in options.patterns if not set("*?") & set(pattern)}
    _check_cases(cases, profile, device, insist=bool(named))
    name = record.safe_name(options.machine or devices.default_machine_name(device, profile.name))
    commit, dirty = source.commit(None, options.commit)
    run = Run(
        time=record.utc_now(),
        commit=commit,
        dirty=dirty,
        command=list(options.command),
        suites=list(options.suites) or list(suites.SUITES),
        tier=options.tier,
        launches=options.launches,
        planned=[case.key for case in cases],
    )
    kept = Record(
        schema=record.SCHEMA,
        method=METHOD_VERSION,
        run=run,
        machine=machine.identity(device, name),
        software=machine.software(),
        environment=machine.environment(),
    )
    return (
        _plan(options, cases, profile, device, options.launches),
        kept,
        record.record_path(options.results, kept),
    )


def resume(options: Options, which: str) -> tuple[Plan, Record, Path]:
    """The plan and record of an unfinished run: the newest one under `results`, or the one in a file.

    UsageError where it was begun on another commit, device or method: its samples would not be comparable.
    """
    path = _newest_unfinished(options) if which == LATEST else Path(which)
    kept = record.read(path)
    if kept.run.finished:
        raise UsageError(f"resume: {path} is finished; nothing is left to measure")
    device = devices.detect(kept.machine.device)
    commit, _ = source.commit(None, options.commit)
    uuid = kept.machine.gpu.get("uuid")
    for field, theirs, ours in (
        ("commit", kept.run.commit, commit),
        ("method", kept.method, METHOD_VERSION),
        ("GPU", uuid, device.uuid if uuid else None),
    ):
        if theirs != ours:
            raise UsageError(
                f"resume: {path} was begun with {field} {theirs}, this is {ours}; begin a new run"
            )
    cases = [Case.parse(key, FAMILIES) for key in kept.run.planned]
    if not cases:
        raise UsageError(f"resume: {path} names no planned case")
    profile = profile_of(options.profile or cases[0].word("profile"), device)
    return _plan(options, cases, profile, device, kept.run.launches), kept, path


def profile_of(name: str | None, device: Device) -> profiles.Profile:
    """The profile asked for, else the device's own."""
    return profiles.load_profile(name) if name else profiles.profile_for(device.kind, device.name)


def _plan(
    options: Options, cases: list[Case], profile: profiles.Profile, device: Device, launches: int
) -> Plan:
    return Plan(
        cases=cases,
        profile=profile,
        device=device,
        launches=launches,
        seconds=options.seconds,
        target=options.target or profile.settled,
        controls=options.controls,
    )


def _check_cases(cases: list[Case], profile: profiles.Profile, device: Device, *, insist: bool) -> None:
    """Every case must fit its profile; one asked for by name must also fit in memory."""
    for case in cases:
        if case.word("profile") != profile.key:
            raise UsageError(
                f"case: {case.key} is of profile {case.word('profile')}, this run uses {profile.key}"
            )
        plan = plan_h2d(case, profile)
        if insist:
            free_host, free_device = free_memory(device)
            short = shortage(plan, device.kind, free_host=free_host, free_device=free_device)
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
    folder = options.results / "records"
    for path in sorted(folder.glob("*/*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        if options.machine in (None, path.parent.name) and not record.read(path).run.finished:
            return path
    raise UsageError(f"resume: no unfinished record under {folder}; give its path")
