"""Writing a file in one step, holding one against other processes, and where files lie that do not last."""

import contextlib
import errno
import hashlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.errors import UsageError

# The variable that names a folder for what a child keeps in files while it lasts. It goes when the child is gone, also
# where that was killed and could not tidy up (harness/child.py).
SCRATCH = "OVERLAP_SCRATCH"


def scratch() -> Path:
    """Where this process may leave files that nobody needs once it has ended."""
    return Path(os.environ.get(SCRATCH) or tempfile.gettempdir())


def write_whole(path: Path, data: bytes, *, field: str) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one, never a part.

    Raises UsageError, naming `field`, if the folder cannot be written or the disk is full; an old file is then
    untouched.
    """
    with _beside(path, data, field) as partial:
        os.replace(partial, path)


def write_new(path: Path, data: bytes, *, field: str) -> bool:
    """As `write_whole`, but only where nothing has that name: False, and nothing is written, where something has.

    Of several processes that try at once, one succeeds.
    """
    with _beside(path, data, field) as partial:
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
        except (
            OSError
        ):  # a file system without links: the name first, which a reader may see empty for an instant
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            os.replace(partial, path)
    return True


@contextlib.contextmanager
def _beside(path: Path, data: bytes, field: str) -> Iterator[str]:
    """A file with `data` on the disk of `path`, gone at the end unless it was moved; UsageError for an OSError."""
    partial: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        yield partial
    except FileExistsError:  # a file where the folder should be
        raise UsageError(f"{field}: cannot write {path}: {os.strerror(errno.ENOTDIR)}") from None
    except OSError as error:
        raise UsageError(f"{field}: cannot write {path}: {error.strerror}") from None
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def hold(path: Path) -> contextlib.AbstractContextManager[object] | None:
    """Hold `path` for this process until the block is left; None where another process of this machine holds it.

    The kernel keeps the hold, and drops it when the process ends, however it ends: nothing is left on the disk.
    """
    held = contextlib.ExitStack()
    if sys.platform != "linux":  # elsewhere sockets have no names outside of the file system
        return held
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    with socket.socket(socket.AF_UNIX) as bound:
        try:
            bound.bind(f"\0overlap-{name}")
        except OSError as error:
            return None if error.errno == errno.EADDRINUSE else held
        held.callback(os.close, bound.detach())
    return held


def check_place(path: Path, *, field: str) -> None:
    """UsageError, naming `field`, if nothing can be written to `path`; writes nothing itself."""
    there = next((folder for folder in path.parents if os.path.lexists(folder)), Path())
    reason = None
    if not there.is_dir():
        reason = errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = errno.EACCES
    elif path.is_dir():
        reason = errno.EISDIR
    if reason is not None:
        raise UsageError(f"{field}: cannot write {path}: {os.strerror(reason)}")
