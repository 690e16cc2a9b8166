import json
import random

import pytest

from harness.validity import (
    SERIES_POINTS,
    SPOILING,
    Sample,
    fresh,
    labels,
    reason_names,
    summarise,
    verdict,
)


def readings(count: int = 40, *, period: float = 0.1, **values: object) -> list[Sample]:
    """New readings every `period` s, each told apart by its power; a value may be a function of the index."""
    given = {"sm_mhz": 1980, "reasons": 0, **values}
    return [
        Sample(
            t=10 + index * period,
            after=10 + index * period - 0.005,
            power_w=500 + index % 7,
            **{name: value(index) if callable(value) else value for name, value in given.items()},
        )
        for index in range(count)
    ]


def arm_windows(samples: list[Sample], *arms: str) -> dict[str, list[tuple[float, float]]]:
    """The arms in turn, each from just before a reading to just after it."""
    windows: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for index, sample in enumerate(samples):
        windows[arms[index % len(arms)]].append((sample.made - 0.01, sample.made + 0.01))
    return windows


def test_quantities_are_summed_up_and_the_rest_explained():
    samples = [Sample(t=1.0, sm_mhz=1980, power_w=100.0), Sample(t=2.0, sm_mhz=1755, power_w=300.0)]
    summary = summarise(samples, missing={"temperature_c": "GPU is lost"})
    assert summary["sm_mhz"] == {"min": 1755, "median": 1867.5, "max": 1980}
    assert summary["power_w"] == {"min": 100.0, "median": 200.0, "max": 300.0}
    assert summary["temperature_c"] is None
    assert summary["missing"]["temperature_c"] == "GPU is lost"
    assert summary["missing"]["pcie_width"] == "no reading in this time"
    assert (summary["samples"], summary["seconds"]) == (2, 1.0)


def test_no_sample_is_said_and_speaks_against_nothing():
    summary = summarise([], missing={"telemetry": "no GPU to read"})
    assert summary == {"samples": 0, "missing": {"telemetry": "no GPU to read"}}
    assert (verdict(summary), labels(summary)) == ([], [])
    assert summarise([])["missing"] == {"telemetry": "no reading in this time"}


def test_a_summary_is_plain_json():
    samples = readings(300, others=0, energy_j=lambda index: 5.0 * index)
    summary = summarise(samples, arm_windows(samples, "compute", "overlapped"))
    assert json.loads(json.dumps(summary)) == summary


def test_reasons_are_named_with_the_seconds_they_held():
    samples = [
        Sample(t=0.0, reasons=4),
        Sample(t=0.5, reasons=4 | 0x20),
        Sample(t=0.75, reasons=0),
        Sample(t=1.0),
    ]
    assert summarise(samples)["reasons"] == {"sw_power_cap": 0.75, "sw_thermal_slowdown": 0.25}


def test_a_reason_seen_once_at_the_end_is_not_lost():
    summary = summarise([Sample(t=0.0, reasons=0), Sample(t=0.1, reasons=0x40)])
    assert summary["reasons"] == {"hw_thermal_slowdown": 0.0}
    assert verdict(summary) == ["thermal slowdown (hardware)"]


def test_a_stall_of_the_sampler_is_not_counted_as_a_state():
    samples = [Sample(t=0.0, reasons=4), Sample(t=60.0, reasons=0)]
    assert summarise(samples)["reasons"] == {"sw_power_cap": 1.0}


def test_an_unknown_bit_keeps_its_number():
    assert reason_names(0x4 | 0x8000) == ["sw_power_cap", "bit_15"]


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (0x8, ["hardware slowdown"]),
        (0x8 | 0x40, ["thermal slowdown (hardware)"]),
        (0x8 | 0x80, ["hardware slowdown (external power brake)"]),
        (0x20, ["thermal slowdown (driver)"]),
        (0x20 | 0x40, ["thermal slowdown (hardware)", "thermal slowdown (driver)"]),
    ],
)
def test_slowdown_makes_a_case_invalid(mask, reasons):
    assert verdict(summarise(readings(reasons=mask))) == reasons


