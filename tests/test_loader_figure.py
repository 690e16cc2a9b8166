"""What is drawn of loaders, read from the axes."""

import pytest
from factories import record
from factories_feed import Loader, feed_record, feed_results

from harness import figures, loader_figure
from harness.record import Metric

WORKERS = (0, 1, 2, 4, 8, 16)


def lines(ax):
    """By label: the points (x, y) of every line that is a curve."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in ax.get_lines()
        if len(line.get_xdata()) > 2
    }


def test_loader_cached_and_real_step_are_drawn_by_workers_beside_theory():
    made = feed_record(*feed_results(Loader(), WORKERS))
    (ax,) = loader_figure.draw(made).axes
    drawn = lines(ax)
    for label, name in (
        ("loader alone", "transfer_ms"), ("cached step", "compute_ms"), ("real step", "overlapped_ms")
    ):  # fmt: skip
        assert drawn[label] == [
            (workers, case.metrics[name].value) for workers, case in zip(WORKERS, made.cases, strict=True)
        ]
    # 8 ms of a worker for a batch, and 2 ms a step
    theory = dict(drawn["theory: the longer of t_batch / W and the cached step"])
    assert list(theory) == list(range(1, 17))
    expected = {1: 8.0, 2: 4.0, 3: 8 / 3, 4: 2.0, 16: 2.0}
    assert {workers: theory[workers] for workers in expected} == pytest.approx(expected, rel=0.01)
    needed = next(line for line in ax.get_lines() if line.get_label() == "theory: workers needed")
    assert list(needed.get_xdata()) == [4, 4]


def test_theory_is_a_band_where_a_batch_costs_more_in_one_case_than_in_another():
    results = [
        *feed_results(Loader(), (1, 2), launch={"facts": {"decode_ms": 3.0}}),
        *feed_results(Loader(), (4, 8)),
    ]
    (ax,) = loader_figure.draw(feed_record(*results)).axes
    (band,) = ax.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (2, 4)


def test_each_set_has_a_panel_and_two_numbers_of_workers_are_no_curve():
    made = feed_record(
        *feed_results(Loader(), WORKERS),
        *feed_results(Loader(), (0, 2, 4), memory="pageable"),
        *feed_results(Loader(), (0, 2), data="text"),
    )
    drawn = loader_figure.draw(made)
    assert [ax.get_title(loc="left") for ax in drawn.axes] == ["jpeg pinned", "jpeg pageable"]
    assert loader_figure.draw(feed_record(*feed_results(Loader(), (0, 2)))) is None
    assert loader_figure.draw(record()) is None


def test_the_axis_of_times_is_labelled_in_digits():
    drawn = loader_figure.draw(feed_record(*feed_results(Loader(), WORKERS)))
    figures.to_svg(drawn)
    texts = [label.get_text() for label in drawn.axes[0].get_yticklabels() if label.get_text()]
    assert "2" in texts
    assert all(text.replace(".", "").isdigit() for text in texts)


def test_what_tells_no_cost_of_a_batch_and_hostile_numbers_are_drawn_without_theory():
    untold = feed_results(Loader(), (0, 2, 4), launch={"facts": {"read_ms": None}})
    (ax,) = loader_figure.draw(feed_record(*untold)).axes
    assert not [label for label in lines(ax) if label.startswith("theory")]
    odd = feed_results(Loader(), (0, 2, 4))
    for case in odd:
        case.metrics["overlapped_ms"] = Metric(value=1e300, unit="ms", low=1e-300, high=1e308)
    figures.to_png(loader_figure.draw(feed_record(*odd)))
