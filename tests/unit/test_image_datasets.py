"""Image datasets: coloured glyphs, random images, CIFAR-10 and SVHN files, picture folders."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imported_later import ImportedLater
from PIL import Image, ImageOps

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.data.preprocessing import channel_statistics
from crosstrain.data.sources.cifar10 import DATASET as CIFAR10
from crosstrain.data.sources.cifar10 import Cifar10Source
from crosstrain.data.sources.glyphs import BLOCK, GLYPHS, glyph_tiles, render_block, render_split
from crosstrain.data.sources.image_folder import DATASET as IMAGE_FOLDER
from crosstrain.data.sources.pictures import decode
from crosstrain.data.sources.svhn import DATASET as SVHN
from crosstrain.data.sources.svhn import SvhnSource
from crosstrain.data.sources.synthetic import DATASET as SYNTHETIC
from crosstrain.data.store import dataset_list, stored_dataset
from crosstrain.data.store.build import build_store
from crosstrain.data.store.dataset_list import described, find_stores, remove_store
from crosstrain.data.store.location import written_out

mat = ImportedLater("scipy.io")


HAS_TORCHVISION = all(importlib.util.find_spec(package) for package in ("torch", "torchvision"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def stored(cache, source, data_dir):
    """Make a store from an unregistered source; return images [n, c, h, w] and labels by split."""
    build_store(cache, "made", source.name, source, data_dir, again=True)
    files = {split: [np.load(cache / "made" / f"{split}_{kind}.npy") for kind in ("images", "labels")] for split in ("train", "test")}
    return {split: (images.transpose(0, 3, 1, 2), labels) for split, (images, labels) in files.items()}


class TestGlyphs:
    def test_do_not_depend_on_rendering_threads(self):
        tiles = glyph_tiles()
        images, labels = render_split(GLYPHS.style, tiles, 28, "train", 5 * BLOCK + 7)
        assert (images.shape, images.dtype) == ((5 * BLOCK + 7, 3, 32, 32), np.uint8)
        assert sorted(set(labels)) == list(range(10))
        for block in (5, 2, 0):
            block_images, block_labels = render_block(GLYPHS.style, tiles, 28, "train", block)
            assert np.array_equal(images[block * BLOCK :][:BLOCK], block_images[: len(images) - block * BLOCK])
            assert np.array_equal(labels[block * BLOCK :][:BLOCK], block_labels[: len(images) - block * BLOCK])

    @pytest.mark.thorough
    def test_are_in_colour_and_uncorrelated_with_brightness(self):
        images, labels = render_split(GLYPHS.style, glyph_tiles(), 28, "train", 20 * BLOCK)
        means_nc = images.mean((2, 3)) / 255
        assert np.abs(np.corrcoef(means_nc.T)[np.triu_indices(3, 1)]).max() < 0.1  # channels vary independently
        brightness = [means_nc[labels == digit].mean() for digit in range(10)]
        assert np.ptp(brightness) < 0.03

    @pytest.mark.slow
    def test_linear_model_learns_nothing(self):
        tiles = glyph_tiles()
        (x, y), (v, w) = (render_split(GLYPHS.style, tiles, 28, split, count) for split, count in (("train", 12_000), ("test", 2_000)))
        x, v = ((images.reshape(len(images), -1) / np.float32(255) - 0.5) for images in (x, v))
        gram = x.T @ x + 100 * np.eye(x.shape[1], dtype=np.float32)  # ridge regression on the classes as 0 and 1
        weights = np.linalg.solve(gram, x.T @ np.eye(10, dtype=np.float32)[y])
        assert ((v @ weights).argmax(1) == w).mean() < 0.2

    def test_are_not_called_synthetic(self):
        arrays = replace(GLYPHS, sizes={"train": 20, "test": 10}).load(None)
        assert (arrays.synthetic, arrays.flippable, len(arrays.labels["test"])) == (False, False, 10)


class TestSyntheticImages:
    def test_have_requested_size_and_number(self, cache):
        opened = stored_dataset.open_dataset("synthetic-images:size=20,classes=7,train=300,test=5")
        assert opened.info.input_shape == (3, 20, 20)
        assert (opened.info.classes, dict(opened.info.sizes)) == (7, {"train": 300, "test": 5})
        assert opened.info.synthetic
        assert opened.info.name == "synthetic-images:size=20,classes=7,train=300,test=5"
        assert sorted(set(opened.labels("train"))) == list(range(7))
        assert (opened.info.mean, opened.info.std) == channel_statistics(opened.images("train"))
        assert abs(opened.images("train").mean() - 127.5) < 1
        assert len({image.tobytes() for split in ("train", "test") for image in opened.images(split)}) == 305

    def test_have_defaults(self):
        assert SYNTHETIC.name == "synthetic-images"
        assert (SYNTHETIC.size, SYNTHETIC.classes, SYNTHETIC.train, SYNTHETIC.test) == (224, 1000, 512, 128)

    def test_equivalent_arguments_have_one_name(self):
        named = [SYNTHETIC.with_arguments(text).name for text in ("64", "size=64", "train=512,size=64", "size=64,channels=3")]
        assert named == ["synthetic-images:size=64"] * 4
        assert SYNTHETIC.with_arguments("224").name == SYNTHETIC.with_arguments("").name == "synthetic-images"

    def test_larger_set_begins_with_smaller(self):
        few, many = (SYNTHETIC.with_arguments(f"size=300,train={count}").load(None).blocks["train"] for count in (70, 140))
        first, second = (np.concatenate([images for images, _ in blocks()]) for blocks in (few, many))
        assert np.array_equal(first, second[:70])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("clases=10", r"got 'clases=10'; allowed: size=…, classes=….*Did you mean 'classes=10'"),
            ("size=64,size=32", "got 'size' twice"),
            ("size=", "'size' has no value"),
            ("0", "size of 'synthetic-images': got '0'; allowed: a whole number from 1 to 4096"),
            ("size=6.5", "size of 'synthetic-images': got '6.5'"),
            ("classes=1", "classes of 'synthetic-images': got '1'"),
            ("size=64,10", "got '10'"),
        ],
    )
    def test_wrong_arguments_are_named(self, text, message):
        with pytest.raises(UsageError, match=message):
            stored_dataset.open_dataset(f"synthetic-images:{text}")

    @pytest.mark.slow
    def test_large_set_is_never_in_memory(self, tmp_path):
        script = "import resource; from crosstrain.data.store import stored_dataset as store\n"
        script += "store.prepare('digits'); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        script += "store.prepare('synthetic-images:size=224,train=2000,test=1')\n"
        script += "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
        environment = {"TRAINER_DATA_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
        output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
        assert float(output) < 150  # MiB, of 287 MiB of pixels


class TestNamesWithArguments:
    def test_lead_to_separate_stores(self, cache):
        names = ["synthetic-images:size=8,classes=3,train=9,test=9", "synthetic-images:size=9,classes=3,train=9,test=9"]
        paths = [stored_dataset.prepare(name) for name in names]
        assert len(set(paths)) == 2
        rows = [row for row in dataset_list.list_datasets() if row.name.startswith("synthetic-images")]
        assert sorted(row.name for row in rows) == names
        assert all(row.prepared and row.synthetic for row in rows)
        assert [report.name for report in stored_dataset.verify(names[1])] == [names[1]]
        assert sorted(report.name for report in stored_dataset.verify("synthetic-images")) == names
        (paths[0] / "train_labels.npy").unlink()
        (report,) = stored_dataset.verify(names[0])
        assert report.damaged
        assert report.remedy == f"trainer data prepare {names[0]} --again"
        stored_dataset.prepare(names[0], again=True)
        assert not stored_dataset.verify(names[0])[0].damaged

    def test_are_refused_for_dataset_without_arguments(self):
        with pytest.raises(UsageError, match=r"'digits' takes no arguments. Leave ':3' out"):
            stored_dataset.open_dataset("digits:3")

    def test_base_name_is_looked_up(self):
        with pytest.raises(UsageError, match=r"'synthetic-image'.*Did you mean 'synthetic-images'"):
            stored_dataset.open_dataset("synthetic-image:64")


def write_mat(path, count, labels=None, seed=0, **variables):
    images = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
    labels = np.arange(count, dtype=np.uint8) % 10 + 1 if labels is None else np.array(labels, np.uint8)
    mat.savemat(path, {"X": images, "y": labels[:, None], **variables}, do_compression=True)
    return images, labels


@pytest.fixture
def svhn_files(tmp_path):
    folder = tmp_path / "svhn"
    folder.mkdir()
    parts = {
        part: write_mat(folder / f"{part}_32x32.mat", count, seed=count) for part, count in (("train", 40), ("test", 20), ("extra", 30))
    }
    return folder, parts, {part: md5(folder / f"{part}_32x32.mat") for part in parts}


class TestSvhn:
    def test_is_read_unchanged_with_label_ten_as_zero(self, svhn_files, cache):
        folder, parts, checksums = svhn_files
        splits = stored(cache, SvhnSource(md5=checksums), folder)
        images, labels = splits["train"]
        assert images.shape == (40, 3, 32, 32)
        assert images[7, 2, 5, 30] == parts["train"][0][5, 30, 2, 7]
        assert np.array_equal(images, parts["train"][0].transpose(3, 2, 0, 1))
        assert labels[:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        assert np.array_equal(splits["test"][0], parts["test"][0].transpose(3, 2, 0, 1))

    def test_extra_follows_the_train_part(self, svhn_files, cache):
        folder, parts, checksums = svhn_files
        source = SvhnSource(md5=checksums).with_arguments("extra")
        images, labels = stored(cache, source, folder)["train"]
        assert (source.name, images.shape[0], len(labels)) == ("svhn:extra", 70, 70)
        assert np.array_equal(images[40:], parts["extra"][0].transpose(3, 2, 0, 1))

    def test_published_checksums_hold(self, svhn_files, cache):
        folder, _, checksums = svhn_files
        with pytest.raises(UsageError, match=rf"train_32x32.mat' is not the published file: its md5 is {checksums['train']}, not e26dedcc"):
            stored_dataset.open_dataset("svhn", folder)
        assert not list(cache.iterdir())

    def test_missing_file_is_named(self, svhn_files):
        folder = svhn_files[0]
        (folder / "extra_32x32.mat").unlink()
        assert len(SVHN.originals(folder)) == 2
        with pytest.raises(UsageError, match=r"no file 'extra_32x32.mat'; give --data-dir"):
            stored_dataset.open_dataset("svhn:extra", folder)
        with pytest.raises(UsageError, match=r"got 'extr'; allowed: extra. Did you mean 'extra'"):
            stored_dataset.open_dataset("svhn:extr", folder)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: path.write_bytes(path.read_bytes()[:-700]), "cannot be read from it"),
            (lambda path: path.write_bytes(b"<html>not found</html>" * 20), "cannot be read from it"),
            (lambda path: mat.savemat(path, {"y": np.ones((2, 1))}), "X cannot be read from it"),
            (
                lambda path: mat.savemat(path, {"X": np.zeros((2, 32, 32, 3), np.uint8), "y": np.ones((2, 1))}),
                r"X is uint8 \[2, 32, 32, 3\]",
            ),
            (lambda path: write_mat(path, 3, [1, 10, 11]), "its labels lie in 1…11, not in 1…10"),
            (lambda path: write_mat(path, 3, [0, 1, 2]), "its labels lie in 0…2"),
        ],
    )
    def test_unusable_file_is_named_and_nothing_stored(self, svhn_files, cache, make, message):
        folder, _, checksums = svhn_files
        make(folder / "test_32x32.mat")
        cache.mkdir()
        with pytest.raises(UsageError, match=message) as caught:
            stored(cache, SvhnSource(md5={**checksums, "test": md5(folder / "test_32x32.mat")}), folder)
        assert "test_32x32.mat" in str(caught.value)
        assert not list(cache.iterdir())


NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def cifar_batches():
    generator = np.random.default_rng(0)
    return {name: (generator.integers(0, 256, (6, 3072), dtype=np.uint8), generator.integers(0, 10, 6).tolist()) for name in NAMES}


def write_archive(path, contents):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


class Python2Pickler(pickle._Pickler):
    """Pickles as Python 2 did: byte strings as such, and numpy's functions by old names."""

    def save_string(self, value):
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_string}  # noqa: RUF012 — as in the base class


