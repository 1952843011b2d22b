"""``npz:PATH``: arrays of a file become images, columns and a target."""

import io
import json
import tracemalloc
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from crosstrain.core.errors import UsageError
from crosstrain.data.features import read_column
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.launch.driver.resumption import foreign_settings

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(3, 2, (50, 4)), np.arange(50) % 3


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def opened(folder, arguments="", compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(folder / "a.npz", **arrays)
    return open_dataset(f"npz:{folder / 'a.npz'}{arguments}")


def problem(folder, arguments="", **arrays):
    with pytest.raises(UsageError) as error:
        opened(folder, arguments, **arrays)
    return str(error.value)


def npz_of_header(folder, header):
    path = folder / "made.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x", "y"):
            text = header.encode().ljust(118) + b"\n"
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    return path


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-4, -2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (17592186044416, 0)}",
        "{'descr': (), 'fortran_order': False, 'shape': (4,)}",
        "{'descr': ('<f4',), 'fortran_order': False, 'shape': (4,)}",
        "(" * 100,
        "-" * 9000,
        "  {}",
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header):
    with pytest.raises(UsageError, match=r"made\.npz': (this is no \.npz file|the examples of the array)"):
        open_dataset(f"npz:{npz_of_header(tmp_path, header)}")


def test_texts_of_no_characters_are_refused(tmp_path):
    texts = np.frombuffer(b"\xff" * 200, "<U1")
    assert "characters that do not exist" in problem(tmp_path, x=X, y=texts)


def test_differences_below_float32_are_refused(tmp_path):
    assert "Subtract their mean" in problem(tmp_path, x=1e10 + X.astype(np.float64), y=Y)
    assert opened(tmp_path, x=1e3 + X.astype(np.float64), y=Y).info.sizes


def test_grey_images_of_16_bits_have_one_channel(tmp_path):
    x = (np.arange(50 * 6 * 4).reshape(50, 6, 4) * 37 % 60_000).astype(np.uint16)
    features = opened(tmp_path, x=x, y=Y).info.features
    assert (len(set(features.mean["x"])), len(set(features.std["x"]))) == (1, 1)


def test_images_with_alpha_have_four_channels(tmp_path, capfd):
    draw = np.random.default_rng(0)
    assert opened(tmp_path, x=draw.integers(0, 255, (50, 6, 5, 4), np.uint8), y=Y, arguments="?task=classes").info.input_shape == (4, 6, 5)
    opened(tmp_path, x=draw.integers(0, 255, (50, 6, 5, 7), np.uint8), y=Y, arguments="?task=classes")
    assert "layout=channels-last or channels-first makes images" in capfd.readouterr().err


def test_numbers_are_standardised_by_the_training_rows(tmp_path):
    data = opened(tmp_path, x=X, y=Y, x_test=X[:9], y_test=Y[:9])
    assert data.info.sizes == {"train": 50, "test": 9}
    assert data.info.features.class_names == ("0", "1", "2")
    assert np.array_equal(data.column("train", "y").values, Y)
    assert np.allclose(read_column(data, "train", "x").values, (X - X.mean(0)) / X.std(0), atol=1e-5)
    assert json.loads(data.attachment("arrays.json"))["standardised"] == ["x"]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_hash_of_each_example_chooses_the_test_split(tmp_path, compressed):
    data = opened(tmp_path, compressed=compressed, x=X, y=Y)
    again = opened(tmp_path, compressed=compressed, x=X[::-1], y=Y[::-1])
    assert 3 <= data.info.sizes["test"] <= 20
    for split in ("train", "test"):
        assert np.array_equal(np.sort(data.column(split, "x").values, axis=0), np.sort(again.column(split, "x").values, axis=0))


@pytest.mark.parametrize(
    ("shape", "axes", "arguments"),
    [
        ((50, 5, 6, 3), (0, 3, 1, 2), ""),
        ((50, 3, 5, 6), (0, 1, 2, 3), ""),
        ((50, 5, 6), None, ""),
        ((50, 3, 5, 3), (0, 3, 1, 2), "?layout=channels-last"),
        ((50, 5, 6, 4), (0, 3, 1, 2), "?layout=channels-last"),
    ],
)
def test_bytes_with_classes_are_images(tmp_path, shape, axes, arguments):
    images = RANDOM.integers(0, 256, shape, np.uint8)
    data = opened(tmp_path, arguments, x_train=images, y_train=Y, x_test=images[:9], y_test=Y[:9])
    expected = images[:, None] if axes is None else images.transpose(axes)
    assert np.array_equal(data.images("train"), expected)
    assert np.array_equal(data.labels("test"), Y[:9])


