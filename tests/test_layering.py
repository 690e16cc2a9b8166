"""The layers that the docstring of the package lists, held by reading every import, and by running."""

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from factories import curve_results, record

import harness
from harness import record as records

PACKAGE = Path(harness.__file__).parent
ROOT = PACKAGE.parent

# What is imported from outside, and by which modules alone. (Packages of the table stand for their modules.)
FOREIGN = {
    "torch": {"backends", "workloads", "experiments", "board", "ranks", "launching"},
    "pynvml": {"telemetry"},
    "matplotlib": {"figures"},
    "click": {"cli"},
    "rich": {"cli", "tables", "progress", "timeline", "contest"},
    "jinja2": {"report"},
    "asv": {"asv_plugin", "steps"},
    "numpy": {
        "statistics", "modality", "theory", "spreads", "evidence", "contrast", "doubts", "metrics", "figures", "sides",
        "comparison", "noise", "workloads",
    },
    "scipy": {"statistics", "theory", "spreads"},
    "PIL": {"workloads"},
}  # fmt: skip

# Children that talk to their parent over standard output.
CHILDREN = {"nvml_sampler"}

# Modules that need torch to be imported at all, and those that need asv.
WITH_TORCH = {"backends.cpu", "backends.cuda", "backends.kernels", "backends.tensors"}
WITH_TORCH |= {"workloads.h2d", "controls", "worker"}
WITH_TORCH |= {"experiments.bench", "experiments.races", "experiments.times", "experiments.__main__"}
WITH_TORCH |= {"board", "ranks", "launching", "following"}
WITH_TORCH |= {
    f"workloads.{name}"
    for name in ("collectives", "ddp", "gradients", "hooks", "models", "refusals", "replay")
}
WITH_TORCH |= {"workloads.batching", "workloads.samples"}
WITH_TORCH |= {f"workloads.feed{part}" for part in ("", "_batch", "_data", "_loader", "_steps")}
WITH_ASV = {"asv_plugin"}


def modules() -> dict[str, Path]:
    """Every module by its name inside the package; a package by the package's name, harness itself by ``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layers(docstring: str) -> dict[str, int]:
    """The layer of every name in the table of the docstring, the lowest 0."""
    rows = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  +\S", docstring, re.MULTILINE)
    names = [(name, at) for at, row in enumerate(rows) for name in row.split(", ")]
    assert len(names) == len(dict(names)), "a module stands in two layers"
    return dict(names)


LAYERS = layers(harness.__doc__ or "")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, inside functions too, but not what only a type checker sees."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *statements(other))
            continue
        yield child
        yield from statements(child)


def imports(source: str, module: str, *, package: bool = False) -> set[str]:
    """Full names of the modules that `source`, the text of harness.`module`, imports anywhere.

    `from harness import x` names harness.x where that is a module, else harness, and so on further down.
    """
    found = set()
    here = ["harness", *filter(None, module.split("."))]
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = here[: len(here) - node.level + package]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner.removeprefix("harness.") in MODULES else base)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found


@cache
def imported_by(module: str) -> set[str]:
    path = MODULES[module]
    return imports(path.read_text(), module, package=path.name == "__init__.py")


def inside(names: set[str]) -> set[str]:
    """Those of harness, by their names inside the package."""
    return {
        name.removeprefix("harness").removeprefix(".") for name in names if name.split(".")[0] == "harness"
    }


def layer(module: str) -> int:
    """harness itself is below all layers: it imports nothing and anything may ask it for its version."""
    return LAYERS[module.split(".")[0]] if module else -1


def test_every_import_is_seen():
    source = """
import harness, os.path
from harness import record as records, METHOD_VERSION
from harness.backends import cpu, get_backend
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from harness import cli
else:
    import json
def later():
    import importlib
    from .figures import text
    importlib.import_module("pynvml")
