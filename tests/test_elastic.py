"""Ranks that torchrun, or another starter, has started on several hosts: one record, and one reason for what fails."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launching import HERE, ROOT, key, told, within

from harness import board, elastic, following, record
from harness.board import Board, Now
from harness.errors import MeasurementError, UsageError
from harness.record import MEASURED
from harness.torchrun import Role

RUN = [
    "run",
    "--device",
    "cpu",
    "--no-controls",
    "--target",
    "0.2",
    "--machine",
    "here",
    "--results",
    "results",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# Two hosts.

# What Slurm provides, for two hosts that are network namespaces of this one; $NETWORK is `namespaces` or `loopback`.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
if [ "$NETWORK" = loopback ]; then
    SLURM_NODEID=1 "$@" & other=$!
    SLURM_NODEID=0 "$@"; code=$?
else
    hostname first; ip link set lo up
    unshare --net --uts sleep 100 & second=$!
    while [ "$(readlink /proc/$second/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
    ip link add veth0 type veth peer name veth1 netns $second
    ip addr add 10.9.0.1/24 dev veth0; ip link set veth0 up
    there="nsenter --target $second --net --uts"
    $there sh -c 'hostname second; ip link set lo up; ip addr add 10.9.0.2/24 dev veth1; ip link set veth1 up'
    SLURM_NODEID=1 GLOO_SOCKET_IFNAME=veth1 $there "$@" & other=$!
    SLURM_NODEID=0 GLOO_SOCKET_IFNAME=veth0 "$@"; code=$?
fi
wait $other || code=$((code + 100))
[ -z "$second" ] || kill $second
exit $code
"""
# `-m harness` with the ranks of tests/faulty_ranks.py.
TORCHRUN = """#!/bin/sh
for word in "$@"; do
    shift
    case $word in
        -m) ;;
        harness) set -- "$@" "$STAND_IN" "$FAULTS" ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec "$PYTHON" -m torch.distributed.run "$@"
"""
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--uts"]
CAN = f"{' '.join(NAMESPACES)} sh -c 'ip link add veth0 type veth peer name veth1 && hostname first'"


def has_namespaces() -> bool:
    done = subprocess.run(["sh", "-c", CAN], capture_output=True, check=False)
    return done.returncode == 0 and shutil.which("nsenter") is not None


