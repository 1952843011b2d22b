"""Names, docstrings and comments of all Python files are short and in the field's words."""

import ast
import gc
import io
import re
import tokenize
import tomllib
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

FOLDERS_WITHOUT_PACKAGES = ("benchmarks", "docs", "examples", "tests")

DIALECT = {
    "told": "told",
    "said": "said",
    "anew": "anew",
    "beside": "besides?",
    "goes": "goes[ _]on",
    "set": "set[-_]ups?|setups?",
    "whoever": "whoever",
    "left": "left[- ]out",  # not left_out, a documented field of datasets and of records
    "lacks": "lacks",
    "surely": "surely",
    "alike": "alike",
    "meanwhile": "meanwhile",
    "lent": "lent",
    "at": "at[ _]once",
    "stands": "stands",
}
"""Patterns of words, in texts and in names, by their first letters."""

MAX_USES_OF_A_WORD = 40

PRONOUNS = {"found", "own", "said", "asked", "told", "one", "other", "each", "there", "these", "those", "others", "given"}
PREPOSITIONS_AND_ADVERBS = re.compile(
    "above|after|again|alone|along|anew|apart|as|at|away|back|before|behind|below|beside|between|beyond|by|down|during|for|forth|from"
    "|in|into|later|near|of|off|on|onto|over|per|since|through|to|together|towards|under|until|up|upon|via|with|within|without"
)
ARGUMENTS = {("models/imported/tf/operations.py", "other"): "an argument of ATen's operations"}
"""Variables that are named by others, with the reason."""

INTERFACE = {
    ("backends/base.py", "of"): "`EvalResult.of` in docs/adding-a-backend.md",
    ("launch/launchers/ssh.py", "behind"): "`ErrorLines.behind` in docs/adding-a-launcher.md",
    ("core/errors.py", "of"): "`UsageError.of` reports invalid options of plug-ins, as in examples/debian_text",
}
"""Functions that third parties call, with the reason."""

MAX_FIRST_LINE = 90
MAX_MODULE_DOCSTRING_LINES = 6
MAX_COMMENT_LINES = 2
MAX_TEST_NAME = 60

WORDS = {begin: re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])") for begin, pattern in DIALECT.items()}
CONSTANT = re.compile(r"\b_?(?:MOST|LEAST|LONGEST|LARGEST)_[A-Z0-9_]+\b")
PRONOUN = re.compile(rf"\b(?:{'|'.join(sorted(PRONOUNS))})(?: in |[,:)\]=]| [:=|+&-]| for |$)", re.MULTILINE)
"""Binding of a pronoun, or prose that looks like one. Other files are not searched for variables, which is slow."""

