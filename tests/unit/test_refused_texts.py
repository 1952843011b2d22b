"""Text that cannot be prepared: refused before long work, and nothing is left."""

import os
import struct
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstrain.checkpoint.meta import trained_vocabulary
from crosstrain.core.errors import UsageError
from crosstrain.data.sources.translation import parallel_text
from crosstrain.data.sources.translation.parallel_text import _read
from crosstrain.data.sources.translation.tokenizer import Vocabulary, train_vocabulary
from crosstrain.data.store import build
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.records.store.vocabulary import VOCABULARY
from crosstrain_debian_text import packages as archive
from crosstrain_debian_text.documents import read_mo, read_po


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model():
    return train_vocabulary([f"some words {number} of {number * 7 % 13}" for number in range(400)], 330, bytes_too=True)


def corpus(folder, lines, test=2):
    for language in ("en", "de"):
        (folder / f"text.{language}").write_text("".join(f"{line} {language}\n" if line else "\n" for line in lines))
        (folder / f"text.test.{language}").write_text("".join(f"test {number} {language}\n" for number in range(test)))
    return f"parallel-text:{folder / 'text'}:en-de?vocabulary=330"


LINES = [f"some words {number} of {number * 7 % 13}" for number in range(400)]


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        ([""] * 9, "", "no pair of sentences is left to train on: 9 pairs with an empty line"),
        (LINES, ",longest=2", "no pair of the train split is left: train: 400 pairs with more than 2 pieces"),
    ],
)
def test_text_without_usable_pairs_is_refused(tmp_path, lines, more, message):
    with pytest.raises(UsageError, match=message) as refused:
        open_dataset(corpus(tmp_path, lines) + more)
    assert "broken" not in str(refused.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_too_large_test_split_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_text, "MAX_ATTACHMENT_BYTES", 2000)
    name = corpus(tmp_path, LINES, test=300)
    monkeypatch.setattr(parallel_text, "prepared_pairs", None)  # nothing is encoded
    with pytest.raises(
        UsageError, match=r"the test split of 'parallel-text' \(its test files\) has more than .* MiB of text.* Take fewer pairs"
    ):
        open_dataset(name)


def test_too_large_held_out_split_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_text, "MAX_ATTACHMENT_BYTES", 2000)
    name = corpus(tmp_path, LINES).replace("?", "?held-out=300,")
    for language in ("en", "de"):
        (tmp_path / f"text.test.{language}").unlink()
    held = []
    real = parallel_text._encode_entry
    monkeypatch.setattr(parallel_text, "_encode_entry", lambda entry: held.append(entry) or real(entry))
    with pytest.raises(UsageError, match=r"\(held-out=300\) has more than 0 MiB of text"):
        open_dataset(name)
    assert max(sum(len(pair[side]) + 1 for pair in held) for side in (0, 1)) <= 2000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_text_that_changes_length_is_noticed(tmp_path, source, target, total):
    for language, lines in (("en", source), ("de", target)):
        (tmp_path / f"x.{language}").write_text("line\n" * lines)
    pairs = _read((tmp_path / "x.en", tmp_path / "x.de"), total)
    if source == target == total:
        assert len(list(pairs)) == total
    else:
        with pytest.raises(UsageError, match="has changed while it was read"):
            list(pairs)


def test_overwritten_text_makes_no_store(tmp_path, monkeypatch):
    name, write = corpus(tmp_path, LINES), build.write_manifest

    def overwritten(folder, manifest):
        write(folder, manifest)
        corpus(tmp_path, [line.upper() for line in LINES])
        os.utime(tmp_path / "text.en", (1, 1))

    monkeypatch.setattr(build, "write_manifest", overwritten)
    with pytest.raises(UsageError, match="have changed while they were read"):
        open_dataset(name)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["A" * 300, os.fsdecode(b"\xff\xfe"), "x?vocabulary=" + "9" * 5000])
def test_invalid_names_and_numbers_are_refused(name):
    with pytest.raises(UsageError):
        open_dataset(f"parallel-text:{name}:en-de" if "?" not in name else f"parallel-text:x:en-de{name.removeprefix('x')}")


