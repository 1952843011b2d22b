"""The vocabulary of a run: stored with its records, read back in bounded memory."""

import os

import pytest

from crosstrain.core.bounded_json import UnreadableError
from crosstrain.records.store import vocabulary as run_vocabulary
from crosstrain.records.store.vocabulary import VOCABULARY, read_vocabulary, write_vocabulary


def test_vocabulary_round_trips(tmp_path):
    assert read_vocabulary(tmp_path) is None
    write_vocabulary(tmp_path, b"pieces")
    write_vocabulary(tmp_path, b"others")
    assert read_vocabulary(tmp_path) == b"others"
    assert [path.name for path in tmp_path.iterdir()] == [VOCABULARY]


def test_invalid_vocabulary_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / VOCABULARY)
    with pytest.raises(UnreadableError):
        read_vocabulary(tmp_path)
    (tmp_path / VOCABULARY).unlink()
    monkeypatch.setattr(run_vocabulary, "MAX_BYTES", 5)
    write_vocabulary(tmp_path, b"sixsix")
    with pytest.raises(UnreadableError, match="more than 5 bytes"):
        read_vocabulary(tmp_path)
