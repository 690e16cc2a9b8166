"""The command line as people and scripts meet it: words, exit codes, and what is left on disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import factories
import pytest
from processes import children, gone

import harness
from harness import cli, devices, host, record, source, supervise
from harness.protocol import Begin, Done
from harness.record import Record

ROOT = Path(harness.__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY = "h2d[memory=pageable,stream=side,chunks={},size=1MiB,ratio=1,gate=off]"
ONE, TWO, FOUR = (KEY.format(n) for n in (1, 2, 4))
PINNED = ONE.replace("pageable", "pinned")
# Real and quick: a cpu run of small cases that settle at their first look.
QUICK = ("--device", "cpu", "--no-controls", "--target", "0.2", "--commit", COMMIT)


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Overlap:
    """`overlap` in this process, in a folder of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        # A copied tree, without history, wherever these tests run.
        monkeypatch.setattr(source, "package_root", lambda: folder)

    def __call__(self, *arguments: str) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["overlap", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int) or code is None
        return Said(code or 0, *self._capsys.readouterr())

    def refuses(self, *arguments: str) -> str:
        """The one line on stderr with which `arguments` are refused; nothing else happens."""
        before = tree(self.folder)
        said = self(*arguments)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("overlap: ")
        assert said.err.endswith("\n")
        assert said.err.count("\n") == 1
        assert tree(self.folder) == before
        return said.err.removeprefix("overlap: ").rstrip()

    def stage(self, statuses: dict[str, str], *, controls: bool = True) -> None:
        """Have `run` measure nothing, and give these statuses to the cases of these chunks in turn."""

        def run(plan, kept: Record, path: Path, watch: Callable[..., None]) -> Record:
            for case, (status, reason) in zip(plan.cases, statuses.items(), strict=True):
                word = status.rstrip("0123456789")
                made = factories.h2d_result if word in record.MEASURED else factories.unmeasured
                kept.cases.append(made(case, status=word, reason=reason))
                watch(Begin(key=case.key), 0)
                watch(Done(key=case.key, status=word, reason=reason, launch=None), 0)  # type: ignore[arg-type]
            kept.run.finished = True
            record.write(path, kept)
            return kept

        self._monkeypatch.setattr(supervise, "run", run)


@pytest.fixture
def overlap(tmp_path, monkeypatch, capsys):
    return Overlap(tmp_path, monkeypatch, capsys)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def only_record(folder: Path) -> Path:
    (found,) = (folder / "results" / "records").glob("*/*.json")
    return found