def pickled(data, labels):
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump({b"data": data, b"labels": labels, b"batch_label": b"a batch"})
    return stream.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")


@pytest.fixture
def cifar(tmp_path):
    """Return writers of the three forms; each returns the source that accepts published files."""
    batches = cifar_batches()

    def write(form, contents=None):
        suffix = ".bin" if form == "binary" else ""
        if contents is None:
            encode = pickled if form != "binary" else lambda data, labels: np.c_[np.array(labels, np.uint8), data].tobytes()
            contents = {f"cifar-10-batches/{name}{suffix}": encode(*batch) for name, batch in batches.items()}
        if form == "folder":
            (tmp_path / "cifar-10-batches-py").mkdir()
            for name, content in contents.items():
                (tmp_path / "cifar-10-batches-py" / name.rpartition("/")[2]).write_bytes(content)
        else:
            write_archive(tmp_path / f"cifar-10-{form}.tar.gz", {"cifar-10-batches/readme.html": b"hello", **contents})
        return Cifar10Source({path.name: md5(path) for path in CIFAR10.originals(tmp_path)})

    return tmp_path, batches, write


class TestCifar10:
    @pytest.mark.parametrize("form", ["python", "binary", "folder"])
    def test_every_form_holds_the_same(self, cifar, cache, form):
        folder, batches, write = cifar
        splits = stored(cache, write(form), folder)
        expected = np.concatenate([batches[name][0] for name in NAMES[:5]]).reshape(30, 3, 32, 32)
        assert np.array_equal(splits["train"][0], expected)
        assert splits["train"][1].tolist() == [label for name in NAMES[:5] for label in batches[name][1]]
        assert np.array_equal(splits["test"][0].reshape(6, 3072), batches["test_batch"][0])
        assert splits["test"][1].tolist() == batches["test_batch"][1]

    @pytest.mark.parametrize(
        ("form", "published"), [("python", "c58f30108f718f92"), ("binary", "c32a1d4ab5d03f12"), ("folder", "c99cafc15224")]
    )
    def test_published_checksums_hold(self, cifar, cache, form, published):
        folder, _, write = cifar
        write(form)
        with pytest.raises(UsageError, match=f"is not the published file: its md5 is [0-9a-f]+, not {published}"):
            stored_dataset.open_dataset("cifar10", folder)

    def test_pickle_executes_nothing(self, cifar, cache):
        folder, _, write = cifar
        harmful = b"cos\nsystem\n(S'touch " + str(folder / "harm").encode() + b"'\ntR."
        source = write("python", dict.fromkeys(NAMES, harmful))
        with pytest.raises(UsageError, match=r"data_batch_1 cannot be read.*os.system does not belong there"):
            source.load_in(folder, folder)
        assert not (folder / "harm").exists()

    @pytest.mark.parametrize(
        ("form", "contents", "message"),
        [
            ("python", dict.fromkeys(NAMES[:4], pickled(np.zeros((1, 3072), np.uint8), [0])), "missing: data_batch_5, test_batch"),
            ("python", dict.fromkeys(NAMES, pickled(np.zeros((1, 3071), np.uint8), [0])), r"data_batch_1 holds uint8 \[1, 3071\]"),
            ("python", dict.fromkeys(NAMES, pickled(np.zeros((1, 3072), np.uint8), [10])), "labels beyond 0…9"),
            ("python", dict.fromkeys(NAMES, pickle.dumps({b"labels": [1]})), "data_batch_1 cannot be read"),
            ("binary", {f"{name}.bin": bytes(3000) for name in NAMES}, "data_batch_1 cannot be read"),
        ],
    )
    def test_other_content_is_named(self, cifar, form, contents, message):
        folder, _, write = cifar
        source = write(form, contents)
        with pytest.raises(UsageError, match=message):
            source.load_in(folder, folder)

    def test_truncated_archive_is_named(self, cifar):
        folder, _, write = cifar
        write("binary")
        path = folder / "cifar-10-binary.tar.gz"
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:40_000]))
        with pytest.raises(UsageError, match=r"it is no whole archive|missing: "):
            Cifar10Source({path.name: md5(path)}).load_in(folder, folder)

    def test_missing_files_are_reported(self, tmp_path):
        with pytest.raises(UsageError, match=r"has no files of cifar10; give --data-dir.*cifar-10-python.tar.gz"):
            stored_dataset.open_dataset("cifar10", tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision does the download")
@pytest.mark.parametrize("name", ["cifar10", *(pytest.param(name, marks=pytest.mark.slow) for name in ("svhn", "svhn:extra"))])
def test_failed_download_is_one_error_and_leaves_nothing(cache, tmp_path, monkeypatch, name):
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # no listener: no test reaches the internet
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    with pytest.raises(UsageError, match=rf"'{name[:4]}.*' could not be downloaded: .*Connection refused.*give --data-dir"):
        stored_dataset.open_dataset(name)
    assert not list(cache.iterdir())
    assert not list((tmp_path / "temporary").iterdir())
    assert "torch" not in sys.modules


def picture(path, colour, size=(40, 30), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


@pytest.fixture
def pictures(tmp_path):
    """Create two classes with five pictures in several formats and depths."""
    root = tmp_path / "my pictures"
    picture(root / "train" / "cats" / "a.png", (200, 0, 0))
    picture(root / "train" / "cats" / "deep" / "er" / "b.bmp", (0, 200, 0), size=(20, 50))
    picture(root / "train" / "dogs" / "c.jpg", (0, 0, 200), quality=95)
    picture(root / "val" / "cats" / "d.webp", (9, 9, 9), lossless=True)
    picture(root / "val" / "dogs" / "e.gif", (90, 90, 90))
    (root / "train" / "cats" / ".DS_Store").write_bytes(b"no picture, and hidden")
    return root


class TestImageFolder:
    def test_is_decoded_to_size_and_labelled_by_folder(self, pictures, cache):
        opened = stored_dataset.open_dataset(f"image-folder:{pictures}?size=16")
        assert opened.info.input_shape == (3, 16, 16)
        assert (opened.info.classes, dict(opened.info.sizes), opened.info.images.flippable) == (2, {"train": 3, "test": 2}, True)
        assert opened.images("train")[:, :, 3, 9].tolist()[:2] == [[200, 0, 0], [0, 200, 0]]
        assert np.abs(opened.images("train")[2, :, 5, 5].astype(int) - [0, 0, 200]).max() <= 3  # JPEG rounds
        assert (opened.labels("train").tolist(), opened.labels("test").tolist()) == ([0, 0, 1], [0, 1])
        assert opened.info.name == f"image-folder:{pictures}?size=16"
        assert stored_dataset.open_dataset("image-folder:?size=16", pictures).images("test").shape == (2, 3, 16, 16)

    def test_sizes_and_folders_have_separate_stores(self, pictures, cache):
        paths = {stored_dataset.prepare(f"image-folder:{pictures}{size}") for size in ("", "?size=224", "?size=8")}
        assert len(paths) == 2
        assert sorted(row.input_shape for row in dataset_list.list_datasets() if row.name.startswith("image-folder")) == [
            (3, 8, 8),
            (3, 224, 224),
        ]
        assert {report.name for report in stored_dataset.verify(f"image-folder:{pictures}?size=8")} == {f"image-folder:{pictures}?size=8"}

    def test_changed_folder_gets_new_store(self, pictures, cache):
        name = f"image-folder:{pictures}?size=8"
        first = stored_dataset.open_dataset(name)
        assert stored_dataset.open_dataset(name).path == first.path
        picture(pictures / "train" / "dogs" / "new.png", (1, 2, 3))
        assert stored_dataset.open_dataset(name).info.sizes["train"] == 4
        time.sleep(0.02)
        picture(pictures / "train" / "dogs" / "new.png", (3, 2, 1))  # as many bytes as before
        assert stored_dataset.open_dataset(name).images("train")[3, :, 0, 0].tolist() == [3, 2, 1]

    def test_stores_of_changed_folder_can_be_removed(self, pictures, cache):
        """Also without the pictures; stores of other folders and sizes stay."""
        name, other_name = f"image-folder:{pictures}?size=8", f"image-folder:{pictures}?size=16"
        first, other_store = stored_dataset.prepare(name), stored_dataset.prepare(other_name)
        picture(pictures / "train" / "dogs" / "new.png", (1, 2, 3))
        second = stored_dataset.prepare(name)
        shutil.rmtree(pictures)
        stores = find_stores(name)
        assert sorted(stores) == sorted([first, second])
        for path in stores:
            remove_store(path)
        assert not first.exists()
        assert not second.exists()
        assert other_store.exists()

    def test_every_damaged_file_is_named(self, pictures, cache):
        torn = pictures / "train" / "cats" / "torn.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(torn)
        torn.write_bytes(torn.read_bytes()[:5000])
        (pictures / "train" / "dogs" / "notes.txt").write_text("no picture")
        (pictures / "val" / "cats" / "empty.jpg").write_bytes(b"")
        (pictures / "train" / "stray.png").write_bytes(b"")
        name = f"image-folder:{pictures}?size=8"
        with pytest.raises(UsageError, match=r"4 files are no usable pictures.*skip-damaged=yes") as caught:
            stored_dataset.open_dataset(name)
        named = ["torn.png", "notes.txt", "empty.jpg", "stray.png"]
        assert all(file in str(caught.value) for file in named)
        assert not list(cache.iterdir())
        opened = stored_dataset.open_dataset(f"{name},skip-damaged=yes")
        assert dict(opened.info.sizes) == {"train": 3, "test": 2}
        assert len(opened.left_out) == 4
        assert all(any(file in line for line in opened.left_out) for file in named)
        (row,) = [row for row in dataset_list.list_datasets() if row.name == f"{name},skip-damaged=yes"]
        assert row.left_out == opened.left_out

    def test_line_of_pixels_takes_little_memory(self, pictures, tmp_path):
        for number, size in enumerate([(9000, 1), (1, 60_000), (1, 5_000_000), (2600, 1)]):
            Image.new("RGB", size, (9, 8, 7)).save(pictures / "train" / "cats" / f"line{number}.png")
        code = "import sys; from crosstrain.cli.main import main; main(sys.argv[1:]); print(open('/proc/self/status').read())"
        command = [sys.executable, "-c", code, "data", "prepare", f"image-folder:{pictures}"]
        environment = {**os.environ, "TRAINER_DATA_CACHE": str(tmp_path / "made")}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert "7 + 2 examples in " in output
        assert int(re.search(r"VmHWM:\s+(\d+) kB", output)[1]) < 300 << 10  # one of them once took 580 MB

    def test_too_large_picture_is_named_and_can_be_skipped(self, pictures, cache):
        Image.new("1", (10_000, 9_000)).save(pictures / "train" / "cats" / "wide.png")
        with (pictures / "train" / "cats" / "long.webp").open("wb") as file:
            file.truncate(600 << 20)
        with pytest.raises(UsageError, match=r"2 files are no usable pictures") as caught:
            stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert "long.webp: ValueError: its 629,145,600 bytes are more than 512 MiB" in str(caught.value)
        assert "wide.png: DecompressionBombWarning: Image size (90000000 pixels) exceeds limit" in str(caught.value)
        opened = stored_dataset.open_dataset(f"image-folder:{pictures}?size=8,skip-damaged=yes")
        assert len(opened.left_out) == 2

    def test_no_program_is_started_for_a_picture(self, pictures, cache, tmp_path, monkeypatch):
        """Pillow runs Ghostscript on PostScript, whatever the file's name."""
        gs = tmp_path / "bin" / "gs"
        gs.parent.mkdir()
        gs.write_text(f"#!/bin/sh\necho started >> {tmp_path}/log\n")
        gs.chmod(0o755)
        monkeypatch.setenv("PATH", f"{gs.parent}:{os.environ['PATH']}")
        Image.new("RGB", (40, 40)).save(pictures / "train" / "cats" / "x.jpg", format="EPS")
        with pytest.raises(UsageError, match=r"x.jpg: ValueError: in none of the formats that are read \(JPEG, PNG, "):
            stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert not (tmp_path / "log").exists()

    def test_damaged_exif_is_ignored(self, pictures, cache, recwarn):
        notes = b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x12\x01\3\0\xff\xff\xff\0" * 2
        picture(pictures / "train" / "cats" / "noted.jpg", (1, 1, 1), exif=notes)
        stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert [str(warning.message) for warning in recwarn if "EXIF" in str(warning.message)] == []

    def test_first_of_many_classes_are_named(self, pictures, cache):
        for number in range(300):
            (pictures / "train" / f"{number:03d}").mkdir()
        with pytest.raises(UsageError, match=r"without a file: 000, 001, .*, 099, and 200 more\. Fill") as refused:
            stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert len(str(refused.value)) < 2000

    def test_circular_links_are_read_once(self, pictures, cache):
        cats = pictures / "train" / "cats"
        for name, target in {"l1": ".", "l2": ".", "up": "..", "top": "../..", "again": "deep"}.items():
            (cats / name).symlink_to(target)
        opened = stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert opened.labels("train").tolist() == [0, 0, 1]  # no dog behind `up` is a cat
        (cats / "l3").symlink_to("../dogs")
        assert stored_dataset.open_dataset(f"image-folder:{pictures}?size=8").labels("train").tolist() == [0, 0, 0, 1]

    @pytest.mark.parametrize("place", ["train/cats/more", "train/birds", "train/cats/one.png"])
    def test_link_out_of_folder_needs_option(self, pictures, cache, tmp_path, place):
        picture(tmp_path / "elsewhere" / "x.png", (1, 2, 3))
        (pictures / place).symlink_to(tmp_path / "elsewhere" / ("x.png" if place.endswith(".png") else ""))
        name = f"image-folder:{pictures}?size=8"
        with pytest.raises(UsageError, match=r"1 link leads out of .*links-outside=yes") as caught:
            stored_dataset.open_dataset(name)
        assert f"\n  {pictures / place}" in str(caught.value)
        assert stored_dataset.open_dataset(f"{name},links-outside=yes").info.sizes["train"] == 4

    def test_unreadable_folder_names_its_files(self, pictures, cache):
        for kind in ("cats", "dogs"):
            shutil.rmtree(pictures / "train" / kind)
            (pictures / "train" / kind).mkdir()
            for number in range(80):
                (pictures / "train" / kind / f"{number}.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
        for more in ("", ",skip-damaged=yes"):
            with pytest.raises(UsageError, match=r"^data: no file of '.*train' is a usable picture:") as caught:
                stored_dataset.open_dataset(f"image-folder:{pictures}?size=8{more}")
            assert "/0.heic: ValueError: in none of the formats that are read" in str(caught.value)
            assert str(caught.value).count(".heic") == 100
            assert str(caught.value).endswith("\n  and 60 more")

    def test_constant_channel_is_not_scaled(self, pictures, cache, capsys):
        for number, (split, kind) in enumerate([("train", "cats"), ("train", "dogs"), ("val", "cats"), ("val", "dogs")]):
            shutil.rmtree(pictures / split / kind)
            picture(pictures / split / kind / "a.png", (number, 7, 0))
        opened = stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert opened.info.std[1:] == (1.0, 1.0)
        assert opened.info.std[0] < 0.5
        note = "all train images have one value in channel 1, 2, which is not scaled (std 1)"
        assert opened.notes == (note,)
        assert note in capsys.readouterr().err
        assert np.isfinite(opened.inputs("train")).all()

    def test_transparent_parts_are_noted(self, pictures, cache, capsys):
        Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(pictures / "train" / "cats" / "clear.png")
        Image.new("RGBA", (8, 8), (5, 5, 5, 255)).save(pictures / "train" / "cats" / "full.png")
        name = f"image-folder:{pictures}?size=8"
        for more, colour, background in (("", 255, "white"), (",background=BLACK", 0, "black"), (",background=0A0b0c", 10, "0a0b0c")):
            opened = stored_dataset.open_dataset(name + more)
            assert opened.images("train")[1, 0].tolist() == [[colour] * 8] * 8
            note = f"1 picture has transparent parts, which became {background} (background={background})"
            assert list(opened.notes) == described(opened)["notes"] == [note]
            assert note in capsys.readouterr().err
        assert stored_dataset.open_dataset(f"{name},background=ffffff").path == stored_dataset.open_dataset(name).path
        with pytest.raises(
            UsageError, match="background of 'image-folder': got 'grey'; allowed: white, black, or red, green and blue in six"
        ):
            stored_dataset.open_dataset(f"{name},background=grey")

    def test_irregular_file_is_named_without_waiting(self, pictures, cache):
        (pictures / "train" / "cats" / "nowhere.png").symlink_to("/nowhere/at/all")
        (pictures / "train" / "cats" / "round.png").symlink_to("round.png")
        (pictures / "val" / "dogs" / "outside.png").symlink_to(pictures / "train" / "dogs" / "c.jpg")
        os.mkfifo(pictures / "train" / "dogs" / "pipe.png")
        name = f"image-folder:{pictures}?size=8"
        with pytest.raises(UsageError, match=r"3 files are no usable pictures") as caught:
            stored_dataset.open_dataset(name)
        assert str(caught.value).count("a link that leads nowhere") == 2
        assert "pipe.png: neither a file nor a folder" in str(caught.value)
        opened = stored_dataset.open_dataset(f"{name},skip-damaged=yes")
        assert (dict(opened.info.sizes), len(opened.left_out)) == ({"train": 3, "test": 3}, 3)

    def test_class_whose_name_is_not_utf8_is_refused(self, pictures, cache):
        """Checkpoints and exports contain class names, and could not be written."""
        (pictures / "train" / "cats").rename(pictures / "train" / os.fsdecode(b"caf\xe9"))
        (pictures / "val" / "cats").rename(pictures / "val" / os.fsdecode(b"caf\xe9"))
        with pytest.raises(UsageError, match=r"class folders whose names are not UTF-8: caf\\xe9\. Rename them"):
            stored_dataset.open_dataset(f"image-folder:{pictures}?size=8")
        assert not list(cache.glob("*"))

    def test_picture_whose_name_is_not_utf8_is_read(self, pictures, cache):
        (pictures / "train" / "cats" / "a.png").rename(pictures / "train" / "cats" / os.fsdecode(b"caf\xe9.png"))
        (pictures / "train" / "cats" / os.fsdecode(b"bad\xe9.png")).write_bytes(b"")
        opened = stored_dataset.open_dataset(f"image-folder:{pictures}?size=8,skip-damaged=yes")
        assert opened.info.sizes["train"] == 3
        assert [line.partition(":")[0].rpartition("/")[2] for line in opened.left_out] == [r"bad\xe9.png"]

    def test_folder_whose_path_is_not_utf8_is_refused(self, pictures, cache, monkeypatch):
        """A run identifies its data by name; a link to the folder works as well."""
        odd = pictures.parent / os.fsdecode(b"caf\xe9")
        pictures.rename(odd)
        for name, folder in ((f"image-folder:{odd}", None), ("image-folder", odd)):
            with pytest.raises(UsageError, match=r"caf\\xe9', which is not UTF-8; rename the folder, or give a link to it"):
                stored_dataset.open_dataset(name, folder)
        monkeypatch.chdir(odd)
        with pytest.raises(UsageError, match=r"caf\\xe9', which is not UTF-8"):
            stored_dataset.open_dataset("image-folder:.")
        (odd.parent / "link").symlink_to(odd)
        assert stored_dataset.open_dataset(f"image-folder:{odd.parent / 'link'}?size=8").info.sizes["train"] == 3

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda root: (root / "val").rename(root / "valid"), "has no folder 'test' or 'val'"),
            (lambda root: (root / "train").rename(root / "training"), "has no folder 'train'"),
            (lambda root: (root / "train" / "birds").mkdir(), "class folders without a file: birds"),
            (lambda root: picture(root / "val" / "birds" / "x.png", (1, 1, 1)), "classes that are missing in the train folder: birds"),
        ],
    )
    def test_other_layout_is_reported(self, pictures, spoil, message):
        spoil(pictures)
        with pytest.raises(UsageError, match=message):
            stored_dataset.open_dataset(f"image-folder:{pictures}")

    def test_folder_name_may_have_question_mark(self, pictures):
        folder = pictures.rename(pictures.with_name("which one?"))
        source = IMAGE_FOLDER.with_arguments(str(folder))
        assert (source.folder, source.name) == (folder, f"image-folder:{folder}?")
        for written in (source, IMAGE_FOLDER.with_arguments(f"{folder}?size=32")):
            assert IMAGE_FOLDER.with_arguments(written.name.partition(":")[2]) == written

    def test_folder_is_required_exactly_once(self, pictures, tmp_path):
        with pytest.raises(UsageError, match="needs a folder; write image-folder:PATH"):
            stored_dataset.open_dataset("image-folder")
        with pytest.raises(UsageError, match=r"^data: .*there is no folder"):
            stored_dataset.open_dataset(f"image-folder:{tmp_path / 'nowhere'}")
        with pytest.raises(UsageError, match="names a folder too"):
            stored_dataset.open_dataset(f"image-folder:{pictures}", pictures)
        with pytest.raises(UsageError, match="skip-damaged of 'image-folder': got 'perhaps'; allowed: yes, no"):
            stored_dataset.open_dataset(f"image-folder:{pictures}?skip-damaged=perhaps")


