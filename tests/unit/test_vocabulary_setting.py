"""--vocabulary, which becomes part of the dataset's name, and --batch-tokens."""

import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

from crosstrain.cli.commands.data import data
from crosstrain.core import plugins
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.sources import resolve
from crosstrain.data.store.dataset_list import list_datasets
from crosstrain.data.store.location import written_out
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.launch.driver.training_job import TrainingJob


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("numbers", "numbers:vocabulary=300"),
        ("numbers:vocabulary=300", "numbers:vocabulary=300"),
        ("parallel-text:/tmp/a,vocabulary=9,b:en-de", "parallel-text:/tmp/a,vocabulary=9,b:en-de?vocabulary=400"),
        ("debian-text:en-de", "debian-text:en-de?vocabulary=400"),
        ("parallel-text:/tmp/x:en-de?longest=90", "parallel-text:/tmp/x:en-de?vocabulary=400,longest=90"),
    ],
)
def test_vocabulary_becomes_part_of_the_name(data, name):
    job = written_out(Job(data=data, vocabulary=int(name.rpartition("vocabulary=")[2][:3])))
    assert (job.data, job.vocabulary) == (name, None)
    assert written_out(job) == job


@pytest.mark.parametrize(
    ("data", "size"), [("digits", 500), ("synthetic-images:32", 500), ("numbers", 3), ("parallel-text:/tmp/x:en-de", 200)]
)
def test_dataset_without_vocabulary_is_refused(data, size):
    with pytest.raises(UsageError, match="vocabulary"):
        written_out(Job(data=data, vocabulary=size))


@pytest.mark.parametrize("command", ["prepare", "info"])
def test_data_commands_accept_a_vocabulary(command, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path))
    for language in ("en", "de"):
        for split in ("", ".test"):
            (tmp_path / f"x{split}.{language}").write_text("".join(f"{language} {n} of {n * 7} words\n" for n in range(90)))
    name = f"parallel-text:{tmp_path}/x:en-de"
    done = CliRunner().invoke(data, [command, name, "--vocabulary", "400"], catch_exceptions=False)
    assert (done.exit_code, f"{name}?vocabulary=400" in done.stdout) == (0, True)
    (row,) = [row for row in list_datasets() if row.pieces]
    assert (row.name, row.pieces) == (f"{name}?vocabulary=400", 400)
    for wrong in ([f"{name}?vocabulary=500"], ["digits"]):
        with pytest.raises(UsageError, match="vocabulary: got 400, but"):
            CliRunner().invoke(data, [command, *wrong, "--vocabulary", "400"], catch_exceptions=False)


@dataclass
class Letters:
    """Third-party text whose name has the size of its vocabulary: ``letters:90``."""

    size: int = 50
    description = "made for a test"
    version = 1

    @property
    def name(self):
        return "letters" if self.size == 50 else f"letters:{self.size}"

    def with_arguments(self, text):
        return type(self)(int(text))

    def with_vocabulary(self, size):
        if not 40 <= size <= 400:
            raise UsageError("vocabulary: 40 to 400")
        return type(self)(size)

    def load(self, data_dir):
        raise UsageError("data: letters are only named here")


class WithoutSize(Letters):
    name = "letters"


class Forgetful(Letters):
    def with_arguments(self, text):
        return type(self)()


class WithoutArguments(Letters):
    with_arguments = None


@pytest.fixture
def letters(monkeypatch):
    """Make a source known by the name letters."""

    def known(source):
        module = ModuleType("letters_of_a_test")
        module.DATASET = source
        monkeypatch.setitem(sys.modules, module.__name__, module)
        plugin = plugins.Plugin("letters", f"{module.__name__}:DATASET")
        monkeypatch.setitem(plugins.BUILT_IN, "dataset", (*plugins.BUILT_IN["dataset"], plugin))

    return known


@pytest.mark.parametrize(
    ("data", "size", "name"), [("letters", 90, "letters:90"), ("letters:60", 400, "letters:400"), ("letters:60", 50, "letters")]
)
def test_third_party_source_has_a_vocabulary(letters, data, size, name):
    letters(Letters())
    assert written_out(Job(data=data, vocabulary=size)).data == name


