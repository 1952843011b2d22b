"""Text files of the user: stored as read, skipped lines counted, errors in bounded memory."""

import gzip
import itertools
import json
import os
import random
import re
import sys
import tracemalloc

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from crosstrain.cli.commands.data import data
from crosstrain.core.errors import MissingPackageError, UsageError
from crosstrain.data.sources.translation import parallel_text
from crosstrain.data.sources.translation import tokenizer as encoding
from crosstrain.data.sources.translation.pairs import chosen
from crosstrain.data.sources.translation.parallel_text import aligned_count
from crosstrain.data.sources.translation.text_files import MAX_LINE_BYTES, count_lines, read_lines
from crosstrain.data.sources.translation.tokenizer import Vocabulary, train_vocabulary
from crosstrain.data.store.location import resolve
from crosstrain.data.store.stored_dataset import open_dataset, prepare
from crosstrain.data.text import END

SENTENCES = [f"sentence {number} of {number * 7 % 13} with words" for number in range(400)]
SÄTZE = [f"Satz {number} von {number * 7 % 13} mit Wörtern" for number in range(400)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(train_vocabulary(SENTENCES + SÄTZE, 400, bytes_too=True))


def write(folder, name, lines, end="\n"):
    path = folder / name
    content = b"".join((line.encode() if isinstance(line, str) else line) + end.encode() for line in lines)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def corpus(folder, source=SENTENCES, target=SÄTZE, test=2):
    write(folder, "text.en", source)
    write(folder, "text.de", target)
    if test:
        write(folder, "text.test.en", SENTENCES[:test])
        write(folder, "text.test.de", SÄTZE[:test])
    return f"parallel-text:{folder / 'text'}:en-de?vocabulary=400"


def texts(dataset, split, name):
    known, column = Vocabulary(dataset.attachment("vocabulary.model")), dataset.column(split, name)
    return [known.decode(column.example(number)) for number in range(len(column))]


def test_stored_text_equals_the_files(tmp_path):
    dataset = open_dataset(corpus(tmp_path))
    assert texts(dataset, "train", "source") == SENTENCES
    assert texts(dataset, "train", "target") == SÄTZE
    assert texts(dataset, "test", "target") == SÄTZE[:2]
    assert dataset.attachment("test.source.txt").decode() == "".join(f"{line}\n" for line in SENTENCES[:2])
    assert dataset.info.text.vocabulary_sizes == {"source": 400, "target": 400}
    assert (dataset.info.text.languages, dataset.info.text.bleu_tokenizer) == (("en", "de"), "13a")
    assert dataset.column("train", "source").values.dtype == np.uint16
    facts = json.loads(dataset.attachment("vocabulary.json"))
    assert facts["pieces_sha256"] == Vocabulary(dataset.attachment("vocabulary.model")).pieces_sha256
    assert facts["sampled_lines"] == 800
    assert dataset.left_out == ()
    assert not list((tmp_path / "cache").glob(".*.work"))


def test_compressed_files_make_the_same_data(tmp_path):
    plain = open_dataset(corpus(tmp_path))
    (tmp_path / "packed").mkdir()
    for name in ("text.en", "text.de", "text.test.en", "text.test.de"):
        (tmp_path / "packed" / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    packed = open_dataset(f"parallel-text:{tmp_path}/packed/text:en-de?vocabulary=400")
    for split, name in itertools.product(("train", "test"), ("source", "target")):
        assert np.array_equal(plain.column(split, name).values, packed.column(split, name).values)


def test_compression_is_detected_by_content(tmp_path):
    write(tmp_path, "plain", SENTENCES).rename(tmp_path / "plain.gz")
    write(tmp_path, "packed.gz", SENTENCES).rename(tmp_path / "packed")
    for name in ("plain.gz", "packed"):
        assert list(read_lines(tmp_path / name)) == [line.encode() for line in SENTENCES]
        assert count_lines(tmp_path / name) == len(SENTENCES)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_named(tmp_path, encoding):
    (tmp_path / "text.en").write_bytes("\ufeff".encode(encoding)[-2:] + "one\ntwo\n".encode(encoding))
    with pytest.raises(UsageError, match=r"text\.en' is UTF-16, not UTF-8"):
        count_lines(tmp_path / "text.en")


def test_skipped_pairs_are_counted_by_reason(tmp_path):
    source, target = list(SENTENCES), list(SÄTZE)
    source[4] = target[7] = " "
    source[9] = b"caf\xe9"
    target[11] = "x" * (MAX_LINE_BYTES + 1)
    source[20] = "word " * 300
    target[30] = "word \0 word"
    dataset = open_dataset(corpus(tmp_path, source, target))
    assert dataset.info.sizes == {"train": 394, "test": 2}
    assert dataset.left_out == (
        "train: 2 pairs with an empty line (the first in line 5)",
        "train: 1 pair with a line that is not UTF-8 (in line 10)",
        f"train: 1 pair with a line of more than {MAX_LINE_BYTES:,} bytes (in line 12)",
        "train: 1 pair with a NUL character (in line 31)",
        "train: 1 pair with more than 200 pieces (in line 21)",
    )


def test_held_out_split_shares_no_text_with_training(tmp_path):
    source, target = [*SENTENCES, *SENTENCES[:50]], [*SÄTZE, *SÄTZE[50:100]]
    dataset = open_dataset(corpus(tmp_path, source, target, test=0) + ",held-out=40")
    for name in ("source", "target"):
        assert not set(texts(dataset, "train", name)) & set(texts(dataset, "test", name))
    assert dataset.info.sizes["test"] == 40
    left = int(dataset.left_out[0].split()[1])
    assert "of which a text is in the test split" in dataset.left_out[0]
    assert dataset.info.sizes["train"] == 450 - 40 - left


def test_repeated_test_pairs_are_reported(tmp_path):
    source, target = SENTENCES[:50] * 8, SÄTZE[:50] * 8
    name = corpus(tmp_path, source, target, test=0) + ",held-out=40"
    places = chosen(len(source), 40, parallel_text._HELD_OUT_SEED)
    distinct = len({source[place] for place in places.tolist()})
    assert distinct < 40
    output = CliRunner().invoke(data, ["prepare", name], catch_exceptions=False).stdout
    assert f"  of the 40 test pairs {distinct} are distinct\n" in output
    facts = json.loads(CliRunner().invoke(data, ["info", name, "--json"], catch_exceptions=False).stdout)
    assert facts["distinct_test_pairs"] == distinct


@pytest.mark.parametrize("seed", range(3))
def test_skipped_held_out_pair_is_named_by_its_line(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(encoding, "PART_PAIRS", 16)
    source, random = list(SENTENCES), np.random.default_rng(seed)
    held_out = set(chosen(len(source), 50, parallel_text._HELD_OUT_SEED).tolist())
    long, empty = (sorted(part.tolist()) for part in np.split(random.permutation(len(source))[:60], 2))
    for place in long:
        source[place] = "word " * 300 + str(place)
    for place in empty:
        source[place] = ""
    notes = open_dataset(corpus(tmp_path, source, test=0) + ",held-out=50").left_out
    for places, reason in ((long, "with more than 200 pieces"), (empty, "with an empty line")):
        for split, places_of_split in (("train", set(places) - held_out), ("test", set(places) & held_out)):
            (line,) = [line for line in notes if line.startswith(f"{split}:") and reason in line]
            assert (line.split()[1], line.rstrip(")").split()[-1]) == (str(len(places_of_split)), str(min(places_of_split) + 1))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_line_feeds_only(tmp_path, end):
    lines = ["one\u2028line", "form\x0cfeed", "next\x85line", "", "last"]
    path = write(tmp_path, "lines", lines, end)
    assert [line.decode() for line in read_lines(path)] == lines
    assert count_lines(path) == 5


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=12), max_size=12), st.booleans(), st.booleans())
def test_reading_in_blocks_equals_splitting(tmp_path, monkeypatch, lines, ended, marked):
    monkeypatch.setattr("crosstrain.data.sources.translation.text_files._BLOCK_BYTES", 5)
    content = b"\xef\xbb\xbf" * marked + b"\n".join(lines) + (b"\n" if ended else b"")
    assume(not content.startswith((b"\xfe\xff", b"\xff\xfe", b"\x1f\x8b")))  # UTF-16 and gzip
    (tmp_path / "lines").write_bytes(content)
    expected = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = expected[:-1] if not expected[-1] else expected
    assert list(read_lines(tmp_path / "lines")) == [line.removesuffix(b"\r") for line in expected]
    assert count_lines(tmp_path / "lines") == len(expected)


