"""Length limit of product functions; ruff bounds complexity, statements and parameters."""

import ast
import tomllib

MAX_LINES = 60


def long_functions(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := node.end_lineno - node.lineno + 1) > MAX_LINES:
            yield f"{path.name}: {node.name} ({lines} lines)"


def test_functions_have_at_most_sixty_lines(repository):
    packages = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    paths = [path for package in packages for path in repository.joinpath(*package.split(".")[1:]).glob("*.py")]
    assert len(paths) > 100
    assert [function for path in paths for function in long_functions(path)] == []


def test_long_function_is_detected(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("class A:\n    def short(self): pass\n\n    def long(self):\n" + "        x = 1\n" * MAX_LINES)
    assert list(long_functions(path)) == [f"module.py: long ({MAX_LINES + 1} lines)"]
