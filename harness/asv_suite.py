"""The asv suite: a class for each family, its cases as the only parameter, one measurement for all of its readers.

benchmarks/ has one file for each class. Any other repository, with commits of its own, has the suite by one file of
its asv suite (README, "In a repository of your own"):

    from harness.asv_suite import *

asv starts one process per benchmark and case. So `setup_cache` measures everything once, in processes of
its own, and leaves one small file per case in the folder that asv gives to the readers; a reader only reads
its file.

Read from the environment (README, "History in asv"):
    OVERLAP_RECORD      take the numbers from this record instead of measuring
    OVERLAP_LAUNCH      only this launch of the record
    OVERLAP_TIER, OVERLAP_CASE, OVERLAP_DEVICE, OVERLAP_LAUNCHES      as the options of `overlap run`; several
                        patterns for cases are parted by blanks
    OVERLAP_RESULTS     keep the record of what was measured under this folder
    OVERLAP_TIMEOUT     seconds after which a measurement is ended (default 3000)

Nothing here imports torch or touches CUDA, and numpy is imported in `setup_cache` alone.
"""

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import METHOD_VERSION
from harness.errors import OverlapError

if TYPE_CHECKING:
    from harness.record import Record
    from harness.source import Checkout

# What `import *` gives a suite: asv takes every class that it finds in one for benchmarks.
__all__ = ["DDP", "FEED", "H2D"]

# A fixed word, not asv's hash of this suite's source: only a change of method cuts the history.
VERSION = f"method-{METHOD_VERSION}"

# Metrics of harness/metrics.py with `asv=True`, and their units (tests/test_benchmarks.py holds them
# together). Written out, because importing the registry would import numpy.
TRACKED = {
    "overlapped_ms": "ms",
    "bound_ratio": "ratio",
    "overlapped_over_compute": "ratio",
    "transfer_ms": "ms",
    "compute_ms": "ms",
    "host_blocked_ms": "ms",
}

TIMEOUT = float(os.environ.get("OVERLAP_TIMEOUT", "3000"))

# asv counts silent seconds, and a measurement is silent; ours must end first, since it knows whom to end.
SETUP_TIMEOUT = TIMEOUT + 120

LOG = "overlap-run.log"
LOG_LINES = 30

Cache = dict[str, str]


# -- which cases -------------------------------------------------------------------------------------------


def cases(suite: str) -> list[str]:
    """Keys of the cases of a suite: those in asv's store first, in its order, then new ones.

    asv rewrites its list of cases on every run, so a case left out here would lose its history: cases of
    other machines stay. And asv tells a reader only an index into the list: while it runs, the list is frozen.
    """
    frozen = os.environ.get("OVERLAP_ASV_CASES")
    if frozen and (keys := _listed(Path(frozen), suite)):
        return keys
    return list(dict.fromkeys([*_listed(_store() / "benchmarks.json", suite), *_new_cases(suite)]))


def _store() -> Path:
    return Path(os.environ.get("OVERLAP_ASV_RESULTS") or Path("results", "asv"))


def _listed(path: Path, suite: str) -> list[str]:
    """Cases of a suite in one of asv's lists of benchmarks, in its order."""
    listed = dict.fromkeys(key for entry in _benchmarks(path) for key in _keys(entry))
    return [key for key in listed if key.startswith(f"{suite}[")]


