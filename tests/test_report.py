import base64
import copy
import html
import re
import stat
from html.parser import HTMLParser

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
from factories_ddp import MIB, Machine, bucket_results, ddp_record
from factories_feed import Loader, feed_record, feed_result, feed_results

from harness import findings
from harness.errors import UsageError
from harness.labels import number, percent, ratio, spread
from harness.registry import METRICS
from harness.report import render, write_report

SCRIPT = "<script>alert(1)</script>"
VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Words, tags and attributes of a page; fails on tags that do not pair."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self._open = [], [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


@pytest.fixture(scope="module")
def full():
    failed = h2d_result(h2d_case(chunks=32), status="invalid", reason="shared GPU: 1 other process")
    return record(
        *table_results(),
        *curve_results(chunks=(1, 2, 4, 8, 16), overhead_ms=0.02, dropped={"gate leaked": 2}),
        failed,
        skipped(h2d_case(memory="pageable"), "pageable copies are never gated"),
        controls=controls(),
    )


@pytest.fixture(scope="module")
def page(full):
    return Page(render(full))


@pytest.fixture(autouse=True)
def quick_drawing(monkeypatch):
    """Drawing takes most of the time; `page` is made before this, with true figures."""
    monkeypatch.setattr("harness.report.figures.to_svg", lambda figure: b"<svg></svg>")


def cells(text, case):
    """The cells of a case's row, as text."""
    (row,) = re.findall(rf'<tr title="{re.escape(html.escape(case.key))}".*?</tr>', text, re.DOTALL)
    return [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]


def test_every_measured_case_is_there_with_its_numbers(full):
    text = render(full)
    for case in filter(lambda case: case.measured, full.cases):
        metrics, found = case.metrics, cells(text, case)
        assert found[1] == "ok"
        assert f"{number(metrics['overlapped_ms'].value)} {spread(metrics['overlapped_ms'])}" in found
        for name in ("transfer_ms", "compute_ms", "serial_ms", "host_blocked_ms"):
            assert number(metrics[name].value) in found
        for name in ("bound_ratio", "model_ratio"):
            assert ratio(metrics[name].value) in found
        hidden = metrics["hidden_fraction"]
        assert f"{ratio(hidden.value)} ({ratio(hidden.low)} to {ratio(hidden.high)})" in found


def test_bad_cases_show_status_and_reason_and_no_number(full, page):
    text = render(full)
    for case in full.cases[-2:]:
        found = cells(text, case)
        assert found[1] == case.status
        assert set(found[2:-1]) == {"-"}
        assert case.reason in page.text


def test_dropped_samples_stand_beside_the_rounds_used(full):
    assert cells(render(full), full.cases[4])[-1] == "20 (2)"
    assert "dropped: gate leaked 10" in Page(render(full)).text


def test_keys_can_be_copied(full, page):
    assert all(case.key in page.text for case in full.cases)


def test_the_table_and_the_verdict_open_the_page(full, page):
    opening = page.text.partition("How many chunks")[0]
    for found in findings.summary(full):
        assert found.text in opening
    for case in full.cases[:4]:
        assert ratio(case.metrics["hidden_fraction"].value) in opening
    assert f"hides {percent(full.cases[0].metrics['hidden_fraction'].value)} of the shorter leg" in opening


def test_the_curve_is_there_as_numbers_too(full, page):
    section = page.text.partition("How many chunks")[2].partition("Where the time goes")[0]
    for case in full.cases[4:9]:
        for name in ("piece_ms", "curve_ms", "bound_ms"):
            assert number(case.model[name]) in section
    assert "theory's n*" in section


def test_controls_are_listed_with_what_they_accept(full):
    text = Page(render(record(*table_results(), controls=controls(failing=["null"])))).text
    assert re.search(r"null 0 1\.\d\d -0\.005 to 0\.005 fraction failed", text)
    assert re.search(r"negative 0 0\.010 -0\.150 to 0\.150 fraction passed", text)
    assert "controls: none were run" in Page(render(record(*table_results()))).text


def test_every_metric_is_explained(page):
    for metric in METRICS.values():
        assert metric.description in page.text


def test_machine_software_and_environment_are_there(full):
    full = copy.deepcopy(full)
    full.environment["variables"] = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "list": ["a", "b"]}
    text = Page(render(full)).text
    for words in ("gpu.name NVIDIA H200", "torch 2.11.0", "variables.CUDA_DEVICE_MAX_CONNECTIONS 8", "a, b"):
        assert words in text


def test_it_says_how_to_measure_again(full, page):
    full = copy.deepcopy(full)
    assert f"At commit {full.run.commit} : overlap run --tier quick" in page.text
    full.run.command = ["run", "--case", "h2d[a b]"]
    assert "overlap run --case 'h2d[a b]'" in Page(render(full)).text


