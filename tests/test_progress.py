import io

import factories
import pytest
from rich.console import Console

from harness import progress
from harness.devices import Device
from harness.profiles import load_profile
from harness.protocol import Begin, ControlDone, Done, Ready
from harness.protocol import Progress as Rounds
from harness.supervise import Plan

CASES = [factories.h2d_case(chunks=n) for n in (1, 2)]
ONE, TWO = (case.key for case in CASES)


def plan(launches: int = 1) -> Plan:
    return Plan(
        cases=CASES,
        profile=load_profile("cpu"),
        device=Device("cpu", "cpu", 2),
        launches=launches,
        seconds=None,
        target=0.03,
    )


def done(key: str, status: str = "ok", reason: str = "", *, out_of_time: bool = False) -> Done:
    return Done(key=key, status=status, reason=reason, launch=None, out_of_time=out_of_time)  # type: ignore[arg-type]


def log(events, *, kept=None, launches: int = 1) -> list[str]:
    """What a log gets of (event, launch) pairs."""
    stream = io.StringIO()
    console = Console(file=stream, width=40, markup=False)
    with progress.live(console, plan(launches), kept or factories.record()) as watch:
        for event, launch in events:
            watch(event, launch)
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_for_each_case_however_narrow_it_is():
    reason = "a reason that is longer than forty columns are wide"
    events = [
        Begin(key=ONE),
        Rounds(key=ONE, rounds=20),
        done(ONE),
        Begin(key=TWO),
        done(TWO, "error", reason),
    ]
    head, *lines = log([(event, 0) for event in events])
    assert head == "2 cases on cpu, profile h200.1a2b"
    assert lines == ["[1/2] n=1: ok", f"[2/2] n=2: error: {reason}"]


def test_what_a_resumed_run_has_already_is_not_counted():
    kept = factories.record(factories.h2d_result(CASES[0], rounds=5))
    assert log([(done(TWO), 0)], kept=kept)[1:] == ["[1/1] n=2: ok"]


def test_what_is_not_asked_again_in_later_launches_is_not_counted():
    events = [(done(ONE, "skipped", "no meaning"), 0), (done(TWO), 0), (done(TWO), 1), (done(TWO), 2)]
    assert [line.split()[0] for line in log(events, launches=3)[1:]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "3 launches" in log([], launches=3)[0]


def test_what_the_budget_left_out_may_come_again():
    late = done(ONE, "skipped", "the time budget was used up", out_of_time=True)
    events = [(late, 0), (done(TWO), 0), (done(ONE), 1), (done(TWO), 1)]
    assert [line.split()[0] for line in log(events, launches=2)[1:]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]


def test_a_failed_control_is_said_at_once():
    good, bad = factories.controls(failing=["negative"])[:2]
    lines = log([(ControlDone(control=control, seconds=0.1), 0) for control in (good, bad)])
    assert lines[1:] == ["control failed: negative"]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, width=80, markup=False, color_system=None)


def test_a_terminal_keeps_only_what_went_wrong(terminal):
    with progress.live(terminal, plan(), factories.record()) as watch:
        for event in (
            Ready(facts={}, canary_us=1.0, open_s=1.0),
            Begin(key=ONE),
            Rounds(key=ONE, rounds=40),
            done(ONE),
            Begin(key=TWO),
            done(TWO, "invalid", "shared GPU"),
        ):
            watch(event, 0)
    shown = terminal.file.getvalue()
    assert "[2/2] n=2: invalid: shared GPU\n" in shown
    assert "[1/2]" not in shown
    assert "0/2 0:00:00 opening the device" in shown, "the bar shows how far it is"
