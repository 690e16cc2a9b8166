"""The command line: the one place that parses arguments, prints and exits.

Exit codes (design): 0 fine, 1 regression, 2 wrong use or unreadable input, 3 nothing measured, 4 some case invalid
or failed, 130 interrupted. Heavy imports wait until a command needs them, so that `overlap --help` is quick.
"""

import contextlib
import io
import itertools
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

import harness
from harness.errors import OverlapError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from harness.comparison import Comparison
    from harness.doctor import Finding
    from harness.record import Record
    from harness.runs import Options

F = TypeVar("F", bound=Callable[..., Any])

NOTHING_MEASURED, INTERRUPTED = 3, 130

# Columns where nobody says how wide it is, such as a log of CI: room for every column of the tables.
LOG_WIDTH = 132

# For scripts that go on with the record, such as the Makefile: a file that is to hold its path once it exists.
NOTE = "--note-record"

# asv's configuration for history by PyTorch's commits.
TORCH_CONFIG = Path("benchmarks", "asv.torch.conf.json")

# What a resumed run has from its record.
_PLANNED = ("suites", "tier", "patterns", "device", "launches")


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


def _comparison_options(command: F) -> F:
    """What compare and gate have in common."""
    for option in (
        click.option(
            "--budgets", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
            help="How much slower counts as a regression, by family. Default: harness/budgets.toml.",
        ),
        click.option(
            "--across", multiple=True, metavar="KEY",
            help="Compare although this hard key differs, such as driver; repeatable.",
        ),
        click.option("--machine", metavar="NAME", help="Only records of this machine."),
    ):  # fmt: skip
        command = option(command)
    return command


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

    found = devices.detect(device)
    cases = all_suites.select(
        suites, tier, runs.profile_of(profile, found), patterns, devices.ranks_of(found)
    )
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
    with _terminated_like_interrupted(), progress.live(_console(stderr=True), plan, kept) as watch:
        try:
            supervise.run(plan, kept, path, watch)
        except KeyboardInterrupt:
            done = f"{len(kept.cases)} of {len(plan.cases)} cases are in {path}"
            raise _Interrupted(f"interrupted: {done}; go on with: {_go_on(options, path)}") from None
    if as_json:
        _print_json(summary.of(kept, path))
    else:
        _show(kept)
        _say(f"record: {path}")
    context.exit(summary.exit_code(kept))


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@_options("json")
def show(record: Path, as_json: bool) -> None:
    """Show a record as tables."""
    from harness import record as records
    from harness import summary

    kept = records.read(record)
    if as_json:
        _print_json(summary.of(kept, record))
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
    _say(f"report: {output}")


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@_options("json")
@click.pass_context
def threshold(context: click.Context, /, record: Path, as_json: bool) -> NoReturn:
    """Show from how many tokens per GPU on a transfer hides, measured and derived, which term is off, and the best
    bucket. Exit code 3 where no cases alike but for tokens have three token counts."""
    from harness import best_bucket, threshold_words
    from harness import record as records
    from harness import threshold as thresholds

    kept = records.read(record)
    found, best = thresholds.find(kept), best_bucket.find(kept)
    if as_json:
        _print_json(threshold_words.as_json(found, best))
    else:
        console = _console()
        for lines in threshold_words.blocks(found, best, console.width):
            _print_block(console, lines)
    if found.lacking:
        click.echo(f"overlap: threshold: {found.lacking}", err=True)
    context.exit(NOTHING_MEASURED if found.lacking else 0)


@cli.command()
@_options("device", "json")
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
    console = _console()
    for found in examined:
        findings.append(found)
        if not as_json:
            _print_finding(console, found)
    if as_json:
        _print_json(
            [{"name": f.name, "level": f.level, "text": f.text, "remedy": f.remedy} for f in findings]
        )
    context.exit(0 if examination.healthy(findings) else NOTHING_MEASURED)


def _print_finding(console: "Console", found: "Finding") -> None:
    from rich.text import Text

    styles = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}
    line = Text(f"{found.level:4} ", styles[found.level]).append(f"{found.name}: {found.text}", "default")
    console.print(line)
    if found.remedy:
        console.print(Text(f"     {found.remedy}"))


@cli.command()
@click.argument("names", nargs=-1, metavar="[CLAIM]...")
@click.option("--list", "only_list", is_flag=True, help="Show the claims and the reports behind them.")
@_options("device", "json")
@click.pass_context
def myths(
    context: click.Context, /, names: tuple[str, ...], device: str, as_json: bool, only_list: bool
) -> NoReturn:
    """Put what people believe of copies and streams to the test on the GPU that is here. Half a minute in all."""
    from harness import devices
    from harness import myths as trials
    from harness.claims import CLAIMS

    chosen, console = trials.choose(names), _console()
    if only_list:
        claims = [CLAIMS[name] for name in chosen]
        if as_json:
            _print_json([trials.described(claim) for claim in claims])
        for claim in claims if not as_json else ():
            _print_block(console, trials.listed(claim, console.width))
        context.exit(0)
    trials.check(devices.detect(device))
    trial = trials.Trial(chosen)
    results: list[trials.Result] = []
    for result in trial.results():
        if not as_json:
            if not results and trial.device:
                _say(f"{trial.device.device}, torch {trial.device.torch}")
            _print_block(console, trials.words(result, console.width))
        results.append(result)
    if as_json:
        _print_json(trials.of(trial, results))
    else:
        _say(trials.summary(results))
    context.exit(trials.exit_code(results))


