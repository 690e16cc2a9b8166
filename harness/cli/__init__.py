"""The command line: the one place that parses arguments, prints and exits.

Exit codes (design): 0 fine, 1 regression, 2 wrong use or unreadable input, 3 nothing measured, 4 some case invalid
or failed, 130 interrupted. Heavy imports wait until a command needs them, so that `overlap --help` is quick.
"""

import io
import sys
from typing import NoReturn

import click

import harness
from harness.cli import judging, measuring, reading
from harness.cli.console import INTERRUPTED, LOG_WIDTH
from harness.errors import OverlapError

__all__ = ["LOG_WIDTH", "cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(harness.__version__, prog_name="overlap")
def cli() -> None:
    """Do host-to-device copies, compute and collectives really run at the same time, how far from the limit,
    why not, and did it get worse?"""


for command in (
    measuring.list_command, measuring.run, reading.show, reading.report, reading.threshold, measuring.doctor,
    measuring.myths, measuring.calibrate, reading.ingest, judging.history, judging.compare, judging.gate_command,
):  # fmt: skip
    cli.add_command(command)


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


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"overlap: {' '.join(text.splitlines())}", err=True)
    sys.exit(code)


def _one_line(error: click.ClickException) -> str:
    """What click has to say about the arguments, and where to read on."""
    text = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = f" {context.info_name}" if context is not None and context.parent is not None else ""
    return f"{text.rstrip('.')}; see overlap{command} --help"
