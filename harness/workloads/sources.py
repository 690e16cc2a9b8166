"""Where the bytes of a sample come from: memory, files, compressed shards, or a slow store.

A source goes to worker processes, forked or spawned; files and connections are opened there, each process its own.
"""

import functools
import http.client
import itertools
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.errors import MeasurementError, UsageError
from harness.workloads.slow_store import SlowStore

BLOCK = 16  # samples that are compressed together
BLOCKS = 16  # in a shard
LEVEL = 1  # of zlib: shards are written once and read often, yet the level hardly changes the time to read
ANSWER_S = 60.0  # a store that says nothing for so long is gone


class Source(Protocol):
    """Samples by their numbers, 0 to len - 1."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """The sample's bytes, as they were when the source was made; IndexError if there is no such sample."""

    def stored_bytes(self, index: int) -> int:
        """How many bytes are taken from where they are kept to read that sample."""

    def close(self) -> None:
        """Give back what the source holds. In the process that made it, whatever it made is gone then."""


def make_source(
    name: str, blobs: Sequence[bytes], folder: Path, *, latency_ms: float = 0.0, mib_per_s: float = 1024.0
) -> Source:
    """A source of `blobs`; what it writes goes to a new folder inside `folder`, and goes away with `close`.

    latency_ms, mib_per_s: of a store, for one request and for all together. Files and shards were written just now, so
    that they are read from the page cache and not from a disk.
    """
    makers: dict[str, Callable[[Sequence[bytes], _Folder], Source]] = {
        "files": _Files,
        "shards": _Shards,
        "store": functools.partial(_Store, latency_ms=latency_ms, mib_per_s=mib_per_s),
    }
    if name == "memory":
        return _Memory(blobs)
    if name not in makers:
        raise UsageError(f"source: {name!r} is none; accepted: {', '.join(['memory', *makers])}")
    made: _Folder | None = None
    try:
        made = _Folder(folder)
        return makers[name](blobs, made)
    except OSError as error:
        if made is not None:
            made.close()
        raise UsageError(
            f"source: cannot keep samples in the folder for temporary files (TMPDIR): {error.strerror}"
        ) from None


class _Folder:
    """A new folder that goes with its source, in the process that made it alone: workers have copies of the source."""

    def __init__(self, inside: Path) -> None:
        self._owner: int | None = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix="samples-", dir=inside))

    @property
    def ours(self) -> bool:
        return os.getpid() == self._owner

    def close(self) -> None:
        if self.ours:
            shutil.rmtree(self.path, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": None}


class _Memory:
    """All samples in one piece of memory: forked workers then share it, where they would copy what holds many objects
    bit by bit, as counting references writes to each."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self._data = b"".join(blobs)
        self._ends = _ends(blobs)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, index: int) -> bytes:
        low, high = _within(self._ends, index)
        return self._data[low:high]

    def stored_bytes(self, index: int) -> int:
        low, high = _within(self._ends, index)
        return high - low

    def close(self) -> None:
        self._data, self._ends = b"", self._ends[:1]


class _Files:
    """A file for each sample."""

    def __init__(self, blobs: Sequence[bytes], folder: _Folder) -> None:
        self._folder = folder
        self._ends = _ends(blobs)
        for index, blob in enumerate(blobs):
            self._path(index).write_bytes(blob)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, index: int) -> bytes:
        _within(self._ends, index)
        return self._path(index).read_bytes()

    def stored_bytes(self, index: int) -> int:
        low, high = _within(self._ends, index)
        return high - low

    def close(self) -> None:
        self._folder.close()

    def _path(self, index: int) -> Path:
        return self._folder.path / f"{index:08}"


class _Shards:
    """Blocks of BLOCK samples, compressed by zlib, BLOCKS of them in a file, and an index of where each block begins.

    Whoever reads a sample has to read and decompress its block. No block is kept: in a shuffled order the next sample
    is of another one.
    """

    def __init__(self, blobs: Sequence[bytes], folder: _Folder) -> None:
        self._folder = folder
        self._ends = _ends(blobs)
        blocks = [
            zlib.compress(b"".join(blobs[low : low + BLOCK]), LEVEL) for low in range(0, len(blobs), BLOCK)
        ]
        self._sizes = np.array([len(block) for block in blocks], dtype=np.int64)
        self._open: dict[int, int] = {}
        for shard, low in enumerate(range(0, len(blocks), BLOCKS)):
            self._path(shard).write_bytes(b"".join(blocks[low : low + BLOCKS]))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, index: int) -> bytes:
        low, high = _within(self._ends, index)
        block = index // BLOCK
        shard = block // BLOCKS
        if shard not in self._open:
            self._open[shard] = os.open(self._path(shard), os.O_RDONLY)
        size = int(self._sizes[block])
        at = int(self._sizes[shard * BLOCKS : block].sum())
        # pread: forked processes share the place in a file, and must not move it.
        data = zlib.decompress(os.pread(self._open[shard], size, at))
        base = int(self._ends[block * BLOCK])
        return data[low - base : high - base]

    def stored_bytes(self, index: int) -> int:
        _within(self._ends, index)
        return int(self._sizes[index // BLOCK])

    def close(self) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()
        self._folder.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def _path(self, shard: int) -> Path:
        return self._folder.path / f"shard-{shard:05}"


class _Store:
    """A request to a store for each sample, over one connection of each process that is kept open."""

    def __init__(
        self, blobs: Sequence[bytes], folder: _Folder, *, latency_ms: float, mib_per_s: float
    ) -> None:
        self._folder = folder
        self._ends = _ends(blobs)
        self._store: SlowStore | None = SlowStore(
            blobs, self._folder.path, latency_ms=latency_ms, mib_per_s=mib_per_s
        )
        self._port = self._store.port
        self._connection: tuple[int, http.client.HTTPConnection] | None = None

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, index: int) -> bytes:
        low, high = _within(self._ends, index)
        try:
            connection = self._connected()
            connection.request("GET", f"/{index}")
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            raise MeasurementError(f"store: sample {index}: {type(error).__name__}: {error}") from None
        if answer.status != http.HTTPStatus.OK or len(data) != high - low:
            raise MeasurementError(
                f"store: sample {index}: {answer.status} {answer.reason}, {len(data)} of {high - low} bytes"
            )
        return data

    def stored_bytes(self, index: int) -> int:
        low, high = _within(self._ends, index)
        return high - low

    def close(self) -> None:
        self._disconnect()
        if self._store is not None and self._folder.ours:
            self._store.close()
            self._store = None
        self._folder.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None, "_connection": None}

    def _connected(self) -> http.client.HTTPConnection:
        """This process's own: answers on one that a fork shares would go to whoever reads first."""
        if self._connection is None or self._connection[0] != os.getpid():
            made = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
            self._connection = (os.getpid(), made)
        return self._connection[1]

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
        self._connection = None


def _ends(blobs: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each blob begins when they lie one behind the other, and where the last one ends; shape (blobs + 1,)."""
    return np.array([0, *itertools.accumulate(map(len, blobs))], dtype=np.int64)


def _within(ends: np.ndarray[Any, np.dtype[np.int64]], index: int) -> tuple[int, int]:
    if not 0 <= index < len(ends) - 1:
        raise IndexError(f"sample {index} of {len(ends) - 1}")
    return int(ends[index]), int(ends[index + 1])