def _print_block(console: "Console", lines: Iterable[str]) -> None:
    """A title and the lines under it, already as long as there is room for."""
    from rich.text import Text

    title, *rest = lines
    console.print(Text(title, "bold"))
    for line in rest:
        console.print(Text(line), soft_wrap=True)
    console.print()


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

    calibration.check_name(name)
    output = output or profiles.FOLDER / f"{name}.json"
    if output.exists() and not force:
        raise UsageError(
            f"calibrate: {output} exists, and its cases carry its hash; give --output or --force"
        )
    written = calibration.calibrate(
        name, devices.detect(device), output, lambda text: click.echo(text, err=True)
    )
    _say(f"profile {written.key}: {output}")


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), default=Path("asv.conf.json"), show_default=True,
    help="asv's configuration; its folder is the project's repository.",
)  # fmt: skip
@click.option(
    "--append", is_flag=True, help="Pool the samples with those that asv has: a further launch, once."
)
@click.option("--accept-dirty", is_flag=True, help="File a record of uncommitted changes under its commit.")
@click.option(
    "--by", type=click.Choice(["commit", "torch"]), default="commit", show_default=True,
    help=f"torch: under the commit of PyTorch that its torch was built from, with {TORCH_CONFIG}.",
)  # fmt: skip
@click.pass_context
def ingest(
    context: click.Context, /, record: Path, config: Path, append: bool, accept_dirty: bool, by: str
) -> None:
    """Hand a record to asv with asv's own commands, and print them."""
    from harness import asv_store

    if by == "torch" and context.get_parameter_source("config") is ParameterSource.DEFAULT:
        config = TORCH_CONFIG
    _say(str(asv_store.ingest(record, config=config, append=append, accept_dirty=accept_dirty)))


@cli.command()
@click.argument("case")
@click.option("--metric", default="overlapped_ms", show_default=True, help="Any metric of a record.")
@click.option("--machine", metavar="NAME", help="Only this kind of machine. Default: all that have the case.")
@click.option(
    "--repo", type=click.Path(file_okay=False, path_type=Path), default=Path(), metavar="DIR",
    help="The repository that the commits are of. Default: the one this folder is in.",
)  # fmt: skip
@click.option(
    "--by", type=click.Choice(["commit", "torch"]), default="commit", show_default=True,
    help="torch: over the commits that PyTorch was built from; --repo is then a clone of PyTorch.",
)  # fmt: skip
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw it: a .png or .html file.",
)
@_options("results", "json")
@click.pass_context
def history(
    context: click.Context,
    /,
    case: str,
    metric: str,
    machine: str | None,
    repo: Path,
    by: str,
    output: Path | None,
    results: Path,
    as_json: bool,
) -> NoReturn:
    """Show a case over the commits of the store: its steps, gaps and breaks. CASE is a key (profile= may be left out)
    or a glob. Exit code 3 if no record has a number of it."""
    from harness import history as histories
    from harness import timeline

    if output is not None:
        from harness import files, history_figure

        history_figure.check(output)
        files.check_place(output, field="output")
    found = histories.read(results, case, metric=metric, machine=machine, repo=repo, by=by)
    for error in found.broken:
        click.echo(f"overlap: passed over: {error}", err=True)
    if not found.records:
        click.echo(
            f"overlap: history: no readable record under {results / 'records' / (machine or '')}", err=True
        )
        context.exit(NOTHING_MEASURED)
    if as_json:
        _print_json(timeline.as_json(found))
    else:
        console = _console()
        console.print(timeline.table(found))
        for line in timeline.lines(found):
            console.print(line, soft_wrap=not console.is_terminal)
    if output is not None:
        history_figure.write(found, output)
        click.echo(f"figure: {output}", err=as_json)
    shown = any(point.value is not None for series in found.series for point in series.points)
    context.exit(0 if shown else NOTHING_MEASURED)


@cli.command()
@click.argument("base")
@click.argument("head")
@_options("results", "json")
@_comparison_options
@click.option("--markdown", is_flag=True, help="Print Markdown, for a comment on a pull request.")
@click.option("--exit-code", "with_code", is_flag=True, help="Exit as `overlap gate` does.")
@click.pass_context
def compare(
    context: click.Context,
    /,
    base: str,
    head: str,
    results: Path,
    machine: str | None,
    across: tuple[str, ...],
    budgets: Path | None,
    as_json: bool,
    markdown: bool,
    with_code: bool,
) -> NoReturn:
    """Compare HEAD with BASE, case by case: what changed, by how much, in which leg, and what could not be seen.

    BASE, HEAD: a record, a folder of records, or a commit of which the store has some."""
    from harness import budgets as budget_files
    from harness import gate, sides, trial

    known = budget_files.load(budgets)
    one, other = (sides.load(asked, results, machine) for asked in (base, head))
    made = trial.judge(one, other, known, results, across=across)
    _print_comparison(made, as_json=as_json, markdown=markdown)
    context.exit(gate.exit_code(made) if with_code else 0)


