"""The commands that measure, or say what there is to measure on."""

import itertools
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from harness.cli.console import (
    NOTHING_MEASURED,
    PLANNED,
    Interrupted,
    common_options,
    print_block,
    print_json,
    say,
    terminal,
    terminated_like_interrupted,
)
from harness.cli.reading import print_record
from harness.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from harness.doctor import Finding
    from harness.runs import Options

# For scripts that go on with the record, such as the Makefile: a file that is to hold its path once it exists.
NOTE = "--note-record"


@click.command("list")
@common_options("suite", "tier", "case", "device", "profile", "json")
def list_command(
    suites: tuple[str, ...],
    tier: str,
    patterns: tuple[str, ...],
    device: str,
    profile: str | None,
    as_json: bool,
) -> None:
    """Show the cases a run would measure, without measuring."""
    from harness import devices, runs
    from harness import suites as all_suites

    found = devices.detect(device)
    cases = all_suites.select(
        suites, tier, runs.profile_of(profile, found), patterns, devices.ranks_of(found)
    )
    if as_json:
        print_json([{"key": case.key, "family": case.family.name, "params": case.params} for case in cases])
        return
    from harness import tables

    terminal().print(tables.list_table(cases))


@click.command()
@common_options("suite", "tier", "case", "device", "profile", "results", "json")
@click.option(
    "--machine", metavar="NAME", help="Kind of machine, the same every night. Default: model and count."
)
@click.option(
    "--launches", type=click.IntRange(1, 1000), default=1, show_default=True, help="Fresh processes per case."
)
@click.option(
    "--budget", "seconds", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Begin no case after this long; sampling is shortened to fit.",
)  # fmt: skip
@click.option(
    "--target", type=click.FloatRange(0.001, 0.2), metavar="FRACTION",
    help="A case is settled when the 95 % interval of overlapped_ms is within this either way. Default: the profile's.",
)  # fmt: skip
@click.option(
    "--commit",
    metavar="SHA[+dirty]",
    help="The commit measured, where there is no git history to ask; else HEAD.",
)
@click.option(
    "--repo", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="The repository whose commit is measured. Default: the one that this program runs from.",
)  # fmt: skip
@click.option("--no-controls", is_flag=True, help="Leave out the controls; the record then holds none.")
@click.option(
    "--resume", is_flag=False, flag_value="latest", metavar="[RECORD]",
    help="Go on with an unfinished record: the newest under --results, or this one.",
)  # fmt: skip
@click.option(NOTE, "note", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
@click.pass_context
def run(
    context: click.Context,
    /,
    as_json: bool,
    resume: str | None,
    no_controls: bool,
    note: Path | None,
    **chosen: Any,
) -> NoReturn:
    """Measure cases and write a record, case by case. Of the ranks that torchrun starts, rank 0 does."""
    from harness import elastic, files, progress, runs, summary, supervise, torchrun
    from harness import record as records

    role = torchrun.role()
    if role is not None:
        torchrun.check(role)
        # Who cannot reach rank 0 says so in one line; torch's own words for it are forty.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if role is not None and role.rank > 0:
        from harness import following

        following.follow(role)
        context.exit(0)
    context.with_resource(elastic.leading(role))
    options = runs.Options(**chosen, controls=not no_controls, command=_command_line())
    if resume:
        _refuse_planned(context)
        plan, kept, path = runs.resume(options, resume)
    else:
        plan, kept, path = runs.prepare(options)
    records.write(path, kept)  # A store that cannot be written is found before anything is said.
    if note is not None:
        files.write_whole(note, os.fsencode(f"{path}\n"), field=NOTE[2:])
    with terminated_like_interrupted(), progress.live(terminal(stderr=True), plan, kept) as watch:
        try:
            supervise.run(plan, kept, path, watch)
        except KeyboardInterrupt:
            done = f"{len(kept.cases)} of {len(plan.cases)} cases are in {path}"
            raise Interrupted(f"interrupted: {done}; go on with: {_go_on(options, path)}") from None
    if as_json:
        print_json(summary.of(kept, path))
    else:
        print_record(kept)
        say(f"record: {path}")
    context.exit(summary.exit_code(kept))


@click.command()
@common_options("device", "json")
@click.option(
    "--measure",
    is_flag=True,
    help="Open the device too: what it reaches alone, and the controls. Half a minute.",
)
@click.pass_context
def doctor(context: click.Context, /, device: str, as_json: bool, measure: bool) -> NoReturn:
    """Say what is here, what will be skipped and what will spoil overlap; exit code 3 if nothing true can be
    measured. Without --measure it only reads, and the device is not opened."""
    from harness import devices
    from harness import doctor as examination

    lacking: list[examination.Finding] = []
    try:
        found_device = devices.detect(device)
    except UsageError as error:  # no such device: what there is says why
        found_device = devices.detect("cpu")
        lacking.append(examination.Finding("device", "fail", str(error)))
    examined: Iterable[examination.Finding] = [*lacking, *examination.examine(found_device)]
    if measure and not lacking:
        from harness import checkup, runs

        profile = runs.profile_of(None, found_device)
        examined = itertools.chain(examined, checkup.measured(found_device, profile))
    findings = []
    console = terminal()
    for found in examined:
        findings.append(found)
        if not as_json:
            _print_finding(console, found)
    if as_json:
        print_json([{"name": f.name, "level": f.level, "text": f.text, "remedy": f.remedy} for f in findings])
    context.exit(0 if examination.healthy(findings) else NOTHING_MEASURED)


@click.command()
@click.argument("names", nargs=-1, metavar="[CLAIM]...")
@click.option("--list", "only_list", is_flag=True, help="Show the claims and the reports behind them.")
@common_options("device", "json")
@click.pass_context
def myths(
    context: click.Context, /, names: tuple[str, ...], device: str, as_json: bool, only_list: bool
) -> NoReturn:
    """Put what people believe of copies and streams to the test on the GPU that is here. Half a minute in all."""
    from harness import devices
    from harness import myths as trials
    from harness.claims import CLAIMS

    chosen, console = trials.choose(names), terminal()
    if only_list:
        claims = [CLAIMS[name] for name in chosen]
        if as_json:
            print_json([trials.described(claim) for claim in claims])
        for claim in claims if not as_json else ():
            print_block(console, trials.listed(claim, console.width))
        context.exit(0)
    trials.check(devices.detect(device))
    trial = trials.Trial(chosen)
    results: list[trials.Result] = []
    for result in trial.results():
        if not as_json:
            if not results and trial.device:
                say(f"{trial.device.device}, torch {trial.device.torch}")
            print_block(console, trials.words(result, console.width))
        results.append(result)
    if as_json:
        print_json(trials.of(trial, results))
    else:
        say(trials.summary(results))
    context.exit(trials.exit_code(results))


@click.command()
@click.argument("name")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The profile to write."
)
@click.option("--force", is_flag=True, help="Replace a profile that exists.")
@common_options("device")
def calibrate(name: str, output: Path | None, force: bool, device: str) -> None:
    """Measure this model of device once and write its profile NAME: the fixed sizes of every later run."""
    from harness import calibration, devices, profiles

    calibration.check_name(name)
    output = output or profiles.FOLDER / f"{name}.json"
    if output.exists() and not force:
        raise UsageError(
            f"calibrate: {output} exists, and its cases carry its hash; give --output or --force"
        )
    written = calibration.calibrate(
        name, devices.detect(device), output, lambda text: click.echo(text, err=True)
    )
    say(f"profile {written.key}: {output}")


