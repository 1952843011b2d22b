"""The store of prepared datasets: atomic, read-only, and damage is found and repaired."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from crosstrain.cli.commands.data import data
from crosstrain.core.errors import DamagedStoreError, TrainerError, UsageError
from crosstrain.data.store import dataset_list, stored_dataset
from crosstrain.data.store.manifest import FILES, STAMP, identity, read_manifest

ARRAYS = sorted(FILES.values())


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A cache with digits, made once and copied by tests."""
    root = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_DATA_CACHE", str(root))
        stored_dataset.prepare("digits")
    return root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(root))
    return root


@pytest.fixture
def digits(cache, prepared):
    """Return the folder of digits in a cache of this test."""
    shutil.copytree(prepared, cache)
    return cache / "digits-v2.2"


def overwrite(path, change):
    content = bytearray(path.read_bytes())
    path.chmod(0o644)
    path.write_bytes(change(content))


def flip(content):
    content[len(content) // 2] ^= 1
    return content


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def settle(folder):
    """Open the store once its files are old enough for a stamp."""
    time.sleep(0.12)
    stored_dataset.open_dataset("digits")
    assert (folder / STAMP).exists()


class TestOpening:
    def test_dataset_is_prepared_at_first_use(self, cache):
        opened = stored_dataset.open_dataset("digits")
        assert opened.path == cache / "digits-v2.2"
        assert sorted(path.name for path in cache.iterdir()) == [".digits-v2.2.lock", "digits-v2.2"]
        assert sorted(path.name for path in opened.path.iterdir() if path.name != STAMP) == ["manifest.json", *ARRAYS]

    def test_arrays_are_read_only_maps(self, digits):
        opened = stored_dataset.open_dataset("digits")
        for array in (opened.images("train"), opened.labels("test")):
            assert isinstance(array, np.memmap)
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        assert all(not (digits / name).stat().st_mode & 0o222 for name in ARRAYS)

    def test_inputs_follow_the_formula_exactly(self, digits):
        opened = stored_dataset.open_dataset("digits")
        info = opened.info
        expected = (opened.images("train") / 255.0 - info.mean[0]) / info.std[0]
        inputs = opened.inputs("train")
        assert inputs.dtype == np.float32
        assert np.abs(inputs - expected).max() <= 2.0**-23 * np.abs(expected).max()  # rounded to float32 once
        assert inputs.tobytes() == opened.inputs("train").tobytes()
        assert abs(inputs.mean(dtype=np.float64)) < 1e-6
        assert inputs.std(dtype=np.float64) == pytest.approx(1, abs=1e-6)

    def test_digests_are_computed_again_only_after_changes(self, digits):
        settle(digits)
        stamped = (digits / STAMP).stat().st_mtime_ns
        stored_dataset.open_dataset("digits")
        assert (digits / STAMP).stat().st_mtime_ns == stamped
        os.utime(digits / "train_images.npy")
        time.sleep(0.12)
        stored_dataset.open_dataset("digits")
        assert (digits / STAMP).stat().st_mtime_ns > stamped

    def test_silent_corruption_is_found_by_digests(self, digits):
        settle(digits)
        overwrite(digits / "train_images.npy", flip)
        (digits / STAMP).write_text(json.dumps(identity(digits, read_manifest(digits))))
        stored_dataset.open_dataset("digits")
        with pytest.raises(DamagedStoreError, match=r"train_images\.npy differs from its sha256"):
            stored_dataset.open_dataset("digits", verify="always")
        (report,) = stored_dataset.verify("digits")
        assert [check.name for check in report.damaged] == ["train_images.npy"]

    def test_truncated_stamp_is_replaced(self, digits):
        (digits / STAMP).write_text('{"train')
        settle(digits)
        assert json.loads((digits / STAMP).read_text())

    def test_open_arrays_survive_a_new_preparation(self, digits):
        opened = stored_dataset.open_dataset("digits")
        before = opened.images("train").tobytes()
        stored_dataset.prepare("digits", again=True)
        assert opened.images("train").tobytes() == before
        assert stored_dataset.open_dataset("digits").digest == opened.digest


class TestDamage:
    @pytest.mark.parametrize("name", ARRAYS)
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (flip, "differs from its sha256"),
            (lambda content: content[:-1], "bytes instead of"),
            (lambda content: content + b"\0", "bytes instead of"),
            (None, "is missing"),
        ],
        ids=["flipped", "cut", "longer", "missing"],
    )
    def test_damage_is_named_and_repaired(self, digits, name, change, says):
        settle(digits)
        if change:
            overwrite(digits / name, change)
        else:
            (digits / name).unlink()
        with pytest.raises(DamagedStoreError) as caught:
            stored_dataset.open_dataset("digits")
        message = str(caught.value)
        assert f"{name} " in message
        assert says in message
        assert "trainer data prepare digits --again" in message
        assert sum(array in message for array in ARRAYS) == 1
        stored_dataset.prepare("digits", again=True)
        assert stored_dataset.open_dataset("digits", verify="always").info.sizes == {"train": 1437, "test": 360}

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"{", "is not a whole JSON document"),
            (b"[]", "has no manifest_sha256"),
            (b"\xff\xfe", "is not a whole JSON document"),
            (lambda content: content.replace(b'"test": 360', b'"test": 361'), "differs from its own sha256"),
            (None, "is missing"),
        ],
    )
    def test_damaged_manifest_is_named(self, digits, content, says):
        manifest = digits / "manifest.json"
        if content is None:
            manifest.unlink()
        else:
            manifest.write_bytes(content(manifest.read_bytes()) if callable(content) else content)
        with pytest.raises(DamagedStoreError, match=f"manifest.json {says}"):
            stored_dataset.open_dataset("digits")
        (row,) = (row for row in dataset_list.list_datasets() if row.name == "digits")
        assert row.problem is not None
        assert says in row.problem

    def test_manifest_of_a_later_schema_is_named(self, digits):
        fields = json.loads((digits / "manifest.json").read_text()) | {"schema": 99}
        del fields["manifest_sha256"]
        write_with_digest(digits, fields)
        with pytest.raises(DamagedStoreError, match="has schema 99; this version reads 2"):
            stored_dataset.open_dataset("digits")

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"classes": 2**40}, "classes: input should be less than or equal to 16777216"),
            ({"classes": 0}, "classes: input should be greater than or equal to 1"),
            ({"std": [0]}, "mean and std: pixels cannot be normalised by the mean .* and the std 0.0, which has to be greater than 0"),
            ({"std": [-1]}, "the std -1.0, which has to be greater than 0"),
            ({"std": [1e-320]}, "the std 1e-320"),
            ({"mean": [1e30], "std": [1e-10]}, "mean 1e[+]30 and the std 1e-10"),
            ({"std": []}, "mean and std: have 1 and 0 numbers, and have to have 1, one a channel"),
            ({"class_names": ["a"]}, "class_names: 1 names for 10 classes"),
        ],
    )
    def test_unusable_manifest_with_valid_digest_is_refused(self, digits, change, says):
        fields = json.loads((digits / "manifest.json").read_text()) | change
        del fields["manifest_sha256"]
        write_with_digest(digits, fields)
        with pytest.raises(DamagedStoreError, match=f"manifest.json .*{says}"):
            stored_dataset.open_dataset("digits")

    def test_array_of_another_shape_is_found_despite_digest(self, digits):
        fields = json.loads((digits / "manifest.json").read_text())
        del fields["manifest_sha256"]
        fields["files"]["test_labels.npy"]["shape"] = [36, 10]
        write_with_digest(digits, fields)
        with pytest.raises(DamagedStoreError, match=r"test_labels\.npy holds int64 \[360\] instead of int64 \[36, 10\]"):
            stored_dataset.open_dataset("digits")


