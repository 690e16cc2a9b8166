import os
import shutil
import subprocess
import sys

import pytest
import repositories

from harness import source
from harness.errors import UsageError
from harness.source import Checkout, checkout, commit, distance, lineage

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True, env=environment).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "project"
    (folder / "harness").mkdir(parents=True)
    (folder / "harness" / "__init__.py").write_text("")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_is_named_in_full(repository):
    head = git(repository, "rev-parse", "HEAD")
    assert len(head) == 40
    assert commit(repository, None) == (head, False)
    assert commit(repository / "harness", None) == (head, False)


@pytest.mark.parametrize("change", ["edited", "staged", "untracked", "deleted"])
def test_every_uncommitted_change_is_seen(repository, change):
    tracked = repository / "harness" / "__init__.py"
    if change == "deleted":
        tracked.unlink()
    else:
        (tracked if change == "edited" else repository / "new.py").write_text("x = 1\n")
    if change == "staged":
        git(repository, "add", ".")
    assert commit(repository, None)[1] is True
    # From a folder inside, changes outside of it count all the same.
    assert commit(repository / "harness", None)[1] is True


def test_results_are_no_change_of_the_code(repository):
    (repository / "results").mkdir()
    (repository / "results" / "record.json").write_text("{}")
    assert commit(repository, None)[1] is False


@pytest.mark.parametrize("chosen", ["kept", "deep/kept", "records [1]", "."])
def test_results_kept_elsewhere_in_the_clone_are_no_change_of_the_code_either(repository, chosen):
    file = repository / chosen / "records" / "m" / "x.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert commit(repository, None)[1] is True
    assert commit(repository, None, results=repository / chosen)[1] is False
    (repository / "new.py").write_text("")
    assert commit(repository, None, results=repository / chosen)[1] is True


def test_code_beside_the_chosen_results_counts(repository):
    (repository / "harness" / "records").mkdir()
    (repository / "harness" / "records" / "x.json").write_text("{}")
    assert commit(repository, None, results=repository / "harness")[1] is False
    (repository / "harness" / "__init__.py").write_text("x = 1\n")
    assert commit(repository, None, results=repository / "harness")[1] is True


def test_results_outside_of_the_clone_change_nothing(repository, tmp_path):
    assert commit(repository, None, results=tmp_path / "elsewhere")[1] is False
    (repository / "new.py").write_text("")
    assert commit(repository, None, results=tmp_path / "elsewhere")[1] is True


def test_a_hook_of_another_repository_does_not_lead_astray(repository, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert commit(repository, None)[0] == git(repository, "rev-parse", "HEAD")


def test_no_repository_is_none_with_the_reason(tmp_path):
    assert commit(tmp_path, None) == ("none", None)
    assert checkout(tmp_path).reason == "not a git repository"
    assert checkout(tmp_path / "absent").commit == "none"


def test_no_commit_yet_is_none_with_the_reason(tmp_path):
    git(tmp_path, "init", "-q")
    assert checkout(tmp_path) == Checkout("none", None, "the repository has no commit yet")


def test_no_git_is_none_with_the_reason(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert checkout(repository) == Checkout("none", None, "git is not installed")


def script(folder, body: str) -> None:
    path = folder / "git"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)


def test_a_git_that_hangs_is_none_with_the_reason(repository, tmp_path, monkeypatch):
    script(tmp_path, "import time; time.sleep(30)")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(source, "GIT_S", 0.3)
    assert checkout(repository).reason == "git did not answer within 0.3 s"


@pytest.mark.parametrize(
    ("complaint", "reason"),
    [
        (
            "fatal: detected dubious ownership in repository at '/somewhere'",
            "git does not trust the owner of this folder (git config safe.directory)",
        ),
        ("fatal: some other fault in /somewhere", "git failed with exit code 128"),
    ],
)
def test_a_git_that_refuses_is_none_with_a_reason_that_names_no_path(
    repository, tmp_path, monkeypatch, complaint, reason
):
    script(tmp_path, f"import sys; sys.stderr.write({complaint!r}); sys.exit(128)")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(repository) == Checkout("none", None, reason)


def test_the_package_asks_its_own_checkout_only(repository, monkeypatch):
    monkeypatch.setattr(source, "package_root", lambda: repository)
    assert commit(None, None)[0] == git(repository, "rev-parse", "HEAD")
    # Installed in an environment inside the user's own project: that project's commit says nothing of ours.
    inside = repository / ".venv" / "lib"
    inside.mkdir(parents=True)
    monkeypatch.setattr(source, "package_root", lambda: inside)
    assert commit(None, None) == ("none", None)
    assert checkout().reason == "the package is not run from its own checkout"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0123456789abcdef0123456789abcdef01234567", ("0123456789abcdef0123456789abcdef01234567", False)),
        ("ABCDEF0123", ("abcdef0123", False)),
        ("abcdef0+dirty", ("abcdef0", True)),
    ],
)
def test_a_given_commit_stands_where_git_has_no_answer(tmp_path, given, expected):
    assert commit(tmp_path, given) == expected