def png_file(path, values_hwc, bits, key=None):
    """Write a PNG of any depth, in grey or RGB; Pillow writes few of them."""
    height, width, channels = values_hwc.shape
    rows = values_hwc.reshape(height, -1)
    if bits == 16:
        raw = [row.astype(">u2").tobytes() for row in rows]
    else:
        raw = [np.packbits((row[:, None] >> np.arange(bits - 1, -1, -1)) & 1).tobytes() for row in rows]
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, bits, 2 if channels == 3 else 0, 0, 0, 0)}
    if key is not None:
        chunks[b"tRNS"] = np.asarray(key).astype(">u2").tobytes()
    chunks |= {b"IDAT": zlib.compress(b"".join(b"\0" + row for row in raw)), b"IEND": b""}
    pieces = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks.items()]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(pieces))


def pnm_file(path, values_hwc, bits, plain):
    height, width, channels = values_hwc.shape
    head = f"P{(3 if channels == 3 else 2) + (0 if plain else 3)} {width} {height} {2**bits - 1}\n".encode()
    pixels = " ".join(map(str, values_hwc.ravel())).encode() if plain else values_hwc.astype(">u2" if bits > 8 else "u1").tobytes()
    path.write_bytes(head + pixels)


def tiff_file(path, values_hwc, bits, order, white_is_zero):
    """Write a grey TIFF with 12 or 16 bits."""
    height, width, _ = values_hwc.shape
    values = (2**bits - 1 - values_hwc if white_is_zero else values_hwc).reshape(height, width)
    if bits == 16:
        data = values.astype(f"{order}u2").tobytes()
    else:
        data = b"".join(np.packbits((row[:, None] >> np.arange(11, -1, -1)) & 1).tobytes() for row in values)
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 0 if white_is_zero else 1, 273: 8, 277: 1, 278: height, 279: len(data)}
    data += b"\0" * (len(data) % 2)
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(data))
    path.write_bytes(head + data + struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", 0))


def saved(name, **options):
    """Return a Pillow writer of values with 8 or 16 bits."""

    def write(path, values_hwc, bits):
        values = values_hwc[..., 0] if values_hwc.shape[2] == 1 else values_hwc
        Image.fromarray(values.astype(np.uint8 if bits == 8 else np.uint16)).save(path, name, **options)

    return write


LOSSLESS = {
    (channels, 8): [
        *map(saved, ("PNG", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "PCX", "SGI", "TGA")),
        saved("WEBP", lossless=True),
        saved("TIFF", compression="tiff_lzw"),
        saved("GIF") if channels == 1 else saved("ICO", sizes=[(16, 16)]),
    ]
    for channels in (1, 3)
} | {(1, 16): [*map(saved, ("PNG", "TIFF", "PPM", "JPEG2000"))]}
WRITERS = [(channels, bits, write) for (channels, bits), writers in LOSSLESS.items() for write in writers]
WRITERS += [(1, bits, png_file) for bits in (1, 2, 4, 8, 16)] + [(3, bits, png_file) for bits in (8, 16)]
WRITERS += [
    (channels, bits, lambda path, values, bits, plain=plain: pnm_file(path, values, bits, plain))
    for channels in (1, 3)
    for bits in (1, 5, 8, 9, 12, 16)
    for plain in (False, True)
]
WRITERS += [
    (1, bits, lambda path, values, bits, order=order, inverted=inverted: tiff_file(path, values, bits, order, inverted))
    for bits, order, inverted in ((12, "<", False), (16, "<", False), (16, ">", False), (16, "<", True))
]


class TestPictures:
    @pytest.mark.parametrize("number", range(len(WRITERS)))
    @settings(max_examples=4, deadline=None)
    @given(st.integers(0, 2**32))
    def test_every_format_and_depth_decodes_equally(self, tmp_path_factory, number, seed):
        channels, bits, write = WRITERS[number]
        path = tmp_path_factory.getbasetemp() / "any.picture"
        values_hwc = np.random.default_rng(seed).integers(0, 2**bits, (16, 16, channels))
        write(path, values_hwc, bits)
        expected = np.broadcast_to(values_hwc * 255 / (2**bits - 1), (16, 16, 3)).transpose(2, 0, 1)
        assert np.abs(decode(path, 16) - expected).max() <= 1

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 2**32), st.sampled_from([(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (3, 8), (3, 16)]))
    def test_transparent_colour_has_depth_of_file(self, tmp_path_factory, seed, kind):
        channels, bits = kind
        path = tmp_path_factory.getbasetemp() / "key.png"
        values_hwc = np.random.default_rng(seed).integers(0, 2**bits, (16, 16, channels))
        png_file(path, values_hwc, bits, values_hwc[0, 0])
        clear = (values_hwc == values_hwc[0, 0]).all(2)
        expected = np.where(clear[..., None], (255, 0, 0), values_hwc * 255 / (2**bits - 1)).transpose(2, 0, 1)
        assert np.abs(decode(path, 16, "ff0000") - expected).max() <= 1

    def test_middle_square_is_cropped(self, tmp_path):
        columns = np.repeat(np.arange(0, 240, 2, dtype=np.uint8)[None, :, None], 40, 0).repeat(3, 2)  # 40 high, 120 wide
        Image.fromarray(columns).save(tmp_path / "wide.png")
        assert decode(tmp_path / "wide.png", 40)[0, 0].tolist() == list(range(80, 160, 2))
        Image.fromarray(columns.transpose(1, 0, 2)).save(tmp_path / "high.png")
        assert decode(tmp_path / "high.png", 40)[0, :, 0].tolist() == list(range(80, 160, 2))

    def test_depths_and_palettes_become_colours(self, tmp_path):
        Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(tmp_path / "deep.png")
        Image.new("L", (4, 4), 77).save(tmp_path / "grey.png")
        Image.new("RGBA", (4, 4), (1, 2, 3, 128)).save(tmp_path / "clear.png")
        Image.new("P", (4, 4), 0).save(tmp_path / "palette.png")
        assert decode(tmp_path / "deep.png", 4)[:, 0, 0].tolist() == [128, 128, 128]
        assert decode(tmp_path / "grey.png", 2)[:, 0, 0].tolist() == [77, 77, 77]
        assert decode(tmp_path / "clear.png", 4)[:, 0, 0].tolist() == [128, 128, 129]
        assert decode(tmp_path / "palette.png", 4).shape == (3, 4, 4)

    def test_transparency_is_filled_with_background(self, tmp_path):
        """In every way in which a file marks transparent parts."""
        ink = np.zeros((8, 8), np.uint8)
        ink[2:5, 2:5] = 255
        black = Image.new("L", (8, 8), 0)
        Image.merge("LA", (black, Image.fromarray(ink))).save(tmp_path / "la.png")
        Image.merge("RGBA", (black, black, black, Image.fromarray(ink))).save(tmp_path / "rgba.webp", lossless=True, exact=True)
        Image.fromarray(255 - ink).save(tmp_path / "key.png", transparency=255)
        Image.fromarray(255 - ink).convert("P").save(tmp_path / "key.gif", transparency=255)
        Image.fromarray(np.where(ink == 0, 40_000, 0).astype(np.uint16)).save(tmp_path / "deep.png", transparency=40_000)
        for name in ("la.png", "rgba.webp", "key.png", "key.gif", "deep.png"):
            for colour in ("ffffff", "ff0000"):
                seen = []
                pixels = decode(tmp_path / name, 8, colour, seen)
                assert pixels[1].tolist() == np.where(ink == 255, 0, int(colour[2:4], 16)).tolist(), name
                assert seen == [tmp_path / name]

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 250), st.integers(1, 8), st.sampled_from(["RGB", "L"]))
    def test_crop_equals_middle_of_scaled_picture(self, tmp_path_factory, width, height, size, turned, mode):
        path = tmp_path_factory.getbasetemp() / "drawn.png"
        shape = (height, width, 3) if mode == "RGB" else (height, width)
        exif = Image.Exif()
        exif[0x0112] = turned
        Image.fromarray(np.random.default_rng(width * height).integers(0, 256, shape, dtype=np.uint8)).save(path, exif=exif)
        with Image.open(path) as opened:
            whole = ImageOps.exif_transpose(opened).convert("RGB")
        sides = [max(size, round(length * size / min(whole.size))) for length in whole.size]
        left_edge, top_edge = ((length - size) // 2 for length in sides)
        expected = np.asarray(
            whole.resize(sides, Image.Resampling.BILINEAR).crop((left_edge, top_edge, left_edge + size, top_edge + size))
        ).astype(int)
        assert np.abs(decode(path, size).transpose(1, 2, 0) - expected).max() <= 1

    def test_are_rotated_by_exif_orientation(self, tmp_path):
        upright = np.zeros((8, 4, 3), np.uint8)
        upright[:4] = 255
        turned = Image.fromarray(np.rot90(upright, 1).copy())
        exif = Image.Exif()
        exif[0x0112] = 6  # turn by 90° clockwise to show
        turned.save(tmp_path / "turned.png", exif=exif)
        assert decode(tmp_path / "turned.png", 4)[0, :, 0].tolist() == [255, 255, 0, 0]


@pytest.mark.parametrize(
    ("typed", "full"),
    [
        ("synthetic-images:64", "synthetic-images:size=64"),
        ("synthetic-images:size=224,classes=7", "synthetic-images:classes=7"),
        ("digits", "digits"),
        ("image-folder:a/b?size=224", "image-folder:HERE/a/b"),
    ],
)
def test_job_has_full_data_name(tmp_path, monkeypatch, typed, full):
    monkeypatch.chdir(tmp_path)
    assert written_out(Job(data=typed)).data == full.replace("HERE", str(tmp_path))


def test_job_has_absolute_folder_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert written_out(Job(data="svhn", data_dir=Path("files"))).data_dir == tmp_path / "files"
    assert written_out(Job(data="svhn", data_dir=Path("~/files"))).data_dir == Path("/home/someone/files")
