"""Controls pass on a sound backend and fail on one that is broken in the way they are there for."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fakes import FakeTelemetry, FakeWorkload

from harness import controls, profiles
from harness.backends import get_backend
from harness.backends.base import Backend
from harness.controls import run_controls
from harness.errors import MeasurementError
from harness.families import MIB
from harness.profiles import Profile
from harness.record import Control
from harness.sampler import NullSampler, open_sampler
from harness.telemetry import full_uuid
from harness.workloads.base import Sample

pytestmark = pytest.mark.timing

NAMES = [
    "known answer",
    "same stream",
    "dependency",
    "null",
    "sensitivity",
    "race",
    "bare copy",
]  # and sampler


@pytest.fixture(scope="module")
def cpu() -> Iterator[Backend]:
    backend = get_backend("cpu")
    yield backend
    backend.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Smaller work, so that a test takes a second."""
    monkeypatch.setattr(controls, "_CPU", small_sizes())
    monkeypatch.setattr(controls, "ROUNDS", 7)
    # Wide, as a few rounds on a busy machine need; what the tests break moves each value by much more.
    wide = profiles.Tolerances(null=0.2, known=0.25, hidden=0.4, sensitivity=0.8)
    return msgspec.structs.replace(profiles.packaged()["cpu"], rotate_bytes=8 * MIB, tolerances=wide)


def small_sizes() -> Any:
    return controls._Sizes(
        copy_bytes=16 * MIB, more=0.5, spin_ms=4.0, bare_bytes=8 * MIB, null_rounds=7, memory="pageable"
    )


class Broken:
    """The cpu backend with one thing wrong."""

    def __init__(self, real: Backend, what: str) -> None:
        self._real, self._what = real, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def side(self) -> Any:
        return self._real.main if self._what == "one stream" else self._real.side

    def wait(self, stream: Any, event: Any) -> None:
        if self._what != "no waits" or stream is not self._real.side:
            self._real.wait(stream, event)

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        if self._what == "copies never grow":
            target, source = target[:4096], source[:4096]
        self._real.copy(target, source, stream)

    def gemm(self, x: Any, weights: Any, out: Any) -> None:
        if self._what == "every other product is slower":
            self._turn = not getattr(self, "_turn", False)
            if self._turn:
                self._real.spin(5.0, self._real.main)
        self._real.gemm(x, weights, out)


def measured(backend: Any, profile: Profile, only: str, attempts: int = 3) -> Control:
    (found,) = run_controls(backend, profile, 0, attempts=attempts, only=only)
    return found


def test_all_pass_on_a_sound_backend_and_come_in_order(cpu: Backend, small: Profile) -> None:
    # More attempts than a run has: what else these cores do, for a second, is nothing that a backend is broken by.
    found = list(run_controls(cpu, small, 3, attempts=12))
    assert [control.name for control in found] == NAMES
    assert [control.name for control in found if not control.passed] == []
    assert {control.launch for control in found} == {3}
    assert all(control.low <= control.value <= control.high for control in found if control.value is not None)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("one stream", "known answer"),
        ("no waits", "dependency"),
        ("copies never grow", "sensitivity"),
    ],
)
def test_each_fails_where_it_should(cpu: Backend, small: Profile, what: str, name: str) -> None:
    found = measured(Broken(cpu, what), small, name)
    assert not found.passed, found
    assert found.detail == "attempt 3 of 3"


