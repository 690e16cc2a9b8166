import html
import itertools
import re
import struct
from pathlib import Path

import matplotlib as mpl
import pytest
from test_timeline import KEY, busy, history, point, series

from harness import history_figure
from harness.comparable import Difference
from harness.errors import UsageError
from harness.history import Step
from harness.points import Break

__all__ = ["busy"]


def lines(ax, label: str) -> list[list[tuple[float, float]]]:
    return [
        list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.lines if line.get_label() == label
    ]  # fmt: skip


def words(figure) -> str:
    return "\n".join(item.get_text() for item in figure.findobj(mpl.text.Text))


def test_levels_steps_breaks_and_gaps_are_drawn_as_such(busy):
    figure = history_figure.draw(history(busy))
    (ax,) = figure.axes
    assert lines(ax, "level") == [[(0, 5.4), (3, 5.4)], [(4, 5.7), (7, 5.7)]]
    assert [line[0][0] for line in lines(ax, "step")] == [3.5]
    assert [line[0][0] for line in lines(ax, "break: not comparable across")] == [1.5]
    assert [line[0][0] for line in lines(ax, "no number: invalid")] == [1]
    assert [line[0][0] for line in lines(ax, "no number: missing")] == [3]
    assert lines(ax, "apart: perhaps a step begun") == [[(7, 5.7)]]
    drawn = {bar.get_label(): bar.lines[0].get_xdata()[0] for bar in ax.containers}
    assert drawn["measured, 95 % interval"] == 7, "the last of them"
    assert drawn["uncommitted changes"] == 6
    text = words(figure)
    for expected in ("+5.6 %\n04040404", "driver: 580.1 vs 590.2", "overlapped, ms", f"{KEY} on h200-1"):
        assert expected in text


def test_where_something_happened_the_commit_is_named():
    found = series([point(at) for at in range(100)], steps=[Step(41, 40, 5.4, 5.7, 1)])
    found.breaks.append(Break(73, [Difference("method", 1, 2)]))
    ticks = history_figure._ticks(found)
    assert {41, 73, 99} <= set(ticks)
    assert len(ticks) <= history_figure.TICKS + 2
    assert min(b - a for a, b in itertools.pairwise(ticks)) >= 100 // history_figure.TICKS


def test_an_image_and_a_page_are_written_whole(busy, tmp_path: Path):
    found = history(busy, series([point(0, 5.0)]))
    history_figure.write(found, tmp_path / "new" / "a.png")
    data = (tmp_path / "new" / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1350, round(150 * (1.2 + 2 * 2.7)))
    history_figure.write(found, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "data:image/svg+xml;base64," in page
    assert "<td>break: driver" not in page
    assert '<td colspan="5">break: driver: 580.1 vs 590.2' in page
    assert page.count("<tr>") == 2 + 8 + 1 + 1
    assert not re.search(r"https?://", page), "it needs no other host"


def test_what_a_record_says_is_text_and_no_markup(tmp_path: Path):
    evil = "<script>alert(1)</script> $x$"
    found = series([point(0), point(1, None, status="invalid", reason=evil)])
    history_figure.write(history(found), tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert evil not in page
    assert html.escape(evil) in page


def test_what_cannot_be_drawn_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"output: got a\.svg, want a file that ends in \.png or \.html"):
        history_figure.check(Path("a.svg"))
    many = history(*(series([point(0)]) for _ in range(history_figure.PANELS + 1)))
    with pytest.raises(UsageError, match="output: 31 series, want 30 at most; name fewer cases"):
        history_figure.write(many, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_history_without_a_number_is_drawn_all_the_same(tmp_path: Path):
    found = history(series([point(0, None, status="error", reason="x")]))
    assert lines(history_figure.draw(found).axes[0], "no number: error")
