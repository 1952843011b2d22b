"""Interrupted preparation of text: resumed for the same text only, kept unless refused."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from crosstrain.core.errors import TrainerError, UsageError
from crosstrain.data.base import LoadsInParts
from crosstrain.data.sources.translation import tokenizer as encoding
from crosstrain.data.sources.translation.pairs import PairSplits, prepared_pairs
from crosstrain.data.sources.translation.tokenizer import PairEncoder, Vocabulary, train_vocabulary
from crosstrain.data.store.build import build_store

ONE = [(f"sentence {number} of {number * 7 % 13} with words", f"Satz {number} von {number * 7 % 13} mit Wörtern") for number in range(120)]
OTHER = [(source.replace("sentence", "phrase"), target.upper()) for source, target in ONE]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(train_vocabulary(itertools.chain.from_iterable(ONE + OTHER), 400, bytes_too=True))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(encoding, "PART_PAIRS", 30)


def encoded(vocabulary, pairs, work, longest=100):
    encoder = PairEncoder(vocabulary, longest, work)
    blocks = [(block["source"], block["target"]) for block in encoder.blocks("test", lambda: iter(pairs), len(pairs))]
    texts = [[vocabulary.decode(column.example(number)) for column in columns] for columns in blocks for number in range(len(columns[0]))]
    assert texts == [list(pair) for pair in zip(*([line.decode() for line in lines] for lines in encoder.test_lines), strict=True)]
    return texts


@pytest.mark.usefixtures("small_parts")
def test_parts_of_another_text_are_not_reused(vocabulary, tmp_path):
    assert encoded(vocabulary, ONE[:60], tmp_path) == [list(pair) for pair in ONE[:60]]
    assert encoded(vocabulary, OTHER, tmp_path) == [list(pair) for pair in OTHER]
    mixed = [*ONE[:30], *OTHER[30:60], *ONE[60:]]
    assert encoded(vocabulary, mixed, tmp_path) == [list(pair) for pair in mixed]
    shifted = [(target, source) for source, target in ONE]
    assert encoded(vocabulary, shifted, tmp_path) == [list(pair) for pair in shifted]


@pytest.mark.usefixtures("small_parts")
def test_parts_of_another_length_limit_are_not_reused(vocabulary, tmp_path):
    sizes = np.array([max(map(len, vocabulary.encode(pair))) for pair in ONE])
    for longest in (int(sizes.max()), int(sizes.max()) - 1):
        expected = [list(pair) for pair, size in zip(ONE, sizes, strict=True) if size <= longest]
        assert encoded(vocabulary, ONE, tmp_path, longest) == expected
    assert len(expected) < len(ONE)


@pytest.mark.usefixtures("small_parts")
def test_parts_of_the_same_text_are_reused(vocabulary, tmp_path):
    encoded(vocabulary, ONE, tmp_path)
    kept = {path: path.stat().st_ino for path in tmp_path.glob("test-*.npz")}
    assert len(kept) == 4
    encoded(vocabulary, ONE, tmp_path)
    assert {path: path.stat().st_ino for path in tmp_path.glob("test-*.npz")} == kept


def prepared(pairs, work):
    """Prepare a text in that folder; return the attachments that identify its vocabulary."""
    readers = dict.fromkeys(("train", "test"), lambda: iter(pairs))
    splits = PairSplits(readers, dict.fromkeys(readers, len(pairs)))
    made = prepared_pairs(splits, vocabulary_size=350, bytes_too=True, longest=100, languages=("en", "de"), work=work)
    for blocks in made.blocks.values():
        assert sum(len(block["source"]) for block in blocks()) == len(pairs)
    return {name: content for name, content in made.attachments().items() if name.startswith("vocabulary.")}


def test_vocabulary_of_another_text_is_not_reused(tmp_path, tmp_path_factory):
    first = prepared(ONE, tmp_path)
    assert prepared(OTHER, tmp_path) == prepared(OTHER, tmp_path_factory.mktemp("empty")) != first
    assert prepared(ONE, tmp_path) == first


def test_vocabulary_of_the_same_text_is_reused(tmp_path):
    prepared(ONE, tmp_path)
    described = tmp_path / "vocabulary.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "sentencepiece": "an older release"}))
    assert json.loads(prepared(ONE, tmp_path)["vocabulary.json"])["sentencepiece"] == "an older release"


@pytest.mark.parametrize("description", [b"", b"[]", b"{}"])
def test_vocabulary_without_description_is_made_again(tmp_path, description):
    first = prepared(ONE, tmp_path)
    (tmp_path / "vocabulary.json").write_bytes(description)
    assert prepared(ONE, tmp_path) == first


def test_vocabulary_with_another_description_is_not_reused(tmp_path, tmp_path_factory):
    """As after a power loss between the two writes."""
    prepared(ONE, tmp_path)
    other_attachments = prepared(OTHER, tmp_path_factory.mktemp("empty"))
    (tmp_path / "vocabulary.json").write_bytes(other_attachments["vocabulary.json"])
    assert prepared(OTHER, tmp_path) == other_attachments


class AnErrorOfTheReaderError(BaseException):
    pass


ERRORS = [KeyboardInterrupt(), UsageError("data: it has changed while it was read"), RuntimeError("a mistake"), AnErrorOfTheReaderError()]


def broken(after, error):
    yield from ONE[:after]
    raise error


@pytest.mark.parametrize("after", [0, 50])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_interrupted_reading_is_no_refusal(tmp_path, after, error):
    with pytest.raises(type(error)) as raised:
        train_vocabulary(itertools.chain.from_iterable(broken(after, error)), 350, bytes_too=True)
    assert raised.value is error
    attempts = [broken(after, error)]  # the next attempt reads the whole text
    readers = {"train": lambda: attempts.pop() if attempts else iter(ONE), "test": lambda: iter(ONE)}
    splits = PairSplits(readers, dict.fromkeys(readers, 120))
    with pytest.raises(type(error)) as raised:
        prepared_pairs(splits, vocabulary_size=350, bytes_too=True, longest=100, languages=("en", "de"), work=tmp_path)
    assert raised.value is error
    assert not list(tmp_path.iterdir())


def source_that_raises(error):
    """Return a dataset made in parts that raises once a part is written."""

    def load_in(work, data_dir):
        (work / "part").write_bytes(b"done")
        raise error

    return SimpleNamespace(name="made", description="made", version=1, load=None, load_in=load_in)


@pytest.mark.parametrize(
    ("error", "stays"), [(KeyboardInterrupt(), True), (TrainerError("no network"), True), (UsageError("no text"), False)]
)
def test_work_is_kept_unless_the_text_is_refused(tmp_path, capsys, error, stays):
    source = source_that_raises(error)
    assert isinstance(source, LoadsInParts)
    with pytest.raises(type(error)):
        build_store(tmp_path, "made-v2.1", "made", source, None, again=False)
    assert [path.name for path in tmp_path.glob(".*.work/*")] == ["part"] * stays
    assert ("the finished parts of made are kept, and the next attempt resumes there" in capsys.readouterr().err) is stays


def test_refusal_keeps_work_of_an_earlier_attempt(tmp_path):
    for error in (KeyboardInterrupt(), UsageError("no text")):
        with pytest.raises(type(error)):
            build_store(tmp_path, "made-v2.1", "made", source_that_raises(error), None, again=False)
        assert [path.name for path in tmp_path.glob(".*.work/*")] == ["part"]
