"""Tokens per GPU and best buckets in words, for a terminal of any width, and the same for programs."""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from harness import buckets
from harness.best_bucket import BestBucket, Theory
from harness.case import Value
from harness.families import FAMILIES
from harness.labels import NONE, axis_text, clean, count, number, percent, with_spread
from harness.record import CaseResult
from harness.terms import Facts, Term, tail_alone
from harness.threshold import FRACTION, Crossing, Derived, Found, Threshold, TokenSet

MIB = 1 << 20
_LEAST_WIDTH = 40

# A space that no line is folded at.
_BOUND = "\N{NO-BREAK SPACE}"


def blocks(found: Found, best: Sequence[BestBucket], width: int) -> Iterator[list[str]]:
    """A title and its lines for each set of token counts, then for each of bucket caps, no line longer than `width`, or
    40."""
    cases = [next(iter(each.cases.values())) for each in found.sets] + [chosen.best.case for chosen in best]
    alike = ("profile",) if len({case.params.get("profile") for case in cases}) == 1 else ()
    for each in found.sets:
        yield _wrapped(_set_lines(each, alike), width)
    for chosen in best:
        yield _wrapped(_best_lines(chosen, alike), width)


def _set_lines(found: TokenSet, alike: tuple[str, ...]) -> Iterator[str]:
    case = next(iter(found.cases.values()))
    yield f"Tokens per GPU that hide the {found.leg.name}'s transfer: {_name(case, 'tokens', *alike)}"
    shares = ", ".join(f"{tokens:,}: {percent(share, places=1)}" for tokens, share in found.shares.items())
    yield f"exposed by tokens  {shares}"
    yield from _unsettled(found.cases.values())
    yield from _columns(
        [
            ("exposed under", "measured", "95 % interval", "predicted", "formula"),
            *(
                (percent(each.share), _crossing(each.measured), _interval(each), *_beside(each))
                for each in found.thresholds
            ),
        ]
    )
    if found.derived is None:
        yield f"no prediction: {found.lacking}"
    else:
        yield _formula(found, found.derived)
    for each in found.thresholds:
        yield from _doubts(found, each)
    reasons: dict[tuple[str, ...], list[str]] = {}
    for each in found.thresholds:
        if each.off:
            told = tuple(f"  {_points(term)}  {_term(term, found)}" for term in each.off)
            reasons.setdefault(told, []).append(percent(each.share))
    unseen = [percent(each.share) for each in found.thresholds if each.unseen]
    if unseen:
        yield f"under {' and '.join(unseen)}, the formula leaves out something: no term is larger than its own interval"
    for told, places in reasons.items():
        yield f"under {' and '.join(places)}, what the formula leaves out:"
        yield from told


def _formula(found: TokenSet, made: Derived) -> str:
    whole = "" if made.whole is None else f" ({number(made.whole)} in one piece)"
    return (
        f"formula: {found.leg.law} = {_tokens(made.tokens)} tokens, less the share that may be exposed; "
        f"g = {number(made.gradient)} bytes, r = {made.ranks - 1}/{made.ranks}, "
        f"F u = {_rate(made.rate)} at {max(found.facts):,} tokens, "
        f"W = {number(made.bandwidth)} GB/s at the size of the buckets{whole}"
    )


def _beside(each: Threshold) -> tuple[str, str]:
    if each.predicted is None:
        return NONE, NONE
    return "never" if math.isinf(each.predicted) else _tokens(each.predicted), _tokens(each.formula)


def _doubts(found: TokenSet, each: Threshold) -> Iterator[str]:
    share, crossings = percent(each.share), found.crossings(each.share)
    if crossings > 1:
        yield f"! {share}: the exposed share crosses it {crossings} times; the last is taken"
    if each.coarse is not None:
        yield (
            f"! {share}: the token counts are far apart: the prediction, interpolated as the measured shares are, "
            f"is {_tokens(each.coarse)}, not {_tokens(each.predicted)}; measure one between"
        )


def _points(term: Term) -> str:
    return f"{100 * term.share:+.1f} points"


