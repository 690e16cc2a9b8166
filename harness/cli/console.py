"""What every command has in common: options, printing, and what an interruption means."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from harness.errors import OverlapError

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

NOTHING_MEASURED, INTERRUPTED = 3, 130

# Columns where nobody says how wide it is, such as a log of CI: room for every column of the tables.
LOG_WIDTH = 132

# What says which cases are measured: of a resumed run its record does, and of a comparison of records they do.
PLANNED = ("suites", "tier", "patterns", "device", "launches")


def common_options(*names: str) -> Callable[[F], F]:
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


def terminal(*, stderr: bool = False) -> "Console":
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


def say(text: str) -> None:
    """Print to stdout, whether or not anybody is left to read it."""
    try:
        click.echo(text)
    except BrokenPipeError:
        _to_nowhere(sys.stdout)


def _to_nowhere(stream: IO[str]) -> None:
    """Let what is written to `stream` vanish, or Python would complain once more at its exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def print_json(value: Any) -> None:
    say(json.dumps(value, indent=1))


def print_block(console: "Console", lines: Iterable[str]) -> None:
    """A title and the lines under it, already as long as there is room for."""
    from rich.text import Text

    title, *rest = lines
    console.print(Text(title, "bold"))
    for line in rest:
        console.print(Text(line), soft_wrap=True)
    console.print()


class Interrupted(OverlapError):
    exit_code = INTERRUPTED


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: the worker is stopped and the record keeps what is finished."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
