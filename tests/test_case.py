import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.case import Case, Choice, Family, Integer, Number, Size, Text, unique
from harness.errors import UsageError
from harness.families import FAMILIES, GIB, H2D, MIB

KEY = "h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on,profile=h200.1a2b]"
PARAMS = {
    "memory": "pinned", "stream": "side", "chunks": 8, "size": 256 * MIB, "ratio": 1.0, "gate": "on",
    "profile": "h200.1a2b",
}  # fmt: skip

CASES = st.builds(
    lambda **params: Case.of(H2D, **params),
    memory=st.sampled_from(["pinned", "pageable"]),
    stream=st.sampled_from(["side", "default"]),
    chunks=st.integers(1, 64),
    size=st.integers(MIB, GIB),
    ratio=st.floats(0.125, 8.0) | st.integers(1, 8),
    gate=st.sampled_from(["on", "off"]),
    issue=st.sampled_from(["alternate", "copies-first"]),
    profile=st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True),
)


def case(**params):
    return Case.of(H2D, **{**PARAMS, **params})


def refusal(**params):
    with pytest.raises(UsageError) as caught:
        case(**params)
    return str(caught.value)


def test_the_key_is_as_the_design_fixes_it():
    assert case().key == KEY
    assert case(issue="copies-first").key == KEY.replace("gate=on,", "gate=on,issue=copies-first,")


@given(CASES)
def test_a_key_names_one_case(made):
    """Whatever the parameters: another case never has the same key, and the key leads back to the case."""
    assert Case.parse(made.key, FAMILIES) == made


@given(CASES, CASES)
def test_different_cases_have_different_keys(one, other):
    assert (one == other) == (one.key == other.key)


@pytest.mark.parametrize(
    ("ratio", "written"),
    [(1, "1"), (1.0, "1"), (0.5, "0.5"), (0.1 + 0.2, "0.30000000000000004"), (1.0000001, "1.0000001")],
)
def test_a_number_is_written_so_that_it_reads_back_as_itself(ratio, written):
    assert f",ratio={written}," in case(ratio=ratio).key


def test_parsing_takes_axes_in_any_order_and_fills_in_defaults():
    reordered = (
        " h2d[profile=h200.1a2b, gate=on, issue=alternate ,ratio=1.0,chunks=8,"
        "size=256 MiB,stream=side,memory=pinned] "
    )
    assert Case.parse(reordered, FAMILIES) == case()
    assert Case.parse(KEY, FAMILIES)["issue"] == "alternate"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", "case: got '', want family\\[axis=value,...\\]"),
        ("h2d", "want family"),
        ("h2d[chunks=8", "want family"),
        ("h2d[chunks=8]]", "want family"),
        ("H2D[chunks=8]", "want family"),
        ("d2h[chunks=8]", "got family 'd2h', want one of h2d"),
        (KEY.replace("memory=pinned,", ""), "h2d: axis 'memory' is missing, want pinned or pageable"),
        (
            KEY.replace("memory=pinned,", "").replace("chunks=8", "ratio=x").replace("ratio=1,", ""),
            "h2d: ratio: got 'x'",
        ),
        (
            KEY.replace("memory=pinned,", "").replace("chunks=8,", ""),
            r"h2d: axes are missing: 'memory' \(pinned or pageable\), 'chunks' \(a whole number from 1 to 64\)$",
        ),
        ("h2d[]", "h2d: axes are missing: 'memory' .*'stream' .*'chunks' .*'size' .*'ratio' .*'gate' .*'profile'"),
        (KEY.replace("chunks=8,", ""), "h2d: axis 'chunks' is missing, want a whole number from 1 to 64"),
        (KEY.replace("chunks=8", "chunks=0"), "h2d: chunks: got 0, want a whole number from 1 to 64"),
        (KEY.replace("chunks=8", "chunks=eight"), "h2d: chunks: got 'eight', want a whole number"),
        (KEY.replace("chunks=8", "chunks="), "h2d: chunks: got '', want a whole number"),
        (KEY.replace("chunks=8", "chunks=" + "8" * 5000), "h2d: chunks: got '888"),
        (KEY.replace("chunks=8", "chunks"), "got 'chunks' in .*, want axis=value once per axis"),
        (KEY.replace("chunks=8", "chunks=8,chunks=8"), "once per axis"),
        (KEY.replace("chunks", "chunk"), "h2d: got axis 'chunk', want one of memory, stream, chunks"),
        (KEY.replace("256MiB", "256MB"), "size: got '256MB', want a whole number and a unit"),
        (KEY.replace("256MiB", "2GiB"), "h2d: size: got 2GiB, want 1MiB to 1GiB"),
        (KEY.replace("ratio=1", "ratio=nan"), "h2d: ratio: got nan, want a number from 0.125 to 8"),
        (KEY.replace("ratio=1", "ratio=x"), "h2d: ratio: got 'x', want a number"),
        (KEY.replace("pinned", "pined"), "h2d: memory: got 'pined', want pinned or pageable"),
        (KEY.replace("h200.1a2b", ""), "h2d: profile: got '', want a word of letters"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_refused_with_what_was_given_and_what_is_accepted(key, words):
    with pytest.raises(UsageError, match=words) as caught:
        Case.parse(key, FAMILIES)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40) | st.text("h2d[]=,chunks memory0123456789.eE-+", max_size=60))
