"""Prose of the documents without tables, code and generated blocks.

As paragraphs, sentences and words.
"""

import re
from pathlib import Path

MAX_LINE_CHARACTERS = 140
MAX_SENTENCE_WORDS = 25


def lines_of_prose(document: Path) -> list[tuple[int, str]]:
    """Each line of prose with its number, from 1.

    Tables, code, generated blocks and pictures are empty lines.
    """
    text = document.read_text(encoding="utf-8")
    text = re.sub(
        r"^```.*?^```$|<!-- begin (\S+) -->.*?<!-- end \1 -->",
        lambda block: "\n" * block[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return [(number, "" if re.match(r"\s*\||!\[", line) else line) for number, line in enumerate(text.split("\n"), start=1)]


def paragraphs(document: Path) -> list[str]:
    """Paragraphs, items of lists and headings, each in one line, without links' targets."""
    result: list[list[str]] = [[]]
    for _, line in lines_of_prose(document):
        if not line.strip() or re.match(r"\s*([-*]|\d+\.) |#+ ", line):
            result.append([])
        if line.strip():
            result[-1].append(re.sub(r"^\s*([-*]|\d+\.) |^#+ ", "", line).strip())
        if line.startswith("#"):
            result.append([])
    return [re.sub(r"\]\([^)]*\)", "]", " ".join(lines)) for lines in result if lines]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; a code span is one word, colons and semicolons end none."""
    whole = re.sub(r"`[^`]*`", "CODE", paragraph)
    return [sentence for sentence in re.split(r"(?<=[.!?])[)\"'*]*\s+(?=[A-Z(\"'*\[])", whole) if sentence.strip()]


def words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\w", word)]