def test_null_fails_when_equal_arms_differ(
    cpu: Backend, small: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = controls._Bench(cpu, small, None)
    slower = bench._products

    def with_more() -> None:
        slower()
        cpu.spin(8.0, cpu.main)

    monkeypatch.setattr(controls._Bench, "_null", lambda self: biased(self, slower, with_more))
    assert not measured(cpu, small, "null").passed
    bench.close()


def biased(bench: Any, a: Any, b: Any) -> Any:
    ms = bench._medians(7, a=a, b=b)
    return ms["b"] / ms["a"] - 1, -0.2, 0.2, "relative difference"


def test_same_stream_fails_when_the_streams_overlap(
    cpu: Backend, small: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls._Bench, "_after_each_other", controls._Bench._beside)
    assert not measured(cpu, small, "same stream").passed


def test_race_fails_when_the_check_is_blind(
    cpu: Backend, small: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.workloads.h2d import H2DWorkload

    monkeypatch.setattr(H2DWorkload, "_check", lambda self, arm, views: None)
    found = measured(cpu, small, "race")
    assert found.value == 0.0
    assert not found.passed


def test_bare_copy_fails_when_the_harness_adds_time(
    cpu: Backend, small: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.workloads.h2d import H2DWorkload

    issue = H2DWorkload._issue_transfer

    def slow(self: H2DWorkload, views: Any) -> None:
        cpu.spin(8.0, cpu.main)
        issue(self, views)

    monkeypatch.setattr(H2DWorkload, "_issue_transfer", slow)
    assert not measured(cpu, small, "bare copy").passed


class Readings(FakeTelemetry):
    """What reads beside the samples; at work it costs `cost` of them."""

    def __init__(self, cost: float) -> None:
        super().__init__()
        self.cost, self.at_work, self.turns = cost, True, list[bool]()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.at_work = False
        yield
        self.at_work = True


@pytest.mark.parametrize(("cost", "passed"), [(0.0, True), (0.004, True), (0.02, False)])
def test_what_the_sampler_costs_is_measured_in_turns(
    cpu: Backend, small: Profile, monkeypatch: pytest.MonkeyPatch, cost: float, passed: bool
) -> None:
    readings = Readings(cost)

    class Pipeline(FakeWorkload):
        def sample(self, arm: str) -> Sample:
            readings.turns.append(readings.at_work)
            # The clock drifts all the while: turns must cancel that.
            drift = 1 + 0.05 * len(readings.turns) / 200
            return replace(super().sample(arm), ms=drift * (1 + readings.cost * readings.at_work))

    monkeypatch.setattr(controls._Bench, "_pipeline", lambda self, **_: Pipeline())
    (found,) = run_controls(cpu, small, 0, readings, attempts=1, only="sampler")
    assert found.passed is passed
    assert found.value == pytest.approx(cost, abs=1e-4)
    assert readings.turns.count(True) == readings.turns.count(False) == 100


def test_where_nothing_is_read_the_sampler_is_no_control(cpu: Backend, small: Profile) -> None:
    assert list(run_controls(cpu, small, 0, NullSampler("no GPU"), only="sampler")) == []


@pytest.mark.gpu
def test_on_a_gpu_the_sampler_costs_less_than_half_a_percent() -> None:
    backend = get_backend("cuda")
    with open_sampler(full_uuid(backend.facts()["uuid"])) as telemetry:
        found = [
            control.value
            for _ in range(5)
            for control in run_controls(
                backend, profiles.packaged()["h200"], 0, telemetry, attempts=1, only="sampler"
            )
        ]
        assert telemetry.since(0.0), telemetry.missing
    print(f"sampler cost: {', '.join(f'{value:+.3%}' for value in found if value is not None)}")
    assert len(found) == 5
    assert all(value is not None and abs(value) < 0.005 for value in found)


@pytest.mark.gpu
def test_on_a_gpu_every_control_passes_twenty_times_of_twenty() -> None:
    backend = get_backend("cuda")
    profile = profiles.packaged()["h200"]
    failed = [
        f"{control.name}: {control.value}"
        for _ in range(20)
        for control in run_controls(backend, profile, 0, attempts=1)
        if not control.passed
    ]
    assert failed == []


def test_a_gate_that_does_not_hold_ends_the_controls_soon(
    cpu: Backend, small: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cpu, "pending", lambda event: bool(asked.append(True)))
    with pytest.raises(MeasurementError, match="the gate did not hold in 3 samples in a row"):
        list(run_controls(cpu, small, 0, only="null"))
    assert len(asked) == 3
