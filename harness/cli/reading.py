"""The commands that show what is in a record, or hand it to asv."""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from harness.cli.console import NOTHING_MEASURED, common_options, print_block, print_json, say, terminal

if TYPE_CHECKING:
    from harness.record import Record

# asv's configuration for history by PyTorch's commits.
TORCH_CONFIG = Path("benchmarks", "asv.torch.conf.json")


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@common_options("json")
def show(record: Path, as_json: bool) -> None:
    """Show a record as tables."""
    from harness import record as records
    from harness import summary

    kept = records.read(record)
    if as_json:
        print_json(summary.of(kept, record))
    else:
        print_record(kept)


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The page to write."
)
@common_options("results")
def report(record: Path, output: Path | None, results: Path) -> None:
    """Write a record as one page with figures and print its path."""
    from harness import record as records
    from harness.report import write_report

    kept = records.read(record)
    output = output or results / "reports" / kept.machine.name / f"{record.stem}.html"
    write_report(kept, output)
    say(f"report: {output}")


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@common_options("json")
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
        print_json(threshold_words.as_json(found, best))
    else:
        console = terminal()
        for lines in threshold_words.blocks(found, best, console.width):
            print_block(console, lines)
    if found.lacking:
        click.echo(f"overlap: threshold: {found.lacking}", err=True)
    context.exit(NOTHING_MEASURED if found.lacking else 0)


@click.command()
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
    say(str(asv_store.ingest(record, config=config, append=append, accept_dirty=accept_dirty)))


def print_record(kept: "Record") -> None:
    from harness import tables

    console = terminal()
    for table in (tables.overlap_table(kept), tables.case_table(kept)):
        if table is not None:
            console.print(table)
    for line in tables.summary_lines(kept):
        console.print(line, soft_wrap=not console.is_terminal)
