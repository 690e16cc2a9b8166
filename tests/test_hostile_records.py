"""Records from anywhere, through the commands that read them: output or one clear line, nothing run, nothing written
elsewhere. (tests/test_record.py has what is read and what is refused, and why.)
"""

import ast
import contextlib
import html
import io
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import factories
import pytest
from factories_ddp import Machine, ddp_record, ddp_result
from hypothesis import given, settings
from hypothesis import strategies as st
from test_record import ANY, RECORDS, WORDS, places, small

import harness
from harness import asv_store, cli, figures, record
from harness.errors import RecordError

PACKAGE = Path(harness.__file__).parent
COMMANDS = (
    ("show", "x.json"),
    ("show", "--json", "x.json"),
    ("report", "--results", "out", "x.json"),
    ("ingest", "x.json"),
)


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current folder, with all that `ingest` asks for save asv, which is not started."""
    made = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setattr(asv_store, "_run", lambda command, environment: "")
        patch.setattr(asv_store, "_commit", lambda *arguments: "0" * 40)
        patch.setattr(figures, "to_svg", lambda figure: b"<svg></svg>")  # drawing takes most of the time
        (made / "asv.conf.json").write_text("{}")
        yield made


def overlap(*arguments: str) -> Said:
    """`overlap` in this process; whatever it raises but an exit is raised here."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["overlap", *arguments])
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            cli.main()
    return Said(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def steering(text: str) -> set[str]:
    """Characters that steer a terminal, turn text round, or are not shown."""
    return {mark for mark in text if mark != "\n" and not mark.isprintable()}


def give(data: bytes) -> list[int]:
    """Every command is given these bytes for a record; its exit codes. Fails on what no bytes may bring about."""
    Path("x.json").write_bytes(data)
    codes = []
    for arguments in COMMANDS:
        said = overlap(*arguments)
        assert said.code in (0, 2, 4), said
        assert not steering(said.out + said.err)
        if said.code == 2:
            assert said.out == ""
            assert re.fullmatch("overlap: .+\n", said.err), said.err
        elif said.code == 0:
            assert said.err == ""
        codes.append(said.code)
    others = {Path("x.json"), Path("asv.conf.json")}
    pages = {path for path in Path().rglob("*") if path.is_file()} - others
    assert all(path.match("out/reports/*/x.html") and len(path.parts) == 4 for path in pages), pages
    for page in pages:
        assert not steering(page.read_text())
    return codes


@settings(max_examples=15, deadline=None)
@given(RECORDS, st.booleans())
def test_whatever_a_record_holds_it_is_shown(folder, made, finished):
    made.run.finished = finished
    assert give(record.dumps(made))[:3] == [0, 0, 0]


WHOLE = json.loads(
    record.dumps(
        factories.record(
            *factories.table_results(rounds=3),
            *factories.curve_results(rounds=3, chunks=(1, 2, 4)),
            controls=factories.controls(),
        )
    )
)
EXTREMES = st.sampled_from([0, -1.0, 1, 64, 1e-300, 1e-9, 1e6, 1e12, 1e300, 10**99])


def changed(place: tuple, value: object) -> bytes:
    content = json.loads(json.dumps(WHOLE))
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return json.dumps(content).encode()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(places(WHOLE)), ANY | EXTREMES | st.just([[]]) | st.just({"": {}}))
def test_a_wrong_value_anywhere_is_shown_or_refused_in_one_line(folder, place, value):
    shown = give(changed(place, value))[:3]
    assert set(shown) in ({0}, {2}), "what one command reads, the others do"


TO_SVG = figures.to_svg
METRICS = WHOLE["cases"][-1]["metrics"]


def test_numbers_of_any_size_are_drawn(folder):
    """Those that no axis can hold too."""
    content = json.loads(json.dumps(WHOLE))
    sizes = itertools.cycle([1e-300, 1e-9, 1e6, 1e12])
    for case in content["cases"][-2:]:
        case["metrics"] |= {
            name: {"value": next(sizes), "unit": metric["unit"]} for name, metric in METRICS.items()
        }
        case["metrics"]["bound_ratio"]["value"] = 1e-9
        case["model"]["bound_ms"] = 1e-300
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "to_svg", TO_SVG)
        assert give(json.dumps(content).encode())[:3] == [0, 0, 0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2000).map(lambda length: json.dumps(WHOLE).encode()[:length]) | st.binary(max_size=40))
def test_what_is_no_record_is_refused_in_one_line(folder, data):
    assert give(data) == [2] * 4


@pytest.mark.parametrize(
    "data",
    [
        b'{"schema": 99, "machine": {"name": "../x"}}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"schema":' * 2000 + b"1" + b"}" * 2000,
        b'{"schema": 1, "run": ' + b"9" * 100_000 + b"}",
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    ],
    ids=["newer", "deep lists", "deep objects", "a long number", "a pickle"],
)
def test_odd_files_are_refused_in_one_line(folder, data):
    assert give(data) == [2] * 4


@settings(max_examples=15, deadline=None)
@given(
    WORDS
    | st.sampled_from(["../up", "/etc/x", "..", ".", "a/../../b", "a\\b", "~root", "$HOME", "x\n", "con\0"])
)
def test_a_machine_s_name_leads_nowhere_else(folder, name):
    codes = give(changed(("machine", "name"), name))
    assert codes == [2] * 4 or re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name)


