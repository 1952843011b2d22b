"""README, documentation, messages and help use the words of the field, in short sentences."""

import ast
import re
from itertools import pairwise

import pytest
from documents import DOCUMENTS, ROOT
from prose import MAX_LINE_CHARACTERS, MAX_SENTENCE_WORDS, lines_of_prose, paragraphs, sentences, words

PACKAGES = (
    "backends",
    "checkpoint",
    "cli",
    "core",
    "data",
    "engine",
    "exchange",
    "launch",
    "metrics",
    "models",
    "monitor",
    "records",
    "report",
)
DIALECT = ("told", "said", "anew", "besides?", "goes on", "set-ups?", "whoever", "left out", "lacks", "surely")
MAX_DIALECT_WORDS = 40
MAX_WORDS_OF_DOCUMENTATION = 33_000
PROSE = [name for name in DOCUMENTS if name != "CHANGELOG.md"]


def dialect_words(text: str) -> list[str]:
    return re.findall(rf"\b(?:{'|'.join(DIALECT)})\b", text, re.IGNORECASE)


def literals(source: str) -> list[str]:
    """Return the text literals of a module, and the docstrings of commands, which are help."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    texts_found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts]
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and any(
            "command" in ast.dump(decorator) or "group" in ast.dump(decorator) for decorator in node.decorator_list
        ):
            texts_found.append(ast.get_docstring(node) or "")
    return texts_found


def product_texts() -> dict[str, list[str]]:
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    templates = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.html"))
    texts = {path.relative_to(ROOT).as_posix(): literals(path.read_text(encoding="utf-8")) for path in files}
    return texts | {path.relative_to(ROOT).as_posix(): [path.read_text(encoding="utf-8")] for path in templates}


def test_texts_use_the_words_of_the_field():
    texts = product_texts() | {name: [(ROOT / name).read_text(encoding="utf-8")] for name in PROSE}
    dialect = {
        name: hits for name, texts_of_file in texts.items() if (hits := [word for text in texts_of_file for word in dialect_words(text)])
    }
    assert sum(map(len, dialect.values())) <= MAX_DIALECT_WORDS, dialect


@pytest.mark.parametrize("document", PROSE)
def test_lines_and_sentences_are_short(document):
    path = ROOT / document
    assert [number for number, line in lines_of_prose(path) if len(line) > MAX_LINE_CHARACTERS] == []
    all_sentences = [sentence for paragraph in paragraphs(path) for sentence in sentences(paragraph)]
    assert [sentence for sentence in all_sentences if len(words(sentence)) > MAX_SENTENCE_WORDS] == []


@pytest.mark.parametrize("document", PROSE)
def test_no_line_of_a_paragraph_renders_as_a_list(document):
    """Such as a sentence wrapped before a number with a full stop: "… from 0. Then …"."""
    lines = [line for _, line in lines_of_prose(ROOT / document)]
    item = r"\s*(\d+\.|[-*+]) "
    pairs = [(before, line) for before, line in pairwise(lines) if re.match(item, line)]
    assert [line for before, line in pairs if before and not re.match(rf"{item}|\s{{2,}}\S", before) and not before.endswith(":")] == []


def test_documentation_is_short():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert (len(text.splitlines()) <= 160, len(text.split()) <= 1800) == (True, True)
    pages = [ROOT / name for name in PROSE if name.startswith("docs/")]
    assert sum(len(words(paragraph)) for page in pages for paragraph in paragraphs(page)) <= MAX_WORDS_OF_DOCUMENTATION
