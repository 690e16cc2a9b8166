"""Tables and lines for a terminal. Pure rendering: the command line prints what these return.

The text of a record is shown as it is, never read as markup. A table without room gives up its least needed
columns, and says which.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from harness import exposure, feeding, feeding_words, findings
from harness.case import Case
from harness.families import grouped
from harness.labels import NONE, clean, count, number, ratio, short_names, with_spread
from harness.record import CaseResult, Record
from harness.views import MEMORIES, STREAMS, Grid, metric, overlap_grid, remarks, value

STYLES = {"ok": "green", "unsettled": "yellow", "skipped": "dim", "invalid": "bold red", "error": "bold red"}

# A lone case has all its axes in its name; a longer one stands in the title.
LONE_WIDTH = 40

# As rich's SIMPLE_HEAD.
ASCII_HEAD = box.Box("\n".join(["    ", "    ", " -- ", *["    "] * 5]), ascii=True)


@dataclass(frozen=True)
class Column:
    """One column that is never wrapped or cut. Where there is no room the highest `spare` goes first; 0 stays.

    last: it goes only where the names of the cases, in two lines each, still leave no room.
    """

    title: str
    cells: Sequence[str]
    spare: int = 0
    styles: Sequence[str] = ()
    last: bool = False

    @property
    def width(self) -> int:
        return max(map(cell_len, [*self.title.split("\n"), *self.cells]))


@dataclass(frozen=True)
class FittedTable:
    """A table with as many columns as there is room for; only the case may wrap, at `label_width`."""

    title: str
    labels: Sequence[str]
    label_width: int
    columns: Sequence[Column]
    notes: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [
            replace(column, cells=[plain(cell, options) for cell in column.cells]) for column in self.columns
        ]
        kept, dropped, room = self._fit(columns, options.max_width)
        table = bare(options)
        table.add_column("case", min_width=min(self.label_width, room))
        for column in kept:
            table.add_column(column.title, justify="left" if column.styles else "right", no_wrap=True)
        for at, label in enumerate(self.labels):
            cells = (Text(column.cells[at], column.styles[at] if column.styles else "") for column in kept)
            table.add_row(Text(label), *cells)
        yield Text(self.title, "bold")
        yield table
        if dropped:
            listed = ", ".join(" ".join(column.title.split()) for column in dropped)
            yield Text(f"No room here for: {listed}. A wider terminal, the report and --json have them.")
        yield from (Text(plain(note, options)) for note in self.notes)

    def _fit(self, columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column], int]:
        """The columns kept, those dropped, and the room left for the names of the cases."""
        longest_word = max((cell_len(word) for label in self.labels for word in label.split()), default=0)
        two_lines = max(longest_word, -(-self.label_width // 2))
        kept = list(columns)
        for wanted, last in ((self.label_width, False), (two_lines, True)):
            for column in sorted(columns, key=lambda column: -column.spare):
                if column.spare and column.last == last and _room(kept, width) < wanted:
                    kept.remove(column)
        dropped = [column for column in columns if column not in kept]
        return kept, dropped, max(longest_word, _room(kept, width))


def _room(columns: Sequence[Column], width: int) -> int:
    return width - sum(column.width + 1 for column in columns)


def bare(options: ConsoleOptions) -> Table:
    """A table of bare columns under one line, one space apart."""
    lines = ASCII_HEAD if options.ascii_only else box.SIMPLE_HEAD
    return Table(box=lines, padding=(0, 0), show_edge=False)


def plain(text: str, options: ConsoleOptions) -> str:
    return text.replace("±", "+-") if options.ascii_only else text


def case_table(record: Record) -> RenderableType:
    """Every case of the record, family by family: arms in ms, what is hidden, ratios, status; the reasons stand
    below."""
    families: dict[str, list[CaseResult]] = {}
    for case in record.cases:
        families.setdefault(clean(case.family), []).append(case)
    if not families:
        return Text("This record holds no case.")
    tables = [
        _family_table(cases, "" if len(families) == 1 else f"{name}: ", _notes(record, name))
        for name, cases in families.items()
    ]
    return tables[0] if len(tables) == 1 else Group(*tables)


def _notes(record: Record, family: str) -> list[str]:
    """What stands below the table of a family."""
    told = feeding_words.notes(record) if family == "feed" else []
    return [*told, *exposure.options(record, family)]


def _family_table(cases: Sequence[CaseResult], title: str, notes: Iterable[str]) -> FittedTable:
    names = short_names(cases)
    widths = [max(map(len, column)) for column in zip(*names.fields.values(), strict=False)]
    remarked = _footnotes(cases)
    family = cases[0].family
    columns = (
        *(_loader(cases) if family == "feed" else _legs(cases)),
        Column(
            "\nstatus",
            [_status(case, remarked) for case in cases],
            styles=[STYLES.get(case.status, "") for case in cases],
        ),
    )
    said = f"{title}{count(len(cases), 'case')}" + (f", all {names.common}" if names.common else "")
    labels = [label(names.fields[case.key], widths, names.rest[case.key]) for case in cases]
    wide = sum(widths) + max(0, len(widths) - 1)
    if len(cases) == 1 and wide > LONE_WIDTH:  # its name would take the room of its numbers
        (case,) = cases
        said = f"{title}1 case: {', '.join(filter(None, (names[case.key], names.common)))}"
        labels, wide = [clean(case.family)], len(clean(case.family))
    return FittedTable(
        title=said,
        labels=labels,
        label_width=wide,
        columns=columns,
        notes=[
            *(f"[{at}] {text} ({count(times, 'case')})" for text, (at, times) in remarked.items()),
            *notes,
        ],
    )


def _legs(cases: Sequence[CaseResult]) -> tuple[Column, ...]:
    """Columns of bytes moved beside compute."""
    hidden = (
        (
            Column("exposed\nfraction", _ratios(cases, "exposed_fraction"), spare=1, last=True),
            _numbers("tail\nms", cases, "tail_ms", spare=2),
            _numbers("dilation\nms", cases, "dilation_ms", spare=2),
            _numbers("waiting\nms", cases, "waiting_ms", spare=5),
            Column("over\nnative", _ratios(cases, "over_native"), spare=6),
        )
        if grouped(cases[0].family)
        else (Column("hidden\nfraction", _ratios(cases, "hidden_fraction"), spare=1, last=True),)
    )
    return (
        _numbers("transfer\nms", cases, "transfer_ms", spare=2),
        _numbers("compute\nms", cases, "compute_ms", spare=1),
        _numbers("serial\nms", cases, "serial_ms", spare=3),
        Column("overlapped\nms", [with_spread(metric(case, "overlapped_ms")) for case in cases]),
        *hidden,
        Column("over\nbound", _ratios(cases, "bound_ratio"), spare=2, last=True),
        Column("over\nmodel", _ratios(cases, "model_ratio"), spare=4),
    )


def _loader(cases: Sequence[CaseResult]) -> tuple[Column, ...]:
    """Columns of a loader beside a step, of means."""
    told = [feeding.Feed.of(case) for case in cases]
    return (
        _numbers("loader\nms", cases, "transfer_ms", spare=3),
        _numbers("cached\nstep ms", cases, "compute_ms", spare=2),
        Column("real step\nms", [with_spread(metric(case, "overlapped_ms")) for case in cases]),
        Column("over\ncached", _ratios(cases, "overlapped_over_compute"), spare=2, last=True),
        _numbers("device\nidle ms", cases, "gap_ms", spare=2),
        _numbers("in next()\nms", cases, "next_ms", spare=4),
        Column(
            "\nverdict",
            [feed.verdict if feed else NONE for feed in told],
            spare=1,
            last=True,
            styles=[""] * len(told),
        ),
    )


def label(fields: Sequence[str], widths: Sequence[int], rest: str) -> str:
    """The short name of a case, its words in columns of these widths."""
    padded = [field.ljust(width) for field, width in zip(fields, widths, strict=False)]
    return " ".join([*padded, rest]).rstrip()


def _numbers(title: str, cases: Sequence[CaseResult], name: str, spare: int) -> Column:
    return Column(title, [number(value(case, name)) for case in cases], spare)


def _ratios(cases: Sequence[CaseResult], name: str) -> list[str]:
    return [ratio(value(case, name)) for case in cases]


def _footnotes(cases: Iterable[CaseResult]) -> dict[str, tuple[int, int]]:
    """The text of each remark, with its number and how many cases have it."""
    numbered: dict[str, tuple[int, int]] = {}
    for case in cases:
        for remark in remarks(case):
            at, times = numbered.get(remark.text, (len(numbered) + 1, 0))
            numbered[remark.text] = (at, times + 1)
    return numbered


def _status(case: CaseResult, notes: Mapping[str, tuple[int, int]]) -> str:
    numbers = ",".join(str(notes[remark.text][0]) for remark in remarks(case))
    return f"{case.status} [{numbers}]" if numbers else case.status


def overlap_table(record: Record) -> RenderableType | None:
    """The 2x2 table, memory by stream, ungated; None where the record has no case for it."""
    grid = overlap_grid(record)
    return None if grid is None else OverlapTable(grid)


@dataclass(frozen=True)
class OverlapTable:
    """What each kind of memory and stream hides, what it blocks, and its price over pinned + side."""

    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = bare(options)
        table.padding = (0, 2, 0, 0)
        for title in ("", "", *(f"{stream} stream" for stream in STREAMS)):
            table.add_column(title)
        for memory in MEMORIES:
            facts = [dict(self.grid.facts(memory, stream)) for stream in STREAMS]
            names = list(dict.fromkeys(name for cell in facts for name in cell if name)) or [""]
            for at, name in enumerate(names):
                # What has no name is all that its cell shows: it stands on the first line, whatever that is.
                cells = (cell.get(name, cell.get("", "") if at == 0 else "") for cell in facts)
                head = Text(memory if at == 0 else "", "bold")
                table.add_row(head, Text(name), *(Text(plain(cell, options)) for cell in cells))
            table.add_row()
        yield Text(f"Does the copy hide behind the compute? ({self.grid.where})", "bold")
        yield table


def list_table(cases: Iterable[Case]) -> RenderableType:
    """The cases a run would measure, family by family, one column per axis that varies, so that patterns can be read
    off."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family.name, []).append(case)
    if not families:
        return Text("No case.")
    first = next(iter(families.values()))[0]
    return Group(
        *(part for listed in families.values() for part in _listed(listed)),
        Text("Choose some with --case and a pattern over keys, such as '*chunks=8*'. The first key:"),
        Text(first.key),
    )


