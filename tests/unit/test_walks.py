"""The walks of docs/architecture.md lead from one function of the code to the next."""

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
MAX_FILES = (10, 12, 8, 10)
MAX_WORDS = 15
ROW = re.compile(r"\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| (calls|returned|callback|(?:message|file) `([^`]+)`) \| (.+) \|")


class Item(NamedTuple):
    file: str
    function: str
    relation: str
    message: str | None  # or file
    handed: str


class Words(NamedTuple):
    """Names, attributes and texts in a piece of code."""

    names: set[str]
    texts: set[str]


class Module:
    """A file's functions and what they name, with private helpers of the same class or file."""

    def __init__(self, text):
        self.tree = ast.parse(text)
        self.functions = {}
        self.private = {}
        self._collect(self.tree.body, "")

    def _collect(self, statements, prefix):
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                self._collect(statement.body, f"{statement.name}.")
            elif isinstance(statement, ast.FunctionDef):
                self.functions[f"{prefix}{statement.name}"] = statement
                self._add_private(prefix, statement.name, statement)
                self._collect_attributes(statement, prefix)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    if isinstance(target, ast.Name):
                        self._add_private(prefix, target.id, statement.value)

    def _collect_attributes(self, function, prefix):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        self._add_private(prefix, target.attr, node.value)

    def _add_private(self, prefix, name, node):
        if name.startswith("_") and not name.startswith("__"):
            self.private.setdefault((prefix, name), []).append(node)

    def words(self, function):
        prefix = f"{function.rpartition('.')[0]}." if "." in function else ""
        words, waiting, seen = Words(set(), set()), [self.functions[function]], set()
        while waiting:
            names, texts = words_of(waiting.pop())
            words.names.update(names)
            words.texts.update(texts)
            for key in {(place, name) for name in names for place in (prefix, "")} & self.private.keys() - seen:
                seen.add(key)
                waiting += self.private[key]
        return words


def words_of(node):
    names, texts = set(), set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            texts.add(part.value)
    return names, texts


def read_walks(text):
    section = text.partition("\n## Four walks through the code\n")[2].partition("\n## ")[0]
    walks = []
    for line in section.splitlines():
        if re.match(r"\| \d", line):
            match = ROW.fullmatch(line)
            assert match, f"not a row of a walk: {line}"
            if match[1] == "1":
                walks.append([])
            walks[-1].append(Item(*match.groups()[1:]))
            assert int(match[1]) == len(walks[-1]), line
    return walks


def called(function):
    """Return the name by which code uses a function: that of the class for its __init__."""
    *owner, name = function.split(".")
    return owner[-1] if name == "__init__" else name


def problems(walk, max_files, root=REPOSITORY):
    modules, messages = {}, []
    for file, function, _, _, handed in walk:
        if file not in modules:
            if not (root / file).is_file():
                return [f"{file} does not exist"]
            modules[file] = Module((root / file).read_text())
        if function not in modules[file].functions:
            messages.append(f"{file} has no {function}")
        if len(handed.split()) > MAX_WORDS:
            messages.append(f"{function}: more than {MAX_WORDS} words")
    if len(modules) > max_files:
        messages.append(f"{len(modules)} files, not at most {max_files}")
    return messages or [problem for pair in pairwise(walk) if (problem := broken_link(modules, *pair))]


def broken_link(modules, item, after):
    names_before, names_after = (modules[step.file].words(step.function) for step in (item, after))
    if item.message is not None:
        named = {item.message, item.message.removesuffix(".jsonl")}  # a message's name is that of its type
        whole = bool(named & (names_before.texts | names_before.names) and named & (names_after.texts | names_after.names))
    elif item.relation == "returned":
        whole = called(item.function) in names_after.names
    elif item.relation == "callback":
        whole = item.function.rpartition(".")[0] in names_after.names
    else:
        whole = called(after.function) in names_before.names
    return None if whole else f"{item.function} does not lead to {after.function}"


WALKS = read_walks((REPOSITORY / "docs/architecture.md").read_text())


def test_walks_have_their_limits():
    assert len(WALKS) == len(MAX_FILES)


@pytest.mark.parametrize("number", range(len(MAX_FILES)))
def test_walk_leads_through_the_code(number):
    assert problems(WALKS[number], MAX_FILES[number]) == []


MADE_UP = {
    "first.py": """
class First:
    def begin(self):
        self._go()

    def _go(self):
        Second().take("x")
""",
    "second.py": """
class Second:
    def take(self, value):
        return value == "x"

    def leave(self):
        pass
""",
}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("| 1 | `first.py` | `First.begin` | calls | x |\n| 2 | `second.py` | `Second.take` | calls | the end |", []),
        ("| 1 | `first.py` | `First.begin` | message `x` | x |\n| 2 | `second.py` | `Second.take` | calls | the end |", []),
        ("| 1 | `second.py` | `Second.take` | returned | x |\n| 2 | `first.py` | `First.begin` | calls | the end |", []),
        ("| 1 | `second.py` | `Second.leave` | callback | x |\n| 2 | `first.py` | `First.begin` | calls | the end |", []),
        (
            "| 1 | `first.py` | `First.begin` | calls | x |\n| 2 | `second.py` | `Second.leave` | calls | the end |",
            ["First.begin does not lead to Second.leave"],
        ),
        (
            "| 1 | `second.py` | `Second.take` | calls | x |\n| 2 | `first.py` | `First.begin` | calls | the end |",
            ["Second.take does not lead to First.begin"],
        ),
        (
            "| 1 | `second.py` | `Second.leave` | returned | x |\n| 2 | `first.py` | `First.begin` | calls | x |",
            ["Second.leave does not lead to First.begin"],
        ),
        (
            "| 1 | `first.py` | `First.begin` | callback | x |\n| 2 | `second.py` | `Second.take` | calls | x |",
            ["First.begin does not lead to Second.take"],
        ),
        (
            "| 1 | `first.py` | `First.begin` | message `y` | x |\n| 2 | `second.py` | `Second.take` | calls | x |",
            ["First.begin does not lead to Second.take"],
        ),
        ("| 1 | `first.py` | `First.end` | calls | x |", ["first.py has no First.end"]),
        ("| 1 | `third.py` | `run` | calls | x |", ["third.py does not exist"]),
        (f"| 1 | `first.py` | `First.begin` | calls | {'x ' * 16} |", ["First.begin: more than 15 words"]),
        ("| 1 | `first.py` | `First.begin` | calls | x |\n| 2 | `second.py` | `Second.take` | calls | x |", ["2 files, not at most 1"]),
    ],
)
def test_invalid_walk_is_found(tmp_path, lines, expected):
    for name, text in MADE_UP.items():
        (tmp_path / name).write_text(text)
    (walk,) = read_walks(f"# A\n\n## Four walks through the code\n\n{lines}\n\n## More\n")
    max_files = 1 if "files" in "".join(expected) else 2
    assert problems(walk, max_files, tmp_path) == expected


def test_documented_places_exist():
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("## Where things are")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        folder = Path()
        for file, names in re.findall(r"`([\w/]+\.py)`(?: \(((?:`\w+`(?:, )?)+)\))?", row.split("|")[2]):
            folder = Path(file).parent if "/" in file else folder
            path = REPOSITORY / folder / Path(file).name
            assert path.exists(), f"{row}: {file}"
            for name in re.findall(r"\w+", names):
                assert re.search(rf"^(class {name}\b|def {name}\b|{name}\b.* = )", path.read_text(encoding="utf-8"), re.M), (
                    f"{file}: {name}"
                )
