"""The vocabulary that lies in a run's directory: text is made pieces of by it where the run's data is not at hand."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import UsageError
from ..core.untrusted.bounded_json import UnreadableError
from ..data.sources.translation.tokenizer import Vocabulary
from ..records.store.run_vocabulary import VOCABULARY, read_vocabulary
from .meta import Meta

__all__ = ["trained_vocabulary"]


def trained_vocabulary(checkpoint: Path, meta: Meta) -> bytes:
    """Return the vocabulary of a checkpoint's run, as sentencepiece's model. Raises UsageError where the run has none, or another one."""
    run = checkpoint.parent.parent
    try:
        found = read_vocabulary(run)
    except UnreadableError as error:
        raise UsageError(f"run: {str(run)!r}: {error}; text cannot be made pieces of by it.") from error
    if found is None:
        raise UsageError(
            f"checkpoint: {str(checkpoint)!r} lies in no run with a {VOCABULARY}, without which nobody could make pieces of a text."
            " Give the run directory."
        )
    try:
        vocabulary = Vocabulary(found)
    except ValueError as error:
        raise UsageError(f"run: {str(run / VOCABULARY)!r} is {error}; text cannot be made pieces of by it.") from error
    sizes, pieces = set(meta.data["vocabulary_sizes"].values()), meta.data.get("pieces_sha256")
    if sizes != {vocabulary.size} or pieces not in (None, vocabulary.pieces_sha256):
        raise UsageError(f"run: {str(run / VOCABULARY)!r} is not the vocabulary that the model was trained with.")
    return found
