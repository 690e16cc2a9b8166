"""Verdicts on scripted figures, at the limits and on both sides of them."""

import math

import pytest

from harness import claims
from harness.claims import CLAIMS, DEPENDS, FALSE, HIDES, NOTHING, PAGEABLE_SIZES, QUEUED_MS, TRUE, TURNS

# Figures as they were expected, or seen, on an H200 with torch 2.11.
H200 = {
    "read-back": {"at_once": 20, "waited": 0, "pageable": 0},
    "edited-source": {"at_once": 20, "waited": 0, "pageable": 0},
    "compiled-read": {"compiled": 100, "eager": 100},
    "list-index": {"list": 0, "slice": 2},
    "one-stream": {
        "pinned_side": 0.97,
        "pinned_default": -0.01,
        "pageable_side": 0.03,
        "pageable_default": 0.0,
        "kernel_first": 0.98,
        "pinned_ms": 1.22,
        "pageable_ms": 13.1,
    },
    "pageable-return": dict(
        zip(map(str, PAGEABLE_SIZES), [0.01, 0.01, 0.02, 0.03, 0.08, 1.6, 4.0, 14.0], strict=True)
    ),
    "two-kernels": {"full": 0.0, "small": 0.99, "copy": 0.99},
    "no-wait": {"at_once": 20, "waited": 0},
    "pinned-size": {"asked": 256.0, "taken": 512.0, "resident": 513.0},
    "pin-each-time": {"plain": 53.0, "first": 148.0, "again": 30.0, "reused": 5.2},
    "blocking-to": {"blocking": 1.25, "non_blocking": 0.02, "copy": 1.22},
}


def judged(name, **changes):
    numbers = H200[name] | changes
    assert CLAIMS[name].complaint(numbers) == ""
    return CLAIMS[name].judge(numbers, "2.11.0")


def test_every_claim_says_what_is_believed_where_it_comes_from_and_what_to_do():
    assert CLAIMS.keys() == H200.keys()
    for name, claim in CLAIMS.items():
        assert claim.name == name
        assert claim.text.endswith(".")
        assert claim.advice.endswith(".")
        assert claim.refs
        assert claim.figures


def test_verdicts_on_an_h200():
    verdicts = {name: judged(name).word for name in CLAIMS}
    depends = {"pageable-return", "two-kernels", "pin-each-time"}
    assert verdicts == {name: DEPENDS if name in depends else FALSE for name in CLAIMS}


@pytest.mark.parametrize("name", ["read-back", "edited-source", "no-wait"])
@pytest.mark.parametrize(
    ("at_once", "waited", "word", "because"),
    [
        (TURNS, 0, FALSE, ""),
        (1, 0, FALSE, ""),
        (0, 0, TRUE, "nothing guarantees"),
        (TURNS, 1, DEPENDS, "wrong even after the wait"),
        (0, TURNS, DEPENDS, "wrong even after the wait"),
    ],
)
def test_a_race_is_settled_by_what_its_wait_changes(name, at_once, waited, word, because):
    verdict = judged(name, at_once=at_once, waited=waited)
    assert verdict.word == word
    assert because in verdict.because


@pytest.mark.parametrize(
    ("compiled", "eager", "word", "because"),
    [
        (1, 100, FALSE, "torch 2.11.0 is affected"),
        (100, 0, FALSE, "torch 2.11.0 is affected"),
        (0, 1, TRUE, "torch 2.11.0 is not affected"),
        (0, 0, DEPENDS, "did not show without the compiler either"),
    ],
)
def test_the_version_of_torch_is_named_as_affected_or_not(compiled, eager, word, because):
    verdict = judged("compiled-read", compiled=compiled, eager=eager)
    assert verdict.word == word
    assert because in verdict.because


@pytest.mark.parametrize(
    ("through_a_list", "through_a_slice", "word"),
    [(0, 2, FALSE), (2, 2, TRUE), (0, 0, DEPENDS), (2, 0, DEPENDS)],
)
def test_a_list_is_judged_only_where_a_slice_works(through_a_list, through_a_slice, word):
    assert judged("list-index", list=through_a_list, slice=through_a_slice).word == word


@pytest.mark.parametrize(
    ("side", "default", "word"),
    [
        (HIDES, NOTHING, FALSE),
        (HIDES, -0.5, FALSE),
        (HIDES, NOTHING + 0.01, DEPENDS),
        (HIDES, HIDES, TRUE),
        (HIDES - 0.01, 0.0, DEPENDS),
        (HIDES - 0.01, HIDES, DEPENDS),
    ],
)
def test_one_stream_is_judged_only_where_two_hide(side, default, word):
    assert judged("one-stream", pinned_side=side, pinned_default=default).word == word


