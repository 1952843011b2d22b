"""Imports run one way, and a framework is imported only in its adapter."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

ORDER = ["core", "metrics", "monitor", "data", "models", "checkpoint", "backends", "engine", "launch", "report", "conformance", "cli"]
"""A folder imports only folders that stand before it. `configs` holds files alone."""

FRAMEWORKS = {"tensorflow": "tf", "keras": "tf", "torch": "torch", "torchvision": "torch", "functorch": "torch"}

OWN_PROCESS = {"data/sources/torchvision_download.py": {"torchvision"}}
"""Modules that run in a process of their own and may import a framework's package there."""


def packages(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


@pytest.fixture(scope="module")
def sources(repository):
    """Every source file of the packages: path relative to the repository, and the absolute names of all modules it imports."""
    found = {}
    for package in packages(repository):
        folder = package.split(".")[1:]
        for path in sorted(repository.joinpath(*folder).glob("*.py")):
            found[path.relative_to(repository).as_posix()] = set(imported(path, ["crosstrain", *folder]))
    assert len(found) > 20
    return found


def imported(path, package):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_a_folder_imports_only_those_before_it(sources):
    wrong = []
    for path, modules in sources.items():
        folder = path.split("/")[0]
        for module in modules:
            parts = module.split(".")
            if parts[0] != "crosstrain" or len(parts) < 2 or parts[1] == folder:
                continue
            if folder not in ORDER or parts[1] not in ORDER[: ORDER.index(folder)]:
                wrong.append(f"{path} imports {module}")
    assert wrong == []


def test_reports_read_files_alone(sources):
    allowed = {"core", "metrics", "report"}
    wrong = [
        f"{path} imports {module}"
        for path, modules in sources.items()
        for module in modules
        if path.startswith("report/") and module.startswith("crosstrain.") and module.split(".")[1] not in allowed
    ]
    assert wrong == []


def adapter_of(path):
    """Return the backend whose framework the file may import."""
    parts = path.removesuffix(".py").split("/")
    if len(parts) < 3 or parts[0] not in {"backends", "models"}:
        return None
    name = parts[1] if parts[0] == "backends" else parts[2]
    return name if name in FRAMEWORKS.values() else None


def test_a_framework_is_imported_in_its_adapter_alone(sources):
    wrong = [
        f"{path} imports {module}"
        for path, modules in sources.items()
        for module in modules
        if (framework := module.split(".")[0]) in FRAMEWORKS
        and adapter_of(path) != FRAMEWORKS[framework]
        and framework not in OWN_PROCESS.get(path, set())
    ]
    assert wrong == []


def test_no_module_beside_the_adapters_loads_a_framework(sources):
    """Import them all in one process, the backends' packages too, since the driver looks up a backend without running it."""
    modules = []
    for path in sources:
        if path in OWN_PROCESS or (adapter_of(path) and not path.endswith("/__init__.py")):
            continue
        modules.append("crosstrain." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    script = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(sorted({set(FRAMEWORKS)} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_rules_see_every_way_to_import(tmp_path):
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
