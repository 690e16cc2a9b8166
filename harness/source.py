"""Which commit is measured. Asks git, and lives without it."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError

GIT_S = 10
_GIVEN = re.compile(r"([0-9a-fA-F]{7,40})(\+dirty)?")
# Results are written by the runs themselves and say nothing of the code.
_RESULTS = "results"
_WRITTEN = ("records", "reports")


@dataclass(frozen=True)
class Checkout:
    """commit: HEAD in full, or `none`. dirty: uncommitted changes, untracked files included; None: not known.
    reason: why there is no commit."""

    commit: str
    dirty: bool | None
    reason: str = ""


class _NoAnswer(Exception):
    """git gave none; the message is the reason."""


def package_root() -> Path:
    """The folder that holds the package: the checkout's, unless the package is installed elsewhere."""
    return Path(__file__).resolve().parent.parent


def python_path(root: Path) -> str:
    """PYTHONPATH for a child that is to import the package from `root`."""
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))


def checkout(start: Path | None = None, *, results: Path | None = None) -> Checkout:
    """The state of the checkout that `start` lies in; by default, of the one that the package is in.

    results: a folder of results beside `results`; what is new in it is no change of the code.
    """
    root = package_root() if start is None else start
    try:
        top = Path(_git(root, "rev-parse", "--show-toplevel"))
        if start is None and top.resolve() != root:
            # Installed in an environment that happens to lie inside some other project's repository.
            return Checkout("none", None, "the package is not run from its own checkout")
        head = _git(root, "rev-parse", "--verify", "HEAD^{commit}")
        # `all`: a new folder's name would not tell whether there is more in it than results.
        changes = _git(
            top, "status", "--porcelain", "--untracked-files=all", "--", ".", *_left_out(top, results)
        )
    except _NoAnswer as error:
        return Checkout("none", None, str(error))
    # A SHA-256 repository's name is cut to what records and asv accept; it is still an unambiguous beginning.
    return Checkout(head[:40], bool(changes))


def _left_out(top: Path, results: Path | None) -> list[str]:
    """What git's answer leaves out, as its pathspecs."""
    folders = [_RESULTS]
    if results is not None and results.resolve().is_relative_to(top.resolve()):
        chosen = results.resolve().relative_to(top.resolve())
        # A folder that holds code as well, such as the root, hides no more than what runs write.
        shared = chosen == Path() or _git(top, "ls-files", "--", f":(literal){chosen}")
        folders += [str(chosen / name) for name in _WRITTEN] if shared else [str(chosen)]
    return [f":(exclude,literal){folder}" for folder in folders]


def commit(start: Path | None, given: str | None, *, results: Path | None = None) -> tuple[str, bool | None]:
    """The commit to record, in full, and whether the tree has uncommitted changes (None: nobody can tell).

    Args:
        start: a folder of the repository to ask; None asks the one that the package is run from.
        given: `SHA` or `SHA+dirty` (`--commit`), for a tree without history; taken as it is where git has no
            answer.
        results: as for `checkout`.

    ('none', None) without git or a repository. UsageError for a `given` of another form, or one that git
    contradicts: it is not HEAD, or does not say that the tree has uncommitted changes.
    """
    state = checkout(start, results=results)
    if given is None:
        return state.commit, state.dirty
    match = _GIVEN.fullmatch(given.strip())
    if match is None:
        raise UsageError(f"commit: got {given!r}, want 7 to 40 hex digits, and +dirty for a changed tree")
    name, dirty = match[1].lower(), match[2] is not None
    if state.commit == "none":
        return name, dirty
    if not state.commit.startswith(name):
        raise UsageError(f"commit: got {given}, but HEAD is {state.commit}; leave --commit out")
    if state.dirty and not dirty:
        raise UsageError(
            f"commit: got {given}, but there are uncommitted changes on top of HEAD; give {name}+dirty, or leave "
            "--commit out"
        )
    return state.commit, dirty


def resolve(revision: str, start: Path | None = None) -> str:
    """The full name of the commit that `revision` names in the repository this program runs from (or `start`'s).

    UsageError, naming the revision, where git or the repository has no answer.
    """
    root = package_root() if start is None else start
    if revision.startswith("-"):
        raise UsageError(f"revision: got {revision!r}, want a commit, branch or tag")
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")[
            :40
        ]
    except _NoAnswer as error:
        why = "no such commit here" if "exit code 1" in str(error) else str(error)
        remedy = (
            "give a commit, branch or tag" if why != str(error) else "mend that, or give a folder or records"
        )
        raise UsageError(f"revision: got {revision!r}: {why}; {remedy}") from None


@dataclass(frozen=True)
class Lineage:
    """names: full hashes by the names given. places: by full hash, parents before children. reason: why some, or all,
    names are not known; empty where all are."""

    names: Mapping[str, str]
    places: Mapping[str, int]
    reason: str = ""


def lineage(commits: Iterable[str], start: Path) -> Lineage:
    """The order of commits, hashes in full or the beginnings of some, in the repository that `start` lies in."""
    asked = sorted(set(commits))
    try:
        # One answer a line, in the order asked: the object's name and type, or why there is none.
        answers = _git(
            start, "cat-file", "--batch-check", stdin="".join(f"{name}^{{commit}}\n" for name in asked)
        )
        found = zip(asked, answers.splitlines(), strict=False)
        names = {name: answer.split()[0] for name, answer in found if answer.split()[1:2] == ["commit"]}
        wanted = dict.fromkeys(names.values())
        asked_for = "".join(f"{sha}\n" for sha in wanted)
        listed = (
            _git(start, "rev-list", "--topo-order", "--reverse", "--stdin", stdin=asked_for) if wanted else ""
        )
    except _NoAnswer as error:
        return Lineage({}, {}, str(error))
    places = {sha: at for at, sha in enumerate(listed.splitlines()) if sha in wanted}
    lacking = len(asked) - len(names)
    return Lineage(
        names, places, f"the repository lacks {lacking} of {len(asked)} commits" if lacking else ""
    )


def distance(older: str, newer: str, start: Path) -> int | None:
    """How many commits lead from `older`, left out, to `newer`; None where git cannot tell."""
    try:
        return int(_git(start, "rev-list", "--count", f"{older}..{newer}"))
    except (_NoAnswer, ValueError):
        return None


def _git(folder: Path, *arguments: str, stdin: str | None = None) -> str:
    # A hook's GIT_DIR would send the question to another repository, and fsmonitor would start a daemon.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # A clone without all objects would ask its remote for a commit it lacks.
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        answer = subprocess.run(
            command,
            input=None if stdin is None else stdin.encode(),
            capture_output=True,
            timeout=GIT_S,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        raise _NoAnswer("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"git did not answer within {GIT_S} s") from None
    except OSError as error:
        raise _NoAnswer(f"git did not start: {error.strerror}") from None
    if answer.returncode == 0:
        return answer.stdout.decode(errors="replace").strip()
    complaint = answer.stderr.decode(errors="replace")
    if "dubious ownership" in complaint:
        raise _NoAnswer("git does not trust the owner of this folder (git config safe.directory)")
    if "not a git repository" in complaint:
        raise _NoAnswer("not a git repository")
    if "Needed a single revision" in complaint:
        raise _NoAnswer("the repository has no commit yet")
    raise _NoAnswer(f"git failed with exit code {answer.returncode}")
