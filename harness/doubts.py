"""Reasons to doubt the samples of a case, as facts in its checks: what to make of them is for people."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.modality import modes
from harness.statistics import Array, carry_over, drift, lag1

# A carry-over is worth a word when it is both unlikely by chance and half the stop rule's target.
CARRY_OVER_P, CARRY_OVER_SHIFT = 0.01, 0.005

NAMES = ("lag1", "drift", "bimodal", "carry_over")


def doubts(launches: Sequence[Mapping[str, Array]], orders: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Checks on the samples of a case's launches, (rounds,) ms of a batch by arm; `orders` of all their
    rounds in a row.

    lag1, drift: by arm, in the launch where it is largest. bimodal: by arm [low ms, high ms, share of the
    upper], where at least half of the launches have two modes. carry_over: {arm, after, shift, p, found}. The
    last two are left out where there is nothing to say.
    """
    arms = [arm for arm in orders[0] if all(arm in columns for columns in launches)]
    found: dict[str, Any] = {
        "lag1": {arm: round(_largest(lag1(columns[arm]) for columns in launches), 3) for arm in arms},
        "drift": {arm: round(_largest(drift(columns[arm]) for columns in launches), 4) for arm in arms},
    }
    bimodal = {arm: pair for arm in arms if (pair := _bimodal([columns[arm] for columns in launches]))}
    if bimodal:
        found["bimodal"] = bimodal
    carried = _carried(launches, orders, arms)
    if carried:
        found["carry_over"] = carried
    return found


def _largest(values: Iterable[float]) -> float:
    return max(values, key=lambda value: abs(value))


def _bimodal(columns: Sequence[Array]) -> list[float] | None:
    seen = [each for each in map(modes, columns) if each]
    if not seen or 2 * len(seen) < len(columns):
        return None
    pairs = [(each.low, each.high, each.upper_share) for each in seen]
    return [round(float(value), 6) for value in np.median(pairs, axis=0)]


def _carried(
    launches: Sequence[Mapping[str, Array]], orders: Sequence[Sequence[str]], arms: Sequence[str]
) -> dict[str, Any] | None:
    """Carry-over over all launches, each in units of its own medians: a slower launch is no carry-over."""
    scaled = {
        arm: np.concatenate([columns[arm] / np.median(columns[arm]) for columns in launches]) for arm in arms
    }
    worst = carry_over(orders, scaled)
    if worst is None:
        return None
    return {
        "arm": worst.arm,
        "after": worst.after,
        "shift": round(worst.shift, 5),
        "p": worst.p,
        "found": worst.p < CARRY_OVER_P and abs(worst.shift) >= CARRY_OVER_SHIFT,
    }
