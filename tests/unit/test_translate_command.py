"""Output of `trainer translate`: unchanged translations, and valid JSON."""

from __future__ import annotations

import json
import os
import pty
import sys

import pytest

from crosstrain.cli.commands.translate import _Line, _Writer
from crosstrain.core.console import shown_streams
from crosstrain.data.sources.translation.tokenizer import Vocabulary, train_vocabulary
from crosstrain.models.decoding import Hypothesis

TEXTS = ["a\u0085b", "a\u200fb\u2028c", "a\x1b[31mb\x7f", "grün → rot 🙂"]


@pytest.fixture(scope="module")
def vocabulary():
    lines = [f"{colour} {noun}" for colour in ("red", "green", "blue") for noun in ("house", "ship", "tree")]
    return Vocabulary(train_vocabulary(lines, 290, bytes_too=True))


def write(vocabulary, text, **form):
    """Write a line whose translation is the line itself."""
    (pieces,) = vocabulary.encode([text])
    with shown_streams():
        writer = _Writer(vocabulary, **{"n_best": None, "as_json": False, **form})
        writer.write(_Line(7, text, tuple(pieces)), [Hypothesis(tuple(pieces[:-1]), -1.5, -2.0, ended=True)])
        sys.stdout.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_translation_is_piped_unchanged(vocabulary, capfd, text):
    write(vocabulary, text)
    assert capfd.readouterr().out == f"{text}\n"
    write(vocabulary, text, n_best=1)
    assert capfd.readouterr().out == f"7\t-1.500000\t{text}\n"


@pytest.mark.parametrize("text", TEXTS)
def test_json_is_valid_and_one_line(vocabulary, capfd, text):
    write(vocabulary, text, as_json=True)
    printed = capfd.readouterr().out
    document = json.loads(printed)
    assert (document["source"], document["translations"][0]["text"]) == (text, text)
    assert len(printed.splitlines()) == 1
    assert ("→" in printed) == ("→" in text)


def test_control_characters_are_escaped_on_a_terminal(vocabulary, monkeypatch):
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        write(vocabulary, "a\u200fb\x1b[31m")
        assert os.read(leader, 1000) == b"a\\u200fb\\x1b[31m\r\n"
    os.close(leader)


def test_unknown_pieces_are_counted(vocabulary, capfd):
    write(vocabulary, "blue tree ß")
    assert capfd.readouterr().err == ""
    without = Vocabulary(train_vocabulary(["red house", "blue tree"] * 9, 30, bytes_too=False))
    (pieces,) = without.encode(["blue ß tree é"])
    write(without, "blue ß tree é")
    assert capfd.readouterr().err == f"line 7: 2 of {len(pieces) - 1} pieces are unknown to the vocabulary\n"
    write(without, "blue tree")
    assert capfd.readouterr().err == ""
