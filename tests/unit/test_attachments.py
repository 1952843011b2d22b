"""Attachments of a store: they round-trip, and hostile or damaged ones are refused by name."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

from crosstrain.checkpoint.meta import data_info, described_data
from crosstrain.core.errors import DamagedStoreError, UsageError
from crosstrain.data.base import MAX_ATTACHMENT_BYTES, PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.store import stored_dataset
from crosstrain.data.store.build import build_store
from crosstrain.data.store.manifest import read_manifest, write_manifest


@dataclass
class Source:
    attachments: dict = field(default_factory=lambda: {"vocabulary.model": b"pieces", "test.source.txt": b""})
    languages: tuple = ()
    name: str = "text"
    description: str = "made for a test"
    version: int = 1

    def load(self, data_dir):
        def blocks():
            yield {"source": Column(np.array([4, 2, 2], np.uint16), np.array([0, 2, 3], np.int64))}

        features = TextFeatures({"source": 5}, self.languages, "char")
        splits = {"train": blocks, "test": blocks}
        return PreparedColumns((ColumnSpec("source", "uint16", (None,)),), features, splits, attachments=lambda: self.attachments)


def build_made(root, source):
    build_store(root, "made", source.name, source, None, again=True)
    return root / "made"


def opened(folder):
    return stored_dataset._open(folder, "text", None, always=True)


def test_attachments_round_trip(tmp_path):
    dataset = opened(build_made(tmp_path, Source()))
    assert dataset.attachments == ("vocabulary.model", "test.source.txt")
    assert dataset.attachment("vocabulary.model") == b"pieces"
    assert dataset.attachment("test.source.txt") == b""
    assert dataset.info.text == TextFeatures({"source": 5}, (), "char")
    assert data_info(described_data(dataset.info, "", None)) == dataset.info
    with pytest.raises(UsageError, match=r"no attachment 'other'; it has vocabulary\.model, test\.source\.txt"):
        dataset.attachment("other")


NAMES = ["../outside", "a/b", "/etc/passwd", ".hidden", "", "manifest.json", "verified.json", "x.npy", "a" * 101, "a\n", "Ä", "a\0b"]


@pytest.mark.parametrize("name", NAMES)
def test_attachment_names_outside_folder_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="is no name for one"):
        build_made(tmp_path, Source({name: b"x"}))
    assert not list(tmp_path.iterdir())


def test_large_attachments_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"vocabulary\.model has \d+ bytes, more than"):
        build_made(tmp_path, Source({"vocabulary.model": bytes(MAX_ATTACHMENT_BYTES + 1)}))


def changed(folder, **update):
    (folder / "manifest.json").chmod(0o644)
    manifest = read_manifest(folder)
    write_manifest(folder, manifest.model_copy(update=update))


@pytest.mark.parametrize("name", NAMES)
def test_manifest_naming_foreign_files_is_refused(tmp_path, name):
    folder = build_made(tmp_path, Source())
    entry = read_manifest(folder).attachments["vocabulary.model"]
    changed(folder, attachments={name: entry})
    with pytest.raises(DamagedStoreError, match="is no name for one"):
        opened(folder)


@pytest.mark.parametrize("bytes_", [-1, MAX_ATTACHMENT_BYTES + 1, 2**70])
def test_manifest_with_impossible_sizes_is_refused(tmp_path, bytes_):
    folder = build_made(tmp_path, Source())
    entry = read_manifest(folder).attachments["vocabulary.model"]
    changed(folder, attachments={"vocabulary.model": entry.model_copy(update={"bytes": bytes_})})
    with pytest.raises(DamagedStoreError, match="attachments"):
        opened(folder)


@pytest.mark.parametrize("languages", [("e" * 50,), ("\x1b[31m",), ("en",) * 11])
def test_manifest_with_invalid_languages_is_refused(tmp_path, languages):
    folder = build_made(tmp_path, Source())
    changed(folder, languages=languages)
    with pytest.raises(DamagedStoreError, match="languages"):
        opened(folder)


def test_verify_finds_damage(tmp_path):
    folder = build_made(tmp_path, Source())
    assert len(stored_dataset.verify_store("text", folder).files) == 1 + 4 + 2
    path = folder / "vocabulary.model"
    path.chmod(0o644)
    dataset = opened(folder)
    path.write_bytes(b"Pieces")
    with pytest.raises(DamagedStoreError, match=r"vocabulary\.model differs from its sha256"):
        dataset.attachment("vocabulary.model")
    (check,) = stored_dataset.verify_store("text", folder).damaged
    assert check.name == "vocabulary.model"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedStoreError, match=r"vocabulary\.model is a pipe"):
        opened(folder)
