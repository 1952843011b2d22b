"""Pairs of sentences to columns of pieces, part by part; a part that was encoded once is kept in a folder, and not encoded again."""

from __future__ import annotations

import hashlib
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.errors import UsageError
from ...base import Split
from ...columns import Column
from .left_out import LeftOut
from .reading_progress import ReadingProgress
from .text_amounts import entry_bytes, parts, text_bytes
from .tokenizer import Vocabulary

__all__ = ["PairEncoder", "PairReader", "counted"]

PairReader = Callable[[], Iterator[tuple[str, str] | str]]
"""Reads a split from its beginning: each pair, or why it is left out ("with an empty line"; "" for what needs no mention)."""

PART_PAIRS, PART_BYTES = 20_000, 16 << 20
"""Pairs that are encoded and kept together, and the most text of them: a second or two of work, a few megabytes."""

LINES_AT_ONCE, BYTES_AT_ONCE = 2_048, 1 << 20
"""Lines whose pieces are Python's own numbers at a time, which take some ten times the memory of what is kept, and their most text."""

Arrays = Mapping[str, NDArray[Any]]


def counted(line: str) -> bytes:
    """Return a line behind its length, for a digest of many: so it is told where each ends, whatever is in them."""
    return f"{len(line)} {line}".encode()


@dataclass
class PairEncoder:
    """Encodes splits by a vocabulary. Pairs of which a side has more than `longest` pieces, END included, are left out.

    `work` is where parts are kept; None keeps none. `line_numbers` has, of splits whose entries are not the lines of a file one after
    another, the line of each entry, from 1. `left_out` counts what is left out, and `test_lines` has the lines of the test split that are
    not, source and target, in UTF-8, once its blocks have been taken.
    """

    vocabulary: Vocabulary
    longest: int
    work: Path | None = None
    line_numbers: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)
    test_lines: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))

    def blocks(self, split: Split, read: PairReader, total: int) -> Iterator[Mapping[str, Column]]:
        """Yield the columns ``source`` and ``target`` of a split of `total` lines, part by part. Raises UsageError where none is left."""
        progress = ReadingProgress(f"encoding the {split} split", total)
        begin, kept = 0, False
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
                kept = True
                yield {name: _column(arrays[name], arrays[f"{name}_lengths"]) for name in ("source", "target")}
            begin += len(part)
            progress.update(begin)
        if not kept:
            raise UsageError(f"data: no pair of the {split} split is left: {'; '.join(self.left_out.lines()) or 'the text has none'}.")

    def _line(self, split: Split, place: int) -> int:
        """Return the line of the file that a split's entry was read from, from 1."""
        numbers = self.line_numbers.get(split)
        return place + 1 if numbers is None else int(numbers[place])

    def _part(self, stem: str, pairs: Sequence[tuple[str, str]]) -> Arrays:
        """Return a part's arrays: those that were kept of the same text, or newly made ones, which are kept from now on.

        What decides them is in the file's name, as another text may have come in between two tries.
        """
        if self.work is None:
            return self._encode(pairs)
        digest = hashlib.sha256(f"{self.vocabulary.pieces_sha256} {self.longest}\n".encode())
        for line in itertools.chain.from_iterable(pairs):
            digest.update(counted(line))
        path = self.work / f"{stem}-{digest.hexdigest()[:16]}.npz"
        if path.exists():
            kept = _read(path, len(pairs), self.vocabulary.size)
            if kept is not None:
                return kept
        made = self._encode(pairs)
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            np.savez(file, allow_pickle=False, **made)
        os.replace(draft, path)
        return made

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> dict[str, NDArray[Any]]:
        values, lengths = zip(*(self._encoded([pair[side] for pair in pairs]) for side in (0, 1)), strict=True)
        kept = (lengths[0] <= self.longest) & (lengths[1] <= self.longest)
        found: dict[str, NDArray[Any]] = {"dropped": np.flatnonzero(~kept)}
        for side, name in enumerate(("source", "target")):
            found[name] = values[side][np.repeat(kept, lengths[side])]
            found[f"{name}_lengths"] = lengths[side][kept]
        return found

    def _encoded(self, lines: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the pieces of lines one after another, and how many each line has."""
        values, lengths = [np.empty(0, np.uint16)], [np.empty(0, np.int64)]
        for some in parts(lines, LINES_AT_ONCE, BYTES_AT_ONCE, text_bytes):
            found = self.vocabulary.encode(some)
            sizes = np.fromiter(map(len, found), np.int64, len(found))
            values.append(np.fromiter(itertools.chain.from_iterable(found), np.uint16, int(sizes.sum())))
            lengths.append(sizes)
        return np.concatenate(values), np.concatenate(lengths)


def _column(values: NDArray[Any], lengths: NDArray[np.int64]) -> Column:
    return Column(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _read(path: Path, pairs: int, pieces: int) -> Arrays | None:
    """Return a kept part; None where it is damaged, so that it has to be made again."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in ("dropped", "source", "source_lengths", "target", "target_lengths")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    whole = len(found["dropped"]) + len(found["source_lengths"]) == pairs
    for name in ("source", "target"):
        values, lengths = found[name], found[f"{name}_lengths"]
        whole &= values.dtype == np.uint16 and int(lengths.sum()) == len(values) and int(values.max(initial=0)) < pieces
    return found if whole else None