@pytest.mark.parametrize(
    "where", ["key", "reason", "machine", "software", "control", "dropped", "check", "command"]
)
def test_text_of_a_record_is_escaped(where):
    case = h2d_result(h2d_case(gate="off"))
    made = record(case, unmeasured(h2d_case(chunks=2), "error", "why"), controls=controls())
    if where == "key":
        case.key = f"h2d[{SCRIPT}]"
    elif where == "reason":
        made.cases[1].reason = SCRIPT
    elif where == "machine":
        made.machine.gpu["name"] = SCRIPT
    elif where == "software":
        made.software[SCRIPT] = {SCRIPT: [SCRIPT]}
    elif where == "control":
        made.controls[0].name = made.controls[0].unit = made.controls[0].detail = SCRIPT
    elif where == "dropped":
        case.launches[0].dropped = {SCRIPT: 1}
    elif where == "check":
        case.checks["bimodal"] = {SCRIPT: [1.0, 2.0, 0.5]}
    else:
        made.run.command = [f'"><{SCRIPT}']
    text = render(made)
    assert "script" not in Page(text).tags
    assert SCRIPT not in text
    assert html.escape(SCRIPT) in text


def test_an_attribute_cannot_be_left():
    case = h2d_result(h2d_case())
    case.key = 'x" onmouseover="alert(1)'
    names = [name for name, _ in Page(render(record(case))).attributes]
    assert not [name for name in names if name.startswith("on")]


def test_the_page_needs_nothing_from_elsewhere(page):
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert all(value.startswith("data:image/svg+xml;base64,") for value in page.values("src"))
    assert all(value.startswith("#") for value in page.values("href"))
    assert any("default-src 'none'" in value for value in page.values("content"))


def test_links_lead_somewhere_and_figures_have_words(page):
    assert {value[1:] for value in page.values("href")} <= set(page.values("id"))
    pictures = page.values("src")
    assert len(page.values("alt")) == len(pictures) == 4
    for picture in pictures:
        assert b"</svg>" in base64.b64decode(picture.partition(",")[2])


def test_a_record_with_nothing_measured_has_a_page_without_figures():
    text = render(record(*(skipped(h2d_case(chunks=n), "no GPU here") for n in (1, 2, 4)), device="cpu"))
    page = Page(text)
    assert "img" not in page.tags
    assert "nothing was measured: skipped: no GPU here" in page.text
    assert "never comparable with a GPU" in page.text


def test_an_empty_unfinished_record_has_a_page():
    made = record()
    made.run.finished, made.run.planned = False, ["a", "b"]
    assert "0 of 2 planned" in Page(render(made)).text


def test_doubts_are_marked_and_listed():
    made = record(*table_results(), controls=controls(failing=["null"]), dirty=True)
    text = render(made)
    assert f'<li class="doubt">{findings.controls(made).text}' in text
    section = Page(text).text.partition("What to doubt How")[0]
    assert "the tree had uncommitted changes" in section


def test_the_file_is_the_page_and_names_no_place(full, tmp_path):
    path = tmp_path / "deep" / "report.html"
    write_report(full, path)
    assert path.read_text(encoding="utf-8") == render(full)
    assert str(tmp_path) not in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_a_folder_that_cannot_be_written_is_a_users_mistake(full, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="report: cannot write"):
        write_report(full, tmp_path / "file" / "report.html")


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("harness.report.figures.overlap_bars", lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(record(*table_results()), path)
    assert path.read_text() == "old"


def test_collectives_have_their_section_and_copies_theirs(full, page):
    machine = Machine(alpha_ms=0.05, bandwidth=303.0, rate=600e12, dilation=0.1)
    cases = [
        case
        for tokens in (512, 2048, 8192)
        for case in bucket_results(machine, (25 * MIB, 128 * MIB), (8 * MIB,) * 64, tokens=tokens)
    ]
    text = Page(render(ddp_record(*cases))).text
    section = text.partition("Tokens per GPU, and buckets")[2].partition("Where the time goes")[0]
    assert "Best bucket: ddp model=blocks tokens=2048" in section
    assert "formula: (g/2) r F u / W" in section
    assert "How many chunks" not in text
    assert all(f"{number(case.metrics['tail_ms'].value)}" in text for case in cases)
    assert "Tokens per GPU, and buckets" not in page.text


def test_loaders_have_their_section_with_what_is_said_of_them(page):
    text = Page(
        render(feed_record(*feed_results(Loader(), (2, 4)), feed_result(Loader(), source="store")))
    ).text
    section = text.partition("over cached")[0].rpartition("Does the loader keep up?")[2]
    assert "feed jpeg pinned: input-bound with 2 workers" in section
    assert "storage must give up to 160 MB/s" in section
    rows = text.partition("headroom")[2].partition("Where the time goes")[0]
    assert "workers=2 input-bound 4.00 2.00" in rows
    assert "How many chunks" not in text
    assert "Does the loader keep up?" not in page.text
