"""Builders of synthetic launches, case results and records: seeded noise around the formulas of theory.py.

    case = h2d_case(chunks=8)
    result = h2d_result(case, launches=3, noise=0.004, seed=1)    # metrics, model and checks are derived
    whole = record(*table_results(), *curve_results(), skipped(h2d_case(memory="pageable"), "why"))

Times are ms. What each cell of the 2x2 table does by default: pinned + side follows T(n) = M + m/n + (n+1)*o;
both same-stream cells equal serial; pageable + side hides 0.4 of the shorter leg; pageable copies take six
times as long and their compute is sized to them.
"""

import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from harness import METHOD_VERSION, metrics
from harness.case import Case, Value
from harness.families import H2D, MIB
from harness.record import (
    SCHEMA,
    CaseResult,
    Control,
    Launch,
    Machine,
    Rank,
    Record,
    Round,
    Run,
)
from harness.statistics import balanced_orders

DEFAULTS: dict[str, Value] = {
    "memory": "pinned",
    "stream": "side",
    "chunks": 8,
    "size": 256 * MIB,
    "ratio": 1.0,
    "gate": "on",
    "profile": "h200.1a2b",
}


def h2d_case(**axes: Value) -> Case:
    """A pinned, side-stream, gated case of 256 MiB in 8 chunks, with `axes` replaced."""
    return Case.of(H2D, **{**DEFAULTS, **axes})


def h2d_times(
    case: Case, *, c_ms: float, k_ms: float, overhead_ms: float, hidden: float | None = None, repeats: int = 1
) -> dict[str, float]:
    """The noise-free time of every arm; `hidden` fixes the hidden fraction instead of the cell's own law.

    repeats: batches in the sample, whose pieces are one pipeline.
    """
    n = case.number("chunks") * repeats
    if case.word("memory") == "pageable":
        c_ms, k_ms = 6 * c_ms, 6 * k_ms
    c_ms, k_ms = repeats * c_ms, repeats * k_ms
    transfer, compute = c_ms + n * overhead_ms, k_ms + n * overhead_ms
    serial = transfer + compute
    if hidden is None and case.word("stream") == "default":
        overlapped = serial
    elif hidden is None and case.word("memory") == "pinned":
        overlapped = max(c_ms, k_ms) + min(c_ms, k_ms) / n + (n + 1) * overhead_ms
    else:
        overlapped = serial - (0.4 if hidden is None else hidden) * min(transfer, compute)
    times = {"transfer": transfer, "compute": compute, "serial": serial, "overlapped": overlapped}
    if case.number("chunks") > 1:
        times |= {arm: ms + repeats * overhead_ms for arm, ms in (("transfer_1", c_ms), ("compute_1", k_ms))}
    return times


def noisy(mean: float, rounds: int, *, noise: float, rho: float, rng: np.random.Generator) -> np.ndarray:
    """`rounds` samples around `mean`: AR(1) noise of relative standard deviation `noise` and lag-1 `rho`."""
    shocks = rng.standard_normal(rounds)
    path = np.empty(rounds)
    level = shocks[0] if rounds else 0.0
    for at in range(rounds):
        level = rho * level + (1 - rho**2) ** 0.5 * shocks[at] if at else shocks[0]
        path[at] = level
    return mean * (1 + noise * path)


def h2d_launch(
    case: Case,
    *,
    c_ms: float = 4.87,
    k_ms: float = 4.21,
    overhead_ms: float = 0.003,
    hidden: float | None = None,
    rounds: int = 20,
    noise: float = 0.003,
    rho: float = 0.0,
    seed: int = 0,
    index: int = 0,
    ranks: int = 1,
    host_ms: float | None = None,
    modes: Mapping[str, tuple[float, float]] | None = None,
    scale: float = 1.0,
    repeats: int = 1,
    stop: str = "settled",
    dropped: Mapping[str, int] | None = None,
) -> Launch:
    """One launch of `case`.

    modes: arms whose samples alternate at random between two times. scale: multiplies every time (one launch
    differs from the next). host_ms: time to enqueue an arm; by default 0.02 per chunk, and the whole copy for
    pageable memory. ranks: processes, each with noise of its own. repeats: batches in a sample; `c_ms`, `k_ms`
    and `host_ms` are of one batch.
    """
    times = h2d_times(case, c_ms=c_ms, k_ms=k_ms, overhead_ms=overhead_ms, hidden=hidden, repeats=repeats)
    orders = balanced_orders(list(times))
    if host_ms is None:
        pageable = case.word("memory") == "pageable"
        host_ms = times["transfer"] / repeats if pageable else 0.02 * case.number("chunks")
    made = []
    for rank in range(ranks):
        rng = np.random.default_rng([zlib.crc32(case.key.encode()), seed, index, rank])
        columns = {arm: noisy(scale * ms, rounds, noise=noise, rho=rho, rng=rng) for arm, ms in times.items()}
        for arm, pair in (modes or {}).items():
            chosen = np.array(pair)[rng.integers(0, 2, rounds)]
            columns[arm] = chosen * (columns[arm] / (scale * times[arm]))
        host = {arm: noisy(repeats * host_ms, rounds, noise=noise, rho=0.0, rng=rng) for arm in times}
        made.append(
            Rank(
                rounds=[
                    Round(
                        order=orders[at % len(orders)],
                        arms={arm: float(column[at]) for arm, column in columns.items()},
                        host={arm: float(column[at]) for arm, column in host.items()},
                        spans={"transfer_in_overlapped": float(columns["transfer"][at]) * 1.02},
                        start=at * 0.05,
                    )
                    for at in range(rounds)
                ],
                telemetry={},
            )
        )
    timed = sum(sum(r.arms.values()) for r in made[0].rounds) / 1e3
    return Launch(
        index=index,
        ranks=made,
        stop=stop,
        wall_s=timed * 1.4,
        timed_s=timed,
        dropped=dict(dropped or {}),
        checks={"repeats": repeats},
    )


