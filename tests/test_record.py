import json
import math
import os
import re
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from factories import controls, curve_results, h2d_case, record, skipped, table_results
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import record as records
from harness.errors import RecordError, UsageError
from harness.record import (
    MEASURED,
    SCHEMA,
    STATUSES,
    CaseResult,
    Ceiling,
    Control,
    Launch,
    Machine,
    Metric,
    Rank,
    Record,
    Round,
    Run,
    dumps,
    loads,
    read,
    record_path,
    safe_name,
    utc_now,
    write,
)

NAN, INF = math.nan, math.inf


def small(**parts):
    """A record with one of everything."""
    made = Record(
        schema=SCHEMA,
        method=1,
        run=Run(
            time="2026-11-30T08:00:00Z",
            commit="0123456789abcdef0123456789abcdef01234567",
            dirty=False,
            command=["run", "--tier", "quick"],
            seconds=1.5,
            suites=["h2d"],
            tier="quick",
            planned=[h2d_case().key],
            spent={"0": {"open_s": 0.5}},
        ),
        machine=Machine(name="h200-1", device="cuda", gpu={"name": "NVIDIA H200"}, cpu={"cores": 16}),
        software={"torch": "2.11.0"},
        environment={"A": "b"},
        controls=controls(),
        cases=[
            CaseResult(
                key=h2d_case().key,
                family="h2d",
                params=h2d_case().params,
                status="ok",
                launches=[
                    Launch(
                        index=0,
                        ranks=[
                            Rank(rounds=[Round(order=["a", "b"], arms={"a": 1.0, "b": 2.5}, host={"a": 0.1})])
                        ],
                        stop="settled",
                        dropped={"gate leaked": 2},
                    )
                ],
                metrics={"overlapped_ms": Metric(value=1.0, unit="ms", low=0.5, high=1.5)},
                model={"n_star": None, "piece_ms": 1.0, "curve_fitted": True},
                checks={"launch_bound": False},
            )
        ],
    )
    return msgspec.structs.replace(made, **parts)


def plain(made=None):
    return json.loads(dumps(made or small()))


def refusal(data):
    with pytest.raises(RecordError) as caught:
        loads(data if isinstance(data, bytes) else json.dumps(data).encode(), source="a.json")
    text = str(caught.value)
    assert text.startswith("a.json: ")
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


def strict(data):
    """Standard JSON: no NaN, no Infinity."""
    return json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


# -- there and back ----------------------------------------------------------------------------------------


def test_a_record_reads_back_as_it_was():
    made = record(
        *table_results(rounds=10),
        *curve_results(launches=2, rounds=10),
        skipped(h2d_case(chunks=3)),
        controls=controls(),
    )
    assert loads(dumps(made)) == made
    assert loads(dumps(small())) == small()


def test_the_file_is_as_the_design_fixes_it():
    content = plain()
    assert list(content) == [
        "schema", "method", "run", "machine", "software", "environment", "controls", "ceilings", "cases",
    ]  # fmt: skip
    assert set(content["run"]) >= {"time", "commit", "dirty", "command", "seconds"}
    assert set(content["machine"]) == {"name", "device", "gpu", "cpu"}
    assert list(content["cases"][0]) == [
        "key", "family", "params", "status", "reason", "launches", "metrics", "model", "checks",
    ]  # fmt: skip
    rank = content["cases"][0]["launches"][0]["ranks"][0]
    assert set(rank) == {"rounds", "telemetry", "host"}
    assert rank["rounds"][0]["order"] == ["a", "b"]
    assert content["cases"][0]["metrics"]["overlapped_ms"] == {
        "value": 1.0,
        "unit": "ms",
        "low": 0.5,
        "high": 1.5,
    }
    assert dumps(small()).endswith(b"}\n")


def test_a_record_of_the_first_version_without_what_came_later_is_read():
    least = {
        "schema": 1,
        "method": 1,
        "run": {"time": "2026-11-30T08:00:00Z", "commit": "none", "dirty": None, "command": []},
        "machine": {"name": "cpu-2", "device": "cpu"},
    }
    made = loads(json.dumps(least).encode())
    assert (made.cases, made.controls, made.run.finished) == ([], [], False)


def test_a_field_of_a_later_version_is_passed_over():
    content = plain()
    content["weather"] = content["run"]["weather"] = {"rain": True}
    assert loads(json.dumps(content).encode()) == small()


