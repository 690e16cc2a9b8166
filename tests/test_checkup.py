"""What `overlap doctor --measure` says, of a worker that speaks as told and of one that dies."""

import json
import sys
from pathlib import Path

import pytest

from harness import checkup, child
from harness.devices import Device
from harness.profiles import load_profile

CPU = Device("cpu", "cpu", 2, None, "asked for")
READY = {"type": "ready", "facts": {}, "canary_us": 6.3, "open_s": 9.8}
CLOSING = {"type": "closing", "energy_j": None, "energy_s": 0.0}


def control(name: str, *, passed: bool = True) -> dict[str, object]:
    told = {
        "name": name,
        "launch": 0,
        "passed": passed,
        "value": 0.001 if passed else 0.2,
        "low": -0.005,
        "high": 0.005,
        "unit": "",
    }
    return {"type": "control", "seconds": 1.0, "control": told}


def ceilings(link: list[int] | None, **rates: float | None) -> dict[str, object]:
    told = [
        {
            "name": name,
            "launch": 0,
            "value": rate,
            "unit": "GB/s",
            "detail": "" if rate else "CUDA out of memory",
        }
        for name, rate in rates.items()
    ]
    return {"type": "ceilings", "ceilings": told, "link": link, "seconds": 0.5}


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def run(*events: dict[str, object], end: str = ""):
        script = tmp_path / "worker.py"
        lines = "".join(json.dumps(event) + "\n" for event in events)
        script.write_text(f"import os, signal, sys\nos.write(int(sys.argv[1]), {lines.encode()!r})\n{end}\n")
        monkeypatch.setattr(child, "command", lambda fd: [sys.executable, "-I", "-S", str(script), str(fd)])
        monkeypatch.setattr(checkup, "best_link", lambda machine: (5, 16))
        return {found.name: found for found in checkup.measured(CPU, load_profile("cpu"))}

    return run


def test_a_sound_device_is_told_with_its_rates(examine) -> None:
    found = examine(READY, ceilings([5, 16], h2d=55.4, hbm=4000.0), control("null"), CLOSING)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["device opened"].text == "in 9.80 s; an empty launch costs the host 6.30 us"
    assert found["PCIe"].text == "gen5 x16 under load"
    assert found["h2d alone"].text == "55.4 GB/s, 88 % of the 63.0 that gen5 x16 carries"
    assert found["hbm alone"].text == "4000 GB/s"
    assert found["control null"].text == "0.001, want -0.005 to 0.005"


def test_a_link_below_its_best_is_told_with_what_it_spoils(examine) -> None:
    found = examine(READY, ceilings([3, 16], h2d=13.0), CLOSING)
    assert found["PCIe"].level == "warn"
    assert found["PCIe"].text == "gen3 x16 under load, below its gen5 x16; cases would be invalid"
    assert found["h2d alone"].level == "ok", "for its link that copy is as fast as it can be"


def test_copies_far_below_their_link_are_pointed_at(examine) -> None:
    found = examine(READY, ceilings([5, 16], h2d=30.0, d2h=55.0), CLOSING)
    assert (found["h2d alone"].level, found["d2h alone"].level) == ("warn", "ok")
    assert "NUMA" in found["h2d alone"].remedy


def test_a_link_that_nobody_names_is_not_judged(examine) -> None:
    found = examine(READY, ceilings(None, h2d=3.0), CLOSING)
    assert "PCIe" not in found
    assert found["h2d alone"] == checkup.Finding("h2d alone", "ok", "3.00 GB/s")


def test_what_could_not_be_measured_says_why(examine) -> None:
    found = examine(READY, ceilings(None, hbm=None), CLOSING)
    assert (found["hbm alone"].level, found["hbm alone"].text) == ("warn", "not measured: CUDA out of memory")


def test_a_failed_control_fails_the_examination(examine) -> None:
    found = examine(READY, control("null", passed=False), control("race"), CLOSING)
    assert found["control null"].level == "fail"
    assert "0.2" in found["control null"].text
    assert found["control race"].level == "ok"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("sys.exit('no such device')", "exit code 1: no such device"),
        ("", "ended before its work was done"),
    ],
)
def test_a_worker_that_dies_is_a_finding(examine, end: str, words: str) -> None:
    found = examine(READY, end=end)
    assert found["device"].level == "fail"
    assert words in found["device"].text


def test_on_a_cpu_a_real_worker_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [finding.name for finding in checkup.measured(CPU, load_profile("cpu"))]
    assert found[:3] == ["device opened", "memory alone", "gemm alone"]
    assert "control null" in found
    assert "device" not in found
