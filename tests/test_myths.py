"""The parent of the experiments against children that die, hang and talk nonsense; the command; and, on a GPU, what
each experiment is known to give."""

import json
import os
import sys
import time

import pytest
from test_claims import H200

from harness import child, cli, devices, myths
from harness.claims import CLAIMS, DEPENDS, FALSE, PAGEABLE_SIZES, TRUE
from harness.devices import Device
from harness.errors import UsageError
from harness.myths import ERROR, NOT_RUN, Trial

GPU = Device("cuda", "NVIDIA H200", 1, "GPU-0")
CPU = Device("cpu", "cpu", 2, reason="the NVIDIA driver lists no GPU")
A, B, C = "list-index", "no-wait", "blocking-to"

# Speaks as the measuring process does, without torch: code to run `before` anything, and in place of an experiment.
STAND_IN = """
import json, os, signal, sys, time
fd, faults, figures, log = int(sys.argv[1]), *map(json.loads, sys.argv[2:4]), sys.argv[4]
names = json.loads(sys.stdin.buffer.read())
with open(log, "a") as file:
    print(json.dumps([os.getpid(), names]), file=file)

def say(**event):
    os.write(fd, json.dumps(event).encode() + b"\\n")

exec(faults.get("before", ""))
say(type="opened", device="NVIDIA H200", torch="2.11.0+cu130")
for name in names:
    say(type="begun", name=name)
    if name in faults:
        exec(faults[name])
    else:
        say(type="found", name=name, numbers=figures[name])
exec(faults.get("after", ""))
"""


class Children:
    """What stands for the measuring processes, and who was started with what."""

    def __init__(self, monkeypatch, folder):
        self.faults: dict[str, str] = {}
        self._log = folder / "children.log"
        monkeypatch.setattr(
            myths,
            "command",
            lambda events: [
                sys.executable, "-I", "-S", "-c", STAND_IN,
                str(events), json.dumps(self.faults), json.dumps(H200), str(self._log),
            ],
        )  # fmt: skip

    @property
    def started(self):
        """The names that each child was given."""
        return [names for _, names in self._lines()]

    @property
    def alive(self):
        return [pid for pid, _ in self._lines() if os.path.exists(f"/proc/{pid}")]

    def _lines(self):
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def children(monkeypatch, tmp_path):
    return Children(monkeypatch, tmp_path)


def outcome(*names):
    return {result.claim.name: (result.verdict, result.reason) for result in Trial(names).results()}


def test_figures_become_verdicts_in_the_order_that_was_asked_for(children):
    trial = Trial([C, A])
    results = list(trial.results())
    assert [(result.claim.name, result.verdict) for result in results] == [(C, FALSE), (A, FALSE)]
    assert results[0].numbers == H200[C]
    assert trial.device.torch == "2.11.0+cu130"
    assert children.started == [[C, A]]
    assert children.alive == []


def test_a_result_comes_as_soon_as_it_is_known(children, tmp_path):
    """The second experiment waits for a file that is written when the first result is there."""
    heard = tmp_path / "heard"
    wait = f"while not os.path.exists({str(heard)!r}): time.sleep(0.01)\n"
    children.faults = {B: wait + "say(type='found', name=name, numbers=figures[name])"}
    results = Trial([A, B]).results()
    assert next(results).verdict == FALSE
    heard.touch()
    assert next(results).verdict == FALSE


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the worker was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the worker was killed by SIGKILL ("),
        ("os.kill(os.getpid(), signal.SIGABRT)", "the worker was killed by SIGABRT"),
        ("print('CUDA error: misaligned address'); sys.exit(1)",
         "the worker ended with exit code 1: CUDA error: misaligned address"),
        ("say(type='failed', reason='AcceleratorError: CUDA error: an illegal memory access'); sys.exit(1)",
         "AcceleratorError: CUDA error: an illegal memory access"),
        ("sys.exit(0)", "the worker ended before its work was done"),
        ("os.write(fd, b'hello\\n'); time.sleep(60)", "the worker sent what is no event: "),
        ("os.write(fd, b'\\xff\\n'); time.sleep(60)", "the worker sent what is no event: "),
        ("say(type='found', name='no-wait', numbers={'at_once': 1}); time.sleep(60)",
         "the worker told no figures of no-wait: waited not told"),
        ("say(type='found', name='blocking-to', numbers=figures['blocking-to']); time.sleep(60)",
         "the worker spoke of 'blocking-to' out of turn"),
        ("say(type='begun', name=name); time.sleep(60)", "the worker spoke of 'no-wait' out of turn"),
    ],
)  # fmt: skip
def test_a_child_that_is_lost_costs_the_experiment_it_was_in_and_no_other(children, fault, reason):
    children.faults = {B: fault}
    found = outcome(A, B, C)
    assert found[A][0] == found[C][0] == FALSE
    assert found[B][0] == ERROR
    assert found[B][1].startswith(reason)
    assert children.started == [[A, B, C], [C]]
    assert children.alive == []


