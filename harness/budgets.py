"""How much slower counts as a regression: budgets per family, in one small file (harness/budgets.toml)."""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from harness.errors import UsageError
from harness.families import FAMILIES
from harness.suites import matches

DEFAULT = "default"
PACKAGED = Path(__file__).parent / "budgets.toml"

Share = Annotated[float, msgspec.Meta(gt=0, le=10)]


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See harness/budgets.toml."""

    time: Share
    host: Share
    unbudgeted: list[str] = []

    def gates(self, key: str) -> bool:
        """Whether the case of that key can fail a gate."""
        return not any(matches(glob, key) for glob in self.unbudgeted)


class Budgets:
    """The budget of every family."""

    def __init__(self, families: dict[str, Budget]) -> None:
        self._families = families

    def of(self, family: str) -> Budget:
        return self._families.get(family) or self._families[DEFAULT]


def load(path: Path | None = None) -> Budgets:
    """The budgets in `path`, by default the packaged ones; UsageError if it cannot be read or is no such file."""
    chosen = path or PACKAGED
    try:
        tables = tomllib.loads(chosen.read_text(encoding="utf-8"))
        families = {name: _budget(name, table) for name, table in tables.items()}
    except OSError as error:
        raise UsageError(f"budgets: cannot read {chosen}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"budgets: {chosen} is not a file of budgets: {error}") from None
    if unknown := sorted(set(families) - {DEFAULT, *FAMILIES}):
        known = ", ".join([DEFAULT, *FAMILIES])
        raise UsageError(f"budgets: {chosen}: got a table [{unknown[0]}], want {known}")
    if DEFAULT not in families:
        raise UsageError(f"budgets: {chosen}: has no table [{DEFAULT}], for families that are not listed")
    return Budgets(families)


def _budget(name: str, table: object) -> Budget:
    try:
        return msgspec.convert(table, Budget)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"[{name}]: {error}") from None
