"""The command line: the one place that parses arguments, prints and exits.

Exit codes (design): 0 fine, 1 regression, 2 wrong use or unreadable input, 3 nothing measured, 4 some case invalid
or failed, 130 interrupted. Heavy imports wait until a command needs them, so that `overlap --help` is quick.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

import harness
from harness.errors import OverlapError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from harness.record import Record

F = TypeVar("F", bound=Callable[..., Any])

NOTHING_MEASURED, SOME_FAILED, INTERRUPTED = 3, 4, 130


def _options(*names: str) -> Callable[[F], F]:
    """The named common options, alike for every command that has them."""
    known = {
        "suite": click.option("--suite", "suites", multiple=True, metavar="S", help="Suite; repeatable. Default: all."),
        "tier": click.option(
            "--tier", type=click.Choice(["quick", "nightly"]), default="quick", show_default=True,
            help="quick answers the question; nightly covers every value of every axis.",
        ),
        "case": click.option(
            "--case", "patterns", multiple=True, metavar="PATTERN",
            help="A whole case key (profile= may be left out), or a glob over the keys of the suites; repeatable.",
        ),
        "device": click.option(
            "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
            help="auto takes CUDA device 0 where there is one.",
        ),
        "profile": click.option(
            "--profile", metavar="NAME|FILE", help="Fixed sizes to use. Default: those of the device's model."
        ),
        "results": click.option(
            "--results", type=click.Path(file_okay=False, path_type=Path), default=Path("results"), show_default=True,
            metavar="DIR", help="The store of records.",
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="Print JSON for programs."),
    }  # fmt: skip

    def decorate(command: F) -> F:
        for name in reversed(names):
            command = known[name](command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(harness.__version__, prog_name="overlap")
def cli() -> None:
    """Do host-to-device copies, compute and collectives really run at the same time, how far from the limit,
    why not, and did it get worse?"""


@cli.command("list")
@_options("suite", "tier", "case", "device", "profile", "json")
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

    cases = all_suites.select(suites, tier, runs.profile_of(profile, devices.detect(device)), patterns)
    if as_json:
        _print_json([{"key": case.key, "family": case.family.name, "params": case.params} for case in cases])
        return
    from harness import tables

    _console().print(tables.list_table(cases))


@cli.command()
@_options("suite", "tier", "case", "device", "profile", "results", "json")
@click.option(
    "--machine", metavar="NAME", help="Kind of machine, the same every night. Default: model and count."
)
@click.option(
    "--launches", type=click.IntRange(min=1), default=1, show_default=True, help="Fresh processes per case."
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
    "--commit", metavar="SHA[+dirty]", help="The commit measured, where there is no git history to ask."
)
@click.option("--no-controls", is_flag=True, help="Leave out the controls; the record then holds none.")
@click.option(
    "--resume", is_flag=False, flag_value="latest", metavar="[RECORD]",
    help="Go on with an unfinished record: the newest under --results, or this one.",
)  # fmt: skip
def run(as_json: bool, resume: str | None, no_controls: bool, **chosen: Any) -> NoReturn:
    """Measure cases and write a record, case by case."""
    from harness import runs, supervise

    options = runs.Options(**chosen, controls=not no_controls, command=_command_line())
    plan, kept, path = runs.resume(options, resume) if resume else runs.prepare(options)
    stream = _console(stderr=True)
    stream.print(
        f"{len(plan.cases)} cases x {plan.launches} on {plan.device.name}, profile {plan.profile.key}"
    )
    with _terminated_like_interrupted(), _progress(stream, plan, kept) as watch:
        try:
            supervise.run(plan, kept, path, watch)
        except KeyboardInterrupt:
            done = f"{len(kept.cases)} of {len(plan.cases)} cases are in {path}"
            raise _Interrupted(f"interrupted: {done}; go on with: overlap run --resume {path}") from None
    if as_json:
        _print_json(_run_summary(kept, path))
    else:
        _show(kept)
        click.echo(f"record: {path}")
    sys.exit(_exit_code(kept))


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@_options("json")
def show(record: Path, as_json: bool) -> None:
    """Show a record as tables."""
    from harness import record as records

    kept = records.read(record)
    if as_json:
        _print_json(_run_summary(kept, record))
    else:
        _show(kept)


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The page to write."
)
@_options("results")
def report(record: Path, output: Path | None, results: Path) -> None:
    """Write a record as one page with figures and print its path."""
    from harness import record as records
    from harness.report import write_report

    kept = records.read(record)
    output = output or results / "reports" / kept.machine.name / f"{record.stem}.html"
    write_report(kept, output)
    click.echo(f"report: {output}")


@cli.command()
@_options("device", "json")
def doctor(device: str, as_json: bool) -> NoReturn:
    """Say what is here, what will be skipped and what will spoil overlap. Reads only; exit code 3 if nothing can
    be measured."""
    from harness import devices
    from harness import doctor as examination

    findings = examination.examine(devices.detect(device))
    if as_json:
        _print_json(
            [{"name": f.name, "level": f.level, "text": f.text, "remedy": f.remedy} for f in findings]
        )
    else:
        from rich.text import Text

        console = _console()
        styles = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}
        for found in findings:
            console.print(
                Text(f"{found.level:4} ", styles[found.level]).append(
                    f"{found.name}: {found.text}", "default"
                )
            )
            if found.remedy:
                console.print(Text(f"     {found.remedy}"))
    sys.exit(0 if examination.healthy(findings) else NOTHING_MEASURED)


@cli.command()
@click.argument("name")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The profile to write."
)
@click.option("--force", is_flag=True, help="Replace a profile that exists.")
@_options("device")
def calibrate(name: str, output: Path | None, force: bool, device: str) -> None:
    """Measure this model of device once and write its profile NAME: the fixed sizes of every later run."""
    from harness import calibration, devices, profiles

    output = output or profiles.FOLDER / f"{name}.json"
    if output.exists() and not force:
        raise UsageError(
            f"calibrate: {output} exists, and its cases carry its hash; give --output or --force"
        )
    written = calibration.calibrate(
        name, devices.detect(device), output, say=lambda text: click.echo(text, err=True)
    )
    click.echo(f"profile {written.key}: {output}")


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), default=Path("asv.conf.json"), show_default=True,
    help="asv's configuration; its folder is the project's repository.",
)  # fmt: skip
@click.option("--append", is_flag=True, help="Pool the samples with those asv has: a further launch.")
@click.option("--accept-dirty", is_flag=True, help="File a record of uncommitted changes under its commit.")
def ingest(record: Path, config: Path, append: bool, accept_dirty: bool) -> None:
    """Hand a record to asv with asv's own commands, and print them."""
    from harness import asv_store

    click.echo(str(asv_store.ingest(record, config=config, append=append, accept_dirty=accept_dirty)))


