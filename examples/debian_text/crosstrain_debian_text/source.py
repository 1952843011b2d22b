"""debian-text:en-de: real sentences of English and German from the user's Debian archive.

They are extracted on the user's machine; none of the text is part of this program. The packages have their own licences, which are printed
when they are read and apply to the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.core.console import note
from crosstrain.core.errors import UsageError
from crosstrain.data.base import PreparedColumns
from crosstrain.data.sources.arguments import read_arguments, whole_number, write_arguments
from crosstrain.data.sources.translation.pairs import PairSplits, prepared_pairs
from crosstrain.data.sources.translation.text_files import text_package
from crosstrain.data.sources.translation.tokenizer import BYTE_PIECES, MAX_VOCABULARY

from .packages import PACKAGES, Extraction, fetch

_NAME = "debian-text"
_LANGUAGES = "en-de"
_DEFAULTS = {"vocabulary": "8000"}
_TEST = 2000
_TEST_WORDS = 4  # per test sentence: BLEU counts four in a row
_MAX_LENGTH = 200


@dataclass(frozen=True)
class _DebianText:
    """Messages of programs and paragraphs of manuals, with a vocabulary of this size."""

    vocabulary: int = 8000

    description = "messages and manuals from packages of your Debian archive, made here by apt: debian-text:en-de?vocabulary=8000"
    version = 2

    @property
    def name(self) -> str:
        arguments = write_arguments({"vocabulary": str(self.vocabulary)}, _DEFAULTS)
        return f"{_NAME}:{_LANGUAGES}?{arguments}" if arguments else _NAME

    def with_arguments(self, text: str) -> _DebianText:
        languages, _, arguments = text.partition("?")
        if languages != _LANGUAGES:
            raise UsageError.of(f"data: languages of {_NAME!r}", languages, _LANGUAGES, [_LANGUAGES])
        values = read_arguments(_NAME, arguments, _DEFAULTS)
        return _DebianText(_pieces(values["vocabulary"]))

    def with_vocabulary(self, size: int) -> _DebianText:
        return _DebianText(_pieces(str(size)))

    def originals(self, data_dir: Path) -> Sequence[Path]:
        packages = sorted(data_dir.glob("*.deb"))
        if not packages:
            raise UsageError(f"data_dir: {str(data_dir)!r} holds no .deb files; leave --data-dir out, and apt fetches them.")
        return packages

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedColumns:
        """Fetch the packages unless `data_dir` holds some, and read them.

        Keeps finished parts in `work`.
        """
        text_package("sentencepiece")  # before fetching half a gigabyte
        missing: list[str] = []
        if data_dir is None:
            packages = work / "packages"
            packages.mkdir(exist_ok=True)
            files, missing = fetch(PACKAGES, packages)
        else:
            files = list(self.originals(data_dir))
        extraction = Extraction(files)
        train, test = _split(extraction.pairs())
        if not train:
            raise UsageError(f"data: {len(files)} packages have no English and German text to learn from; {_NAME} needs others.")
        record = _record(extraction, missing, train, test)
        if missing:
            note(f"data: {_NAME}: skipped, as they are not in this archive: {', '.join(missing)}")
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in record["left_out"].items())
        note(f"data: {_NAME}: {record['pairs']['unique']:,} different pairs, digest {record['pairs_sha256']}; skipped: {reasons or 'none'}")
        prepared = prepared_pairs(
            PairSplits.from_lists(train, test),
            vocabulary_size=self.vocabulary,
            bytes_too=True,
            longest=_MAX_LENGTH,
            languages=("en", "de"),
            work=work,
        )
        content = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
        return replace(prepared, attachments=lambda: {**prepared.attachments(), "packages.json": content})


def _pieces(text: str) -> int:
    return whole_number(_NAME, "vocabulary", text, BYTE_PIECES + 64, MAX_VOCABULARY)


def _split(pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (train, test): at most a tenth, drawn with a fixed seed, is test.

    Train shares no text with it.
    """
    keys = np.random.Philox(np.random.SeedSequence([22, len(pairs)])).random_raw(len(pairs))
    test: list[tuple[str, str]] = []
    sources: set[str] = set()
    for place in np.argsort(keys, kind="stable").tolist():
        if len(test) == min(_TEST, max(1, len(pairs) // 10)):
            break
        source, target = pairs[place]
        if len(source.split()) >= _TEST_WORDS and source not in sources:
            sources.add(source)
            test.append((source, target))
    targets = {target for _, target in test}
    return [pair for pair in pairs if pair[0] not in sources and pair[1] not in targets], test


def _record(
    extraction: Extraction, missing: Sequence[str], train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for pair in (*train, *test):
        digest.update("\t".join(pair).encode() + b"\n")
    packages = [
        {
            "name": package.name,
            "version": package.version,
            "sha256": package.sha256,
            "licences": list(package.licences),
            "pairs": extraction.found[package.name],
        }
        for package in extraction.packages
    ]
    counts = {"train": len(train), "test": len(test), "unique": sum(extraction.found.values())}
    left_out = dict(extraction.left_out.most_common())
    return {
        "pairs_sha256": digest.hexdigest(),
        "pairs": counts,
        "not_in_the_archive": list(missing),
        "left_out": left_out,
        "packages": packages,
    }


DATASET = _DebianText()