def test_two_hosts_of_a_slurm_job_write_one_record(tmp_path):
    """By the script that README names, each host with a torchrun, an address and a name of its own where this machine
    lets them be made."""
    apart = has_namespaces()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("torchrun", TORCHRUN),
        ("scontrol", f"#!/bin/sh\necho {'10.9.0.1' if apart else 'localhost'}\necho other\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    log = tmp_path / "log"
    faults = told(log, {f"{key(2, 2)} 1": "null_pointer"}, ROLL_CALL_S=5.0)
    environment = {
        "NETWORK": "namespaces" if apart else "loopback", "PYTHON": sys.executable, "FAULTS": faults,
        "STAND_IN": str(HERE / "elastic_overlap.py"), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "2", "RANKS_PER_NODE": "1",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [*(NAMESPACES if apart else []), "bash", str(ROOT / "benchmarks" / "ddp.sbatch"), *RUN[1:], "--case", key(2, 1),
         "--case", key(2, 2)],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    assert within(2, log), "a rank was left behind"
    # The whole job fails, as a case did (4, which torchrun makes 1); the other host's torchrun may see the first go.
    assert done.returncode in (1, 101), done.stderr
    (path,) = tmp_path.glob("results/records/here/*.json")
    kept = record.read(path)
    good, bad = kept.cases
    assert (good.status in MEASURED, bad.status) == (True, "error")
    (launch,) = good.launches
    assert [rank.rounds[0].arms["overlapped"] for rank in launch.ranks] == [5.0, 5.05]
    hosts = ["first", "second"] if apart else [socket.gethostname()] * 2
    assert [rank.host for rank in launch.ranks] == hosts
    assert bad.reason == f"rank 1 on {hosts[1]} was killed by SIGSEGV"
    assert kept.run.finished


# Ranks that a starter without torchrun's own store started.


def overlap(
    folder: Path, port: int, rank: int, size: int, faults: str, *cases: str
) -> "subprocess.Popen[str]":
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(HERE / "elastic_overlap.py"), faults, *RUN, *(w for c in cases for w in ("--case", c))],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in place.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def test_a_rank_that_never_comes_is_named_and_the_cases_of_one_process_are_kept(tmp_path):
    log, port = tmp_path / "log", free_port()
    alone = "h2d[memory=pageable,stream=side,chunks=1,size=1MiB,ratio=1,gate=off]"
    faults = told(log, {}, JOIN_S=6.0)
    ranks = [overlap(tmp_path, port, rank, 3, faults, key(3, 1), alone) for rank in range(2)]
    try:
        ended = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [4, 0], ended
    assert within(2, log), "a rank was left behind"
    (path,) = tmp_path.glob("results/records/here/*.json")
    lost, kept = sorted(record.read(path).cases, key=lambda case: case.family)
    assert (lost.status, lost.reason) == ("error", "rank 2 of 3 did not come within 6 s")
    assert kept.status in MEASURED


def test_a_port_in_use_is_refused_before_anything_is_written(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = overlap(tmp_path, port, 0, 2, told(tmp_path / "log", {}), key(2, 1))
        out, err = rank.communicate(timeout=60)
    words = f"MASTER_PORT {port} is in use on {socket.gethostname()}; choose another"
    assert (rank.returncode, out, err) == (2, "", f"overlap: torchrun: {words}\n")
    assert list(tmp_path.iterdir()) == []


def test_without_torchrun_nothing_is_started_or_said(monkeypatch, capfd):
    monkeypatch.setattr(elastic, "Process", lambda *_, **__: pytest.fail("started a process"))
    with elastic.leading(None) as led:
        assert led is None
    assert tuple(capfd.readouterr()) == ("", "")


# What is said on the board, in one process.


@pytest.fixture
def role() -> Iterator[Role]:
    """Rank 1 of two, on a host of its own, where there is a store."""
    kept = board.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield Role(
        rank=1, size=2, local_rank=0, local_size=1, address="localhost", port=kept.port, agent_store=True
    )
    del kept


def test_what_is_said_is_read_and_a_first_reason_stands(role):
    said = Board.reach(role)
    assert (said.get("nothing"), said.now(), said.told("m", 1)) == (None, Now(), None)
    said.announce(Now(meeting="m", environment={"A": "1"}))
    said.tell("m", 1, "first")
    said.tell("m", 1, "second")
    assert said.now() == Now(meeting="m", environment={"A": "1"})
    assert (said.told("m", 1), said.told("m", 0), said.told("other", 1)) == ("first", None, None)
    assert (said.has(["now", "m/lost/1"]), said.has(["now", "m/lost/0"])) == (True, False)
    # What is left of an attempt that torchrun has given up says nothing in the next one.
    later = Board.reach(Role(**{**vars_of(role), "attempt": 1}))
    assert later.now() == Now()


def vars_of(role: Role) -> dict[str, object]:
    return {name: getattr(role, name) for name in role.__dataclass_fields__}


def test_a_rank_follows_job_after_job_in_the_environment_of_each_until_all_is_over(
    role, monkeypatch, tmp_path
):
    """The second job's process fails, and why is told; the third hangs and is ended with the meeting."""
    programs = {
        "one": "",
        "two": "import os; os.kill(os.getpid(), 11)",
        "three": "import time; time.sleep(60)",
    }
    note = tmp_path / "note"

    def module(name: str, events: int) -> list[str]:
        start = f"import os, sys; print(sys.argv[-1], os.environ.get('A'), file=open({str(note)!r}, 'a'));"
        choose = f"exec({programs!r}[sys.argv[-1]])"
        return [sys.executable, "-I", "-S", "-c", start + choose, name, str(events)]

    monkeypatch.setattr(following, "module", module)
    monkeypatch.setattr(following, "POLL_S", 0.02)
    said = Board.reach(role)
    follower = threading.Thread(target=following.follow, args=(role,))
    follower.start()

    def until(condition) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    lines = lambda: note.read_text().splitlines() if note.exists() else []  # noqa: E731
    said.announce(Now(meeting="one", environment={"A": "1"}))
    until(lambda: len(lines()) == 1)
    said.announce(Now(meeting="two", environment={"A": "2"}))
    until(lambda: said.told("two", 1))
    said.announce(Now(meeting="three"))
    until(lambda: len(lines()) == 3)
    said.set("three/over", True)
    until(lambda: said.told("three", 1))
    said.announce(Now(over=True))
    follower.join(20)
    assert not follower.is_alive()
    assert lines() == ["one 1", "two 2", "three None"]
    here = f"rank 1 on {socket.gethostname()}"
    assert [said.told(name, 1) for name in programs] == [
        None,
        f"{here} was killed by SIGSEGV",
        f"{here} was left behind",
    ]
    assert said.add("left", 0) == 1


def test_a_run_that_gives_no_sign_of_life_is_given_up(role, monkeypatch):
    monkeypatch.setattr(following, "LOST_S", 0.3)
    monkeypatch.setattr(following, "POLL_S", 0.02)
    beating = Board.reach(role)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            beating.add("beat", 1)

    heart = threading.Thread(target=beat)
    heart.start()
    threading.Timer(0.6, stop.set).start()
    began = time.monotonic()
    with pytest.raises(MeasurementError, match=r"^rank 0 gave no sign of life for 0\.3 s$"):
        following.follow(role)
    heart.join()
    assert time.monotonic() - began > 0.8


def test_a_store_that_is_gone_is_the_end_of_it():
    kept = board.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    role = Role(rank=1, size=2, local_rank=0, local_size=2, address="localhost", port=kept.port)
    said = Board.reach(role)
    del kept
    with pytest.raises(MeasurementError, match=r"^rank 0 is gone: its store does not answer$"):
        said.now()
    with pytest.raises(
        MeasurementError, match=r"^rank 1 cannot reach rank 0 at localhost, port \d+, within 0\.2 s$"
    ):
        Board.reach(role, limit_s=0.2)


def test_a_board_that_ends_at_once_is_told(monkeypatch):
    monkeypatch.setattr(
        elastic, "module", lambda name, events: [sys.executable, "-c", "raise SystemExit('no torch')"]
    )
    role = Role(rank=0, size=2, local_rank=0, local_size=2, address="localhost", port=1)
    words = "torchrun: the board of the ranks ended with exit code 1: no torch"
    with pytest.raises(UsageError, match=words), elastic.leading(role):
        pass