@pytest.mark.parametrize("name", ["mark", "mark.gz"])
def test_byte_order_mark_alone_is_no_line(tmp_path, name):
    path = write(tmp_path, name, [b"\xef\xbb\xbf"], end="")
    assert list(read_lines(path)) == []
    assert count_lines(path) == 0


def test_endless_line_takes_no_memory(tmp_path):
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(200 << 20)
    tracemalloc.start()
    assert list(read_lines(tmp_path / "endless")) == [None]
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_decompression_bomb_is_refused(tmp_path):
    with gzip.open(tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        for _ in range(260):
            file.write(bytes(1 << 20))
    with pytest.raises(UsageError, match="unpacks to more than 200 times its size"):
        count_lines(tmp_path / "bomb.gz")


def test_damaged_archive_and_non_file_are_named(tmp_path):
    (tmp_path / "torn.gz").write_bytes(gzip.compress(os.urandom(4000))[:-40])
    with pytest.raises(UsageError, match=r"torn\.gz' cannot be read"):
        count_lines(tmp_path / "torn.gz")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe' cannot be read"):
        count_lines(tmp_path / "pipe")


def test_misaligned_files_name_counts_and_suspicious_line(tmp_path):
    draw = np.random.default_rng(1)
    sizes = draw.integers(2, 40, 300)
    source = [" ".join(["word"] * size) for size in sizes]
    target = [" ".join(["Wort"] * size) for size in sizes]
    del target[120]
    files = write(tmp_path, "a", source), write(tmp_path, "b", target)
    with pytest.raises(UsageError, match=r"a' has 300 lines and '.*b' has 299") as caught:
        aligned_count(*files)
    line = int(str(caught.value).partition("suspicious line is ")[2].partition(":")[0])
    assert 121 <= line <= 130


@pytest.mark.parametrize(
    ("place", "line", "why"),
    [
        (7, b"x" * 40_000, ["has more than 32,768 bytes in one file and 21", "has 21 bytes in one file and more than 32,768"]),
        (7, b"", ["is empty in one file and has 21 bytes in the other"] * 2),
    ],
    ids=["too long", "empty"],
)
def test_suspicious_line_is_described(tmp_path, place, line, why):
    source, target = ([f"{word} word number {number:02d} x".encode() for number in range(25)] for word in ("some", "Wort"))
    source[place : place + 6] = [line] * 6
    target.append(b"one more line than that")
    files = write(tmp_path, "a", source), write(tmp_path, "b", target)
    for first, second, description in ((*files, why[0]), (*files[::-1], why[1])):
        with pytest.raises(UsageError, match=f"suspicious line is {place + 1}: it {description}"):
            aligned_count(first, second)


@pytest.mark.parametrize("gone", [slice(9, 10), slice(24, 25), slice(0, 1), slice(10, 25)])
def test_divergence_of_equal_lines_is_not_guessed(tmp_path, gone):
    source, target = ([f"{word} word number {number:02d} x" for number in range(25)] for word in ("some", "Wort"))
    del target[gone]
    for files in itertools.permutations((write(tmp_path, "a", source), write(tmp_path, "b", target))):
        with pytest.raises(UsageError, match=r"has 25.*The lengths of their lines do not show where they diverge\.$") as raised:
            aligned_count(*files)
        assert "suspicious" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "text.de").unlink(), "there is no .*text.de"),
        (lambda folder: (folder / "text.en.gz").write_bytes(b""), "there are both"),
        (lambda folder: [(folder / f"text.test.{language}").unlink() for language in ("en", "de")], "has no test split"),
        (lambda folder: [(folder / f"text.{language}").unlink() for language in ("en", "de")], "there are no files"),
        (lambda folder: [(folder / f"text.{language}").write_bytes(b"") for language in ("en", "de")], "are empty"),
    ],
)
def test_missing_file_is_named(tmp_path, change, message):
    name = corpus(tmp_path)
    change(tmp_path)
    with pytest.raises(UsageError, match=message):
        open_dataset(name)


