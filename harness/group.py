"""The processes that measure one case together, as a workload and `measure` see them: one of them, or all.

Every rank runs the same code in the same order. What must be decided alike is decided on values that all of them
share (measurement.md, rule 11).
"""

from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Group(Protocol):
    """Ranks 0 to size - 1. MeasurementError, on every rank that is left, where one does not come in time."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def host(self) -> str:
        """The name of this rank's host; empty for a process alone."""

    @property
    def device(self) -> Any:
        """The device that this rank has to itself, or with other ranks of its host: equal for those alone."""

    def share(self, value: T) -> list[T]:
        """Every rank's value, by rank: the same list on all of them. For small values, outside of timed regions."""

    def meet(self) -> None:
        """All ranks leave together, up to what a message between them takes."""


class Alone:
    """The group of a case that one process measures."""

    rank, size, host, device = 0, 1, "", None

    def share(self, value: T) -> list[T]:
        return [value]

    def meet(self) -> None:
        pass