"""
    assert imports(source, "case") == {
        "harness", "os.path", "harness.record", "harness.backends.cpu", "harness.backends", "typing", "json",
        "importlib", "harness.figures", "pynvml",
    }  # fmt: skip
    assert imports("from . import base\nfrom ..case import Case", "backends", package=True) == {
        "harness.backends.base",
        "harness.case",
    }


def test_the_table_is_read():
    table = "Words::\n\n    errors, sizes   low  things\n    cli             the top\n"
    assert layers(table) == {"errors": 0, "sizes": 0, "cli": 1}
    assert len(set(LAYERS.values())) > 10


def test_every_module_stands_in_the_table_and_nothing_else_does():
    assert {module.split(".")[0] for module in MODULES if module} == set(LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_from_their_own_or_lower_layers_only(module):
    higher = {name for name in inside(imported_by(module)) if layer(name) > layer(module)}
    assert not higher, f"{module or 'harness'} imports {sorted(higher)} from higher layers"


@pytest.mark.parametrize("package", FOREIGN)
def test_a_foreign_package_is_imported_where_it_lives_alone(package):
    users = {
        module for module in MODULES if any(name.split(".")[0] == package for name in imported_by(module))
    }
    allowed = FOREIGN[package]
    assert {user for user in users if user.split(".")[0] not in allowed} == set()
    assert allowed <= {user.split(".")[0] for user in users}, f"{package}: nobody there needs it any more"


def test_no_import_cycles():
    graph = {module: inside(imported_by(module)) - {""} for module in MODULES}
    while free := {module for module, needs in graph.items() if not needs & graph.keys()}:
        graph = {module: needs for module, needs in graph.items() if module not in free}
    assert not graph, f"in or above a cycle: {sorted(graph)}"


def outside_of_the_command_line(source: str) -> list[str]:
    """Calls that print, ask or exit, save under `if __name__ == "__main__"`."""
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
    ]
    words = {"print", "input", "exit", "quit", "breakpoint", "sys.exit", "os._exit", "SystemExit"}
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in words
    ]  # fmt: skip


def test_only_the_command_line_prints_asks_and_exits():
    assert outside_of_the_command_line("def f():\n    print(1)\n    raise SystemExit(2)") == [
        "print(1)",
        "SystemExit(2)",
    ]
    assert outside_of_the_command_line("if __name__ == '__main__':\n    sys.exit(main())") == []
    loud = {
        module: calls
        for module, path in MODULES.items()
        if module.split(".")[0] != "cli" and (calls := outside_of_the_command_line(path.read_text()))
    }
    assert not loud


def test_only_the_command_line_and_children_touch_standard_output():
    users = {
        module for module, path in MODULES.items() if re.search(r"sys\.std(out|err)\b", path.read_text())
    }
    assert {module for module in users if module.split(".")[0] != "cli"} <= CHILDREN


def python(code: str, *args: str) -> str:
    """What a fresh interpreter prints; it must end well and print nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_command_line_starts_without_heavy_imports():
    heavy = {"torch", "numpy", "scipy", "rich", "matplotlib", "pynvml", "jinja2", "asv", "msgspec"}
    loaded = python("import sys, harness.cli; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "click" in loaded
    assert heavy & set(loaded) == set()


def test_reading_a_record_needs_no_torch_and_nothing_to_draw_or_count_with(tmp_path):
    path = tmp_path / "a.json"
    records.write(path, record(*curve_results(rounds=10)))
    code = """
import sys
from pathlib import Path
from harness import record
print(len(record.read(Path(sys.argv[1])).cases), *{name.split(".")[0] for name in sys.modules})
"""
    count, *loaded = python(code, str(path)).split()
    assert count == "7"
    assert {"torch", "numpy", "scipy", "rich", "matplotlib", "pynvml"} & set(loaded) == set()


def test_all_but_measuring_works_where_torch_is_missing(tmp_path):
    """Records, statistics, tables and the report are for machines without torch too."""
    path, page = tmp_path / "a.json", tmp_path / "a.html"
    records.write(path, record(*curve_results(rounds=10)))
    plain = sorted(
        f"harness.{name}"
        for name in MODULES.keys()
        - WITH_TORCH
        - WITH_ASV
        - {"", "__main__", "figures", "exposure_figure", "loader_figure", "history_figure", "report"}
    )
    code = """
import importlib, sys
sys.modules["torch"] = None  # importing it fails
from harness.cli import cli
path, page, *plain = sys.argv[1:]
for name in plain:
    importlib.import_module(name)
print(*{"matplotlib", "pynvml", "jinja2", "asv"} & sys.modules.keys())
for command in (["show", path], ["report", path, "--output", page]):
    cli.main(command, standalone_mode=False)
"""
    first, *rest = python(code, str(path), str(page), *plain).splitlines()
    assert first == "", "only figures, reports and telemetry's first reading load these"
    assert "cases: 7 (7 ok)" in rest
    assert page.read_text().lower().startswith("<!doctype html")


def test_help_is_quick():
    """The best of five, so that whatever else the machine does is left out."""
    took = []
    for _ in range(5):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "harness", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        took.append(time.monotonic() - began)
        if took[-1] <= 0.3:
            break
    assert "doctor" in done.stdout
    assert min(took) <= 0.3