HALF = QUEUED_MS / 2


@pytest.mark.parametrize(
    ("blocked", "word", "because"),
    [
        ([0.01] * 8, TRUE, ""),
        ([HALF] * 8, FALSE, ""),
        ([0.01] * 5 + [HALF] + [9.0] * 2, DEPENDS, "up to 1MiB it returns at once; 4MiB waits"),
        ([0.01] + [HALF] * 7, DEPENDS, "up to 4KiB it returns at once; 16KiB waits"),
        ([0.01] * 7 + [HALF - 0.001], TRUE, ""),
        ([0.01] * 7 + [HALF], DEPENDS, "up to 16MiB it returns at once; 64MiB waits"),
        ([0.01, 2.0, 0.01, 0.01, 0.01, 2.0, 2.0, 2.0], DEPENDS, "no one size"),
        ([2.0] + [0.01] * 7, DEPENDS, "no one size"),
    ],
)
def test_the_size_from_which_a_pageable_copy_waits_is_the_measured_one(blocked, word, because):
    numbers = dict(zip(map(str, PAGEABLE_SIZES), blocked, strict=True))
    verdict = judged("pageable-return", **numbers)
    assert verdict.word == word
    assert because in verdict.because


@pytest.mark.parametrize(
    ("full", "small", "word", "because"),
    [
        (NOTHING, HIDES, DEPENDS, "take turns"),
        (HIDES, HIDES, TRUE, ""),
        (NOTHING, NOTHING, FALSE, ""),
        (NOTHING + 0.01, HIDES, DEPENDS, "in part"),
        (0.0, 0.5, DEPENDS, "in part"),
    ],
)
def test_kernels_that_fill_the_gpu_are_told_from_small_ones(full, small, word, because):
    verdict = judged("two-kernels", full=full, small=small)
    assert verdict.word == word
    assert because in verdict.because


@pytest.mark.parametrize(
    ("taken", "word", "because"),
    [
        (0.0, DEPENDS, "cannot be"),
        (255.9, DEPENDS, "cannot be"),
        (256.0, TRUE, ""),
        (281.0, TRUE, ""),
        (282.0, FALSE, "1.10 times"),
        (512.0, FALSE, "2.00 times"),
    ],
)
def test_pinned_memory_is_judged_by_what_it_takes(taken, word, because):
    verdict = judged("pinned-size", taken=taken)
    assert verdict.word == word
    assert because in verdict.because


@pytest.mark.parametrize(
    ("first", "again", "word", "because"),
    [
        (143.0, 95.0, FALSE, ""),
        (20.0, 10.0, TRUE, ""),
        (143.0, 30.0, DEPENDS, "not with memory pinned for it"),
        (30.0, 143.0, DEPENDS, "only with memory pinned for it"),
        (90.0, 90.0, FALSE, ""),
        (89.9, 89.9, TRUE, ""),
    ],
)
def test_pinning_each_time_has_to_win_by_a_tenth(first, again, word, because):
    verdict = judged("pin-each-time", plain=100.0, first=first, again=again)
    assert verdict.word == word
    assert because in verdict.because


@pytest.mark.parametrize(
    ("blocking", "non_blocking", "word"),
    [
        (0.5, 0.0, FALSE),
        (0.49, 0.49, TRUE),
        (0.5, 0.5, DEPENDS),
        (0.1, 0.5, DEPENDS),
    ],
)
def test_a_blocked_host_is_one_that_waits_for_half_of_the_copy(blocking, non_blocking, word):
    assert judged("blocking-to", blocking=blocking, non_blocking=non_blocking, copy=1.0).word == word


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "at_once, waited not told"),
        ({"at_once": 1.0}, "waited not told"),
        ({"at_once": 1.0, "waited": math.nan}, "waited is nan"),
        ({"at_once": math.inf, "waited": 0.0}, "at_once is inf"),
        ({"at_once": 1.0, "waited": 0.0, "more": 2.0}, "more is no figure of no-wait"),
        ({"at_once": 1.0, "waited": 0.0}, ""),
    ],
)
def test_figures_that_are_not_the_claim_s_are_refused(numbers, words):
    assert CLAIMS["no-wait"].complaint(numbers) == words


def test_what_the_machine_need_not_tell_may_be_left_out():
    numbers = {"asked": 256.0, "taken": 512.0}
    assert CLAIMS["pinned-size"].complaint(numbers) == ""
    assert CLAIMS["pinned-size"].judge(numbers, "").word == FALSE


def test_the_pinned_size_is_one_byte_beyond_a_power_of_two():
    assert (claims.PINNED_BYTES - 1).bit_count() == 1
