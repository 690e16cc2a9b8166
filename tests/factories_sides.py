"""Builders of the two sides of a comparison: synthetic launches of a few h2d cases, in turns.

base, head = side("base"), side("head", change=lambda case: {"scale": 1.05})
"""

from collections.abc import Callable, Iterable

import numpy as np
from factories import h2d_case, h2d_launch, record, unmeasured

from harness import metrics
from harness.case import Case
from harness.record import Record
from harness.sides import Side

CASES = [h2d_case(chunks=n) for n in (1, 2, 4, 8, 16, 32)] + [h2d_case(chunks=8, size=64 << 20)]
TIMES = {"c_ms": 4.87, "k_ms": 4.21, "overhead_ms": 0.003}

Change = Callable[[Case], dict[str, object]]


def one(
    cases: Iterable[Case], at: int, seed: int, change: Change = lambda case: {}, noise: float = 0.001
) -> Record:
    """A record of one launch; every launch is as much slower or faster as launches of an H200 are."""
    results = []
    for case in cases:
        rng = np.random.default_rng([seed, at, case.number("chunks"), case.number("size")])
        scale = float(np.exp(noise * rng.standard_normal()))
        options = {"scale": scale, "noise": 0.002, **TIMES, **change(case)}
        launch = h2d_launch(case, seed=seed + at, **options)  # type: ignore[arg-type]
        results.append(metrics.derive(unmeasured(case, "ok", launches=[launch])))
    made = record(*results, time=f"2026-11-30T08:00:{at:02}Z")
    made.run.spent = {"0": {"began": float(at)}}
    made.run.planned = [case.key for case in cases]
    made.machine.gpu["uuid"] = "GPU-1"
    return made


BASE_TURNS, HEAD_TURNS = (0, 3, 4, 7, 8), (1, 2, 5, 6, 9)


def side(name: str, launches: int = 3, cases: Iterable[Case] = CASES, **options: object) -> Side:
    """Launches of base and head take turns."""
    turns = BASE_TURNS if name == "base" else HEAD_TURNS
    return Side(name, tuple(one(cases, at, 7, **options) for at in turns[:launches]))  # type: ignore[arg-type]
