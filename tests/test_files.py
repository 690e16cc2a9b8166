import errno
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from harness import files
from harness.errors import UsageError
from harness.files import check_place, hold, write_new, write_whole


def refusal(path, data=b"new"):
    with pytest.raises(UsageError) as caught:
        write_whole(path, data, field="results")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_the_folders_above_it(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    write_whole(path, b"one", field="results")
    assert path.read_bytes() == b"one"
    write_whole(path, b"two", field="results")
    assert path.read_bytes() == b"two"
    assert left(path.parent) == ["c.json"]


def test_others_may_read_it(tmp_path):
    """A temporary file is its owner's alone; a record is read by whoever builds the pages."""
    write_whole(tmp_path / "a", b"x", field="results")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "a"
    wholes = [letter * 300_000 for letter in (b"a", b"b")]
    write_whole(path, wholes[0], field="results")
    stop = threading.Event()

    def rewrite():
        while not stop.is_set():
            for whole in wholes:
                write_whole(path, whole, field="results")

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = {path.read_bytes() for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= set(wholes)


@pytest.mark.parametrize("call", ["mkstemp", "fsync", "chmod", "replace"])
def test_whatever_step_fails_the_old_file_stays_and_no_part_is_left(tmp_path, monkeypatch, call):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile if call == "mkstemp" else os, call, full)
    assert refusal(path) == f"results: cannot write {path}: No space left on device"
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert left(tmp_path) == ["a"]


def test_a_file_that_the_system_cuts_short_is_not_put_in_place(tmp_path):
    """The limit on the size of files stands for a disk that fills up: the kernel takes a part and refuses the rest."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        message = refusal(path, b"n" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message == f"results: cannot write {path}: File too large"
    assert path.read_bytes() == b"old"
    assert left(tmp_path) == ["a"]


def test_an_interrupted_write_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new", field="results")
    assert path.read_bytes() == b"old"
    assert left(tmp_path) == ["a"]


def test_it_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    """Otherwise a machine that loses power could keep the new name and none of the content."""
    done = []
    for call in ("fsync", "replace"):
        really = getattr(os, call)
        monkeypatch.setattr(
            os, call, lambda *args, call=call, really=really: (done.append(call), really(*args))[1]
        )
    write_whole(tmp_path / "a", b"x", field="results")
    assert done == ["fsync", "replace"]


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "records" / "a.json"
    assert refusal(path) == f"results: cannot write {path}: Not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    assert refusal(folder / "a").endswith(": Permission denied")


def test_a_folder_in_the_file_s_place_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    assert refusal(tmp_path / "a").endswith(": Is a directory")
    assert left(tmp_path) == ["a"]


def test_a_name_too_long_is_refused(tmp_path):
    assert refusal(tmp_path / ("a" * 300)).endswith(": File name too long")
    assert left(tmp_path) == []


def test_a_place_is_checked_without_writing(tmp_path):
    check_place(tmp_path / "a" / "b" / "c.json", field="results")
    assert left(tmp_path) == []
    (tmp_path / "file").write_bytes(b"old")
    check_place(tmp_path / "file", field="results")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_relative_place_is_checked_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_place(Path("a.json"), field="results")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"^results: cannot write file/a\.json: Not a directory$"):
        check_place(Path("file/a.json"), field="results")


def test_a_place_where_nothing_can_be_written_is_refused_as_a_write_would_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file" / "a", tmp_path / "file" / "b" / "a", tmp_path, tmp_path / "lost" / "a"):
        with pytest.raises(UsageError) as caught:
            check_place(path, field="results")
        assert str(caught.value).startswith(f"results: cannot write {path}: ")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UsageError, match=r": Permission denied$"):
        check_place(tmp_path / "a", field="results")


# Where nothing is yet.


def test_a_new_file_takes_no_other_s_place(tmp_path):
    path = tmp_path / "a" / "b"
    assert write_new(path, b"one", field="results")
    assert not write_new(path, b"two", field="results")
    assert path.read_bytes() == b"one"
    assert left(path.parent) == ["b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    assert not write_new(tmp_path / "lost", b"two", field="results")


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_several_that_write_a_new_file_at_once_one_does(tmp_path, monkeypatch, links):
    if not links:

        def refused(*arguments):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refused)
    barrier = threading.Barrier(4)
    written = []

    def write(number):
        for at in range(20):
            barrier.wait()
            if write_new(tmp_path / str(at), b"%d" % number, field="results"):
                written.append((str(at), b"%d" % number))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(written) == 20
    assert {name: (tmp_path / name).read_bytes() for name in left(tmp_path)} == dict(written)


def test_a_new_file_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"^results: cannot write .*file/a: Not a directory$"):
        write_new(tmp_path / "file" / "a", b"x", field="results")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(UsageError, match=r"^results: cannot write .*a: File too large$"):
            write_new(tmp_path / "a", b"n" * (1 << 20), field="results")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == ["file"]


# Whose a file is.

HOLD = """
import sys, time
from pathlib import Path
from harness.files import hold
held = hold(Path(sys.argv[1]))
print("no" if held is None else "yes", flush=True)
time.sleep(60)
"""


def holder(path):
    """A process that tries to hold `path`, and whether it could."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(files.__file__).parent.parent,
    )
    with process.stdout:
        return process, process.stdout.readline().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps no names of sockets")
def test_a_file_is_held_by_one_process_until_that_ends(tmp_path):
    path = tmp_path / "a"
    first, could = holder(path)
    try:
        assert could == "yes"
        assert hold(path) is None
        (tmp_path / "linked").symlink_to(tmp_path)
        assert hold(tmp_path / "linked" / "a") is None, "the same file by another name"
        with hold(tmp_path / "b"):
            pass
    finally:
        first.kill()
        first.wait()
    with hold(path):
        second, could = holder(path)
        second.kill()
        second.wait()
        assert could == "no"
    with hold(path):
        pass
    assert left(tmp_path) == ["linked"]


def test_where_nothing_can_be_held_nobody_is_kept_out(tmp_path, monkeypatch):
    class Bare(socket.socket):
        def bind(self, address):
            raise OSError(errno.EPERM, "not in this sandbox")

    monkeypatch.setattr(files.socket, "socket", Bare)
    first, second = hold(tmp_path / "a"), hold(tmp_path / "a")
    assert first is not None
    assert second is not None
    with first, second:
        pass
