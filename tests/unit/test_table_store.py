"""Stores of tables and of texts with classes: they round-trip, and numbers are normalised."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crosstrain.checkpoint.meta import data_info, described_data
from crosstrain.core.errors import DamagedStoreError, UsageError
from crosstrain.data.base import PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.features import read_column
from crosstrain.data.store import stored_dataset
from crosstrain.data.store.build import build_store
from crosstrain.data.store.dataset_list import described
from crosstrain.data.store.manifest import FileEntry, file_sha256, read_manifest, write_manifest

sys.path.insert(0, str(Path(__file__).parent.parent / "tables"))
from crosstrain_tables import HOUSES, PHRASES, RINGS, TOPICS

del sys.path[0]  # else its datasets are those of this process

MADE = {made.name: made for made in (RINGS, HOUSES, TOPICS, PHRASES)}


def build_made(root, source):
    build_store(root, "made", source.name, source, None, again=True)
    return stored_dataset._open(root / "made", source.name, None, always=True)


@pytest.mark.parametrize("name", MADE)
def test_store_of_a_table_round_trips(tmp_path, name):
    dataset, prepared = build_made(tmp_path, MADE[name]), MADE[name].load(None)
    assert dataset.info.features == prepared.features
    assert read_manifest(dataset.path).info() == dataset.info
    assert data_info(described_data(dataset.info, "", None)) == dataset.info
    (block,) = prepared.blocks["test"]()
    for spec in prepared.columns:
        np.testing.assert_array_equal(dataset.column("test", spec.name).values, block[spec.name].values)


def test_models_read_numbers_of_mean_0_and_std_1(tmp_path):
    dataset = build_made(tmp_path, HOUSES)
    for name in ("area", "place"):
        values = read_column(dataset, "train", name).values
        assert values.dtype == np.float32
        np.testing.assert_allclose(values.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(values.std(0), 1, atol=1e-6)
    np.testing.assert_array_equal(read_column(dataset, "train", "price").values, dataset.column("train", "price").values)
    mean, std = {"area": [0.0], "place": [0.0] * 3}, {"area": [1.0], "place": [1.0] * 3}
    same = dataset.normalised_as(mean, std)
    np.testing.assert_array_equal(read_column(same, "test", "place").values, dataset.column("test", "place").values)


def test_info_counts_examples_of_classes(tmp_path):
    facts = described(build_made(tmp_path, RINGS))
    assert facts["class_names"] == ["a", "b", "c"]
    assert facts["smallest_class_examples"]["test"] == min(np.bincount(RINGS.examples(1, 100)["ring"].values))
    assert described(build_made(tmp_path, PHRASES))["vocabulary_sizes"] == {"tokens": 30}


@pytest.mark.parametrize(
    ("source", "features", "problem"),
    [
        (RINGS, {"target": "rings"}, "there is no column 'rings'; there are x, y, ring"),
        (RINGS, {"classes": 2, "class_names": ()}, "train ring lies in 0…2, not in 0…1"),
        (RINGS, {"classes": 0, "class_names": ()}, "'ring' is int64 [] with 0 classes; it has to be int64 [] with classes"),
        (RINGS, {"class_names": ("a", "b")}, "class_names: 2 names for 3 classes"),
        (RINGS, {"class_names": ("a", "b", "a")}, "'a' is the name of several classes"),
        (RINGS, {"classes": "many"}, "its classes are 'many', not a whole number"),
        (HOUSES, {"classes": 2}, "'price' is float32 [] with 2 classes"),
        (HOUSES, {"std": {"area": (1.0,)}}, "they have to be of the same columns"),
        (HOUSES, {"mean": {"price": (1.0,)}, "std": {"price": (1.0,)}}, "'price' is no input column of float32"),
        (HOUSES, {"mean": {"place": (1.0,)}, "std": {"place": (1.0,)}}, "'place' have 1 and 1 numbers, and have to have 3"),
        (HOUSES, {"mean": {"area": (1.0,)}, "std": {"area": (0.0,)}}, "the std at least 1e-30"),
        (HOUSES, {"mean": {"area": (float("nan"),)}, "std": {"area": (1.0,)}}, "within ±1e+30"),
        (HOUSES, {"mean": None}, "its mean and std are not numbers by name of a column"),
        (PHRASES, {"classes": 0}, "'mood' of a text has to be a column of classes"),
        (PHRASES, {"target": ""}, "classes: there is no target column that has them"),
    ],
)
def test_features_that_fit_no_column_are_refused(tmp_path, source, features, problem):
    class Changed:
        name, version = source.name, 1

        def load(self, data_dir):
            prepared = source.load(None)
            return replace(prepared, features=replace(prepared.features, **features))

    with pytest.raises(UsageError) as refused:
        build_made(tmp_path, Changed())
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("source", "column", "value", "problem"),
    [
        (HOUSES, "area", float("nan"), "area has values that are no finite numbers"),
        (HOUSES, "price", float("inf"), "price has values that are no finite numbers"),
        (TOPICS, "topics", 2, "topics lies in 0…2, not in 0…1"),
        (RINGS, "ring", -1, "ring lies in -1…2, not in 0…2"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, source, column, value, problem):
    store = build_made(tmp_path, source).path

    class Changed:
        name, version = source.name, 1

        def load(self, data_dir):
            prepared = source.load(None)
            (block,) = prepared.blocks["train"]()
            values = block[column].values.copy()
            values.flat[-1] = value
            return replace(prepared, blocks={**prepared.blocks, "train": lambda: iter([{**block, column: Column(values)}])})

    with pytest.raises(UsageError) as refused:
        build_store(tmp_path, "other", source.name, Changed(), None, again=True)
    assert f"train {problem}" in str(refused.value)
    path = store / f"train.{column}.values.npy"
    values = np.load(path)
    values.flat[-1] = value
    path.chmod(0o644)
    np.save(path, values)
    manifest = read_manifest(store)
    entry = FileEntry(sha256=file_sha256(path), bytes=path.stat().st_size, dtype=str(values.dtype), shape=values.shape)
    write_manifest(store, manifest.model_copy(update={"files": {**manifest.files, path.name: entry}}))
    with pytest.raises(DamagedStoreError) as damaged:
        stored_dataset._open(store, source.name, None, always=True)
    assert problem in str(damaged.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"mean": None},
        {"target": "nobody"},
        {"classes": 1 << 30},
        {"class_names": ("a",)},
        {"mean": {"x": (1.0, 2.0)}, "std": {"x": (1.0, 2.0)}},
    ],
)
def test_manifest_of_other_features_is_refused(tmp_path, changes):
    store = build_made(tmp_path, RINGS).path
    write_manifest(store, read_manifest(store).model_copy(update=changes))
    with pytest.raises(DamagedStoreError, match=r"manifest\.json"):
        stored_dataset._open(store, "rings", None, always=True)


def test_store_without_classes_is_written_as_before(tmp_path):
    class Plain:
        name, version = "plain", 1

        def load(self, data_dir):
            block = {"tokens": Column(np.zeros(2, np.uint16), np.array([0, 1, 2]))}
            blocks = {split: lambda: iter([block]) for split in ("train", "test")}
            return PreparedColumns((ColumnSpec("tokens", "uint16", (None,)),), TextFeatures({"tokens": 9}), blocks)

    store = build_made(tmp_path, Plain()).path
    text = (store / "manifest.json").read_text()
    assert not any(f'"{name}"' in text for name in ("target", "classes", "class_names", "mean", "std", "notes"))
