from typing import Any

import pytest

from harness.comparable import CPU_HARD_KEYS, HARD_KEYS, SOFT_KEYS, comparable, contradictions, told
from harness.record import SCHEMA, CaseResult, Machine, Record, Run

GPU = {
    "name": "NVIDIA H200",
    "power_limit_w": 700.0,
    "ecc": True,
    "mig": False,
    "vbios": "96.00",
    "virtualisation": "passthrough",
    "numa_node": 0,
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
}
CPU = {"model": "Xeon", "usable_cores": 16, "numa_nodes": 2, "hypervisor": True}
SOFTWARE = {"driver": "580.159.04", "cuda": "13.0", "cublas": "13.1", "nccl": "2.28", "torch": "2.11.0"}
SOFTWARE |= {"torch_git": "70d99e9", "kernel": "6.18", "container": "docker", "system": "Linux"}


def record(device: str = "cuda", profile: str = "h200.1a2b", **profiles: str) -> Record:
    """profiles: of further families."""
    cases = [
        CaseResult(key="k", family=family, params={"profile": name}, status="ok")
        for family, name in {"h2d": profile, **profiles}.items()
    ]
    return Record(
        schema=SCHEMA,
        method=1,
        run=Run(time="2026-11-30T08:00:00Z", commit="none", dirty=None, command=[]),
        machine=Machine(name="m", device=device, gpu=dict(GPU) if device == "cuda" else {}, cpu=dict(CPU)),
        software=dict(SOFTWARE),
        cases=cases,
    )


def put(target: Record, key: str, value: Any) -> None:
    root, *path = key.split(".")
    if not path:
        setattr(target, root, value)
        return
    holder = getattr(target, root)
    for name in path[:-1]:
        holder = getattr(holder, name)
    if isinstance(holder, dict):
        holder[path[-1]] = value
    else:
        setattr(holder, path[-1], value)


def keys(differences: list) -> list[str]:
    return [difference.key for difference in differences]


def test_a_record_compares_with_itself():
    assert comparable(record(), record()) == ([], [])


@pytest.mark.parametrize("key", [key for key in HARD_KEYS if key not in ("profiles", "machine.device")])
def test_a_hard_key_that_differs_forbids_the_comparison(key):
    other = record()
    put(other, key, 2 if key == "method" else "another")
    assert [keys(part) for part in comparable(record(), other)] == [[key], []]


@pytest.mark.parametrize("key", SOFT_KEYS)
def test_a_soft_key_that_differs_is_a_warning(key):
    other = record()
    put(other, key, "another")
    assert [keys(part) for part in comparable(record(), other)] == [[], [key]]


def test_another_profile_is_another_experiment():
    hard, _ = comparable(record(), record(profile="h200.ffff"))
    assert list(map(str, hard)) == ["profiles: h200.1a2b vs h200.ffff"]


def test_a_family_that_only_one_record_has_is_no_difference():
    assert comparable(record(), record(feed="h200.3c4d")) == ([], [])
    only = record()
    only.cases = record(feed="h200.3c4d").cases[1:]
    assert comparable(record(), only) == ([], [])


def test_other_sizes_of_one_family_leave_the_others_comparable():
    hard, soft = comparable(record(feed="h200.3c4d"), record(feed="h200.ffff"))
    assert hard == []
    assert list(map(str, soft)) == ["profiles: h200.3c4d vs h200.ffff"]
    both = comparable(record(feed="h200.3c4d"), record(profile="h200.eeee", feed="h200.ffff"))[0]
    assert list(map(str, both)) == ["profiles: h200.1a2b, h200.3c4d vs h200.eeee, h200.ffff"]


def test_a_hard_key_that_one_record_does_not_tell_is_a_warning():
    other = record()
    other.machine.gpu["power_limit_w"] = None
    del other.software["driver"]
    hard, soft = comparable(record(), other)
    assert hard == []
    assert list(map(str, soft)) == ["power_limit_w: 700.0 vs unknown", "driver: 580.159.04 vs unknown"]


@pytest.mark.parametrize("model", ["WDDM", "WDM (TCC)", "MCDM"])
def test_a_driver_model_of_windows_is_another_experiment_than_linux(model):
    """Linux has one driver model, which NVML does not name: nothing told is no unknown there."""
    other = record()
    other.machine.gpu["driver_model"] = model
    assert list(map(str, comparable(record(), other)[0])) == [f"driver_model: Linux vs {model}"]
    linux = record()
    linux.machine.gpu["driver_model"] = None
    assert comparable(record(), linux) == ([], [])


def test_a_driver_model_that_windows_does_not_tell_is_a_warning():
    wddm, untold = record(), record()
    wddm.machine.gpu["driver_model"] = "WDDM"
    wddm.software["system"] = untold.software["system"] = "Windows"
    hard, soft = comparable(wddm, untold)
    assert hard == []
    assert list(map(str, soft)) == ["driver_model: WDDM vs unknown"]


def test_an_unset_variable_is_a_value():
    other = record()
    other.environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    assert list(map(str, comparable(record(), other)[1])) == ["CUDA_DEVICE_MAX_CONNECTIONS: unset vs 1"]


def test_switches_are_said_in_words():
    other = record()
    other.machine.gpu["ecc"] = False
    assert list(map(str, comparable(record(), other)[0])) == ["ecc: on vs off"]


def test_a_cpu_is_never_comparable_with_a_gpu():
    assert "machine.device" in keys(comparable(record(), record("cpu"))[0])


@pytest.mark.parametrize("key", CPU_HARD_KEYS)
def test_on_the_cpu_the_cpu_is_the_device(key):
    other = record("cpu")
    put(other, key, "another")
    assert [keys(part) for part in comparable(record("cpu"), other)] == [[key], []]


def test_records_without_cases_or_facts_can_be_compared():
    empty = record()
    empty.machine, empty.software, empty.cases = Machine(name="m", device="cuda"), {}, []
    hard, soft = comparable(record(), empty)
    assert hard == []
    assert {"profiles", "software.torch", "machine.gpu.name"} <= set(keys(soft))


def test_what_a_store_without_records_was_told_is_compared_as_records_are():
    other = record()
    put(other, "software.driver", "590.2")
    put(other, "machine.gpu.vbios", "another")
    for which, part in enumerate(comparable(record(), other)):
        found = contradictions(told(record())[which], told(other)[which])
        assert found == part
        assert found


def test_what_one_side_does_not_know_is_no_contradiction():
    assert contradictions({"a": "unknown", "b": 1}, {"a": 1, "c": 2}) == []
    assert list(map(str, contradictions({"software.driver": "1"}, {"software.driver": "2"}))) == [
        "driver: 1 vs 2"
    ]


def test_the_cpu_is_told_where_it_is_the_device():
    hard, soft = told(record("cpu"))
    assert set(CPU_HARD_KEYS) <= hard.keys()
    assert not set(CPU_HARD_KEYS) & soft.keys()
    assert not set(CPU_HARD_KEYS) & told(record())[0].keys()
