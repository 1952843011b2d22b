"""The attachments by which translations are scored: what a dataset of a translation has beside its columns, and whether it fits them."""

from __future__ import annotations

from collections.abc import Mapping

from .tokenizer import VOCABULARY, Vocabulary

__all__ = ["SCORING_FILES", "TEST_REFERENCES", "reference_lines", "wrong_scoring_files"]

TEST_REFERENCES = "test.target.txt"
"""The attachment that has the test split's references as they were written, one a line; those of another split are made of its pieces."""

SCORING_FILES = (VOCABULARY, TEST_REFERENCES)


def reference_lines(content: bytes) -> list[str]:
    """Return the lines of `TEST_REFERENCES`. Raises ValueError for what is not UTF-8."""
    return content.decode().removesuffix("\n").split("\n")


def wrong_scoring_files(files: Mapping[str, bytes], vocabulary_sizes: Mapping[str, int], test_examples: int) -> str | None:
    """Return why translations into the text of `files` cannot be scored, or None.

    `vocabulary_sizes` are those of the columns that are translated. Raises MissingPackageError where sentencepiece is not installed.
    """
    if missing := [name for name in SCORING_FILES if name not in files]:
        return f"it has no attachment {' and no '.join(missing)}, which translations are scored by"
    try:
        pieces = Vocabulary(files[VOCABULARY]).size
    except ValueError as error:
        return f"its attachment {VOCABULARY} is {error}"
    for column, size in vocabulary_sizes.items():
        if size != pieces:
            return f"its attachment {VOCABULARY} has {pieces} pieces, and its vocabulary_sizes say {size} of {column}"
    try:
        lines = len(reference_lines(files[TEST_REFERENCES]))
    except UnicodeDecodeError as error:
        return f"its attachment {TEST_REFERENCES} is not UTF-8 ({error})"
    return None if lines == test_examples else f"its attachment {TEST_REFERENCES} has {lines} lines for {test_examples} test examples"