def _term(term: Term, found: TokenSet) -> str:
    """What a term is about, in the numbers of the case that shows it best."""
    made, case, most = found.derived, found.facts[term.tokens], found.facts[max(found.facts)]
    assert made is not None
    metrics = found.leg.metrics(found.cases[term.tokens])
    at = f"at {term.tokens:,} tokens"
    if term.name == "work":
        return (
            f"work: {number(most.work)} FLOP for each parameter and token of that compute, where the formula has "
            f"{found.leg.work:g}"
        )
    if term.name == "tail":
        return _tail(case, most)
    if term.name == "latency":
        evenly = case.wire * case.total / made.bandwidth / 1e6
        return (
            f"latency: the buckets take {number(math.fsum(case.alone))} ms one by one, their bytes at W "
            f"{number(evenly)} ms"
        )
    if term.name == "rate":
        return f"compute: {_rate(case.rate)} {at}, {_rate(most.rate)} at {most.tokens:,}"
    if term.name == "unexplained":
        return f"unexplained: tail and dilation do not add up to what is exposed {at}"
    dilation, tail = metrics["dilation_ms"].value, metrics["tail_ms"].value
    if term.name == "dilation":
        return f"dilation: the compute takes {number(dilation)} ms longer beside the transfer {at}"
    return (
        f"bandwidth under load: {at} the last transfer ends {number(tail)} ms after its bucket is ready, by the times "
        f"alone {number(tail_alone(case, dilation))} ms"
    )


def _tail(case: Facts, most: Facts) -> str:
    total = len(case.sizes)
    since = buckets.schedule(
        [ready * case.tokens / most.tokens for ready in most.ready], case.alone, 0.0
    ).since
    if since == total - 1:
        part = percent(case.sizes[-1] / case.total, places=1)
        return f"tail: the last of {count(total, 'bucket')}, {part} of the bytes, has no compute left to hide behind"
    late = percent((case.ready[since] - case.begins) / case.window)
    return f"link: bucket {since + 1} of {total} is ready {late} into that compute, and from then on it never rests"


def _unsettled(cases: Iterable[CaseResult]) -> Iterator[str]:
    states = [case.status for case in cases]
    if wide := states.count("unsettled"):
        yield f"! {wide} of {len(states)} cases are unsettled: their samples scatter, and what follows with them"


def _best_lines(found: BestBucket, alike: tuple[str, ...]) -> Iterator[str]:
    yield f"Best bucket: {_name(found.best.case, 'bucket', *alike)}"
    rows = [("cap", "buckets", "overlapped ms", "exposed")]
    for cap in found.caps:
        share = cap.case.metrics.get(FRACTION)
        rows.append(
            (
                "=".join(_size(each) for each in (cap.cap, *cap.same)),
                str(cap.count),
                with_spread(cap.overlapped),
                NONE if share is None else percent(share.value, places=1),
            )
        )
    yield from _unsettled(cap.case for cap in found.caps)
    yield from _columns(rows)
    good = ", ".join(_size(cap.cap) for cap in found.as_good)
    yield f"measured: {_size(found.best.cap)}" + (f"; within the intervals as good: {good}" if good else "")
    if found.theory is None:
        yield f"no prediction: {found.lacking}"
    else:
        yield _theory(found.theory)


def _theory(theory: Theory) -> str:
    own = (
        f"alpha = {number(1e3 * theory.alpha)} us, W = {number(theory.bandwidth)} GB/s, "
        f"B = {number(theory.backward)} ms"
    )
    if theory.count is None or theory.cap is None:
        return f"theory: the more buckets the better, none costs anything by itself; {own}"
    usual = f"PyTorch's {_size(buckets.DEFAULT_CAP)} take {percent(theory.default, places=1)} longer"
    return f"theory: {count(theory.count, 'bucket')} of {number(theory.cap / MIB)} MiB; {own}; {usual}"


def as_json(found: Found, best: Sequence[BestBucket]) -> dict[str, Any]:
    """For `--json`. Tokens are null where out of the range measured, or where no number is enough (`never`)."""
    return {
        "sets": [_set_json(each) for each in found.sets],
        "lacking": found.lacking,
        "best_bucket": [_best_json(each) for each in best],
    }