def test_a_software_power_cap_is_a_label():
    summary = summarise(readings(reasons=0x4 | 0x1))
    assert verdict(summary) == []
    assert labels(summary) == ["software power cap"]
    assert not set(SPOILING) & {"sw_power_cap", "gpu_idle"}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([0, 0, 0], []),
        ([0, 1, 1], ["shared GPU: 1 other process"]),
        ([2, 1, 2], ["shared GPU: 2 other processes"]),
        ([0, 1, 0], []),  # a process that is just ending
        ([1], ["shared GPU: 1 other process"]),
        ([], []),
    ],
)
def test_others_on_the_gpu(others, expected):
    samples = [
        Sample(t=0.0, sm_mhz=1980),
        *(Sample(t=1.0 + at, others=count) for at, count in enumerate(others)),
    ]
    assert verdict(summarise(samples)) == expected


def test_each_arm_has_the_clock_of_its_own_windows():
    samples = readings(40, sm_mhz=lambda index: 1755 if index % 2 else 1980)
    windows = arm_windows(samples, "compute", "overlapped")
    arms = summarise(samples, windows)["arms"]
    assert arms["compute"] == {"sm_mhz": 1980, "spread_mhz": 0.0, "readings": 20}
    assert arms["overlapped"] == {"sm_mhz": 1755, "spread_mhz": 0.0, "readings": 20}
    assert verdict(summarise(samples, windows)) == ["clock drift between arms: 1980 vs 1755 MHz"]


