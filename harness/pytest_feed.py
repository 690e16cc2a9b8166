"""Records into pytest-benchmark: one measurement for all tests of a run, the samples it is given, and what makes two
of its runs comparable.

benchmarks/conftest.py turns this into tests. Neither pytest nor torch is imported here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness import comparable, metrics, record, registry, runs, suites, supervise
from harness.errors import UsageError
from harness.record import CaseResult, Record
from harness.supervise import Plan


class Clock:
    """A timer for pytest-benchmark that stands still but for the samples shown to it."""

    __name__ = "device_time"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def reset(self) -> None:
        """Back to zero: a sample added to others would not come back exactly."""
        self._now = 0.0

    def show(self, seconds: Iterator[float]) -> None:
        """Let the next of the samples pass."""
        self._now = next(seconds)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the environment asks for: `overlap run`'s options, or a record to read instead of measuring."""

    options: runs.Options
    record: Path | None = None

    @classmethod
    def by(cls, variables: Mapping[str, str]) -> "Asked":
        """From OVERLAP_*, see benchmarks/conftest.py; UsageError where a number is none."""
        launches = variables.get("OVERLAP_LAUNCHES") or "1"
        if not launches.isascii() or not launches.isdigit() or int(launches) < 1:
            raise UsageError(f"OVERLAP_LAUNCHES: got {launches!r}, want a whole number from 1")
        given = variables.get("OVERLAP_RECORD")
        options = runs.Options(
            tier=variables.get("OVERLAP_TIER") or "quick",
            patterns=tuple(variables.get("OVERLAP_CASE", "").split()),
            device=variables.get("OVERLAP_DEVICE") or "auto",
            machine=variables.get("OVERLAP_MACHINE") or None,
            launches=int(launches),
            results=Path(variables.get("OVERLAP_RESULTS") or "results"),
        )
        return cls(options=options, record=Path(given) if given else None)


class Feed:
    """The cases to choose from and, once some are chosen, their record: read, or measured with one run.

    Every method raises UsageError for what `overlap run` would refuse.
    """

    def __init__(self, asked: Asked) -> None:
        self.clock = Clock()
        self.path = asked.record
        self.taken = False
        self._asked = asked
        self._planned: tuple[Plan, Record] | None = None
        self._record: Record | None = None

    def keys(self) -> list[str]:
        """Keys of the cases that the tier, the patterns and the device, or the record, give. Measures nothing."""
        if self._asked.record is None:
            return [case.key for case in self._plan()[0].cases]
        listed = [case.key for case in self.told().cases]
        patterns = self._asked.options.patterns
        kept = [key for key in listed if not patterns or any(suites.matches(each, key) for each in patterns)]
        if not kept:
            raise UsageError(
                f"case: {' '.join(patterns)} matches none of the {len(listed)} cases of {self.path}"
                if patterns
                else f"{self.path}: holds no case"
            )
        return kept

    def told(self) -> Record:
        """The record; before anything was measured, one without cases that names commit, machine and software."""
        if self._record is None and self._asked.record is not None:
            self._record = record.read(self._asked.record)
        return self._record or self._plan()[1]

    def take(self, keys: Iterable[str], say: Callable[[str], object]) -> None:
        """Measure these cases, all in one run whose record is kept; nothing is left to do where a record was given.

        say: told once what begins.
        """
        wanted = set(keys)
        if self._asked.record is None:
            # Planned anew: the run begins now, and not when its cases were listed.
            plan, kept = runs.planned(self._asked.options)
            plan = dataclasses.replace(plan, cases=[case for case in plan.cases if case.key in wanted])
            kept.run.planned = [case.key for case in plan.cases]
            kept.run.command = self._command(kept.run.planned)
            path = runs.begin(self._asked.options.results, kept)
            say(f"measuring {len(plan.cases)} cases on {kept.machine.name}, record {path}")
            self.path, self._record = path, supervise.run(plan, kept, path)
        self.taken = True

    def identity(self) -> dict[str, dict[str, Any]]:
        """Hard and soft keys (harness/comparable.py) and their values, as JSON can hold them."""
        hard, soft = comparable.told(self.told())
        if hard["profiles"] == comparable.UNKNOWN and self._planned is not None:
            hard["profiles"] = self._planned[0].profile.key
        return msgspec.to_builtins({"hard": hard, "soft": soft})  # type: ignore[no-any-return]

    def _plan(self) -> tuple[Plan, Record]:
        if self._planned is None:
            self._planned = runs.planned(self._asked.options)
        return self._planned

    def _command(self, keys: Sequence[str]) -> list[str]:
        """The arguments of `overlap` that measure the same."""
        options = self._asked.options
        words = [
            "run",
            "--tier",
            options.tier,
            "--device",
            options.device,
            "--launches",
            str(options.launches),
        ]
        return words + [word for key in keys for word in ("--case", key)]


def samples_s(case: CaseResult) -> list[float]:
    """Device times of one batch in seconds, whose median is the case's `overlapped_ms`.

    Those of every round; of a case of several launches one for each, its median: launches differ by more than
    rounds do, and pooled rounds would hide that.
    """
    taken = metrics.samples if len(case.launches) == 1 else metrics.launch_values
    return [ms / 1e3 for ms in taken(case, registry.HEADLINE)]


def extra_info(case: CaseResult, kept: Record, path: Path | None) -> dict[str, Any]:
    """What pytest-benchmark keeps beside the samples: every metric with its interval, and how far to believe them."""
    told = {
        "case": case.key,
        "status": case.status,
        "reason": case.reason,
        "metrics": case.metrics,
        "model": case.model,
        "checks": case.checks,
        "controls": {
            name: all(control.passed for control in kept.controls if control.name == name)
            for name in dict.fromkeys(control.name for control in kept.controls)
        },
        "launches": len(case.launches),
        "repeats": case.launches[0].repeats,
        "rounds": sum(len(launch.ranks[0].rounds) for launch in case.launches if launch.ranks),
        "commit": kept.run.commit,
        "record": path.name if path else None,
    }
    return _finite(msgspec.to_builtins(told))  # type: ignore[no-any-return]


def _finite(item: Any) -> Any:
    """Strict JSON knows no infinity."""
    if isinstance(item, dict):
        return {name: _finite(each) for name, each in item.items()}
    if isinstance(item, list):
        return [_finite(each) for each in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item