@cli.command("gate")
@click.argument("base", required=False)
@click.argument("head", required=False)
@_options("suite", "tier", "case", "device", "profile", "results", "json")
@_comparison_options
@click.option("--markdown", is_flag=True, help="Print Markdown, for a comment on a pull request.")
@click.option(
    "--against", metavar="REV|DIR",
    help="Measure this tree against that revision, or the code in that folder, in turns on this machine.",
)  # fmt: skip
@click.option(
    "--launches",
    type=click.IntRange(min=3),
    default=3,
    show_default=True,
    help="Fresh processes of each side.",
)
@click.option(
    "--confirm", is_flag=True, help="Measure what trips again, in as many fresh launches: it must trip again."
)
@click.option(
    "--commit", metavar="SHA[+dirty]", help="The commit of this tree, where there is no git history to ask."
)
@click.pass_context
def gate_command(
    context: click.Context,
    /,
    base: str | None,
    head: str | None,
    against: str | None,
    confirm: bool,
    as_json: bool,
    markdown: bool,
    **chosen: Any,
) -> NoReturn:
    """Exit 1 where a budgeted case of HEAD is slower than BASE, 3 where one was not seen, 0 where all are fine.

    BASE, HEAD: as for `overlap compare`. With --against both sides are measured now, and none is given."""
    from harness import gate, trial

    if against is None:
        _refuse_measuring(context)
    asked = trial.Asked(base=base, head=head, against=against, confirm=confirm, **chosen)
    try:
        with _terminated_like_interrupted():
            made = trial.run(asked, watch=lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        kept = f"the launches finished are in {asked.results}" if against else "nothing was measured"
        raise _Interrupted(f"interrupted: {kept}; a gate is not resumed, begin it again") from None
    _print_comparison(made, as_json=as_json, markdown=markdown)
    context.exit(gate.exit_code(made))


def _refuse_measuring(context: click.Context) -> None:
    """Records are there as they are: an option that says what to measure would change nothing."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in (*_PLANNED, "profile", "commit") and given:
            raise UsageError(
                f"{parameter.opts[0]}: says what to measure; it goes with --against, or leave it out"
            )


def _print_comparison(made: "Comparison", *, as_json: bool, markdown: bool) -> None:
    from harness import contest, gate

    if as_json:
        import msgspec

        told = msgspec.to_builtins(made)
        _print_json({**told, "exit_code": gate.exit_code(made), "why": gate.why(made)})
        return
    if markdown:
        _say(contest.markdown(made))
        return
    console = _console()
    if made.cases:
        console.print(contest.table(made))
    for line in contest.lines(made):
        console.print(line, soft_wrap=not console.is_terminal)


def main() -> NoReturn:
    """Entry point: a user's mistake is one line on stderr and an exit code, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a pipe that cannot show every character
            stream.reconfigure(errors="replace")
    try:
        sys.exit(cli.main(standalone_mode=False))
    except OverlapError as error:
        _fail(str(error), error.exit_code)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # since click 8.2
            error.show()
            sys.exit(error.exit_code)
        _fail(_one_line(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", INTERRUPTED)


class _Interrupted(OverlapError):
    exit_code = INTERRUPTED


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"overlap: {' '.join(text.splitlines())}", err=True)
    sys.exit(code)


def _one_line(error: click.ClickException) -> str:
    """What click has to say about the arguments, and where to read on."""
    text = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = f" {context.info_name}" if context is not None and context.parent is not None else ""
    return f"{text.rstrip('.')}; see overlap{command} --help"


def _refuse_planned(context: click.Context) -> None:
    """A resumed run measures what its record says: an option that would change nothing is a mistake."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in _PLANNED and given:
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
    words = ["overlap", "run", "--resume", str(path)]
    for name in ("commit", "repo", "profile", "target"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words if options.controls else [*words, "--no-controls"])


def _console(*, stderr: bool = False) -> "Console":
    """A console that shows text as it is, never as markup."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """A reader that went away ends nothing: a run goes on without being watched."""
            self.quiet = True
            _to_nowhere(sys.stderr if stderr else sys.stdout)

    made = Patient(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = LOG_WIDTH
    return made


def _say(text: str) -> None:
    """Print to stdout, whether or not anybody is left to read it."""
    try:
        click.echo(text)
    except BrokenPipeError:
        _to_nowhere(sys.stdout)


def _to_nowhere(stream: IO[str]) -> None:
    """Let what is written to `stream` vanish, or Python would complain once more at its exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _print_json(value: Any) -> None:
    _say(json.dumps(value, indent=1))


def _show(kept: "Record") -> None:
    from harness import tables

    console = _console()
    for table in (tables.overlap_table(kept), tables.case_table(kept)):
        if table is not None:
            console.print(table)
    for line in tables.summary_lines(kept):
        console.print(line, soft_wrap=not console.is_terminal)


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