def test_an_environment_inside_a_clone_takes_the_commit_it_is_given(repository, monkeypatch):
    """As asv's own environments do: their package is not run from the checkout."""
    inside = repository / ".asv" / "env" / "site-packages"
    inside.mkdir(parents=True)
    monkeypatch.setattr(source, "package_root", lambda: inside)
    assert commit(None, "abcdef0") == ("abcdef0", False)


def test_a_given_commit_must_name_head_where_git_knows_it(repository):
    head = git(repository, "rev-parse", "HEAD")
    for given in (head, head[:7], head[:8].upper()):
        assert commit(repository, given) == (head, False)
    assert commit(repository, f"{head[:7]}+dirty") == (head, True)
    (repository / "second.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    now = git(repository, "rev-parse", "HEAD")
    for other in (head, head[:7], "deadbeef", f"{head}+dirty"):
        with pytest.raises(UsageError) as refused:
            commit(repository, other)
        assert str(refused.value) == f"commit: got {other}, but HEAD is {now}; leave --commit out"


def test_a_given_commit_must_say_that_the_tree_is_changed(repository):
    head = git(repository, "rev-parse", "HEAD")
    (repository / "new.py").write_text("")
    with pytest.raises(
        UsageError, match=rf"commit: got {head}, but .* uncommitted .* give {head}\+dirty, or leave"
    ):
        commit(repository, head)
    assert commit(repository, f"{head}+dirty") == commit(repository, None) == (head, True)


@pytest.mark.parametrize(
    "given", ["", "main", "abc", "abcdef0-dirty", "abcdef0+dirty+dirty", "a" * 41, "--help"]
)
def test_a_given_commit_of_another_form_is_refused(tmp_path, given):
    with pytest.raises(UsageError, match=r"commit: got .*, want 7 to 40 hex digits"):
        commit(tmp_path, given)


@pytest.fixture
def branches(tmp_path):
    """main: 0 1 2, the last one a merge of side: a b; made in turns, in the order 0 a 1 b 2."""
    folder = tmp_path / "branches"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    marks = {"0": 1, "a": 2, "1": 3, "b": 4, "2": 5}
    parents = {"a": ["0"], "1": ["0"], "b": ["a"], "2": ["1", "b"]}
    commands = ""
    for name, mark in marks.items():
        commands += f"commit refs/heads/{'side' if name in 'ab' else 'main'}\nmark :{mark}\n"
        commands += f"committer n <e> {1700000000 + 100 * mark} +0000\ndata 1\n{name}\n"
        commands += "".join(
            f"{'merge' if at else 'from'} :{marks[parent]}\n"
            for at, parent in enumerate(parents.get(name, []))
        )
    repositories.git(folder, "fast-import", "--quiet", stdin=commands.encode())
    listed = git(folder, "log", "--all", "--format=%s %H").splitlines()
    return folder, dict(line.split() for line in listed)


def test_parents_stand_before_their_children(branches):
    folder, names = branches
    found = lineage(names.values(), folder)
    assert found.reason == ""
    order = sorted(names, key=lambda name: found.places[names[name]])
    assert (order[0], order[-1]) == ("0", "2")
    assert "".join(order) in ("0ab12", "01ab2"), "a branch stands together, whatever was made in between"


def test_names_may_be_short_and_unknown_ones_are_counted(branches):
    folder, names = branches
    found = lineage([names["0"][:8], "f" * 40, "0" * 7], folder)
    assert found.names == {names["0"][:8]: names["0"]}
    assert found.places.keys() == {names["0"]}
    assert found.reason == "the repository lacks 2 of 3 commits"
    assert lineage([], folder) == lineage(iter(()), folder)


def test_without_a_repository_there_is_a_reason(tmp_path):
    assert lineage(["0" * 40], tmp_path).reason == "not a git repository"
    assert distance("0" * 40, "1" * 40, tmp_path) is None


def test_commits_between_two_are_counted(branches):
    folder, names = branches
    assert distance(names["0"], names["1"], folder) == 1
    assert distance(names["1"], names["2"], folder) == 3, "those of the branch that was merged too"
    assert distance("f" * 40, names["2"], folder) is None