def test_any_text_is_a_case_or_a_refusal(text):
    try:
        made = Case.parse(text, FAMILIES)
    except UsageError:
        return
    assert Case.parse(made.key, FAMILIES) == made


def test_values_of_a_wrong_type_are_refused():
    assert refusal(chunks=True) == "h2d: chunks: got True, want a whole number from 1 to 64"
    assert refusal(chunks=8.0) == "h2d: chunks: got 8.0, want a whole number from 1 to 64"
    assert refusal(size="1MiB") == "h2d: size: got '1MiB', want 1MiB to 1GiB"
    assert refusal(memory=["pinned"]).startswith("h2d: memory: got ['pinned']")
    assert refusal(buffers=2) == f"h2d: got axis 'buffers', want one of {', '.join(a.name for a in H2D.axes)}"


def test_a_case_cannot_be_changed_and_replace_makes_a_checked_copy():
    made = case()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.values = ()
    other = made.replace(chunks=4, issue="copies-first")
    assert (made["chunks"], other["chunks"], other["issue"], other["size"]) == (
        8,
        4,
        "copies-first",
        256 * MIB,
    )
    with pytest.raises(UsageError, match="chunks: got 65"):
        made.replace(chunks=65)


def test_parameters_are_read_by_axis():
    made = case(ratio=0.5)
    assert made.params == {**PARAMS, "ratio": 0.5, "issue": "alternate", "ranks": 1}
    assert made.number("chunks") == 8
    assert made.word("gate") == "on"
    assert made["ratio"] == 0.5


def test_an_axis_added_later_leaves_old_names_alone():
    """Names in stores made before the axis was there must go on meaning the same case."""
    later = Family(
        name="h2d",
        summary=H2D.summary,
        axes=(
            *H2D.axes,
            Integer(name="buffers", low=1, high=8, default=2),
            Choice(name="numa", values=("a", "b"), default="a"),
        ),
    )
    old = Case.parse(KEY, {"h2d": later})
    assert (old["buffers"], old["numa"]) == (2, "a")
    assert old.key == KEY
    assert old.replace(buffers=3).key == KEY.replace("]", ",buffers=3]")


def test_every_kind_of_axis_refuses_what_it_does_not_write():
    axes = [
        Choice(name="a", values=("x", "y")),
        Integer(name="b", low=1, high=3),
        Number(name="c", low=0.0, high=1.0),
        Size(name="d", low=1, high=1 << 20),
        Text(name="e"),
    ]
    assert [axis.accepts for axis in axes] == [
        "x or y",
        "a whole number from 1 to 3",
        "a number from 0 to 1",
        "1B to 1MiB",
        "a word of letters, digits, '.', '_' and '-'",
    ]
    good: list[list] = [["x"], [1, 3], [0, 0.5, 1.0], [1, 1 << 20], ["a.b_c-1"]]
    bad: list[list] = [["z", 1], [0, 4, 1.0, "1"], [-0.1, 1.1, "0"], [0, 1.0, "1B"], ["", "a b", "a[", 1]]
    for axis, yes, no in zip(axes, good, bad, strict=True):
        assert all(axis.parse(axis.format(value)) == value for value in yes)
        assert [value for value in yes if not axis.check(value)] == []
        assert [value for value in no if axis.check(value)] == []


def test_unique_keeps_the_first_of_equals_in_order():
    one, two = case(), case(chunks=4)
    assert unique([one, two, case(ratio=1), two]) == [one, two]
