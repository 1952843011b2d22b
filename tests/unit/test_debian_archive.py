"""Fetching and reading packages: changing archives, network failures, malicious packages."""

import itertools
import json
import shutil
import sys
import tarfile
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from debian_archive import LocalArchive, member, packed, served, write_package
from test_debian_text import MESSAGES, deb, mo, packages, texts

from crosstrain.core.errors import MissingPackageError, TrainerError, UsageError
from crosstrain.data.sources.translation import tokenizer as encoding
from crosstrain.data.store.stored_dataset import open_dataset, prepare
from crosstrain_debian_text import packages as archive
from crosstrain_debian_text.packages import Extraction

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None, reason="needs apt and dpkg-deb")

NAME = "debian-text:en-de?vocabulary=400"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def interrupted(monkeypatch, parts):
    """Prepare the text, with a simulated Ctrl-C once so many parts are encoded."""
    real, begun = encoding.PairEncoder._encode, itertools.count()

    def encode(self, pairs):
        if next(begun) == parts:
            raise KeyboardInterrupt
        return real(self, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(encoding.PairEncoder, "_encode", encode)
        with pytest.raises(KeyboardInterrupt):
            prepare(NAME)


def test_changed_archive_leaves_nothing_of_old_text(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "PART_PAIRS", 50)
    local_archive = LocalArchive(tmp_path, monkeypatch)
    made = packages(local_archive.folder)
    local_archive.publish(made)
    interrupted(monkeypatch, 3)
    (work,) = (tmp_path / "cache").glob(".*.work")
    assert len(list(work.glob("train-*.npz"))) == 3
    assert (work / "vocabulary.model").exists()
    changed = [(source.replace("Open", "Close"), target.replace("öffnen", "schließen")) for source, target in MESSAGES]
    local_archive.publish(
        [deb(local_archive.folder, "gimp-data", {"usr/share/locale/de/LC_MESSAGES/gimp.mo": mo(changed)}, "1.1"), *made[1:]]
    )
    resumed = open_dataset(NAME)
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "another"))
    fresh = open_dataset(NAME)
    for split, name in itertools.product(("train", "test"), ("source", "target")):
        resumed_column, fresh_column = (dataset.column(split, name) for dataset in (resumed, fresh))
        assert np.array_equal(resumed_column.values, fresh_column.values)
        assert np.array_equal(resumed_column.lengths, fresh_column.lengths)
    assert {name: resumed.attachment(name) for name in resumed.attachments} == {name: fresh.attachment(name) for name in fresh.attachments}
    assert texts(resumed, "test", "target") == resumed.attachment("test.target.txt").decode().splitlines()
    record = json.loads(resumed.attachment("packages.json"))
    assert [package["version"] for package in record["packages"] if package["name"] == "gimp-data"] == ["1.1"]
    assert not [text for text in texts(resumed, "train", "source") if text.startswith("Open")]


def test_fetched_packages_survive_network_failure(tmp_path, monkeypatch, capsys):
    with served(tmp_path / "archive") as (address, requests):
        local_archive = LocalArchive(tmp_path, monkeypatch, address)
        made = packages(local_archive.folder)
        local_archive.publish(made)
        (gone, _), *rest = made
        away = gone.rename(tmp_path / gone.name)
        with pytest.raises(TrainerError, match=r"apt-get download failed: E: .*Try again") as failed:
            open_dataset(NAME)
        assert not isinstance(failed.value, UsageError)
        assert "are kept, and the next attempt resumes there" in capsys.readouterr().err
        away.rename(gone)
        requests.clear()
        assert open_dataset(NAME).info.sizes["train"] > 200
        assert [path for path in requests if path.endswith(gone.name)]
        assert not [path for path in requests for file, _ in rest if path.endswith(file.name)]
    assert not list((tmp_path / "cache").glob(".*.work"))


def test_command_timeout_is_no_usage_error(tmp_path):
    with pytest.raises(TrainerError, match=r"`sleep 60` did not end within 0\.2 s") as failed:
        archive._run(["sleep", "60"], tmp_path, 0.2)
    assert not isinstance(failed.value, UsageError)


def test_nothing_is_fetched_without_sentencepiece(tmp_path, monkeypatch):
    local_archive = LocalArchive(tmp_path, monkeypatch)
    local_archive.publish(packages(local_archive.folder))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setenv("PATH", str(tmp_path))  # not even looked for
    with pytest.raises(MissingPackageError, match="sentencepiece"):
        open_dataset(NAME)


def test_files_of_other_versions_are_removed(tmp_path, monkeypatch):
    local_archive = LocalArchive(tmp_path, monkeypatch)
    made = packages(local_archive.folder)
    local_archive.publish(made)
    folder = tmp_path / "fetched"
    folder.mkdir()
    (folder / "gimp-data_0.9_all.deb").write_bytes(made[0][0].read_bytes()[:100])
    for version in ("0.9", "1.1"):
        shutil.copy(deb(tmp_path, "debian-faq", {"usr/share/doc/debian-faq/other": "other"}, version)[0], folder)
    files, missing = archive.fetch(["gimp-data", "inkscape", "debian-faq"], folder)
    assert [path.name for path in files] == ["debian-faq_1.0_all.deb", "gimp-data_1.0_all.deb"]
    assert missing == ["inkscape"]
    assert sorted(path.name for path in folder.iterdir()) == ["debian-faq_1.0_all.deb", "gimp-data_1.0_all.deb"]


