"""A source that fails or returns something invalid is one error, as is an invalid text."""

import unicodedata
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import TrainerError, UsageError
from crosstrain.data.base import PreparedArrays, PreparedBlocks, PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.sources.translation.tokenizer import train_vocabulary
from crosstrain.data.store.build import build_store
from crosstrain.data.store.manifest import read_manifest
from crosstrain.data.store.writer import sentences_problem
from crosstrain.data.text import END, PADDING

MODEL = train_vocabulary(["red house", "green ship", "blue tree"], 40, bytes_too=False)
COLUMNS = tuple(ColumnSpec(side, "uint16", (None,)) for side in ("source", "target"))
FEATURES = TextFeatures({"source": 40, "target": 40}, ("en", "de"), "char")


def column(*rows):
    return Column(np.array([piece for row in rows for piece in row], np.uint16), np.cumsum([0, *map(len, rows)]).astype(np.int64))


def block(**columns):
    sentences = column([5, 6, END], [END])
    return {"source": sentences, "target": sentences, **columns}


def translation(**changes):
    blocks = {split: lambda: iter([block()]) for split in ("train", "test")}
    files = {"vocabulary.model": MODEL, "test.target.txt": b"one\ntwo\n"}
    return replace(PreparedColumns(COLUMNS, FEATURES, blocks, attachments=lambda: files), **changes)


def images(**changes):
    pixels = np.zeros((2, 1, 3, 3), np.uint8)
    both = lambda array: {"train": array, "test": array}  # noqa: E731
    return replace(PreparedArrays(both(pixels), both(np.zeros(2, np.int64)), 1, (0.5,), (0.5,)), **changes)


def block_source(first, **changes):
    return PreparedBlocks(
        **{"input_shape": (1, 3, 3), "classes": 1, "blocks": {split: lambda: [first] for split in ("train", "test")}, **changes}
    )


def single_block_source(columns):
    return translation(blocks={split: lambda: iter([columns]) for split in ("train", "test")})


def source_with_features(**changes):
    return translation(features=replace(FEATURES, **changes))


@dataclass
class Source:
    made: object
    name: str = "bad"
    description: str = "made for a test"
    version: int = 1
    loads: list = field(default_factory=list)

    def load(self, data_dir):
        return self.made() if callable(self.made) else self.made


def build(root, source):
    build_store(root, "made", source.name, source, None, again=True)


def fails(*_):
    raise KeyError("oops")


def fails_later():
    yield block()
    fails()


@pytest.mark.parametrize("made", [translation(), images()], ids=["translation", "images"])
def test_valid_source_is_stored(tmp_path, made):
    build(tmp_path, Source(made))
    assert (tmp_path / "made" / "manifest.json").exists()


def test_constant_channel_is_scaled_by_one_with_note(tmp_path, capsys):
    """The source counts its pixels itself; if pixels differ, a std of 0 is refused."""
    build(tmp_path, Source(images(mean=(0.0,), std=(0.0,))))
    assert read_manifest(tmp_path / "made").std == (1.0,)
    assert "data: bad: all train images have one value in channel 0, which is not scaled (std 1)" in capsys.readouterr().err
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 1, 3, 3)
    with pytest.raises(UsageError, match="std greater than 0"):
        build(tmp_path, Source(images(images={"train": pixels, "test": pixels}, std=(0.0,))))


@pytest.mark.parametrize(
    "made",
    [
        fails,
        translation(attachments=fails),
        translation(left_out=fails),
        translation(blocks={"train": fails, "test": fails}),
        translation(blocks={"train": fails_later, "test": fails_later}),
        block_source((np.zeros((2, 1, 3, 3), np.uint8), np.zeros(2, np.int64)), left_out=fails),
    ],
    ids=["load", "attachments", "left_out", "blocks", "a later block", "left_out of images"],
)
def test_error_in_source_is_reported_with_file_and_line(tmp_path, made):
    with pytest.raises(UsageError) as caught:
        build(tmp_path, Source(made))
    line = fails.__code__.co_firstlineno + 1
    assert str(caught.value) == f"data: the source of 'bad' is broken: KeyError: 'oops' ({__file__}, line {line})."
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_trainer_error_of_source_is_unchanged(tmp_path):
    def refuse():
        raise TrainerError("the network is down")

    with pytest.raises(TrainerError, match=r"^the network is down$"):
        build(tmp_path, Source(refuse))


def test_partial_work_is_retained_for_retry(tmp_path, capsys):
    class InParts(Source):
        def load_in(self, work, data_dir):
            (work / "half").touch()
            fails()

    with pytest.raises(UsageError, match="KeyError"):
        build(tmp_path, InParts(None))
    assert (tmp_path / ".made.work" / "half").exists()
    assert "kept" in capsys.readouterr().err