def test_an_experiment_that_hangs_is_ended_and_the_rest_goes_on(children, monkeypatch):
    monkeypatch.setattr(myths, "EXPERIMENT_S", 0.5)
    children.faults = {A: "time.sleep(600)"}
    began = time.monotonic()
    assert outcome(A, B) == {A: (ERROR, "no sign of life for 0.5 s; ended"), B: (FALSE, "")}
    assert time.monotonic() - began < 30
    assert children.alive == []


def test_an_error_that_leaves_the_device_ends_only_its_own_experiment(children):
    children.faults = {A: "say(type='broke', name=name, reason='OutOfMemoryError: tried /x/y')"}
    assert outcome(A, B) == {A: (ERROR, "OutOfMemoryError: tried (path)"), B: (FALSE, "")}
    assert children.started == [[A, B]]


def test_what_an_experiment_lacks_is_no_error(children):
    children.faults = {A: "say(type='unable', name=name, reason='no compiler')"}
    assert outcome(A, B) == {A: (NOT_RUN, "no compiler"), B: (FALSE, "")}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the worker was killed by SIGSEGV"),
        (
            "say(type='failed', reason='RuntimeError: no CUDA GPUs are available')",
            "RuntimeError: no CUDA GPUs",
        ),
        ("say(type='begun', name=names[0]); time.sleep(60)", "the worker spoke of 'list-index' out of turn"),
    ],
)
def test_a_child_that_gets_to_no_experiment_is_not_started_again(children, fault, reason):
    children.faults = {"before": fault}
    found = outcome(A, B)
    assert [verdict for verdict, _ in found.values()] == [ERROR, ERROR]
    assert all(why.startswith(reason) for _, why in found.values())
    assert len(children.started) == 1


def test_children_that_are_lost_again_and_again_are_given_up(children):
    children.faults = dict.fromkeys(CLAIMS, "os.kill(os.getpid(), signal.SIGSEGV)")
    found = outcome(*CLAIMS)
    assert list(found) == list(CLAIMS)
    assert len(children.started) == myths.MAX_STARTS
    reasons = [why for _, why in found.values()]
    lost = "the worker was killed by SIGSEGV"
    assert reasons[: myths.MAX_STARTS] == [lost] * myths.MAX_STARTS
    assert set(reasons[myths.MAX_STARTS :]) == {f"given up: 4 workers ended early, the last one: {lost}"}


def test_a_child_that_dies_after_its_last_word_costs_nothing(children):
    children.faults = {"after": "os.kill(os.getpid(), signal.SIGSEGV)"}
    assert outcome(A) == {A: (FALSE, "a list makes a temporary, which gets the copy")}
    assert len(children.started) == 1


def test_a_child_that_cannot_be_started_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(myths, "command", lambda events: [str(tmp_path / "nothing")])
    assert outcome(A) == {A: (ERROR, "no worker could be started: No such file or directory")}


def test_whoever_stops_listening_ends_the_child(children):
    children.faults = {B: "time.sleep(600)"}
    results = Trial([A, B]).results()
    next(results)
    assert children.alive
    results.close()
    assert children.alive == []


def test_the_real_child_says_why_it_has_no_device(monkeypatch):
    """It is asked for a GPU where there is none, or none is shown."""
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ((verdict, reason),) = outcome(A).values()
    assert verdict == ERROR
    assert "CUDA" in reason
    assert "\n" not in reason


# The command.


@pytest.fixture
def overlap(monkeypatch, capsys, children):
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments, device=GPU):
        monkeypatch.setattr(sys, "argv", ["overlap", "myths", *arguments])
        monkeypatch.setattr(devices, "detect", lambda requested: device)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


