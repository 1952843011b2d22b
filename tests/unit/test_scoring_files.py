"""A translation dataset's vocabulary and references fit its columns, or it is refused."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from crosstrain.core.errors import UsageError
from crosstrain.data.base import PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.sources.translation.tokenizer import Vocabulary, train_vocabulary
from crosstrain.data.store import stored_dataset
from crosstrain.data.store.build import build_store
from crosstrain.models.decoding import TranslationQuality, refuse_unscorable

LINES = [f"{colour} {noun}" for colour in ("red", "green", "blue") for noun in ("house", "ship", "tree")]
PIECES = 40
MODEL = train_vocabulary(LINES, PIECES, bytes_too=False)
REFERENCES = "".join(f"{line}\n" for line in LINES).encode()
FILES = {"vocabulary.model": MODEL, "test.target.txt": REFERENCES}


@dataclass
class Source:
    """Each line is its own translation, with any attachments."""

    files: dict = field(default_factory=lambda: FILES)
    pieces: int = PIECES
    languages: tuple = ("en", "de")
    name: str = "text"
    description: str = "made for a test"
    version: int = 1

    def load(self, data_dir):
        rows = Vocabulary(MODEL).encode(LINES)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        column = Column(np.concatenate(rows).astype(np.uint16), offsets)

        def blocks():
            yield {"source": column, "target": column}

        columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
        features = TextFeatures({"source": self.pieces, "target": self.pieces}, self.languages, "char")
        return PreparedColumns(columns, features, {"train": blocks, "test": blocks}, attachments=lambda: self.files)


def made(root, source):
    build_store(root, "made", source.name, source, None, again=True)
    return stored_dataset._open(root / "made", "text", None, always=True)


def test_valid_scoring_files_are_used(tmp_path):
    data = made(tmp_path, Source())
    assert data.info.text.languages == ("en", "de")
    refuse_unscorable(data, TranslationQuality("source", "target", "char"))
    made(tmp_path, Source({**FILES, "test.target.txt": REFERENCES[:-1]}))  # the last line may have no end


BROKEN = [
    ({"files": {"vocabulary.model": MODEL}}, r"no attachment test\.target\.txt"),
    ({"files": {}}, r"no attachment vocabulary\.model and no test\.target\.txt"),
    ({"files": {**FILES, "test.target.txt": REFERENCES.partition(b"\n")[2]}}, r"test\.target\.txt has 8 lines for 9 test examples"),
    ({"files": {**FILES, "test.target.txt": REFERENCES + b"more\n"}}, r"test\.target\.txt has 10 lines for 9 test examples"),
    ({"files": {**FILES, "test.target.txt": b"\xff\n" * 9}}, r"test\.target\.txt is not UTF-8"),
    ({"files": {**FILES, "vocabulary.model": b"pieces"}}, r"vocabulary\.model is not a model of sentencepiece"),
    ({"pieces": 60}, r"vocabulary\.model has 40 pieces, and its vocabulary_sizes say 60 of source"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_invalid_scoring_files_are_refused_in_preparation(tmp_path, change, message):
    with pytest.raises(UsageError, match=rf"the source of 'text' is broken: it says its languages en, de, and it.*{message}"):
        made(tmp_path, replace(Source(), **change))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_invalid_scoring_files_are_refused_before_a_run(tmp_path, change, message):
    data = made(tmp_path, replace(Source(), languages=(), **change))  # without languages it is not checked in preparation
    with pytest.raises(UsageError, match=rf"translations of 'text' cannot be scored: it.*{message}"):
        refuse_unscorable(data, TranslationQuality("source", "target", "char"))
