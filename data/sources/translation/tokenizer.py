"""Byte-pair encoding by sentencepiece, one vocabulary for both languages.

Training uses one thread, so the same lines always make the same pieces. Other fields of the model file differ among sentencepiece's
releases; `pieces_sha256` identifies a vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.bounded_json import UnreadableError, parse_json
from ....core.drafts import replacing
from ....core.errors import UsageError
from ...base import Dataset, Split
from ...columns import Column
from ...text import BEGIN, END, PADDING, UNKNOWN
from .text_files import ReadingProgress, SkippedPairs, entry_bytes, parts, text_bytes, text_package
from .vocabulary_training import RefusedTextError, trained_model

VOCABULARY = "vocabulary.model"  # attachment with the pieces of a dataset of text
DESCRIPTION = "vocabulary.json"  # attachment that describes their origin
MIN_VOCABULARY, MAX_VOCABULARY = 32, 65_535  # pieces are stored as uint16
BYTE_PIECES = 256


def pieces_digest(data: Dataset) -> str | None:
    """Return `Vocabulary.pieces_sha256`, if the dataset has pieces.

    Raises UsageError if sentencepiece is needed and missing.
    """
    if DESCRIPTION in data.attachments:
        with suppress(UnreadableError):  # third-party attachments may be anything
            description = parse_json(data.attachment(DESCRIPTION))
            if isinstance(description, dict) and isinstance(digest := description.get("pieces_sha256"), str):
                return digest
    return Vocabulary(data.attachment(VOCABULARY)).pieces_sha256 if VOCABULARY in data.attachments else None


class Vocabulary:
    """The pieces in a sentencepiece model. Raises ValueError for other bytes.

    Text is not normalised: `decode` inverts `encode`, except that U+2581, sentencepiece's mark of a space, becomes one, and that characters
    missing in a vocabulary without byte pieces become ⁇.
    """

    def __init__(self, model: bytes) -> None:
        package = text_package("sentencepiece")
        try:
            self._processor: Any = package.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError("not a model of sentencepiece") from error
        reserved = {"pad_id": PADDING, "bos_id": BEGIN, "eos_id": END, "unk_id": UNKNOWN}
        reserved_here = {name: getattr(self._processor, name)() for name in reserved}
        if reserved_here != reserved:
            raise ValueError(f"a vocabulary with the reserved pieces {reserved_here} instead of {reserved}")
        self.size: int = self._processor.get_piece_size()

    @cached_property
    def pieces_sha256(self) -> str:
        """The hex digest of the pieces, as a JSON list."""
        pieces = [self._processor.id_to_piece(number) for number in range(self.size)]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each line, followed by END, using up to one thread per core."""
        threads = min(len(os.sched_getaffinity(0)), max(1, len(lines)))
        return list(self._processor.encode(list(lines), out_type=int, add_eos=True, num_threads=threads))

    def decode(self, pieces: Sequence[int]) -> str:
        """Return the text of pieces up to the first END. Raises ValueError for an unknown piece."""
        known: list[int] = []
        for piece in map(int, pieces):
            if piece == END:
                break
            if not 0 <= piece < self.size:
                raise ValueError(f"piece {piece} of a vocabulary of {self.size}")
            if piece not in (PADDING, BEGIN):
                known.append(piece)
        return str(self._processor.decode(known))


_TOO_MANY = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_FEW = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")
_NO_SENTENCE = "!sentences_.empty()"


def _explain_refusal(message: str, smallest: int) -> str:
    """Complete the message about an impossible vocabulary with a size that fits."""
    most, fewest = ((match := pattern.search(message)) and int(match[1]) for pattern in (_TOO_MANY, _TOO_FEW))
    if most is not None and most < smallest:
        return f": it is too short, with at most {most:,} pieces; the smallest vocabulary has {smallest:,}. Give more text."
    if most is not None or fewest is not None:
        why = f"it is short, and has at most {most:,}" if most is not None else f"its characters need at least {fewest:,}"
        size = most if most is not None else max(fewest or 0, smallest)
        return f": {why} pieces. Give --vocabulary {size}, or ?vocabulary={size} in the data's name."
    if _NO_SENTENCE in message:
        return ": it has no sentence."
    return f" ({(message.partition('] ')[2] or message).strip()}). Give another size: --vocabulary N, or ?vocabulary=N in the data's name."


def train_vocabulary(lines: Iterable[str], size: int, *, bytes_too: bool) -> bytes:
    """Return the model of a vocabulary of exactly `size` pieces, from these lines in order.

    With `bytes_too`, 256 of them are bytes, which encode characters without pieces; otherwise every character of the lines has a piece.
    Raises UsageError if no such vocabulary exists, TrainerError if memory runs out, and what reading the lines raises.
    """
    text_package("sentencepiece")
    try:
        return trained_model(lines, size, bytes_too=bytes_too)
    except RefusedTextError as refused:
        why = _explain_refusal(str(refused), BYTE_PIECES + 64 if bytes_too else MIN_VOCABULARY)
        raise UsageError(f"data: no vocabulary of {size:,} pieces can be made of this text{why}") from refused


PairReader = Callable[[], Iterator[tuple[str, str] | str]]
"""Yields each pair of a split, or the reason to skip it ("with an empty line"; "" for no mention)."""

