"""Nothing decides by a framework's name outside its backend or its row of a table."""

import ast
import re
import tomllib

ALLOWED = {
    "core/plugins.py": "the rows of backends and of what downloads data: names, packages, how to install them",
    "core/suggestions.py": "what people call frameworks and their options when they mean ours",
    "checkpoint/initial_weights.py": "a file format of torch, and the process that reads it",
    "core/job.py": "help texts: whose formulas the update rules are, and what a model may be",
    "recorder/__init__.py": "whose models it records, by adapters that look for a framework that is loaded",
    "recorder/keras_models.py": "the adapter of a framework",
    "recorder/torch_modules.py": "the adapter of a framework",
    "data/sources/arrays/python_datasets.py": "the name of a kind of data, as users call it",
    "data/sources/mnist.py": "a description that users read",
    "data/sources/cifar10.py": "a description that users read",
    "data/sources/svhn.py": "a description that users read",
}
"""Files outside a framework's folders that may name a framework, with the reason."""

NAMES_ONE = re.compile(r"\b(tf|torch|torchvision|tensorflow|keras|pytorch|cuda)\b", re.IGNORECASE)


def texts(tree):
    """Yield the string constants of a module, without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_no_other_file_names_a_framework(repository):
    files = set()
    for package in tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]:
        for path in repository.joinpath(*package.split(".")[1:]).glob("*.py"):
            name = path.relative_to(repository).as_posix()
            if not name.startswith(("backends/", "models/")) and any(map(NAMES_ONE.search, texts(ast.parse(path.read_text())))):
                files.add(name)
    assert files == set(ALLOWED)
