"""An object store on the loopback device with the latency and the rate it is told, to read samples from.

It is a process of its own, so that it takes no turns with the process that measures. Run as a program it serves until
its owner has ended.
"""

import argparse
import asyncio
import mmap
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

MIB = 1 << 20

LOOK_S = 0.25  # between two looks whether the owner is still there
LAST_S = 0.05  # for connections that came in the last moment to begin
LATE_S = 0.02  # for which this process may wake too late without a loss of rate

PIECE_S = 0.002  # what is sent at once lasts so long at the rate
PIECES = (16 << 10, 1 << 20)  # bytes, least and most

WAITING = 4096  # connections that may wait to be taken


class Bucket:
    """One rate for all who ask: every reservation begins where the one before it ends.

    `now` and all times are seconds of one clock.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free = 0.0

    def reserve(self, size: int, ready: float, now: float) -> float:
        """When `size` bytes that are ready to go at `ready` have gone at the rate.

        `ready` may lie before now, but by LATE_S at most: a process that woke late loses no rate, and one that did
        nothing for long is not owed any.
        """
        self._free = max(self._free, ready, now - LATE_S) + size / self._rate
        return self._free


class Store:
    """Serves `data[ends[i]:ends[i + 1]]` as object /i over HTTP/1.1, one request after another on each connection."""

    def __init__(self, data: memoryview, ends: Sequence[int], *, latency_ms: float, mib_per_s: float) -> None:
        self._data, self._ends = data, ends
        self._latency, rate = latency_ms / 1e3, mib_per_s * MIB
        self._bucket = Bucket(rate)
        self._piece = int(min(max(rate * PIECE_S, PIECES[0]), PIECES[1]))

    async def serve(self, listening: socket.socket, owner: int) -> None:
        """Until the process `owner` is no longer the parent of this one."""
        server = await asyncio.start_server(self._connected, sock=listening)
        while os.getppid() == owner:
            await asyncio.sleep(LOOK_S)
        server.close()
        # A connection that came in the last moment begins, or its end would be an error that asyncio prints.
        await asyncio.sleep(LAST_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                ready = clock.time() + self._latency
                await asyncio.sleep(self._latency)
                found = self._find(head)
                if found is None:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    continue
                low, high = found
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (high - low))
                for begin in range(low, high, self._piece):
                    piece = self._data[begin : min(high, begin + self._piece)]
                    ready = self._bucket.reserve(len(piece), ready, clock.time())
                    await asyncio.sleep(ready - clock.time())
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the client has gone, or speaks something else
        except asyncio.CancelledError:
            pass  # the store ends
        finally:
            writer.close()

    def _find(self, head: bytes) -> tuple[int, int] | None:
        """From where to where in the data the object lies that a request asks for; None where there is none."""
        words = head.split(b" ", 2)
        if len(words) < 3 or words[0] != b"GET" or not words[1][1:].isdigit():
            return None
        index = int(words[1][1:])
        return (self._ends[index], self._ends[index + 1]) if index + 1 < len(self._ends) else None


class Punctual(selectors.DefaultSelector):
    """Wakes to the microsecond. An epoll by itself counts in milliseconds, and rounds up."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        return super().select(0)


class SlowStore:
    """A running store of `blobs`: object /i is blobs[i]. `folder` is where it keeps them.

    latency_ms: from a request to the first byte that may go. mib_per_s: MiB (2^20 bytes) a second, of all connections
    together. The store ends with `close`, or with this process, however that ends.
    """

    def __init__(self, blobs: Sequence[bytes], folder: Path, *, latency_ms: float, mib_per_s: float) -> None:
        path = folder / "objects"
        with path.open("wb") as file:
            file.writelines(blobs)
        sizes = folder / "sizes"
        sizes.write_text(" ".join(str(len(blob)) for blob in blobs))
        with socket.create_server(("127.0.0.1", 0), backlog=WAITING) as listening:
            self.port: int = listening.getsockname()[1]
            # By its path: nothing of the package is needed, so nothing of it is loaded.
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", __file__, str(path), str(sizes), str(listening.fileno()), str(os.getpid()),
                    str(latency_ms), str(mib_per_s),
                ],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="slow_store")
    parser.add_argument("objects", type=Path)
    parser.add_argument("sizes", type=Path)
    parser.add_argument("socket", type=int)
    parser.add_argument("owner", type=int)
    parser.add_argument("latency_ms", type=float)
    parser.add_argument("mib_per_s", type=float)
    given = parser.parse_args(arguments)
    # An interrupt is for the owner, whose end is the end of the store.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends = [0, *accumulate(int(size) for size in given.sizes.read_text().split())]
    with given.objects.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    store = Store(data, ends, latency_ms=given.latency_ms, mib_per_s=given.mib_per_s)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Punctual())) as runner:
        runner.run(store.serve(socket.socket(fileno=given.socket), given.owner))


if __name__ == "__main__":
    main()
