"""Child processes never import modules from the working directory.

Which interpreter is first on the path is the user's choice, never the folder's.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from model_checkpoints import save_model

TOY = Path(__file__).parent.parent / "toy"

SCRIPT = [sys.executable, "-P", "-m", "crosstrain.cli.main"]
"""As the command ``trainer`` is started: with the folder of the scripts, not the working directory, first on the path."""

PLANTED = sorted({name for name in sys.stdlib_module_names if not name.startswith("_")} | {"numpy", "click", "pydantic", "crosstrain_toy"})


@pytest.fixture
def hostile(tmp_path):
    """Create a folder whose modules shadow the standard library and record their execution."""
    folder, mark = tmp_path / "hostile", tmp_path / "executed.txt"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name + ' '!r})\nraise ImportError('not the real {name}')\n")
    return folder


def type_in(folder, *arguments, started=SCRIPT, **variables):
    environment = {**os.environ, "PYTHONPATH": str(TOY), **variables}
    command = [*started, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def executed(folder):
    mark = folder.parent / "executed.txt"
    return mark.read_text() if mark.exists() else ""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--backend", "toy", "--nodes", "2", "--network", "host", "--steps", "4", "--name", "one"],
        ["run", "--backend", "toy", "--steps", "2", "--repeats", "2", "--name", "two"],
        ["sweep", "--grid", "seed=1,2", "--backend", "toy", "--steps", "2", "--name", "three"],
    ],
    ids=lambda arguments: arguments[0] + ("-repeats" if "--repeats" in arguments else ""),
)
def test_run_executes_nothing_of_working_directory(hostile, arguments):
    done = type_in(hostile, *arguments)
    assert (executed(hostile), done.returncode) == ("", 0), done.stderr


@pytest.mark.thorough
def test_backend_probe_executes_nothing_of_working_directory(hostile):
    done = type_in(hostile, "backends", "--json")
    problems = {backend["name"]: backend["problem"] for backend in json.loads(done.stdout)}
    assert executed(hostile) == ""
    assert not any(problem and "not the real" in problem for problem in problems.values())
    assert problems["toy"] is None


def test_export_executes_nothing_of_working_directory(hostile, tmp_path):
    save_model(tmp_path / "run", "logreg", (1, 8, 8))
    done = type_in(hostile, "export", tmp_path / "run", "--format", "safetensors")
    assert (executed(hostile), done.returncode) == ("", 0), done.stderr


def test_module_as_command_ignores_working_directory(hostile):
    for name in set(PLANTED) - {"queue", "json", "click", "numpy"}:
        (hostile / f"{name}.py").unlink()  # python -m itself imports some before any line of ours
    done = type_in(hostile, "run", "--print-config", started=[sys.executable, "-m", "crosstrain.cli.main"])
    assert (executed(hostile), done.returncode) == ("", 0), done.stderr


def test_python_is_started_only_in_process_module(repository):
    """Only `core/process.py` knows the interpreter; other code gets the command from it."""
    packages = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    lines_by_file = {}
    for package in packages:
        for path in sorted(repository.joinpath(*package.split(".")[1:]).glob("*.py")):
            if knows := list(interpreters(path.read_text(encoding="utf-8"))):
                lines_by_file[path.relative_to(repository).as_posix()] = knows
    assert set(lines_by_file) == {"core/process.py"}


def interpreters(source):
    """Yield lines that name the interpreter, or start a program called python."""
    for node in ast.walk(ast.parse(source)):
        by_attribute = isinstance(node, ast.Attribute) and node.attr in {"executable", "_base_executable"}
        by_import = isinstance(node, ast.ImportFrom) and node.module == "sys" and any("executable" in name.name for name in node.names)
        listed = isinstance(node, ast.List | ast.Tuple) and node.elts
        by_name = listed and isinstance(node.elts[0], ast.Constant) and str(node.elts[0].value).startswith("python")
        if by_attribute or by_import or by_name:
            yield node.lineno


def test_rule_detects_every_way_to_start_python():
    for source in ("import sys\nx = [sys.executable, '-c', '']", "from sys import executable", "run(['python3', 'x.py'])"):
        assert list(interpreters(source))
    assert not list(interpreters("x = ['ip', 'link']\n'python'"))
