"""Records into asv: the samples that asv is given, and `ingest`, which hands it a record by its own command.

asv's suite (benchmarks/) reads a record through `rows`. `ingest` only runs `asv run` with OVERLAP_RECORD set,
so asv's files are written by asv alone. What asv must know of the record's machine and software, it learns
through its plugin (harness/asv_plugin.py).
"""

import ast
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness import metrics, record, registry, source
from harness.errors import MeasurementError, UsageError

# Samples of one launch are dependent in time and share what that launch had, but asv's test takes them as
# independent. About twenty are twice what it needs to see a difference at all, and keep a commit's file small.
# An odd number, so that their median is one of them and keeps its few digits.
SAMPLES_PER_LAUNCH = 21

# Event resolution is 0.5 us; more digits would only fill the repository.
DIGITS = 6

# asv's exit code where a reader failed, as those of invalid cases do.
READER_FAILED = 2
TAIL = 25


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """What `ingest` ran and what asv then held: `values` numbers of `cases` measured cases in `file`."""

    command: list[str]
    environment: dict[str, str]
    commit: str
    machine: str
    cases: int
    values: int
    file: Path

    def __str__(self) -> str:
        """The command as a person would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


# -- what asv is given -------------------------------------------------------------------------------------


def tracked() -> dict[str, str]:
    """The metrics that asv follows and their units: positive ones of which less is better."""
    return {name: metric.unit for name, metric in registry.METRICS.items() if metric.asv}


def rows(made: record.Record, *, launch: int | None = None) -> dict[str, dict[str, Any]]:
    """By case key: status, reason and `samples` by metric, None for a case that has no numbers to show.

    launch: only the launch of this index; UsageError where the record has none.
    """
    if launch is not None:
        known = sorted({each.index for case in made.cases for each in case.launches})
        if launch not in known:
            raise UsageError(
                f"launch: got {launch}, want one of {', '.join(map(str, known)) or 'none at all'}"
            )
    return {case.key: _row(case, launch) for case in made.cases}


def _row(case: record.CaseResult, launch: int | None) -> dict[str, Any]:
    kept = [each for each in case.launches if launch is None or each.index == launch]
    row: dict[str, Any] = {"status": case.status, "reason": case.reason, "samples": None}
    if case.measured:
        row["samples"] = {
            name: [sample for each in kept for sample in _samples(case, each, name)] for name in tracked()
        }
    return row


def _samples(case: record.CaseResult, launch: record.Launch, name: str) -> list[float]:
    """At most SAMPLES_PER_LAUNCH samples of one launch, whose median is the launch's own value of the metric.

    They are medians of neighbouring rounds. A ratio of medians has no samples of its own: it gets the scatter
    of the overlapped arm, the numerator of every ratio that asv follows.
    """
    alone = msgspec.structs.replace(case, launches=[launch])
    value = metrics.launch_values(alone, name)
    rounds = metrics.samples(alone, name if registry.METRICS[name].per_round else "overlapped_ms")
    if not value or not rounds:
        return []
    blocks = [statistics.median(block) for block in _blocks(rounds)]
    scale = value[0] / statistics.median(blocks)
    return [float(f"{block * scale:.{DIGITS}g}") for block in blocks]


def _blocks(rounds: Sequence[float]) -> Iterable[Sequence[float]]:
    """An odd number of runs of neighbours, SAMPLES_PER_LAUNCH at most, of lengths that differ by one at most."""
    count = min((len(rounds) - 1) | 1, SAMPLES_PER_LAUNCH)
    ends = [len(rounds) * at // count for at in range(count + 1)]
    return (rounds[start:end] for start, end in itertools.pairwise(ends))


# -- ingest ------------------------------------------------------------------------------------------------


def ingest(
    path: Path, *, config: Path = Path("asv.conf.json"), append: bool = False, accept_dirty: bool = False
) -> Ingested:
    """Hand a record to asv: `asv run` in the environment that runs this, which reads it instead of measuring.

    Refuses (UsageError, nothing written) an unfinished record, one without a measured case, one that names no
    commit or a commit that the repository lacks, one of a tree with uncommitted changes, and to append to what
    asv holds no samples of, or holds already.

    Args:
        config: asv's configuration. Where it says `"overlap_by": "torch"`, its repository is a clone of PyTorch, and
            the record is filed under the commit of its torch.
        append: pool the samples with those that asv has for this commit, machine and environment (a further
            launch of the same cases); otherwise replace them.
        accept_dirty: file a record of uncommitted changes under the commit below them.

    Raises:
        MeasurementError: asv failed, or did not store every number.
    """
    made = record.read(path)
    if not config.is_file():
        raise UsageError(
            f"config: no {config}; asv's configuration is asv.conf.json in the project's repository"
        )
    if not made.run.finished:
        raise UsageError(f"{path}: is of a run that has not ended; go on with: overlap run --resume {path}")
    wanted = {
        (name, key)
        for key, row in rows(made).items()
        for name, samples in (row["samples"] or {}).items()
        if samples
    }
    if not wanted:
        raise UsageError(f"{path}: has no measured case to hand to asv")
    commit = _commit(made, config, accept_dirty)
    if append:
        _check_append(made, path, _result_file(config, made, commit))
    command = [sys.executable, "-m", "asv", "run", "--config", str(config), "--python=same"]
    command += ["--set-commit-hash", commit, "--machine", made.machine.name]
    command += ["--append-samples" if append else "--record-samples"]
    environment = {"OVERLAP_RECORD": str(path.resolve())}
    if made.run.dirty:
        environment["OVERLAP_ACCEPT_DIRTY"] = "1"
    said = _run(command, environment)
    file = _result_file(config, made, commit)
    missing = wanted - (_stored(file).keys() if file else set())
    if missing or file is None:
        name, key = min(missing)
        raise MeasurementError(
            f"asv: stored {len(wanted - missing)} of {len(wanted)} numbers; first missing: {name} of {key}\n"
            f"{_tail(said)}"
        )
    return Ingested(
        command=command,
        environment=environment,
        commit=commit,
        machine=made.machine.name,
        cases=len({key for _, key in wanted}),
        values=len(wanted),
        file=file,
    )


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    """What asv printed; MeasurementError where it could not run, rather than a reader in it."""
    ran = subprocess.run(
        command,
        env=_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode not in (0, READER_FAILED):
        raise MeasurementError(f"asv: ended with exit code {ran.returncode}\n{_tail(ran.stdout)}")
    return ran.stdout


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # asv's readers must import the package that runs this, installed or not. Settings for measuring stay out.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAP_")}
    paths = [str(source.package_root()), *filter(None, inherited.get("PYTHONPATH", "").split(os.pathsep))]
    return inherited | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} | dict(extra)


def _commit(made: record.Record, config: Path, accept_dirty: bool) -> str:
    """The full hash of the record's commit, or of its torch's."""
    settings = _settings(config)
    folder = config.resolve().parent
    repository = folder / str(settings.get("repo", "."))
    commit = made.run.commit
    if settings.get("overlap_by") == "torch":
        commit = str(made.software.get("torch_git") or "none")
        if commit == "none":
            raise UsageError("commit: the record does not tell the commit that its torch was built from")
        if not repository.is_dir():
            raise UsageError(
                f"repo: {config} names {settings.get('repo')}, which is not there; clone PyTorch to it (README)"
            )
    if commit == "none":
        raise UsageError("commit: the record names none, and asv files by commit; measure with --commit SHA")
    if made.run.dirty and not accept_dirty:
        raise UsageError(
            f"commit: the record was measured with uncommitted changes on top of {made.run.commit[:8]}, which asv "
            "cannot say; commit and measure again, or accept it with --accept-dirty"
        )
    repository = repository if repository.is_dir() else folder
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
            cwd=repository,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("git: not found, and asv needs it to know a commit's date") from None
    if found.returncode != 0:
        why = found.stderr.strip().splitlines()
        raise UsageError(
            f"commit: {commit} of the record is not in the repository of {config.name} "
            f"({why[0] if why else 'fetch it, or ingest where it is'})"
        )
    return found.stdout.strip()


def _check_append(made: record.Record, path: Path, file: Path | None) -> None:
    """UsageError unless asv pools with its samples what it is given: it replaces numbers that have none."""
    stored = _stored(file, version=f"method-{made.method}") if file else {}
    given = {
        index: {
            (name, key): samples
            for key, row in rows(made, launch=index).items()
            for name, samples in (row["samples"] or {}).items()
            if samples
        }
        for index in sorted({launch.index for case in made.cases for launch in case.launches})
    }
    meant = {each for samples in given.values() for each in samples}
    # A case that asv has no number of, such as one that was invalid in the first record, loses none.
    bare = sorted({key for name, key in meant if stored.get((name, key)) == []})
    if bare or not meant & stored.keys():
        what = (
            f"no samples of {bare[0]}, and would replace its numbers" if bare else "no numbers of its cases"
        )
        raise UsageError(
            f"append: asv holds {what}; hand it the first record with its samples: overlap ingest RECORD"
        )
    for index, samples in given.items():
        for key in sorted({key for _, key in samples}):
            own = {each: values for each, values in samples.items() if each[1] == key}
            # By all metrics, since one alone may repeat by chance where samples are few.
            if all(_is_run_in(values, stored.get(each, [])) for each, values in own.items()):
                raise UsageError(
                    f"append: asv holds the samples of launch {index} of {path} already (those of {key}); "
                    "append each record once"
                )


def _is_run_in(values: list[float], samples: list[float]) -> bool:
    """Whether `values` stand in `samples` as neighbours in this order."""
    return any(samples[at : at + len(values)] == values for at in range(len(samples) - len(values) + 1))


def _result_file(config: Path, made: record.Record, commit: str) -> Path | None:
    """asv's file for this commit and the record's machine, in the environment that the record names."""
    software = made.software
    # As asv_plugin names environments, which cannot be asked here: it needs asv.
    python = ".".join(str(software.get("python", "")).split(".")[:2])
    name = "cuda" if _settings(config).get("overlap_by") == "torch" else "torch"
    wanted = {name: software[name]} if software.get(name) else {}
    for file in sorted((_results_dir(config) / made.machine.name).glob(f"{commit[:8]}-existing-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        if (found["commit_hash"], found["python"], found["requirements"]) == (commit, python, wanted):
            return file
    return None


def _results_dir(config: Path) -> Path:
    return (config.resolve().parent / str(_settings(config).get("results_dir", "results"))).resolve()


def _settings(config: Path) -> dict[str, Any]:
    import json5  # asv reads its configuration with it, comments and all

    settings: dict[str, Any] = json5.loads(config.read_text(encoding="utf-8"))
    return settings


def _stored(file: Path, *, version: str | None = None) -> dict[tuple[str, str], list[float]]:
    """Samples of every number in one of asv's result files, by metric and case key; empty where it keeps none.

    version: asv pools no others with those of this one, so that others count as none.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    columns = found["result_columns"]
    stored: dict[tuple[str, str], list[float]] = {}
    for benchmark, cells in found["results"].items():
        entry = dict(zip(columns, cells, strict=False))
        metric = benchmark.rpartition(".track_")[2]
        numbers = entry["result"] or ()
        pooled = version is None or entry["version"] == version
        samples = (entry.get("samples") if pooled else None) or [None] * len(numbers)
        for key, value, kept in zip(entry["params"][0], numbers, samples, strict=False):
            if value is not None and not math.isnan(value):
                stored[metric, ast.literal_eval(key)] = kept or []
    return stored


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL:])