def test_a_look_at_an_old_reading_says_nothing_about_the_arm_that_runs_by_then():
    """The driver renews its readings every 100 ms; the sampler looks every 20 ms, arm by arm."""
    looks = [
        Sample(
            t=index * 0.02, after=index * 0.02 - 0.02, sm_mhz=1980 - 15 * (index // 5 % 2), power_w=index // 5
        )
        for index in range(50)
    ]
    assert [sample.power_w for sample in fresh(looks)] == list(range(10))
    windows = {"compute": [(sample.t - 0.015, sample.t - 0.005) for sample in looks[1::5]]}
    assert summarise(looks, windows)["arms"] == {}


def test_a_reading_belongs_to_the_arm_that_ran_between_the_two_looks():
    sample = Sample(t=1.020, after=1.000, sm_mhz=1980, power_w=1.0)
    windows = {"compute": [(1.005, 1.015)], "overlapped": [(1.016, 1.030)]}
    assert list(summarise([sample], windows)["arms"]) == ["compute"]


def test_a_temperature_that_changes_between_does_not_renew_the_clock():
    first = Sample(t=1.0, after=0.995, sm_mhz=1980, power_w=1.0, temperature_c=40)
    second = Sample(t=1.05, after=1.045, sm_mhz=1980, power_w=1.0, temperature_c=41)
    assert fresh([first, second]) == [first]


def test_arms_less_than_a_hundredth_or_a_clock_step_apart_are_alike():
    for low in (1965, 1962):
        samples = readings(40, sm_mhz=lambda index, low=low: low if index % 2 else 1980)
        assert verdict(summarise(samples, arm_windows(samples, "compute", "overlapped"))) == []
    # 15 MHz is more than 1 % of a slow clock, and still one step.
    samples = readings(40, sm_mhz=lambda index: 1185 if index % 2 else 1200)
    assert verdict(summarise(samples, arm_windows(samples, "compute", "overlapped"))) == []


def test_few_readings_prove_no_drift():
    samples = readings(14, sm_mhz=lambda index: 1755 if index % 2 else 1980)
    assert verdict(summarise(samples, arm_windows(samples, "compute", "overlapped"))) == []


def test_a_copy_alone_may_run_at_another_clock():
    samples = readings(60, sm_mhz=lambda index: (1575, 1575, 1980)[index % 3])
    windows = arm_windows(samples, "compute", "overlapped", "transfer_1")
    assert verdict(summarise(samples, windows)) == []


def test_scatter_under_a_power_cap_is_seldom_called_drift():
    """Clocks scatter by 5 % under the cap of an H200: medians of a few differ by more than 1 % by chance."""
    generator = random.Random(7)
    called = apart = 0
    for _ in range(500):
        samples = readings(40, sm_mhz=lambda index: 15 * round(generator.gauss(1600, 80) / 15))
        summary = summarise(samples, arm_windows(samples, "compute", "overlapped", "serial", "compute_1"))
        clocks = [arm["sm_mhz"] for arm in summary["arms"].values()]
        apart += max(clocks) - min(clocks) > 0.01 * max(clocks)
        called += bool(verdict(summary))
    assert apart > 400
    assert called <= 2


def test_a_real_drift_under_a_power_cap_is_called():
    generator = random.Random(8)
    called = 0
    for _ in range(100):
        samples = readings(
            60, sm_mhz=lambda index: 15 * round(generator.gauss((1600, 1400)[index % 2], 80) / 15)
        )
        called += bool(verdict(summarise(samples, arm_windows(samples, "compute", "overlapped"))))
    assert called >= 98


@pytest.mark.parametrize(
    ("generations", "reason"),
    [
        ([5, 5, 5, 5], []),
        ([1, 5, 5, 5], []),  # read before the first copy
        ([5, 4, 4, 4], ["PCIe link at gen4 x16 under load, below its gen5 x16"]),
        ([None, None], []),
    ],
)
def test_a_link_below_its_best_under_load_makes_a_case_invalid(generations, reason):
    samples = [Sample(t=t, pcie_generation=gen, pcie_width=16) for t, gen in enumerate(generations)]
    assert verdict(summarise(samples), (5, 16)) == reason
    assert verdict(summarise(samples)) == [], "where the best is not known, nothing is claimed"


def test_a_narrow_link_makes_a_case_invalid():
    samples = [Sample(t=t, pcie_generation=5, pcie_width=8) for t in (1.0, 2.0)]
    assert verdict(summarise(samples), (5, 16)) == ["PCIe link at gen5 x8 under load, below its gen5 x16"]


@pytest.mark.parametrize(
    ("counts", "expected"), [([7, 7, 7], 0), ([7, None, 19], 12), ([7], None), ([9, 0], 0)]
)
def test_packets_sent_again_are_counted_and_labelled(counts, expected):
    summary = summarise([Sample(t=t, pcie_replays=count) for t, count in enumerate(counts)])
    assert summary["pcie_replays"] == expected
    assert ("pcie_replays" in summary["missing"]) is (expected is None)
    assert labels(summary) == (["PCIe packets sent again"] if expected else [])


@pytest.mark.parametrize(("count", "expected"), [(99, None), (101, 2000.0)])
def test_energy_is_given_for_ten_seconds_and_more(count, expected):
    summary = summarise(readings(count, energy_j=lambda index: 1000.0 + 20 * index))
    assert summary["energy_j"] == expected
    assert summary["missing"].get("energy_j") == (None if expected else "shorter than 10 s")


def test_a_counter_that_ran_backwards_is_no_energy():
    summary = summarise(readings(150, energy_j=lambda index: 1000.0 - index))
    assert (summary["energy_j"], summary["missing"]["energy_j"]) == (None, "the counter was reset")


def test_the_series_is_short_and_keeps_the_lowest_clock():
    samples = readings(1234, sm_mhz=lambda index: 345 if index == 777 else 1980, temperature_c=40)
    series = summarise(samples)["series"]
    lengths = {len(values) for values in series.values()}
    assert len(lengths) == 1
    assert SERIES_POINTS / 2 < lengths.pop() <= SERIES_POINTS
    assert min(series["sm_mhz"]) == 345
    assert series["t"] == sorted(series["t"])
    assert set(series) == {"t", "sm_mhz", "power_w", "temperature_c"}


def test_where_arms_wait_by_their_nature_clocks_and_link_say_nothing_and_the_rest_does():
    """A loader alone leaves the GPU idle, and a step that waits for it lets the clock rise and the link rest."""
    arms = {"compute": [], "overlapped": []}
    samples = []
    for at in range(80):
        arm, clock = ("compute", 1500) if at % 2 else ("overlapped", 1980)
        arms[arm].append((at - 0.5, at + 0.4))
        samples.append(
            Sample(
                t=float(at),
                after=at - 0.1,
                sm_mhz=clock,
                pcie_generation=1,
                pcie_width=16,
                others=1,
                reasons=0,
            )
        )
    summary = summarise(samples, arms)
    assert len(verdict(summary, (5, 16))) == 3
    assert verdict(summary, (5, 16), waits=True) == ["shared GPU: 1 other process"]
