"""A comparison as an exit code: a regression, lost coverage, or fine. Nothing that was not seen counts as fine."""

from harness.comparison import Comparison

FINE, REGRESSION, NOT_COVERED = 0, 1, 3

# Verdicts of a case that say that it was compared, or that there is nothing to compare.
_COMPARED = ("same", "faster", "slower")
_NOTHING = ("skipped", "new")


def exit_code(made: Comparison) -> int:
    """1 where a budgeted case is slower; else 3 where something that has a budget was not seen, or nothing was; else 0.

    A case with a budget is not seen that is missing, invalid, or inconclusive.
    """
    gated = [case for case in made.cases if case.gated]
    if any(case.verdict == "slower" for case in gated):
        return REGRESSION
    seen = [case for case in gated if case.verdict in _COMPARED]
    lost = [case for case in gated if case.verdict not in (*_COMPARED, *_NOTHING)]
    return NOT_COVERED if made.breaks or lost or not seen else FINE


def why(made: Comparison) -> str:
    """The exit code in one line."""
    if made.breaks:
        return f"not comparable: {'; '.join(made.breaks)}"
    gated = [case for case in made.cases if case.gated and case.verdict not in _NOTHING]
    slower = sum(case.verdict == "slower" for case in gated)
    lost = sum(case.verdict not in _COMPARED for case in gated)
    seen = sum(case.verdict in _COMPARED for case in gated)
    parts = []
    if slower:
        parts.append(f"{slower} of {len(gated)} budgeted cases slower")
    if lost:
        parts.append(f"{lost} of {len(gated)} budgeted cases not seen (missing, invalid or inconclusive)")
    if not seen:
        parts.append("no budgeted case could be compared")
    return "; ".join(parts) or f"{seen} budgeted case{'' if seen == 1 else 's'} same or faster"
