"""A model of text is used only with the pieces that it was trained with."""

import json
from types import SimpleNamespace

import pytest
from test_cli import call

from crosstrain.checkpoint import described_data
from crosstrain.cli.trained_job import fitting_data
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.data.sources.translation.tokenizer import VOCABULARY, Vocabulary, pieces_digest
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.launch.driver.resumption import refuse_foreign


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def corpus(folder, word):
    folder.mkdir(exist_ok=True)
    for name in ("text.en", "text.de", "text.test.en", "text.test.de"):
        (folder / name).write_text("".join(f"{word} {number} {name} {number * 7 % 13}\n" for number in range(3 if "test" in name else 300)))
    return f"parallel-text:{folder / 'text'}:en-de?vocabulary=330"


def test_changed_text_is_refused(tmp_path):
    job = Job(data=corpus(tmp_path / "own", "alpha"), model="transformer:tiny")
    data = open_dataset(job.data)
    meta = SimpleNamespace(data=described_data(data.info, data.digest, None, pieces_digest(data)))
    assert meta.data["pieces_sha256"] == Vocabulary(data.attachment(VOCABULARY)).pieces_sha256
    assert fitting_data(meta, job).digest == data.digest
    corpus(tmp_path / "own", "omega")
    with pytest.raises(UsageError, match="other pieces than the one that the model was trained with"):
        fitting_data(meta, job)
    other_job = Job(data=corpus(tmp_path / "other", "omega"), model="transformer:tiny")
    with pytest.raises(UsageError, match="other pieces"):
        fitting_data(meta, other_job)
    del meta.data["pieces_sha256"]  # an earlier release did not record it
    assert fitting_data(meta, job).digest != data.digest


@pytest.mark.parametrize("model", ["transformer", "transformer:tiny"])
def test_vocabulary_size_counts_without_arguments(capsys, model):
    code, out, _ = call(
        capsys, "run", "--backend", "torch", "--model", model, "--data", "numbers", "--vocabulary", "300", "--print-config", "--json"
    )
    shown = json.loads(out)
    assert (code, shown["data"]["value"], shown["vocabulary"]["value"]) == (0, "numbers:vocabulary=300", None)


def test_vocabulary_size_is_refused_without_a_vocabulary(capsys):
    code, _, err = call(capsys, "run", "--backend", "torch", "--data", "digits", "--vocabulary", "300", "--print-config")
    assert code == 2
    assert "'digits' is no text" in err


def test_suggested_options_exist_in_the_command(tmp_path):
    """The run names the path of a custom text: `translate` has no option for it, `evaluate` has."""
    taken = {"data": f"parallel-text:{tmp_path}:en-de"}
    with pytest.raises(UsageError, match=r"add --trust-run\.$"):
        refuse_foreign(taken, tmp_path, {"model": None, "data_dir": None}, trusted=False)
    with pytest.raises(UsageError, match=r"add --trust-run, or type --data yourself\.$"):
        refuse_foreign(taken, tmp_path, {"model": None, "data": None, "data_dir": None}, trusted=False)
