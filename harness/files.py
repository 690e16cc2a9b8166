"""Writing a file in one step."""

import errno
import os
import tempfile
from pathlib import Path

from harness.errors import UsageError


def write_whole(path: Path, data: bytes, *, field: str) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one, never a part.

    Raises UsageError, naming `field`, if the folder cannot be written or the disk is full; an old file is then
    untouched.
    """
    partial: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
        partial = None
    except OSError as error:
        raise UsageError(f"{field}: cannot write {path}: {error.strerror}") from None
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


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
