"""Real ranks that meet by Gloo, and what one of them says when another does not come."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness import board, child, ranks, torchrun
from harness.errors import MeasurementError
from harness.ranks import Lost, TorchGroup

ADDRESS = "localhost"


@pytest.fixture
def store():
    """The port of a store such as torchrun keeps."""
    kept = board.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    yield kept.port
    del kept


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def group_of(code: str, size: int, port: int) -> list[str]:
    """What each of `size` ranks prints, which have `group` and run `code`; their errors are printed as one line."""
    program = f"""
import sys, time
from harness import ranks
from harness.ranks import TorchGroup
ranks.MEET_S, ranks.ROLL_CALL_S = 2.0, 0.5
group = TorchGroup.join()
try:
{code}
except Exception as error:
    print(type(error).__name__, "|", group.lost(error))
    group.tell("", mine=False)
    sys.stdout.flush()
    import os; os._exit(0)
group.close()
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=child.environment() | variables(rank, size, port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_ranks_share_meet_and_reduce_and_one_that_is_lost_is_named_with_what_it_said(store):
    code = """
    import json, os, torch.distributed as dist, torch
    print(json.dumps(group.share({"rank": group.rank, "of": group.size, "host": group.host})))
    print(group.share(None), group.share("x" * 10000 if group.rank else "") == ["", "x" * 10000])
    time.sleep(0.3 * group.rank)  # the one that is early waits for the other
    group.meet()
    print(time.monotonic())
    data = group.process_group("gloo")
    assert data is group.process_group("gloo") and data is not dist.group.WORLD
    ones = torch.ones(3)
    dist.all_reduce(ones, group=data)
    print(ones.tolist(), group.device)
    group.use("cpu")
    if group.rank == 1:
        group.tell("rank 1: RuntimeError: no space", mine=True)
        sys.stdout.flush()
        os._exit(0)
    dist.all_reduce(torch.ones(1), group=data)
"""
    said = [text.splitlines() for text in group_of(code, 2, store)]
    host = socket.gethostname()
    assert json.loads(said[0][0]) == [{"rank": rank, "of": 2, "host": host} for rank in range(2)]
    assert said[0][:2] == said[1][:2]
    assert said[0][1] == "[None, None] True"
    assert abs(float(said[0][2]) - float(said[1][2])) < 0.1
    assert [lines[3] for lines in said] == ["[2.0, 2.0, 2.0] cpu"] * 2
    assert [lines[4:] for lines in said] == [["RuntimeError | rank 1: RuntimeError: no space"], []]
    role = torchrun.role(variables(0, 2, store))
    assert role is not None
    left = board.Board.reach(role)
    assert left.get("0/over"), "a rank that hangs on another host would be left there"
    assert left.told("0", 0) is None, "a rank that was let down by another has no reason of its own"


def test_the_rank_that_does_not_come_is_named(store):
    """And not rank 1, which waits as rank 0 does."""
    code = """
    group.share(0)
    if group.rank == 2:
        time.sleep(4)
        raise SystemExit
    group.meet()
"""
    first, _, last = group_of(code, 3, store)
    assert (first, last) == ("Lost | rank 2 did not come within 2 s\n", "")


def test_ranks_that_never_come_are_named_within_the_limit(store, monkeypatch):
    for name, value in variables(1, 4, store).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "JOIN_S", 0.5)
    began = time.monotonic()
    with pytest.raises(Lost, match=r"^rank 0, rank 2 and rank 3 of 4 did not come within 0\.5 s$"):
        TorchGroup.join()
    assert time.monotonic() - began < 3


def test_ranks_of_starts_that_count_otherwise_are_named(store, monkeypatch):
    for name, value in variables(0, 2, store).items():
        monkeypatch.setenv(name, value)
    role = torchrun.role()
    assert role is not None
    board.Board.reach(role).set("0/here/1", ["there", 3])
    with pytest.raises(MeasurementError, match="rank 1 was started as one of 3, rank 0 as one of 2"):
        TorchGroup.join()


