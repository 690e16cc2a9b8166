"""What a record shows of collectives beside compute, in sentences: what stays bare, and what an option changes, of
collectives and of loaders."""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.families import FAMILIES, grouped
from harness.labels import axis_words, clean, number, percent, ratio, short_names
from harness.record import CaseResult, Metric, Record
from harness.views import metric, value

# Axes of which each value but the usual one is a promise, to be kept or found to change nothing.
OPTIONS = {"ddp": ("option", "connections", "first"), "feed": ("prefetch", "persistent", "start")}

# exposed = tail + dilation, to this share of the overlapped time (measurement.md, ddp).
CLOSES = 0.02

# An option that changes a step by less has no effect.
NO_EFFECT = 0.02

# Of the shorter leg: in sequence no more than this may seem to be hidden.
HIDES_NOTHING = 0.15


@dataclass(frozen=True)
class Effect:
    """How much longer a case takes for one option, over the same case without it: a share and its interval.

    The interval is of two cases of one launch measured one after the other, each with its own: an indication, which
    launches in turns would have to confirm.
    """

    case: CaseResult
    usual: CaseResult
    axis: str
    change: float
    low: float
    high: float

    @property
    def seen(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def small(self) -> bool:
        """Whether any effect there is is too small to matter."""
        return max(abs(self.low), abs(self.high)) <= NO_EFFECT

    @property
    def text(self) -> str:
        what = axis_words(self.case.family, self.axis, self.case.params[self.axis])
        between = f"{percent(self.low, places=1)} to {percent(self.high, places=1)}"
        if not self.seen:
            return (
                f"{what} shows no effect ({between})" if self.small else f"{what}: cannot be told ({between})"
            )
        much = percent(abs(self.change), places=1)
        return f"{what} takes {much} {'longer' if self.change > 0 else 'less'} ({between})"


def _collective(record: Record) -> list[CaseResult]:
    return [
        case for case in record.cases if grouped(case.family) and value(case, "overlapped_ms") is not None
    ]


def effects(record: Record, family: str) -> list[Effect]:
    """The effect of every option that was measured with and without, in the record's order."""
    cases = [
        case
        for case in record.cases
        if clean(case.family) == family and value(case, "overlapped_ms") is not None
    ]
    known = {_parameters(case): case for case in cases}
    found = []
    for case in cases:
        for axis in OPTIONS.get(family, ()):
            default = _default(case.family, axis)
            usual = known.get(_parameters(case, **{axis: default}))
            if usual is None or case.params.get(axis) == default:
                continue
            change = _change(metric(usual, "overlapped_ms"), metric(case, "overlapped_ms"))
            if change is not None:
                found.append(Effect(case, usual, axis, *change))
    return found


def options(record: Record, family: str) -> list[str]:
    """The same in sentences."""
    names = short_names([case for case in record.cases if clean(case.family) == family])
    step = " (of a real step)" if family == "feed" else ""
    return [f"{effect.text}{step}: {names[effect.usual.key]}" for effect in effects(record, family)]


def _default(family: str, axis: str) -> object:
    return next((each.default for each in FAMILIES[family].axes if each.name == axis), None)


def _parameters(case: CaseResult, **replaced: object) -> tuple[object, ...]:
    return (case.family, *sorted((case.params | replaced).items()))


def _change(usual: Metric | None, other: Metric | None) -> tuple[float, float, float] | None:
    if usual is None or other is None or usual.value <= 0:
        return None
    if usual.low is None or usual.high is None or other.low is None or other.high is None:
        return None
    # The widths of two independent intervals add as squares.
    change = other.value / usual.value - 1
    below = ((other.value - other.low) ** 2 + (usual.high - usual.value) ** 2) ** 0.5 / usual.value
    above = ((other.high - other.value) ** 2 + (usual.value - usual.low) ** 2) ** 0.5 / usual.value
    return change, change - below, change + above


def alone_measured(record: Record) -> bool:
    """Whether every measured case is one of collectives."""
    measured = [case for case in record.cases if case.measured]
    return bool(measured) and len(_collective(record)) == len(measured)


def hides_in_sequence(record: Record) -> list[CaseResult]:
    """The cases whose serial arm, the same work forced in sequence, seems to hide some of it all the same.

    The negative control of each case: where even that overlaps, nothing is to be believed (measurement.md, rule 6).
    """
    found = []
    for case in _collective(record):
        arms = [metric(case, name) for name in ("transfer_ms", "compute_ms", "serial_ms")]
        transfer, compute, serial = arms
        if transfer is None or compute is None or serial is None:
            continue
        shorter = min(transfer.value, compute.value)
        if shorter <= 0:
            continue
        hidden = (transfer.value + compute.value - serial.value) / shorter
        wide = sum((each.spread or 0.0) * each.value for each in (transfer, compute, serial)) / shorter
        if hidden - wide > HIDES_NOTHING:
            found.append(case)
    return found


def verdicts(record: Record) -> list[tuple[str, bool]]:
    """Sentences on the fastest buckets of a few token counts, without an option, and whether to doubt each.

    The fewest, the middle and the most tokens of the model that was measured at the most of them; and whatever is
    doubted of the others.
    """
    # One rank has nobody to reduce with: nothing can lie bare.
    plain = [case for case in _collective(record) if _is_plain(case) and case.params.get("ranks") != 1]
    names = short_names(plain)
    fastest: dict[tuple[object, ...], dict[object, CaseResult]] = {}
    for case in plain:
        of_model = fastest.setdefault(_parameters(case, bucket=0, tokens=0), {})
        best = of_model.get(case.params.get("tokens"))
        if best is None or (value(case, "overlapped_ms") or 0.0) < (value(best, "overlapped_ms") or 0.0):
            of_model[case.params.get("tokens")] = case
    told = [
        [_sentence(case, f"{clean(case.family)} {names[case.key]}") for case in of_model.values()]
        for of_model in fastest.values()
    ]
    most = max(told, key=len, default=[])
    shown = dict.fromkeys(most[at] for at in (0, len(most) // 2, -1)) if most else {}
    return [sentence for each in told for sentence in each if sentence in shown or sentence[1]]


def _is_plain(case: CaseResult) -> bool:
    return all(
        case.params.get(axis) == _default(case.family, axis)
        for axis in OPTIONS.get(case.family, ())
        if axis in case.params
    )


def _sentence(case: CaseResult, name: str) -> tuple[str, bool]:
    exposed, transfer = value(case, "exposed_ms") or 0.0, value(case, "transfer_ms") or 0.0
    share = value(case, "exposed_fraction") or 0.0
    parts = f" ({parts})" if (parts := _parts(case)) else ""
    if share > 1:
        text = f"{name}: overlap lost time: {number(exposed)} ms more than the compute alone{parts}, "
        text += f"and the collectives alone take {number(transfer)} ms"
    else:
        text = f"{name}: {number(exposed)} ms of {number(transfer)} ms of collectives lie bare, {percent(share)}{parts}"
    over = value(case, "bound_ratio")
    if over is not None:
        text += f"; {ratio(over)}x its bound"
    label = "" if case.status == "ok" else f" ({case.status})"
    return text + label, share > 1


def _parts(case: CaseResult) -> str:
    """What is exposed, taken apart; that it cannot be, where the parts do not come to the whole."""
    tail, dilation = value(case, "tail_ms"), value(case, "dilation_ms")
    rest, whole = value(case, "unexplained_ms"), value(case, "overlapped_ms") or 0.0
    if tail is None or dilation is None:
        return ""
    if rest is not None and abs(rest) > CLOSES * whole:
        return f"not to be taken apart: tail {number(tail)} and dilation {number(dilation)} ms do not add up to it"
    return f"{number(tail)} as its tail, {number(dilation) if dilation >= 0 else 'none'} as slower compute"


def open_cases(record: Record) -> list[CaseResult]:
    """The cases whose exposed time is not what tail and dilation come to, with the whole interval of the rest."""
    found = []
    for case in _collective(record):
        rest, whole = metric(case, "unexplained_ms"), value(case, "overlapped_ms")
        if rest is None or whole is None or rest.low is None or rest.high is None:
            continue
        if min(abs(rest.low), abs(rest.high)) > CLOSES * whole and rest.low * rest.high > 0:
            found.append(case)
    return found


def same_buckets(record: Record) -> list[list[CaseResult]]:
    """Cases alike but for caps that came to the same buckets: they are one case, measured more than once."""
    found: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in _collective(record):
        lists = [launch.checks.get("buckets") for launch in case.launches]
        if lists and isinstance(lists[0], list) and all(each == lists[0] for each in lists):
            alike = _parameters(case, bucket=0, first=0)
            found.setdefault((*alike, tuple(lists[0])), []).append(case)
    return [cases for cases in found.values() if len(cases) > 1]


def doubts(record: Record) -> Iterable[tuple[str, bool]]:
    """What a reader should know before believing these numbers."""
    names = short_names(_collective(record))
    for case in open_cases(record):
        rest = number(value(case, "unexplained_ms"))
        yield (
            f"tail and dilation do not add up to what is exposed ({rest} ms are left): {names[case.key]}",
            True,
        )
    cores = record.machine.cpu.get("usable_cores")
    most = max((int(case.params.get("ranks", 1)) for case in _collective(record)), default=0)
    if record.machine.device == "cpu" and isinstance(cores, int) and most > cores:
        yield f"{most} ranks share {cores} cores: they take each other's time", True
    for case in hides_in_sequence(record):
        yield f"even in sequence the collectives seem hidden, which cannot be: {names[case.key]}", True
    for cases in same_buckets(record):
        listed = ", ".join(axis_words(case.family, "bucket", case.params["bucket"]) for case in cases)
        yield f"the same buckets, whatever the cap, so one case: {listed}", False