def cases(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--case", key)]


# Wrong use: one line, exit code 2, nothing written.


def with_chunks(chunks: object) -> str:
    return KEY.format(chunks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run", "--colour"], "No such option '--colour'; see overlap run --help"),
        (["run", "--device", "gpu"], "'gpu' is not one of 'auto', 'cuda', 'cpu'; see overlap run --help"),
        (["run", "--tier", "weekly"], "'weekly' is not one of 'quick', 'nightly'"),
        (["run", "--launches", "0"], "Invalid value for '--launches': 0 is not in the range 1<=x<=1000"),
        (["run", "--launches", "two"], "Invalid value for '--launches': 'two' is not a valid integer"),
        (["run", "--budget", "0"], "Invalid value for '--budget': 0.0 is not in the range x>0"),
        (["run", "--budget", "nan"], "budget: got nan, want a finite number above 0"),
        (["run", "--target", "0.5"], "Invalid value for '--target': 0.5 is not in the range 0.001<=x<=0.2"),
        (["run", "--target", "nan"], "target: got nan"),
        (["run", "--suite", "nope"], "suite: got 'nope', want one of h2d"),
        (["run", "--case", "*chunks=3,*"], "which matches none of the"),
        (["run", "--case", "h2d[]"], "h2d[]"),
        (["run", "--case", TWO.replace("side", "middle")], "h2d: stream: got 'middle', want side or default"),
        (["run", "--case", TWO.replace("size=1MiB", "size=1MB")], "size: got '1MB', want a whole number and a unit"),
        (["run", "--case", with_chunks(0)], "h2d: chunks: got 0, want a whole number from 1 to 64"),
        (["run", "--case", with_chunks("x")], "h2d: chunks: got 'x', want a whole number from 1 to 64"),
        (["run", "--case", TWO.replace("]", ",profile=cpu.0000]")], "is of profile cpu.0000, this run uses cpu."),
        (["run", "--profile", "nope"], "profile: got 'nope', want one of"),
        (["run", "--profile", "nowhere.json"], "profile: cannot read nowhere.json: No such file"),
        (["run", "--machine", "../up"], "machine: got '../up', want up to 64 letters"),
        (["run", "--machine", ""], "machine: got '', want up to 64 letters"),
        (["run", "--commit", "main"], "commit: got 'main', want 7 to 40 hex digits"),
        (["run", "--results", "afile"], "'--results': Directory 'afile' is a file"),
        (["run", "--results", "afile/below"], "results: cannot write afile/below/records/"),
        (["run", "--results", "/proc/nowhere"], "results: cannot write /proc/nowhere/records/"),
        (["run", "--resume", "nowhere.json"], "nowhere.json: cannot read: No such file"),
        (["run", "--resume"], "resume: no unfinished record under results/records; give the path of one, or begin"),
        (["list", "--suite", "nope"], "suite: got 'nope'"),
        (["list", "--case", "nope"], "case: got 'nope', which matches none of the"),
        (["show"], "Missing argument 'RECORD'; see overlap show --help"),
        (["run", "--note-record", "afile/note", "--resume", "nowhere.json"], "nowhere.json: cannot read"),
        (["calibrate", "../up", "--device", "cpu", "--output", "x.json"], "name: got '../up', want up to 64 letters"),
        (["calibrate", "../profiles/cpu", "--device", "cpu"], "name: got '../profiles/cpu', want up to 64 letters"),
        (["calibrate", "cpu", "--device", "cpu"], "exists, and its cases carry its hash; give --output or --force"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(overlap, arguments, words):
    (overlap.folder / "afile").write_text("")
    if arguments[0] == "run" and "--device" not in arguments and "--resume" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    assert words in overlap.refuses(*arguments)


def test_more_chunks_than_rows(overlap):
    profile = json.loads((ROOT / "harness" / "profiles" / "cpu.json").read_text())
    (overlap.folder / "wide.json").write_text(json.dumps(profile | {"name": "wide", "width": 16384}))
    words = overlap.refuses("run", "--device", "cpu", "--profile", "wide.json", "--case", with_chunks(32))
    assert "h2d: chunks: got 32 with size 1MiB, want at most its 16 rows" in words


def test_a_size_beyond_the_memory(overlap, monkeypatch):
    monkeypatch.setattr(host, "free_bytes", lambda: 1 << 20)
    words = overlap.refuses("run", "--device", "cpu", "--case", TWO)
    assert "h2d: size: needs" in words
    assert "0.00 GiB are free; choose a smaller size than in h2d[" in words


def test_the_doctor_says_all_that_is_here_where_cuda_is_not(overlap, monkeypatch):
    monkeypatch.setattr(devices, "_cuda", lambda *, insist: (None, "torch has no CUDA", "install one"))
    said = overlap("doctor", "--device", "cuda", "--json")
    assert said.code == 3
    first, *rest = json.loads(said.out)
    assert (first["level"], first["name"]) == ("fail", "device")
    assert first["text"].startswith("device: got cuda, but torch has no CUDA")
    assert {"python", "torch"} <= {finding["name"] for finding in rest}


@pytest.mark.parametrize("command", ["run", "list"])
def test_a_cuda_device_where_there_is_none(overlap, monkeypatch, command):
    monkeypatch.setattr(devices, "_cuda", lambda *, insist: (None, "torch has no CUDA", "install one"))
    words = overlap.refuses(command, "--device", "cuda")
    assert words == "device: got cuda, but torch has no CUDA; install one, or use --device cpu"


NO_RECORDS = {
    "empty": (b"", "not a readable record"),
    "cut short": (record.dumps(factories.record(factories.skipped(factories.h2d_case())))[:-40], "not a readable"),
    "not JSON": (b"\x89PNG\r\n", "not a readable record"),
    "another JSON": (b"[1, 2]", "not a readable record"),
    "newer": (b'{"schema": 99, "new": {}}', "schema 99 is newer than this program reads"),
}  # fmt: skip


@pytest.mark.parametrize(
    "command", [["show"], ["show", "--json"], ["report"], ["ingest"], ["run", "--resume"]]
)
@pytest.mark.parametrize(("data", "words"), NO_RECORDS.values(), ids=NO_RECORDS)
def test_what_is_no_record(overlap, command, data, words):
    (overlap.folder / "x.json").write_bytes(data)
    said = overlap.refuses(*command, "x.json")
    assert said.startswith("x.json: ")
    assert words in said


def test_a_report_that_cannot_be_written(overlap):
    record.write(Path("x.json"), factories.record(*factories.curve_results(rounds=5)))
    assert "report: cannot write x.json/r.html" in overlap.refuses(
        "report", "x.json", "--output", "x.json/r.html"
    )


@pytest.mark.parametrize(
    "option",
    [["--suite", "h2d"], ["--tier", "nightly"], ["--case", ONE], ["--device", "cpu"], ["--launches", "2"]],
)
def test_a_resumed_run_keeps_its_plan(overlap, option):
    words = overlap.refuses("run", "--resume", "x.json", *option)
    assert words.startswith(f"{option[0]}: a resumed run keeps the plan of its record")


def test_no_arguments_are_answered_with_help(overlap):
    said = overlap()
    assert said.code == 2
    assert "Commands:" in said.err


# The happy paths.


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_command_and_option(overlap, word):
    said = overlap(word)
    assert said.code == 0
    commands = ("list", "run", "show", "report", "doctor", "myths", "calibrate", "ingest")
    assert all(name in said.out for name in commands)
    said = overlap("run", word)
    options = (
        "suite",
        "tier",
        "case",
        "device",
        "profile",
        "results",
        "json",
        "machine",
        "launches",
        "budget",
    )
    assert all(f"--{name}" in said.out for name in (*options, "commit", "resume", "no-controls", "target"))


def test_the_version_is_the_packages(overlap):
    assert overlap("--version").out.split()[-1] == harness.__version__


def test_list_shows_the_cases(overlap):
    said = overlap("list", "--device", "cpu")
    assert (said.code, said.err) == (0, "")
    listed = json.loads(overlap("list", "--device", "cpu", "--json").out)
    assert said.out.startswith(f"h2d: {sum(case['family'] == 'h2d' for case in listed)} cases, all")
    assert listed[0]["key"].startswith("h2d[memory=")
    assert listed[0]["family"] == "h2d"
    assert listed[0]["params"]["size"] > 1 << 20
    nightly = json.loads(overlap("list", "--device", "cpu", "--tier", "nightly", "--json").out)
    assert {case["key"] for case in listed} < {case["key"] for case in nightly}
    some = json.loads(overlap("list", "--device", "cpu", "--case", "*chunks=8*", "--case", ONE, "--json").out)
    assert {case["params"]["chunks"] for case in some} == {8, 1}
    assert tree(overlap.folder) == set()


def test_show_prints_the_tables_or_json(overlap):
    kept = factories.record(*factories.table_results(rounds=10), controls=factories.controls())
    record.write(Path("x.json"), kept)
    said = overlap("show", "x.json")
    assert (said.code, said.err) == (0, "")
    assert "Does the copy hide behind the compute?" in said.out
    assert "4 cases" in said.out
    found = json.loads(overlap("show", "x.json", "--json").out)
    assert (found["record"], found["machine"], found["exit_code"]) == ("x.json", "h200-1", 0)
    assert found["statuses"] == {"ok": 4}
    assert found["cases"][0]["key"] == kept.cases[0].key
    assert found["cases"][0]["metrics"]["overlapped_ms"]["unit"] == "ms"
    assert [control["name"] for control in found["controls"]] == [
        "positive",
        "negative",
        "null",
        "sensitivity",
    ]


def test_text_of_a_record_is_never_markup(overlap):
    kept = factories.record(
        factories.unmeasured(factories.h2d_case(), "error", "[red]lost[/red] :warning: [/x]")
    )
    record.write(Path("x.json"), kept)
    assert "[red]lost[/red] :warning: [/x]" in overlap("show", "x.json").out


def test_logs_have_room_for_every_column(overlap, monkeypatch):
    """Nobody can widen the terminal of a CI run."""
    monkeypatch.delenv("COLUMNS", raising=False)
    kept = factories.record(*factories.table_results(rounds=10), *factories.curve_results(rounds=10))
    record.write(Path("x.json"), kept)
    assert "No room" not in overlap("show", "x.json").out
    monkeypatch.setenv("COLUMNS", "80")
    assert "No room" in overlap("show", "x.json").out


def test_report_prints_the_path_of_the_page(overlap):
    record.write(Path("x.json"), factories.record(*factories.curve_results(rounds=5)))
    said = overlap("report", "x.json")
    assert (said.code, said.out) == (0, "report: results/reports/h200-1/x.html\n")
    assert Path("results/reports/h200-1/x.html").read_text().startswith("<!DOCTYPE html>")
    assert overlap("report", "x.json", "--output", "page.html").out == "report: page.html\n"
    assert Path("page.html").exists()


def test_doctor_says_what_is_here(overlap):
    said = overlap("doctor", "--device", "cpu")
    assert said.err == ""
    assert said.out.splitlines()[0].split()[1] == "device:"
    found = json.loads(overlap("doctor", "--device", "cpu", "--json").out)
    assert {"name", "level", "text", "remedy"} == set(found[0])
    assert said.code == (3 if any(each["level"] == "fail" for each in found) else 0)


def test_the_doctor_measures_when_asked(overlap, monkeypatch):
    from harness import checkup, doctor

    found = [
        doctor.Finding("control null", "ok", "0.001"),
        doctor.Finding("control race", "fail", "0", "wait"),
    ]
    monkeypatch.setattr(checkup, "measured", lambda device, profile: iter(found))
    said = overlap("doctor", "--device", "cpu", "--measure", "--json")
    assert said.code == 3, "a failed control says that nothing here is to be believed"
    names = [finding["name"] for finding in json.loads(said.out)]
    assert names[0] == "device"
    assert names[-2:] == ["control null", "control race"]
    found.pop()
    said = overlap("doctor", "--device", "cpu", "--measure")
    assert said.code == 0
    assert "control null: 0.001" in said.out
    monkeypatch.setattr(checkup, "measured", lambda *_: pytest.fail("measured without being asked"))
    assert overlap("doctor", "--device", "cpu").code == 0


def test_a_doctor_that_finds_what_makes_measuring_pointless_exits_with_3(overlap, monkeypatch):
    from harness import doctor

    broken = [doctor.Finding("device", "fail", "launches [are] synchronous", "unset CUDA_LAUNCH_BLOCKING")]
    monkeypatch.setattr(doctor, "examine", lambda device: broken)
    said = overlap("doctor", "--device", "cpu")
    assert said.code == 3
    assert said.out == "fail device: launches [are] synchronous\n     unset CUDA_LAUNCH_BLOCKING\n"


# run: codes, progress, what is written.


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "ok", "ok"], 0),
        (["ok", "unsettled", "skipped"], 0),
        (["skipped", "skipped", "skipped"], 3),
        (["ok", "ok", "invalid"], 4),
        (["ok", "error", "ok"], 4),
        (["error", "skipped", "skipped"], 4),
    ],
)
def test_the_exit_code_is_that_of_the_worst(overlap, statuses, code):
    overlap.stage(
        {f"{status}{at}": "" if status == "ok" else "a reason" for at, status in enumerate(statuses)}
    )
    said = overlap("run", "--device", "cpu", "--commit", COMMIT, *cases(ONE, TWO, FOUR))
    assert said.code == code
    path = only_record(overlap.folder).relative_to(overlap.folder)
    assert said.out.splitlines()[-1] == f"record: {path}"
    assert overlap("show", str(path)).code == 0, "it can be shown, whatever it holds"
    assert json.loads(overlap("show", str(path), "--json").out)["exit_code"] == code


