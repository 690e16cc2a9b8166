import io
import json

import pytest
from rich.console import Console

from harness import registry, timeline
from harness.comparable import Difference
from harness.history import History, Level, Newest, Series, Step
from harness.points import MISSING, Break, Point
from harness.record import Metric

KEY = "h2d[memory=pinned,stream=side,chunks=8]"


def point(at: int, value: float | None = 5.4, **options) -> Point:
    metric = None if value is None else Metric(value=value, unit="ms", low=value * 0.99, high=value * 1.01)
    given = {
        "dirty": False,
        "time": f"2026-01-{at + 1:02}T08:00:00Z",
        "status": "ok",
        "reason": "",
        "launches": 1,
    }
    return Point(commit=f"{at:02x}" * 20, value=metric, **(given | options))


def series(points: list[Point], **options) -> Series:
    return Series(KEY, "h200-1", points, options.pop("breaks", []), **options)


@pytest.fixture
def busy() -> Series:
    """A step, a gap, a break, a changed tree, and a newest point apart."""
    points = [point(at) for at in range(4)] + [point(at, 5.7) for at in range(4, 8)]
    points[1] = point(1, None, status="invalid", reason="shared \x1b[31mGPU", launches=0)
    points[3] = point(3, None, status=MISSING, reason="not among the cases of this run", launches=0)
    points[6] = point(6, dirty=True)
    return series(
        points,
        breaks=[Break(2, [Difference("software.driver", "580.1", "590.2")])],
        levels=[Level(0, 3, 5.4), Level(4, 7, 5.7)],
        steps=[Step(4, 2, 5.4, 5.7, 2)],
        newest=Newest(1, 5.7, 5.814),
    )


def history(*found: Series, **options) -> History:
    return History(metric=registry.METRICS["overlapped_ms"], series=list(found), records=8, **options)


def shown(found: History, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(timeline.table(found))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_every_commit_and_every_break_has_a_row(busy):
    title, header, _, *rows = shown(history(busy))
    assert title == f"overlapped, ms: {KEY} on h200-1"
    assert header.split() == ["commit", "time", "ms", "status", "note"]
    assert [" ".join(row.split()) for row in rows] == [
        "00000000 2026-01-01 08:00 5.40 ±1.0 % ok",
        "01010101 2026-01-02 08:00 - invalid shared [31mGPU",
        "break: driver: 580.1 vs 590.2",
        "02020202 2026-01-03 08:00 5.40 ±1.0 % ok",
        "03030303 2026-01-04 08:00 - missing not among the cases of this run",
        "04040404 2026-01-05 08:00 5.70 ±1.0 % ok step: +5.6 %, 5.40 to 5.70",
        "05050505 2026-01-06 08:00 5.70 ±1.0 % ok",
        "06060606+dirty 2026-01-07 08:00 5.40 ±1.0 % ok uncommitted changes: not in the fit",
        "07070707 2026-01-08 08:00 5.70 ±1.0 % ok",
    ]


def test_steps_and_doubts_are_said_below_it(busy):
    step, newest, order = timeline.lines(history(busy, by_time="not a git repository"))
    assert step == (
        "+5.6 % from 04040404 (2026-01-05) on, or with the commit before it, which has no number: 5.40 to 5.70"
    )
    assert newest == (
        "! the newest point lies 2.0 % above the level before: the fit finds a step only when there are more points of "
        "it; with three launches of each at once: overlap compare 05050505 07070707"
    )
    assert order == "! not a git repository: in the order of time, where git does not know a commit"


@pytest.mark.parametrize(
    ("commits", "words"),
    [
        (1, "+5.6 % from 02020202 (2026-01-03) on: 5.40 to 5.70"),
        (4, "on, or with one of the 3 commits before it, which have no number: "),
        (None, "on, the first one measured after 01010101: "),
    ],
)
def test_a_step_tells_how_sure_its_commit_is(commits, words):
    found = series([point(0), point(1), point(2, 5.7)], steps=[Step(2, 1, 5.4, 5.7, commits)])
    assert words in next(iter(timeline.lines(history(found))))


def test_steps_down_and_from_zero_have_a_size():
    assert timeline.step_size(Step(1, 0, 5.7, 5.4, 1)) == "-5.3 %"
    assert timeline.step_size(Step(1, 0, 0.0, 0.5, 1)) == "0.00 to 0.500"


def test_what_was_not_found_is_said():
    plain = series([point(at) for at in range(9)])
    assert list(timeline.lines(history(plain))) == ["no step in 9 points"]
    few = series([point(0), point(1)], lone=1, breaks=[Break(1, [Difference("method", 1, 2)])])
    assert list(timeline.lines(history(few))) == ["! 1 point since 01010101: below 8 no step is looked for"]
    short = series([point(0)], lone=1)
    assert list(timeline.lines(history(short))) == ["! 1 point: below 8 no step is looked for"]


def test_two_newest_points_are_named_together():
    points = [point(at) for at in range(9)] + [point(9, 5.0), point(10, 5.0)]
    (_, line) = timeline.lines(history(series(points, newest=Newest(2, 5.4, 5.0))))
    assert line.startswith("! the 2 newest points lie 7.4 % below the level before: ")
    assert line.endswith("overlap compare 08080808 0a0a0a0a")


def test_of_several_series_there_is_a_line_each(busy):
    other = series([point(0)])
    title, _, _, *rows = shown(history(busy, other))
    assert title == "overlapped, ms: 2 series"
    assert [" ".join(row.split()) for row in rows] == [
        f"{KEY} h200-1 5.70 ±1.0 % 6 2 1 +5.6 % at 04040404",
        f"{KEY} h200-1 5.40 ±1.0 % 1 0 0",
    ]
    (newest,) = timeline.lines(history(busy, other))
    assert newest.startswith(f"! {KEY} on h200-1: the newest point lies 2.0 % above")


def test_programs_get_all_of_it(busy):
    told = json.loads(json.dumps(timeline.as_json(history(busy)), allow_nan=False))
    assert (told["metric"], told["unit"], told["order"], told["broken"]) == ("overlapped_ms", "ms", "git", [])
    (found,) = told["series"]
    assert found["points"][0] == {
        "commit": "00" * 20, "dirty": False, "time": "2026-01-01T08:00:00Z", "status": "ok", "reason": "", "value": 5.4,
        "low": 5.4 * 0.99, "high": 5.4 * 1.01, "launches": 1, "records": 1,
    }  # fmt: skip
    assert found["points"][1]["value"] is None
    (step,) = found["steps"]
    assert (step["commit"], step["since"], step["commits"], step["before"]) == ("04" * 20, "02" * 20, 2, 5.4)
    assert found["breaks"] == [
        {
            "at": 2,
            "commit": "02" * 20,
            "differences": [{"key": "software.driver", "a": "580.1", "b": "590.2"}],
        }
    ]
    assert found["newest"] == {"points": 1, "level": 5.7, "value": 5.814}