def _set_json(found: TokenSet) -> dict[str, Any]:
    case = next(iter(found.cases.values()))
    return {
        "family": case.family,
        "leg": found.leg.name,
        "params": _params(case, "tokens"),
        "exposed_fraction": {str(tokens): share for tokens, share in found.shares.items()},
        "status": {str(tokens): case.status for tokens, case in found.cases.items()},
        "derived": msgspec.to_builtins(found.derived),
        "lacking": found.lacking,
        "thresholds": [_threshold_json(each) for each in found.thresholds],
    }


def _threshold_json(each: Threshold) -> dict[str, Any]:
    never = each.predicted is not None and math.isinf(each.predicted)
    return {
        "share": each.share,
        **{name: msgspec.to_builtins(getattr(each, name)) for name in ("measured", "low", "high")},
        "predicted": None if never else each.predicted,
        "never": never,
        "formula": each.formula,
        "coarse": each.coarse,
        "unseen": each.unseen,
        "off": [{"term": term.name, "share": term.share} for term in each.off],
    }


def _best_json(found: BestBucket) -> dict[str, Any]:
    theory = found.theory and msgspec.to_builtins(found.theory)
    return {
        "family": found.best.case.family,
        "params": _params(found.best.case, "bucket"),
        "caps": [
            {
                "bucket": cap.cap,
                "same": list(cap.same),
                "buckets": cap.count,
                "overlapped_ms": msgspec.to_builtins(cap.overlapped),
                "status": cap.case.status,
            }
            for cap in found.caps
        ],
        "best": found.best.cap,
        "as_good": [cap.cap for cap in found.as_good],
        "theory": theory,
        "lacking": found.lacking,
    }


def _params(case: CaseResult, axis: str) -> dict[str, Value]:
    return {name: value for name, value in case.params.items() if name != axis}


def _name(case: CaseResult, *without: str) -> str:
    """The family and its axes but those, and but those at their defaults, as the key writes them."""
    family = FAMILIES.get(case.family)
    usual = {axis.name: axis.default for axis in family.axes} if family else {}
    words = (
        f"{clean(name)}={axis_text(case.family, name, value)}"
        for name, value in case.params.items()
        if name not in without and value != usual.get(name)
    )
    return " ".join([clean(case.family), *words])


def _tokens(value: float | None) -> str:
    """Three digits, and thousands set apart: 1,310, 17,400."""
    return (
        NONE
        if value is None
        else f"{float(f'{value:.3g}'):,.3g}"
        if value < 10
        else f"{float(f'{value:.3g}'):,.0f}"
    )


def _crossing(found: Crossing) -> str:
    return f"{found.side} {found.near[0]:,}" if found.tokens is None else _tokens(found.tokens)


def _interval(each: Threshold) -> str:
    if each.low is None or each.high is None:
        return NONE
    low, high = _crossing(each.low), _crossing(each.high)
    return low if low == high and each.low.tokens is None else f"{low} to {high}"


def _rate(flops: float) -> str:
    unit, name = next(
        ((u, n) for u, n in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")) if flops >= u), (1e6, "MFLOP/s")
    )
    return f"{number(flops / unit)} {name}"


def _size(size: float) -> str:
    return axis_text("ddp", "bucket", int(size))


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns that line up, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(text.rjust(w) for text, w in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells)


def _wrapped(lines: Iterator[str], width: int) -> list[str]:
    """Lines folded at spaces, the rest of each indented further than its beginning; a number keeps its unit."""
    folded: list[str] = []
    for line in lines:
        inner = " " * (len(line) - len(line.lstrip()) + 2)
        bound = re.sub(r"(?<=\d) (?=[%A-Za-z])|(?<= =) | (?== )", _BOUND, line)
        folded += textwrap.wrap(bound, max(width, _LEAST_WIDTH), subsequent_indent=inner)
    return [line.replace(_BOUND, " ") for line in folded]
