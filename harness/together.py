"""Several ranks that copy from their host at once, beside the same case of one rank alone: what each of them gets."""

from collections.abc import Iterator

from harness.labels import axis_words, number, percent, ratio
from harness.record import CaseResult, Record
from harness.views import metric, value

# A pipeline that takes this much longer beside others, beyond both intervals, loses to them.
LOSES = 0.02


def verdicts(record: Record) -> Iterator[tuple[str, bool]]:
    """One sentence for each such pair of measured h2d cases; none of them is a doubt."""
    alone = {_alike(case): case for case in record.cases if _ranks(case) == 1 and _told(case)}
    for case in record.cases:
        one = alone.get(_alike(case))
        if one is not None and _ranks(case) > 1 and _told(case):
            yield f"{_where(record, case)}: {_words(case, one)}{_label(case, one)}", False


def gigabytes_per_second(case: CaseResult) -> float | None:
    """Of one rank's copies alone, the slowest rank's; None where the record does not say how many bytes they are."""
    launch = next((launch for launch in case.launches if "bytes" in launch.checks), None)
    took = value(case, "transfer_ms")
    if launch is None or not took:
        return None
    return float(launch.checks["bytes"]) / launch.repeats / took / 1e6


def _words(case: CaseResult, one: CaseResult) -> str:
    beside, apart = (metric(found, "overlapped_ms") for found in (case, one))
    assert beside is not None
    assert apart is not None
    over = beside.value / apart.value
    rates = [gigabytes_per_second(found) for found in (case, one)]
    words = "" if None in rates else f"{number(rates[0])} GB/s for each, {number(rates[1])} for one alone; "
    if over <= 1 + LOSES or (beside.low is not None and apart.high is not None and beside.low <= apart.high):
        words += f"a pipeline takes as long as one alone ({ratio(over)}x)"
    else:
        words += f"a pipeline takes {ratio(over)}x as long as one alone"
    hidden = [value(found, "hidden_fraction") for found in (case, one)]
    if hidden[0] is not None and hidden[1] is not None:
        words += f" and hides {_share(hidden[0])} of the shorter leg, alone {_share(hidden[1])}"
    return words


def _share(hidden: float) -> str:
    return percent(hidden) if hidden > 0 else "nothing"


def _where(record: Record, case: CaseResult) -> str:
    kind = "GPUs" if record.machine.device == "cuda" else "processes"
    given = case.params.items()
    words = [axis_words("h2d", axis, told) for axis, told in given if axis not in ("ranks", "profile")]
    return f"{_ranks(case)} {kind} that copy from the host at once ({', '.join(words)})"


def _label(*cases: CaseResult) -> str:
    found = dict.fromkeys(case.status for case in cases if case.status != "ok")
    return f" ({', '.join(found)})" if found else ""


def _told(case: CaseResult) -> bool:
    return value(case, "overlapped_ms") is not None


def _ranks(case: CaseResult) -> int:
    found = case.params.get("ranks", 1) if case.family == "h2d" else 0
    return found if isinstance(found, int) else 0


def _alike(case: CaseResult) -> tuple[object, ...]:
    return case.family, *sorted((axis, given) for axis, given in case.params.items() if axis != "ranks")
