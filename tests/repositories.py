"""Git repositories of any length in one go."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def git(folder: Path, *arguments: str, stdin: bytes | None = None) -> str:
    """What git says in `folder`, whatever this machine's configuration is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(folder), *arguments]
    ran = subprocess.run(command, input=stdin, capture_output=True, check=True, env=environment)
    return ran.stdout.decode().strip()


def make(folder: Path, trees: Sequence[Mapping[str, str]], *, day: int = 0) -> list[str]:
    """A repository with one commit a day on `main`, each adding or replacing these files; their hashes.

    day: of the first commit, counted from 2026-01-01.
    """
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    lines = []
    for at, files in enumerate(trees):
        seconds = 1767225600 + 86400 * (day + at)
        message = f"commit {at}"
        lines.append(
            f"commit refs/heads/main\nmark :{at + 1}\ncommitter n <e> {seconds} +0000\n"
            f"data {len(message)}\n{message}\n" + (f"from :{at}\n" if at else "")
        )
        for name, text in files.items():
            lines.append(f"M 100644 inline {name}\ndata {len(text.encode())}\n{text}\n")
    git(folder, "fast-import", "--quiet", stdin="".join(lines).encode())
    git(folder, "reset", "-q", "--hard")
    return git(folder, "rev-list", "--reverse", "main").split()
