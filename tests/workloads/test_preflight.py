"""Whether workers would get what they need is known before they start, and said in one line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.workloads.preflight import HANDLES_MARGIN, MIB, Free, Needs, look, shortage

NEEDS = Needs(workers=4, prefetch=2, batch_bytes=10 * MIB, tensors=3, start="fork")
PLENTY = Free(shared_bytes=1 << 40, handles=1 << 20, memory_bytes=1 << 40)
ROOT = Path(__file__).parents[2]


def test_what_is_there_in_plenty_is_not_short() -> None:
    assert shortage(NEEDS, PLENTY) is None
    assert shortage(NEEDS, Free(shared_bytes=None, handles=None, memory_bytes=None)) is None


def test_shared_memory_for_every_batch_made_ahead_and_the_one_in_use() -> None:
    assert NEEDS.shared_bytes >= 9 * 10 * MIB
    assert shortage(NEEDS, replace(PLENTY, shared_bytes=NEEDS.shared_bytes)) is None
    said = shortage(NEEDS, replace(PLENTY, shared_bytes=64 * MIB))
    assert said is not None
    assert said.startswith(
        "4 workers with prefetch 2 may hold 94 MiB of batches in /dev/shm, and 64 MiB are free"
    )
    assert "--shm-size" in said
    assert "\n" not in said


def test_file_handles_of_workers_and_of_what_is_on_its_way() -> None:
    assert NEEDS.handles >= 9 * 3 + HANDLES_MARGIN
    said = shortage(NEEDS, replace(PLENTY, handles=NEEDS.handles - 1))
    assert said is not None
    assert f"may need {NEEDS.handles} file handles" in said
    assert "ulimit -n" in said
    assert shortage(NEEDS, replace(PLENTY, handles=-3)) == said.replace(f"{NEEDS.handles - 1} are", "0 are")


def test_memory_of_workers_that_import_torch_for_themselves() -> None:
    spawned = replace(NEEDS, start="spawn")
    assert spawned.memory_bytes > NEEDS.memory_bytes + 4 * 100 * MIB
    between = replace(PLENTY, memory_bytes=spawned.memory_bytes - 1)
    assert shortage(NEEDS, between) is None
    assert "started by spawn, may need" in (shortage(spawned, between) or "")


def test_without_workers_nothing_is_shared() -> None:
    assert shortage(replace(NEEDS, workers=0), Free(shared_bytes=0, handles=0, memory_bytes=0)) is None


def test_what_is_free_is_read_from_the_system(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert found.shared_bytes is not None
    assert found.shared_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert look(tmp_path / "none").shared_bytes is None
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    try:
        fewer = look(tmp_path).handles
    finally:
        for handle in opened:
            os.close(handle)
    assert found.handles is not None
    assert fewer == found.handles - 5


SMALL = """
import sys
from feeds import case_of, profile_of
from harness.backends import get_backend
from harness.errors import OverlapError
from harness.workloads import feed

if "on" not in sys.argv:
    feed.shortage = lambda needs, free: None
backend = get_backend("cpu")
profile = profile_of(pool=32, batches=2, image=256, crop=224, pictures=16)
try:
    workload = feed.FeedWorkload(case_of(workers=4, prefetch=8), profile, backend, timeout_s=5.0)
    try:
        workload.warm_up()
        workload.sample("compute")  # by now workers have made all they may
        workload.sample("transfer")
    finally:
        workload.close()
except OverlapError as error:
    print(type(error).__name__, error)
"""


def in_small_shared_memory(*words: str) -> str:
    """What the program says in a mount namespace of its own with 64 MB of /dev/shm."""
    inner = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner, "sh"]
    done = run([*own, sys.executable, "-c", SMALL, *words])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def namespaces() -> None:
    try:
        done = run(
            ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
        )
    except OSError as error:
        pytest.skip(f"no program to make a mount namespace: {error}")
    if done.returncode:
        pytest.skip(f"mount namespaces are not allowed here: {done.stderr.strip()}")


@pytest.mark.usefixtures("namespaces")
def test_a_case_that_does_not_fit_in_a_small_dev_shm_is_refused_before_a_worker_starts() -> None:
    said = in_small_shared_memory("on")
    assert said.startswith(
        "Skip 4 workers with prefetch 8 may hold 80 MiB of batches in /dev/shm, and 64 MiB are"
    )


@pytest.mark.usefixtures("namespaces")
def test_without_that_check_the_same_case_fails_in_the_middle() -> None:
    """It names what failed even so: a bus error or a full device, or a batch that never comes, by version of torch."""
    said = in_small_shared_memory("off")
    assert said.startswith("MeasurementError ")
    assert any(words in said for words in ("SIGBUS", "shared memory", "no batch for 5 s")), said
