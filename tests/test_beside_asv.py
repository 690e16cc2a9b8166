"""The verdicts beside `asv compare` and asv's step detection, on the same simulated launches.

`python tests/test_beside_asv.py 400` prints the README's table from that many comparisons. asv is asked as it is: its
own functions, the samples that `overlap ingest` gives it (SAMPLES_PER_LAUNCH a launch), with its default factor of 1.1
and with the 1.025 that half of our 5 % budget is; steps over 12 nights of one launch, the change before the last three.
"""

import math
import sys

import numpy as np
import pytest
from asv._stats import is_different
from asv.step_detect import detect_regressions, detect_steps
from test_contrast import BUSY_H200, CASES, Noise, of

from harness.asv_store import SAMPLES_PER_LAUNCH
from harness.contrast import calls

LAUNCHES = 3
NIGHTS, SINCE = 12, 3
# Half-width of what one launch's samples differ by among themselves, on a log scale, as a share of what launches do.
WITHIN = 1.0
LOSSES = 10

SCENARIOS = {
    "calm H200": Noise(),
    "busy H200, t(5)": Noise(quantities=BUSY_H200, student=True),
    "3 %": Noise(sd=0.03),
    "5 noisy cases of 100, 3 %": Noise(noisy=(5, 0.03)),
}


def compare(base: np.ndarray, head: np.ndarray, factor: float) -> bool:
    """What `asv compare --factor` says of these samples: slower or not."""
    apart = is_different(list(base), list(head), None, None)
    return bool(apart and np.median(base) < np.median(head) / factor)


def samples(rng: np.random.Generator, launches: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """(cases, launches * samples) times of the headline, as asv pools them."""
    shape = (*launches.shape, SAMPLES_PER_LAUNCH)
    within = WITHIN * spread[:, None, None] * rng.standard_normal(shape)
    return np.exp(launches[..., None] + within).reshape(len(launches), -1)


def stepped(nights: np.ndarray) -> bool:
    """Whether `asv publish` finds a regression of 2.5 % or more in this series."""
    _, _, found = detect_regressions(detect_steps(list(nights)), threshold=0.025)
    return bool(found)


def contest(noise: Noise, comparisons: int, loss: float = 0.05) -> dict[str, tuple[float, float]]:
    """By method: the share of comparisons of unchanged code with a case called slower, and of losses that are."""
    rng = np.random.default_rng(11)
    spread = noise.spread()[:, 0]
    alarms: dict[str, list[bool]] = {}
    hits: dict[str, list[bool]] = {}
    for _ in range(comparisons):
        base, head, slow = (noise.launches(rng, LAUNCHES) for _ in range(3))
        slow[-LOSSES:, 0] += math.log1p(loss)
        for changed, told in ((head, alarms), (slow, hits)):
            asked = slice(None) if told is alarms else slice(-LOSSES, None)
            ours = (calls(of(base, changed)) > 0).reshape(CASES, -1)
            told.setdefault("overlap gate", []).extend([ours.any()] if told is alarms else ours[asked, 0])
            old, new = (samples(rng, each[:, 0], spread) for each in (base, changed))
            for factor in (1.1, 1.025):
                said = [compare(a, b, factor) for a, b in zip(old[asked], new[asked], strict=True)]
                told.setdefault(f"asv compare, factor {factor}", []).extend(
                    [any(said)] if told is alarms else said
                )
            nights = noise.launches(rng, NIGHTS)[asked, 0]
            if told is hits:
                nights[:, -SINCE:] += math.log1p(loss)
            said = [stepped(np.exp(series)) for series in nights]
            told.setdefault("asv publish, 12 nights", []).extend([any(said)] if told is alarms else said)
    return {name: (float(np.mean(alarms[name])), float(np.mean(hits[name]))) for name in alarms}


def test_asv_s_default_factor_sees_no_loss_of_5_percent():
    found = contest(SCENARIOS["calm H200"], 3)
    assert found["asv compare, factor 1.1"] == (0.0, 0.0)
    assert found["overlap gate"] == (0.0, 1.0)


@pytest.mark.parametrize("name", ["3 %", "5 noisy cases of 100, 3 %"])
def test_pooled_samples_make_launches_that_differ_a_loss(name):
    """asv takes the 21 samples of a launch for independent, and knows nothing of the other cases."""
    found = contest(SCENARIOS[name], 6)
    assert found["overlap gate"][0] == 0.0
    assert found["asv compare, factor 1.025"][0] > 0.3


if __name__ == "__main__":
    asked = int(sys.argv[1])
    for scenario, noise in SCENARIOS.items():
        for method, (alarm, hit) in contest(noise, asked).items():
            print(f"| {scenario} | {method} | {100 * alarm:.1f} % | {100 * hit:.1f} % |", flush=True)