def write_with_digest(folder, fields):
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**fields, "manifest_sha256": digest}))


class TestMaking:
    @pytest.mark.thorough
    def test_concurrent_preparations_succeed(self, cache):
        script = "from crosstrain.data.store.stored_dataset import open_dataset; print(open_dataset('digits').digest)"
        children = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        outputs = [child.communicate(timeout=60)[0] for child in children]
        assert [child.returncode for child in children] == [0, 0, 0]
        assert len(set(outputs)) == 1
        assert sorted(path.name for path in cache.iterdir()) == [".digits-v2.2.lock", "digits-v2.2"]

    def test_leftovers_of_a_killed_process_are_removed(self, cache):
        leftovers = [cache / ".digits-v2.2.draft-abc", cache / ".digits-v2.2.old-def"]
        for folder in leftovers:
            folder.mkdir(parents=True)
            (folder / "train_images.npy").write_bytes(b"half")
        stored_dataset.prepare("digits")
        assert not any(folder.exists() for folder in leftovers)

    def test_existing_store_is_reused(self, digits):
        inode = digits.stat().st_ino
        assert stored_dataset.prepare("digits") == digits
        assert digits.stat().st_ino == inode

    def test_cache_that_cannot_be_made_is_named(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(TrainerError, match="TRAINER_DATA_CACHE"):
            stored_dataset.prepare("digits")

    def test_cache_follows_the_xdg_specification(self, tmp_path, monkeypatch):
        monkeypatch.delenv("TRAINER_DATA_CACHE", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
        assert stored_dataset.cache_root() == tmp_path / ".cache" / "crosstrain" / "data"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert stored_dataset.cache_root() == tmp_path / "xdg" / "crosstrain" / "data"


SOURCE = """
from pathlib import Path
import numpy as np
from crosstrain.data.base import PreparedArrays

class Source:
    name, description, version = "stripes", "two kinds of stripes", 3

    def load(self, data_dir):
        value = int((data_dir / "value.txt").read_text()) if data_dir else 7
        images = np.full((4, 2, 3, 3), value, dtype=np.uint8)
        images[0] = 0
        labels = np.array([0, 1, 0, 1])
        return PreparedArrays({"train": images, "test": images[:2]}, {"train": labels, "test": labels[:2]}, 2, (0.1, 0.2), (1.0, 0.5), True)

class Wrong(Source):
    def load(self, data_dir):
        good = super().load(data_dir)
        return PreparedArrays(good.images, good.labels, 1, good.mean, good.std)

DATASET, WRONG = Source(), Wrong()
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Install a third-party distribution with three datasets, of which one works."""
    site = tmp_path / "site"
    (site / "stripes-1.0.dist-info").mkdir(parents=True)
    (site / "stripes-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stripes\nVersion: 1.0\n")
    points = "[crosstrain.datasets]\nstripes = stripes_source:DATASET\nwrong = stripes_source:WRONG\nbroken = no_such_module_here:DATASET\n"
    (site / "stripes-1.0.dist-info" / "entry_points.txt").write_text(points)
    (site / "stripes_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("stripes_source", None)


@pytest.mark.usefixtures("third_party")
class TestThirdParties:
    def test_third_party_dataset_is_prepared(self, cache):
        opened = stored_dataset.open_dataset("stripes")
        assert opened.path == cache / "stripes-v2.3"
        assert (opened.info.input_shape, opened.info.classes, opened.info.synthetic) == ((2, 3, 3), 2, True)
        expected = [[(7 / 255 - 0.1) / 1.0] * 9, [(7 / 255 - 0.2) / 0.5] * 9]
        assert np.allclose(opened.inputs("train")[1].reshape(2, 9), expected, rtol=1e-6)

    def test_other_source_folder_is_another_store(self, cache, tmp_path):
        folders = [tmp_path / "one", tmp_path / "two"]
        for value, folder in enumerate(folders, start=1):
            folder.mkdir()
            (folder / "value.txt").write_text(str(value))
        pixels = [int(stored_dataset.open_dataset("stripes", folder).images("train").max()) for folder in (None, *folders)]
        assert pixels == [7, 1, 2]
        time.sleep(0.02)
        (folders[0] / "value.txt").write_text("9")  # of equal length, so only the time differs
        assert stored_dataset.open_dataset("stripes", folders[0]).images("train").max() == 9
        rows = [row for row in dataset_list.list_datasets() if row.name == "stripes"]
        assert sorted(row.data_dir or "" for row in rows) == ["", str(folders[0]), str(folders[0]), str(folders[1])]

    def test_suggested_command_has_the_folder(self, cache, tmp_path):
        originals = tmp_path / "my files"
        originals.mkdir()
        (originals / "value.txt").write_text("3")
        (stored_dataset.prepare("stripes", originals) / "test_labels.npy").unlink()
        with pytest.raises(DamagedStoreError, match=f"trainer data prepare stripes --data-dir '{originals}' --again"):
            stored_dataset.open_dataset("stripes", originals)
        (report,) = stored_dataset.verify("stripes")
        assert report.remedy == f"trainer data prepare stripes --data-dir '{originals}' --again"

    def test_invalid_dataset_is_named_and_not_stored(self, cache):
        with pytest.raises(UsageError, match=r"source of 'wrong' is broken: train labels lie in 0…1, not in 0…0"):
            stored_dataset.open_dataset("wrong")
        assert not list(cache.iterdir())

    def test_broken_plugin_hides_no_other(self, cache):
        rows = {row.name: row for row in dataset_list.list_datasets()}
        assert {"digits", "glyphs28", "mnist", "stripes", "broken"} <= set(rows)
        assert "no_such_module_here" in (rows["broken"].problem or "")
        assert rows["stripes"].problem is None


class TestCommand:
    def run(self, *arguments):
        result = CliRunner().invoke(data, list(arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.stdout

    def test_list_shows_prepared_datasets(self, digits):
        listed = json.loads(self.run("list", "--json"))
        assert listed["cache"] == str(digits.parent)
        rows = {row["name"]: row for row in listed["datasets"]}
        assert (rows["digits"]["prepared"], rows["digits"]["train"], rows["digits"]["test"]) == (True, 1437, 360)
        assert (rows["mnist"]["prepared"], rows["mnist"]["train"]) == (False, None)
        assert rows["digits"]["bytes"] == sum((digits / name).stat().st_size for name in ARRAYS)
        table = self.run("list")
        assert all(row["name"] in table and row["description"] in table for row in rows.values())

    def test_line_feed_in_a_path_stays_in_its_row(self, cache, tmp_path):
        folder = tmp_path / "two\nlines"
        for split in ("train", "test"):
            for number, name in enumerate("abcdefghijkl"):
                (folder / split / name).mkdir(parents=True)
                for copy in range(1 + (split == "train")):
                    Image.new("RGB", (4, 4), (number, 0, copy)).save(folder / split / name / f"{copy}.png")
        name = f"image-folder:{folder}?size=4"
        assert self.run("prepare", name).count("\n") == 1
        rows = [line for line in self.run("list").splitlines() if "lines" in line]
        assert len(rows) == 1
        assert rows[0].count(r"two\x0alines") == 2
        assert self.run("verify").count("\n") == 1
        shown = self.run("info", name)
        assert "class names                   a, b, c, d, e, f, g, h, i, j and 2 more\n" in shown
        assert "smallest class examples train 2\nsmallest class examples test  1\n" in shown
        assert json.loads(self.run("info", name, "--json"))["class_names"] == list("abcdefghijkl")
        assert self.run("remove", name).count("\n") == 1

    def test_verify_names_damage(self, digits):
        assert json.loads(self.run("verify", "digits", "--json"))["ok"] is True
        overwrite(digits / "test_images.npy", flip)
        (digits / "test_labels.npy").unlink()
        with pytest.raises(DamagedStoreError) as caught:
            self.run("verify")
        assert caught.value.exit_code == 1
        assert "test_images.npy differs" in str(caught.value)
        assert "test_labels.npy is missing" in str(caught.value)
        assert "digits-v2.2/train" not in str(caught.value)
        self.run("prepare", "digits", "--again")
        assert "5 files as they should be" in self.run("verify", "digits")

    def test_verify_reads_every_file_once(self, digits):
        """As the kernel counts this process's reads, which exclude maps."""
        before = bytes_read()
        report = stored_dataset.verify_store("digits", digits)
        assert not report.damaged
        size = sum(check.bytes for check in report.files)
        assert size <= bytes_read() - before < 1.7 * size

    def test_verify_names_unprepared_datasets(self, cache):
        with pytest.raises(UsageError, match="trainer data prepare digits"):
            self.run("verify", "digits")
        assert "No dataset is prepared" in self.run("verify")

    def test_remove_deletes_all_stores_of_a_dataset_only(self, digits):
        """Open stores stay readable, and the next use prepares the dataset again."""
        opened = stored_dataset.open_dataset("digits")
        before = opened.images("train")[-1].copy()
        for name in ("digits-v1", "digits-v2.1-0123456789abcdef", "digits-v2.2+a=1", "digits28-v2.2", "digits-v2.2-short", "digits-vx"):
            shutil.copytree(digits, digits.parent / name)
        size = sum(file.stat().st_size for file in digits.iterdir())
        printed = self.run("remove", "digits").splitlines()
        removed = ["digits-v1", "digits-v2.1-0123456789abcdef", "digits-v2.2", "digits-v2.2+a=1"]
        assert printed == [f"digits: removed {digits.parent / name} ({size / 1e6:.1f} MB)" for name in removed]
        left = {path.name for path in digits.parent.iterdir() if not path.name.endswith(".lock")}
        assert left == {"digits28-v2.2", "digits-v2.2-short", "digits-vx"}
        np.testing.assert_array_equal(opened.images("train")[-1], before)
        np.testing.assert_array_equal(stored_dataset.open_dataset("digits").images("train")[-1], before)

    def test_interrupted_preparation_is_listed_and_removed(self, cache):
        for leftover in (".digits-v2.2.work", ".digits-v2.2.draft-a1", ".digits-v1.old-b2", ".digits28-v2.2.work"):
            (cache / leftover / "deep").mkdir(parents=True)
            (cache / leftover / "deep" / "part.npz").write_bytes(bytes(2_000_000))
        rows = [row for row in json.loads(self.run("list", "--json"))["datasets"] if row["name"] == "digits"]
        assert [(row["prepared"], row["begun"], row["bytes"]) for row in rows] == [(False, "interrupted", 4_000_000)]
        assert "interrupted" in next(line for line in self.run("list").splitlines() if line.startswith("digits "))
        printed = self.run("remove", "digits").splitlines()
        left_of = "digits: removed what an interrupted preparation left of "
        assert printed == [f"{left_of}{cache / 'digits-v1'} (2.0 MB)", f"{left_of}{cache / 'digits-v2.2'} (4.0 MB)"]
        assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == [".digits28-v2.2.work"]

    def test_preparation_in_progress_is_listed_and_kept(self, cache):
        (cache / ".digits-v2.2.work").mkdir(parents=True)
        script = f"""
import pathlib
from crosstrain.data.store.location import locked
with locked(pathlib.Path({str(cache)!r}), "digits-v2.2"):
    print("locked", flush=True)
    input()
"""
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "locked\n"
            (begun,) = (row["begun"] for row in json.loads(self.run("list", "--json"))["datasets"] if row["name"] == "digits")
            assert begun == "at work"
            with pytest.raises(UsageError, match="is being prepared now, and stays"):
                self.run("remove", "digits")
            assert (cache / ".digits-v2.2.work").exists()
            child.communicate("\n")
        self.run("remove", "digits")
        assert not (cache / ".digits-v2.2.work").exists()

    def test_remove_names_missing_datasets(self, cache):
        for name in ("digits", "synthetic-images:size=64"):
            with pytest.raises(UsageError, match="nothing to remove"):
                self.run("remove", name)
        with pytest.raises(UsageError, match="Did you mean 'digits'"):
            self.run("remove", "digit")

    def test_remove_checks_all_names_first(self, digits):
        for wrong in ("nope", "glyphs"):
            with pytest.raises(UsageError):
                self.run("remove", "digits", wrong)
        assert digits.exists()
        assert self.run("remove", "digits", "digits").count("removed") == 1

    def test_remove_reports_errors_of_the_system(self, digits):
        """A folder in the place of the lock file is refused to root too."""
        (digits.parent / f".{digits.name}.lock").unlink(missing_ok=True)
        (digits.parent / f".{digits.name}.lock").mkdir()
        with pytest.raises(TrainerError, match="cannot be removed"):
            self.run("remove", "digits")
        assert stored_dataset.verify("digits")[0].damaged == ()

    def test_unknown_dataset_suggests_the_nearest(self, cache):
        with pytest.raises(UsageError, match="Did you mean 'digits'"):
            self.run("prepare", "digit")
        assert not Path(cache).exists()
