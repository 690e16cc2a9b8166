from pathlib import Path

import pytest

from harness import budgets
from harness.errors import UsageError
from harness.families import FAMILIES


def test_the_packaged_file_gates_pinned_cases_and_shows_pageable_ones() -> None:
    known = budgets.load()
    h2d = known.of("h2d")
    assert 0 < h2d.time <= 0.05
    assert h2d.gates("h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on,profile=h200.8c9f]")
    assert not h2d.gates(
        "h2d[memory=pageable,stream=side,chunks=8,size=256MiB,ratio=1,gate=off,profile=h200.8c9f]"
    )
    assert all(known.of(family) for family in FAMILIES)
    assert known.of("a family added later") == known.of("default")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[h2d]\ntime = 0.02\nhost = 0.5\n", r"has no table \[default\]"),
        ("[default]\ntime = 0.02\n", "missing required field `host`"),
        ("[default]\ntime = 0\nhost = 1\n", "> 0"),
        ("[default]\ntime = 0.02\nhost = 1\nhots = 1\n", "unknown field `hots`"),
        (
            "[default]\ntime = 0.02\nhost = 1\n[h2dd]\ntime = 1\nhost = 1\n",
            r"got a table \[h2dd\], want default, h2d,",
        ),
        ("[default]\ntime = 0.02\nhost = 1\n[h2d]\ntime = 0\nhost = 1\n", r"\[h2d\]: .* > 0"),
        ("[default\n", "is not a file of budgets"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "budgets.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words) as said:
        budgets.load(path)
    assert "\n" not in str(said.value)