def test_progress_elsewhere_than_on_a_terminal_is_a_line_for_each_case(overlap):
    long = (
        "the reason of this is so long that it does not fit on one line of a terminal of eighty columns " * 2
    )
    overlap.stage({"ok0": "", "error1": long.strip(), "skipped2": "[none] here"})
    said = overlap("run", "--device", "cpu", "--commit", COMMIT, *cases(ONE, TWO, PINNED))
    first, *lines = said.err.splitlines()
    assert first.startswith("3 cases on cpu, profile cpu.")
    assert lines == [
        "[1/3] pageable n=1: ok",
        f"[2/3] pageable n=2: error: {long.strip()}",
        "[3/3] pinned n=1: skipped: [none] here",
    ]


def test_json_is_alone_on_stdout(overlap):
    overlap.stage({"ok0": "", "unsettled1": "noisy"})
    said = overlap("run", "--json", "--device", "cpu", "--commit", COMMIT, *cases(ONE, TWO))
    found = json.loads(said.out)
    assert found["commit"] == COMMIT
    assert [case["status"] for case in found["cases"]] == ["ok", "unsettled"]
    assert "[2/2]" in said.err


def test_the_command_is_recorded_without_paths(overlap):
    overlap.stage({"ok0": ""})
    absolute = str(overlap.folder / "results")
    profile = str(ROOT / "harness" / "profiles" / "cpu.json")
    overlap(
        "run", "--device=cpu", f"--results={absolute}", "--commit", COMMIT, "--case", ONE, "--profile", profile,
    )  # fmt: skip
    kept = record.read(only_record(overlap.folder))
    assert kept.run.command == [
        "run", "--device=cpu", "--results=(path)", "--commit", COMMIT, "--case", ONE, "--profile", "(path)",
    ]  # fmt: skip
    assert str(overlap.folder) not in only_record(overlap.folder).read_text()