LONG_COMMENT = re.compile(rf"(?:^[ \t]*#.*\n){{{MAX_COMMENT_LINES + 1},}}", re.MULTILINE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_files() -> list[Path]:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {*(name.split(".")[1] for name in packages if "." in name), *FOLDERS_WITHOUT_PACKAGES}
    return sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))])


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Functions and classes of statements, also nested ones."""
    for statement in body:
        if isinstance(statement, Definition):
            yield statement
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            if nested := getattr(statement, part, None):
                yield from definitions(nested)


def variables(node: ast.AST, in_class: bool = False) -> Iterator[tuple[int, str]]:
    """Line and name of each variable and parameter.

    Fields of classes are excluded, since they may name fields of records and messages; so are parameters of Python's own methods.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and not in_class:
            yield child.lineno, child.id
        elif isinstance(child, ast.arg):
            yield child.lineno, child.arg
        elif isinstance(child, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and child.name:
            yield child.lineno, child.name
        is_special = isinstance(child, ast.FunctionDef) and child.name.startswith("__") and child.name != "__init__"
        fields = isinstance(child, ast.ClassDef) or (in_class and isinstance(child, ast.Assign | ast.AnnAssign | ast.Tuple))
        yield from variables(ast.Module(child.body, []) if is_special else child, fields)


def long_comments(text: str) -> Iterator[int]:
    """First line of each comment that is too long; lines of string literals do not count."""
    if not LONG_COMMENT.search(text):
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    numbers = [token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")]
    for number in numbers:
        if number - 1 not in numbers and all(number + offset in numbers for offset in range(MAX_COMMENT_LINES + 1)):
            yield number


def problems_of_tree(tree: ast.Module, name: str) -> Iterator[tuple[str, int, str]]:
    """Rule, line and explanation of each problem of a file's definitions and docstrings."""
    nodes: list[ast.Module | Definition] = [tree, *definitions(tree.body)]
    for node in nodes:
        lines = (ast.get_docstring(node) or "").splitlines() or [""]
        number, named = (1, "module") if isinstance(node, ast.Module) else (node.lineno, node.name)
        if len(lines[0]) > MAX_FIRST_LINE:
            yield "first line", number, f"{named}: {len(lines[0])} characters"
        if isinstance(node, ast.Module):
            if len(lines) > MAX_MODULE_DOCSTRING_LINES:
                yield "module docstring", number, f"{len(lines)} lines"
        elif not isinstance(node, ast.ClassDef):
            if named.startswith("test_") and len(named) > MAX_TEST_NAME:
                yield "test name", number, f"{named}: {len(named)} characters"
            if PREPOSITIONS_AND_ADVERBS.fullmatch(named.strip("_")) and (name, named) not in INTERFACE:
                yield "function name", number, named


@pytest.fixture(scope="module")
def problems() -> dict[str, list[str]]:
    """All problems by rule, each as ``file:line: explanation``."""
    result = defaultdict(list)
    uses = defaultdict(list)
    gc.disable()  # trees of this size are collected many times otherwise, which takes most of the time
    try:
        for path in python_files():
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            ends = [match.end() for match in re.finditer("\n", text)]
            lowered = text.lower()
            for begin, pattern in WORDS.items():
                if begin in lowered:
                    uses[begin] += [f"{name}:{bisect(ends, match.start()) + 1}" for match in pattern.finditer(lowered)]
            for match in CONSTANT.finditer(text):
                result["constant"].append(f"{name}:{bisect(ends, match.start()) + 1}: {match[0]}")
            result["comment"] += [f"{name}:{number}" for number in long_comments(text)]
            tree = ast.parse(text)
            for rule, number, explanation in problems_of_tree(tree, name):
                result[rule].append(f"{name}:{number}: {explanation}")
            if PRONOUN.search(text):
                result["variable"] += [
                    f"{name}:{number}: {variable}"
                    for number, variable in variables(tree)
                    if variable in PRONOUNS and (name, variable) not in ARGUMENTS
                ]
    finally:
        gc.enable()
    for begin, places in uses.items():
        if len(places) > MAX_USES_OF_A_WORD:
            result["word"].append(f"{DIALECT[begin]}, {len(places)} times: {' '.join(places)}")
    return result


@pytest.mark.parametrize(
    "rule", ["constant", "word", "first line", "module docstring", "comment", "test name", "variable", "function name"]
)
def test_python_files_follow_the_rule(problems, rule):
    assert not problems[rule], "\n".join([f"{len(problems[rule])} times: {rule}", *problems[rule]])


EXAMPLES = {
    "first line": f'def read():\n    """{"x" * 91}"""\n',
    "module docstring": '"""Files.\n\n1\n2\n3\n4\n5\n"""\n',
    "test name": f"def {'test_'.ljust(61, 'x')}():\n    pass\n",
    "function name": "class Job:\n    if True:\n        def of(self):\n            pass\n",
}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule_finds_its_example(rule):
    assert [problem[0] for problem in problems_of_tree(ast.parse(EXAMPLES[rule]), "file.py")] == [rule]


def test_variables_include_parameters_but_no_fields():
    text = (
        "class Record:\n    found: int\n    one, said = 1, 2\n    def __eq__(self, other):\n        there = other\n"
        "def read(given, *, asked):\n    for each in given:\n        own = [told for told in each if (those := told)]\n"
        "    try:\n        pass\n    except OSError as these:\n        pass\n    return lambda others: own\n"
    )
    names = [name for _, name in variables(ast.parse(text))]
    assert [name for name in names if name in PRONOUNS] == ["there", "given", "asked", "each", "own", "told", "those", "these", "others"]


@pytest.mark.parametrize(
    "binding",
    [
        "found = 1",
        "run, found = 1, 2",
        "found: int = 1",
        "if found := 1:",
        "for found in (1, 2):",
        "[1 for _, found in ()]",
        "with open(name) as found:",
        "except OSError as found:",
        "def read(found):",
        "def read(found, size):",
        "def read(found=None):",
        "lambda found: 1",
        "def read(*, found\n):",
    ],
)
def test_files_with_a_bound_pronoun_are_searched(binding):
    assert PRONOUN.search(binding)


def test_comments_are_counted_only_outside_texts():
    assert list(long_comments("# 1\n# 2\na = 1\n  # 3\n  # 4\n  # 5\n")) == [4]
    assert list(long_comments('a = """\n# 1\n# 2\n# 3\n"""\n# 4\n# 5\n')) == []