def test_refused_size_names_the_option(letters):
    letters(Letters())
    with pytest.raises(UsageError, match=r"^vocabulary: got 20, and its source refuses that: vocabulary: 40 to 400"):
        written_out(Job(data="letters", vocabulary=20))
    with pytest.raises(UsageError, match=r"^vocabulary: got 14; allowed: a whole number from 32 to"):
        written_out(Job(data="numbers", vocabulary=14))


def test_refused_arguments_name_the_option(letters):
    class Lax(Letters):
        def with_vocabulary(self, size):
            return type(self)(size)

        def with_arguments(self, text):
            return Letters.with_vocabulary(self, int(text))

    letters(Lax())
    with pytest.raises(UsageError, match=r"^vocabulary: got 20, and its source refuses that: vocabulary: 40 to 400"):
        written_out(Job(data="letters", vocabulary=20))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (WithoutSize(), "'letters' is the name that its source has with another size as well"),
        (Forgetful(), "the name 'letters:90' that 'letters' has with it leads to 'letters'"),
        (WithoutArguments(), "the source of 'letters' has no with_arguments"),
    ],
)
def test_source_without_size_in_its_name_is_refused(letters, source, message):
    letters(source)
    with pytest.raises(UsageError, match=f"^vocabulary: got 90, .*{message}.* with_vocabulary has to return a source whose name"):
        written_out(Job(data="letters", vocabulary=90))


@pytest.mark.parametrize(
    "data",
    ["numbers:vocabulary={}", "debian-text:en-de?vocabulary={}", "parallel-text:/tmp/x:en-de?longest=90, vocabulary = {}&held-out=5"],
)
@pytest.mark.parametrize("default", [500, 8000])
def test_two_different_sizes_are_refused(data, default):
    """Also where the name has the default size, which its full form omits."""
    with pytest.raises(UsageError, match=rf"vocabulary: got 900, but .* asks for {default} pieces; give one of the two"):
        written_out(Job(data=data.format(default), vocabulary=900))
    written_out(Job(data=data.format(900), vocabulary=900))


def test_vocabulary_comes_from_all_sources(tmp_path):
    (tmp_path / "mine.toml").write_text('data = "numbers"\nvocabulary = 700\nbatch_tokens = 512\nbackend = "torch"\n')
    from_file = resolve({}, {}, tmp_path / "mine.toml").job
    assert (from_file.vocabulary, from_file.batch_tokens) == (700, 512)
    over = resolve({"batch_size": "8"}, {"TRAINER_VOCABULARY": "600"}, tmp_path / "mine.toml").job
    assert (over.vocabulary, over.batch_tokens, over.batch_size) == (600, None, 8)


def test_batch_tokens_exclude_batch_sizes():
    for size_setting in ("batch_size", "global_batch_size"):
        with pytest.raises(UsageError, match=r"batch.tokens: .*instead of batch_size"):
            resolve({"batch_tokens": "100", size_setting: "8", "backend": "torch"}, {})


def test_sentences_longer_than_a_batch_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))
    for language in ("en", "de"):
        for part, count in (("", 60), (".test", 2)):
            lines = [f"{language} {'xyz ' * (number % 20)}{number}" for number in range(count)]
            (tmp_path / f"text{part}.{language}").write_text("\n".join(lines) + "\n")
    data = open_dataset(f"parallel-text:{tmp_path}/text:en-de?vocabulary=340")
    longest = np.maximum(*(data.weights("train", f"{side}_tokens") for side in ("source", "target")))

    def too_long_note(tokens):
        job = Job(data=data.info.name, batch_tokens=tokens)
        return TrainingJob(job, job, None, data, [], [], frozenset(), (0,)).too_long

    for tokens in range(1, longest.max()):
        assert (
            f"{(longest > tokens).sum()} of 60 training examples are longer than {tokens} tokens (up to {longest.max()})"
            in too_long_note(tokens)
        )
    assert too_long_note(1).endswith("an epoch takes 60 updates")
    assert too_long_note(longest.max()) is None
