"""The code of another revision, to be run beside this one: `--against REV` or a folder that holds it."""

import contextlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import source
from harness.errors import UsageError

EXTRACT_S = 60


@dataclass(frozen=True)
class Tree:
    """A folder with the package in it. commit: what `--commit` is told; empty where the folder's own git knows."""

    root: Path
    commit: str
    name: str


def here() -> Tree:
    """The tree that this program runs from."""
    state = source.checkout()
    return Tree(source.package_root(), "", _name(state))


@contextlib.contextmanager
def tree(given: str) -> Iterator[Tree]:
    """The tree of a folder, used where it lies, or of a revision of this program's repository, for the `with` block.

    UsageError where there is no such folder, revision, repository or git. A revision is unpacked into a folder of
    its own, so that whatever ends this process leaves nothing behind in the repository.
    """
    folder = Path(given)
    if not given.strip():
        raise UsageError("against: got nothing, want a revision or a folder with a checkout")
    if folder.is_dir():
        if not (folder / "harness" / "__init__.py").is_file():
            raise UsageError(
                f"against: {given} holds no package `harness`; give the top of a checkout, or a revision"
            )
        yield Tree(folder.resolve(), "", _name(source.checkout(folder)))
        return
    commit = source.resolve(given)
    with tempfile.TemporaryDirectory(prefix="overlap-") as place:
        _unpack(commit, Path(place))
        yield Tree(Path(place), commit, commit[:8])


def _name(state: source.Checkout) -> str:
    return "no commit" if state.commit == "none" else f"{state.commit[:8]}{'+dirty' if state.dirty else ''}"


def _unpack(commit: str, place: Path) -> None:
    command = ["git", "-C", str(source.package_root()), "archive", "--format=tar", commit, "--", "harness"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=EXTRACT_S, check=True)
        with tarfile.open(fileobj=io.BytesIO(answer.stdout)) as archive:
            archive.extractall(place, filter="data")
    except subprocess.CalledProcessError:
        raise UsageError(f"against: {commit[:8]} holds no package `harness`; give a later revision") from None
    except (OSError, subprocess.TimeoutExpired, tarfile.TarError) as error:
        raise UsageError(f"against: {commit[:8]} could not be unpacked: {error}") from None