def _benchmarks(path: Path) -> list[dict[str, Any]]:
    """The entries of asv's list that have cases as their only parameter, whatever module they were found in."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    entries = (entry for entry in stored.values() if isinstance(entry, dict))
    return [entry for entry in entries if entry.get("param_names") == ["case"]]


def _keys(entry: dict[str, Any]) -> list[str]:
    """asv stores params by their repr."""
    return [str(ast.literal_eval(text)) for text in entry["params"][0]]


def _new_cases(suite: str) -> Iterable[str]:
    if path := os.environ.get("OVERLAP_RECORD"):
        from harness import record

        return [case.key for case in record.read(Path(path)).cases if case.family == suite]
    from harness import devices, profiles, suites

    # The suite of this machine: of its GPU if it has one, else of the cpu backend.
    device = devices.detect(os.environ.get("OVERLAP_DEVICE", "auto"))
    profile = profiles.profile_for(device.kind, device.name)
    return [
        case.key for case in suites.select([suite], _tier(), profile, _patterns(), devices.ranks_of(device))
    ]


def _tier() -> str:
    return os.environ.get("OVERLAP_TIER", "quick")


def _patterns() -> list[str]:
    return os.environ.get("OVERLAP_CASE", "").split()


# -- measuring, once ---------------------------------------------------------------------------------------


def measure(suite: str, folder: Path | None = None) -> Cache:
    """Measure the suite, or read OVERLAP_RECORD: one file per case in `folder`, and their names by case key.

    Raises RuntimeError, with the end of the log, where nothing could be measured at all. A machine without a
    GPU is no error: its cases are those of the cpu backend, and the others have no file.
    """
    from harness import asv_store, record

    folder = folder or Path.cwd()
    given = os.environ.get("OVERLAP_RECORD")
    made = record.read(Path(given) if given else _run(suite, folder))
    _check(made, suite)
    launch = os.environ.get("OVERLAP_LAUNCH")
    cache: Cache = {}
    for key, row in asv_store.rows(made, launch=int(launch) if launch else None).items():
        if key.startswith(f"{suite}["):
            cache[key] = f"case-{len(cache):04}.json"
            (folder / cache[key]).write_text(json.dumps(row))
    return cache


def _check(made: "Record", suite: str) -> None:
    """That the numbers are of the commit and of the method that asv files them under."""
    commit, measured = os.environ.get("ASV_COMMIT"), made.run.commit
    if os.environ.get("OVERLAP_ASV_BY") == "torch":
        measured = str(made.software.get("torch_git"))
    if commit and not commit.startswith(measured):
        raise RuntimeError(f"the record was measured at commit {measured}, asv files it under {commit}")
    if f"method-{made.method}" != VERSION:
        raise RuntimeError(
            f"the record's method is {made.method}, this harness reads method {METHOD_VERSION}"
        )
    if frozen := os.environ.get("OVERLAP_ASV_CASES"):
        listed = _benchmarks(Path(frozen))
        asked = {
            str(each["version"]) for each in listed if any(key.startswith(f"{suite}[") for key in _keys(each))
        }
        if asked - {VERSION}:
            raise RuntimeError(
                f"asv files these numbers as {', '.join(sorted(asked))}, but this commit measures with "
                f"{VERSION}: run asv separately on the commits before and after the change of method"
            )
    keys = {case.key for case in made.cases if case.family == suite and case.measured}
    if keys and not keys & set(cases(suite)):
        raise RuntimeError(
            f"none of the {len(keys)} measured cases is one that asv lists, e.g. {min(keys)}: this commit "
            "has other cases or another profile than the first commit of this asv run; run asv on each by itself"
        )


def _run(suite: str, folder: Path) -> Path:
    """`python -m harness run` in a process group of its own, ended whole; returns the record's path."""
    results = folder / "results"
    command = [sys.executable, "-m", "harness", "run", "--suite", suite, "--tier", _tier()]
    command += ["--results", str(results), "--json"]
    for variable, option in (("OVERLAP_DEVICE", "--device"), ("OVERLAP_LAUNCHES", "--launches")):
        if value := os.environ.get(variable):
            command += [option, value]
    for pattern in _patterns():
        command += ["--case", pattern]
    commit = os.environ.get("ASV_COMMIT")
    if commit and os.environ.get("OVERLAP_ASV_BY") == "torch":
        from harness import devices

        installed = devices.torch_build().get("git_version")
        if installed != commit:
            raise RuntimeError(f"asv files these numbers under {commit}, but torch here is of {installed}")
    elif commit:
        tree, repo = _tree()
        if tree.commit != "none" and not commit.startswith(tree.commit):
            raise RuntimeError(
                f"asv files these numbers under {commit}, but the tree is at {tree.commit}: check that commit out"
            )
        # A tree that may have been changed is recorded as one that was.
        changed = tree.dirty or os.environ.get("OVERLAP_ACCEPT_DIRTY") == "1"
        command += ["--commit", commit + ("+dirty" if changed else "")]
        if repo is not None:
            command += ["--repo", str(repo)]
    log = folder / LOG
    # A file and no pipe: asv would wait for a child of ours that outlives us and still holds its pipe. The
    # working directory is asv's empty one: from the root of the tree, `-m harness` would be the tree's and
    # not the commit's.
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"no end after {TIMEOUT:g} s; OVERLAP_TIMEOUT sets the limit\n{_tail(log)}"
            ) from None
        finally:
            end_group(process)
    records = sorted((results / "records").glob("*/*.json"))
    # 3: nothing measured, 4: some cases failed. The record then says which and why, and so do the readers.
    if code not in (0, 3, 4) or len(records) != 1:
        raise RuntimeError(f"`{' '.join(command[1:])}` ended with exit code {code}\n{_tail(log)}")
    if kept := os.environ.get("OVERLAP_RESULTS"):
        shutil.copytree(results / "records", Path(kept) / "records", dirs_exist_ok=True)
    return records[0]


