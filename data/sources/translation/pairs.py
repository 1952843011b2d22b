"""Prepares sentence pairs for the store: a vocabulary, encoded columns, and the test lines."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....core.bounded_json import parse_json
from ....core.console import note
from ....core.drafts import replacing
from ....core.errors import UsageError
from ...base import PreparedColumns, Split, TextFeatures
from ...columns import ColumnSpec
from .text_files import ReadingProgress, entry_bytes
from .tokenizer import DESCRIPTION, VOCABULARY, PairEncoder, PairReader, Vocabulary, counted, train_vocabulary

MAX_SAMPLED_LINES, MAX_SAMPLED_BYTES = 1_000_000, 256 << 20
"""Limits of a vocabulary's sample, both languages together; the second is for texts with long lines."""

SAMPLE_SEED = 1
_KEYS = 1 << 20  # drawn at a time


def chosen(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """Return at most `most` of 0 … count − 1, ascending.

    Equal seeds give equal numbers on every machine.
    """
    if count <= most:
        return np.arange(count)
    random = np.random.Philox(np.random.SeedSequence([seed, count]))
    keys, places = np.empty(0, np.uint64), np.empty(0, np.int64)
    for start in range(0, count, _KEYS):  # in parts, as memory must not grow with the text
        end = min(start + _KEYS, count)
        keys = np.concatenate([keys, random.random_raw(end - start)])
        places = np.concatenate([places, np.arange(start, end)])
        if len(keys) > most:
            least = np.argpartition(keys, most)[:most]
            keys, places = keys[least], places[least]
    return np.sort(places)


@dataclass(frozen=True, slots=True)
class PairSplits:
    """Sentence pairs by split: a reader, the number of pairs with skipped ones, line numbers."""

    readers: Mapping[Split, PairReader]
    counts: Mapping[Split, int]
    line_numbers: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)

    @classmethod
    def from_lists(cls, train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> PairSplits:
        """Return the splits of pairs in memory."""
        return cls({"train": lambda: iter(train), "test": lambda: iter(test)}, {"train": len(train), "test": len(test)})


def prepared_pairs(
    splits: PairSplits,
    *,
    vocabulary_size: int,
    bytes_too: bool,
    longest: int,
    languages: tuple[str, str],
    work: Path,
    bleu_tokenizer: str = "13a",
    packages: Sequence[str] = (),
) -> PreparedColumns:
    """Return the columns of a translation.

    The vocabulary is made here, the rest when the store asks. `bytes_too`, `longest` and `work` as in `train_vocabulary` and `PairEncoder`.
    `packages`, with sentencepiece, are those whose versions determine the text; `vocabulary.json` lists them. Raises UsageError if no
    vocabulary can be made.
    """
    readers, counts = splits.readers, splits.counts
    model, description = _make_vocabulary(
        readers["train"], counts["train"], vocabulary_size, bytes_too=bytes_too, work=work, packages=packages
    )
    vocabulary = Vocabulary(model)
    encoder = PairEncoder(vocabulary, longest, work, splits.line_numbers)
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


def _describe_skipped(read: PairReader) -> str:
    reasons = Counter(entry for entry in read() if isinstance(entry, str) and entry)
    return ", ".join(f"{count:,} {'pair' if count == 1 else 'pairs'} {reason}" for reason, count in reasons.most_common())


def _entries_at(places: NDArray[np.int64], read: PairReader, progress: ReadingProgress) -> Iterator[tuple[str, str]]:
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
    places = chosen(count, MAX_SAMPLED_LINES // 2, SAMPLE_SEED)
    size = sum(map(entry_bytes, _entries_at(places, read, ReadingProgress("measuring the text", count))))
    if size <= MAX_SAMPLED_BYTES:
        return places
    return places[chosen(len(places), len(places) * MAX_SAMPLED_BYTES // size, SAMPLE_SEED)]


class _Sample:
    """The lines of the pairs at `places`; `sha256` is their digest once all have been read."""

    def __init__(self, read: PairReader, count: int, places: NDArray[np.int64]) -> None:
        self._read, self._count, self._places = read, count, places
        self.taken = 0
        self.sha256: str | None = None

    def lines(self) -> Iterator[str]:
        digest = hashlib.sha256()
        for entry in _entries_at(self._places, self._read, ReadingProgress("sampling for the vocabulary", self._count)):
            for line in entry:
                self.taken += 1
                digest.update(counted(line))
                yield line
        self.sha256 = digest.hexdigest()


def _make_vocabulary(
    read: PairReader, count: int, size: int, *, bytes_too: bool, work: Path, packages: Sequence[str]
) -> tuple[bytes, bytes]:
    """Return model and description, those in `work` if they are of the same lines."""
    places = _sampled_places(read, count)
    if (stored := _stored_vocabulary(work, _Sample(read, count, places), size)) is not None:
        return stored
    sample = _Sample(read, count, places)

    def lines() -> Iterator[str]:
        yield from sample.lines()
        if count > MAX_SAMPLED_LINES // 20:
            note(f"data: making a vocabulary of {size:,} pieces from {sample.taken:,} lines")

    try:
        model = train_vocabulary(lines(), size, bytes_too=bytes_too)
    except UsageError as error:
        if sample.sha256 is None:  # the text could not be read to its end
            raise
        skipped = _describe_skipped(read)
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
    for name, content in ((DESCRIPTION, description), (VOCABULARY, model)):  # the model last, so that it implies the description
        with replacing(work / name) as draft:
            draft.write_bytes(content)
    return model, description


def _stored_vocabulary(work: Path, sample: _Sample, size: int) -> tuple[bytes, bytes] | None:
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


TEST_REFERENCES = "test.target.txt"  # original references of the test split, one per line
SCORING_FILES = (VOCABULARY, TEST_REFERENCES)


def reference_lines(content: bytes) -> list[str]:
    """Return the lines of `TEST_REFERENCES`. Raises ValueError unless they are UTF-8."""
    return content.decode().removesuffix("\n").split("\n")


def scoring_problem(files: Mapping[str, bytes], vocabulary_sizes: Mapping[str, int], test_examples: int) -> str | None:
    """Return why translations into the text of `files` cannot be scored, or None.

    Raises MissingPackageError.
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
