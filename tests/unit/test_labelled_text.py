"""The dataset of examples/hf_text: words as tokens, and classes, from two files of lines."""

import json
import sys
from pathlib import Path

import pytest

from crosstrain.core.errors import UsageError
from crosstrain.data.store import stored_dataset
from crosstrain.data.store.build import build_store

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/hf_text"))
from crosstrain_hf_text import DATASET


def write_lines(folder, **splits):
    for split, lines in splits.items():
        (folder / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_words_are_numbered_by_their_frequency(tmp_path):
    write_lines(tmp_path, train=["good\ta fine day", "bad\tA grey day , a", "good\tday"], test=["bad\tan Ä fine"])
    build_store(tmp_path / "cache", "made", DATASET.name, DATASET, tmp_path, again=True)
    data = stored_dataset._open(tmp_path / "cache/made", DATASET.name, tmp_path, always=True)
    assert data.info.features.class_names == ("bad", "good")
    assert [data.column("train", "tokens").example(place).tolist() for place in range(3)] == [[4, 7, 5], [4, 8, 5, 6, 4], [5]]
    assert data.column("test", "tokens").values.tolist() == [3, 3, 7]
    assert data.column("train", "label").values.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("train", "test", "problem"),
    [
        (["good\tday"], ["bad\tday"], "test.tsv has the class 'bad', and train.tsv has not"),
        (["good day"], ["good\tday"], "is no class, tab and text"),
        (["good\t"], ["good\tday"], "line 1 of "),
    ],
)
def test_lines_without_class_or_text_are_refused(tmp_path, train, test, problem):
    write_lines(tmp_path, train=train, test=test)
    with pytest.raises(UsageError, match=problem):
        DATASET.load(tmp_path)


def test_configuration_names_a_classifier():
    configuration = Path(__file__).parents[2] / "examples/hf_text/bert.json"
    assert json.loads(configuration.read_text())["architectures"] == ["BertForSequenceClassification"]
