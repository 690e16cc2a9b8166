"""The families of cases and their axes. An axis added to a family later gets a default, so old keys live on."""

from harness.case import Choice, Family, Integer, Number, Size, Text

MIB, GIB = 1 << 20, 1 << 30

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
        Text(name="profile"),
    ),
)

FAMILIES = {family.name: family for family in (H2D,)}
