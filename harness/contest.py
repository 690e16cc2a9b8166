"""A comparison in words: a table for a terminal, Markdown for a pull request."""

import math
from collections import Counter
from collections.abc import Sequence

from rich.console import RenderableType

from harness import gate
from harness.comparison import CaseComparison, Comparison, SideFacts
from harness.labels import NONE, Names, clean, count, number, percent, short_names
from harness.record import CaseResult
from harness.registry import HEADLINE
from harness.tables import Column, FittedTable, label

STYLES = {
    "same": "green", "faster": "bold green", "slower": "bold red", "inconclusive": "yellow",
    "missing": "bold red", "invalid": "bold red", "skipped": "dim", "new": "dim",
}  # fmt: skip
ORDER = ("slower", "missing", "invalid", "inconclusive", "faster", "same", "new", "skipped")

_CHANGES = {
    "transfer_ms": "transfer",
    "compute_ms": "compute",
    "host_ms": "host",
    "model_ratio": "over\nmodel",
}


def table(made: Comparison) -> RenderableType:
    """Every case, those to look at first; reasons stand below."""
    cases = ordered(made)
    names = _names(cases)
    widths = [max(map(len, column)) for column in zip(*names.fields.values(), strict=False)]
    notes = _numbered(cases)
    columns = [
        Column(
            "\nverdict", [_verdict(case, notes) for case in cases], styles=[STYLES[c.verdict] for c in cases]
        ),
        Column("base\nms", [_ms(case, head=False) for case in cases], spare=4),
        Column("head\nms", [_ms(case, head=True) for case in cases], spare=3),
        Column("change", [change(case, HEADLINE) for case in cases]),
        Column("95 %\ninterval", [interval(case) for case in cases], spare=1),
        Column("would\ncall", [visible(case) for case in cases], spare=2),
        *(
            Column(title, [change(case, name) for case in cases], spare=5 + at)
            for at, (name, title) in enumerate(_CHANGES.items())
        ),
    ]
    return FittedTable(
        title=count(len(cases), "case") + (f", all {names.common}" if names.common else ""),
        labels=[label(names.fields[case.key], widths, names.rest[case.key]) for case in cases],
        label_width=sum(widths) + max(0, len(widths) - 1),
        columns=columns,
        notes=[f"[{at}] {text}" for text, at in notes.items()],
    )


def lines(made: Comparison) -> list[str]:
    """What was compared, what to know before believing it, and how it ended."""
    turns = (
        "in turns"
        if made.design == "interleaved"
        else "at different times: nights differ by more than launches"
    )
    stages = "; what tripped or was not seen was measured again" if made.fresh else ""
    counted = Counter(case.verdict for case in made.cases)
    listed = ", ".join(f"{counted[verdict]} {verdict}" for verdict in ORDER if counted[verdict])
    return [
        f"base {_side(made.base)} against head {_side(made.head)}, measured {turns}{stages}",
        *(f"! {clean(text)}" for text in made.warnings),
        *(f"across {clean(text)}" for text in made.crossed),
        *([f"cases: {listed}"] if listed else []),
        gate.why(made),
    ]


def markdown(made: Comparison) -> str:
    """For a comment on a pull request: what to look at on top, the rest folded away."""
    first, *others = lines(made)
    parts = [
        f"### overlap: {others.pop()}",
        "",
        _escaped(first),
        *(f"- {_escaped(text)}" for text in others),
        "",
    ]
    cases = ordered(made)
    names = _names(cases)
    open_, folded = (
        [case for case in cases if (case.verdict in ("same", "skipped", "new")) is quiet]
        for quiet in (False, True)
    )
    if open_:
        parts += [*_markdown_table(open_, names), ""]
    if folded:
        parts += [f"<details><summary>{count(len(folded), 'case')} without a finding</summary>", ""]
        parts += [*_markdown_table(folded, names), "", "</details>", ""]
    return "\n".join(parts)


def ordered(made: Comparison) -> list[CaseComparison]:
    """The cases, those to look at first, the largest loss on top."""

    def place(case: CaseComparison) -> tuple[int, float]:
        effect = case.effects.get(HEADLINE)
        return ORDER.index(case.verdict), -effect.change if effect and case.verdict == "slower" else 0.0

    return sorted(made.cases, key=place)


def change(case: CaseComparison, name: str) -> str:
    effect = case.effects.get(name)
    return NONE if effect is None else _signed(effect.change)


def interval(case: CaseComparison) -> str:
    effect = case.effects.get(HEADLINE)
    return NONE if effect is None else f"{_signed(effect.low)} to {_signed(effect.high)}"


def visible(case: CaseComparison) -> str:
    """The smallest loss of the headline that would have been called."""
    effect = case.effects.get(HEADLINE)
    return NONE if effect is None or not math.isfinite(effect.visible) else percent(effect.visible, places=1)


def _signed(share: float) -> str:
    places = 1 if abs(share) >= 0.0995 else 2
    text = f"{100 * share:+.{places}f}"
    return f"{text if float(text) else text.lstrip('+-')} %"


def _side(side: SideFacts) -> str:
    return f"{clean(side.commit)} ({side.launches} launch{'' if side.launches == 1 else 'es'})"


def _ms(case: CaseComparison, *, head: bool) -> str:
    return number(case.head_ms if head else case.base_ms)


def _verdict(case: CaseComparison, notes: dict[str, int]) -> str:
    text = case.verdict + _legs(case)
    said = [str(notes[reason]) for reason in _reasons(case)]
    return f"{text} [{','.join(said)}]" if said else text


def _reasons(case: CaseComparison) -> list[str]:
    found = [clean(case.reason)] if case.reason else []
    return found if case.gated else [*found, "not budgeted: shown, and never fails the gate"]


def _numbered(cases: Sequence[CaseComparison]) -> dict[str, int]:
    found = dict.fromkeys(reason for case in cases for reason in _reasons(case))
    return {reason: at for at, reason in enumerate(found, start=1)}


def _names(cases: Sequence[CaseComparison]) -> Names:
    return short_names(
        [
            CaseResult(key=case.key, family=case.family, params=case.params, status=case.verdict)
            for case in cases
        ]
    )


def _markdown_table(cases: Sequence[CaseComparison], names: Names) -> list[str]:
    titles = ["case", "verdict", "base ms", "head ms", "change", "95 % interval", "would call"]
    titles += [title.replace("\n", " ") for title in _CHANGES.values()]
    rows = [f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for case in cases:
        cells = [
            _escaped(names[case.key] or case.key),
            _escaped("; ".join([case.verdict + _legs(case), *_reasons(case)])),
            _ms(case, head=False), _ms(case, head=True),
            change(case, HEADLINE), interval(case), visible(case), *(change(case, name) for name in _CHANGES),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _legs(case: CaseComparison) -> str:
    return f": {', '.join(case.legs)}" if case.legs else ""


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{mark}" if mark in "\\`*_[]<>|#" else mark for mark in text)
