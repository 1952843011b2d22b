"""From texts to tokens: bytes, words, or pieces by sentencepiece."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...text import BEGIN, END, PADDING, UNKNOWN
from ..translation.tokenizer import DESCRIPTION, VOCABULARY, Vocabulary, train_vocabulary

RESERVED = max(PADDING, BEGIN, END, UNKNOWN) + 1
_WORD = re.compile(r"\w+|[^\w\s]")


class Tokenizer(Protocol):
    """Makes tokens of texts, the last of which is `END`."""

    @property
    def size(self) -> int:
        """All tokens are below it."""

    @property
    def files(self) -> dict[str, bytes]:
        """What the store keeps to make the same tokens again."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""


class Bytes:
    """The bytes of UTF-8, after the reserved tokens."""

    def __init__(self) -> None:
        self.size = RESERVED + 256
        self.files: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [[*(byte + RESERVED for byte in text.encode(errors="replace")), END] for text in texts]


class Words:
    """The commonest words of the training texts, in small letters; others are `UNKNOWN`."""

    def __init__(self, texts: Iterable[str], most: int) -> None:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(_WORD.findall(text.lower()))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))[: most - RESERVED]
        self._numbers = {word: number for number, word in enumerate(ordered, RESERVED)}
        self.size = RESERVED + len(ordered)
        self.files = {"words.json": json.dumps(ordered, ensure_ascii=False).encode()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [[*(self._numbers.get(word, UNKNOWN) for word in _WORD.findall(text.lower())), END] for text in texts]


class Pieces:
    """Byte-pair encoding of the training texts."""

    def __init__(self, texts: Iterable[str], size: int) -> None:
        model = train_vocabulary((" ".join(text.split()) for text in texts), size, bytes_too=True)
        self._vocabulary = Vocabulary(model)
        self.size = self._vocabulary.size
        described = {"pieces": self.size, "pieces_sha256": self._vocabulary.pieces_sha256, "byte_pieces": True}
        self.files = {VOCABULARY: model, DESCRIPTION: json.dumps(described).encode()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return self._vocabulary.encode([" ".join(text.split()) for text in texts])


TOKENIZERS: dict[str, Callable[[Iterable[str], int], Tokenizer]] = {
    "words": Words,
    "pieces": Pieces,
    "bytes": lambda texts, size: Bytes(),
}
