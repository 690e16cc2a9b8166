"""`overlap myths`: claims about copies and streams, put to the test on the GPU that is here.

The parent asks a child process, which opens the device (harness/experiments.py), for the figures of each claim, and
judges them (harness/claims.py). A child that dies or hangs ends only the experiment it was in.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harness import protocol
from harness.child import OPENING_S, Process, module
from harness.claims import CLAIMS, Claim, Figure
from harness.devices import Device
from harness.errors import OverlapError, UsageError
from harness.labels import count, number, ratio
from harness.protocol import Failed

NOT_RUN, ERROR = "not run", "error"

# An experiment that takes longer hangs: the longest compiles a function, the others take a second or two.
EXPERIMENT_S = 90.0

# Processes that may be lost before the rest is given up.
MAX_STARTS = 4

# Column in which the text of a row begins.
INDENT = 12


class Opened(msgspec.Struct, tag="opened", kw_only=True):
    """The child has opened the device."""

    device: str
    torch: str


class Begun(msgspec.Struct, tag="begun", kw_only=True):
    name: str


class Found(msgspec.Struct, tag="found", kw_only=True):
    name: str
    numbers: dict[str, float]


class Unable(msgspec.Struct, tag="unable", kw_only=True):
    """The experiment lacks what it needs."""

    name: str
    reason: str


class Broke(msgspec.Struct, tag="broke", kw_only=True):
    """The experiment ended with an error; the device goes on."""

    name: str
    reason: str


Event = Opened | Begun | Found | Unable | Broke | Failed
EVENTS = msgspec.json.Decoder(Event)


class NoDevice(OverlapError):
    """There is nothing to put the claims to."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """One claim and what became of it. verdict: a word of harness/claims.py, NOT_RUN or ERROR; reason: why."""

    claim: Claim
    verdict: str
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def choose(names: Sequence[str]) -> list[str]:
    """The claims of these names, each once, in the order of CLAIMS; all for none. UsageError for another name."""
    for name in names:
        if name not in CLAIMS:
            raise UsageError(f"myths: got {name!r}, want some of {', '.join(CLAIMS)}")
    return [name for name in CLAIMS if name in names or not names]


def check(device: Device) -> None:
    """NoDevice, with what to do instead, for another device than a GPU; UsageError where nothing can race."""
    if device.kind != "cuda":
        raise NoDevice(
            f"myths: nothing measured: these claims are about a CUDA device, and this is the cpu ({device.reason}); "
            f"overlap myths --list shows them"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise UsageError(
            "myths: got CUDA_LAUNCH_BLOCKING=1, with which every launch waits for the device; unset it"
        )


def command(events: int) -> list[str]:
    """The program that reads names of experiments and writes their figures."""
    return module("experiments", events)


class Trial:
    """The named claims put to the test, one after the other.

    device: what they were put to, once a child has opened it. Nothing that a child does raises here.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._left = list(names)
        self.device: Opened | None = None

    def results(self) -> Iterator[Result]:
        """The result of every claim, as it comes, in the order of the names."""
        reason = ""
        for _ in range(MAX_STARTS):
            before = len(self._left)
            reason = yield from self._follow()
            if not self._left:
                return
            if len(self._left) == before:
                break  # It got to no experiment, and will not get further the next time.
        else:
            reason = f"given up: {MAX_STARTS} workers ended early, the last one: {reason}"
        while self._left:
            yield self._next(ERROR, reason)

    def _follow(self) -> Generator[Result, None, str]:
        """The results of one child, and why it ended."""
        try:
            process = Process(command, msgspec.json.encode(self._left), OPENING_S)
        except OSError as error:
            return f"no worker could be started: {error.strerror}"
        begun = False
        with process:
            for line in process.lines():
                event = process.heard(line, EVENTS)
                if event is None or isinstance(event, Failed):
                    break
                if isinstance(event, Opened):
                    self.device = event
                    continue
                trouble = self._trouble(event, begun)
                if trouble:
                    process.refuse(protocol.reason(f"the worker {trouble}"))
                    break
                process.silence_s = EXPERIMENT_S
                begun = isinstance(event, Begun)
                if not isinstance(event, Begun):
                    yield self._settled(event)
            reason = process.end() or "the worker ended before its work was done"
        if begun:
            yield self._next(ERROR, reason)
        return reason

    def _trouble(self, event: Begun | Found | Unable | Broke, begun: bool) -> str:
        """What is wrong with an event that comes now; empty if nothing is."""
        if self.device is None or event.name not in self._left[:1] or begun == isinstance(event, Begun):
            return f"spoke of {event.name!r} out of turn"
        if isinstance(event, Found):
            complaint = CLAIMS[event.name].complaint(event.numbers)
            return f"told no figures of {event.name}: {complaint}" if complaint else ""
        return ""

    def _settled(self, event: Found | Unable | Broke) -> Result:
        if isinstance(event, Found):
            assert self.device is not None
            verdict = CLAIMS[event.name].judge(event.numbers, self.device.torch)
            return self._next(verdict.word, verdict.because, event.numbers)
        return self._next(NOT_RUN if isinstance(event, Unable) else ERROR, protocol.reason(event.reason))

    def _next(self, verdict: str, reason: str, numbers: Mapping[str, float] | None = None) -> Result:
        claim = CLAIMS[self._left.pop(0)]
        return Result(claim=claim, verdict=verdict, reason=reason, numbers=dict(numbers or {}))