def test_damaged_file_of_the_right_size_is_fetched_again(tmp_path, monkeypatch):
    folder = tmp_path / "fetched"
    folder.mkdir()
    with served(tmp_path / "archive") as (address, _):
        local_archive = LocalArchive(tmp_path, monkeypatch, address)
        made = packages(local_archive.folder)
        local_archive.publish(made)
        whole = made[0][0].read_bytes()
        (folder / made[0][0].name).write_bytes(whole[:500] + bytes(8) + whole[508:])
        with suppress(TrainerError):  # some apts keep such a file, which is gone by the next try
            archive.fetch(["gimp-data"], folder)
        (file,), _ = archive.fetch(["gimp-data"], folder)
    assert file.read_bytes() == whole


TWO = member("./one", b"first"), member("./two", b"second")


def read(path):
    return [name for name, _ in archive.read_files(path, lambda name: True)]


def test_complete_package_is_read_to_its_end(tmp_path):
    long_name = member("././@LongLink", b"x" * 300 + b"\0", tarfile.GNUTYPE_LONGNAME)
    packs = packed(*TWO, long_name, member("x", b"long")), packed(*TWO, bytes(4 << 20))
    for pack, more in zip(packs, (["x" * 300], []), strict=True):
        assert read(write_package(tmp_path / "some.deb", pack)) == ["one", "two", *more]


def test_truncated_package_is_damaged(tmp_path):
    pack = zlib.compressobj(wbits=31)
    half = pack.compress(TWO[0]) + pack.flush(zlib.Z_FULL_FLUSH)
    with pytest.raises(UsageError, match=r"some\.deb' is damaged: dpkg-deb ended with exit code \d+ \(dpkg-deb.*\)\. Fetch it again"):
        read(write_package(tmp_path / "some.deb", half))
    whole = packed(*TWO)
    with pytest.raises(UsageError, match=r"some\.deb' is damaged: .*dpkg-deb"):  # its sum is wrong
        read(write_package(tmp_path / "some.deb", whole[:-8] + bytes(4) + whole[-4:]))


def test_invalid_header_is_not_the_end(tmp_path):
    for junk in (b"\1" * 512, TWO[1][:200] + b"\1" + TWO[1][201:512]):
        with pytest.raises(UsageError, match=r"is damaged: (bad checksum|invalid header)"):
            read(write_package(tmp_path / "some.deb", packed(TWO[0], junk, TWO[1])))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (tarfile.GNUTYPE_LONGNAME, "a name of 67,108,864 bytes"),
        (tarfile.GNUTYPE_LONGLINK, "a name of 67,108,864 bytes"),
        (tarfile.XHDTYPE, "a header of the kind b'x', which no package has"),
        (tarfile.XGLTYPE, "a header of the kind b'g'"),
        (tarfile.GNUTYPE_SPARSE, "a header of the kind b'S'"),
        (b"Q", "a header of the kind b'Q'"),
    ],
)
def test_extension_headers_take_no_memory(tmp_path, kind, problem):
    pack, blocks = zlib.compressobj(1, wbits=31), []
    blocks.append(pack.compress(TWO[0] + member("./more", kind=kind, size=64 << 20)))
    blocks += [pack.compress(b"1" * (1 << 20)) for _ in range(64)]
    path = write_package(tmp_path / "some.deb", b"".join(blocks) + pack.compress(TWO[1] + bytes(1024)) + pack.flush())
    tracemalloc.start()
    with pytest.raises(UsageError, match=problem):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_chain_of_long_names_is_damage(tmp_path):
    row = member("././@LongLink", b"x\0", tarfile.GNUTYPE_LONGNAME) * 3000
    with pytest.raises(UsageError, match="is damaged"):
        read(write_package(tmp_path / "some.deb", packed(row, *TWO)))


def test_reader_that_stops_early_ends_dpkg_deb(tmp_path):
    large = member("./two", bytes(20 << 20))
    reading = archive.read_files(write_package(tmp_path / "some.deb", packed(TWO[0], large)), lambda name: True)
    assert next(reading) == ("one", b"first")
    reading.close()


def test_catalogue_with_broken_characters_has_no_pairs(tmp_path):
    catalogue = mo([("Half of a sign +2AA-", "Die Haelfte eines Zeichens +2AA-")]).replace(b"UTF-8", b"UTF-7")
    path, _ = deb(tmp_path, "gimp-data", {"usr/share/locale/de/LC_MESSAGES/gimp.mo": catalogue})
    extraction = Extraction([path])
    assert extraction.pairs() == []
    assert extraction.left_out == {"code or placeholders": 1}
