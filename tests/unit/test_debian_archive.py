"""Packages as they are fetched and read: an archive that moves, a network that fails, and packages that somebody made on purpose."""

import itertools
import json
import shutil
import sys

import numpy as np
import pytest
from debian_archive import OwnArchive, served
from test_debian_text import MESSAGES, deb, mo, packages, texts

from crosstrain.core.errors import MissingPackageError, TrainerError, UsageError
from crosstrain.data.sources.debian import archive
from crosstrain.data.sources.translation import encoding
from crosstrain.data.store.stored_dataset import open_dataset, prepare

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None, reason="needs apt and dpkg-deb")

NAME = "debian-text:en-de?vocabulary=400"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def interrupted(monkeypatch, parts):
    """Prepare the text, and end that as Ctrl-C does when so many parts are encoded."""
    real, begun = encoding.PairEncoder._encode, itertools.count()

    def encode(self, pairs):
        if next(begun) == parts:
            raise KeyboardInterrupt
        return real(self, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(encoding.PairEncoder, "_encode", encode)
        with pytest.raises(KeyboardInterrupt):
            prepare(NAME)


def test_an_archive_that_moves_between_two_tries_leaves_nothing_of_the_old_text(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "PART_PAIRS", 50)
    own = OwnArchive(tmp_path, monkeypatch)
    made = packages(own.folder)
    own.publish(made)
    interrupted(monkeypatch, 3)
    (work,) = (tmp_path / "cache").glob(".*.work")
    assert len(list(work.glob("train-*.npz"))) == 3
    assert (work / "vocabulary.model").exists()
    changed = [(source.replace("Open", "Close"), target.replace("öffnen", "schließen")) for source, target in MESSAGES]
    own.publish([deb(own.folder, "gimp-data", {"usr/share/locale/de/LC_MESSAGES/gimp.mo": mo(changed)}, "1.1"), *made[1:]])
    resumed = open_dataset(NAME)
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "another"))
    fresh = open_dataset(NAME)
    for split, name in itertools.product(("train", "test"), ("source", "target")):
        one, other = (dataset.column(split, name) for dataset in (resumed, fresh))
        assert np.array_equal(one.values, other.values)
        assert np.array_equal(one.lengths, other.lengths)
    assert {name: resumed.attachment(name) for name in resumed.attachments} == {name: fresh.attachment(name) for name in fresh.attachments}
    assert texts(resumed, "test", "target") == resumed.attachment("test.target.txt").decode().splitlines()
    record = json.loads(resumed.attachment("packages.json"))
    assert [package["version"] for package in record["packages"] if package["name"] == "gimp-data"] == ["1.1"]
    assert not [text for text in texts(resumed, "train", "source") if text.startswith("Open")]


def test_what_was_fetched_before_the_network_failed_is_not_fetched_again(tmp_path, monkeypatch, capsys):
    with served(tmp_path / "archive") as (address, asked):
        own = OwnArchive(tmp_path, monkeypatch, address)
        made = packages(own.folder)
        own.publish(made)
        (gone, _), *others = made
        away = gone.rename(tmp_path / gone.name)
        with pytest.raises(TrainerError, match=r"apt-get download failed: E: .*Try again") as failed:
            open_dataset(NAME)
        assert not isinstance(failed.value, UsageError)
        assert "is kept, and the next try goes on there" in capsys.readouterr().err
        away.rename(gone)
        asked.clear()
        assert open_dataset(NAME).info.sizes["train"] > 200
        assert [path for path in asked if path.endswith(gone.name)]
        assert not [path for path in asked for other, _ in others if path.endswith(other.name)]
    assert not list((tmp_path / "cache").glob(".*.work"))


def test_a_command_that_takes_too_long_is_no_refusal(tmp_path):
    with pytest.raises(TrainerError, match=r"`sleep 60` did not end within 0\.2 s") as failed:
        archive._run(["sleep", "60"], tmp_path, 0.2)
    assert not isinstance(failed.value, UsageError)


def test_without_the_package_that_makes_pieces_nothing_is_fetched(tmp_path, monkeypatch):
    own = OwnArchive(tmp_path, monkeypatch)
    own.publish(packages(own.folder))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setenv("PATH", str(tmp_path))  # not even looked for
    with pytest.raises(MissingPackageError, match="sentencepiece"):
        open_dataset(NAME)


def test_what_lies_there_of_other_versions_is_passed_over(tmp_path, monkeypatch):
    own = OwnArchive(tmp_path, monkeypatch)
    made = packages(own.folder)
    own.publish(made)
    folder = tmp_path / "fetched"
    folder.mkdir()
    (folder / "gimp-data_0.9_all.deb").write_bytes(made[0][0].read_bytes()[:100])
    for version in ("0.9", "1.1"):
        shutil.copy(deb(tmp_path, "debian-faq", {"usr/share/doc/debian-faq/other": "other"}, version)[0], folder)
    files, missing = archive.fetch(["gimp-data", "inkscape", "debian-faq"], folder)
    assert [path.name for path in files] == ["debian-faq_1.0_all.deb", "gimp-data_1.0_all.deb"]
    assert missing == ["inkscape"]
