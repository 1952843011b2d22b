"""Imports run one way, and a framework is imported only in its adapter."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict

import pytest

from crosstrain.core.plugins import available

ORDER = [
    "core",
    "metrics",
    "records",
    "monitor",
    "data",
    "models",
    "checkpoint",
    "exchange",
    "backends",
    "engine",
    "launch",
    "report",
    "conformance",
    "cli",
]
"""A folder imports only folders that stand before it. `configs` holds files alone."""

FRAMEWORKS = {"tensorflow": "tf", "keras": "tf", "torch": "torch", "torchvision": "torch", "functorch": "torch", "ray": "ray"}

OWN_PROCESS = {
    "data/sources/torchvision_download.py": {"torchvision"},
    "launch/ray_cluster/client.py": {"ray"},
    "launch/ray_cluster/node_holder.py": {"ray"},
}
"""Modules that run in a process of their own and may import a framework's package there."""

MOST_FILES = 14
"""In a room, beside its ``__init__.py``; a room with more of them answers more than one question."""

ONE_A_SUBCOMMAND = "cli/commands"


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


def files_imported(sources):
    """Return for each file the other files that it imports: a room's ``__init__.py`` where that alone is named."""
    modules = {"crosstrain." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    found = {}
    for path, names in sources.items():
        longest = {
            name for name in names if name in modules and not any(other.startswith(f"{name}.") and other in modules for other in names)
        }
        found[path] = {modules[name] for name in longest} - {path}
    return found


def circles(arrows):
    """Return every set of more than one node that all reach each other (Tarjan's strongly connected components)."""
    numbers, lowest, stack, found = {}, {}, [], []

    def visit(node):
        numbers[node] = lowest[node] = len(numbers)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in numbers:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == numbers[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(arrows):
        if node not in numbers:
            visit(node)
    return found


def room_of(path):
    return path.rpartition("/")[0]


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


def test_no_circle_of_files_exists(sources):
    assert circles(files_imported(sources)) == []


def test_rooms_of_a_folder_import_one_way(sources):
    """An ``__init__.py`` is the door of its room and may load the rooms behind it when it is asked for something."""
    arrows = defaultdict(set)
    for path, others in files_imported(sources).items():
        if not path.endswith("/__init__.py"):
            arrows[room_of(path)] |= {room_of(other) for other in others if not other.endswith("/__init__.py")} - {room_of(path)}
    assert circles(arrows) == []


def test_a_room_is_small_and_says_what_is_in_it(repository, sources):
    rooms = defaultdict(set)
    for path in sources:
        rooms[room_of(path)].add(path)
    crowded = {room: len(files) - 1 for room, files in rooms.items() if len(files) - 1 > MOST_FILES and room != ONE_A_SUBCOMMAND}
    assert crowded == {}
    for room, files in rooms.items():
        assert f"{room}/__init__.py" in files
        assert (repository / room / "py.typed").exists(), room


def test_a_room_begins_with_the_question_that_it_answers(repository, sources):
    """A question may stand before its answer; the first sentence of the docstring is the question.

    A model's folder begins with what `trainer models` says of it.
    """
    no_question = {}
    for room in {room_of(path) for path in sources} - {f"models/{name}" for name in available("model")}:
        docstring = ast.get_docstring(ast.parse((repository / room / "__init__.py").read_text(encoding="utf-8"))) or ""
        first = re.split(r"(?<=[.?!])\s", docstring, maxsplit=1)[0]
        if not first.endswith("?"):
            no_question[room] = first
    assert no_question == {}


@pytest.mark.thorough
def test_what_the_guides_import_can_be_imported(repository):
    """The places that other people's models, datasets and backends import from: all of them before either framework."""
    modules = ("data.statistics", "data.base", "data.columns", "models.base", "models.objectives", "models.layers", "metrics", "backends")
    modules += ("backends.base", "core.errors", "core.update_rules", "core.liveness.startup_watchdog", "core.untrusted.listener")
    modules += ("backends.capabilities", "backends.arrays.backend", "backends.arrays.model", "backends.vectors.update_formulas")
    modules += ("core.plugins", "models.dropout_masks", "conformance.suite", "conformance.model_suite", "conformance.launcher_suite")
    modules += ("launch.launchers.base", "launch.launchers.carrier", "launch.launchers.remote", "launch.launchers.request")
    script = f"import importlib\nfor name in {modules}: importlib.import_module(f'crosstrain.{{name}}')\n"
    framework = "from crosstrain.models.layers.{} import Layers\n"
    for more in (framework.format("tf"), framework.format("torch")):
        done = subprocess.run([sys.executable, "-c", script + more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_circles_are_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_reports_read_files_alone(sources):
    allowed = {"core", "metrics", "records", "report"}
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
