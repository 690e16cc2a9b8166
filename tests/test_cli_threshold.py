"""`overlap threshold` as people and scripts meet it."""

import json

import factories
import pytest
from factories_ddp import Machine, bucket_results, ddp_record, token_results
from test_cli import overlap

from harness import record as records
from harness.families import MIB

__all__ = ["overlap"]

TOKENS = (512, 1024, 2048)


@pytest.fixture
def kept(overlap):
    """Writes a record of these cases into the folder the command runs in, and gives its name."""

    def write(*results) -> str:
        records.write(overlap.folder / "a.json", ddp_record(*results))
        return "a.json"

    return write


def test_a_record_is_shown_with_its_thresholds_and_best_bucket(overlap, kept):
    path = kept(
        *token_results(Machine(), TOKENS), *bucket_results(Machine(), [MIB, 64 * MIB], [8 * MIB] * 64)
    )
    said = overlap("threshold", path)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("Tokens per GPU that hide the backward's transfer: ddp model=blocks")
    assert "\n10 %                889     889 to 890        893      891\n" in said.out
    assert "\nBest bucket: ddp model=blocks tokens=2048 " in said.out


def test_programs_get_json_alone(overlap, kept):
    said = overlap("threshold", kept(*token_results(Machine(), TOKENS)), "--json")
    assert (said.code, said.err) == (0, "")
    told = json.loads(said.out)
    assert [each["share"] for each in told["sets"][0]["thresholds"]] == [0.1, 0.05]
    assert told["lacking"] == ""


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_without_three_token_counts_the_code_is_3_and_one_line_says_so(overlap, kept, more):
    said = overlap("threshold", kept(*token_results(Machine(), TOKENS[:2])), *more)
    assert said.code == 3
    assert said.err == (
        "overlap: threshold: no cases alike but for tokens are measured at 3 token counts or more; "
        "the most are of ddp at 512 and 1024 tokens\n"
    )
    assert said.out == "" or json.loads(said.out)["sets"] == []


def test_a_record_of_copies_alone_has_none(overlap):
    records.write(overlap.folder / "a.json", factories.record(*factories.curve_results(rounds=10)))
    said = overlap("threshold", "a.json")
    assert (said.code, said.out) == (3, "")
    assert said.err.endswith("none of ddp is measured at all\n")


def test_the_best_bucket_is_shown_where_there_are_too_few_token_counts(overlap, kept):
    said = overlap("threshold", kept(*bucket_results(Machine(), [MIB, 64 * MIB], [8 * MIB] * 64)))
    assert said.code == 3
    assert said.out.startswith("Best bucket: ddp")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'RECORD'; see overlap threshold --help"),
        (["nowhere.json"], "nowhere.json"),
        (["a.json", "--suite", "ddp"], "No such option '--suite'"),
    ],
)
def test_wrong_use_is_one_line(overlap, arguments, words):
    assert words in overlap.refuses("threshold", *arguments)
