"""What asv must be told about this project; asv loads it itself (`plugins` in asv.conf.json).

asv left alone writes the path of an existing environment's interpreter into file names and fields, files a
record under any commit it is given, knows no GPU, and tells a reader only the index of its case in a list that
another commit may order otherwise. Each `_mend` below changes one of these. asv has no hook for them, so they
wrap asv's own functions: asv is pinned below 0.7, and tests/test_asv_store.py runs it.

Only the standard library and asv are imported at the top: asv may live in an environment of its own.
"""

import atexit
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from asv import environment, machine, util
from asv.benchmarks import Benchmarks
from asv.commands.run import Run
from asv.repo import NoSuchNameError, get_repo

# Read by harness/asv_suite.py, in the processes that asv starts.
RECORD = "OVERLAP_RECORD"
KEPT = "OVERLAP_RESULTS"
ACCEPT_DIRTY = "OVERLAP_ACCEPT_DIRTY"
RESULTS = "OVERLAP_ASV_RESULTS"
CASES = "OVERLAP_ASV_CASES"
REPO = "OVERLAP_ASV_REPO"
BY = "OVERLAP_ASV_BY"
COMMIT = "ASV_COMMIT"

# What decides the numbers that a checkout of this project gives; benchmarks/ is taken from the working tree for every
# commit. In another repository, with commits of its own, all of it may.
MEASURED = ("harness", "pyproject.toml")

# A configuration says with this word of its own what the commits of its repository are: `torch` for PyTorch's.
BY_TORCH = "torch"

# As `torch.__version__`, which names the CUDA build too, but without the seconds that importing torch takes.
_IDENTITY = """
import importlib.util, pathlib, runpy, sys
spec = importlib.util.find_spec("torch")
file = pathlib.Path(spec.submodule_search_locations[0], "version.py") if spec else None
torch = runpy.run_path(str(file)) if file and file.is_file() else {}
print("%d.%d" % sys.version_info[:2])
print(torch.get("__version__") or "")
print(torch.get("cuda") or "")
"""


def setup() -> None:
    """Called by asv when it has loaded this module, once for each command."""
    make_absolute(os.environ)
    if not getattr(Run, "_overlap", False):
        Run._overlap = True
        _mend_environment_names()
        _mend_machines()
        _mend_case_lists()
        _mend_commits()


def make_absolute(variables: MutableMapping[str, str]) -> None:
    """Paths of the user's, which are relative to where asv was started: its readers start in folders of their own."""
    for name in (RECORD, KEPT):
        if given := variables.get(name):
            variables[name] = os.path.abspath(given)


