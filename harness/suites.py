"""Suites: named axes that expand to cases. The one source of the grid for runs, asv and pytest.

A suite has two tiers: `quick` answers the question, `nightly` covers every value of every axis and contains
`quick`. The grid depends on the kind of device: what the cpu backend cannot do is listed where it belongs in the
2x2 table, so that people see it skipped with its reason, and nowhere else.
"""

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.case import Case, Family, Value, unique
from harness.errors import UsageError
from harness.families import DDP, FAMILIES, FEED, GIB, H2D, MIB
from harness.profiles import Profile

TIERS = ("quick", "nightly")
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
# Caps of DDP's buckets; 25 MiB is PyTorch's own.
CAPS = (MIB, 25 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB)
CPU_CAPS = (MIB, 2 * MIB, 8 * MIB)
# Processes that make batches; 0 is the one that computes.
WORKERS = (0, 1, 2, 4, 8, 12, 16)
FEWER = (0, 2, 4, 8, 16)  # where memory is pageable, which nobody should choose


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A named set of cases; `expand(profile, tier, ranks)` gives them in the order they are measured.

    ranks: how many processes a case of several has here.
    """

    name: str
    summary: str
    expand: Callable[[Profile, str, int], list[Case]]


def grid(family: Family, profile: Profile, **axes: Value | Sequence[Value]) -> list[Case]:
    """The product of the axes' values, the last axis fastest."""
    names = list(axes)
    lists = [[value] if isinstance(value, str | int | float) else list(value) for value in axes.values()]
    return [
        Case.of(family, **dict(zip(names, values, strict=True)), profile=profile.key_of(family.name))
        for values in itertools.product(*lists)
    ]


def table(profile: Profile, *, size: int, chunks: int) -> list[Case]:
    """The 2x2 table: what a loop sees, so ungated."""
    return grid(
        H2D, profile, memory=("pinned", "pageable"), stream=("side", "default"),
        chunks=chunks, size=size, ratio=1.0, gate="off",
    )  # fmt: skip


def _h2d(profile: Profile, tier: str, ranks: int) -> list[Case]:
    return _h2d_cpu(profile, tier, ranks) if profile.on_cpu else _h2d_cuda(profile, tier, ranks)


def _h2d_cuda(profile: Profile, tier: str, ranks: int) -> list[Case]:
    pinned = {"memory": "pinned", "stream": "side"}
    cases = table(profile, size=256 * MIB, chunks=8)
    # At 512 MiB the cost of a chunk is small beside its copy, so that the best case comes close to the bound.
    cases += grid(H2D, profile, **pinned, chunks=CHUNKS, size=512 * MIB, ratio=1.0, gate="on")
    if tier == "quick":
        return unique(cases)
    cases += grid(H2D, profile, **pinned, chunks=(1, 4, 16, 64), size=256 * MIB, ratio=1.0, gate="off")
    cases += grid(H2D, profile, **pinned, chunks=8, size=(64 * MIB, 256 * MIB, GIB), ratio=1.0, gate="on")
    cases += grid(H2D, profile, **pinned, chunks=1, size=64 * MIB, ratio=1.0, gate="on")
    cases += grid(
        H2D, profile, **pinned, chunks=8, ratio=1.0, gate="off",
        size=(MIB, 16 * MIB, 64 * MIB, 512 * MIB),
    )  # fmt: skip
    cases += grid(H2D, profile, **pinned, chunks=8, size=256 * MIB, ratio=(0.25, 0.5, 2.0, 4.0), gate="on")
    for gate, chunks in (("on", (2, 8, 32)), ("off", (8,))):
        cases += grid(
            H2D, profile, **pinned, chunks=chunks, size=256 * MIB, ratio=1.0, gate=gate, issue="copies-first"
        )
    cases += grid(
        H2D, profile, memory="pinned", stream="default", chunks=8, size=256 * MIB, ratio=1.0, gate="on"
    )
    # What a pageable copy costs depends on the size of a chunk, and no two sizes hide the same share.
    pageable: tuple[dict[str, Value | Sequence[Value]], ...] = (
        {"stream": "side", "chunks": (1, 4, 8, 16), "size": 64 * MIB},
        {"stream": ("side", "default"), "chunks": 4, "size": (MIB, 16 * MIB)},
    )
    for axes in pageable:
        cases += grid(H2D, profile, memory="pageable", **axes, ratio=1.0, gate="off")
    # All GPUs of the host at once, each beside the same case of one above.
    for gate in ("on", "off"):
        cases += grid(H2D, profile, **pinned, chunks=8, size=256 * MIB, ratio=1.0, gate=gate, ranks=ranks)
    return unique(cases)


def _h2d_cpu(profile: Profile, tier: str, ranks: int) -> list[Case]:
    pageable = {"memory": "pageable", "stream": "side"}
    cases = table(profile, size=128 * MIB, chunks=8)
    cases += grid(H2D, profile, **pageable, chunks=(1, 2, 4, 8), size=128 * MIB, ratio=1.0, gate="on")
    if tier == "quick":
        return unique(cases)
    cases += grid(H2D, profile, **pageable, chunks=(16, 32, 64), size=128 * MIB, ratio=1.0, gate="on")
    cases += grid(H2D, profile, **pageable, chunks=(1, 8), size=(16 * MIB, 64 * MIB), ratio=1.0, gate="off")
    cases += grid(H2D, profile, **pageable, chunks=8, size=128 * MIB, ratio=(0.5, 2.0), gate="off")
    cases += grid(
        H2D, profile, **pageable, chunks=8, size=128 * MIB, ratio=1.0, gate="off", issue="copies-first"
    )
    cases += grid(H2D, profile, **pageable, chunks=8, size=128 * MIB, ratio=1.0, gate="on", ranks=ranks)
    return unique(cases)


