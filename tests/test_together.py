"""Copies of several ranks at once beside those of one, in words."""

from factories import h2d_case, h2d_result, record

from harness import together

ONE = h2d_case(chunks=8, size=256 << 20)
TWO = ONE.replace(ranks=2)


def measured(case, *, c_ms: float, k_ms: float = 4.2, **options):
    made = h2d_result(case, c_ms=c_ms, k_ms=k_ms, noise=0.001, **options)
    for launch in made.launches:
        launch.checks["bytes"] = 256 << 20
    return made


def said(*cases, device: str = "cuda") -> list[str]:
    made = record(*cases)
    made.machine.device = device
    return [text for text, doubt in together.verdicts(made) if not doubt]


def test_what_each_of_two_gpus_gets_stands_beside_one_alone() -> None:
    (text,) = said(measured(ONE, c_ms=4.87), measured(TWO, c_ms=9.74, ranks=2))
    where, told = text.split(": ", 1)
    assert where == (
        "2 GPUs that copy from the host at once (pinned, side, n=8, 256MiB, ratio=1, gated, alternate)"
    )
    assert told.startswith("27.")
    assert "GB/s for each, 54." in told
    assert "takes 1.9" in told
    assert "as long as one alone" in told


def test_gpus_that_share_nothing_are_said_to_take_as_long() -> None:
    (text,) = said(measured(ONE, c_ms=4.87), measured(TWO, c_ms=4.87, ranks=2, seed=3))
    assert "a pipeline takes as long as one alone (1.00x)" in text


def test_numbers_that_are_in_doubt_say_so_and_invalid_ones_say_nothing() -> None:
    two = measured(TWO, c_ms=9.74, ranks=2)
    (text,) = said(measured(ONE, c_ms=4.87, status="unsettled"), two)
    assert text.endswith("(unsettled)")
    assert said(measured(ONE, c_ms=4.87, status="invalid"), two) == []


def test_processes_of_a_cpu_are_no_gpus() -> None:
    (text,) = said(measured(ONE, c_ms=4.87), measured(TWO, c_ms=9.74, ranks=2), device="cpu")
    assert text.startswith("2 processes that copy")


def test_without_the_same_case_of_one_rank_nothing_is_said() -> None:
    assert said(measured(TWO, c_ms=9.74, ranks=2)) == []
    assert said(measured(ONE.replace(chunks=4), c_ms=4.87), measured(TWO, c_ms=9.74, ranks=2)) == []
    assert said(measured(ONE, c_ms=4.87)) == []


def test_bytes_that_nobody_told_leave_the_rates_out() -> None:
    one, two = measured(ONE, c_ms=4.87), measured(TWO, c_ms=9.74, ranks=2)
    del two.launches[0].checks["bytes"]
    (text,) = said(one, two)
    assert "GB/s" not in text
    assert "as long as one alone" in text
