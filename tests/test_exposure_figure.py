"""What is drawn of collectives, read from the axes."""

import pytest
from factories import record
from factories_ddp import MIB, Machine, bucket_results, ddp_record, token_results

from harness import exposure_figure, figures, metrics

MACHINE = Machine(alpha_ms=0.05, bandwidth=303.0, rate=600e12, dilation=0.1)
TENSORS = (8 * MIB,) * 64
CAPS, TOKENS = (25 * MIB, 64 * MIB, 128 * MIB), (512, 2048, 8192)


def cases(**axes):
    found = [
        case for tokens in TOKENS for case in bucket_results(MACHINE, CAPS, TENSORS, tokens=tokens, **axes)
    ]
    for case in found:
        derived = metrics.derive(case)
        case.model, case.metrics = derived.model, derived.metrics | case.metrics
    return found


def lines(ax, style="-"):
    """By label: x of every point, then y."""
    found = [line for line in ax.get_lines() if line.get_linestyle() == style and len(line.get_xdata()) > 2]
    return {
        line.get_label(): [float(each) for each in (*line.get_xdata(), *line.get_ydata())] for line in found
    }


def test_what_lies_bare_is_drawn_by_tokens_and_the_step_by_cap_beside_its_schedule():
    made = ddp_record(*cases())
    left, right = exposure_figure.draw(made).axes
    for cap in CAPS:
        alike = [case for case in made.cases if case.params["bucket"] == cap]
        expected = [*TOKENS, *(case.metrics["exposed_fraction"].value for case in alike)]
        assert lines(left)[f"bucket={cap // MIB}MiB"] == pytest.approx(expected)
    for tokens in TOKENS:
        alike = [case for case in made.cases if case.params["tokens"] == tokens]
        expected = [*CAPS, *(case.metrics["overlapped_over_compute"].value for case in alike)]
        assert lines(right)[f"tokens={tokens}"] == pytest.approx(expected)
    modelled = [y for points in lines(right, "--").values() for y in points[len(CAPS) :]]
    expected = [
        case.model["piece_ms"] / case.metrics["compute_ms"].value
        for tokens in TOKENS
        for case in made.cases
        if case.params["tokens"] == tokens
    ]
    assert modelled == pytest.approx(expected)


def test_every_cap_has_a_colour_of_its_own_and_each_model_a_row():
    made = ddp_record(*cases(), *token_results(MACHINE, TOKENS, model="embedding"))
    figure = exposure_figure.draw(made)
    assert len(figure.axes) == 4
    colours = [line.get_color() for line in figure.axes[0].get_legend().get_lines()]
    assert len(set(colours)) == len(colours) == len(CAPS)
    assert "embedding" in figure.axes[2].get_title(loc="left")
    assert "fewer than two lists" in figure.axes[3].texts[0].get_text()
    assert figures.to_png(figure).startswith(b"\x89PNG")


def test_nothing_is_drawn_of_nothing():
    assert exposure_figure.draw(record()) is None
    assert exposure_figure.draw(ddp_record(*token_results(MACHINE, (512,)))) is None
