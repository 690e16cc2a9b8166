"""Every test that tests/pitfalls.md names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "tests" / "pitfalls.md").read_text()
NAMED = sorted(set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", TABLE)))


def test_the_table_names_tests() -> None:
    assert len(NAMED) >= 45


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_named_test_is_there(file: str, test: str) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), (
        f"{file} has no {test}"
    )
