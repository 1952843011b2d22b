"""Stores of columns: they round-trip in any blocks; damaged or broken parts are named."""

import io
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstrain.core.errors import DamagedStoreError, UsageError
from crosstrain.data.base import PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.store import stored_dataset
from crosstrain.data.store.build import build_store
from crosstrain.data.store.manifest import FileEntry, file_sha256, read_manifest, write_manifest

TOKENS, SCORE = ColumnSpec("tokens", "uint16", (None,)), ColumnSpec("score", "float32")


@dataclass
class Source:
    """Sequences of tokens with a number each, in blocks of `block` examples."""

    sequences: dict
    block: int = 2
    vocabulary: int = 100
    columns: tuple = (TOKENS, SCORE)
    name: str = "sequences"
    description: str = "made for a test"
    version: int = 1
    spoil: dict = field(default_factory=dict)

    def load(self, data_dir):
        def blocks(split):
            for start in range(0, len(self.sequences[split]), self.block):
                chosen = self.sequences[split][start : start + self.block]
                offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in chosen])]).astype(np.int64)
                values = np.array([token for sequence in chosen for token in sequence], dtype=np.uint16)
                yield {"tokens": Column(values, offsets), "score": Column(np.arange(len(chosen), dtype=np.float32)), **self.spoil}

        features = TextFeatures({"tokens": self.vocabulary})
        return PreparedColumns(self.columns, features, {split: lambda split=split: blocks(split) for split in ("train", "test")})


def build_made(root, source):
    build_store(root, "made", source.name, source, None, again=True)
    return root / "made"


SEQUENCES = st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=9)


@settings(deadline=None, derandomize=True, database=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEQUENCES, SEQUENCES, st.integers(1, 4))
def test_store_round_trips(tmp_path, train, test, block):
    folder = build_made(tmp_path, Source({"train": train, "test": test}, block))
    dataset = stored_dataset._open(folder, "sequences", None, always=True)
    for split, sequences in (("train", train), ("test", test)):
        column = dataset.column(split, "tokens")
        assert [column.example(index).tolist() for index in range(len(column))] == sequences
        assert dataset.weights(split, "tokens_tokens").tolist() == [len(sequence) for sequence in sequences]
        assert dataset.weights(split, "examples").tolist() == [1] * len(sequences)
    assert dataset.info.columns == (TOKENS, SCORE)
    assert dataset.info.text.vocabulary_sizes == {"tokens": 100}
    assert read_manifest(folder).info() == dataset.info


@pytest.fixture
def store(tmp_path):
    return build_made(tmp_path, Source({"train": [[1, 2, 3], [], [4]], "test": [[5]]}))


def test_damaged_column_is_named(store):
    path = store / "train.tokens.values.npy"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(DamagedStoreError, match=r"train\.tokens\.values\.npy differs from its sha256"):
        stored_dataset._open(store, "sequences", None, always=True)


def test_missing_column_is_reported_with_existing_ones(store):
    dataset = stored_dataset._open(store, "sequences", None, always=False)
    with pytest.raises(UsageError, match="no column 'target'; it has tokens, score"):
        dataset.column("train", "target")
    with pytest.raises(UsageError, match="no weights called 'target_tokens'; it has examples, tokens_tokens"):
        dataset.weights("train", "target_tokens")
    with pytest.raises(UsageError, match="has no images"):
        dataset.info.input_shape  # noqa: B018 - reading it is what fails


def test_images_are_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path))
    digits = stored_dataset.open_dataset("digits")
    assert digits.info.columns == (ColumnSpec("image", "uint8", (1, 8, 8)), ColumnSpec("label", "int64"))
    np.testing.assert_array_equal(digits.column("test", "image").values, digits.images("test"))
    np.testing.assert_array_equal(digits.column("test", "label").values, digits.labels("test"))
    with pytest.raises(UsageError, match="is no text"):
        digits.info.text  # noqa: B018 - reading it is what fails


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocabulary": 3}, "train tokens lies in 1…4, not in 0…2"),
        ({"spoil": {"more": Column(np.zeros(2))}}, "has the columns more, score, tokens"),
        ({"spoil": {"score": Column(np.zeros(9, np.float32))}}, "different numbers of examples"),
        ({"spoil": {"score": Column(np.zeros(2, np.int32))}}, "score is int32"),
        ({"sequences": {"train": [[1]], "test": []}}, "there is no test example"),
    ],
)
def test_broken_source_is_refused_and_leaves_nothing(tmp_path, change, words):
    source = Source(**{"sequences": {"train": [[1, 2, 3], [4]], "test": [[2]]}, **change})
    with pytest.raises(UsageError, match=words):
        build_made(tmp_path, source)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def rewrite(store, name, array):
    """Replace an array or file of a store, with right digests."""
    path = store / name
    path.chmod(0o644)
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array)
    manifest = read_manifest(store)
    entry = manifest.files[name]
    shape, dtype = (entry.shape, entry.dtype) if isinstance(array, bytes) else (array.shape, str(array.dtype))
    files = {**manifest.files, name: FileEntry(sha256=file_sha256(path), bytes=path.stat().st_size, dtype=dtype, shape=shape)}
    write_manifest(store, manifest.model_copy(update={"files": files}))


def archive():
    file = io.BytesIO()
    np.savez(file, values=np.zeros(4, np.uint16))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("train.tokens.values.npy", b"", "is no array file"),
        ("train.tokens.values.npy", archive(), "is no array file"),
        ("train.tokens.values.npy", np.array([1, 2, 60000, 4], np.uint16), "tokens lies in 1…60000, not in 0…99"),
        ("train.tokens.offsets.npy", np.array([0, 4, 3, 4]), "do not rise from 0 to 4"),
        ("train.tokens.offsets.npy", np.array([0, 2, 3, 9]), "do not rise from 0 to 4"),
        ("train.tokens.offsets.npy", np.array([0, 4]), "1 examples instead of 3"),
        ("train.tokens.offsets.npy", np.array([0, 2, 3, 4], np.int32), "not int64"),
    ],
)
def test_store_with_right_digests_and_wrong_contents_is_refused(store, name, array, words):
    rewrite(store, name, array)
    with pytest.raises(DamagedStoreError, match=words):
        stored_dataset._open(store, "sequences", None, always=False)
    assert any(check.problem for check in stored_dataset.verify_store("sequences", store).files)


def test_manifest_of_another_dataset_is_damage(store):
    write_manifest(store, read_manifest(store).model_copy(update={"name": "nobodys"}))
    report = stored_dataset.verify_store("sequences", store)
    assert [(check.name, check.problem) for check in report.damaged] == [("manifest.json", "says that it is of 'nobodys'")]
    assert "data prepare sequences" in report.remedy


def test_manifest_without_examples_is_refused(store):
    manifest = read_manifest(store)
    write_manifest(store, manifest.model_copy(update={"sizes": {"train": 0, "test": 1}}))
    with pytest.raises(DamagedStoreError, match="has no train example"):
        stored_dataset._open(store, "sequences", None, always=False)