def test_a_case_is_found_by_its_key():
    made = small()
    assert made.case(h2d_case().key) is made.cases[0]
    with pytest.raises(UsageError, match="case: 'x' is not in this record of 1 cases"):
        made.case("x")


def test_measured_is_ok_or_unsettled():
    measured = [
        status for status in STATUSES if CaseResult(key="", family="", params={}, status=status).measured
    ]
    assert measured == ["ok", "unsettled"]


# -- what we write can be read -----------------------------------------------------------------------------


def test_numbers_that_json_cannot_write_become_null_or_are_left_out():
    made = small()
    case, launch = made.cases[0], made.cases[0].launches[0]
    case.model |= {"n_star": INF, "curve_ms": NAN}
    case.checks["drift"] = [1.0, NAN]
    case.metrics |= {
        "bad": Metric(value=NAN, unit="ms"),
        "half": Metric(value=1.0, unit="ms", low=-INF, high=NAN),
    }
    case.params |= {"x": NAN, "y": INF, "z": 10**40}
    launch.wall_s, launch.timed_s = NAN, -INF
    launch.ranks[0].rounds[0].start = NAN
    launch.ranks[0].telemetry["power_w"] = {"max": INF}
    launch.ranks[0].rounds[0].arms["b"] = NAN
    launch.ranks[0].rounds[0].spans["c"] = INF
    made.controls[0].value = NAN
    made.controls[1].low, made.controls[1].high = NAN, INF
    made.run.seconds = INF
    made.run.spent["0"]["open_s"] = NAN

    strict(dumps(made))
    back = loads(dumps(made))
    assert back.cases[0].model == {"n_star": None, "curve_ms": None, "piece_ms": 1.0, "curve_fitted": True}
    assert back.cases[0].checks["drift"] == [1.0, None]
    assert back.cases[0].metrics.keys() == {"overlapped_ms", "half"}
    assert back.cases[0].metrics["half"] == Metric(value=1.0, unit="ms", low=None, high=None)
    assert back.cases[0].params == {**h2d_case().params, "z": 10**40}
    assert (back.cases[0].launches[0].wall_s, back.cases[0].launches[0].timed_s) == (0.0, 0.0)
    rank = back.cases[0].launches[0].ranks[0]
    assert rank.rounds[0].start == 0.0
    assert rank.telemetry == {"power_w": {"max": None}}
    assert (rank.rounds[0].arms, rank.rounds[0].spans) == ({"a": 1.0}, {})
    assert back.controls[0].value is None
    assert (back.controls[1].low, back.controls[1].high) == (-sys.float_info.max, sys.float_info.max)
    assert (back.run.seconds, back.run.spent) == (0.0, {"0": {}})


def test_times_and_intervals_that_cannot_be_are_left_out():
    """One wrong number must not make the whole record one that cannot be read."""
    made = small()
    case = made.cases[0]
    seen = case.launches[0].ranks[0].rounds[0]
    seen.arms["b"], seen.host["a"], seen.spans["c"], seen.start = -1e-9, 1e13, -1.0, -0.5
    case.metrics |= {
        "transfer_ms": Metric(value=-1.0, unit="ms"),
        "compute_ms": Metric(value=1e13, unit="ms"),
        "hidden_fraction": Metric(value=1.0, unit="fraction", low=1.5, high=2.0),
        "exposed_ms": Metric(value=-1.0, unit="ms", low=-2.0, high=0.5),
        "serial_ms": Metric(value=1.0, unit="ms", low=-2.0, high=3.0),
    }
    back = loads(dumps(made)).cases[0]
    assert back.metrics.keys() == {"overlapped_ms", "exposed_ms", "serial_ms"}
    assert back.launches[0].ranks[0].rounds[0] == Round(order=["a", "b"], arms={"a": 1.0})


def test_writing_changes_nothing_in_the_record_in_hand():
    made = small()
    made.cases[0].metrics["bad"] = Metric(value=NAN, unit="ms")
    dumps(made)
    assert math.isnan(made.cases[0].metrics["bad"].value)


def test_a_word_that_is_not_utf_8_is_written_with_question_marks():
    """Undecodable bytes of the command line and the environment reach Python as lone surrogates."""
    word = os.fsdecode(b"caf\xe9")
    made = small(environment={word: word, "kept": "café"})
    made.run.command.append(word)
    back = loads(dumps(made))
    assert back.run.command[-1] == "caf?"
    assert back.environment == {"caf?": "caf?", "kept": "café"}


