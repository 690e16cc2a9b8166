"""The families of cases and their axes. An axis added to a family later gets a default, so old keys live on."""

from harness.case import Choice, Family, Integer, Number, Size, Text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

H2D = Family(
    name="h2d",
    summary="host-to-device copy of a batch in chunks beside the GEMMs that read it",
    axes=(
        Choice(name="memory", values=("pinned", "pageable")),
        Choice(name="stream", values=("side", "default")),
        Integer(name="chunks", low=1, high=64),
        Size(name="size", low=MIB, high=GIB),
        Number(name="ratio", low=0.125, high=8.0),
        Choice(name="gate", values=("on", "off")),
        Choice(name="issue", values=("alternate", "copies-first"), default="alternate"),
        Integer(name="ranks", low=1, high=4096, default=1),
        Text(name="profile"),
    ),
)

DDP = Family(
    name="ddp",
    summary="gradients all-reduced in buckets by DistributedDataParallel beside the backward that makes them",
    axes=(
        Choice(name="model", values=("blocks", "embedding")),
        Size(name="bucket", low=64 * KIB, high=512 * MIB),
        Integer(name="tokens", low=1, high=1 << 20),
        Choice(name="gradients", values=("bf16", "fp32")),
        Integer(name="ranks", low=1, high=4096),
        Choice(name="backend", values=("nccl", "gloo")),
        Size(name="first", low=64 * KIB, high=512 * MIB, default=MIB),
        Choice(name="option", values=("plain", "static-graph", "bucket-view", "compile"), default="plain"),
        Integer(name="connections", low=1, high=32, default=8),
        Text(name="profile"),
    ),
    grouped=True,
)

FEED = Family(
    name="feed",
    summary="batches read, decoded and collated by DataLoader workers beside the steps that use them",
    axes=(
        Choice(name="data", values=("jpeg", "text")),
        Choice(name="source", values=("memory", "files", "shards", "store")),
        Integer(name="workers", low=0, high=1024),
        Choice(name="memory", values=("pinned", "pageable")),
        Integer(name="prefetch", low=1, high=64, default=2),
        Choice(name="persistent", values=("on", "off"), default="on"),
        Choice(name="start", values=("fork", "spawn", "forkserver"), default="fork"),
        Choice(name="batching", values=("padding", "bucketing", "packing"), default="padding"),
        Text(name="profile"),
    ),
    waits=True,
)

FAMILIES = {family.name: family for family in (H2D, DDP, FEED)}


def grouped(family: str) -> bool:
    """Whether cases of that family are measured by ranks together; False for one of another program."""
    return family in FAMILIES and FAMILIES[family].grouped