@pytest.mark.parametrize(
    "name", ["parallel-text:en-de", "parallel-text:text", "parallel-text:text:en-en", "parallel-text:text:en-de?words=3", "parallel-text"]
)
def test_incomplete_name_is_refused(name):
    with pytest.raises(UsageError):
        open_dataset(name)


def test_too_large_vocabulary_is_refused(tmp_path):
    name = corpus(tmp_path)
    message = (
        r"no vocabulary of 30,000 pieces .*: it is short, and has at most [\d,]+ pieces\. Give --vocabulary (\d+), or \?vocabulary=\1 in"
    )
    with pytest.raises(UsageError, match=message) as refused:
        open_dataset(name.replace("400", "30000"))
    size = int(re.search(r"--vocabulary (\d+)", str(refused.value))[1])
    assert max(open_dataset(name.replace("400", str(size))).info.features.vocabulary_sizes.values()) == size


@pytest.mark.parametrize("bytes_too", [True, False])
def test_suggested_size_fits(bytes_too):
    letters = random.Random(7)
    lines = [" ".join("".join(letters.choices("abcdefghijklmnoprstuwzäöü", k=5)) for _ in range(4)) for _ in range(200)]
    for wrong in (20, 60_000):
        with pytest.raises(UsageError, match=f"no vocabulary of {wrong:,} pieces") as refused:
            train_vocabulary(lines, wrong, bytes_too=bytes_too)
        size = int(re.search(r"--vocabulary (\d+)", str(refused.value))[1])
        assert Vocabulary(train_vocabulary(lines, size, bytes_too=bytes_too)).size == size
    with pytest.raises(UsageError, match=r"can be made of this text: it has no sentence\.$"):
        train_vocabulary([], 400, bytes_too=bytes_too)