NUMBERS = st.floats() | st.integers(-(1 << 70), 1 << 70)
WORDS = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["a\udcffb", "\ud800", "", "\n", "\x00", "ключ"]
)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
FACTS = st.dictionaries(WORDS, ANY, max_size=3)
TIMES = st.dictionaries(WORDS, st.floats(), max_size=3)
ROUNDS = st.builds(
    Round, order=st.lists(WORDS, max_size=3), arms=TIMES, host=TIMES, spans=TIMES, start=st.floats()
)
LAUNCHES = st.builds(
    Launch,
    index=st.integers(0, 99),
    ranks=st.lists(st.builds(Rank, rounds=st.lists(ROUNDS, max_size=2), telemetry=FACTS), max_size=2),
    stop=WORDS,
    wall_s=st.floats(),
    timed_s=st.floats(),
    dropped=st.dictionaries(WORDS, st.integers(0, 1000), max_size=2),
    checks=FACTS,
)
METRICS = st.builds(
    Metric,
    value=st.floats(),
    unit=WORDS | st.just("ms"),
    low=st.none() | st.floats(),
    high=st.none() | st.floats(),
)
H2D_CASES = st.builds(
    h2d_case,
    memory=st.sampled_from(["pinned", "pageable"]),
    chunks=st.integers(1, 64),
    size=st.integers(1 << 20, 1 << 30),
    ratio=st.floats(0.125, 8.0),
    issue=st.sampled_from(["alternate", "copies-first"]),
)
NAMED = st.one_of(
    st.tuples(WORDS, WORDS, st.dictionaries(WORDS, WORDS | NUMBERS, max_size=3)),
    H2D_CASES.map(lambda case: (case.key, "h2d", case.params)),
)


def result_of(named, status, launches, **parts):
    """A case as a run leaves it: one without launches was not measured."""
    key, family, params = named
    status = "skipped" if status in MEASURED and not launches else status
    return CaseResult(key=key, family=family, params=params, status=status, launches=launches, **parts)


RESULTS = st.builds(
    result_of,
    NAMED,
    st.sampled_from(STATUSES),
    st.lists(LAUNCHES, max_size=2),
    reason=WORDS,
    metrics=st.dictionaries(WORDS | st.sampled_from(["exposed_ms", "overlapped_ms"]), METRICS, max_size=2),
    model=st.dictionaries(WORDS, st.none() | st.booleans() | NUMBERS | WORDS, max_size=3),
    checks=FACTS,
)


def control_of(value, ends, **parts):
    """A control as a run judges it."""
    low, high = ends if not ends[0] > ends[1] else ends[::-1]
    return Control(
        value=value, low=low, high=high, passed=value is not None and low <= value <= high, **parts
    )


CONTROLS = st.builds(
    control_of,
    st.none() | st.floats(),
    st.tuples(st.floats(), st.floats()),
    name=WORDS,
    launch=st.integers(0, 9),
    unit=WORDS,
    detail=WORDS,
)
CEILINGS = st.builds(
    Ceiling,
    name=WORDS,
    launch=st.integers(0, 9),
    value=st.none() | st.floats(),
    low=st.none() | st.floats(),
    high=st.none() | st.floats(),
    unit=WORDS,
    detail=WORDS,
)
RECORDS = st.builds(
    Record,
    schema=st.just(SCHEMA),
    method=st.integers(1, 99),
    run=st.builds(
        Run,
        time=st.just("2026-11-30T08:00:00Z"),
        commit=st.sampled_from(["none", "0123abcd"]),
        dirty=st.none() | st.booleans(),
        command=st.lists(WORDS, max_size=3),
        seconds=st.floats(),
        spent=st.dictionaries(WORDS, TIMES, max_size=2),
    ),
    machine=st.builds(Machine, name=st.just("h200-1"), device=st.just("cuda"), gpu=FACTS, cpu=FACTS),
    software=FACTS,
    environment=FACTS,
    controls=st.lists(CONTROLS, max_size=2),
    ceilings=st.lists(CEILINGS, max_size=2),
    # Two keys that differ in characters which cannot be written would come to be one.
    cases=st.lists(RESULTS, max_size=2, unique_by=lambda case: case.key.encode(errors="replace")),
)


