from typing import get_args

import msgspec
import pytest
from factories import controls, h2d_case, h2d_launch

from harness.profiles import load_profile
from harness.protocol import (
    EVENTS,
    JOBS,
    Begin,
    ControlDone,
    Done,
    Failed,
    Job,
    Progress,
    Ready,
    Status,
    reason,
)
from harness.record import STATUSES

KEY = h2d_case().key


@pytest.mark.parametrize(
    "event",
    [
        Ready(facts={"torch": "2.11.0", "sm_count": 132}, canary_us=2.5, open_s=1.25),
        ControlDone(control=controls()[0], seconds=0.5),
        Begin(key=KEY),
        Progress(key=KEY, rounds=20),
        Done(key=KEY, status="ok", reason="", launch=h2d_launch(h2d_case(), rounds=3)),
        Done(key=KEY, status="skipped", reason="late", launch=None, out_of_time=True),
        Failed(reason="RuntimeError: lost"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_is_one_line_and_comes_back_as_it_was(event):
    line = msgspec.json.encode(event)
    assert b"\n" not in line
    assert EVENTS.decode(line) == event


def test_a_job_comes_back_as_it_was_with_a_profile_of_the_same_hash():
    profile = load_profile("cpu")
    job = Job(
        device="cpu",
        uuid=None,
        no_telemetry="asked for",
        profile=profile,
        cases=[KEY],
        launch=2,
        target=0.03,
        seconds=12.5,
        controls=False,
    )
    back = JOBS.decode(msgspec.json.encode(job))
    assert back == job
    assert back.profile.key == profile.key


def test_a_worker_cannot_give_a_status_that_no_record_has():
    assert get_args(Status) == STATUSES
    line = b'{"type":"done","key":"k","status":"fine","reason":"","launch":null}'
    with pytest.raises(msgspec.ValidationError, match="fine"):
        EVENTS.decode(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"{}",
        b'{"type":"hello"}',
        b'{"type":"begin"}',
        b'{"type":"begin","key":3}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_event_is_told_apart(line):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        EVENTS.decode(line)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("OSError: [Errno 2] No such file: '/home/me/x.so'", "OSError: [Errno 2] No such file: '(path)'"),
        ("/usr/lib/libx.so.1: undefined symbol: f", "(path): undefined symbol: f"),
        ('File "/a b/c.py", line 3', 'File "(path) b/c.py", line 3'),
        ("in ../x/y.py (or ~/x)", "in (path) (or (path))"),
        ("LD_LIBRARY_PATH=/a/b:/c", "LD_LIBRARY_PATH=(path):(path)"),
        ("12.5 GiB/s, n/a, and 1 / 2", "12.5 GiB/s, n/a, and 1 / 2"),
        ("see https://pytorch.org/docs", "see https://pytorch.org/docs"),
        ("two\nlines \x1b[31m and\ttabs ", "two lines [31m and tabs"),
        (KEY, KEY),
        ("", ""),
    ],
)
def test_a_reason_is_one_printable_line_without_paths(text, kept):
    assert reason(text) == kept


def test_a_long_reason_is_cut():
    assert reason("x" * 301) == "x" * 297 + "..."
    assert reason("x" * 300) == "x" * 300