BROKEN = [
    (None, "its load returned None, not one of PreparedArrays"),
    ([1], "its load returned of the type list"),
    (translation(attachments=None), "its attachments is None, not a function"),
    (translation(attachments=lambda: None), "its attachments returned None, not a mapping from names to bytes"),
    (translation(attachments=lambda: {"a.txt": "text"}), "its attachment 'a.txt' is of the type str, not bytes"),
    (translation(left_out=()), "its left_out is of the type tuple, not a function"),
    (translation(left_out=lambda: [1]), "its left_out returned something else than texts"),
    (translation(notes=lambda: [1]), "its notes returned something else than texts"),
    (translation(blocks=None), "its blocks are None"),
    (translation(blocks={"train": fails}), "its blocks have the splits ['train'], not train and test"),
    (translation(blocks={"train": fails, "test": 3}), "its blocks have of the type int for test, not a function"),
    (translation(blocks={"train": lambda: None, "test": fails}), "its blocks of train returned None"),
    (translation(columns=["source"]), "its columns are not a tuple of ColumnSpec"),
    (translation(features=None), "its features are None, not TextFeatures or TableFeatures"),
    (source_with_features(vocabulary_sizes={"source": "40", "target": 40}), "its vocabulary_sizes are"),
    (single_block_source([1, 2]), "a train block is of the type list"),
    (single_block_source(block(source=[1, 2])), "train source of a block is not a Column of an array"),
    (single_block_source(block(source=Column([1, 2], None))), "train source of a block is not a Column of an array"),
    (single_block_source(block(source=Column(np.uint16(3)))), "train source of a block is not a Column of an array"),
    (single_block_source(block(source=Column(np.array([5, 2], np.uint16), [0, 2]))), "offsets that are no array"),
    (images(images=None), "its images are None"),
    (images(labels={"train": np.zeros(2, np.int64)}), "its labels have the splits ['train'], not train and test"),
    (images(labels={"train": [0], "test": [0]}), "its labels have of the type list for train, not an array"),
    (images(mean=None), "mean None and std (0.5,) are not a number for each channel"),
    (block_source(3), "a train block is of the type int, not two arrays"),
    (block_source(3, input_shape=(3, 3)), "its input_shape is (3, 3), not (channels, height, width)"),
    (block_source(3, classes="ten"), "its classes are 'ten'"),
    (
        block_source((np.array([[[[1]]], [[[2]]]], np.uint8), np.zeros(2, np.int64)), input_shape=(1, 1, 1), class_names=("\udce9",)),
        r"not in UTF-8: \xe9",
    ),
    (source_with_features(languages=("en",)), "its languages are ('en',); a translation has two"),
    (source_with_features(languages=("en", "de", "fr")), "a translation has two"),
    (source_with_features(bleu_tokenizer="flores200"), "its bleu_tokenizer is 'flores200'; one of 13a, intl, char, zh, none, ja-mecab, ko"),
    (source_with_features(bleu_tokenizer="chars"), "its bleu_tokenizer is 'chars'"),
    (source_with_features(vocabulary_sizes={"source": 40}), "no column 'target' of pieces"),
    (single_block_source(block(target=column([5], [5, END]))), "train target: sentence 1 does not end with END (2)"),
    (single_block_source(block(source=column([END], []))), "train source: sentence 2 has no pieces, not even END (2)"),
    (single_block_source(block(source=column([END], [5, PADDING, END]))), "train source: sentence 2 has padding (0) among its pieces"),
    (single_block_source(block(source=column([END], [5, END, END]))), "train source: sentence 2 has END (2) among its pieces"),
]


@pytest.mark.parametrize(("made", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_invalid_result_is_refused_and_leaves_nothing(tmp_path, made, words):
    with pytest.raises(UsageError) as caught:
        build(tmp_path, Source(made if made is None else lambda: made))
    assert str(caught.value).startswith("data: the source of 'bad' is broken: ")
    assert words in str(caught.value)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


SENTENCES = st.lists(
    st.lists(st.integers(0, 5), max_size=4).map(lambda row: [*row, END]) | st.lists(st.integers(0, 5), max_size=3), max_size=6
)


@given(SENTENCES, st.integers(0, 9))
def test_sentences_are_valid_if_each_is(rows, first):
    wrong = [not row or row[-1] != END or PADDING in row or END in row[:-1] for row in rows]
    problem = sentences_problem(column(*rows), first)
    assert (problem is not None) == any(wrong)
    if problem is not None:
        assert wrong[int(problem.split()[1]) - first - 1]


def named_images(*names):
    pixels = {split: np.zeros((2, 1, 3, 3), np.uint8) for split in ("train", "test")}
    return images(images=pixels, classes=len(names), class_names=names)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (images(mean=(127.0,), std=(50.0,)), "pixels scaled to 0…1"),
        (images(mean=(-0.1,)), "pixels scaled to 0…1"),
        (images(std=(1.5,)), "pixels scaled to 0…1"),
        (
            block_source((np.zeros((2, 1, 3, 3), np.uint8), np.zeros(2, np.int64)), left_out=lambda: "file.png"),
            "left_out returned something",
        ),
        (block_source((np.zeros((2, 1, 3, 3), np.uint8), np.zeros(2, np.int64)), notes=lambda: "hello"), "notes returned something"),
        (named_images("a", "b", "a"), "class_names: 'a' is the name of several classes"),
        (lambda: exit(3), r"SystemExit: 3 \(.*test_broken_sources\.py, line "),
    ],
)
def test_unintended_value_is_refused(tmp_path, made, words):
    with pytest.raises(UsageError, match=f"the source of 'bad' is broken: .*{words}"):
        build(tmp_path, Source(made))


def test_classes_of_whole_arrays_have_names(tmp_path, capsys):
    build(tmp_path, Source(named_images("a", "Größe", unicodedata.normalize("NFD", "Größe"))))
    assert read_manifest(tmp_path / "made").class_names[:2] == ("a", "Größe")
    assert "data: bad: two classes are called 'Größe', in different Unicode forms (NFC and NFD)" in capsys.readouterr().err


def test_empty_class_is_noted(tmp_path, capsys):
    labels = {"train": np.array([0, 2]), "test": np.array([1, 1])}
    build(tmp_path, Source(replace(named_images("a", "b", "c"), labels=labels)))
    assert read_manifest(tmp_path / "made").notes[:2] == ("classes without a train example: b", "classes without a test example: a, c")
    assert "data: bad: classes without a test example: a, c\n" in capsys.readouterr().err
    build(tmp_path, Source(images(labels=labels, classes=30)))
    assert read_manifest(tmp_path / "made").notes[1] == "classes without a test example: 0, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 19 more"