@pytest.mark.parametrize("noted", [["--note-record", "a note"], ["--note-record=a note"]])
def test_the_record_is_noted_as_soon_as_it_exists(overlap, monkeypatch, noted):
    def run(plan, kept, path, watch):
        assert Path("a note").read_text() == f"{path}\n"
        assert path.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "run", run)
    said = overlap("run", *noted, "--device", "cpu", "--results", "kept", *cases(ONE))
    assert said.code == 130
    path = Path(Path("a note").read_text().rstrip())
    kept = record.read(path)
    assert kept.run.command == ["run", "--device", "cpu", "--results", "kept", "--case", ONE]
    Path("a note").unlink()
    overlap.stage({"ok0": ""})
    assert overlap("run", *noted, "--resume", str(path)).code == 0
    assert Path("a note").read_text() == f"{path}\n"
    assert "note-record" not in overlap("run", "--help").out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_tells_how_to_go_on(overlap, monkeypatch, number):
    def run(plan, kept, path, watch):
        kept.cases.append(factories.skipped(plan.cases[0]))
        record.write(path, kept)
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(supervise, "run", run)
    said = overlap(
        "run", "--device", "cpu", "--commit", COMMIT, "--no-controls", "--results", "my results", *cases(ONE, TWO)
    )  # fmt: skip
    (path,) = Path("my results/records").glob("*/*.json")
    assert said.code == 130
    assert said.err.splitlines()[-1] == (
        f"overlap: interrupted: 1 of 2 cases are in {path}; "
        f"go on with: overlap run --resume '{path}' --commit {COMMIT} --no-controls"
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupt_before_anything_is_measured(overlap, monkeypatch):
    def interrupt(requested: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "detect", interrupt)
    said = overlap("run")
    assert (said.code, said.err.strip()) == (130, "overlap: interrupted")
    assert tree(overlap.folder) == set()


# Real processes.


def start(folder: Path, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """`python -m harness` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        # Without git, as on a copied tree: the commit given is the one that counts.
        env=dict(os.environ, PYTHONPATH=str(ROOT), PATH=str(folder)),
        text=True,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str]) -> Said:
    out, err = process.communicate(timeout=60)
    return Said(process.returncode, out, err)


def until_line(process: subprocess.Popen[str], beginning: str) -> None:
    """Read stderr until a line begins so."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(beginning):
            return
    raise AssertionError(f"the run ended without a line {beginning!r}")


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_a_real_run(tmp_path):
    said = finish(start(tmp_path, "run", *QUICK, "--json", *cases(TWO, PINNED)))
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [(case["status"] in record.MEASURED, bool(case["metrics"])) for case in found["cases"]] == [
        (True, True),
        (False, False),
    ]
    assert (
        found["cases"][1]["reason"] == "pinned memory has no meaning on the cpu backend: no device reads it"
    )
    first, *lines = said.err.splitlines()
    assert first.startswith("2 cases on cpu")
    assert [line[:5] for line in lines] == ["[1/2]", "[2/2]"]
    path = only_record(tmp_path)
    assert str(tmp_path) not in path.read_text()
    kept = record.read(path)
    assert kept.run.finished
    assert (kept.run.commit, kept.run.dirty) == (COMMIT, False)
    launch = kept.cases[0].launches[0]
    assert len(launch.ranks[0].rounds) >= 20
    assert kept.cases[0].metrics["overlapped_ms"].value > 0
    assert children(os.getpid()) == []


def test_an_interrupted_run_can_be_gone_on_with(tmp_path):
    process = start(tmp_path, "run", *QUICK, *cases(TWO, PINNED, ONE, FOUR))
    until_line(process, "[2/4]")
    (worker,) = children(process.pid)
    os.kill(worker, signal.SIGSTOP)  # so that the other cases do not finish before the interrupt comes
    process.send_signal(signal.SIGINT)
    said = finish(process)
    path = only_record(tmp_path)
    half = record.read(path)
    assert said.code == 130
    assert gone(worker)
    done = len(half.cases)
    assert 2 <= done < 4
    assert not half.run.finished
    assert (
        f"overlap: interrupted: {done} of 4 cases are in {path.relative_to(tmp_path)}; go on with: "
        f"overlap run --resume {path.relative_to(tmp_path)} --commit {COMMIT} --target 0.2 --no-controls"
        in said.err.splitlines()
    )
    again = finish(start(tmp_path, "run", "--resume", str(path), *QUICK[2:]))
    assert again.code == 0, again.err
    kept = record.read(path)
    assert kept.run.finished
    assert [case.key for case in kept.cases] == kept.run.planned
    assert [case.status == "skipped" for case in kept.cases] == [False, True, False, False]
    assert kept.cases[0].launches == half.cases[0].launches, "what was measured stays as it was"
    refused = finish(start(tmp_path, "run", "--resume", str(path), "--commit", COMMIT))
    assert (refused.code, refused.err) == (2, f"overlap: resume: {path} is finished; begin a new run\n")


def test_a_run_that_is_killed_leaves_its_finished_cases_and_no_worker(tmp_path):
    process = start(tmp_path, "run", *QUICK, *cases(PINNED, TWO, ONE))
    until_line(process, "[1/3]")
    (worker,) = children(process.pid)
    os.kill(worker, signal.SIGSTOP)  # so that it cannot notice by itself that nobody listens any more
    process.kill()
    process.communicate(timeout=10)
    assert wait_until(lambda: gone(worker)), "the worker outlived its parent"
    half = record.read(only_record(tmp_path))
    assert [case.status for case in half.cases][:1] == ["skipped"]
    assert len(half.cases) < 3
    assert not half.run.finished
    # Without --commit: git has no answer, and the record's own stands.
    assert QUICK[-2:] == ("--commit", COMMIT)
    again = finish(start(tmp_path, "run", "--resume", *QUICK[2:-2]))
    assert again.code == 0, again.err
    kept = record.read(only_record(tmp_path))
    assert kept.run.finished
    assert [case.measured for case in kept.cases] == [False, True, True]


@pytest.mark.parametrize("arguments", [["--tier", "nightly"], ["--json"]])
def test_a_reader_that_goes_away_is_no_fault(tmp_path, arguments):
    process = start(tmp_path, "list", "--device", "cpu", *arguments)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(30)) == ("", 0)
    process.stderr.close()


def test_wrong_use_in_a_process_of_its_own(tmp_path):
    said = finish(start(tmp_path, "run", "--device", "cpu", "--case", with_chunks(0)))
    assert said == (2, "", "overlap: h2d: chunks: got 0, want a whole number from 1 to 64\n")
    assert list(tmp_path.iterdir()) == []
