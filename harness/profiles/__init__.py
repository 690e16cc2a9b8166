"""Fixed sizes for one model of device, so that no size is ever taken from a timing of the same run.

A profile is a committed JSON file. A hash of its sizes is part of every case key measured with it: changed sizes
are other cases. `overlap calibrate NAME` writes a new one (harness/calibration.py).
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from harness.errors import UsageError
from harness.sizes import parse_size

FOLDER = Path(__file__).parent

# What a sample of each family does. The rest of a profile (to which devices it belongs, when sampling stops, what
# controls accept) may be mended without cutting any history.
FIXED_WORK = {
    "h2d": (
        "name", "dtype", "seed", "distribution", "width", "max_columns", "column_step", "rotate_bytes",
        "conditioning_gemms", "h2d",
    ),
    "ddp": ("name", "dtype", "seed", "ddp"),
    "feed": ("name", "dtype", "seed", "feed"),
}  # fmt: skip

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]  # case keys carry it


class H2DSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the h2d family, by kind of host memory, then by size (`256MiB`).

    columns: output columns of the GEMMs a row takes part in at ratio 1; sets the compute time.
    repeats: passes over the pipeline in one sample, so that a sample lasts `sample_ms` or more.
    """

    columns: dict[str, dict[str, Count]]
    repeats: dict[str, dict[str, Count]]

    def __post_init__(self) -> None:
        for name, table in (("columns", self.columns), ("repeats", self.repeats)):
            for memory, sizes in table.items():
                for size in sizes:
                    try:
                        parse_size(size, field=f"{name}.{memory}")
                    except UsageError as error:
                        raise ValueError(str(error)) from None  # msgspec adds the place in the file


class DDPSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the ddp family's models (harness/workloads/models.py).

    width: of a token's vector. hidden: of the MLP between its two matrices. heads: of the attention. blocks: how many
    transformer blocks. sequence: tokens that attend to each other, at most. vocabulary: rows of the table of the
    embedding-heavy model.
    """

    width: Count = 2048
    hidden: Count = 4096
    heads: Count = 16
    blocks: Count = 16
    sequence: Count = 2048
    vocabulary: Count = 1 << 16


class FeedSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the feed family's samples and steps (harness/workloads/feed.py).

    pool: distinct samples. batches: timed in one sample of an arm. image, crop: sides of a stored and of a used
    picture, pixels. pictures, documents: samples in a batch. words: median length of a text. longest: tokens a text
    is cut to. patch: side of the square of pixels that is one row of a step's matrix product. width: of a token's
    vector. hidden: columns of the products. picture_products, text_products: how many of them a step has.
    conditioning: untimed steps, at the least, before those of an arm, so that both kinds start from the same load.
    latency_ms, mib_per_s: of the slow store, of one request and of all of them together.
    """

    pool: Count = 1024
    batches: Count = 8
    image: Count = 256
    crop: Count = 224
    pictures: Count = 16
    documents: Count = 32
    words: Count = 200
    longest: Count = 1024
    patch: Count = 16
    width: Count = 1024
    hidden: Count = 4096
    picture_products: Count = 64
    text_products: Count = 16
    conditioning: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 12
    latency_ms: Positive = 20.0
    mib_per_s: Positive = 50.0

    def __post_init__(self) -> None:
        if not self.patch <= self.crop <= self.image:
            raise ValueError(
                f"feed: patch {self.patch}, crop {self.crop}, image {self.image}: want none larger than the next"
            )


class Tolerances(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the controls accept (harness/controls.py), as fractions.

    null: |difference| of two equal arms. known: distance from the answer known beforehand. hidden: |hidden
    fraction| of work that cannot overlap. sensitivity: distance from what was added, as a share of it.
    """

    null: Fraction
    known: Fraction
    hidden: Fraction
    sensitivity: Fraction


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of device: shapes, seed and value distribution of every workload.

    width: elements in a row of the copied batch. max_columns: widest single GEMM; more columns make more GEMMs.
    rotate_bytes: inputs are rotated over at least this much, more than twice the last-level cache.
    conditioning_gemms: GEMMs of the conditioning shape before every sample, so that each arm starts from the
    same load. case_seconds, ddp_case_seconds, feed_case_seconds: where sampling a case of h2d, ddp or feed stops
    at the latest, after its first look. settled, feed_settled: half-width of the headline's interval, over its value,
    at which it stops before: means of a loader's pace are no surer, and its verdicts turn at 5 %.
    """

    name: Name
    summary: str
    devices: list[str]
    dtype: Literal["bfloat16", "float32"]
    seed: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    distribution: Literal["normal"]
    width: Count
    max_columns: Count
    column_step: Count
    rotate_bytes: Count
    sample_ms: Positive
    conditioning_gemms: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    case_seconds: Positive
    settled: Fraction
    tolerances: Tolerances
    h2d: H2DSizes
    ddp: DDPSizes = DDPSizes()
    ddp_case_seconds: Positive = 8.0
    feed: FeedSizes = FeedSizes()
    feed_case_seconds: Positive = 8.0
    feed_settled: Fraction = 0.03

    @property
    def key(self) -> str:
        """The key of family h2d, by which people name a profile."""
        return self.key_of("h2d")

    def key_of(self, family: str) -> str:
        """Name and hash of the fixed work of a family, as its case keys carry them: `h200.1a2b`."""
        content = msgspec.json.encode(
            {name: getattr(self, name) for name in FIXED_WORK[family]}, order="deterministic"
        )
        return f"{self.name}.{hashlib.sha256(content).hexdigest()[:4]}"

    def seconds_of(self, family: str) -> float:
        """Where sampling a case of that family stops at the latest, after its first look."""
        return {"ddp": self.ddp_case_seconds, "feed": self.feed_case_seconds}.get(family, self.case_seconds)

    def settled_of(self, family: str, asked: float | None = None) -> float:
        """The interval at which a case of that family is settled, as a fraction of its headline, unless another one was
        asked for."""
        return asked or {"feed": self.feed_settled}.get(family, self.settled)

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.devices

    @property
    def element_bytes(self) -> int:
        return {"bfloat16": 2, "float32": 4}[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.width * self.element_bytes


def read_profile(path: Path) -> Profile:
    """The profile in `path`; UsageError if it cannot be read or is not a profile."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise UsageError(f"profile: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"profile: {path} is not a profile: {error}") from None


@lru_cache
def packaged() -> dict[str, Profile]:
    """Every profile that comes with the package, by name."""
    profiles = (read_profile(path) for path in sorted(FOLDER.glob("*.json")))
    return {profile.name: profile for profile in profiles}


def load_profile(name_or_path: str) -> Profile:
    """The packaged profile of that name (or `name.hash`, which must then be today's), or the one in a file."""
    profiles = packaged()
    for profile in profiles.values():
        if name_or_path in (profile.name, *map(profile.key_of, FIXED_WORK)):
            return profile
    if name_or_path.endswith(".json"):
        return read_profile(Path(name_or_path))
    known = ", ".join(profile.key for profile in profiles.values())
    raise UsageError(f"profile: got {name_or_path!r}, want one of {known}, or a path that ends in .json")


def profile_for(device: str, device_name: str) -> Profile:
    """The profile of a device model: `cpu` for the cpu backend, `generic` for an unknown GPU."""
    if device == "cpu":
        return packaged()["cpu"]
    for profile in packaged().values():
        if device_name in profile.devices:
            return profile
    return packaged()["generic"]
