"""``jsonl:PATH`` and ``hf-dataset:FOLDER``: texts with classes become tokens and labels."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.data.sources.texts.tokenizers import RESERVED, Bytes, Words
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.data.text import END, UNKNOWN

WORDS = ("good", "bad", "fine", "awful", "nice", "poor")
ROWS = [{"text": f"A {WORDS[i % 6]} film, number {i}!", "label": ("pos", "neg")[i % 2]} for i in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def lines(folder, rows, name="t.jsonl"):
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_words_and_classes(tmp_path):
    data = open_dataset(f"jsonl:{lines(tmp_path, ROWS)}")
    assert sum(data.info.sizes.values()) == 60
    assert data.info.features.class_names == ("neg", "pos")
    words = json.loads(data.attachment("words.json"))
    assert words[:4] == ["!", ",", "a", "film"]
    column = data.column("train", "tokens")
    texts = [[words[token - RESERVED] for token in column.example(number) if token >= RESERVED] for number in range(len(column))]
    assert all(text[0] == "a" and text[-1] == "!" for text in texts)
    labels = data.column("train", "label").values
    assert all((text[1] in WORDS[::2]) == bool(label) for text, label in zip(texts, labels, strict=True))


def test_own_test_file_other_names_and_numbers(tmp_path):
    rows = [{"body": row["text"], "stars": 2 + 9 * (row["label"] == "pos")} for row in ROWS]
    test = lines(tmp_path, rows[:7], "test.jsonl")
    data = open_dataset(f"jsonl:{lines(tmp_path, rows)}?text=body,label=stars,test={test},tokenizer=bytes,longest=12")
    assert data.info.sizes == {"train": 60, "test": 7}
    assert data.info.features.class_names == ("2", "11")
    assert data.info.text.vocabulary_sizes == {"tokens": RESERVED + 256}
    assert data.column("test", "tokens").lengths.tolist() == [12] * 7
    assert data.column("test", "tokens").example(0)[-1] == END


def test_equal_texts_are_in_one_split(tmp_path):
    data = open_dataset(f"jsonl:{lines(tmp_path, ROWS * 3)}")
    texts = [
        {tuple(column.example(number)) for number in range(len(column))} for column in (data.column(s, "tokens") for s in ("train", "test"))
    ]
    assert not {text for text in texts[0] & texts[1] if UNKNOWN not in text}


def test_pieces_restore_the_text(tmp_path):
    pytest.importorskip("sentencepiece")
    from crosstrain.data.sources.translation.tokenizer import VOCABULARY, Vocabulary

    data = open_dataset(f"jsonl:{lines(tmp_path, ROWS)}?tokenizer=pieces,vocabulary=330")
    vocabulary = Vocabulary(data.attachment(VOCABULARY))
    column = data.column("train", "tokens")
    assert {vocabulary.decode(column.example(number)) for number in range(len(column))} <= {row["text"] for row in ROWS}


@pytest.mark.parametrize(
    ("rows", "arguments", "text"),
    [
        ([*ROWS, "{"], "", "line 61: this is no JSON"),
        ([*ROWS, "[1]"], "", "line 61: this is no JSON object"),
        ([*ROWS, {"text": "x"}], "", "line 61: there is no 'label', but 'text'"),
        ([*ROWS, {"text": 3, "label": "pos"}], "", "line 61: 'text' is no text"),
        ([*ROWS, {"text": "  ", "label": "pos"}], "", "line 61: 'text' is no text"),
        ([*ROWS, {"text": "x", "label": 0.5}], "", "line 61: 'label' is neither"),
        ([*ROWS, {"text": "x" * 40_000, "label": "pos"}], "", "line 61: the line has more than 32,768 bytes"),
        (ROWS[::2], "", "one class only, 'pos'"),
        ([], "", "no text is for the train split"),
        (ROWS, "?tokenizer=letters", "tokenizer of 'jsonl'"),
        (ROWS, "?longest=1", "longest"),
        (ROWS, "?test=/none.jsonl", "there is no '/none.jsonl'"),
    ],
)
def test_bad_lines_are_refused_in_one_sentence(tmp_path, rows, arguments, text):
    with pytest.raises(UsageError) as error:
        open_dataset(f"jsonl:{lines(tmp_path, rows)}{arguments}")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 60))
def test_any_bytes_are_texts_or_a_sentence(tmp_path_factory, content, place):
    path = lines(tmp_path_factory.mktemp("bytes"), ROWS)
    good = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*good[:place], content, *good[place:]]))
    with suppress(UsageError):
        open_dataset(f"jsonl:{path}")


@given(st.lists(st.text(), min_size=1, max_size=20))
def test_tokens_are_below_the_size(texts):
    for tokenizer in (Bytes(), Words(texts, 40)):
        for tokens in tokenizer.encode(texts):
            assert tokens[-1] == END
            assert max(tokens) < tokenizer.size
    assert [bytes(token - RESERVED for token in tokens[:-1]) for tokens in Bytes().encode(texts)] == [
        t.encode(errors="replace") for t in texts
    ]


SAVE = """
import sys
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
rows = {"text": [f"text {i}" for i in range(40)], "label": [i % 2 for i in range(40)]}
train = Dataset.from_dict(rows, features=features)
DatasetDict({"train": train, "test": train.select(range(8))}).save_to_disk(sys.argv[1] + "/both", num_shards={"train": 2, "test": 1})
train.save_to_disk(sys.argv[1] + "/one")
DatasetDict({"train": train, "validation": train.select(range(9))}).save_to_disk(sys.argv[1] + "/validated")
order = Features({"text": Value("string"), "label": ClassLabel(names=["zebra", "ant", "bee"])})
Dataset.from_dict(rows, features=order).save_to_disk(sys.argv[1] + "/order")
Dataset.from_dict({**rows, "label": [-1, *rows["label"][1:]]}, features=order).save_to_disk(sys.argv[1] + "/unlabelled")
from datasets import Image
from PIL import Image as Picture
pictures = [Picture.new("L", (12, 9), i * 6) for i in range(40)]
features = Features({"picture": Image(), "label": ClassLabel(names=["dark", "light"])})
Dataset.from_dict({"picture": pictures, "label": [i // 20 for i in range(40)]}, features=features).save_to_disk(sys.argv[1] + "/pictures")
"""


def saved(folder):
    pytest.importorskip("pyarrow")
    done = subprocess.run([sys.executable, "-c", SAVE, str(folder)], capture_output=True, text=True)
    if "No module named 'datasets'" in done.stderr:
        pytest.skip("the package datasets is not installed")
    assert done.returncode == 0, done.stderr


def test_saved_images_are_decoded(tmp_path):
    saved(tmp_path)
    data = open_dataset(f"hf-dataset:{tmp_path / 'pictures'}")
    images, labels = (np.concatenate([data.column(split, name).values for split in ("train", "test")]) for name in ("image", "label"))
    assert data.info.features.class_names == ("dark", "light")
    assert images.shape == (40, 3, 9, 9)
    assert sorted(zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)) == [(i * 6, i // 20) for i in range(40)]
    assert open_dataset(f"hf-dataset:{tmp_path / 'pictures'}?size=4").info.input_shape == (3, 4, 4)


def test_declared_classes_keep_their_numbers(tmp_path):
    saved(tmp_path)
    data = open_dataset(f"hf-dataset:{tmp_path / 'order'}")
    assert data.info.features.class_names == ("zebra", "ant", "bee")
    assert {label for split in ("train", "test") for label in data.column(split, "label").values.tolist()} == {0, 1}
    assert open_dataset(f"hf-dataset:{tmp_path / 'validated'}").info.sizes == {"train": 40, "test": 9}
    with pytest.raises(UsageError, match="row 1: 'label' is -1, which is none of its classes"):
        open_dataset(f"hf-dataset:{tmp_path / 'unlabelled'}")


def test_damaged_places_of_texts_are_refused(tmp_path):
    saved(tmp_path)
    (file,) = (tmp_path / "one").glob("*.arrow")
    content = file.read_bytes()
    places = np.cumsum([0, *(len(f"text {i}") for i in range(40))]).astype("<i4").tobytes()
    at = content.index(places) + 4 * 20
    for place in (200_000, 10**9, 5):
        file.write_bytes(content[:at] + place.to_bytes(4, "little") + content[at + 4 :])
        with pytest.raises(UsageError, match="no sound Arrow file"):
            open_dataset(f"hf-dataset:{tmp_path / 'one'}")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="is no file"):
        open_dataset(f"hf-dataset:{tmp_path / 'one'}")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_columns_are_refused_before_they_are_read(tmp_path, codec):
    saved(tmp_path)
    import pyarrow

    (file,) = (tmp_path / "one").glob("*.arrow")
    table = pyarrow.table({"text": ["a" * 300_000_000, *map(str, range(39))], "label": [number % 2 for number in range(40)]})
    with pyarrow.ipc.new_stream(str(file), table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_table(table)
    del table
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(UsageError, match="its columns are compressed"):
        open_dataset(f"hf-dataset:{tmp_path / 'one'}")
    assert pyarrow.total_allocated_bytes() < before + 1_000_000


def test_saved_datasets_are_read(tmp_path):
    saved(tmp_path)
    data = open_dataset(f"hf-dataset:{tmp_path / 'both'}")
    assert data.info.sizes == {"train": 40, "test": 8}
    assert data.info.features.class_names == ("neg", "pos")
    assert np.array_equal(data.column("train", "label").values, np.arange(40) % 2)
    assert sum(open_dataset(f"hf-dataset:{tmp_path / 'one'}").info.sizes.values()) == 40
    for damage, text in (("state.json", "state.json cannot be read"), ("data-00000-of-00002.arrow", "no sound Arrow file")):
        path = tmp_path / "both/train" / damage
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 3])
        with pytest.raises(UsageError, match=text):
            open_dataset(f"hf-dataset:{tmp_path / 'both'}")
        path.write_bytes(content)
    with pytest.raises(UsageError, match="column of 'train'"):
        open_dataset(f"hf-dataset:{tmp_path / 'both'}?text=words")