def main() -> NoReturn:
    """Entry point: a user's mistake is one line on stderr and an exit code, never a traceback."""
    try:
        cli.main(standalone_mode=False)
    except OverlapError as error:
        _fail(str(error), error.exit_code)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away; Python would complain once more at exit.
        with contextlib.suppress(OSError):
            sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        sys.exit(0)
    sys.exit(0)


class _Interrupted(OverlapError):
    exit_code = INTERRUPTED


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"overlap: {text}", err=True)
    sys.exit(code)


def _command_line() -> tuple[str, ...]:
    """The arguments as given, with paths of this machine left out."""
    return tuple("(path)" if "/" in word and not word.startswith("--") else word for word in sys.argv[1:])


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


def _show(kept: "Record") -> None:
    from harness import tables

    console = _console()
    for table in (tables.overlap_table(kept), tables.case_table(kept)):
        if table is not None:
            console.print(table)
    for line in tables.summary_lines(kept):
        console.print(line, markup=False)


def _run_summary(kept: "Record", path: Path) -> dict[str, Any]:
    """What programs need of a record without reading its samples."""
    import msgspec

    counts: dict[str, int] = {}
    for case in kept.cases:
        counts[case.status] = counts.get(case.status, 0) + 1
    return {
        "record": str(path),
        "commit": kept.run.commit,
        "machine": kept.machine.name,
        "exit_code": _exit_code(kept),
        "statuses": counts,
        "controls": [msgspec.to_builtins(control) for control in kept.controls],
        "cases": [
            {
                "key": case.key,
                "status": case.status,
                "reason": case.reason,
                "metrics": msgspec.to_builtins(case.metrics),
                "model": case.model,
            }
            for case in kept.cases
        ],
    }


def _exit_code(kept: "Record") -> int:
    if any(case.status in ("invalid", "error") for case in kept.cases):
        return SOME_FAILED
    return 0 if any(case.measured for case in kept.cases) else NOTHING_MEASURED


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: the worker is stopped and the record keeps what is finished."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(console: "Console", plan: Any, kept: "Record") -> Iterator[Callable[[Any, int], None]]:
    """A live line on a terminal, a line per finished case elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from harness import protocol

    total = len(plan.cases) * plan.launches
    names = _short_names(plan)
    with Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("opening the device", total=total)
        finished = 0

        def watch(event: Any, launch: int) -> None:
            nonlocal finished
            if isinstance(event, protocol.Ready):
                bar.update(task, description="controls")
            elif isinstance(event, protocol.ControlDone) and not event.control.passed:
                console.print(f"control failed: {event.control.name}", style="bold red")
            elif isinstance(event, protocol.Begin):
                bar.update(task, description=names[event.key])
            elif isinstance(event, protocol.Progress):
                bar.update(task, description=f"{names[event.key]}  {event.rounds} rounds")
            elif isinstance(event, protocol.Done):
                finished += 1
                bar.update(task, completed=finished)
                if not console.is_terminal or event.status in ("invalid", "error"):
                    reason = f": {event.reason}" if event.reason else ""
                    console.print(
                        f"[{finished}/{total}] {names[event.key]}: {event.status}{reason}", markup=False
                    )

        yield watch


def _short_names(plan: Any) -> dict[str, str]:
    from harness.labels import short_names

    names = short_names(plan.cases)
    return {case.key: names[case.key] for case in plan.cases}
