"""The datasets: contents, exact reproducibility and learnability."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from crosstrain.core.errors import UsageError
from crosstrain.data.preprocessing import channel_statistics
from crosstrain.data.sources import mnist
from crosstrain.data.sources.arguments import read_arguments
from crosstrain.data.sources.digits import DATASET as DIGITS
from crosstrain.data.sources.digits import stratified_every
from crosstrain.data.sources.glyphs import BLOCK, GLYPHS28, TILE, glyph_tiles, render_block, render_split
from crosstrain.data.sources.mnist import DATASET as MNIST
from crosstrain.data.sources.mnist import read_idx
from crosstrain.data.store import stored_dataset

HAS_TORCHVISION = all(importlib.util.find_spec(package) for package in ("torch", "torchvision"))


def learned_accuracy(train, train_labels, test, test_labels, epochs, rate=0.05, batch=32):
    """Train logistic regression by SGD in numpy; return its accuracy on the test examples."""
    mean, std = train.mean(), train.std()
    x, v = (((images - mean) / std).reshape(len(images), -1).astype(np.float32) for images in (train, test))
    weights, bias = np.zeros((x.shape[1], 10), np.float32), np.zeros(10, np.float32)
    generator = np.random.default_rng(0)
    for _ in range(epochs):
        order = generator.permutation(len(x))
        for chosen in np.split(order, range(batch, len(x), batch)):
            logits = x[chosen] @ weights + bias
            shares = np.exp(logits - logits.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            shares[np.arange(len(chosen)), train_labels[chosen]] -= 1
            weights -= rate / len(chosen) * x[chosen].T @ shares
            bias -= rate / len(chosen) * shares.sum(0)
    return ((v @ weights + bias).argmax(1) == test_labels).mean()


class TestStatistics:
    def test_equal_those_of_numpy(self):
        images = np.random.default_rng(0).integers(0, 256, (5000, 3, 2, 2), dtype=np.uint8)
        mean, std = channel_statistics(images)
        assert mean == pytest.approx((images / 255).mean((0, 2, 3)), rel=1e-12)
        assert std == pytest.approx((images / 255).std((0, 2, 3)), rel=1e-12)

    def test_do_not_depend_on_the_order(self):
        images = np.random.default_rng(1).integers(0, 256, (5000, 1, 3, 3), dtype=np.uint8)
        assert channel_statistics(images) == channel_statistics(images[::-1])


class TestDigits:
    def test_hold_every_example_of_scikit_learn_once(self):
        from sklearn.datasets import load_digits

        arrays = DIGITS.load(None)
        both = np.concatenate([arrays.images["train"], arrays.images["test"]])[:, 0]
        assert (len(arrays.images["train"]), len(arrays.images["test"])) == (1437, 360)
        restored = np.rint(both / 255 * 16).reshape(len(both), -1)
        assert sorted(map(tuple, restored)) == sorted(map(tuple, load_digits().data))
        assert both.max() == 255

    def test_split_is_even_over_the_classes(self):
        arrays = DIGITS.load(None)
        shares = np.bincount(arrays.labels["test"]) / (np.bincount(arrays.labels["test"]) + np.bincount(arrays.labels["train"]))
        assert np.abs(shares - 0.2).max() < 0.006  # one example of the smallest class, 174

    def test_split_picks_at_random_within_a_class(self):
        picked = stratified_every(np.zeros(1000, dtype=np.int64), 5, 1)
        assert picked.sum() == 200
        assert len(set(np.diff(np.flatnonzero(picked)))) > 5

    def test_can_be_learned_by_logistic_regression(self):
        arrays = DIGITS.load(None)
        accuracy = learned_accuracy(arrays.images["train"], arrays.labels["train"], arrays.images["test"], arrays.labels["test"], epochs=10)
        assert accuracy >= 0.93

    def test_read_no_files_of_the_user(self, tmp_path):
        with pytest.raises(UsageError, match="Leave --data-dir out"):
            stored_dataset.open_dataset("digits", tmp_path)


def block_digest(block):
    """Render one block in this process."""
    images, labels = render_block(GLYPHS28.style, glyph_tiles(), 28, "train", block)
    return images.tobytes(), labels.tobytes()


@pytest.fixture(scope="module")
def tiles():
    return glyph_tiles()


class TestGlyphs:
    def test_every_tile_has_a_digit_and_an_empty_border(self, tiles):
        assert tiles.shape[1:] == (10, TILE, TILE)
        assert (tiles.max((2, 3)) == 255).all()
        assert all(not edge.any() for edge in (tiles[..., :2], tiles[..., -2:], tiles[..., :2, :], tiles[..., -2:, :]))
        assert len({tile.tobytes() for tile in tiles.reshape(-1, TILE, TILE)}) == len(tiles) * 10  # no two faces share a shape

    @pytest.mark.thorough
    def test_are_the_same_from_any_number_of_processes(self, tiles):
        images, labels = render_split(GLYPHS28.style, tiles, 28, "train", 4 * BLOCK)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            blocks = dict(zip((3, 1, 2, 0), pool.map(block_digest, (3, 1, 2, 0)), strict=True))
        assert b"".join(blocks[block][0] for block in range(4)) == images.tobytes()
        assert b"".join(blocks[block][1] for block in range(4)) == labels.tobytes()

    def test_smaller_set_is_beginning_of_larger(self, tiles):
        few, many = (render_split(GLYPHS28.style, tiles, 28, "test", count) for count in (BLOCK + 7, 2 * BLOCK))
        assert all(np.array_equal(short, long[: BLOCK + 7]) for short, long in zip(few, many, strict=True))

    def test_splits_and_seeds_share_no_example(self, tiles):
        drawn = [render_split(GLYPHS28.style, tiles, seed, split, BLOCK)[0] for seed, split in ((28, "train"), (28, "test"), (29, "train"))]
        assert len({image.tobytes() for images in drawn for image in images}) == 3 * BLOCK

    def test_can_be_learned_but_not_perfectly(self, tiles):
        train, train_labels = render_split(GLYPHS28.style, tiles, 28, "train", 10_000)
        test, test_labels = render_split(GLYPHS28.style, tiles, 28, "test", 3_000)
        assert train.shape == (10_000, 1, 28, 28)
        assert np.abs(np.bincount(train_labels) / 10_000 - 0.1).max() < 0.015  # five standard deviations
        assert 0.75 <= learned_accuracy(train, train_labels, test, test_labels, epochs=3, rate=0.02) <= 0.92


def write_idx(path, array, kind=8):
    content = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def idx_files(tmp_path):
    """Write the four files of a small MNIST, one of them compressed."""
    folder = tmp_path / "originals"
    folder.mkdir()
    generator = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte.gz": generator.integers(0, 256, (30, 28, 28)),
        "train-labels-idx1-ubyte": np.arange(30) % 10,
        "t10k-images-idx3-ubyte": generator.integers(0, 256, (10, 28, 28)),
        "t10k-labels-idx1-ubyte": np.arange(10) % 10,
    }
    for name, array in arrays.items():
        write_idx(folder / name, array)
    return folder, arrays


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestMnistFiles:
    @pytest.mark.parametrize("place", ["", "raw", "MNIST/raw"])
    def test_are_read_unchanged(self, idx_files, cache, tmp_path, place):
        folder, arrays = idx_files
        if place:
            (tmp_path / "root" / place).parent.mkdir(parents=True)
            folder = (folder.rename(tmp_path / "root" / place), tmp_path / "root")[1]
        opened = stored_dataset.open_dataset("mnist", folder)
        assert np.array_equal(opened.images("train")[:, 0], arrays["train-images-idx3-ubyte.gz"])
        assert np.array_equal(opened.labels("test"), arrays["t10k-labels-idx1-ubyte"])
        assert (opened.info.input_shape, opened.info.classes, opened.info.synthetic) == ((1, 28, 28), 10, False)

    def test_are_read_without_a_framework(self, idx_files, cache):
        script = "import sys; from pathlib import Path; from crosstrain.data.store.stored_dataset import open_dataset\n"
        script += "open_dataset('mnist', Path(sys.argv[1])).inputs('train'); sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", script, str(idx_files[0])], check=True)

    def test_with_dots_in_their_names_are_found(self, idx_files):
        folder, _ = idx_files
        for path in list(folder.iterdir()):
            path.rename(folder / path.name.replace("-idx", ".idx"))
        assert [path.name for path in MNIST.originals(folder)][1:3] == ["train-labels.idx1-ubyte", "t10k-images.idx3-ubyte"]

    @pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"])
    def test_missing_ones_are_named(self, idx_files, cache, name):
        (idx_files[0] / name).unlink()
        with pytest.raises(UsageError, match=f"has no file '{name.removesuffix('.gz')}'"):
            stored_dataset.open_dataset("mnist", idx_files[0])
        assert not cache.exists()

    @pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (os.mkdir, "a folder"), (Path("/dev/zero"), "a device")])
    def test_that_are_not_regular_are_named_by_kind(self, idx_files, cache, make, kind):
        path = idx_files[0] / "t10k-labels-idx1-ubyte"
        path.unlink()
        path.symlink_to(make) if isinstance(make, Path) else make(path)
        with pytest.raises(UsageError, match=f"{path.name}' is not a usable idx file: it is {kind}, not a file"):
            stored_dataset.open_dataset("mnist", idx_files[0])

    def test_gzip_bomb_is_not_unpacked(self, tmp_path):
        with gzip.open(tmp_path / "bomb.gz", "wb") as file:
            file.write(b"\0\0\x08\x01\0\0\0\x02" + bytes(200 << 20))
        tracemalloc.start()
        with pytest.raises(UsageError, match="promises 2 = 2 bytes, but more follow"):
            read_idx(tmp_path / "bomb.gz", 1)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("t10k-labels-idx1-ubyte", b"<html>not found", "begins with 0x3c68746d"),
            ("t10k-labels-idx1-ubyte", b"", "begins with 0x;"),
            ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0", "within the header"),
            ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x0a123", r"promises 10 = 10 bytes, but 3 follow"),
            ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x0212345", r"promises 2 = 2 bytes, but more follow"),
            ("train-images-idx3-ubyte.gz", b"\x1f\x8b torn", "not a whole gzip file"),
            # without a timestamp, which would differ in each process that collects tests
            (
                "train-images-idx3-ubyte.gz",
                gzip.compress(b"\0\0\x08\x03" + b"\0\0\0\x0b" * 3 + bytes(1000), mtime=0)[:-9],
                "not a whole gzip file",
            ),
            ("train-images-idx3-ubyte.gz", gzip.compress(bytes(1000), mtime=0), "begins with 0x00000000"),
        ],
    )
    def test_with_damage_are_named(self, idx_files, cache, name, content, message):
        (idx_files[0] / name).write_bytes(content)
        with pytest.raises(UsageError, match=message) as caught:
            stored_dataset.open_dataset("mnist", idx_files[0])
        assert name in str(caught.value)
        assert not list(cache.iterdir())

    def test_are_read_by_content_not_by_name(self, tmp_path):
        """A browser unpacks what it downloads and keeps the name."""
        array = np.arange(24).reshape(2, 3, 4)
        write_idx(tmp_path / "plain", array)
        (tmp_path / "plain").rename(tmp_path / "plain.gz")
        (tmp_path / "packed").write_bytes(gzip.compress((tmp_path / "plain.gz").read_bytes()))
        for name in ("plain.gz", "packed"):
            assert np.array_equal(read_idx(tmp_path / name, 3), array)

    def test_endless_unpacking_is_refused_early(self, tmp_path, monkeypatch):
        monkeypatch.setattr(mnist, "_MAX_BYTES", 1 << 20)  # for speed; the file unpacks to far more
        with gzip.open(tmp_path / "a.gz", "wb") as file:
            file.write(b"\0\0\x08\x01\xff\xff\xff\xff" + bytes(64 << 20))
        tracemalloc.start()
        with pytest.raises(UsageError, match="it holds more than 1 MiB"):
            read_idx(tmp_path / "a.gz", 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20

    @pytest.mark.parametrize(
        ("name", "array", "message"),
        [
            ("t10k-images-idx3-ubyte", np.zeros((10, 28, 27)), "10 images of 28×27; mnist has images of 28×28"),
            ("t10k-images-idx3-ubyte", np.zeros((0, 28, 28)), "holds 0 images"),
            ("t10k-labels-idx1-ubyte", np.zeros(9), "9 labels for 10 images"),
            ("t10k-labels-idx1-ubyte", np.full(10, 10), "label 10; mnist has 0 to 9"),
        ],
    )
    def test_with_other_contents_are_refused(self, idx_files, cache, name, array, message):
        write_idx(idx_files[0] / name, array)
        with pytest.raises(UsageError, match=message) as caught:
            stored_dataset.open_dataset("mnist", idx_files[0])
        assert name in str(caught.value)

    def test_in_several_dimensions_keep_their_order(self, tmp_path):
        array = np.arange(24).reshape(2, 3, 4)
        write_idx(tmp_path / "cube", array)
        assert np.array_equal(read_idx(tmp_path / "cube", 3), array)

    def test_need_existing_folder(self, tmp_path):
        with pytest.raises(UsageError, match="is no folder"):
            stored_dataset.open_dataset("mnist", tmp_path / "nowhere")


class TestMnistDownload:
    @pytest.mark.thorough
    @pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision does the download")
    def test_failure_is_one_error_and_leaves_nothing(self, cache, tmp_path, monkeypatch):
        for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(variable, "http://127.0.0.1:9")  # no listener: no test reaches the internet
        monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
        monkeypatch.setattr("tempfile.tempdir", None)
        (tmp_path / "temporary").mkdir()
        with pytest.raises(UsageError, match=r"'mnist' could not be downloaded: .*Connection refused.*give --data-dir") as caught:
            stored_dataset.open_dataset("mnist")
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
        assert not list(cache.iterdir())
        assert not list((tmp_path / "temporary").iterdir())
        assert "torch" not in sys.modules

    @pytest.mark.thorough
    @pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision does the download")
    def test_goes_through_the_loader_of_torchvision(self, idx_files, tmp_path):
        raw = tmp_path / "folder" / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name, array in idx_files[1].items():
            write_idx(raw / name.removesuffix(".gz"), array)  # the loader takes existing files for downloaded
        command = [sys.executable, "-m", "crosstrain.data.sources.download", str(tmp_path / "folder"), "mnist"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            assert child.wait(60) == 0
        assert len(MNIST.load_in(tmp_path, tmp_path / "folder").labels["train"]) == 30

    def test_ends_with_requesting_process(self, tmp_path):
        (tmp_path / "folder").mkdir()
        command = [sys.executable, "-m", "crosstrain.data.sources.download", str(tmp_path / "folder"), "mnist"]
        child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        assert child.returncode == 1
        assert not (tmp_path / "folder").exists()

    def test_without_torchvision_both_remedies_are_named(self, tmp_path, make_environment):
        python = make_environment(tmp_path / "environment", ["torch", "tensorflow"])
        script = "from crosstrain.core.errors import MissingPackageError\nfrom crosstrain.data.store.stored_dataset import open_dataset\n"
        script += "try: open_dataset('mnist')\nexcept MissingPackageError as error: print(error.exit_code, error)"
        environment = {"TRAINER_DATA_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
        output = subprocess.run([python, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
        assert output.startswith("2 ")
        assert "--data-dir" in output
        assert "pip install 'crosstrain[torch]'" in output


@pytest.mark.parametrize("separator", [",", "&"])
def test_arguments_are_separated_by_commas_or_ampersands(separator):
    defaults = {"size": "224", "classes": "1000"}
    assert read_arguments("synthetic-images", separator.join(["size=16", "classes=3"]), defaults) == {"size": "16", "classes": "3"}