def h2d_result(
    case: Case, *, launches: int = 1, status: str = "ok", reason: str = "", seed: int = 0, **launch: object
) -> CaseResult:
    """A measured case of so many launches (their options as `h2d_launch`), with metrics, model and checks."""
    made = [h2d_launch(case, index=index, seed=seed, **launch) for index in range(launches)]  # type: ignore[arg-type]
    return metrics.derive(unmeasured(case, status, reason, launches=made))


def unmeasured(case: Case, status: str, reason: str = "", *, launches: Iterable[Launch] = ()) -> CaseResult:
    """A case result as the run makes it, before anything is derived."""
    return CaseResult(
        key=case.key,
        family=case.family.name,
        params=case.params,
        status=status,
        reason=reason,
        launches=list(launches),
    )


def skipped(case: Case, reason: str = "the cpu backend has no pinned memory") -> CaseResult:
    return unmeasured(case, "skipped", reason)


def table_results(*, chunks: int = 8, launches: int = 1, seed: int = 0, **launch: object) -> list[CaseResult]:
    """The four ungated cells of the 2x2 table."""
    return [
        h2d_result(
            h2d_case(memory=memory, stream=stream, chunks=chunks, gate="off"),
            launches=launches,
            seed=seed,
            **launch,
        )
        for memory in ("pinned", "pageable")
        for stream in ("side", "default")
    ]


def curve_results(
    *, chunks: Iterable[int] = (1, 2, 4, 8, 16, 32, 64), launches: int = 1, seed: int = 0, **launch: object
) -> list[CaseResult]:
    """Gated cases that differ in their chunks alone."""
    return [h2d_result(h2d_case(chunks=n), launches=launches, seed=seed, **launch) for n in chunks]


def controls(*, launch: int = 0, failing: Iterable[str] = ()) -> list[Control]:
    """The run's controls (measurement.md rule 6), all passed save those named in `failing`."""
    inside = {
        "positive": (1.001, 0.95, 1.05, "ratio"),
        "negative": (0.01, -0.15, 0.15, "fraction"),
        "null": (0.001, -0.005, 0.005, "fraction"),
        "sensitivity": (0.05, 0.04, 0.06, "fraction"),
    }
    failing = set(failing)
    return [
        Control(
            name=name,
            launch=launch,
            passed=name not in failing,
            value=high + 1 if name in failing else value,
            low=low,
            high=high,
            unit=unit,
        )
        for name, (value, low, high, unit) in inside.items()
    ]


def record(
    *results: CaseResult,
    machine: str = "h200-1",
    device: str = "cuda",
    gpu_name: str = "NVIDIA H200",
    commit: str = "0123456789abcdef0123456789abcdef01234567",
    dirty: bool = False,
    time: str = "2026-11-30T08:00:00Z",
    launches: int = 1,
    tier: str = "quick",
    controls: Iterable[Control] = (),
) -> Record:
    """A finished record of these cases, chunk curves derived."""
    gpu = {"name": gpu_name, "count": 1} if device == "cuda" else {}
    made = Record(
        schema=SCHEMA,
        method=METHOD_VERSION,
        run=Run(
            time=time,
            commit=commit,
            dirty=dirty,
            command=["overlap", "run", "--tier", tier],
            seconds=42.0,
            finished=True,
            suites=["h2d"],
            tier=tier,
            launches=launches,
        ),
        machine=Machine(name=machine, device=device, gpu=gpu, cpu={"model": "a CPU", "cores": 16}),
        software={"python": "3.12.0", "torch": "2.11.0"},
        controls=list(controls),
        cases=list(results),
    )
    metrics.derive_curves(made)
    return made