PART_PAIRS, PART_BYTES = 20_000, 16 << 20  # of pairs encoded and kept together: a second or two of work, a few megabytes
LINES_PER_CHUNK, BYTES_PER_CHUNK = 2_048, 1 << 20  # per encoding; Python's integers take ten times their memory
Arrays = Mapping[str, NDArray[Any]]


def counted(line: str) -> bytes:
    """Return a line after its length, for an unambiguous digest of several lines."""
    return f"{len(line)} {line}".encode()


@dataclass
class PairEncoder:
    """Encodes splits, skipping pairs with a side of more than `longest` pieces, END included.

    `work`: folder for finished parts. `line_numbers`: the line of each entry, from 1, of splits that are not consecutive lines of a
    file. `left_out` counts skipped pairs; `test_lines` has the other lines of the test split, source and target, in UTF-8, after its
    blocks.
    """

    vocabulary: Vocabulary
    longest: int
    work: Path
    line_numbers: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)
    left_out: SkippedPairs = field(default_factory=SkippedPairs)
    test_lines: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))

    def blocks(self, split: Split, read: PairReader, total: int) -> Iterator[Mapping[str, Column]]:
        """Yield the columns ``source`` and ``target`` in parts.

        Raises UsageError if no pair is left.
        """
        progress = ReadingProgress(f"encoding the {split} split", total)
        begin, has_pairs = 0, False
        for number, part in enumerate(parts(read(), PART_PAIRS, PART_BYTES, entry_bytes)):
            places = [place for place, entry in enumerate(part) if not isinstance(entry, str)]
            for place, entry in enumerate(part):
                if isinstance(entry, str) and entry:
                    self.left_out.add(split, entry, self._line(split, begin + place))
            pairs = [entry for entry in part if not isinstance(entry, str)]
            arrays = self._part(f"{split}-{number:06d}", pairs)
            dropped = arrays["dropped"]
            if len(dropped):
                first = self._line(split, begin + places[int(dropped[0])])
                self.left_out.add(split, f"with more than {self.longest} pieces", first, len(dropped))
            if split == "test":
                gone = set(dropped.tolist())
                for side, lines in enumerate(self.test_lines):
                    lines += [pair[side].encode() for place, pair in enumerate(pairs) if place not in gone]
            if len(arrays["source_lengths"]):
                has_pairs = True
                offsets = {name: np.append(0, np.cumsum(arrays[f"{name}_lengths"])).astype(np.int64) for name in ("source", "target")}
                yield {name: Column(arrays[name], offsets[name]) for name in offsets}
            begin += len(part)
            progress.update(begin)
        if not has_pairs:
            raise UsageError(f"data: no pair of the {split} split is left: {'; '.join(self.left_out.lines()) or 'the text has none'}.")

    def _line(self, split: Split, place: int) -> int:
        numbers = self.line_numbers.get(split)
        return place + 1 if numbers is None else int(numbers[place])

    def _part(self, stem: str, pairs: Sequence[tuple[str, str]]) -> Arrays:
        """The file's name has a digest of the text, which may have changed since another attempt."""
        digest = hashlib.sha256(f"{self.vocabulary.pieces_sha256} {self.longest}\n".encode())
        for line in itertools.chain.from_iterable(pairs):
            digest.update(counted(line))
        path = self.work / f"{stem}-{digest.hexdigest()[:16]}.npz"
        if path.exists() and (stored := _read(path, len(pairs), self.vocabulary.size)) is not None:
            return stored
        made = self._encode(pairs)
        with replacing(path) as draft, draft.open("wb") as file:
            np.savez(file, allow_pickle=False, **made)
        return made

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> dict[str, NDArray[Any]]:
        values, lengths = zip(*(self._encode_lines([pair[side] for pair in pairs]) for side in (0, 1)), strict=True)
        short_n = (lengths[0] <= self.longest) & (lengths[1] <= self.longest)
        arrays: dict[str, NDArray[Any]] = {"dropped": np.flatnonzero(~short_n)}
        for side, name in enumerate(("source", "target")):
            arrays[name] = values[side][np.repeat(short_n, lengths[side])]
            arrays[f"{name}_lengths"] = lengths[side][short_n]
        return arrays

    def _encode_lines(self, lines: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        values, lengths = [np.empty(0, np.uint16)], [np.empty(0, np.int64)]
        for some in parts(lines, LINES_PER_CHUNK, BYTES_PER_CHUNK, text_bytes):
            encoded = self.vocabulary.encode(some)
            sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
            values.append(np.fromiter(itertools.chain.from_iterable(encoded), np.uint16, int(sizes.sum())))
            lengths.append(sizes)
        return np.concatenate(values), np.concatenate(lengths)


def _read(path: Path, pairs: int, pieces: int) -> Arrays | None:
    """Return a kept part; None if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("dropped", "source", "source_lengths", "target", "target_lengths")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    whole = len(arrays["dropped"]) + len(arrays["source_lengths"]) == pairs
    for name in ("source", "target"):
        values, lengths = arrays[name], arrays[f"{name}_lengths"]
        whole &= values.dtype == np.uint16 and int(lengths.sum()) == len(values) and int(values.max(initial=0)) < pieces
    return arrays if whole else None
