"""Writing a file in one step."""

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
