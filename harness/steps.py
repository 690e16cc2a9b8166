"""Where a series changes level. The fit is asv's own, the one that `asv publish` finds regressions with."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# Below this many points the fit sees steps in noise: in 1 of 100 series of 8, in 10 of 6, in 30 of 5.
FIT_POINTS = 8

# Points lie apart beyond this many standard deviations of those before them, taken from their median deviation. By
# chance alone so do the newest of 3 in 100 series of 10 points, and of 1 of 15.
APART = 4.0
_DEVIATION = 1.4826


class Level(NamedTuple):
    """Values `first` to `last`, both included, lie about `value`."""

    first: int
    last: int
    value: float


def levels(values: Sequence[float]) -> list[Level]:
    """The piecewise constant function of least absolute error, each step at a price (Potts; asv.step_detect).

    Every value counts alike: intervals from within a launch say little of how launches and nights differ, and weights
    made from them would have the narrowest decide. Fewer than FIT_POINTS values are one level.
    """
    if not values:
        return []
    if len(values) < FIT_POINTS:
        return [Level(0, len(values) - 1, median(values))]
    from asv.step_detect import detect_steps

    return [Level(first, end - 1, float(value)) for first, end, value, _, _ in detect_steps(list(values))]


def apart(values: Sequence[float]) -> int:
    """How many of the newest of one level's values all lie on one side of those before them, and far from them.

    They may be a step that has begun: the fit asks for more points of it than these.
    """
    found = 0
    for count in range(1, len(values) - FIT_POINTS + 1):
        before, newest = values[:-count], values[-count:]
        middle = median(before)
        far = APART * _DEVIATION * median(abs(value - middle) for value in before)
        if all(value > middle + far for value in newest) or all(value < middle - far for value in newest):
            found = count
    return found