@settings(max_examples=150, deadline=None)
@given(RECORDS)
def test_whatever_a_record_holds_what_is_written_can_be_read_and_is_then_kept(made):
    data = dumps(made)
    strict(data)
    back = loads(data)
    assert dumps(back) == data
    assert [case.status for case in back.cases] == [case.status for case in made.cases]


@pytest.mark.parametrize("repeats", [None, 0, True, "4", 1.5])
def test_a_count_that_is_none_is_not_written(repeats):
    made = small()
    made.cases[0].launches[0].checks |= {"repeats": repeats, "bytes": 8}
    checks = loads(dumps(made)).cases[0].launches[0].checks
    assert "repeats" not in checks
    assert checks["bytes"] == 8


# -- what others write -------------------------------------------------------------------------------------


def read_or_refuse(data):
    """RecordError, or a record that can be kept as it is: nothing else may come of any bytes."""
    try:
        made = loads(data, source="a.json")
    except RecordError:
        return None
    assert loads(dumps(made)) == made
    safe_name(made.machine.name)
    return made


def kept_or_refused(data):
    """Whether it is refused, or is a record of a schema that this program knows."""
    made = read_or_refuse(data)
    return made is None or made.schema <= SCHEMA


WHOLE = dumps(small())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(WHOLE) - 2))
def test_a_truncated_record_is_refused(length):
    assert read_or_refuse(WHOLE[:length]) is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_record_with_wrong_bytes_is_refused_or_reads_as_a_record(changes):
    data = bytearray(WHOLE)
    for at, byte in changes:
        data[at] = byte
    assert kept_or_refused(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | ANY.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_record_is_refused(data):
    assert read_or_refuse(data) is None


def places(value, place=()):
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place] * bool(place) + [found for key, item in inside for found in places(item, (*place, key))]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(places(json.loads(WHOLE))), ANY | st.just(10**400) | st.just([[]]))
def test_a_wrong_value_anywhere_is_refused_or_reads_as_a_record(place, value):
    content = json.loads(WHOLE)
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    assert kept_or_refused(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("cases", 0, "metrics", "overlapped_ms", "value"), None, r"`float`, got `null`.*metrics"),
        (("cases", 0, "launches", 0, "ranks", 0, "rounds", 0, "arms", "a"), None, "`float`, got `null`"),
        (("cases", 0, "launches", 0, "ranks", 0, "rounds", 0, "arms", "a"), "1", "`float`, got `str`"),
        (("cases", 0, "launches", 0, "ranks", 0, "rounds", 0, "arms", "a"), 10**400, "Number out of range"),
        (("cases", 0, "launches"), {}, "`array`, got `object`"),
        (("cases", 0, "params", "chunks"), None, r"\$.cases\[0\].params"),
        (("cases", 0, "status"), "fine", "got 'fine', want one of ok, unsettled, skipped, invalid, error"),
        (("controls", 0, "passed"), 1, "`bool`, got `int`"),
        (("run", "commit"), "HEAD", "run.commit: got 'HEAD', want 7 to 40 hex digits or none"),
        (("run", "commit"), "../../x", "run.commit: got"),
        (("run", "commit"), "0123abcd\n", "run.commit: got"),
        (("run", "time"), "yesterday", "run.time: got 'yesterday', want UTC"),
        (("run", "time"), "../../../etc/x", "run.time: got"),
        (("run", "dirty"), "no", r"\$.run.dirty"),
        (("schema",), "1", "`int`, got `str`"),
        (("schema",), None, "`int`, got `null`"),
        (("schema",), 0, "schema: got 0, want 1"),
        (("schema",), -1, "schema: got -1"),
        (("machine",), None, "`object`, got `null`"),
        *[
            (("machine", "name"), name, "machine: got .*, want up to 64 letters")
            for name in ("../x", "/etc", "", ".", "..", "a/b", "a\\b", ".hidden", "-x", "a b", "a\n", "ä", "a" * 65)
        ],
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_place(place, value, words):
    content = plain()
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    assert re.search(words, refusal(content))


