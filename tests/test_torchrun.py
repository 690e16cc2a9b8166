"""What is made of torchrun's variables."""

import socket

import pytest

from harness import torchrun
from harness.errors import UsageError
from harness.torchrun import Role

GIVEN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}  # fmt: skip
BY_TORCHRUN = GIVEN | {
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
ROLE = Role(rank=5, size=8, local_rank=1, local_size=4, address="node0", port=29500)


def test_a_process_that_torchrun_started_knows_its_place():
    assert torchrun.role(GIVEN) == ROLE
    assert torchrun.role(BY_TORCHRUN) == Role(
        rank=5, size=8, local_rank=1, local_size=4, address="node0", port=29500, agent_store=True, attempt=2
    )


def test_what_a_starter_leaves_out_is_as_on_one_host():
    found = torchrun.role(
        {name: GIVEN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    )
    assert found == Role(rank=5, size=8, local_rank=5, local_size=8, address="node0", port=29500)


@pytest.mark.parametrize(
    "given", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, GIVEN | {"RANK": "0", "WORLD_SIZE": "1"}]
)
def test_a_process_that_nobody_gave_a_place_is_alone(given):
    """The last as a job manager sets it in a container for a launcher that is to be started there."""
    given.pop("LOCAL_WORLD_SIZE", None)
    assert torchrun.role(given) is None


def test_one_rank_of_torchruns_is_a_rank():
    given = (
        BY_TORCHRUN
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        | {"RANK": "0", "LOCAL_RANK": "0"}
    )
    found = torchrun.role(given)
    assert found is not None
    assert (found.rank, found.size) == (0, 1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "8", "a number from 0 to 7"),
        ("RANK", "-1", "a number from 0 to 7"),
        ("WORLD_SIZE", "many", "a number from 1"),
        ("LOCAL_RANK", "4", "a number from 0 to 3"),
        ("LOCAL_WORLD_SIZE", "9", "a number from 1 to 8"),
        ("MASTER_PORT", "70000", "a number from 1 to 65535"),
    ],
)
def test_values_that_make_no_sense_are_refused(name, value, words):
    with pytest.raises(UsageError, match=f"^{name}: got '{value}', want {words}.*; start with torchrun$"):
        torchrun.role(GIVEN | {name: value})


def test_half_of_torchruns_variables_are_refused():
    with pytest.raises(UsageError, match=r"^MASTER_ADDR: not set"):
        torchrun.role(BY_TORCHRUN | {"MASTER_ADDR": ""})


def test_a_rank_is_told_of_with_its_host_where_there_are_several():
    assert (ROLE.name("b"), ROLE.name("a", 0), ROLE.name("")) == ("rank 5 on b", "rank 0 on a", "rank 5")
    assert Role(rank=0, size=2, local_rank=0, local_size=2, address="a", port=1).name("a", 1) == "rank 1"


def test_a_host_that_nobody_knows_is_refused_at_once(monkeypatch):
    told = torchrun.role({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    assert told is not None
    torchrun.check(told)

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(torchrun.socket, "getaddrinfo", unknown)
    with pytest.raises(
        UsageError, match=r"MASTER_ADDR: got 'localhost', which this host cannot find: Name or"
    ):
        torchrun.check(told)