class InterruptedOnPurposeError(BaseException):
    pass


def test_interrupted_encoding_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "PART_PAIRS", 50)
    name, encoded = corpus(tmp_path), []
    real = encoding.PairEncoder._encode

    def counted(self, pairs):
        if len(encoded) == 5:
            raise InterruptedOnPurposeError
        encoded.append(pairs)
        return real(self, pairs)

    monkeypatch.setattr(encoding.PairEncoder, "_encode", counted)
    with pytest.raises(InterruptedOnPurposeError):
        prepare(name)
    (work,) = (tmp_path / "cache").glob(".*.work")
    assert len(list(work.glob("train-*.npz"))) == 5
    sorted(work.glob("train-*.npz"))[1].write_bytes(b"torn")
    encoded[:] = [None] * 10  # so that the fifth call does not interrupt again
    dataset = open_dataset(name)
    assert len(encoded) == 10 + 1 + 3 + 1  # the torn part, three more, and the test split
    assert texts(dataset, "train", "source") == SENTENCES
    assert not work.exists()


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_text_round_trips(vocabulary, text):
    (pieces,) = vocabulary.encode([text])
    assert pieces[-1] == END
    assert vocabulary.decode(pieces) == text
    assert vocabulary.decode([1, *pieces, 0, 0]) == text


def test_equal_lines_make_equal_pieces(vocabulary):
    again = Vocabulary(train_vocabulary(SENTENCES + SÄTZE, 400, bytes_too=True))
    assert again.pieces_sha256 == vocabulary.pieces_sha256
    other_vocabulary = Vocabulary(train_vocabulary(SENTENCES, 400, bytes_too=True))
    assert other_vocabulary.pieces_sha256 != vocabulary.pieces_sha256


@pytest.mark.parametrize("content", [b"", b"junk", b"\x0a\x05\x0a\x01a\x15\x00"])
def test_invalid_vocabulary_is_refused(content):
    with pytest.raises(ValueError, match=r"vocabulary|model"):
        Vocabulary(content)


def test_piece_out_of_range_is_refused(vocabulary):
    with pytest.raises(ValueError, match="piece 400 of a vocabulary of 400"):
        vocabulary.decode([5, 400])


def test_command_names_pairs_languages_and_vocabulary(tmp_path, monkeypatch):
    source = list(SENTENCES)
    source[4] = ""
    name = corpus(tmp_path, source)
    run = CliRunner()
    made = run.invoke(data, ["prepare", name], catch_exceptions=False)
    assert "399 + 2 pairs (en-de, 400 pieces)" in made.output
    assert "skipped: train: 1 pair with an empty line (in line 5)" in made.output
    listed = run.invoke(data, ["list"], catch_exceptions=False).output
    assert "[en-de, 400 pieces]" in listed
    assert "[skipped: train: 1 pair with an empty line (in line 5)]" in listed
    facts = json.loads(run.invoke(data, ["info", name, "--json"], catch_exceptions=False).output)
    assert facts["languages"] == ["en", "de"]
    assert facts["examples"] == {"train": 399, "test": 2}
    assert facts["vocabulary"]["pieces"] == 400
    assert facts["distinct_test_pairs"] == 2
    assert facts["train_target"]["longest"] == int(open_dataset(name).column("train", "target").lengths.max())
    assert "train target longest" in run.invoke(data, ["info", name], catch_exceptions=False).output
    assert "files as they should be" in run.invoke(data, ["verify", "parallel-text"], catch_exceptions=False).output
    work = tmp_path / "cache" / f".{open_dataset(name).path.name}.work"
    work.mkdir()
    assert "removed" in run.invoke(data, ["remove", "parallel-text"], catch_exceptions=False).output
    assert not work.exists()


def test_missing_sentencepiece_names_the_package(tmp_path, monkeypatch):
    name = corpus(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingPackageError, match=r"needs the package 'sentencepiece'.*pip install 'crosstrain\[text\]'"):
        open_dataset(name)