KEY = h2d_case().key
ROUND = ("cases", 0, "launches", 0, "ranks", 0, "rounds", 0)
METRIC = ("cases", 0, "metrics", "overlapped_ms")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((*ROUND, "arms", "a"), -1.0, "launch 0, round 0: arms: 'a': got -1 ms, want 0 to 1e+12"),
        ((*ROUND, "host", "a"), -0.1, "round 0: host: 'a': got -0.1 ms"),
        ((*ROUND, "spans"), {"c": 2e12}, "round 0: spans: 'c': got 2e+12 ms"),
        ((*ROUND, "start"), -1.0, "round 0: start: got -1"),
        ((*METRIC, "value"), -1.0, "metrics: 'overlapped_ms': got -1 with an interval from 0.5 to 1.5"),
        ((*METRIC, "low"), 1.25, "metrics: 'overlapped_ms': got 1 with an interval from 1.25 to 1.5"),
        ((*METRIC, "high"), 0.75, "metrics: 'overlapped_ms': got 1 with an interval from 0.5 to 0.75"),
        ((*METRIC, "high"), 2e12, "metrics: 'overlapped_ms': got 2e+12 ms, want no more than 1e+12"),
        (METRIC, {"value": -1.0, "unit": "ms"}, "metrics: 'overlapped_ms': got -1 ms, want 0 or more"),
        (("cases", 0, "launches"), [], "launches: got none, want one or more of a case that is ok"),
        (("cases", 0, "launches", 0, "index"), -1, "launches: index: got -1, want 0 or more"),
        *[
            (("cases", 0, "launches", 0, "checks", "repeats"), repeats, "launch 0: checks.repeats: got ")
            for repeats in (0, -1, 1.5, "2", True, None, [1])
        ],
        (("cases", 0, "params", "chunks"), 4, "params.chunks: got 4, and 8 in the key"),
        (("cases", 0, "params", "chunks"), 8.0, "params.chunks: got 8.0, and 8 in the key"),
        (("cases", 0, "params", "issue"), "copies-first", "params.issue: got 'copies-first', and 'alternate' in"),
        (("cases", 0, "params", "memory"), "pageable", "params.memory: got 'pageable', and 'pinned' in the key"),
        (("cases", 0, "params"), {}, "params.memory: got None, and 'pinned' in the key"),
        (("cases", 0, "key"), "h2d", "key: case: got 'h2d', want family"),
        (("cases", 0, "key"), KEY.replace("chunks=8", "chunks=99"), "key: h2d: chunks: got 99"),
        (("cases", 0, "key"), KEY.replace("ratio=1,", "ratio=1.0,"), "key: want it written as 'h2d"),
        (("cases", 0, "params", "chunks"), 10**300, "params.chunks: a whole number of more than 100 digits"),
        (("cases", 0, "model", "n_star"), 10**400, "model.n_star: a whole number of more than 100 digits"),
        (("cases", 0, "checks", "drift"), [1, -(10**400)], "checks.drift[1]: a whole number of more than"),
        (("cases", 0, "launches", 0, "ranks", 0, "telemetry", "x"), 10**400, "launches[0].ranks[0].telemetry.x: a"),
        (("cases", 0, "launches", 0, "dropped", "gate leaked"), 10**400, "launches[0].dropped.gate leaked: a"),
    ],
)  # fmt: skip
def test_what_no_run_writes_is_refused_by_case_and_field(place, value, words):
    content = plain()
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    said = refusal(content)
    assert said.startswith(f"a.json: {content['cases'][0]['key']!r}: ")
    assert words in said


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("launch", -1, "control 'positive': launch: got -1, want 0 or more"),
        ("low", 2.0, "control 'positive': low: got 2, want no more than high, 1.05"),
        ("value", 1.2, "control 'positive': value: got 1.2 of one that passed, want 0.95 to 1.05"),
        ("launch", 10**400, "controls[0].launch: a whole number of more than 100 digits"),
    ],
)
def test_a_control_that_contradicts_itself_is_refused(field, value, words):
    content = plain()
    content["controls"][0][field] = value
    assert words in refusal(content)


def test_a_control_that_failed_lies_outside_and_is_read():
    made = small(controls=controls(failing=["null"]))
    assert loads(dumps(made)) == made


def test_two_cases_of_one_key_are_refused():
    content = plain()
    content["cases"] *= 2
    assert f"{KEY!r}: key: two cases have it" in refusal(content)


def test_a_family_that_is_not_known_is_read_as_it_is():
    content = plain()
    content["cases"][0] |= {"family": "later", "params": {"bucket": 4}}
    assert loads(json.dumps(content).encode()).cases[0].params == {"bucket": 4}


