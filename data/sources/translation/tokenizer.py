"""From text to pieces and back: byte-pair encoding by sentencepiece, one vocabulary for both languages.

The text is not normalised: `Vocabulary.decode` gives back what `Vocabulary.encode` was given, every character of it. (Two exceptions:
U+2581, by which sentencepiece marks a space, comes back as one; and characters that a vocabulary without byte pieces does not have, as ⁇.)

Training is done with one thread on lines in a given order, so that the same lines always make the same pieces. The model file has
further fields, which differ with sentencepiece's release; what tells two vocabularies apart is `pieces_sha256`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ....core.errors import UsageError
from ....core.untrusted.bounded_json import UnreadableError, parse_json
from ...base import Dataset
from ...text import BEGIN, END, PADDING, UNKNOWN
from .packages import text_package
from .vocabulary_training import RefusedTextError, trained_model

__all__ = ["DESCRIPTION", "LARGEST_VOCABULARY", "SMALLEST_VOCABULARY", "VOCABULARY", "Vocabulary", "pieces_digest", "train_vocabulary"]

VOCABULARY = "vocabulary.model"
"""The attachment of a dataset of text that has its pieces."""

DESCRIPTION = "vocabulary.json"
"""The attachment that says how they were made."""

SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 32, 65_535
"""Pieces are stored as uint16."""

BYTE_PIECES = 256


def pieces_digest(data: Dataset) -> str | None:
    """Return the digest of a dataset's pieces (`Vocabulary.pieces_sha256`), None where it has none.

    A dataset may say it beside the vocabulary, which spares reading that. Raises UsageError where sentencepiece is needed and missing.
    """
    if DESCRIPTION in data.attachments:
        with suppress(UnreadableError):  # of somebody's own making
            description = parse_json(data.attachment(DESCRIPTION))
            if isinstance(description, dict) and isinstance(said := description.get("pieces_sha256"), str):
                return said
    return Vocabulary(data.attachment(VOCABULARY)).pieces_sha256 if VOCABULARY in data.attachments else None


class Vocabulary:
    """The pieces of a vocabulary, from the bytes of its sentencepiece model. Raises ValueError for other bytes.

    `size` is the number of pieces, `pieces_sha256` the digest of all of them in their order.
    """

    def __init__(self, model: bytes) -> None:
        package = text_package("sentencepiece")
        try:
            self._processor: Any = package.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError("not a model of sentencepiece") from error
        reserved = {"pad_id": PADDING, "bos_id": BEGIN, "eos_id": END, "unk_id": UNKNOWN}
        found = {name: getattr(self._processor, name)() for name in reserved}
        if found != reserved:
            raise ValueError(f"a vocabulary with the reserved pieces {found} instead of {reserved}")
        self.size: int = self._processor.get_piece_size()

    @cached_property
    def pieces_sha256(self) -> str:
        """The hex digest of the pieces, as a JSON list."""
        pieces = [self._processor.id_to_piece(number) for number in range(self.size)]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each line, END behind them. Several lines at once are shared among as many threads as there are cores."""
        threads = min(len(os.sched_getaffinity(0)), max(1, len(lines)))
        found: list[list[int]] = self._processor.encode(list(lines), out_type=int, add_eos=True, num_threads=threads)
        return found

    def decode(self, pieces: Sequence[int]) -> str:
        """Return the text of pieces up to the first END; padding and BEGIN are nothing. Raises ValueError for a number beyond the last."""
        kept: list[int] = []
        for piece in map(int, pieces):
            if piece == END:
                break
            if not 0 <= piece < self.size:
                raise ValueError(f"piece {piece} of a vocabulary of {self.size}")
            if piece not in (PADDING, BEGIN):
                kept.append(piece)
        text: str = self._processor.decode(kept)
        return text


_TOO_MANY = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_FEW = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")
_NO_SENTENCE = "!sentences_.empty()"


def _why_none(told: str, smallest: int) -> str:
    """Return the rest of a sentence that says why there is no such vocabulary, and which size fits, from what sentencepiece says."""
    most, fewest = ((found := pattern.search(told)) and int(found[1]) for pattern in (_TOO_MANY, _TOO_FEW))
    if most is not None and most < smallest:
        return f": it is too short, with at most {most:,} pieces; the smallest vocabulary has {smallest:,}. Give more text."
    if most is not None or fewest is not None:
        why = f"it is short, and has at most {most:,}" if most is not None else f"its characters need at least {fewest:,}"
        size = most if most is not None else max(fewest or 0, smallest)
        return f": {why} pieces. Give --vocabulary {size}, or ?vocabulary={size} in the data's name."
    if _NO_SENTENCE in told:
        return ": it has no sentence."
    return f" ({(told.partition('] ')[2] or told).strip()}). Give another size: --vocabulary N, or ?vocabulary=N in the data's name."


def train_vocabulary(lines: Iterable[str], size: int, *, bytes_too: bool) -> bytes:
    """Return the model of a vocabulary of exactly `size` pieces, made from these lines in this order.

    With `bytes_too`, 256 of them are bytes, by which any character can be written that has no piece of its own; without, every character
    of the lines has one. Raises UsageError where the lines cannot fill a vocabulary of this size, or have more characters than it has
    pieces, TrainerError where there is too little memory, and whatever is raised while the lines are read.
    """
    text_package("sentencepiece")
    try:
        return trained_model(lines, size, bytes_too=bytes_too)
    except RefusedTextError as refused:
        why = _why_none(str(refused), BYTE_PIECES + 64 if bytes_too else SMALLEST_VOCABULARY)
        raise UsageError(f"data: no vocabulary of {size:,} pieces can be made of this text{why}") from refused