def _listed(cases: Sequence[Case]) -> tuple[Text, Table]:
    """Title and table of the cases of one family."""
    axes = dict.fromkeys(axis.name for case in cases for axis in case.family.axes)
    texts = [_keyed(case) for case in cases]
    fixed = [name for name in axes if len({text.get(name) for text in texts}) == 1 and len(cases) > 1]
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in axes:
        if name not in fixed:
            table.add_column(name, overflow="fold")  # a value cut short could not be put into a pattern
    for text in texts:
        table.add_row(*(Text(text.get(name, "")) for name in axes if name not in fixed))
    common = ", ".join(f"{name}={texts[0][name]}" for name in fixed if name in texts[0])
    title = f"{cases[0].family.name}: {count(len(cases), 'case')}" + (f", all {common}" if common else "")
    return Text(title, "bold"), table


def _keyed(case: Case) -> dict[str, str]:
    """The axes as the key has them: without those at their default, which no pattern would match."""
    return {
        axis.name: axis.format(case[axis.name])
        for axis in case.family.axes
        if case[axis.name] != axis.default
    }


def summary_lines(record: Record) -> list[str]:
    """What a reader needs to know, in three to nine lines; lines that say what to doubt begin with `!`."""
    return [("! " if found.doubt else "") + found.text for found in findings.summary(record)]
