"""The dataset of numbers in words: reproducible pairs, disjoint splits, complete vocabulary."""

import json
from importlib.metadata import version

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.data.sources.translation import numbers_in_words
from crosstrain.data.sources.translation.numbers_in_words import DATASET, number_pairs, split_apart
from crosstrain.data.sources.translation.tokenizer import Vocabulary
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.data.text import END, UNKNOWN


@pytest.fixture(scope="module")
def pairs():
    """A tenth of the real pairs, made in the same way."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_CARDINALS", "_ORDINALS", "_DATES"):
            patch.setattr(numbers_in_words, name, 1500)
        return number_pairs()


def test_pairs_are_numbers_ordinals_years_and_dates(pairs):
    translations = dict(pairs)
    assert translations["seven hundred and forty-two"] == "siebenhundertzweiundvierzig"
    assert translations["twenty-first"] == "einundzwanzigste"
    assert translations["nineteen eighty-four"] == "neunzehnhundertvierundachtzig"
    dates = [pair for pair in pairs if pair[0].startswith("the ")]
    assert len(dates) > 1000
    assert all(german.startswith("der ") and " of " in english for english, german in dates)
    assert len(translations) == len(pairs)


def test_train_and_test_share_no_text(pairs):
    train, test = split_apart(pairs)
    assert len(test) == 2000
    for side in (0, 1):
        assert not {pair[side] for pair in train} & {pair[side] for pair in test}


def test_dataset_has_a_vocabulary_of_all_characters(pairs, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path))
    monkeypatch.setattr(numbers_in_words, "number_pairs", lambda: pairs)
    dataset = open_dataset("numbers:vocabulary=300")
    vocabulary, target = Vocabulary(dataset.attachment("vocabulary.model")), dataset.column("test", "target")
    assert vocabulary.size == 300
    lines = dataset.attachment("test.target.txt").decode().split("\n")[:-1]
    assert [vocabulary.decode(target.example(number)) for number in range(len(target))] == lines
    assert all(target.example(number)[-1] == END for number in range(len(target)))
    assert not (dataset.column("train", "source").values == UNKNOWN).any()
    assert (dataset.info.text.languages, dataset.info.text.bleu_tokenizer) == (("en", "de"), "char")
    facts = json.loads(dataset.attachment("vocabulary.json"))
    assert facts["byte_pieces"] is False
    for package in ("num2words", "sentencepiece"):
        assert facts[package] == version(package)
    with pytest.raises(UsageError, match="read no files"):
        open_dataset("numbers", tmp_path)


def test_dataset_name_has_the_vocabulary_size():
    assert DATASET.with_arguments("vocabulary=500").name == "numbers"
    assert DATASET.with_vocabulary(300).name == "numbers:vocabulary=300"
    for text in ("vocabulary=3", "vocabulary=99999", "size=3", "vocabulary="):
        with pytest.raises(UsageError):
            DATASET.with_arguments(text)