def identity(record: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Python (`3.12`) and the versions, as far as known, of torch and CUDA that a record was measured with."""
    software = record.get("software") or {}
    python = ".".join(str(software.get("python", "")).split(".")[:2])
    return python, {name: str(software[name]) for name in ("torch", "cuda") if software.get(name)}


def by(conf: Any) -> str:
    """What the commits are that asv files by; empty for those of the code that measures."""
    told = getattr(conf, "overlap_by", "")
    if told not in ("", BY_TORCH):
        raise util.UserError(f"overlap_by: got {told!r} in asv's configuration, want {BY_TORCH!r} or nothing")
    return str(told)


def commit_of(record: Mapping[str, Any], by: str) -> str:
    """The commit that a record belongs to."""
    if by == BY_TORCH:
        return str((record.get("software") or {}).get("torch_git"))
    return str(record["run"].get("commit"))


def facts(record: Mapping[str, Any]) -> dict[str, str]:
    """The machine of a record as asv keeps it. asv starts a new series whenever one of these changes.

    So only what stays from night to night: no driver and no kernel. `ram` is left to the user's own file: what
    the kernel tells changes with it, and grows while in use on some virtual machines.
    """
    found = record["machine"]
    cpu, gpu = found.get("cpu") or {}, found.get("gpu") or {}
    described = {
        "machine": found["name"],
        "os": (record.get("software") or {}).get("system"),
        "arch": cpu.get("architecture"),
        "cpu": cpu.get("model"),
        "num_cpu": cpu.get("cores"),
        "ram": None,
        "gpu": gpu.get("name"),
    }
    return {name: "" if value is None else str(value) for name, value in described.items()}


def _mend_environment_names() -> None:
    """An existing environment is called by its Python and its torch, the way asv's own environments are."""
    existing = environment.ExistingEnvironment
    original, original_run = existing.__init__, existing.run

    def init(self: Any, conf: Any, executable: str, requirements: Any, tagged_env_vars: Any) -> None:
        original(self, conf, executable, requirements, tagged_env_vars)
        record = _record()
        if record is None:
            printed = util.check_output([self._executable, "-c", _IDENTITY])
            python, torch, cuda = printed.splitlines()[:3]
            versions = {"torch": torch, "cuda": cuda}
        else:
            python, versions = identity(record)
        # Where the commits are torch's, its version is what moves: CUDA's is what must stay.
        name = "cuda" if by(conf) == BY_TORCH else "torch"
        self._python = python
        self._requirements = {name: versions[name]} if versions.get(name) else {}

    def run(self: Any, args: Any, **others: Any) -> Any:
        # asv's own script drops PYTHONPATH, by which a package that is not installed there may be found.
        env = dict(others.pop("env", os.environ))
        if "PYTHONPATH" in env:
            env.setdefault("ASV_PYTHONPATH", env["PYTHONPATH"])
        return original_run(self, args, env=env, **others)

    existing.__init__ = init
    existing.run = run
    existing.name = property(
        lambda self: environment.get_env_name(
            self.tool_name, self._python, self._requirements, self._tagged_env_vars
        )
    )


def _mend_machines() -> None:
    """The machine's facts come from the record, else from the machine; ~/.asv-machine.json is read, not
    written.

    What a person has put there for this machine wins. `asv machine` itself is left as it is.
    """
    original = machine.Machine.load.__func__

    def load(
        cls: Any,
        /,
        interactive: bool = False,
        force_interactive: bool = False,
        _path: str | None = None,
        machine_name: str | None = None,
        **others: Any,
    ) -> Any:
        if force_interactive or not interactive:
            return original(cls, interactive, force_interactive, _path, machine_name, **others)
        path = _path or machine.MachineCollection.get_machine_file_path()
        known = util.load_json(path) if os.path.isfile(path) else {}
        known.pop("version", None)
        described = _machine_facts()
        if machine_name is None:
            host = machine.Machine.get_unique_machine_name()
            # As asv chooses; but where it would fall back on the host's name, which may be new every night.
            names = [host] if host in known else list(known)
            if len(names) == 1:
                machine_name = names[0]
            elif described is not None:
                machine_name = described["machine"]
        if described is None:
            return original(cls, interactive, force_interactive, _path, machine_name, **others)
        entry = {**described, **known.get(machine_name, {}), "machine": machine_name}
        private = _private_folder() / "machine.json"
        util.write_json(str(private), {machine_name: entry}, machine.MachineCollection.api_version)
        return original(cls, False, False, str(private), machine_name, **others)

    machine.Machine.load = classmethod(load)


def _mend_case_lists() -> None:
    """Every reader of this command gets the very list of cases that asv numbered, whatever its own commit
    has."""
    original = Benchmarks.discover.__func__
    read = Benchmarks._disc_benchmarks.__func__

    def with_cases(cls: Any, /, *args: Any) -> list[Any]:
        """Without the readers of a family that has no case here: there is nothing that they could be asked."""
        return [each for each in read(cls, *args) if each["params"] != [[]]]

    def discover(cls: Any, /, conf: Any, *args: Any, **kwargs: Any) -> Any:
        os.environ[RESULTS] = os.path.abspath(conf.results_dir)
        os.environ.pop(REPO, None)
        if os.path.isdir(conf.repo):
            os.environ[REPO] = os.path.abspath(conf.repo)
        os.environ.pop(CASES, None)
        found = original(cls, conf, *args, **kwargs)
        frozen = {
            name: {field: each[field] for field in ("params", "param_names", "version")}
            for name, each in found.items()
        }
        path = _private_folder() / "cases.json"
        path.write_text(json.dumps(frozen))
        os.environ[CASES] = str(path)
        return found

    Benchmarks.discover = classmethod(discover)
    Benchmarks._disc_benchmarks = classmethod(with_cases)


def _mend_commits() -> None:
    """`asv run` files nothing under a commit, or a machine, that it does not belong to."""
    original = Run.run.__func__

    def run(cls: Any, /, conf: Any, **options: Any) -> Any:
        environments = list(environment.get_environments(conf, options.get("env_spec"), verbose=False))
        existing = bool(environments) and environment.is_existing_only(environments)
        record = _record()
        told = options.get("set_commit_hash")
        os.environ.pop(COMMIT, None)
        os.environ[BY] = by(conf)
        if options.get("bench") != ["just-discover"]:
            if record is not None:
                options["machine"] = _checked_machine(record, options.get("machine"))
                if not existing or told is None:
                    raise util.UserError(
                        f"{RECORD} is set: asv then needs --python=same and "
                        f"--set-commit-hash={commit_of(record, by(conf))}"
                    )
            if existing and told is not None:
                commit = _resolve(conf, told)
                if record is not None:
                    _check_commit(record, commit, by(conf))
                elif not by(conf):
                    _check_tree(conf, commit)
                os.environ[COMMIT] = options["set_commit_hash"] = commit
        return original(cls, conf, **options)

    Run.run = classmethod(run)


def _checked_machine(record: Mapping[str, Any], told: str | None) -> str:
    name = str(record["machine"]["name"])
    if told not in (None, name):
        raise util.UserError(f"the record was measured on machine {name!r}, asv was given --machine {told!r}")
    return name


def _resolve(conf: Any, name: str) -> str:
    try:
        return str(get_repo(conf).get_hash_from_name(name))
    except NoSuchNameError:
        raise util.UserError(f"--set-commit-hash: this repository has no commit {name!r}") from None


def _check_commit(record: Mapping[str, Any], commit: str, by: str) -> None:
    measured = commit_of(record, by)
    if not commit.startswith(measured):
        of = "with torch at" if by == BY_TORCH else "at"
        raise util.UserError(f"the record was measured {of} commit {measured}, asv was given {commit}")
    if record["run"].get("dirty") and not _accepts_dirty():
        raise util.UserError(
            f"the record was measured with uncommitted changes on top of {commit_of(record, '')[:8]}, which asv cannot "
            f"say; set {ACCEPT_DIRTY}=1 to file it there all the same"
        )


def _check_tree(conf: Any, commit: str) -> None:
    """Measuring here and now: the tree's code must be the commit's."""
    if not os.path.isdir(conf.repo) or _accepts_dirty():
        return
    command = ["git", "diff", "--name-only", commit, "--", *_measured(conf)]
    changed = subprocess.run(
        command, cwd=conf.repo, capture_output=True, text=True, check=False
    ).stdout.split()
    if changed:
        raise util.UserError(
            f"the working tree differs from {commit[:8]} in {', '.join(changed[:3])}"
            f"{' and more' if len(changed) > 3 else ''}, so the numbers would not be that commit's: commit "
            f"first, or set {ACCEPT_DIRTY}=1 (when the installed package is that commit, say)"
        )


def _measured(conf: Any) -> tuple[str, ...]:
    """The pathspecs of what may decide the numbers."""
    if (Path(conf.repo) / "harness" / "asv_plugin.py").is_file():
        return MEASURED
    beside = (os.path.relpath(folder, conf.repo) for folder in (conf.benchmark_dir, conf.results_dir))
    return (".", *(f":(exclude,top){folder}" for folder in beside))


def _accepts_dirty() -> bool:
    return os.environ.get(ACCEPT_DIRTY) == "1"


def _machine_facts() -> dict[str, str] | None:
    """Of the record, else of this machine; None where asv's own environment lacks what detection needs."""
    record = _record()
    if record is not None:
        return facts(record)
    try:
        import msgspec

        from harness import machine as machines
        from harness.profiles import profile_for
    except ImportError:
        return None
    device = machines.detect("auto")
    name = machines.default_machine_name(device, profile_for(device.kind, device.name).name)
    found = msgspec.to_builtins(machines.identity(device, name))
    return facts({"machine": found, "software": {"system": platform.system()}})


@cache
def _read(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        if not isinstance(record["run"]["commit"], str) or not isinstance(record["machine"]["name"], str):
            raise TypeError
    except OSError as error:
        raise util.UserError(f"{RECORD}: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise util.UserError(f"{RECORD}: {path} is not a record of `overlap run`") from None
    return dict(record)


def _record() -> Mapping[str, Any] | None:
    path = os.environ.get(RECORD)
    return _read(path) if path else None


@cache
def _private_folder() -> Path:
    """A folder of this command's own; asv's readers inherit its path."""
    folder = tempfile.mkdtemp(prefix="overlap-asv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
