"""Thresholds and best buckets as people and programs read them."""

import json

import pytest
from factories_ddp import EVEN, Machine, bucket_results, ddp_record, token_results
from test_threshold import BIG_LAST, MANY_SMALL, TOKENS

from harness import best_bucket, threshold, threshold_words
from harness.families import MIB


def text(record, width=80) -> str:
    blocks = threshold_words.blocks(threshold.find(record), best_bucket.find(record), width)
    return "\n".join(line for block in blocks for line in block)


def flat(record) -> str:
    """The text with its folded lines joined again."""
    return " ".join(text(record).split())


def of(machine: Machine, sizes=EVEN, tokens=TOKENS, **axes) -> str:
    return flat(ddp_record(*token_results(machine, tokens, sizes, **axes)))


def test_what_a_user_reads_of_a_machine_that_the_formula_fits():
    record = ddp_record(*token_results(Machine(), (700, 850, 900, 950, 1100)))
    assert text(record).splitlines() == [
        "Tokens per GPU that hide the backward's transfer: ddp model=blocks bucket=25MiB",
        "  gradients=bf16 ranks=2 backend=nccl",
        "exposed by tokens  700: 29.4 %, 850: 14.3 %, 900: 9.3 %, 950: 4.2 %, 1,100:",
        "  0.2 %",
        "exposed under  measured  95 % interval  predicted  formula",
        "10 %                893     892 to 893        893      891",
        "5 %                 942     942 to 942        942      941",
        "formula: (g/2) r F u / W = 990 tokens, less the share that may be exposed;",
        "  g = 2.00 bytes, r = 1/2, F u = 600 TFLOP/s at 1,100 tokens, W = 303 GB/s at",
        "  the size of the buckets (303 in one piece)",
    ]


@pytest.mark.parametrize(
    ("machine", "sizes", "words"),
    [
        (
            Machine(work=3.0), EVEN,
            "+9.8 points work: 2.00 FLOP for each parameter and token of that compute, where the formula has 4",
        ),
        (
            Machine(), BIG_LAST,
            "under 10 % and 5 %, what the formula leaves out: +21.9 points tail: the last of 401 buckets, 21.9 % of "
            "the bytes, has no compute left to hide behind",
        ),
        (
            Machine(alpha_ms=0.02), MANY_SMALL,
            "points latency: the buckets take 7.48 ms one by one, their bytes at W 5.49 ms",
        ),
        (
            Machine(fixed_ms=3.0), EVEN,
            "-44.7 points compute: 287 TFLOP/s at 512 tokens, 562 TFLOP/s at 8,192",
        ),
        (
            Machine(dilation=0.2), EVEN,
            "+20.0 points dilation: the compute takes 0.709 ms longer beside the transfer at 8,192 tokens",
        ),
        (
            Machine(load=1.5), EVEN,
            "points bandwidth under load: at 1,024 tokens the last transfer ends 1.66 ms after its bucket is ready, by "
            "the times alone 0.00692 ms",
        ),
        (
            Machine(unexplained_ms=0.6), EVEN,
            "+16.9 points unexplained: tail and dilation do not add up to what is exposed at 8,192 tokens",
        ),
    ],
)  # fmt: skip
def test_the_term_that_is_off_is_told_with_its_own_numbers(machine, sizes, words):
    assert words in of(machine, sizes)


def test_a_large_first_bucket_is_told_where_the_link_never_rests():
    """Nothing is sent before 128 of 960 MiB are done."""
    said = of(Machine(), (128 * MIB, *(16 * MIB,) * 52), tokens=(800, 950, 1100, 1200))
    assert "link: bucket 1 of 53 is ready 13 % into that compute, and from then on it never rests" in said


def test_what_lies_outside_and_what_never_hides_is_said():
    assert "10 % above 8,192 above 8,192 never 891" in of(Machine(), BIG_LAST)
    assert "10 % below 2,048 below 2,048 893 891" in of(Machine(), tokens=(2048, 4096, 8192))


def test_doubts_about_the_measured_number_are_said():
    assert (
        "! 10 %: the token counts are far apart: the prediction, interpolated as the measured shares are, is 1,540, "
        "not 893; measure one between"
    ) in of(Machine(), tokens=(512, 2048, 8192))
    cases = token_results(Machine(), TOKENS)
    cases[3].metrics["exposed_fraction"].value = 0.2
    assert "! 10 %: the exposed share crosses it 3 times; the last is taken" in flat(ddp_record(*cases))


def test_a_difference_without_a_cause_is_said():
    cases = token_results(Machine(dilation=0.2), TOKENS)
    for case in cases:
        case.metrics["dilation_ms"].low -= 1.0
        case.metrics["dilation_ms"].high += 1.0
    assert (
        "under 10 % and 5 %, the formula leaves out something: no term is larger than its own interval"
        in flat(ddp_record(*cases))
    )


def test_without_facts_the_measured_threshold_is_shown_with_the_reason():
    cases = token_results(Machine(), TOKENS)
    cases[0].launches[0].checks.clear()
    said = flat(ddp_record(*cases))
    assert "10 % 889 889 to 890 - - 5 %" in said
    assert "no prediction: at 512 tokens, buckets: launch 0 has none" in said