def test_unreadable_standard_input_is_reported(tmp_path):
    code = "import os; from crosstrain.cli.trained_job import arriving_lines\nlist(arriving_lines(0, lambda: False))"
    with (tmp_path / "out").open("w") as written:
        done = subprocess.run([sys.executable, "-c", code], stdin=written, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("standard input cannot be read: Bad file descriptor; give it lines.")


def test_export_requires_the_model_s_vocabulary(tmp_path, model):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    pieces = Vocabulary(model).pieces_sha256
    meta = SimpleNamespace(data={"vocabulary_sizes": {"source": 330, "target": 330}, "pieces_sha256": pieces})
    (run / VOCABULARY).write_bytes(model)
    assert trained_vocabulary(checkpoint, meta) == model
    other_vocabulary = train_vocabulary([line.upper() for line in LINES], 330, bytes_too=True)
    for wrong, message in (
        (b"rubbish", "not a model of sentencepiece"),
        (other_vocabulary, "is not the vocabulary that the model was trained with"),
    ):
        (run / VOCABULARY).write_bytes(wrong)
        with pytest.raises(UsageError, match=message):
            trained_vocabulary(checkpoint, meta)
    (run / VOCABULARY).unlink()
    for target in ("/etc/hostname", "checkpoints"):
        (run / VOCABULARY).symlink_to(target)
        with pytest.raises(UsageError, match="is a link, not a file"):
            trained_vocabulary(checkpoint, meta)
        (run / VOCABULARY).unlink()
    os.mkfifo(run / VOCABULARY)
    with pytest.raises(UsageError, match="is a pipe, not a file"):
        trained_vocabulary(checkpoint, meta)


def mo(messages):
    """Return a compiled catalogue of (original, translation) pairs given as offsets and lengths."""
    count_, tables = len(messages), 28
    body = tables + 16 * len(messages)
    rows = [[(length, body + place) for place, length in (pair[side] for pair in messages)] for side in (0, 1)]
    packed = b"".join(struct.pack("<2I", *row) for side in rows for row in side)
    return struct.pack("<7I", 0x950412DE, 0, count_, tables, tables + 8 * count_, 0, 0) + packed


def test_hostile_catalogues_are_refused_in_bounded_time():
    header = b"Content-Type: text/plain; charset=hex\n"
    with pytest.raises(ValueError, match="unknown encoding"):
        list(read_mo(mo([((0, 0), (0, len(header)))]) + header))
    text = b"a" * 2000
    with pytest.raises(ValueError, match="share their bytes"):
        list(read_mo(mo([((0, 2000), (0, 2000))] * 500) + text))
    entry = 'msgid "a"\nmsgstr ""\n' + '"b"\n' * 200_000
    assert [len(translation) for _, translation in read_po(entry)] == [200_000]


def test_package_accepts_relative_folder_and_limits_text(tmp_path, monkeypatch):
    folder = tmp_path / "deb"
    (folder / "root/DEBIAN").mkdir(parents=True)
    (folder / "root/DEBIAN/control").write_text(
        "Package: some\nVersion: 1\nArchitecture: all\nMaintainer: nobody <a@b.c>\nDescription: none\n"
    )
    for number in range(3):
        (folder / f"root/text{number}").write_bytes(bytes(1000))
    built = subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "root", "some.deb"], cwd=folder, capture_output=True, check=False)
    if built.returncode:
        pytest.skip("packages cannot be built here")
    monkeypatch.chdir(tmp_path)
    path = archive.Path("deb/some.deb")
    assert archive.described(path).name == "some"
    numbers = count()
    assert sum(next(numbers) >= 0 for _ in archive.read_files(path, lambda name: name.startswith("text"))) == 3
    monkeypatch.setattr(archive, "MAX_READ_BYTES", 2500)
    with pytest.raises(UsageError, match="MiB of text"):
        list(archive.read_files(path, lambda name: name.startswith("text")))
    assert archive.described(path).version == "1"