def test_an_axis_added_later_may_be_missing():
    made = small()
    del made.cases[0].params["issue"]
    assert loads(dumps(made)) == made


def test_many_digits_that_are_no_whole_number_are_read():
    content = plain()
    content["environment"]["long"] = "9" * 200
    data = json.dumps(content).replace('"seconds": 1.5', '"seconds": 1.' + "5" * 200)
    assert loads(data.encode()).environment["long"] == "9" * 200


@pytest.mark.parametrize("field", ["schema", "method", "run", "machine"])
def test_a_record_without_what_makes_it_one_is_refused(field):
    content = plain()
    del content[field]
    assert f"`{field}`" in refusal(content)


def test_a_newer_record_is_refused_as_such_whatever_else_has_changed_in_it():
    assert refusal({"schema": SCHEMA + 1, "run": "another shape"}) == (
        f"a.json: schema {SCHEMA + 1} is newer than this program reads ({SCHEMA}); update overlap"
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b"1", b"NaN", b"\xff\xfe{}", b'{"schema": NaN}', WHOLE + b"x", b"\xef\xbb\xbf" + WHOLE,
     b'{"schema": 1e999}', b'{"schema": ' + b"9" * 5000 + b"}", WHOLE.replace(b'"2.11.0"', b'"\\udcff"')],
)  # fmt: skip
def test_what_is_not_json_is_refused(data):
    assert refusal(data)


@pytest.mark.parametrize("depth", [10, 500, 900, *range(940, 1001, 4), 2000, 100_000])
@pytest.mark.parametrize(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_is_kept_or_refused(depth, left, right):
    data = WHOLE.replace(b'"2.11.0"', left * depth + b"1" + right * depth)
    assert data != WHOLE
    try:
        made = loads(data)
    except RecordError:
        assert depth > 500
        assert "nested too deeply" in refusal(data)
    else:
        assert dumps(made) == data


# -- files -------------------------------------------------------------------------------------------------


def test_a_record_is_written_where_the_design_says_and_read_from_there(tmp_path):
    made = small()
    path = record_path(tmp_path, made)
    assert path == tmp_path / "records" / "h200-1" / "20261130T080000Z-01234567.json"
    write(path, made)
    assert read(path) == made
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_path_of_a_record_stays_inside_the_store(tmp_path):
    with pytest.raises(UsageError, match=r"machine: got '\.\./x'"):
        record_path(tmp_path, small(machine=Machine(name="../x", device="cuda")))


def test_a_write_that_fails_keeps_the_record_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, small())

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"^results: cannot write .*a.json: No space left on device$"):
        write(path, small(cases=[]))
    assert read(path) == small()
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    for path, words in ((tmp_path / "missing.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(RecordError, match=f"^{re.escape(str(path))}: cannot read: {words}"):
            read(path)


def test_a_message_names_the_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"{")
    with pytest.raises(RecordError, match=f"^{re.escape(str(path))}: not a readable record: "):
        read(path)


def test_a_file_far_larger_than_any_record_is_not_taken_into_memory(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(records.MAX_BYTES + 1)  # takes no room on the disk
    monkeypatch.setattr(type(path), "read_bytes", lambda self: pytest.fail("read it all the same"))
    with pytest.raises(RecordError, match="larger than 512 MiB, which no record is"):
        read(path)


def test_a_file_without_an_end_is_not_taken_into_memory(monkeypatch):
    """A device says nothing of its size."""
    monkeypatch.setattr(records, "MAX_BYTES", 1 << 20)
    with pytest.raises(RecordError, match=r"^/dev/zero: larger than 1 MiB, which no record is$"):
        read(Path("/dev/zero"))


def test_a_record_is_read_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(dumps(small()),))
    writer.start()
    assert read(tmp_path / "pipe") == small()
    writer.join()


def test_the_time_is_written_as_it_is_read():
    made = small()
    made.run.time = utc_now()
    assert loads(dumps(made)).run.time == made.run.time


@pytest.mark.parametrize("name", ["a", "h200-1", "A.b_c-9", "0" * 64])
def test_names_of_machines_are_names_of_folders(name):
    assert safe_name(name) == name


def test_a_time_that_is_none_is_refused():
    data = dumps(small()).replace(small().run.time.encode(), b"2026-13-99T99:99:99Z")
    with pytest.raises(RecordError, match=r"run.time: got '2026-13-99T99:99:99Z', which is no time"):
        loads(data)