TOKENIZERS_OF_CODES = {
    "zh": "zh zho cmn yue zh_CN zh-CN zh-Hant zh-Hant-TW zho_Hans zh_tw",
    "char": "ja jpn ja_JP ja-Jpan ko kor ko_KR th tha lo km my bo bod bo-CN",
    "13a": "de deu de_AT pt-BR sr-Latn es-419 cs",
    None: "xx src qaa qaa-Latn",
}


@pytest.mark.parametrize(("code", "tokenizer"), [(code, name) for name, codes in TOKENIZERS_OF_CODES.items() for code in codes.split()])
def test_language_selects_tokenizer_for_any_region(code, tokenizer):
    for languages, place in ((f"en-{code}", 1), (f"en_GB-{code}", 1), (f"{code}-en", 0)):
        source = parallel_text.DATASET.with_arguments(f"/x/text:{languages}")
        assert source.languages[place] == code
        assert source.bleu == (tokenizer if place else "13a")
        assert resolve(source.name).source == source


@pytest.mark.thorough
@given(st.from_regex(parallel_text._LANGUAGE, fullmatch=True), st.from_regex(parallel_text._LANGUAGE, fullmatch=True))
def test_language_pair_is_parsed_unambiguously(first, second):
    """Where one language ends and the other begins, for any dashes."""
    if first != second:
        source = parallel_text.DATASET.with_arguments(f"/x/text:{first}-{second}")
        assert source.languages == (first, second)
        assert resolve(source.name).source == source


def test_other_script_is_scored_by_characters(tmp_path):
    corpus(tmp_path)
    for split in ("text", "text.test"):
        (tmp_path / f"{split}.de").rename(tmp_path / f"{split}.zh-Hant")
    name = f"parallel-text:{tmp_path / 'text'}:en-zh-Hant?vocabulary=400"
    for more, tokenizer, full in (
        ("", "zh", ",bleu=zh"),
        (",bleu=auto", "zh", ",bleu=zh"),
        (",bleu=char", "char", ",bleu=char"),
        (",bleu=13a", "13a", ",bleu=13a"),
    ):
        dataset = open_dataset(name + more)
        assert (dataset.info.text.languages, dataset.info.text.bleu_tokenizer) == (("en", "zh-Hant"), tokenizer)
        assert (dataset.info.name, dataset.notes) == (name + full, ())


def test_unknown_language_is_reported(tmp_path, capsys):
    corpus(tmp_path)
    for split in ("text", "text.test"):
        (tmp_path / f"{split}.de").rename(tmp_path / f"{split}.qaa")
    name = f"parallel-text:{tmp_path / 'text'}:en-qaa?vocabulary=400"
    dataset = open_dataset(name)
    message = "the language 'qaa' is not known, so BLEU takes the tokenizer 13a; choose one with bleu=13a, char or zh"
    assert (dataset.notes, dataset.info.text.bleu_tokenizer) == ((message,), "13a")
    assert message in capsys.readouterr().err
    assert open_dataset(f"{name},bleu=13a").notes == ()
    assert message not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokenizer", "error", "named"),
    [
        ("13b", UsageError, r"'13b'; allowed: 13a, intl, char, zh, none, ja-mecab, ko-mecab"),
        ("flores200", UsageError, "downloads"),
        ("ja-mecab", MissingPackageError, r"pip install 'sacrebleu\[ja\]'"),
        ("ko-mecab", MissingPackageError, r"pip install 'sacrebleu\[ko\]'"),
    ],
)
def test_unusable_tokenizer_is_refused(tmp_path, monkeypatch, tokenizer, error, named):
    for package in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(error, match=named):
        prepare(f"{corpus(tmp_path)},bleu={tokenizer}")


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("EN-DE", "the languages 'EN-DE'; language codes are written in small letters: write 'en-de'"),
        ("en-en", "got 'en' twice in 'en-en'"),
        ("en", "write parallel-text:PREFIX:en-de"),
    ],
)
def test_invalid_language_pair_names_the_problem(pair, says):
    with pytest.raises(UsageError, match=says):
        parallel_text.DATASET.with_arguments(f"text:{pair}")


def test_text_too_short_for_a_vocabulary_is_reported(tmp_path):
    """Also how much was skipped: no size is suggested that would be refused."""
    for name in ("text.en", "text.de", "text.test.en", "text.test.de"):
        (tmp_path / name).write_bytes(b"one two\n\xff\xfe\nthree\n")
    with pytest.raises(UsageError, match=r"at most .* pieces; the smallest vocabulary has 320\. Give more text\. Skipped: 1 pair with"):
        open_dataset(f"parallel-text:{tmp_path}/text:en-de")
