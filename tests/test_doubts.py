"""What a reader is told about the samples, and what is left unsaid."""

import numpy as np
import pytest
from factories import noisy

from harness.doubts import NAMES, doubts
from harness.statistics import balanced_orders

ARMS = ["transfer", "compute", "serial", "overlapped"]


def launches(count: int = 1, rounds: int = 40, **means: float) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {arm: noisy(means.get(arm, 5.0), rounds, noise=0.003, rho=0.0, rng=rng) for arm in ARMS}
        for _ in range(count)
    ]


def orders(count: int, rounds: int = 40) -> list[list[str]]:
    return [balanced_orders(ARMS)[at % 4] for _ in range(count) for at in range(rounds)]


def test_clean_samples_raise_no_doubt():
    found = doubts(launches(2), orders(2))
    assert "bimodal" not in found
    assert found["carry_over"]["found"] is False
    assert list(found["lag1"]) == list(found["drift"]) == orders(1)[0]
    assert set(found) <= set(NAMES)


def test_two_modes_are_told_with_times_and_share():
    seen = launches(1)
    seen[0]["transfer"] *= np.tile([1.0, 1.0, 1.0, 1.04], 10)
    assert doubts(seen, orders(1))["bimodal"] == {
        "transfer": [pytest.approx(5.0, rel=0.002), pytest.approx(5.2, rel=0.002), 0.25]
    }


def test_one_launch_of_three_with_two_modes_is_not_enough():
    seen = launches(3)
    seen[1]["transfer"] *= np.tile([1.0, 1.04], 20)
    assert "bimodal" not in doubts(seen, orders(3))
    seen[2]["transfer"] *= np.tile([1.0, 1.04], 20)
    assert "bimodal" in doubts(seen, orders(3))


def test_launches_of_different_speed_are_no_two_modes_and_no_carry_over():
    seen = launches(2)
    seen[1] = {arm: 1.1 * x for arm, x in seen[1].items()}
    found = doubts(seen, orders(2))
    assert "bimodal" not in found
    assert found["carry_over"]["found"] is False


@pytest.mark.parametrize(("effect", "told"), [(1.02, True), (1.003, False)])
def test_carry_over_is_told_when_it_matters(effect: float, told: bool):
    """A shift below half a percent is left unsaid, however sure; launches of different speed hide none."""
    seen, ran = launches(16), orders(16)
    seen = [
        {arm: x * (1 + 0.05 * number) for arm, x in columns.items()} for number, columns in enumerate(seen)
    ]
    for number, columns in enumerate(seen):
        for at, order in enumerate(ran[40 * number : 40 * number + 40]):
            place = order.index("overlapped")
            if place and order[place - 1] == "serial":
                columns["overlapped"][at] *= effect
    found = doubts(seen, ran)["carry_over"]
    assert (found["arm"], found["after"], found["found"]) == ("overlapped", "serial", told)
    assert found["p"] < 0.01
    assert found["shift"] == pytest.approx(effect - 1, rel=0.2)


def test_large_shift_that_chance_explains_is_not_told():
    rng = np.random.default_rng(1)
    seen = [{arm: noisy(5.0, 16, noise=0.1, rho=0.0, rng=rng) for arm in ARMS}]
    found = doubts(seen, orders(1, 16))["carry_over"]
    assert abs(found["shift"]) > 0.02
    assert found["found"] is False


def test_worst_launch_is_shown_with_its_sign():
    seen = launches(2)
    seen[1]["overlapped"] = np.linspace(6.0, 5.0, 40)
    found = doubts(seen, orders(2))
    assert found["lag1"]["overlapped"] > 0.8
    assert found["drift"]["overlapped"] == pytest.approx(5.15 / 5.85 - 1, abs=0.01)


def test_only_arms_that_ran_are_judged():
    seen = launches(1)
    seen[0]["transfer_1"] = seen[0]["transfer"]
    seen[0]["host.overlapped"] = np.tile([1.0, 2.0], 20)
    found = doubts(seen, orders(1))
    assert "bimodal" not in found
    assert set(found["lag1"]) == set(ARMS)