def _print_finding(console: "Console", found: "Finding") -> None:
    from rich.text import Text

    styles = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}
    line = Text(f"{found.level:4} ", styles[found.level]).append(f"{found.name}: {found.text}", "default")
    console.print(line)
    if found.remedy:
        console.print(Text(f"     {found.remedy}"))


def _refuse_planned(context: click.Context) -> None:
    """A resumed run measures what its record says: an option that would change nothing is a mistake."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in PLANNED and given:
            raise UsageError(
                f"{parameter.opts[0]}: a resumed run keeps the plan of its record; leave this out, or begin a new run"
            )


def _command_line() -> tuple[str, ...]:
    """The arguments as given, with paths of this machine left out, and what a script added for itself."""
    words: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word.partition("=")[0] == NOTE:
            if word == NOTE:
                next(given)
            continue
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + ("(path)" if os.sep in value else value))
    return tuple(words)


def _go_on(options: "Options", path: Path) -> str:
    """The command that goes on with an interrupted run; what is not in the record is in its options."""
    from harness import torchrun

    words = ["overlap", "run", "--resume", str(path)]
    for name in ("commit", "repo", "profile", "target"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", str(value)]
    words += [] if options.controls else ["--no-controls"]
    # How torchrun was started, and on which hosts, it tells nobody.
    return shlex.join(words) if torchrun.role() is None else f"the same torchrun, and {shlex.join(words[1:])}"
