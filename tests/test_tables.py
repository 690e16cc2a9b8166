import io

import pytest
from factories import (
    controls,
    curve_results,
    h2d_case,
    h2d_result,
    record,
    skipped,
    table_results,
    unmeasured,
)
from factories_feed import Loader, feed_record, feed_result, feed_results
from rich.console import Console

from harness import findings
from harness.labels import number, ratio, spread
from harness.profiles import packaged
from harness.suites import select
from harness.tables import case_table, list_table, overlap_table, summary_lines
from harness.views import value


def shown(renderable, width=140, *, encoding="utf-8", environ=None):
    """What a console of that width prints, colours included where it has any."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, _environ={"TERM": "xterm"} if environ is None else environ)
    console.print(renderable)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def row(text, *words):
    """The one line that has all of `words`."""
    (line,) = (line for line in text.splitlines() if all(word in line.split() for word in words))
    return line


@pytest.fixture(scope="module")
def full():
    return record(
        *table_results(), *curve_results(chunks=(1, 2, 4, 8, 16), overhead_ms=0.02), controls=controls()
    )


def test_a_row_shows_the_metrics_of_its_case(full):
    text = shown(case_table(full))
    case = full.case(h2d_case(memory="pageable", gate="off").key)
    cells = row(text, "pageable", "side").split()
    for name in ("transfer_ms", "compute_ms", "serial_ms", "overlapped_ms"):
        assert number(case.metrics[name].value) in cells
    for name in ("hidden_fraction", "bound_ratio", "model_ratio"):
        assert ratio(case.metrics[name].value) in cells
    assert spread(case.metrics["overlapped_ms"]) in row(text, "pageable", "side")
    assert cells[-1] == "ok"


def test_what_all_rows_share_stands_above_them(full):
    title, *rows = shown(case_table(full)).splitlines()
    assert "256MiB" in title
    assert "profile=h200.1a2b" in title
    assert not [line for line in rows if "256MiB" in line]


@pytest.mark.parametrize("width", [44, 50, 60, 80, 100, 140])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_a_narrow_table_shows_is_whole_and_what_it_lacks_is_named(full, width, encoding):
    cases = table_results()
    for case in cases[1:]:
        case.status, case.reason = "unsettled", "too wide"
    bad = h2d_result(h2d_case(issue="copies-first"), status="invalid", reason="shared GPU")
    made = record(bad, *cases, *curve_results(chunks=(1, 64)))
    text = shown(case_table(made), width, encoding=encoding)
    assert max(map(len, text.splitlines())) <= width
    assert text.count(" unsettled [2]") == 3
    header = " ".join(text.splitlines()[:4]).split()
    named = " ".join(text.split()).partition("No room here for: ")[2].partition(". A wider")[0].split(", ")
    for title, word in (
        ("transfer ms", "transfer"),
        ("compute ms", "compute"),
        ("serial ms", "serial"),
        ("hidden fraction", "fraction"),
        ("over bound", "bound"),
        ("over model", "model"),
    ):
        assert (word in header) != (title in named)
    for case in made.cases:
        assert number(value(case, "overlapped_ms")) in text


def test_columns_of_a_plain_ascii_table_stand_apart(full):
    assert row(
        shown(case_table(full), encoding="ascii"), "case", "ms", "fraction", "bound", "model", "status"
    )


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_console_and_every_case_stays_readable(full, width):
    lines = shown(case_table(full), width).splitlines()
    assert max(map(len, lines)) <= width
    for case in full.cases:
        overlapped = case.metrics["overlapped_ms"]
        wanted = f"{number(overlapped.value)} {spread(overlapped)}"
        assert [line for line in lines if f"n={case.params['chunks']} " in line and wanted in line]


def test_columns_left_out_for_want_of_room_are_named(full):
    narrow, wide = shown(case_table(full), 80), shown(case_table(full), 140)
    assert "No room here for: serial ms, over model" in narrow.replace("\n", " ")
    assert "serial" not in narrow.splitlines()[1]
    assert "No room" not in wide


def test_a_case_without_numbers_shows_status_and_reason_and_no_number():
    bad = h2d_result(h2d_case(), status="invalid", reason="shared GPU: 1 other process")
    text = shown(case_table(record(bad, skipped(h2d_case(memory="pageable"), "never gated"))))
    assert row(text, "pinned").split()[-2:] == ["invalid", "[1]"]
    assert not any(mark.isdigit() for mark in row(text, "pinned").replace("[1]", ""))
    assert "[1] shared GPU: 1 other process (1 case)" in text
    assert "[2] never gated (1 case)" in text


def test_unsettled_is_marked_beside_its_numbers():
    case = h2d_result(h2d_case(), status="unsettled", reason="the interval was wider than 1.0%")
    line = row(shown(case_table(record(case, *curve_results(chunks=(1,))))), "n=8")
    assert number(case.metrics["overlapped_ms"].value) in line.split()
    assert "unsettled [1]" in line


def test_equal_reasons_are_given_once():
    text = shown(case_table(record(*(skipped(h2d_case(chunks=n), "no GPU") for n in (1, 2, 4)))))
    assert text.count("no GPU") == 1
    assert "(3 cases)" in text


def test_text_of_a_record_is_neither_markup_nor_control():
    text = shown(case_table(record(unmeasured(h2d_case(), "error", "[red]x[/red] [/] \x1b[2Jgone"))))
    assert "[red]x[/red] [/]" in text
    assert "\x1b" not in text


def test_a_record_without_cases_says_so():
    assert "no case" in shown(case_table(record()))
    assert overlap_table(record()) is None


def test_overlap_table_shows_hidden_host_total_and_price(full):
    text = shown(overlap_table(full), 100)
    cells = {place: full.case(h2d_case(memory=place[0], stream=place[1], gate="off").key) for place in PLACES}
    least = cells["pinned", "side"].metrics["overlapped_ms"].value
    for case in cells.values():
        metrics = case.metrics
        assert (
            f"{ratio(metrics['hidden_fraction'].value)} ({ratio(metrics['hidden_fraction'].low)} to" in text
        )
        assert f"{number(metrics['overlapped_ms'].value)} {spread(metrics['overlapped_ms'])}" in text
        assert number(metrics["host_blocked_ms"].value) in text
        assert ratio(metrics["overlapped_ms"].value / least) in text


PLACES = [(memory, stream) for memory in ("pinned", "pageable") for stream in ("side", "default")]


def test_overlap_table_gives_the_reason_of_a_skipped_cell_and_no_price():
    cells = [skipped(h2d_case(stream=s, gate="off"), "no pinned memory here") for s in ("side", "default")]
    text = shown(overlap_table(record(*cells, *table_results()[2:], device="cpu")), 80)
    assert "no pinned memory here" in " ".join(text.split())
    assert set(row(text, "over", "+").split()[4:]) == {"-"}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_cell_that_is_not_in_the_run_says_so_on_the_first_line_of_its_block(absent):
    cells = table_results()
    del cells[absent]
    lines = shown(overlap_table(record(*cells)), 100).splitlines()
    (said,) = (line for line in lines if "not in this run" in line)
    assert said.split()[:3] == ["pinned", "hidden", "fraction"]
    assert (said.index("not in this run") > said.index("(")) == bool(absent)
    assert sum(line.startswith(("pinned", "pageable")) for line in lines) == 2


def test_a_block_that_is_not_in_the_run_is_one_line():
    lines = shown(overlap_table(record(*table_results()[:2])), 100).splitlines()
    (said,) = (line for line in lines if "not in this run" in line)
    assert said.split() == ["pageable", *["not", "in", "this", "run"] * 2]


def test_summary_lines_are_the_findings_and_mark_doubts():
    made = record(*table_results(), controls=controls(failing=["null"]))
    lines = summary_lines(made)
    assert [line.removeprefix("! ") for line in lines] == [found.text for found in findings.summary(made)]
    assert [line for line in lines if line.startswith("! ")] == ["! " + findings.controls(made).text]


def test_a_list_has_one_row_a_case_and_only_the_axes_that_vary():
    cases = select(["h2d"], "quick", packaged()["h200"])
    text = shown(list_table(cases), 80)
    title, header, *_ = text.splitlines()
    assert title == f"h2d: {len(cases)} cases, all ratio=1, profile={packaged()['h200'].key}"
    assert header.split() == ["memory", "stream", "chunks", "size", "gate"]
    assert row(text, "pinned", "64", "512MiB", "on")
    assert cases[0].key in text.replace("\n", "")


def test_families_are_listed_one_by_one():
    both = select([], "quick", packaged()["h200"])
    text = shown(list_table(both), 80)
    for family in ("h2d", "ddp", "feed"):
        count = sum(case.family.name == family for case in both)
        assert f"\n{family}: {count} cases, all" in f"\n{text}"
    assert text.count("Choose some with --case") == 1


def test_a_list_cuts_no_value_short():
    cases = [h2d_case(), h2d_case(memory="pageable", stream="default", ratio=0.5, gate="off", issue="copies-first",
                                  chunks=64, size=3 << 20, profile="generic.0123456789")]  # fmt: skip
    text = shown(list_table(cases), 60)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_a_list_of_one_or_of_none():
    assert row(shown(list_table([h2d_case()])), "pinned", "256MiB")
    assert "No case" in shown(list_table([]))


def test_loaders_have_words_of_their_own_and_what_is_said_of_them_stands_below():
    made = feed_record(*feed_results(Loader(), (2, 4, 8)), feed_result(Loader(), workers=8, source="store"))
    text = shown(case_table(made), 120)
    head = " ".join(text.splitlines()[1:3])
    for word in ("loader", "cached", "real step", "device", "in next()", "verdict"):
        assert word in head
    assert "hidden" not in head
    assert row(text, "workers=2", "input-bound", "2.00")
    assert row(text, "workers=4", "balanced")
    assert row(text, "workers=8", "source=store", "compute-bound")
    assert "storage must give up to 160 MB/s" in text
    narrow = shown(case_table(made), 80)
    assert "input-bound" in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def test_a_loader_without_numbers_has_no_verdict():
    text = shown(case_table(feed_record(feed_result(status="error", reason="worker 1 was killed"))), 120)
    assert "[1] worker 1 was killed (1 case)" in text
    assert "bound" not in text


def test_colour_is_an_extra_that_can_be_switched_off(full):
    table = case_table(record(h2d_result(h2d_case(), status="unsettled", reason="why")))
    forced = {"TERM": "xterm", "FORCE_COLOR": "1"}
    assert "\x1b[33m" in shown(table, environ=forced)
    assert "\x1b[33m" not in shown(table, environ={**forced, "NO_COLOR": "1"})
    assert "\x1b" not in shown(table)


def test_a_console_of_plain_ascii_gets_plain_ascii(full):
    for table in (case_table(full), overlap_table(full)):
        assert "+-" in shown(table, encoding="ascii")