def test_a_rank_whose_end_is_known_is_not_waited_for(store, monkeypatch):
    for name, value in variables(0, 2, store).items():
        monkeypatch.setenv(name, value)
    role = torchrun.role()
    assert role is not None
    reached = board.Board.reach(role)
    reached.tell("0", 1, "rank 1 was killed by SIGSEGV")
    reached.tell("0", 1, "and said something else later")
    began = time.monotonic()
    with pytest.raises(Lost, match=r"^rank 1 was killed by SIGSEGV$"):
        TorchGroup(role, reached, "0")
    assert time.monotonic() - began < 5


def test_a_group_without_torchrun_is_refused(monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeasurementError, match="MASTER_PORT: not set; start with torchrun"):
        TorchGroup.join()


class Alike(TorchGroup):
    """Rank 0 of two; `theirs` is what rank 1 shares."""

    def __init__(self, theirs: list[object], hosts: list[str]) -> None:
        self.rank, self.size, self.host = 0, 2, hosts[0]
        self.device = torch.device("cpu")
        self._role = torchrun.Role(
            rank=0, size=2, local_rank=3, local_size=1 if len(set(hosts)) > 1 else 2, address=ADDRESS, port=1
        )
        self._hosts, self._theirs = hosts, theirs

    def share(self, value):
        return [value, self._theirs.pop(0) if self._theirs else value]


@pytest.fixture
def gpus(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    return taken


def test_a_rank_takes_the_next_gpu_of_its_host(gpus):
    group = Alike([2], ["a", "a"])
    group.use("cuda")
    assert group.device == torch.device("cuda", 1)
    assert gpus == [group.device]


def test_a_rank_without_a_gpu_and_unequal_hosts_are_refused_by_name(gpus):
    with pytest.raises(MeasurementError, match=r"^rank 1 on b has no GPU; start it where there is one$"):
        Alike([0], ["a", "b"]).use("cuda")
    with pytest.raises(MeasurementError, match=r"^rank 1 has no GPU"):
        Alike([0], ["a", "a"]).use("cuda")
    facts = {"overlap": "0.1.0", "method": 1, "torch": torch.__version__, "device": "H100"}
    with pytest.raises(
        MeasurementError, match=r"^unequal hosts: device is H200 for rank 0 on a, H100 for rank 1 on b$"
    ):
        Alike([2, facts], ["a", "b"]).use("cuda")


def test_the_watchdog_of_nccl_ends_a_rank_before_its_silence_ends_the_worker(store):
    code = """
    import os
    group.process_group("gloo")
    print(os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"], os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"])
"""
    (said,) = group_of(code, 1, store)
    dumps, dump_ms = map(int, said.split())
    assert not dumps, "files would be left behind"
    assert ranks.MEET_S + 4 * dump_ms * 1e-3 + 30 < child.CASE_S


@pytest.mark.gpu
def test_a_rank_opens_its_gpu_and_reduces_by_nccl():
    """At world size 1, as one GPU allows."""
    kept = board.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    code = """
    import torch, torch.distributed as dist
    group.use("cuda")
    ones = torch.ones(4, device=group.device)
    dist.all_reduce(ones, group=group.process_group("nccl"))
    print(ones.tolist(), group.device, torch.cuda.current_device())
"""
    assert group_of(code, 1, kept.port) == ["[1.0, 1.0, 1.0, 1.0] cuda:0 0\n"]


# Whose fault an error is.


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        RuntimeError("CUDA out of memory"),
        ValueError("timed out"),
        MeasurementError("gate timed out"),
    ],
)
def test_an_error_of_this_rank_is_nobody_elses(error):
    assert Alike([], ["a", "a"]).lost(error) is None


def test_a_rank_ends_here_where_the_process_that_started_it_is_gone(tmp_path):
    """It need not have seen it end: as where it was killed while this one was being started."""
    marker = tmp_path / "torch"
    fake = tmp_path / "torch.py"
    fake.write_text(f"open({str(marker)!r}, 'w'); raise SystemExit(9)")
    arguments = [sys.executable, "-P", "-m", "harness.ranks", "1", "1", "0"]
    root = Path(ranks.__file__).parent.parent
    done = subprocess.run(
        arguments, env=dict(os.environ, PYTHONPATH=f"{root}{os.pathsep}{tmp_path}"), check=False, timeout=30
    )
    assert done.returncode == -9
    assert not marker.exists(), "torch, which takes seconds, was imported before"