def _tree() -> "tuple[Checkout, Path | None]":
    """The state of the tree that is measured, and its repository where that is not this program's own.

    git has no answer where asv has installed the commit into an environment: then asv's word stands.
    """
    from harness import source

    own, repo = source.checkout(), os.environ.get("OVERLAP_ASV_REPO")
    if own.commit == "none" or not repo or Path(repo).resolve() == source.package_root():
        return own, None
    return source.checkout(Path(repo)), Path(repo)


def end_group(process: "subprocess.Popen[bytes]", grace_s: float = 10.0) -> None:
    """End a process and every child in its group, politely first: it may have launches of its own to end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


# -- readers -----------------------------------------------------------------------------------------------


def setup(cache: Cache, case: str) -> None:
    """Before each reader: a case that has no meaning here is n/a, a bad one fails with its reason."""
    if case not in cache:
        raise NotImplementedError(f"{case}: not measured on this device")
    row = read(cache, case)
    if row["status"] == "skipped":
        raise NotImplementedError(f"{case}: {row['reason']}")
    if row["samples"] is None:
        # asv shows what a reader prints; the way here would hide the reason.
        sys.tracebacklimit = 0
        raise OverlapError(f"{case}: {row['status']}: {row['reason']}")


def read(cache: Cache, case: str) -> dict[str, Any]:
    """The row of one case, as asv_store.rows made it."""
    row: dict[str, Any] = json.loads(Path(cache[case]).read_text(encoding="utf-8"))
    return row


def tracked(cls: type) -> type:
    """Give an asv class one `track_<metric>` reader per metric that asv follows, and what comes before each."""
    for metric, unit in TRACKED.items():
        setattr(cls, f"track_{metric}", _reader(metric, unit))
    setattr(cls, "setup", lambda self, cache, case: setup(cache, case))  # noqa: B010
    return cls


def _reader(metric: str, unit: str) -> Callable[..., Any]:
    def track(self: object, cache: Cache, case: str) -> dict[str, Any] | float:
        samples = read(cache, case)["samples"].get(metric)
        # asv makes its median and interval from samples of any benchmark, and shows not-a-number as n/a.
        return {"samples": samples, "number": 1} if samples else float("nan")

    track.unit = unit  # type: ignore[attr-defined]
    track.__name__ = f"track_{metric}"
    return track


# -- the families ------------------------------------------------------------------------------------------


@tracked
class H2D:
    """Host-to-device copies beside the GEMMs that read them; `tracked` adds the readers."""

    param_names = ("case",)
    version = VERSION

    # asv asks an instance: importing this module looks for no device.
    @property
    def params(self) -> list[list[str]]:
        return [cases("h2d")]

    # asv shares one run between classes that inherit `setup_cache`, so every family's class has its own.
    def setup_cache(self) -> Cache:
        return measure("h2d")

    setup_cache.timeout = SETUP_TIMEOUT  # type: ignore[attr-defined]


@tracked
class DDP:
    """Gradients all-reduced in buckets beside the backward; n/a where there are fewer GPUs than ranks."""

    param_names = ("case",)
    version = VERSION

    @property
    def params(self) -> list[list[str]]:
        return [cases("ddp")]

    def setup_cache(self) -> Cache:
        return measure("ddp")

    setup_cache.timeout = SETUP_TIMEOUT  # type: ignore[attr-defined]


@tracked
class FEED:
    """Batches made by DataLoader workers beside the steps that use them: `transfer_ms` is the loader alone."""

    param_names = ("case",)
    version = VERSION

    @property
    def params(self) -> list[list[str]]:
        return [cases("feed")]

    def setup_cache(self) -> Cache:
        return measure("feed")

    setup_cache.timeout = SETUP_TIMEOUT  # type: ignore[attr-defined]
