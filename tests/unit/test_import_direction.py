"""Imports go in one direction, and a framework is imported only in its adapter."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict

import pytest

from crosstrain.core.plugins import available

FRAMEWORKS = {"tensorflow": "tf", "keras": "keras", "torch": "torch", "torchvision": "torch", "functorch": "torch", "ray": "ray"}

OWN_PROCESS = {
    "data/sources/download.py": {"torchvision"},
    "launch/launchers/ray_client.py": {"ray"},
    "launch/launchers/ray_node_holder.py": {"ray"},
}
"""Modules that run in a separate process and may import a framework's package there."""


def packages(repository):
    """Return the packages of pyproject.toml in order: a folder imports only earlier ones.

    Left out is the root, which imports names at their first use.
    """
    return tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"][1:]


@pytest.fixture(scope="module")
def sources(repository):
    """Return every source file of the packages: its relative path and the modules it imports."""
    modules_by_path = {}
    for package in packages(repository):
        folder = package.split(".")[1:]
        for path in sorted(repository.joinpath(*folder).glob("*.py")):
            modules_by_path[path.relative_to(repository).as_posix()] = set(imported(path, ["crosstrain", *folder]))
    assert len(modules_by_path) > 20
    return modules_by_path


def imported(path, package):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files_imported(sources):
    """Return the files that each file imports; for a mere folder its ``__init__.py``."""
    modules = {"crosstrain." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    files = {}
    for path, names in sources.items():
        longest = {
            name for name in names if name in modules and not any(longer.startswith(f"{name}.") and longer in modules for longer in names)
        }
        files[path] = {modules[name] for name in longest} - {path}
    return files


def cycles_in(arrows):
    """Return every set of several nodes that all reach each other.

    These are Tarjan's strongly connected components.
    """
    numbers, lowest, stack, cycles = {}, {}, [], []

    def visit(node):
        numbers[node] = lowest[node] = len(numbers)
        stack.append(node)
        for target in sorted(arrows.get(node, ())):
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == numbers[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                cycles.append(sorted(component))

    for node in sorted(arrows):
        if node not in numbers:
            visit(node)
    return cycles


def package_folder(path):
    return path.rpartition("/")[0]


def test_folder_imports_only_earlier_folders(repository, sources):
    order = list(dict.fromkeys(package.split(".")[1] for package in packages(repository)))
    wrong = []
    for path, modules in sources.items():
        folder = path.split("/")[0]
        for module in modules:
            parts = module.split(".")
            if parts[0] != "crosstrain" or len(parts) < 2 or parts[1] == folder:
                continue
            if parts[1] not in order[: order.index(folder)]:
                wrong.append(f"{path} imports {module}")
    assert wrong == []


def test_files_have_no_import_cycle(sources):
    assert cycles_in(files_imported(sources)) == []


def test_subfolders_import_in_one_direction(sources):
    """An ``__init__.py`` may import later folders lazily."""
    arrows = defaultdict(set)
    for path, targets in files_imported(sources).items():
        if not path.endswith("/__init__.py"):
            arrows[package_folder(path)] |= {package_folder(target) for target in targets if not target.endswith("/__init__.py")} - {
                package_folder(path)
            }
    assert cycles_in(arrows) == []


def test_packages_are_the_existing_folders(repository):
    tops = {package.split(".")[1] for package in packages(repository)}
    folders = {path.parent for top in tops for path in repository.joinpath(top).rglob("*.py")}
    assert {"crosstrain." + ".".join(path.relative_to(repository).parts) for path in folders} == set(packages(repository))
    assert {path.parent.name for path in repository.glob("*/py.typed")} == tops


def tree(repository):
    """Return the packages with the first sentence of each ``__init__.py``, as in the docs."""
    models = {f"crosstrain.models.{name}" for name in available("model")}
    rows = []
    for package in packages(repository):
        if package not in models:
            _, *folder = package.split(".")
            docstring = ast.get_docstring(ast.parse(repository.joinpath(*folder, "__init__.py").read_text(encoding="utf-8")))
            rows.append(("  " * (len(folder) - 1) + folder[-1], docstring.partition("\n")[0].removesuffix(".")))
    return "\n".join(f"{name:<20}{says}" for name, says in rows)


def test_documented_tree_equals_packages(repository):
    assert tree(repository) in (repository / "docs/architecture.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_modules_of_the_guides_can_be_imported(repository):
    """Modules that third-party models, datasets and backends import, before either framework."""
    guides = "\n".join(path.read_text(encoding="utf-8") for path in repository.glob("docs/*.md"))
    modules = sorted(set(re.findall(r"^ *from crosstrain[.]([\w.]+) import", guides, re.MULTILINE)))
    modules = [module for module in modules if not {"tf", "torch"} & set(module.split("."))]
    assert len(modules) > 20
    script = f"import importlib\nfor name in {modules}: importlib.import_module(f'crosstrain.{{name}}')\n"
    framework = "from crosstrain.models.layers.{} import Layers\n"
    for more in (framework.format("tf"), framework.format("torch")):
        done = subprocess.run([sys.executable, "-c", script + more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_import_cycles_are_detected():
    assert cycles_in({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert cycles_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_reports_import_no_other_packages(sources):
    allowed = {"core", "metrics", "records", "report"}
    wrong = [
        f"{path} imports {module}"
        for path, modules in sources.items()
        for module in modules
        if path.startswith("report/") and module.startswith("crosstrain.") and module.split(".")[1] not in allowed
    ]
    assert wrong == []


def adapter_backend(path):
    """Return the backend whose framework the file may import."""
    parts = path.removesuffix(".py").split("/")
    if len(parts) < 3 or parts[0] not in {"backends", "models"}:
        return None
    name = parts[1] if parts[0] == "backends" else parts[2]
    return name if name in FRAMEWORKS.values() else None


def test_framework_is_imported_only_in_its_adapter(sources):
    wrong = [
        f"{path} imports {module}"
        for path, modules in sources.items()
        for module in modules
        if (framework := module.split(".")[0]) in FRAMEWORKS
        and adapter_backend(path) != FRAMEWORKS[framework]
        and framework not in OWN_PROCESS.get(path, set())
    ]
    assert wrong == []


def test_only_adapters_load_a_framework(sources):
    """All in one process, with backend packages, since the driver looks up backends."""
    modules = []
    for path in sources:
        if path in OWN_PROCESS or (adapter_backend(path) and not path.endswith("/__init__.py")):
            continue
        modules.append("crosstrain." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    script = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(sorted({set(FRAMEWORKS)} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_rules_detect_every_way_to_import(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import torch.nn as nn\ndef f():\n    from ..engine import loop\n    from . import base\n    from ...core.job import Job\n"
    )
    assert set(imported(path, ["crosstrain", "models", "logreg"])) == {
        "torch.nn",
        "crosstrain.models.engine",
        "crosstrain.models.engine.loop",
        "crosstrain.models.logreg",
        "crosstrain.models.logreg.base",
        "crosstrain.core.job",
        "crosstrain.core.job.Job",
    }