def test_the_command_shows_each_claim_with_its_figures_verdict_and_advice(overlap):
    code, out, err = overlap()
    assert (code, err) == (0, "")
    assert out.startswith("NVIDIA H200, torch 2.11.0+cu130\n")
    for name, claim in CLAIMS.items():
        assert f"\n{name}\n" in out
        assert claim.text in out
        assert claim.refs[0] in out
    assert "  measured  stale when read at once 20 of 20; after an event's wait 0 of 20;" in out
    assert "  verdict   false here: torch 2.11.0+cu130 is affected: it reads before" in out
    assert "  verdict   depends: up to 1MiB it returns at once; 4MiB waits for the queue" in out
    assert "plain" not in out, "figures are named in words"
    assert out.endswith("11 claims: 8 false here, 3 depends\n")
    assert max(map(len, out.splitlines())) <= cli.LOG_WIDTH


def test_the_command_fits_the_terminal(overlap, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = overlap()
    assert max(map(len, out.splitlines())) <= 60


def test_chosen_claims_are_tried_alone_once_and_in_their_order(overlap, children):
    code, out, _ = overlap(B, A, B)
    assert code == 0
    assert children.started == [[A, B]]
    assert out.endswith("2 claims: 2 false here\n")


def test_the_command_speaks_json(overlap):
    code, out, err = overlap("--json", A, "pinned-size")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert (said["device"], said["torch"], said["exit_code"]) == ("NVIDIA H200", "2.11.0+cu130", 0)
    first, second = said["claims"]
    assert first["name"] == A
    assert first["verdict"] == FALSE
    assert first["refs"] == ["pytorch/pytorch#137878"]
    assert first["advice"]
    assert second["measured"]["taken"] == {"value": 512.0, "unit": "MiB", "text": "taken"}


@pytest.mark.parametrize(
    ("faults", "code", "summary"),
    [
        ({}, 0, "3 claims: 3 false here"),
        ({A: "unable"}, 0, "3 claims: 1 not run, 2 false here"),
        ({A: "unable", B: "unable", C: "unable"}, 3, "3 claims: 3 not run"),
        ({A: "unable", B: "broke"}, 4, "3 claims: 1 not run, 1 error, 1 false here"),
        ({C: "broke"}, 4, "3 claims: 2 false here, 1 error"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_says_what_became_of_it(overlap, children, faults, code, summary, as_json):
    children.faults = {name: f"say(type={kind!r}, name=name, reason='why')" for name, kind in faults.items()}
    said = overlap(A, B, C, *["--json"] * as_json)
    assert said[0] == code
    if as_json:
        assert json.loads(said[1])["exit_code"] == code
    else:
        assert said[1].endswith(summary + "\n")
        assert said[1].count(": why\n") == len(faults)
        assert said[1].count("  advice ") == 3 - len(faults), "none where nothing was found"


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_gpu_nothing_is_measured_and_one_line_says_so(overlap, as_json, monkeypatch):
    monkeypatch.setattr(myths, "command", lambda events: pytest.fail("started a child"))
    code, out, err = overlap(*["--json"] * as_json, device=CPU)
    assert (code, out) == (3, "")
    assert err == (
        "overlap: myths: nothing measured: these claims are about a CUDA device, and this is the cpu "
        "(the NVIDIA driver lists no GPU); overlap myths --list shows them\n"
    )


def test_without_a_gpu_the_claims_can_still_be_read(overlap):
    code, out, err = overlap("--list", device=CPU)
    assert (code, err) == (0, "")
    for claim in CLAIMS.values():
        assert claim.text in out
        assert claim.refs[0] in out
    code, out, _ = overlap("--list", "--json", B, device=CPU)
    (listed,) = json.loads(out)
    assert (code, listed["name"], listed["refs"]) == (0, B, ["ROCm/pytorch#3194"])


def test_wrong_use_is_one_line(overlap, monkeypatch):
    code, out, err = overlap("nope")
    assert (code, out) == (2, "")
    assert err.startswith("overlap: myths: got 'nope', want some of read-back, ")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code, out, err = overlap()
    assert (code, out) == (2, "")
    assert "every launch waits for the device; unset it" in err


def test_a_name_is_refused_before_the_device_is_looked_for():
    with pytest.raises(UsageError, match="got 'x'"):
        myths.choose(["x"])


# On a GPU: the command as a user runs it, and what is known of each claim.


@pytest.fixture(scope="module")
def here():
    """The results of all claims on this GPU, with the seconds that the whole command took."""
    import subprocess

    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "harness", "myths", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=child.environment(),
    )
    said = json.loads(done.stdout)
    found = {claim["name"]: claim for claim in said["claims"]}
    return {"code": done.returncode, "err": done.stderr, "seconds": time.monotonic() - began, "claims": found}


def figures(here, name):
    claim = here["claims"][name]
    if claim["verdict"] == NOT_RUN:
        pytest.skip(f"{name}: {claim['reason']}")
    assert claim["verdict"] != ERROR, claim["reason"]
    return claim["verdict"], {figure: told["value"] for figure, told in claim["measured"].items()}


@pytest.mark.gpu
@pytest.mark.timeout(360)
def test_all_claims_are_settled_on_this_gpu_within_half_a_minute(here):
    assert here["claims"].keys() == CLAIMS.keys()
    failed = {name: claim["reason"] for name, claim in here["claims"].items() if claim["verdict"] == ERROR}
    assert (here["code"], failed, here["err"]) == (0, {}, "")
    assert here["seconds"] < 30


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["read-back", "edited-source", "no-wait"])
def test_on_a_gpu_a_race_shows_and_its_wait_ends_it(here, name):
    verdict, found = figures(here, name)
    assert verdict == FALSE
    assert found["at_once"] >= 19
    assert found["waited"] == 0
    assert found.get("pageable", 0) == 0


@pytest.mark.gpu
def test_on_a_gpu_a_compiled_read_races_like_an_eager_one_where_torch_adds_no_wait(here):
    verdict, found = figures(here, "compiled-read")
    assert found["eager"] >= 95
    assert verdict == (FALSE if found["compiled"] else TRUE)
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    if hasattr(PythonWrapperCodegen, "sync_d2h_copy"):  # pytorch/pytorch#185252
        assert found["compiled"] == 0


@pytest.mark.gpu
def test_on_a_gpu_a_list_index_takes_the_copy_elsewhere(here):
    assert figures(here, "list-index") == (FALSE, {"list": 0, "slice": 2})


@pytest.mark.gpu
def test_on_a_gpu_only_pinned_memory_on_a_side_stream_hides_a_copy_issued_first(here):
    verdict, found = figures(here, "one-stream")
    assert verdict == FALSE
    assert found["pinned_side"] > 0.8
    assert abs(found["pinned_default"]) < 0.15
    assert max(found["pageable_side"], found["pageable_default"]) < 0.5
    assert found["kernel_first"] > found["pageable_side"]
    assert found["pageable_ms"] > 2 * found["pinned_ms"]


@pytest.mark.gpu
def test_on_a_gpu_small_pageable_copies_return_at_once_and_large_ones_wait(here):
    """Seen on an H200 behind 1 ms of work: up to 1 MiB below 0.1 ms, 4 MiB waits. Elsewhere the size differs."""
    import torch

    verdict, found = figures(here, "pageable-return")
    smallest, largest = (found[str(size)] for size in (PAGEABLE_SIZES[0], PAGEABLE_SIZES[-1]))
    assert smallest < 0.5 < largest
    assert verdict == DEPENDS
    if "H200" in torch.cuda.get_device_name(0):
        assert found[str(1 << 20)] < 0.5 < found[str(4 << 20)]


@pytest.mark.gpu
def test_on_a_gpu_full_kernels_take_turns_small_ones_and_copies_do_not(here):
    verdict, found = figures(here, "two-kernels")
    assert verdict == DEPENDS
    assert abs(found["full"]) < 0.15
    assert found["small"] > 0.8
    assert found["copy"] > 0.8


@pytest.mark.gpu
def test_on_a_gpu_one_byte_too_many_takes_twice_the_pinned_memory(here):
    verdict, found = figures(here, "pinned-size")
    assert found["asked"] == pytest.approx(256.0, abs=0.01)
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        pytest.skip("the allocator has settings of its own here")
    assert verdict == FALSE
    assert found["taken"] == pytest.approx(512.0, abs=1.0)


@pytest.mark.gpu
def test_on_a_gpu_pinning_for_one_copy_loses_and_a_pinned_buffer_wins(here):
    """Seen on an H200 with 256 MiB: pinning 143 ms, the pageable copy 53 ms, the pinned copy 5.2 ms."""
    _, found = figures(here, "pin-each-time")
    assert found["first"] > found["plain"] > 2 * found["reused"]
    assert found["again"] > found["reused"]


@pytest.mark.gpu
def test_on_a_gpu_a_copy_without_non_blocking_holds_up_the_host(here):
    verdict, found = figures(here, "blocking-to")
    assert verdict == FALSE
    assert found["blocking"] > 0.9 * found["copy"]
    assert found["non_blocking"] < 0.2 * found["copy"]