def test_float_and_sixteen_bit_images_are_scaled_by_channel(tmp_path):
    floats = RANDOM.normal((1, 2, 3), (1, 5, 9), (50, 6, 7, 3))
    deep = RANDOM.integers(0, 65536, (50, 6, 7), np.uint16)
    data = opened(tmp_path, x=floats, deep=deep, y=Y, x_test=floats, deep_test=deep, y_test=Y)
    normal = read_column(data, "train", "x").values
    assert np.allclose(normal.mean((0, 1, 2)), 0, atol=1e-5)
    assert np.allclose(normal.std((0, 1, 2)), 1, atol=1e-5)
    assert data.info.column("deep").dtype == "float32"
    assert np.array_equal(data.column("test", "deep").values, deep.astype(np.float32))


@pytest.mark.parametrize(
    ("target", "arguments", "dtype", "shape", "classes"),
    [
        (Y.astype(np.float64), "", "int64", (), 3),
        (Y + 0.5, "", "float32", (), 0),
        (np.arange(50) * 3, "?task=regression", "float32", (), 0),
        (np.array(["a", "b"])[Y % 2], "", "int64", (), 2),
        (np.array([b"a", b"b"])[Y % 2], "", "int64", (), 2),
        (Y == 1, "", "int64", (), 2),
        (np.eye(3)[Y], "", "int64", (), 3),
        (np.eye(3)[Y], "?task=regression", "float32", (3,), 0),
        (np.stack([Y == 1, Y < 2], axis=1), "", "uint8", (2,), 0),
        (X[:, :2], "", "float32", (2,), 0),
        (np.array([-1, 1])[Y % 2], "", "int64", (), 2),
    ],
)
def test_targets_are_classes_numbers_or_marks(tmp_path, target, arguments, dtype, shape, classes):
    data = opened(tmp_path, arguments, x=X, y=target, x_test=X, y_test=target)
    column = data.info.column("y")
    assert (column.dtype, column.shape, data.info.features.classes) == (dtype, shape, classes)
    stored = data.column("train", "y").values
    if classes:
        names = np.array(data.info.features.class_names)[stored]
        plain = target.argmax(1) if target.ndim == 2 else target.astype(np.int64) if target.dtype.kind in "fb" else target
        assert list(names) == [value.decode() if isinstance(value, bytes) else str(value) for value in plain.tolist()]
    else:
        assert np.array_equal(stored, target.astype(dtype))


@pytest.mark.parametrize(
    ("arrays", "arguments", "text"),
    [
        ({"x": X}, "", "target in 'a.npz'"),
        ({"y": Y}, "", "no array to predict"),
        ({"x": X[:9], "y": Y}, "", "'x' has 9, 'y' has 50"),
        ({"x": X, "y": Y, "y_test": Y}, "", "'y' has arrays for test and train"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, "", "other shapes for the test: [2]"),
        ({"x": np.where(X[7, 1] == X, np.nan, X), "y": Y}, "", "'x' has nan in example 7"),
        ({"x": X * 1e300, "y": Y}, "", "which float32 cannot hold"),
        ({"x": np.arange(100, dtype=np.uint64).reshape(50, 2) + 2**63, "y": Y}, "", "which int64 cannot hold"),
        ({"x": X, "y": np.where(Y == 1, np.nan, 1.5)}, "", "no finite number in example 1"),
        ({"x": X, "y": Y, "x_test": X[:3], "y_test": Y[:3] + 5}, "", "classes that training never sees: '5', '6', '7'"),
        ({"x": X, "y": Y * 0}, "", "one class only, '0'"),
        ({"x": X, "y": Y + 0.5}, "?task=classes", "has fractions"),
        ({"x": X, "y": np.array(["a", "b"])[Y % 2]}, "?task=regression", "holds texts"),
        ({"x": np.array(["a", "b"])[Y % 2], "y": Y}, "", "texts, which are no inputs"),
        ({"x": X.astype(complex), "y": Y}, "", "type complex128"),
        ({"x": X.astype(object), "y": Y}, "", "type object"),
        ({"x": RANDOM.integers(0, 9, (50, 3, 5, 3), np.uint8), "y": Y}, "", "which axis"),
        ({"x": X, "y": Y}, "?layout=channels-last", "layout is for arrays of images"),
        ({"x": np.float64(3), "y": Y}, "", "a single number"),
        ({"x": X[:0], "y": Y[:0]}, "", "no examples for the train split"),
        ({"x": X, "y": np.zeros((50, 2, 2))}, "", "[n] or [n, k]"),
        ({"x": X, "x_train": X, "y": Y}, "", "are the same array of the train split"),
        ({"x": X, "y": Y}, "?share=2", "share"),
        ({"x": X, "y": Y}, "?task=foo", "task"),
    ],
)
def test_bad_arrays_are_refused_in_one_sentence(tmp_path, arrays, arguments, text):
    message = problem(tmp_path, arguments, **arrays)
    assert text in message
    assert "\n" not in message


