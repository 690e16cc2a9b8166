import subprocess
from pathlib import Path

import pytest

from harness import source, trees
from harness.errors import UsageError


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@e", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the package in its second and third commits."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "README").write_text("before the package\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    for version in ("two", "three"):
        (folder / "harness").mkdir(exist_ok=True)
        (folder / "harness" / "__init__.py").write_text(f"VERSION = {version!r}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", version)
    git(folder, "tag", "v3")
    monkeypatch.setattr(source, "package_root", lambda: folder)
    return folder


def test_a_revision_is_unpacked_and_gone_afterwards(repository: Path) -> None:
    with trees.tree("HEAD~1") as found:
        assert (found.root / "harness" / "__init__.py").read_text() == "VERSION = 'two'\n"
        assert found.commit == git(repository, "rev-parse", "HEAD~1")
        assert found.name == found.commit[:8]
        root = found.root
    assert not root.exists()
    assert git(repository, "worktree", "list").count("\n") == 0, "nothing stays behind in the repository"


def test_a_tag_names_its_commit(repository: Path) -> None:
    with trees.tree("v3") as found:
        assert found.commit == git(repository, "rev-parse", "HEAD")


def test_a_folder_is_used_where_it_lies_with_its_changes(repository: Path) -> None:
    (repository / "harness" / "__init__.py").write_text("VERSION = 'changed'\n")
    with trees.tree(str(repository)) as found:
        assert found.root == repository.resolve()
        assert found.commit == "", "its own git names the commit"
        assert found.name.endswith("+dirty")
    assert repository.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nope", "revision: got 'nope': no such commit here; give a commit, branch or tag"),
        ("--output=x", "revision: got '--output=x', want a commit, branch or tag"),
        ("HEAD:README", "no such commit here"),
        ("HEAD~2", "holds no package `harness`; give a later revision"),
    ],
)
def test_what_is_no_tree_is_refused(repository: Path, given: str, words: str) -> None:
    with pytest.raises(UsageError) as said, trees.tree(given):
        pass
    assert words in str(said.value)


def test_a_folder_without_the_package_is_refused(repository: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="holds no package `harness`; give the top of a checkout"),
        trees.tree(str(tmp_path)),
    ):
        pass


def test_without_a_repository_a_revision_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "package_root", lambda: tmp_path)
    with pytest.raises(UsageError, match="not a git repository"), trees.tree("HEAD"):
        pass


def test_this_tree_is_named_by_its_commit(repository: Path) -> None:
    found = trees.here()
    assert (found.root, found.commit) == (repository, "")
    assert found.name == git(repository, "rev-parse", "HEAD")[:8]