ESCAPES = "\x1b[31m\x1b]0;title\x07 \u202e\u2066 \u2028 \x9b1m <b onmouseover=alert(1)>&amp;</b> [red]x[/red]"


def test_text_that_steers_is_shown_as_text(folder):
    made = factories.record(
        *factories.table_results(rounds=3),
        factories.unmeasured(factories.h2d_case(chunks=2), "error", ESCAPES),
        controls=factories.controls(failing=["null"]),
    )
    made.controls[2].detail = made.controls[2].unit = ESCAPES
    made.software["torch"] = made.machine.gpu["name"] = made.run.tier = ESCAPES
    made.run.command = [ESCAPES]
    assert give(record.dumps(made))[:3] == [0, 0, 0]
    page = Path("out/reports/h200-1/x.html").read_text()
    assert "<b " not in page
    assert html.escape("<b onmouseover=alert(1)>&amp;</b> [red]x[/red]") in page
    assert "<b onmouseover=alert(1)>&amp;</b> [red]x[/red]" in overlap("show", "x.json").out


def test_a_measured_case_without_a_number_is_nothing_to_hand_to_asv(folder):
    made = small()
    made.run.finished = True
    made.cases[0].launches[0].ranks[0].rounds = []
    assert give(record.dumps(made)) == [0, 0, 0, 2]
    assert overlap("ingest", "x.json").err == "overlap: x.json: has no measured case to hand to asv\n"


# Nothing that is read can be run.

RUNS_WHAT_IT_READS = {
    "pickle", "cPickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "yaml", "code", "codeop",
}  # fmt: skip
CALLS = re.compile(
    r"eval|exec|compile|__import__|os\.(system|popen|exec\w*|spawn\w*)|subprocess\.get(status)?output"
    r"|(torch|np|numpy)\.load|.*\.(run_path|run_module|exec_module|loads?_pickle|allow_pickle)"
)


def dangerous(source: str) -> list[str]:
    """Imports and calls that could run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [name for name in names if name.split(".")[0] in RUNS_WHAT_IT_READS]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if CALLS.fullmatch(called):
                found.append(called)
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                    found.append(f"{called}({keyword.arg})")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval('1')", "exec(text)", "import os\nos.system('true')",
        "subprocess.run(text, shell=True)", "np.load(path)", "np.load(path, allow_pickle=True)", "torch.load(path)",
        "runpy.run_path(path)", "__import__(name)",
    ],
)  # fmt: skip
def test_what_runs_data_is_seen(source):
    assert dangerous(source)


def test_what_runs_no_data_is_let_through():
    assert (
        dangerous("import ast, re, json\nre.compile('x'); ast.literal_eval('1'); json.load(f); d.exec_()")
        == []
    )


def test_nothing_here_can_run_what_a_file_holds():
    found = {path.name: dangerous(path.read_text()) for path in PACKAGE.rglob("*.py")}
    # What the ranks of one run tell each other comes from no file, and torch sends its own words the same way.
    found["ranks.py"].remove("pickle")
    # The gate kernel's source is in the module that has it compiled.
    assert {name: what for name, what in found.items() if what} == {}


def test_reading_a_record_starts_nothing(folder):
    """No process, no connection, no code, no write."""
    record.write(Path("x.json"), small())
    heard = []
    watched = {
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "socket.connect",
        "exec",
    }

    def hook(event: str, arguments: tuple) -> None:
        if on and (event in watched or (event == "open" and arguments[2] & os.O_ACCMODE != os.O_RDONLY)):
            heard.append((event, arguments[0]))

    on = False
    sys.addaudithook(hook)  # it cannot be taken out again
    on = True
    try:
        made = record.read(Path("x.json"))
    finally:
        on = False
    assert made == small()
    assert heard == []


DDP = json.loads(
    record.dumps(ddp_record(ddp_result(Machine(), tokens=512), ddp_result(Machine(), tokens=2048)))
)


@pytest.mark.parametrize(
    "value", ["much", None, {"a": 1}, [[1], [2]], [1e308] * 3, -1, [-1.0], [True], 1e308]
)
@pytest.mark.parametrize("fact", ["buckets", "ready_ms", "alone_ms", "flops", "parameters", "bytes"])
def test_facts_that_no_workload_can_have_said_are_refused_by_name(fact, value):
    content = json.loads(json.dumps(DDP))
    content["cases"][0]["launches"][0]["checks"][fact] = value
    with pytest.raises(RecordError, match=rf"launch 0: checks\.{fact}: got .*, want a "):
        record.loads(json.dumps(content).encode(), source="a.json")


@pytest.mark.parametrize(
    ("name", "value"), [("compute_ms", 0.0), ("transfer_ms", 0.0), ("exposed_fraction", 1e300)]
)
def test_numbers_that_no_case_can_have_are_refused_by_name(name, value):
    content = json.loads(json.dumps(DDP))
    content["cases"][0]["metrics"][name] |= {"value": value, "low": None, "high": None}
    with pytest.raises(RecordError, match=f"metrics: '{name}': got"):
        record.loads(json.dumps(content).encode(), source="a.json")