def test_pickles_and_false_headers_are_not_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    np.savez(tmp_path / "a.npz", x=np.array([Bomb()] * 3, object), y=Y[:3])
    with pytest.raises(UsageError, match="type object"):
        open_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert not (tmp_path / "executed").exists()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**9, 10**4)})
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as file:
        file.writestr("x.npy", header.getvalue())
        file.writestr("y.npy", header.getvalue())
    tracemalloc.start()
    with pytest.raises(UsageError, match="has not the size"):
        open_dataset(f"npz:{tmp_path / 'b.npz'}")
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 2000), st.integers(0, 255))
def test_any_bytes_are_data_or_a_sentence(tmp_path_factory, content, place, value):
    folder = tmp_path_factory.mktemp("bytes")
    np.savez(folder / "a.npz", x=X, y=Y)
    good = bytearray((folder / "a.npz").read_bytes())
    good[place % len(good)] = value
    for name, damaged in (("a.npz", bytes(good)), ("b.npz", content), ("c.npz", bytes(good[: place % len(good)]))):
        (folder / name).write_bytes(damaged)
        with suppress(UsageError):
            open_dataset(f"npz:{folder / name}")


TYPES = [np.dtype(name) for name in (np.float32, np.float64, np.float16, np.uint8, np.int16, np.int64, ">f4", ">i2", np.bool_)]
SIDES = (2, 5, 6, 8, 10)  # no numbers of channels
SHAPES = arrays_of.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5).map(lambda shape: (20, *(SIDES[n - 1] for n in shape[1:])))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(TYPES).flatmap(
        lambda dtype: arrays_of.arrays(dtype, SHAPES, elements=st.floats(-1e4, 1e4, width=16) if dtype.kind == "f" else None)
    ),
    st.booleans(),
)
def test_all_values_come_back(tmp_path_factory, array, transposed):
    folder = tmp_path_factory.mktemp("any")
    kept = np.asfortranarray(array) if transposed else array
    targets = np.arange(20) / 2
    data = opened(folder, x=kept, y=targets, x_test=kept, y_test=targets)
    assert np.array_equal(data.column("train", "x").values, array)
    assert np.isfinite(read_column(data, "train", "x").values).all()


FILE = """
import random
import numpy as np


class Pairs:
    def __init__(self, count=40, shift=0.0):
        self.count, self.shift = count, shift

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return np.full(3, number + self.shift, np.float32), number % 2


class Drawn(Pairs):
    def __getitem__(self, number):
        return np.full(3, random.random()), number % 2


class Ragged(Pairs):
    def __getitem__(self, number):
        return np.zeros(number + 1), number % 2


class Mixed(Pairs):
    def __getitem__(self, number):
        return np.zeros(1), number / 2 if number else 0


class Huge(Pairs):
    def __len__(self):
        return 1 << 50


class Broken(Pairs):
    def __getitem__(self, number):
        raise RuntimeError("no such picture")


train, test = Pairs(), Pairs(8, 0.5)


def made():
    return Pairs(12)


empty, single, texts, nothing = Pairs(0), [1, 2], [("a", 1)], 7
"""


def of_file(folder, names):
    (folder / "mine.py").write_text(FILE)
    return open_dataset(f"torch-dataset:{folder / 'mine.py'}:{names}")


def test_datasets_of_a_file_are_read_once(tmp_path, capfd):
    data = of_file(tmp_path, "train,test")
    assert data.info.sizes == {"train": 40, "test": 8}
    assert np.array_equal(data.column("train", "x").values[:, 0], np.arange(40))
    assert np.array_equal(data.column("test", "x").values[:, 0], np.arange(8) + 0.5)
    assert sum(of_file(tmp_path, "Pairs").info.sizes.values()) == 40
    assert of_file(tmp_path, "Pairs,made").info.sizes == {"train": 40, "test": 12}
    assert "differs each time" not in capfd.readouterr().err
    of_file(tmp_path, "Drawn,made")
    assert "every example was drawn once" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("Ragged,test", "example 1 of 'Ragged' has the shape [2], and the first one [1]"),
        ("Mixed", "example 1 of 'Mixed' is of float64, and the first one of int64"),
        ("Huge", "MiB of disk"),
        ("Broken", "RuntimeError: no such picture"),
        ("empty,test", "'empty' is empty"),
        ("single,test", "example 0 of 'single' is no pair (x, y)"),
        ("texts,test", "not of numbers"),
        ("nothing", "'nothing' is no Dataset"),
        ("missing", "'missing' is no Dataset"),
        ("train,test,made", "torch-dataset:FILE.py:TRAIN,TEST"),
        ("a b", "torch-dataset:FILE.py:TRAIN,TEST"),
    ],
)
def test_other_objects_of_a_file_are_refused(tmp_path, names, text):
    with pytest.raises(UsageError) as error:
        of_file(tmp_path, names)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_files_of_runs_do_not_decide_on_code():
    assert foreign_settings({"data": "torch-dataset:/home/me/mine.py:train,test"})