def _ddp(profile: Profile, tier: str, ranks: int) -> list[Case]:
    on_cpu = profile.on_cpu
    usual: dict[str, Value] = {
        "model": "blocks", "gradients": "fp32" if on_cpu else "bf16",
        "ranks": ranks, "backend": "gloo" if on_cpu else "nccl",
    }  # fmt: skip
    # On a cpu the model is small, and so are its buckets. Twice as many tokens from one count to the
    # next: with steps of four the interpolated threshold was seen 70 % off on a model machine (harness/threshold.py).
    tokens, caps = ((32, 64, 128, 256, 512), CPU_CAPS) if on_cpu else ((512, 1024, 2048, 4096, 8192), CAPS)
    few, cap = tokens[::2], caps[1]

    def cases(**axes: Value | Sequence[Value]) -> list[Case]:
        given: dict[str, Value | Sequence[Value]] = {"bucket": cap, "tokens": few[1]}
        return grid(DDP, profile, **usual | given | axes)

    if tier == "quick":
        return unique(cases(bucket=caps[1:]) if on_cpu else cases(tokens=tokens) + cases(bucket=caps[1:4]))
    found = cases(tokens=tokens) + cases(bucket=caps, tokens=few)
    found += cases(model="embedding", tokens=few)
    found += cases(gradients="bf16" if on_cpu else "fp32", tokens=few[:1] if on_cpu else few)
    found += cases(first=cap)
    found += cases(option=("static-graph", "bucket-view", "compile"))
    if not on_cpu:
        found += cases(connections=(1, 32))
    return unique(found)


def _feed(profile: Profile, tier: str, ranks: int) -> list[Case]:
    usual: dict[str, Value] = {
        "data": "jpeg", "source": "memory", "memory": "pageable" if profile.on_cpu else "pinned",
    }  # fmt: skip

    def cases(**axes: Value | Sequence[Value]) -> list[Case]:
        return grid(FEED, profile, **usual | axes)

    if profile.on_cpu:
        # Each case takes seconds of its own for its workers' start; more of them than cores only take turns.
        found = cases(workers=(0, 2)) + cases(data="text", workers=2)
        if tier == "nightly":
            found += cases(workers=(1, 4)) + cases(data="text", workers=(0, 1))
            found += cases(source=("files", "shards", "store"), workers=2)
            found += cases(data="text", batching=("bucketing", "packing"), workers=2)
            found += (
                cases(workers=2, prefetch=4)
                + cases(workers=2, persistent="off")
                + cases(workers=2, start="spawn")
            )
        return unique(found)
    found = cases(workers=(0, 2, 8))
    if tier == "nightly":
        for data in ("jpeg", "text"):
            found += cases(data=data, workers=WORKERS) + cases(data=data, memory="pageable", workers=FEWER)
        found += cases(source=("files", "shards", "store"), workers=8)
        found += cases(data="text", batching=("bucketing", "packing"), workers=8)
        found += cases(workers=8, prefetch=4) + cases(workers=8, persistent="off")
        found += cases(workers=8, start=("spawn", "forkserver"))
    return unique(found)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(name="h2d", summary=H2D.summary, expand=_h2d),
        Suite(name="ddp", summary=DDP.summary, expand=_ddp),
        Suite(name="feed", summary=FEED.summary, expand=_feed),
    )
}


def select(
    names: Iterable[str], tier: str, profile: Profile, patterns: Iterable[str] = (), ranks: int = 2
) -> list[Case]:
    """The cases of the named suites (all of them for none) in `tier`, kept where a pattern matches.

    A pattern is a whole case key, or a glob over keys in which `[` is literal: `*chunks=8*`. A whole key need not
    be in the suite. UsageError for an unknown suite or tier, a wrong key, or a pattern that matches nothing.
    """
    if tier not in TIERS:
        raise UsageError(f"tier: got {tier!r}, want {' or '.join(TIERS)}")
    names = list(names) or list(SUITES)
    for name in names:
        if name not in SUITES:
            raise UsageError(f"suite: got {name!r}, want one of {', '.join(SUITES)}")
    listed = unique(case for name in names for case in SUITES[name].expand(profile, tier, ranks))
    patterns = list(patterns)
    if not patterns:
        return listed
    kept: list[Case] = []
    for pattern in patterns:
        matching = [case for case in listed if matches(pattern, case.key)]
        if not matching and "=" in pattern and not any(mark in pattern for mark in "*?"):
            matching = [Case.parse(_with_profile(pattern, profile), FAMILIES)]
        if not matching:
            raise UsageError(
                f"case: got {pattern!r}, which matches none of the {len(listed)} cases of "
                f"{', '.join(names)} ({tier}); `overlap list` shows them"
            )
        kept += matching
    return unique(kept)


def matches(pattern: str, key: str) -> bool:
    """Whether the pattern is this key, with or without its profile, or a glob in which `[` is literal."""
    return pattern == without_profile(key) or fnmatch.fnmatchcase(key, pattern.replace("[", "[[]"))


def without_profile(key: str) -> str:
    """The key as people may type it: the same work by whatever profile."""
    return re.sub(r",profile=[^,\]]*", "", key)


def _with_profile(key: str, profile: Profile) -> str:
    """`key` with this profile where it names none: people need not type the hash."""
    family = key.partition("[")[0]
    if "profile=" in key or not key.endswith("]") or family not in FAMILIES:
        return key
    return f"{key[:-1]},profile={profile.key_of(family)}]"
