"""Text for people: numbers to three digits, intervals, and short names of cases. Sinks share it, so that the
terminal, the figures and the report never disagree.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.case import Case, Value
from harness.families import FAMILIES
from harness.record import CaseResult, Metric

NONE = "-"

# Axes that seldom leave their usual value: named only where they do.
RARE = (
    "ratio", "issue", "first", "option", "connections", "source", "prefetch", "persistent", "start", "batching",
    "ranks", "profile",
)  # fmt: skip
# As usual, these go without saying.
UNSAID = ("first", "option", "connections", "source", "prefetch", "persistent", "start", "batching", "ranks")
# Of these the value alone says what it is.
BARE = ("memory", "stream", "size", "issue", "data", "start", "batching")


def clean(text: object) -> str:
    """`text` on one line, without characters that steer a terminal; a record may come from anywhere."""
    return "".join(mark if mark.isprintable() else " " for mark in str(text)).strip()


def number(value: float | None, *, places: int = 9) -> str:
    """Three significant digits, at most `places` decimals; whole digits stay: 5.44, 143, 1234, 0.0123."""
    if value is None or not math.isfinite(value):
        return NONE
    # The exponent after rounding: 9.996 has two digits before the point.
    exponent = int(f"{value:.2e}".partition("e")[2])
    text = f"{value:.{min(places, max(0, 2 - exponent))}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def ratio(value: float | None) -> str:
    """A ratio or a fraction: three significant digits, at most three decimals."""
    return number(value, places=3)


def percent(fraction: float, *, places: int = 0) -> str:
    text = f"{100 * fraction:.{places}f}"
    return f"{text.removeprefix('-') if float(text) == 0 else text} %"


def spread(metric: Metric | None) -> str:
    """The wider side of the interval relative to the value, `±0.3 %`; empty where there is no interval."""
    if metric is None or metric.spread is None:
        return ""
    wide = 100 * metric.spread
    return f"±{wide:.1g} %" if wide < 0.95 else f"±{wide:.1f} %" if wide < 9.95 else f"±{wide:.0f} %"


def interval(metric: Metric | None) -> str:
    """`0.929 to 0.940`; empty where there is no interval."""
    if metric is None or metric.low is None or metric.high is None:
        return ""
    return f"{ratio(metric.low)} to {ratio(metric.high)}"


def with_spread(metric: Metric | None) -> str:
    """`5.44 ±0.3 %`"""
    return f"{number(metric.value)} {spread(metric)}".rstrip() if metric else NONE


def with_interval(metric: Metric | None) -> str:
    """`0.934 (0.929 to 0.940)`"""
    if metric is None:
        return NONE
    between = interval(metric)
    return f"{ratio(metric.value)} ({between})" if between else ratio(metric.value)


def with_doubt(metric: Metric | None) -> str:
    """Its spread; of a fraction, which may be near nothing, its interval: a share of nothing says nothing."""
    return with_interval(metric) if metric and metric.unit == "fraction" else with_spread(metric)


def count(total: int, noun: str) -> str:
    """`1 case`, `2 cases`"""
    return f"{total} {noun}{'' if total == 1 else 's'}"


def reason(case: CaseResult) -> str:
    """Why the case is not ok; empty for one that is, save where its record gives a reason all the same."""
    return clean(case.reason) or ("" if case.status == "ok" else f"{case.status}, no reason given")


def axis_text(family: str, axis: str, value: Value) -> str:
    """The value as the case key writes it, 268435456 as `256MiB`; as it is for an unknown family or axis."""
    for known in FAMILIES[family].axes if family in FAMILIES else ():
        if known.name == axis and known.check(value):
            return known.format(value)
    return clean(value)


def axis_words(family: str, axis: str, value: Value) -> str:
    """The value with as much of the axis's name as a reader needs: `n=8`, `gated`."""
    text = axis_text(family, axis, value)
    if axis == "chunks":
        return f"n={text}"
    if axis == "gate":
        return {"on": "gated", "off": "ungated"}.get(text, text)
    return text if axis in BARE else f"{clean(axis)}={text}"


# How an axis stands at its usual value: at its default, the ratio that profiles are balanced for, bytes that are there.
USUAL = {"ratio": "ratio=1", "source": "source=memory"} | {
    axis.name: axis_words(family.name, axis.name, axis.default)
    for family in FAMILIES.values()
    for axis in family.axes
    if axis.default is not None
}


@dataclass(frozen=True)
class Names:
    """Short names of some cases, by key.

    common: what all of them share, said once. fields: the words of each case, of the same axes within a
    family, so that they can be set in columns. rest: words of the rare axes that are not as usual.
    """

    common: str
    fields: Mapping[str, tuple[str, ...]]
    rest: Mapping[str, str]

    def __getitem__(self, key: str) -> str:
        return " ".join(filter(None, (*self.fields[key], self.rest[key])))


def short_names(cases: Iterable[CaseResult | Case]) -> Names:
    """Names without what all of `cases` share; a lone case keeps everything but its rare axes."""
    words: dict[str, dict[str, str]] = {}
    for case in cases:
        family = case.family if isinstance(case, CaseResult) else case.family.name
        named = {axis: axis_words(family, axis, given) for axis, given in case.params.items()}
        words[case.key] = {"family": clean(family), **named}
    shared = _shared(list(words.values()))
    fields, rest = {}, {}
    for key, named in words.items():
        own = {axis: text for axis, text in named.items() if axis not in shared}
        fields[key] = tuple(text for axis, text in own.items() if axis not in RARE)
        rare = [axis for axis in RARE if axis in own]
        unusual = [axis for axis in rare if own[axis] != USUAL.get(axis)]
        # What differs from the others only in what is as usual would have no name.
        rest[key] = " ".join(own[axis] for axis in (unusual if unusual or fields[key] else rare))
    said = (
        text
        for axis, text in shared.items()
        if axis != "family" and not (axis in UNSAID and text == USUAL[axis])
    )
    return Names(", ".join(said), fields, rest)


def _shared(words: list[dict[str, str]]) -> dict[str, str]:
    if not words:
        return {}
    first, *others = words
    alone = not others
    return {
        axis: text
        for axis, text in first.items()
        if all(named.get(axis) == text for named in others)
        and (not alone or axis in RARE or axis == "family")
    }