def exit_code(results: Iterable[Result]) -> int:
    """4 if an experiment failed, 3 if nothing was measured, else 0 (design)."""
    verdicts = {result.verdict for result in results}
    if ERROR in verdicts:
        return 4
    return 0 if verdicts - {NOT_RUN} else 3


def listed(claim: Claim, width: int) -> list[str]:
    """A claim for people."""
    return [claim.name, *_row("claim", claim.text, width), *_row("see", ", ".join(claim.refs), width)]


def words(result: Result, width: int) -> list[str]:
    """A result for people: what is believed, what was measured, the verdict, and what to do."""
    claim = result.claim
    verdict = f"{result.verdict}: {result.reason}" if result.reason else result.verdict
    told = ((figure, result.numbers.get(name)) for name, figure in claim.figures.items())
    measured = "; ".join(_figure(figure, value) for figure, value in told if value is not None)
    rows = {"claim": claim.text, "measured": measured, "verdict": verdict}
    if result.verdict not in (NOT_RUN, ERROR):
        rows["advice"] = claim.advice
    rows["see"] = ", ".join(claim.refs)
    return [claim.name, *(line for name, text in rows.items() if text for line in _row(name, text, width))]


def summary(results: Sequence[Result]) -> str:
    """How many claims came out how: `11 claims: 9 false here, 2 depends`."""
    verdicts = Counter(result.verdict for result in results)
    return f"{count(len(results), 'claim')}: " + ", ".join(
        f"{n} {verdict}" for verdict, n in verdicts.items()
    )


def described(claim: Claim) -> dict[str, Any]:
    """A claim for programs."""
    return {"name": claim.name, "claim": claim.text, "refs": list(claim.refs), "advice": claim.advice}


def of(trial: Trial, results: Sequence[Result]) -> dict[str, Any]:
    """What `--json` prints of a trial."""
    return {
        "device": trial.device.device if trial.device else None,
        "torch": trial.device.torch if trial.device else None,
        "exit_code": exit_code(results),
        "claims": [
            {
                **described(result.claim),
                "verdict": result.verdict,
                "reason": result.reason,
                "measured": {
                    name: {
                        "value": value,
                        "unit": result.claim.figures[name].unit,
                        "text": result.claim.figures[name].words,
                    }
                    for name, value in result.numbers.items()
                },
            }
            for result in results
        ],
    }


def _row(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=f"  {name:<{INDENT - 2}}",
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _figure(figure: Figure, value: float) -> str:
    """`stale when read at once: 20 of 20`, `pinned: 1.23 ms`, `hidden: 0.953`."""
    if not figure.unit:
        return f"{figure.words} {ratio(value)}"
    text = f"{value:g}" if figure.unit.startswith("of ") else number(value)
    return f"{figure.words} {text} {figure.unit}"
