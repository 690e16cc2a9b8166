"""A case: one frozen set of parameters of one family. Its key is its identity in every store."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.errors import UsageError
from harness.sizes import format_size, parse_size

Value = str | int | float

_KEY = re.compile(r"(?P<family>[a-z][a-z0-9_]*)\[(?P<params>[^\[\]]*)\]")


class Axis(Protocol):
    """One named parameter of a family: how its values are written, and which are accepted."""

    @property
    def name(self) -> str: ...

    @property
    def default(self) -> Value | None:
        """The value an axis added later has in old keys; such a value is left out of the key."""

    @property
    def accepts(self) -> str:
        """What is accepted, in words, for messages."""

    def parse(self, text: str) -> Value: ...

    def format(self, value: Value) -> str: ...

    def check(self, value: Value) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a few words."""

    name: str
    values: tuple[str, ...]
    default: Value | None = None

    @property
    def accepts(self) -> str:
        return " or ".join(self.values)

    def parse(self, text: str) -> Value:
        return text

    def format(self, value: Value) -> str:
        return str(value)

    def check(self, value: Value) -> bool:
        return value in self.values


@dataclass(frozen=True, kw_only=True)
class Integer:
    """A whole number from `low` to `high`."""

    name: str
    low: int
    high: int
    default: Value | None = None

    @property
    def accepts(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, text: str) -> Value:
        if not text.isascii():  # int() takes the digits of every script
            raise ValueError(text)
        return int(text)

    def format(self, value: Value) -> str:
        return str(value)

    def check(self, value: Value) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number from `low` to `high`; 1.0 is written `1`, and any other so that it reads back as itself."""

    name: str
    low: float
    high: float
    default: Value | None = None

    @property
    def accepts(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> Value:
        return float(text)

    def format(self, value: Value) -> str:
        short = f"{value:g}"
        return short if float(short) == value else repr(float(value))

    def check(self, value: Value) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes, written `256MiB`."""

    name: str
    low: int
    high: int
    default: Value | None = None

    @property
    def accepts(self) -> str:
        return f"{format_size(self.low)} to {format_size(self.high)}"

    def parse(self, text: str) -> Value:
        return parse_size(text, field=self.name)

    def format(self, value: Value) -> str:
        return format_size(int(value))

    def check(self, value: Value) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Text:
    """A free word without the characters that a key is made of."""

    name: str
    default: Value | None = None

    @property
    def accepts(self) -> str:
        return "a word of letters, digits, '.', '_' and '-'"

    def parse(self, text: str) -> Value:
        return text

    def format(self, value: Value) -> str:
        return str(value)

    def check(self, value: Value) -> bool:
        return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]+", value) is not None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of workload and its axes in the order the key writes them.

    grouped: its cases are measured by `ranks` processes together, and their transfer is a collective. waits: its arms
    may leave the device without work, each for another time, so that clocks and link differ between them by nature.
    """

    name: str
    axes: tuple[Axis, ...]
    summary: str
    grouped: bool = False
    waits: bool = False

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        known = ", ".join(axis.name for axis in self.axes)
        raise UsageError(f"{self.name}: got axis {name!r}, want one of {known}")


@dataclass(frozen=True)
class Case:
    """Validated parameters of one family; build with `Case.of` or `Case.parse`.

    >>> from harness.families import FAMILIES
    >>> Case.of(FAMILIES["h2d"], memory="pinned", stream="side", chunks=8, size=1 << 28,
    ...         ratio=1, gate="on", profile="h200.1a2b").key
    'h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on,profile=h200.1a2b]'
    """

    family: Family
    values: tuple[Value, ...]

    @classmethod
    def of(cls, family: Family, **params: Value) -> "Case":
        """A case with every axis given, save those that have a default; UsageError names every axis that is
        missing, else the first fault."""
        missing = [axis for axis in family.axes if params.get(axis.name, axis.default) is None]
        if len(missing) == 1:
            raise UsageError(f"{family.name}: axis {missing[0].name!r} is missing, want {missing[0].accepts}")
        if missing:
            wanted = ", ".join(f"{axis.name!r} ({axis.accepts})" for axis in missing)
            raise UsageError(f"{family.name}: axes are missing: {wanted}")
        values: list[Value] = []
        for axis in family.axes:
            value = params.pop(axis.name, axis.default)
            assert value is not None
            if isinstance(value, bool) or not axis.check(value):
                # A size is shown as it is written.
                got = axis.format(value) if isinstance(axis, Size) and type(value) is int else repr(value)
                raise UsageError(f"{family.name}: {axis.name}: got {got}, want {axis.accepts}")
            values.append(value)
        if params:
            family.axis(next(iter(params)))
        return cls(family, tuple(values))

    @classmethod
    def parse(cls, key: str, families: Mapping[str, Family]) -> "Case":
        """The case that `key` names, whatever the order of its axes."""
        match = _KEY.fullmatch(key.strip())
        if match is None:
            raise UsageError(f"case: got {key!r}, want family[axis=value,...]")
        if match["family"] not in families:
            raise UsageError(f"case: got family {match['family']!r}, want one of {', '.join(families)}")
        family = families[match["family"]]
        params: dict[str, Value] = {}
        for part in filter(None, match["params"].split(",")):
            name, equals, text = part.partition("=")
            axis = family.axis(name.strip())
            if not equals or axis.name in params:
                raise UsageError(f"case: got {part!r} in {key!r}, want axis=value once per axis")
            try:
                params[axis.name] = axis.parse(text.strip())
            except ValueError:
                raise UsageError(f"{family.name}: {axis.name}: got {text!r}, want {axis.accepts}") from None
        return cls.of(family, **params)

    @property
    def params(self) -> dict[str, Value]:
        return {axis.name: value for axis, value in zip(self.family.axes, self.values, strict=True)}

    @property
    def key(self) -> str:
        parts = (
            f"{axis.name}={axis.format(value)}"
            for axis, value in zip(self.family.axes, self.values, strict=True)
            if value != axis.default
        )
        return f"{self.family.name}[{','.join(parts)}]"

    def __getitem__(self, axis: str) -> Value:
        return self.params[axis]

    def number(self, axis: str) -> int:
        """The value of a whole-number axis."""
        return int(self[axis])

    def word(self, axis: str) -> str:
        """The value of a word axis."""
        return str(self[axis])

    @property
    def ranks(self) -> int | None:
        """The processes that measure it together; None for a case of one process alone."""
        ranks = self.params.get("ranks")
        return None if ranks is None or (ranks == 1 and not self.family.grouped) else int(ranks)

    def replace(self, **params: Value) -> "Case":
        return Case.of(self.family, **{**self.params, **params})


def unique(cases: Iterable[Case]) -> list[Case]:
    """The cases in order, each once."""
    return list(dict.fromkeys(cases))
