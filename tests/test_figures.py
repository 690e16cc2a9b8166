import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from factories import curve_results, h2d_case, h2d_result, record, skipped, table_results, unmeasured

from harness import figures
from harness.labels import ratio
from harness.views import chunk_curves


def text_of(figure):
    """Every word in the figure."""
    return "\n".join(item.get_text() for item in figure.findobj(mpl.text.Text))


def line(ax, label):
    """x and y of the line whose label begins so."""
    (found,) = (line for line in ax.lines if str(line.get_label()).startswith(label))
    return list(map(float, found.get_xdata())), list(map(float, found.get_ydata()))


def labels(ax):
    return ax.get_legend_handles_labels()[1]


@pytest.mark.parametrize("variable", ["HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME"])
def test_a_home_that_cannot_be_written_is_no_news(tmp_path, variable):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "MPL"))}
    environment |= {"HOME": str(tmp_path), variable: str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    environment["PYTHONPATH"] = str(Path(figures.__file__).parents[1])
    # matplotlib's own names for them, which it only looks up when it needs them.
    code = "from harness import figures; figures.mpl.get_configdir(), figures.mpl.get_cachedir()"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert list((tmp_path / "tmp").iterdir()) == [], "the private folder is gone with the process"


@pytest.fixture(scope="module")
def curve():
    (found,) = chunk_curves(record(*curve_results(overhead_ms=0.02)))
    return found


def test_bars_are_the_arms_of_the_cells():
    cells = table_results()
    figure = figures.overlap_bars(record(*cells))
    for ax, pair in zip(figure.axes, (cells[:2], cells[2:]), strict=True):
        heights = sorted(bar.get_height() for bar in ax.patches)
        arms = sorted(case.metrics[f"{arm}_ms"].value for case in pair for arm in figures.ARMS)
        assert heights == pytest.approx(arms)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["pinned memory", "pageable memory"]
    for case in cells:
        assert f"hidden fraction {ratio(case.metrics['hidden_fraction'].value)}" in text_of(figure)
    assert "ms" in figure.axes[0].get_ylabel()


def test_bars_draw_the_bound_of_each_cell():
    cells = table_results()
    figure = figures.overlap_bars(record(*cells))
    levels = [
        line.get_segments()[0][0][1] for line in figure.axes[0].collections if line.get_linestyle() != "solid"
    ]
    assert {cell.model["bound_ms"] for cell in cells[:2]} <= set(levels)


def test_a_cell_without_numbers_has_its_reason_in_place_of_bars():
    cells = table_results()
    cells[1].status, cells[1].reason = "invalid", "shared GPU"
    figure = figures.overlap_bars(record(*cells))
    assert "invalid: shared GPU" in text_of(figure).replace("\n", " ")
    assert len(figure.axes[0].patches) == len(figures.ARMS)


def test_memory_that_was_not_measured_has_no_panel():
    cells = [skipped(h2d_case(stream=stream, gate="off")) for stream in ("side", "default")]
    figure = figures.overlap_bars(record(*cells, *table_results()[2:], device="cpu"))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["pageable memory"]


@pytest.mark.parametrize("status", ["skipped", "invalid", "error"])
def test_no_figure_where_nothing_was_measured(status):
    bare = record(*(unmeasured(h2d_case(chunks=n, gate="off"), status, "why") for n in (1, 2, 4, 8)))
    assert figures.overlap_bars(bare) is None
    assert figures.time_split(bare) is None
    assert figures.overlapped_samples(bare) is None
    assert figures.telemetry_strip(bare) is None
    assert chunk_curves(bare) == []
    assert figures.time_split(record()) is None


def test_curve_draws_measurement_models_bound_and_serial(curve):
    top, below = figures.chunk_curve(curve).axes
    for label, name in (
        ("serial", "serial_ms"),
        ("bound", "bound_ms"),
        ("piece", "piece_ms"),
        ("curve", "curve_ms"),
    ):
        x, y = line(top, label)
        assert x == curve.chunks
        assert y == pytest.approx(list(curve.values(name).values()))
    points = [container[0].get_xydata()[0] for container in top.containers]
    assert [x for x, _ in points] == curve.chunks
    assert [y for _, y in points] == pytest.approx(list(curve.values("overlapped_ms").values()))
    assert below.get_xscale() == "log"
    assert "curve model, fitted on n = 1, 4, 16" in labels(top)


def test_curve_marks_the_recommended_count_and_the_theorys(curve):
    top = figures.chunk_curve(curve).axes[0]
    assert line(top, "recommended") == (
        [curve.recommended],
        [curve.values("overlapped_ms")[curve.recommended]],
    )
    assert line(top, "theory n*")[0] == [curve.n_star] * 2


def test_curve_intervals_are_those_of_the_record(curve):
    top = figures.chunk_curve(curve).axes[0]
    (container, case) = top.containers[3], curve.cases[3]
    (bar,) = container[2]
    low, high = bar.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(
        (case.metrics["overlapped_ms"].low, case.metrics["overlapped_ms"].high)
    )


def test_residuals_are_measured_over_model(curve):
    below = figures.chunk_curve(curve).axes[1]
    drawn = below.lines[1].get_ydata()
    ratios = [100 * (case.metrics["model_ratio"].value - 1) for case in curve.cases]
    assert drawn == pytest.approx(ratios, abs=0.05)


def test_a_theory_off_the_axis_is_said_and_not_drawn(curve):
    few = chunk_curves(record(*curve_results(chunks=(1, 2, 4, 8, 16), overhead_ms=0.001)))[0]
    assert few.n_star > 16
    top = figures.chunk_curve(few).axes[0]
    assert line(top, "theory n*") == ([], [])
    assert any(label.endswith("(off the axis)") for label in labels(top))


def test_unsettled_points_are_hollow_and_named():
    cases = curve_results(chunks=(1, 2, 4))
    cases[1].status = "unsettled"
    top = figures.chunk_curve(chunk_curves(record(*cases))[0]).axes[0]
    assert "measured, unsettled" in labels(top)
    assert [container[0].get_markerfacecolor() for container in top.containers] == [
        figures.GREEN,
        "white",
        figures.GREEN,
    ]


def test_split_has_a_row_a_measured_case_with_its_numbers():
    cases = [*table_results(), skipped(h2d_case(chunks=2))]
    left, right = figures.time_split(record(*cases)).axes
    assert len(left.get_yticklabels()) == 4
    for row, case in enumerate(cases[:4]):
        assert tuple(left.containers[row][0].get_xydata()[0]) == (case.metrics["exposed_fraction"].value, row)
        assert tuple(right.containers[row][0].get_xydata()[0]) == (case.metrics["bound_ratio"].value, row)


def test_split_shows_an_unsettled_case_hollow():
    cases = table_results()
    cases[2].status = "unsettled"
    for ax in figures.time_split(record(*cases)).axes:
        fills = [container[0].get_markerfacecolor() for container in ax.containers]
        assert [fill == "white" for fill in fills] == [False, False, True, False]


def test_split_parts_meet_at_the_model():
    case = h2d_result(h2d_case(stream="default", gate="off"))
    right = figures.time_split(record(case)).axes[1]
    ends = case.model["piece_ms"] / case.model["bound_ms"]
    assert line(right, "to the model")[0] == pytest.approx([1, ends])
    assert line(right, "beyond the model")[0] == pytest.approx([ends, case.metrics["bound_ratio"].value])


def test_samples_show_every_round_of_every_launch_and_the_median():
    case = h2d_result(h2d_case(), launches=2, rounds=12)
    (ax,) = figures.overlapped_samples(record(case)).axes
    drawn = np.concatenate([line.get_ydata() for line in ax.lines[:2]])
    taken = [r.arms["overlapped"] for launch in case.launches for r in launch.ranks[0].rounds]
    assert list(drawn) == taken
    assert ax.lines[1].get_xdata()[0] == 12
    assert ax.lines[2].get_ydata()[0] == pytest.approx(np.median(taken))


def test_samples_of_an_invalid_case_are_shown_as_such():
    figure = figures.overlapped_samples(record(h2d_result(h2d_case(), status="invalid", reason="shared GPU")))
    assert "(invalid)" in text_of(figure)


def test_strip_shows_what_was_read():
    case = h2d_result(h2d_case(), rounds=4)
    rank = case.launches[0].ranks[0]
    rank.telemetry = {"series": {"t": [0.0, 1.0], "sm_mhz": [1980, 1575], "temperature_c": [40, None]}}
    clock, temperature = figures.telemetry_strip(record(case)).axes
    assert list(clock.lines[0].get_ydata()) == [1980, 1575]
    assert (clock.get_ylabel(), temperature.get_ylabel()) == ("SM clock, MHz", "temperature, °C")


HOSTILE = "$\\frac$ 同期 <b>\x00"


def test_text_of_a_record_is_never_tex_and_never_a_warning():
    cells = table_results()
    cells[1].status, cells[1].reason = "invalid", HOSTILE
    for case in cells:
        case.params["profile"] = HOSTILE + case.key
    for made in (figures.overlap_bars(record(*cells)), figures.time_split(record(*cells))):
        assert b"<svg" in figures.to_svg(made)
    assert b"<svg" in figures.to_svg(figures.overlapped_samples(record(*cells)))


def test_equal_records_give_equal_drawings(curve):
    first, second = (figures.to_svg(figures.chunk_curve(curve)) for _ in range(2))
    assert first == second


def test_drawing_leaves_the_callers_style_alone(curve):
    before = dict(mpl.rcParams)
    figures.to_svg(figures.chunk_curve(curve))
    assert dict(mpl.rcParams) == before