def test_the_profile_is_named_where_there_are_several():
    assert "profile=" not in of(Machine())
    both = token_results(Machine(), TOKENS) + token_results(Machine(), TOKENS, profile="h100.2b3c")
    assert "backend=nccl profile=h200.1a2b" in flat(ddp_record(*both))


def test_what_a_user_reads_of_the_best_bucket():
    caps = [MIB, 8 * MIB, 25 * MIB, 64 * MIB, 128 * MIB, 512 * MIB]
    record = ddp_record(*bucket_results(Machine(alpha_ms=0.05), caps, [8 * MIB] * 128, half=0.01))
    assert text(record).splitlines() == [
        "Best bucket: ddp model=blocks tokens=2048 gradients=bf16 ranks=2 backend=nccl",
        "cap        buckets  overlapped ms  exposed",
        "1MiB=8MiB      128    13.7 ±1.0 %   26.9 %",
        "25MiB           33    11.1 ±1.0 %    2.6 %",
        "64MiB           17    11.2 ±1.0 %    5.5 %",
        "128MiB           9    11.5 ±1.0 %   11.7 %",
        "512MiB           3    12.8 ±1.0 %   48.6 %",
        "measured: 25MiB; within the intervals as good: 64MiB",
        "theory: 75 buckets of 13.7 MiB; alpha = 50.0 us, W = 303 GB/s, B = 7.33 ms;",
        "  PyTorch's 25MiB take 0.5 % longer",
    ]
    record = ddp_record(*bucket_results(Machine(), caps, [8 * MIB] * 128))
    assert "theory: the more buckets the better, none costs anything by itself; alpha = 0.00 us" in flat(
        record
    )


@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_line_is_wider_than_the_terminal(width):
    machine = Machine(alpha_ms=0.02, work=4.0, fixed_ms=1.0, dilation=0.1, load=1.3, unexplained_ms=0.3)
    cases = token_results(
        machine, (512, 2048, 131072), MANY_SMALL, first=25 * MIB, option="static-graph", connections=32
    )
    cases += bucket_results(machine, [512 * MIB, 511 * MIB, 25 * MIB], [8 * MIB] * 128, tokens=131072 // 2)
    lines = text(ddp_record(*cases), width).splitlines()
    assert len(lines) > 15
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("Tokens per GPU")


def test_text_of_a_record_cannot_steer_the_terminal():
    cases = token_results(Machine(), TOKENS)
    for case in cases:
        case.params["model"] = "\x1b[31mblocks"
        case.launches[0].checks["flops"] = "\x1b[2J"
    assert "\x1b" not in text(ddp_record(*cases))


def test_programs_get_plain_json():
    """No number that JSON has not, though a prediction is never and a bandwidth has no end."""
    record = ddp_record(
        *token_results(Machine(), TOKENS, BIG_LAST),
        *bucket_results(Machine(), [MIB, 64 * MIB], [8 * MIB] * 128),
    )
    told = threshold_words.as_json(threshold.find(record), best_bucket.find(record))
    told = json.loads(json.dumps(told, allow_nan=False))
    (one,) = told["sets"]
    assert (one["family"], one["leg"], one["params"]["bucket"]) == ("ddp", "backward", 25 * MIB)
    assert "tokens" not in one["params"]
    assert list(one["exposed_fraction"]) == ["512", "1024", "2048", "4096", "8192"]
    assert one["derived"]["tokens"] == pytest.approx(990.1, abs=0.1)
    first = one["thresholds"][0]
    assert first["share"] == 0.1
    assert first["measured"] == {"tokens": None, "side": "above", "near": [8192]}
    assert (first["predicted"], first["never"]) == (None, True)
    assert [term["term"] for term in first["off"]] == ["tail"]
    (best,) = told["best_bucket"]
    assert best["best"] == MIB
    assert best["theory"]["count"] is None
    cases = bucket_results(Machine(), [MIB, 64 * MIB], [8 * MIB] * 128)
    for case in cases:
        checks = case.launches[0].checks
        checks["alone_ms"] = [0.05] * len(checks["buckets"])
    told = threshold_words.as_json(threshold.find(record), best_bucket.find(ddp_record(*cases)))
    json.dumps(told, allow_nan=False)
    assert told["best_bucket"][0]["theory"] is None
    assert "no cost of a byte" in told["best_bucket"][0]["lacking"]


def test_cases_that_are_not_settled_are_counted_above_what_is_made_of_them():
    cases = token_results(Machine(), TOKENS)
    shown = list(threshold_words.blocks(threshold.find(ddp_record(*cases)), [], 80))
    assert not any("unsettled" in line for lines in shown for line in lines)
    for case in cases[:2]:
        case.status = "unsettled"
    found = threshold.find(ddp_record(*cases))
    text = " ".join(" ".join(lines) for lines in threshold_words.blocks(found, [], 80))
    assert "! 2 of 5 cases are unsettled" in text
    assert (
        list(threshold_words.as_json(found, [])["sets"][0]["status"].values())
        == ["unsettled"] * 2 + ["ok"] * 3
    )
