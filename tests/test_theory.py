"""The formulas against the figures of theory.md and each other, and the fit against curves it must find."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import theory

times = st.floats(0.1, 1000.0)
overheads = st.floats(1e-4, 1.0)
counts = st.integers(1, 64)


def test_piece_model_gives_the_published_h200_figure():
    assert theory.piece_model(4.87, 4.21, 8) == pytest.approx(5.40, abs=0.005)
    assert theory.two_stage(4.87, 4.21, 8, 0.0) == pytest.approx(5.40, abs=0.005)


def test_v100_set_shows_overlap_that_lost_time():
    """A trace ratio calls this set +53 % overlapped; it ran 1.3 times as long as in sequence."""
    transfer, compute, serial, overlapped = 106.6, 49.0, 157.3, 207.1
    assert theory.hidden_fraction(transfer, compute, overlapped) == pytest.approx(-1.05, abs=0.005)
    assert theory.exposed(compute, overlapped) == pytest.approx(158.1)
    assert theory.exposed_fraction(transfer, compute, overlapped) == pytest.approx(1.483, abs=0.001)
    assert overlapped / serial == pytest.approx(1.32, abs=0.01)


@pytest.mark.parametrize(
    ("overlapped", "hidden", "exposed"),
    [(10.0, 1.0, 0.0), (14.0, 0.0, 1.0), (16.0, -0.5, 1.5), (9.0, 1.25, -0.25)],
)
def test_fractions_are_never_clamped(overlapped: float, hidden: float, exposed: float):
    assert theory.hidden_fraction(4.0, 10.0, overlapped) == hidden
    assert theory.exposed_fraction(4.0, 10.0, overlapped) == exposed


def test_fractions_work_elementwise():
    transfer, compute, overlapped = np.array([4.0, 10.0]), np.array([10.0, 4.0]), np.array([12.0, 12.0])
    assert theory.hidden_fraction(transfer, compute, overlapped).tolist() == [0.5, 0.5]
    assert theory.bound(transfer, compute).tolist() == [10.0, 10.0]
    assert theory.piece_model(transfer, compute, 2).tolist() == [12.0, 12.0]


@given(times, times, counts)
def test_piece_model_is_the_two_stage_law_without_overhead(c: float, k: float, n: int):
    assert theory.piece_model(c, k, n) == pytest.approx(theory.two_stage(c, k, n, 0.0))
    assert theory.piece_model(c, k, n) >= theory.bound(c, k) * (1 - 1e-12)
    assert theory.piece_model(c, k, 1) == pytest.approx(theory.serial(c, k))


@given(times, times, counts, overheads)
def test_pipeline_lies_between_its_bound_and_the_serial_time(c: float, k: float, n: int, o: float):
    assert max(c, k) < theory.two_stage(c, k, n, o) <= theory.serial(c, k, n, o) * (1 + 1e-12)


@given(times, times, overheads)
def test_best_chunks_agree_with_each_other(c: float, k: float, o: float):
    """The integer rule finds the least of all whole n; no n beats T*; T at n* is T*."""
    n_star, best = theory.best_chunks(c, k, o), theory.best_whole_chunks(c, k, o)
    curve = {n: theory.two_stage(c, k, n, o) for n in range(1, 65)}
    assert curve[best] == pytest.approx(min(curve.values()), rel=1e-12)
    assert min(curve.values()) >= theory.best_time(c, k, o) * (1 - 1e-12)
    at_star = max(c, k) + min(c, k) / n_star + (n_star + 1) * o
    assert at_star == pytest.approx(theory.best_time(c, k, o))
    if 1 < n_star < 64:
        assert abs(best - n_star) < 1


def test_two_chunks_pay_only_if_the_overhead_is_under_half_of_the_shorter_leg():
    assert theory.best_whole_chunks(10.0, 4.0, 1.99) == 2
    assert theory.best_whole_chunks(10.0, 4.0, 2.01) == 1


def test_free_chunks_have_no_best_count():
    assert theory.best_chunks(5.0, 4.0, 0.0) == math.inf
    assert theory.best_whole_chunks(5.0, 4.0, 0.0) == theory.MAX_CHUNKS
    assert theory.best_whole_chunks(5.0, 4.0, 0.0, limit=8) == 8


def curve(c: float, k: float, o: float, repeats: int = 1) -> dict[int, float]:
    """Times of a batch, `repeats` of which ran as one pipeline."""
    return {
        n: theory.two_stage(c * repeats, k * repeats, n * repeats, o) / repeats
        for n in (1, 2, 4, 8, 16, 32, 64)
    }


@given(times, times, st.floats(0.0, 1.0), st.sampled_from([1, 2, 6]))
def test_fit_finds_the_law_that_made_the_curve(c: float, k: float, share: float, repeats: int):
    o = share * min(c, k) / 10
    points = curve(c, k, o, repeats)
    fit = theory.fit_curve(points, c, k, repeats)
    assert {n: fit.predict(n) for n in points} == pytest.approx(points, rel=1e-5)
    assert (fit.c, fit.k) == pytest.approx((c, k), rel=1e-3, abs=1e-3 * max(c, k))
    assert fit.o == pytest.approx(o, rel=1e-3, abs=1e-3 * max(c, k))


def test_fit_gives_the_longer_leg_to_the_longer_solo_time():
    points = curve(4.0, 7.0, 0.01)
    copy_bound, compute_bound = theory.fit_curve(points, 7.1, 4.1), theory.fit_curve(points, 4.1, 7.1)
    assert (copy_bound.c, copy_bound.k) == pytest.approx((7.0, 4.0))
    assert (compute_bound.c, compute_bound.k) == pytest.approx((4.0, 7.0))


def test_best_count_is_per_batch_when_a_sample_holds_several():
    assert theory.fit_curve(curve(6.4, 6.4, 0.1), 6.4, 6.4).n_star == pytest.approx(8.0)
    assert theory.fit_curve(curve(6.4, 6.4, 0.1, repeats=2), 6.4, 6.4, 2).n_star == pytest.approx(8 / 2**0.5)


def test_fit_looks_at_its_own_points_only():
    points = curve(5.0, 4.0, 0.01)
    moved = points | {2: 99.0, 8: 99.0, 64: 99.0}
    assert theory.fit_curve(moved, 5.0, 4.0) == theory.fit_curve(points, 5.0, 4.0)


def test_noise_cannot_make_an_overhead_negative():
    """16 chunks a little faster than any law allows: o stays 0, and the curve close to its points."""
    points = {1: 9.0, 4: 6.0, 16: 5.2}
    fit = theory.fit_curve(points, 5.0, 4.0)
    assert fit.o == 0.0
    assert fit.n_star == math.inf
    assert fit.c >= fit.k >= 0
    assert {n: fit.predict(n) for n in points} == pytest.approx(points, rel=0.02)


def test_fit_on_realistic_noise_predicts_the_rest_within_five_percent():
    """Medians on the H200 repeat within 0.4 % (theory.md 1): 200 noisy curves, the worst tested point."""
    rng = np.random.default_rng(7)
    truth = curve(4.87, 4.21, 0.004)
    worst = []
    for _ in range(200):
        points = {n: ms * (1 + 0.002 * rng.standard_normal()) for n, ms in truth.items()}
        fit = theory.fit_curve(points, 4.87, 4.21)
        worst.append(max(abs(points[n] / fit.predict(n) - 1) for n in (2, 8, 32, 64)))
    assert np.quantile(worst, 0.95) < 0.05


@pytest.mark.parametrize("points", [{1: 9.0, 4: 6.0}, {1: 9.0, 4: 6.0, 16: 0.0}, {}])
def test_fit_names_the_missing_points(points: dict[int, float]):
    with pytest.raises(ValueError, match=r"no positive time at n = .*16"):
        theory.fit_curve(points, 5.0, 4.0)
