import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0),
        ("1B", 1),
        ("1KiB", 1024),
        ("256MiB", 268435456),
        ("1GiB", 1 << 30),
        (" 64 MiB ", 64 << 20),
        ("1024MiB", 1 << 30),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "64MB",
        "64mib",
        "64M",
        "-1MiB",
        "+1MiB",
        "1.5GiB",
        "1e3B",
        "MiB",
        "6 4MiB",
        "64MiB!",
        "٣MiB",
        "1_0MiB",
    ],
)
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(UsageError, match=r"^rows: got .* whole number and a unit of B, KiB, MiB or GiB"):
        parse_size(text, field="rows")


def test_a_number_of_absurd_length_is_refused():
    """int() of Python itself refuses more than 4300 digits, with an error of its own."""
    with pytest.raises(UsageError, match="size: got"):
        parse_size("9" * 5000 + "B")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1536B"), (1 << 20, "1MiB"), (3 << 29, "1536MiB")],
)
def test_sizes_are_written_in_the_largest_unit_that_is_exact(size, text):
    assert format_size(size) == text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_what_is_written_reads_back(size):
    assert parse_size(format_size(size)) == size
