"""Bytes come back as they were, from every source and in every process, and nothing is left behind."""

import errno
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import children

from harness.errors import MeasurementError, UsageError
from harness.workloads import sources
from harness.workloads.slow_store import SlowStore
from harness.workloads.sources import BLOCK, Source, make_source

# Processes are forked from this one on purpose; they use no threads of its.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

NAMES = ["memory", "files", "shards", "store"]

# More than a shard has blocks, the last block not full, an empty sample, and one above a piece of the store's.
BLOBS = [os.urandom(20 + 7 * index) for index in range(BLOCK * sources.BLOCKS + 5)]
BLOBS[3] = b""
BLOBS[9] = os.urandom(1 << 20)


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    made = make_source(request.param, BLOBS, tmp_path)
    yield made
    made.close()


def in_processes(context: Any, count: int, target: Callable[..., None], *args: Any) -> list[Any]:
    answers = context.SimpleQueue()
    started = [context.Process(target=target, args=(*args, answers)) for _ in range(count)]
    for process in started:
        process.start()
    found = [answers.get() for _ in started]
    for process in started:
        process.join()
    return found


def check_some(source: Source, expected: dict[int, bytes], answer: Any) -> None:
    """What is wrong with any of them, then close; spawned processes know no BLOBS of this one."""
    try:
        times = 100 * list(expected.items())
        answer.put([index for index, blob in times if source.read(index) != blob])
    except Exception as error:
        answer.put(repr(error))
    source.close()


def test_every_sample_comes_back_as_it_was(source: Source) -> None:
    assert len(source) == len(BLOBS)
    for index in [*range(len(BLOBS)), 0, len(BLOBS) - 1, 9]:
        assert source.read(index) == BLOBS[index]


@pytest.mark.parametrize("index", [-1, len(BLOBS), 10**9])
def test_there_is_no_sample_beyond_the_last(source: Source, index: int) -> None:
    with pytest.raises(IndexError, match=f"sample {index} of {len(BLOBS)}"):
        source.read(index)
    with pytest.raises(IndexError):
        source.stored_bytes(index)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_other_processes_read_at_once_and_leave_the_source_in_place(source: Source, start: str) -> None:
    """Though this one had read before, and has files and connections open; though they close their copies."""
    expected = {index: BLOBS[index] for index in range(1, len(BLOBS), 40)}
    source.read(5)
    found = in_processes(multiprocessing.get_context(start), 3, check_some, source, expected)
    assert found == [[], [], []]
    assert source.read(5) == BLOBS[5]


def test_a_copy_reads_as_the_source_does(source: Source) -> None:
    source.read(5)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(7) == BLOBS[7]
    copy.close()
    assert source.read(5) == BLOBS[5]


@pytest.mark.parametrize("name", NAMES)
def test_closing_leaves_no_file_no_process_and_no_open_file(name: str, tmp_path: Path) -> None:
    files, running = set(os.listdir("/proc/self/fd")), children(os.getpid())
    made = make_source(name, BLOBS, tmp_path)
    made.read(5)
    assert (name == "memory") == (not list(tmp_path.iterdir()))
    made.close()
    made.close()
    assert list(tmp_path.iterdir()) == []
    assert children(os.getpid()) == running
    assert set(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("name", ["memory", "files", "store"])
def test_a_sample_takes_its_own_bytes_from_where_it_is_kept(name: str, tmp_path: Path) -> None:
    made = make_source(name, BLOBS, tmp_path)
    assert [made.stored_bytes(index) for index in range(len(BLOBS))] == [len(blob) for blob in BLOBS]
    made.close()


def test_a_sample_of_a_shard_takes_its_whole_block_compressed(tmp_path: Path) -> None:
    texts = [b"line %d of a text that says little, " % index * 20 for index in range(40)]
    made = make_source("shards", texts, tmp_path)
    blocks = [made.stored_bytes(index) for index in range(0, 40, BLOCK)]
    assert [made.stored_bytes(index) for index in range(40)] == [
        blocks[index // BLOCK] for index in range(40)
    ]
    kept = sum(path.stat().st_size for path in tmp_path.rglob("shard-*"))
    assert sum(blocks) == kept < 0.7 * sum(map(len, texts))
    assert made.read(20) == texts[20]
    made.close()


def test_shards_are_several_files(tmp_path: Path) -> None:
    made = make_source("shards", BLOBS, tmp_path)
    assert len(list(tmp_path.rglob("shard-*"))) == 2
    made.close()


def private_bytes() -> int:
    """Memory that this process alone has, by the kernel."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def growth_by_reading(read: Callable[[int], bytes], count: int, answer: Any) -> None:
    before = private_bytes()
    for index in range(count):
        read(index)
    answer.put(private_bytes() - before)


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not say what is private"
)
def test_forked_workers_share_the_samples_in_memory(tmp_path: Path) -> None:
    """A list of as many objects is copied page by page, by counting references to them."""
    count = 8000
    blobs = [b"%8d" % index * 512 for index in range(count)]
    made = make_source("memory", blobs, tmp_path)
    fork = multiprocessing.get_context("fork")
    (shared,) = in_processes(fork, 1, growth_by_reading, made.read, count)
    (copied,) = in_processes(fork, 1, growth_by_reading, blobs.__getitem__, count)
    assert shared < 4 << 20
    assert copied > 16 << 20
    made.close()


@pytest.mark.timing
def test_a_store_has_the_latency_and_the_rate_it_is_given(tmp_path: Path) -> None:
    """1 MiB at 50 MiB a second behind 30 ms: 50 ms."""
    made = make_source("store", [os.urandom(1 << 20)], tmp_path, latency_ms=30, mib_per_s=50)
    made.read(0)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        made.read(0)
        took.append(time.perf_counter() - began)
    assert sorted(took)[2] == pytest.approx(0.05, rel=0.1)
    made.close()


def test_a_store_that_has_gone_is_an_error_with_its_sample(tmp_path: Path) -> None:
    made = make_source("store", BLOBS, tmp_path)
    made.read(5)
    copy = pickle.loads(pickle.dumps(made))
    made.close()
    for _ in range(2):
        with pytest.raises(MeasurementError, match=r"^store: sample 7: Connection\w+: .*[Rr]efused"):
            copy.read(7)


def test_an_answer_that_is_not_the_sample_is_an_error(tmp_path: Path) -> None:
    """Here a store that has other objects, by the same names."""
    made = make_source("store", BLOBS, tmp_path)
    other = SlowStore([b"other"], tmp_path, latency_ms=0, mib_per_s=100)
    made._port = other.port  # type: ignore[attr-defined]
    with pytest.raises(MeasurementError, match=r"^store: sample 0: 200 OK, 5 of 20 bytes$"):
        made.read(0)
    with pytest.raises(MeasurementError, match=r"^store: sample 7: 404 Not Found, 0 of 69 bytes$"):
        made.read(7)
    other.close()
    made.close()


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^source: 'disk' is none; accepted: memory, files, shards, store$"):
        make_source("disk", BLOBS, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["files", "shards", "store"])
def test_samples_that_cannot_be_kept_are_one_line_and_leave_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UsageError,
        match=r"^source: cannot keep samples in the folder for temporary files \(TMPDIR\): No such file or directory$",
    ):
        make_source(name, BLOBS, tmp_path / "nowhere")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=r"^source: cannot keep samples in .*: No space left on device$"):
        make_source(name, BLOBS, tmp_path)
    assert list(tmp_path.iterdir()) == []
