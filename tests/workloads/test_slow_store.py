"""The store has the latency and the rate it is told, and ends with its owner."""

import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from processes import children, gone

from harness.workloads.slow_store import LATE_S, Bucket, Punctual, SlowStore

MIB = 1 << 20


@contextmanager
def store(
    folder: Path, blobs: list[bytes], *, latency_ms: float = 0.0, mib_per_s: float = 1000.0
) -> Iterator[SlowStore]:
    made = SlowStore(blobs, folder, latency_ms=latency_ms, mib_per_s=mib_per_s)
    try:
        yield made
    finally:
        made.close()


def get(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def connected(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=20)


def wait_until_refused(port: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.02)
    return False


def test_one_rate_for_all_who_ask() -> None:
    """Two that ask at once go one behind the other, and a gap between them is lost."""
    bucket = Bucket(1000.0)
    assert bucket.reserve(100, ready=5.0, now=5.0) == pytest.approx(5.1)
    assert bucket.reserve(100, ready=5.0, now=5.0) == pytest.approx(5.2)
    assert bucket.reserve(100, ready=6.0, now=6.0) == pytest.approx(6.1)


def test_one_that_woke_late_loses_no_rate_but_is_not_owed_much() -> None:
    bucket = Bucket(1000.0)
    at = 1.0
    for _ in range(100):  # each time 10 ms too late
        at = bucket.reserve(100, ready=at, now=at + 0.01)
    assert at == pytest.approx(11.0)
    assert bucket.reserve(100, ready=at, now=at + 5) == pytest.approx(at + 5 - LATE_S + 0.1)


@pytest.mark.timing
def test_it_wakes_to_less_than_a_millisecond() -> None:
    took = []
    with Punctual() as selector:
        for _ in range(50):
            began = time.perf_counter()
            assert selector.select(0.0003) == []
            took.append(time.perf_counter() - began)
    assert 0.0003 <= statistics.median(took) < 0.0008


def test_objects_come_as_they_are_and_unknown_ones_not_at_all(tmp_path: Path) -> None:
    """And after one that there is not, the connection goes on."""
    blobs = [b"first", b"", os.urandom(3 * MIB)]
    with store(tmp_path, blobs) as made:
        connection = connected(made.port)
        for index in (2, 0, 1, 2):
            assert get(connection, f"/{index}") == (200, blobs[index])
        for path in ("/3", "/-1", "/", "/a", "/1/2", "/" + "9" * 30):
            assert get(connection, path) == (404, b"")
        assert get(connection, "/0", "DELETE") == (404, b"")
        assert get(connection, "/0") == (200, b"first")
        connection.close()


def test_what_is_no_http_is_not_answered_and_harms_no_one(tmp_path: Path) -> None:
    with store(tmp_path, [b"first"]) as made:
        with socket.create_connection(("127.0.0.1", made.port), timeout=20) as wild:
            wild.sendall(b"x" * 200_000)
            with suppress(ConnectionResetError):  # what it had not read yet is no matter
                assert wild.recv(100) == b""
        connection = connected(made.port)
        assert get(connection, "/0") == (200, b"first")
        connection.close()


@pytest.mark.timing
@pytest.mark.parametrize("latency_ms", [5.0, 40.0])
def test_a_request_takes_the_latency(tmp_path: Path, latency_ms: float) -> None:
    """And up to 3 ms, by which processes wake late."""
    with store(tmp_path, [b"x" * 1000], latency_ms=latency_ms) as made:
        connection = connected(made.port)
        took = []
        for _ in range(20):
            began = time.perf_counter()
            get(connection, "/0")
            took.append((time.perf_counter() - began) * 1e3)
        connection.close()
    assert min(took) >= latency_ms
    assert statistics.median(took[1:]) <= latency_ms + 3


@pytest.mark.timing
@pytest.mark.parametrize(
    ("connections", "size", "latency_ms", "mib_per_s", "expected"),
    [
        (1, MIB, 0.0, 8.0, 8.0),
        (2, 4 * MIB, 0.0, 100.0, 100.0),
        (4, MIB, 0.0, 50.0, 50.0),
        (16, 30_000, 20.0, 8.0, 8.0),
        (64, 30_000, 20.0, 50.0, 50.0),
        # One that asks for one object after another waits for each: 1 MiB in 20 ms of rate and 20 ms of latency.
        (1, MIB, 20.0, 50.0, 25.0),
    ],
)
def test_the_rate_of_all_connections_together_is_what_was_set(
    tmp_path: Path, connections: int, size: int, latency_ms: float, mib_per_s: float, expected: float
) -> None:
    """Within 5 %, of what comes in 1.2 s once all have begun."""
    with store(tmp_path, [os.urandom(size)], latency_ms=latency_ms, mib_per_s=mib_per_s) as made:
        began = time.perf_counter() + 0.4
        stop = began + 1.2
        came: list[tuple[float, int]] = []

        def ask() -> None:
            connection = connected(made.port)
            while time.perf_counter() < stop:
                connection.request("GET", "/0")
                answer = connection.getresponse()
                while data := answer.read(16 << 10):
                    came.append((time.perf_counter(), len(data)))
            connection.close()

        threads = [threading.Thread(target=ask) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    within = sorted((at, size) for at, size in came if began <= at <= stop)
    rate = sum(size for _, size in within[1:]) / (within[-1][0] - within[0][0]) / MIB
    assert rate == pytest.approx(expected, rel=0.05)


def test_it_ends_when_it_is_closed(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    with store(tmp_path, [b"first"]) as made:
        connection = connected(made.port)
        assert get(connection, "/0")[0] == 200
        connection.close()
        (pid,) = set(children(os.getpid())) - before
    assert gone(pid)
    assert wait_until_refused(made.port, 1)


OWNER = """
import os, sys, time
from pathlib import Path
from harness.workloads.slow_store import SlowStore
store = SlowStore([b"first"], Path(sys.argv[1]), latency_ms=0, mib_per_s=1)
if os.fork() == 0:  # as a worker that outlives its parent
    time.sleep(30)
    os._exit(0)
print(store.port, flush=True)
time.sleep(30)
"""


def test_it_ends_with_its_owner_however_that_ends_and_not_with_an_interrupt(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stderr is not None
    port = int(owner.stdout.readline())
    connection = connected(port)
    assert get(connection, "/0") == (200, b"first")
    mine = children(owner.pid)
    (program,) = [pid for pid in mine if b"slow_store.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(program, signal.SIGINT)
    assert get(connection, "/0") == (200, b"first")
    owner.kill()
    owner.wait()
    try:
        assert wait_until_refused(port, 5)
        end = time.monotonic() + 5
        while not gone(program) and time.monotonic() < end:
            time.sleep(0.02)
        assert gone(program)
    finally:
        for pid in mine:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
    assert owner.stderr.read() == ""
    owner.stdout.close()
    owner.stderr.close()
    connection.close()
