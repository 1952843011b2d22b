"""From readers of sentence pairs to what the store takes: a vocabulary, the encoded columns, the test lines as they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....core.errors import UsageError
from ....core.untrusted.bounded_json import parse_json
from ....core.untrusted.console import note
from ...base import PreparedColumns, Split, TextFeatures
from ...columns import ColumnSpec
from .encoding import PairEncoder, PairReader, counted
from .reading_progress import ReadingProgress
from .text_amounts import entry_bytes
from .tokenizer import DESCRIPTION, VOCABULARY, Vocabulary, train_vocabulary

__all__ = ["MOST_SAMPLED_BYTES", "MOST_SAMPLED_LINES", "chosen", "prepared_pairs"]

MOST_SAMPLED_LINES, MOST_SAMPLED_BYTES = 1_000_000, 256 << 20
"""From which a vocabulary is made, both languages together. So many sentences are far less text than that; so many pages are more."""

SAMPLE_SEED = 1

_KEYS = 1 << 20
"""Drawn at a time, of which the least are kept."""


def chosen(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """Return at most `most` of the numbers 0 … count − 1, rising; the same ones for the same seed on every machine."""
    if count <= most:
        return np.arange(count)
    random = np.random.Philox(np.random.SeedSequence([seed, count]))
    keys, places = np.empty(0, np.uint64), np.empty(0, np.int64)
    for start in range(0, count, _KEYS):  # what is held does not grow with the text, whose lines can be blank
        end = min(start + _KEYS, count)
        keys = np.concatenate([keys, random.random_raw(end - start)])
        places = np.concatenate([places, np.arange(start, end)])
        if len(keys) > most:
            least = np.argpartition(keys, most)[:most]
            keys, places = keys[least], places[least]
    return np.sort(places)


def prepared_pairs(
    readers: Mapping[Split, PairReader],
    counts: Mapping[Split, int],
    *,
    vocabulary_size: int,
    bytes_too: bool,
    longest: int,
    languages: tuple[str, str],
    bleu_tokenizer: str = "13a",
    work: Path | None = None,
    line_numbers: Mapping[Split, NDArray[np.int64]] | None = None,
    packages: Sequence[str] = (),
) -> PreparedColumns:
    """Return the columns of a translation; `counts` says how many pairs, left out ones included, each reader has.

    The vocabulary is made here, all else when the store asks for it. `bytes_too`, `longest`, `work` and `line_numbers` as in
    `train_vocabulary` and `PairEncoder`. `packages` are those beside sentencepiece whose releases decide the text; `vocabulary.json` has
    them. Raises UsageError where no vocabulary can be made.
    """
    model, description = _vocabulary(readers["train"], counts["train"], vocabulary_size, bytes_too=bytes_too, work=work, packages=packages)
    vocabulary = Vocabulary(model)
    encoder = PairEncoder(vocabulary, longest, work, line_numbers or {})
    columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
    sizes = {"source": vocabulary.size, "target": vocabulary.size}

    def attachments() -> dict[str, bytes]:
        texts = {f"test.{side}.txt": lines for side, lines in zip(("source", "target"), encoder.test_lines, strict=True)}
        files = {name: b"".join(line + b"\n" for line in lines) for name, lines in texts.items()}
        return {VOCABULARY: model, DESCRIPTION: description, **files}

    return PreparedColumns(
        columns,
        TextFeatures(sizes, languages, bleu_tokenizer),
        {split: partial(encoder.blocks, split, readers[split], counts[split]) for split in ("train", "test")},
        left_out=encoder.left_out.lines,
        attachments=attachments,
    )


def _skipped(read: PairReader) -> str:
    """Say how many pairs of a text are skipped for which reason; empty where none is."""
    reasons = Counter(entry for entry in read() if isinstance(entry, str) and entry)
    return ", ".join(f"{count:,} {'pair' if count == 1 else 'pairs'} {reason}" for reason, count in reasons.most_common())


def _entries_at(places: NDArray[np.int64], read: PairReader, progress: ReadingProgress) -> Iterator[tuple[str, str]]:
    """Yield the pairs at some places of a text, rising; those that are left out are not among them."""
    wanted = iter(places.tolist())
    place = next(wanted, None)
    for number, entry in enumerate(read()):
        progress.update(number)
        if number == place:
            place = next(wanted, None)
            if not isinstance(entry, str):
                yield entry
        if place is None:
            break


def _sampled_places(read: PairReader, count: int) -> NDArray[np.int64]:
    """Return where the pairs stand that a vocabulary is made of, `count` being how many the text has: as many as may be, drawn evenly."""
    places = chosen(count, MOST_SAMPLED_LINES // 2, SAMPLE_SEED)
    size = sum(map(entry_bytes, _entries_at(places, read, ReadingProgress("measuring the text", count))))
    if size <= MOST_SAMPLED_BYTES:
        return places
    return places[chosen(len(places), len(places) * MOST_SAMPLED_BYTES // size, SAMPLE_SEED)]


class _Sample:
    """The lines of a text that its vocabulary is made of: those of the pairs at `places`, of `count`, left out ones included.

    `taken` is how many lines have been read, `sha256` their digest once all have been.
    """

    def __init__(self, read: PairReader, count: int, places: NDArray[np.int64]) -> None:
        self._read, self._count, self._places = read, count, places
        self.taken = 0
        self.sha256: str | None = None

    def lines(self) -> Iterator[str]:
        """Yield each."""
        digest = hashlib.sha256()
        for entry in _entries_at(self._places, self._read, ReadingProgress("sampling for the vocabulary", self._count)):
            for line in entry:
                self.taken += 1
                digest.update(counted(line))
                yield line
        self.sha256 = digest.hexdigest()


def _vocabulary(
    read: PairReader, count: int, size: int, *, bytes_too: bool, work: Path | None, packages: Sequence[str]
) -> tuple[bytes, bytes]:
    """Return the model and what is said of it: those that were kept in `work` of the same lines, or new ones, which are kept there."""
    places = _sampled_places(read, count)
    kept = None if work is None else _kept(work, _Sample(read, count, places), size)
    if kept is not None:
        return kept
    sample = _Sample(read, count, places)

    def lines() -> Iterator[str]:
        yield from sample.lines()
        if count > MOST_SAMPLED_LINES // 20:
            note(f"data: making a vocabulary of {size:,} pieces from {sample.taken:,} lines")

    try:
        model = train_vocabulary(lines(), size, bytes_too=bytes_too)
    except UsageError as error:
        if sample.sha256 is None:  # it could not be read to its end
            raise
        skipped = _skipped(read)
        if sample.taken:
            raise UsageError(f"{error}{f' Skipped: {skipped}.' if skipped else ''}") from error
        raise UsageError(
            f"data: no pair of sentences is left to train on{f': {skipped}' if skipped else ', as the text has none'}."
        ) from None
    facts = {
        "pieces": size,
        "pieces_sha256": Vocabulary(model).pieces_sha256,
        "byte_pieces": bytes_too,
        "sampled_lines": sample.taken,
        "sampled_sha256": sample.sha256,
        "lines": 2 * count,
        "sample_seed": SAMPLE_SEED,
        **{name: version(name) for name in ("sentencepiece", *packages)},
    }
    description = (json.dumps(facts, indent=2) + "\n").encode()
    if work is not None:
        for name, content in ((DESCRIPTION, description), (VOCABULARY, model)):  # the model last: with it both are there
            draft = work / f"{name}.draft"
            draft.write_bytes(content)
            os.replace(draft, work / name)
    return model, description


def _kept(work: Path, sample: _Sample, size: int) -> tuple[bytes, bytes] | None:
    """Return what was kept of a vocabulary of this size, None where there is none, or one of another text."""
    try:
        model, description = (work / VOCABULARY).read_bytes(), (work / DESCRIPTION).read_bytes()
        vocabulary, facts = Vocabulary(model), parse_json(description)
    except (FileNotFoundError, ValueError):
        return None
    if vocabulary.size != size or not isinstance(facts, dict) or facts.get("pieces_sha256") != vocabulary.pieces_sha256:
        return None
    for _ in sample.lines():
        pass
    return (model, description) if facts.get("sampled_sha256") == sample.sha256 else None
