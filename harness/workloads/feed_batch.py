"""The tensors of a batch of any type: where they are in it, and which of them are not pinned."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def fields(batch: Any) -> dict[str, Tensor]:
    """Every tensor in a batch by its path: keys, attributes and places, of dicts, objects and sequences.

    `pixels` of a dict or of an object's attribute, `0.pixels` of the first of a list.
    """
    return {path: tensor for path, _, tensor in _walk(batch, "", "", set())}


def unpinned(batch: Any) -> list[str]:
    """Where in a batch tensors lie in memory that is not pinned, and in what type.

    DataLoader pins tensors, mappings, sequences, and what has a method pin_memory. It gives back every other type as
    it was, and says nothing.
    """
    return [
        f"{path or 'the batch'} in {owner}" if owner else path or "the batch"
        for path, owner, tensor in _walk(batch, "", "", set())
        if tensor.device.type == "cpu" and not tensor.is_pinned()
    ]


def _walk(value: Any, path: str, owner: str, seen: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, owner, value
        return
    if value is None or isinstance(value, str | bytes | int | float | complex | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple | set | frozenset):
        parts = dict(enumerate(value))
    elif dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    else:
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = {name: getattr(value, name, None) for name in names} | dict(getattr(value, "__dict__", {}))
    for name, part in parts.items():
        yield from _walk(part, f"{path}.{name}" if path else str(name), type(value).__name__, seen)
