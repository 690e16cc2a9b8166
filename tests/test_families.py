import pytest

from harness.case import Case
from harness.families import DDP, FAMILIES, GIB, H2D, KIB, MIB

PROFILES = (("h200.1a2b", "cpu-2_x"), ("", "a b", "a,b", "a=b", "a]", "ä", "a\n", "../a/b"))

# Edges of every axis of every family: accepted, and refused. A widened axis must be widened here too.
EDGES = {
    "h2d": {
        "memory": (("pinned", "pageable"), ("", "PINNED", "managed", 1)),
        "stream": (("side", "default"), ("", "both")),
        "chunks": ((1, 64), (0, -1, 65, 8.0, True, "8")),
        "size": ((MIB, MIB + 1, GIB), (MIB - 1, GIB + 1, 0, 2.0**20)),
        "ratio": ((0.125, 1, 8.0), (0.0, 0.1249, 8.001, float("nan"), float("inf"), "1")),
        "gate": (("on", "off"), (True, "yes")),
        "issue": (("alternate", "copies-first"), ("copies_first",)),
        "ranks": ((1, 2, 4096), (0, 4097, 2.0)),
        "profile": PROFILES,
    },
    "ddp": {
        "model": (("blocks", "embedding"), ("", "block")),
        "bucket": ((64 * KIB, 25 * MIB, 512 * MIB), (0, 64 * KIB - 1, 512 * MIB + 1, 2.0**20)),
        "tokens": ((1, 1 << 20), (0, (1 << 20) + 1, 8.0, "8")),
        "gradients": (("bf16", "fp32"), ("float32", "fp16")),
        "ranks": ((1, 4096), (0, 4097, 2.0)),
        "backend": (("nccl", "gloo"), ("mpi", "NCCL")),
        "first": ((64 * KIB, MIB, 512 * MIB), (0, 512 * MIB + 1)),
        "option": (("plain", "static-graph", "bucket-view", "compile"), ("", "static_graph")),
        "connections": ((1, 8, 32), (0, 33)),
        "profile": PROFILES,
    },
    "feed": {
        "data": (("jpeg", "text"), ("", "png")),
        "source": (("memory", "files", "shards", "store"), ("", "s3")),
        "workers": ((0, 1, 16, 1024), (-1, 1025, 2.0, "2")),
        "memory": (("pinned", "pageable"), ("", "managed")),
        "prefetch": ((1, 2, 64), (0, 65, 2.0)),
        "persistent": (("on", "off"), ("", True)),
        "start": (("fork", "spawn", "forkserver"), ("", "thread")),
        "batching": (("padding", "bucketing", "packing"), ("", "none")),
        "profile": PROFILES,
    },
}

H2D_PARAMS = {
    "memory": "pinned", "stream": "side", "chunks": 8, "size": 256 * MIB, "ratio": 1.0, "gate": "on",
    "issue": "alternate", "profile": "h200.1a2b",
}  # fmt: skip


def test_families_are_known_by_their_own_name():
    assert {name: family.name for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    assert EDGES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_axes_have_names_of_their_own_and_say_what_they_accept(family):
    names = [axis.name for axis in family.axes]
    assert len(set(names)) == len(names)
    assert all(axis.accepts for axis in family.axes)
    assert family.summary


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_edges_of_every_axis(family):
    edges = EDGES[family.name]
    assert list(edges) == [axis.name for axis in family.axes]
    for axis in family.axes:
        good, bad = edges[axis.name]
        assert [value for value in good if not axis.check(value)] == []
        assert [value for value in bad if axis.check(value) and not isinstance(value, bool)] == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_default_is_a_value_of_its_axis_and_the_axes_of_the_first_version_have_none(family):
    """An axis with a default is left out of keys; taking the default away, or changing it, renames old cases."""
    assert all(axis.check(axis.default) for axis in family.axes if axis.default is not None)
    assert {axis.name: axis.default for axis in H2D.axes if axis.default is not None} == {
        "issue": "alternate",
        "ranks": 1,
    }


def test_an_h2d_case_is_of_one_process_unless_its_key_says_how_many():
    one = Case.of(H2D, **H2D_PARAMS)
    assert (one.ranks, "ranks" in one.key) == (None, False)
    two = one.replace(ranks=2)
    assert two.ranks == 2
    assert two.key == one.key.replace(",profile", ",ranks=2,profile")
    assert Case.parse(two.key, FAMILIES) == two


def test_ddp_keys_leave_out_what_is_usual():
    """PyTorch's first bucket, no option, and the connections that CUDA has by default."""
    key = "ddp[model=blocks,bucket=25MiB,tokens=2048,gradients=bf16,ranks=2,backend=nccl,profile=h200.1a2b]"
    usual = Case.parse(key, FAMILIES)
    assert (usual.key, usual.ranks) == (key, 2)
    assert (usual["first"], usual["option"], usual["connections"]) == (MIB, "plain", 8)
    other = usual.replace(first=25 * MIB, option="bucket-view", connections=1)
    assert other.key == key.replace(",profile", ",first=25MiB,option=bucket-view,connections=1,profile")
    assert Case.parse(other.key, {"ddp": DDP}) == other


def test_feed_keys_leave_out_what_a_loader_does_by_itself():
    key = "feed[data=jpeg,source=memory,workers=8,memory=pinned,profile=h200.1a2b]"
    usual = Case.parse(key, FAMILIES)
    assert (usual.key, usual.ranks) == (key, None)
    assert (usual["prefetch"], usual["persistent"], usual["start"]) == (2, "on", "fork")
    other = usual.replace(prefetch=4, start="spawn", batching="packing")
    assert other.key == key.replace(",profile", ",prefetch=4,start=spawn,batching=packing,profile")


def test_h2d_keys_write_the_axes_in_the_fixed_order():
    key = "h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on,profile=h200.1a2b]"
    assert Case.of(H2D, **H2D_PARAMS).key == key
