"""Which leg moved: launches of a case with a known fault, through the statistics to the name of the leg."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from harness import theory
from harness.contrast import compare
from harness.evidence import Pair
from harness.legs import legs, transfer_leg

# A pinned 256 MiB batch in 8 chunks on an H200, ms; host: to enqueue the copies and the compute, each alone.
CHUNKS = 8
COPY, COMPUTE, HOST = 4.87, 4.27, 0.30
NOISE, HOST_NOISE = 0.0011, 0.1


@dataclass(frozen=True, kw_only=True)
class Code:
    """How one commit behaves. lost: time of the overlapped run that its legs do not explain."""

    copy: float = COPY
    compute: float = COMPUTE
    host: float = HOST
    lost: float = 0.0
    overlapped: float | None = None


def launches(code: Code, seed: int, count: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def noisy(time: float, noise: float = NOISE) -> np.ndarray:
        return time * np.exp(noise * rng.standard_normal(count))

    copy, compute = noisy(code.copy), noisy(code.compute)
    model = theory.piece_model(copy, compute, CHUNKS)
    time = theory.piece_model(code.copy, code.compute, CHUNKS) if code.overlapped is None else code.overlapped
    overlapped = noisy(time + code.lost)
    return {
        "overlapped_ms": overlapped,
        "transfer_ms": copy,
        "compute_ms": compute,
        "host_ms": noisy(code.host, HOST_NOISE),
        "model_ratio": overlapped / model,
    }


def blamed(head: Code, base: Code = Code(), *, without: str = "", seed: int = 0) -> tuple[str, ...]:
    """The legs of one case whose head is other code, among 20 that are unchanged."""
    pairs = []
    for at in range(21):
        sides = [launches(base, 100 * seed + at), launches(head if at == 0 else base, 1000 + 100 * seed + at)]
        pairs += [
            Pair(
                case=str(at),
                quantity=name,
                base=list(sides[0][name]),
                head=list(sides[1][name]),
                budget=0.5 if name == "host_ms" else 0.02,
            )
            for name in sides[0]
            if name != without
        ]
    found = compare(pairs)
    assert not any(told.verdict == "slower" for told in found if told.case != "0")
    return legs({told.quantity: told for told in found if told.case == "0"})


MORE_BYTES = Code(copy=1.05 * COPY)
MORE_COMPUTE = Code(compute=1.05 * COMPUTE)
# The chunk waits for the copy before it and the copy for the chunk: nothing overlaps, the legs alone are as before.
SYNCHRONISED = Code(overlapped=COPY + COMPUTE)
# The driver stages the copy, and holds the host up while it does.
PAGEABLE = Code(copy=38.5, host=37.0, lost=1.6)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (MORE_BYTES, ("copy",)),
        (MORE_COMPUTE, ("compute",)),
        (Code(copy=1.05 * COPY, compute=1.05 * COMPUTE), ("copy", "compute")),
        (SYNCHRONISED, ("overlap",)),
        (PAGEABLE, ("copy", "overlap")),
        (Code(copy=38.5, host=37.0), ("copy",)),
        (Code(copy=1.05 * COPY, lost=0.5), ("copy", "overlap")),
        (Code(host=2.0 * HOST), ("host",)),
        (Code(host=0.5 * HOST), ()),
        (Code(), ()),
    ],
)
def test_the_leg_is_the_one_that_was_made_slower(head: Code, expected: tuple[str, ...]) -> None:
    assert [blamed(head, seed=seed) for seed in range(3)] == [expected] * 3


def test_a_leg_behind_the_longer_one_moves_the_overlapped_time_by_its_piece_only() -> None:
    """5 % more compute under a longer copy: the overlapped time moves by 0.5 %, which is not called."""
    longer = Code(copy=2 * COPY)
    assert blamed(Code(copy=2 * COPY, compute=1.05 * COMPUTE), longer) == ("compute",)


def test_a_faster_copy_that_overlap_makes_nothing_of_is_no_loss() -> None:
    """Over its model the overlapped time is worse, and yet it is the same: nothing got slower."""
    faster = Code(copy=0.9 * COPY, overlapped=theory.piece_model(COPY, COMPUTE, CHUNKS))
    assert blamed(faster) == ()


def test_without_the_model_overlap_is_what_no_solo_leg_explains() -> None:
    assert blamed(SYNCHRONISED, without="model_ratio") == ("overlap",)
    assert blamed(MORE_BYTES, without="model_ratio") == ("copy",)
    assert blamed(SYNCHRONISED, without="transfer_ms") == ("overlap",)


@dataclass(frozen=True)
class Told:
    verdict: str
    base: float = 1.0
    head: float = 1.0


def test_a_leg_that_may_have_moved_leaves_it_open() -> None:
    found = {"overlapped_ms": Told("slower"), "transfer_ms": Told("inconclusive"), "compute_ms": Told("same")}
    assert legs(found) == ()
    assert legs({**found, "transfer_ms": Told("same")}) == ("overlap",)
    assert legs({**found, "model_ratio": Told("slower")}) == ("overlap",)
    assert legs({"overlapped_ms": Told("slower")}) == ()


def test_a_loss_that_the_model_explains_is_not_overlaps() -> None:
    """Two legs that each moved by less than is called: the overlapped time moved with them."""
    solo = {"transfer_ms": Told("same"), "compute_ms": Told("same")}
    assert legs({"overlapped_ms": Told("slower"), "model_ratio": Told("same"), **solo}) == ()


def test_a_host_that_holds_up_the_device_explains_the_overlapped_time() -> None:
    """A launch-bound case on a slower host: all its times are the host's."""
    moved = {
        "overlapped_ms": Told("slower", 0.37, 0.47),
        "transfer_ms": Told("slower", 0.16, 0.20),
        "compute_ms": Told("slower", 0.19, 0.24),
        "host_ms": Told("slower", 0.36, 0.46),
        "model_ratio": Told("slower", 1.9, 2.1),
    }
    assert legs(moved) == ("copy", "compute", "host")


def test_a_copy_that_holds_the_host_up_for_longer_is_the_copys_loss() -> None:
    moved = {
        "overlapped_ms": Told("slower", 40.0, 50.0),
        "transfer_ms": Told("slower", 35.0, 45.0),
        "compute_ms": Told("same", 30.0, 30.0),
        "host_ms": Told("slower", 34.0, 44.0),
        "model_ratio": Told("same", 1.05, 1.05),
    }
    assert legs(moved) == ("copy",)


def test_what_moves_the_bytes_has_its_own_name_in_each_family():
    slower = {"transfer_ms": SimpleNamespace(verdict="slower", base=5.0, head=6.0)}
    assert legs(slower) == ("copy",)
    assert legs(slower, "collective") == ("collective",)
    assert legs(slower, transfer_leg("feed")) == ("loader",)
    assert [transfer_leg(family) for family in ("h2d", "ddp", "another")] == ["copy", "collective", "copy"]
