"""The commands that say what changed: base against head, and over the commits of a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from harness.cli.console import (
    NOTHING_MEASURED,
    PLANNED,
    F,
    Interrupted,
    common_options,
    print_json,
    say,
    terminal,
    terminated_like_interrupted,
)
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.comparison import Comparison


def comparison_options(command: F) -> F:
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


@click.command()
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
@common_options("results", "json")
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
        print_json(timeline.as_json(found))
    else:
        console = terminal()
        console.print(timeline.table(found))
        for line in timeline.lines(found):
            console.print(line, soft_wrap=not console.is_terminal)
    if output is not None:
        history_figure.write(found, output)
        click.echo(f"figure: {output}", err=as_json)
    shown = any(point.value is not None for series in found.series for point in series.points)
    context.exit(0 if shown else NOTHING_MEASURED)


@click.command()
@click.argument("base")
@click.argument("head")
@common_options("results", "json")
@comparison_options
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


@click.command("gate")
@click.argument("base", required=False)
@click.argument("head", required=False)
@common_options("suite", "tier", "case", "device", "profile", "results", "json")
@comparison_options
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
    "--confirm",
    is_flag=True,
    help="Measure again, in as many fresh launches, what trips: it must trip again; and what is inconclusive.",
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
        with terminated_like_interrupted():
            made = trial.run(asked, watch=lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        kept = f"the launches finished are in {asked.results}" if against else "nothing was measured"
        raise Interrupted(f"interrupted: {kept}; a gate is not resumed, begin it again") from None
    _print_comparison(made, as_json=as_json, markdown=markdown)
    context.exit(gate.exit_code(made))


def _refuse_measuring(context: click.Context) -> None:
    """Records are there as they are: an option that says what to measure would change nothing."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in (*PLANNED, "profile", "commit") and given:
            raise UsageError(
                f"{parameter.opts[0]}: says what to measure; it goes with --against, or leave it out"
            )


def _print_comparison(made: "Comparison", *, as_json: bool, markdown: bool) -> None:
    from harness import contest, gate

    if as_json and markdown:
        raise UsageError("--markdown: goes with no --json; choose one")
    if as_json:
        import msgspec

        told = msgspec.to_builtins(made)
        print_json({**told, "exit_code": gate.exit_code(made), "why": gate.why(made)})
        return
    if markdown:
        say(contest.markdown(made))
        return
    console = terminal()
    if made.cases:
        console.print(contest.table(made))
    for line in contest.lines(made):
        console.print(line, soft_wrap=not console.is_terminal)
