"""``csv:PATH``: a table of a file becomes numbers, categories and a target."""

import json
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.errors import TrainerError, UsageError
from crosstrain.data.features import read_column
from crosstrain.data.sources.tables import rows as table_rows
from crosstrain.data.sources.tables import survey
from crosstrain.data.sources.tables.cells import CellError, Notation, numbers_of
from crosstrain.data.sources.tables.rows import CsvTable
from crosstrain.data.store.stored_dataset import open_dataset

HEADER = "age,city,height,y\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DATA_CACHE", str(tmp_path / "cache"))


def csv(folder, text, arguments="target=y", name="t.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return f"csv:{path}?{arguments}"


def rows(count=40, **changed):
    """Return rows of a table, some of them replaced by number."""
    cities = ("Rome", "Bonn", "Oslo")
    made = [f"{20 + i % 7},{cities[i % 3]},{170 + i * 0.25},{i % 2}" for i in range(count)]
    for number, row in changed.items():
        made[int(number[1:])] = row
    return "".join(f"{row}\n" for row in made)


def problem(folder, text, arguments="target=y"):
    with pytest.raises(UsageError) as error:
        open_dataset(csv(folder, text, arguments))
    return str(error.value)


def test_numbers_categories_and_target_become_columns(tmp_path):
    data = open_dataset(csv(tmp_path, HEADER + rows()))
    x = np.concatenate([data.column(split, "x").values for split in ("train", "test")])
    y = np.concatenate([data.column(split, "y").values for split in ("train", "test")])
    expected = sorted((20 + i % 7, 170 + i * 0.25, *np.eye(3)[(2, 0, 1)[i % 3]], i % 2) for i in range(40))
    assert sorted((*row, label) for row, label in zip(x.tolist(), y.tolist(), strict=True)) == expected
    assert data.info.features.class_names == ("0", "1")
    normal = read_column(data, "train", "x").values
    assert np.allclose(normal[:, :2].mean(0), 0, atol=1e-6)
    assert np.allclose(normal[:, :2].std(0), 1, atol=1e-6)
    assert set(np.unique(normal[:, 2:])) == {0, 1}
    described = json.loads(data.attachment("table.json"))
    assert described["categories"] == {"city": ["Bonn", "Oslo", "Rome"]}
    assert described["rows"] == data.info.sizes


def test_codes_are_columns_of_their_own(tmp_path):
    data = open_dataset(csv(tmp_path, HEADER + rows(), "target=height,categories=codes"))
    assert [(column.name, column.dtype) for column in data.info.columns] == [("x", "float32"), ("city", "int64"), ("y", "float32")]
    assert set(data.column("train", "city").values.tolist()) == {0, 1, 2}


def test_same_row_is_always_in_the_same_split(tmp_path):
    first = open_dataset(csv(tmp_path, HEADER + rows(400)))
    lines = (HEADER + rows(400)).splitlines()
    turned = "\n".join([lines[0], *reversed(lines[1:])]) + "\n"
    second = open_dataset(csv(tmp_path, turned, name="turned.csv"))
    for split in ("train", "test"):
        ages = [sorted(map(tuple, data.column(split, "x").values.tolist())) for data in (first, second)]
        assert ages[0] == ages[1]
    assert 40 < first.info.sizes["test"] < 130


def test_split_by_a_column_and_by_a_file(tmp_path):
    parted = "a,part,y\n" + "".join(f"{i},{'test' if i % 4 == 0 else 'train'},{i % 2}\n" for i in range(20))
    assert open_dataset(csv(tmp_path, parted, "target=y,split=part")).info.sizes == {"train": 15, "test": 5}
    deeper = tmp_path / "deeper"
    deeper.mkdir()
    (deeper / "test.csv").write_text("a,part,y\n1,x,0\n")
    name = csv(tmp_path, parted.replace("test,", "x,").replace("train,", "x,"), f"target=y,test={deeper / 'test.csv'}")
    assert open_dataset(name).info.sizes == {"train": 20, "test": 1}


@pytest.mark.parametrize(("policy", "sizes"), [("mean", 40), ("drop", 38)])
def test_missing_cells_are_a_choice(tmp_path, policy, sizes):
    text = HEADER + rows(r3=",Rome,171,1", r9="22,,172,0")
    assert "line 5, column 'age': the cell is empty" in problem(tmp_path, text)
    data = open_dataset(csv(tmp_path, text, f"target=y,missing={policy}"))
    assert sum(data.info.sizes.values()) == sizes
    assert any("2 rows have empty cells" in note for note in data.notes) == (policy == "drop")
    if policy == "mean":
        x = np.concatenate([data.column(split, "x").values for split in ("train", "test")])
        assert np.isfinite(x).all()
        assert (x[:, 2:].sum(1) == 0).sum() == 1
        train = json.loads(data.attachment("table.json"))["means"]["age"]
        assert np.isclose(x[:, 0], train).sum() == 1


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("", "target=y", "there is no header"),
        (HEADER, "target=y", "there are no rows below the header"),
        (HEADER + rows(r7="20,Rome,oops,1"), "target=y", "line 9, column 'height': 'oops' is no number"),
        (HEADER + rows(r7="20,Rome,1e400,1"), "target=y", "line 9, column 'height': '1e400' is beyond"),
        (HEADER + rows(r7="20,Rome,1_0,1"), "target=y", "line 9, column 'height': '1_0' is no number"),
        (HEADER + rows(r7="20,Rome,1"), "target=y", "line 9: there are 3 columns instead of 4"),
        (HEADER + rows(r7='20,"Rome,1,2'), "target=y", "this is no CSV"),
        (HEADER + rows(), "target=z", "z"),
        (HEADER + rows(), "", "which column is to be predicted"),
        (HEADER + rows(), "target=y,missing=guess", "guess"),
        (HEADER + rows(), "target=y,share=2", "a number between 0 and 1"),
        (HEADER + rows(), "target=city,task=regression", "holds text, not numbers"),
        (HEADER + rows(), "target=height,task=classes", "fractions"),
        ("a,a,y\n1,2,3\n", "target=y", "two columns are called 'a'"),
        ("a,,y\n1,2,3\n", "target=y", "column 2 of the header has no name"),
        ("day,y\n" + "2026-01-02,1\n2026-01-03,0\n" * 9, "target=y", "dates and times are no inputs: 'day'"),
        (b"\xff\xfe\x00", "target=y", "no text in UTF-8"),
        (b"PK\x03\x04\0\0,y\n", "target=y", "byte 0"),
        ("a,y\n" + "1,5\n" * 40, "target=y", "no row is for the"),
        ("a,part,y\n1,train,0\n2,test,1\n3,train,2\n", "target=y,split=part", "the test split has classes that training never sees: '1'"),
        ("a,part,y\n1,train,0\n2,valid,1\n", "target=y,split=part", "line 3, column 'part': 'valid' is neither train nor test"),
    ],
)
def test_bad_tables_get_one_sentence(tmp_path, text, arguments, expected):
    message = problem(tmp_path, text, arguments)
    assert expected in message
    assert "\n" not in message
    assert len(message) < 500


def test_free_text_is_refused_by_name(tmp_path):
    text = "words,y\n" + "".join(f"review number {i},{i % 2}\n" for i in range(survey.MAX_CATEGORIES + 5))
    assert "column 'words'" in (message := problem(tmp_path, text))
    assert "leave-out=words" in message
    with pytest.raises(UsageError, match="no column to predict the target from"):
        open_dataset(csv(tmp_path, text, "target=y,leave-out=words"))


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(TrainerError, match="MiB of disk"):
        open_dataset(csv(tmp_path, HEADER + rows(4000)))
    assert sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(tmp_path / "cache") for name in names) == 0


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
    st.sampled_from([repr, "{:.17g}".format, " {!r} ".format]),
)
def test_numbers_are_read_exactly(values, write):
    assert numbers_of([write(float(value)) for value in values], Notation()).tolist() == values


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=12))
def test_any_text_is_a_number_or_refused(text):
    try:
        (number,) = numbers_of([text], Notation())
    except CellError:
        return
    assert np.isnan(number) or float(text.strip()) == number


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=300))
def test_any_file_is_a_table_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("any")
    with suppress(UsageError):
        open_dataset(csv(folder, b"a,y\n1,0\n2,1\n" + content))


def test_decimal_commas_are_refused_or_read(tmp_path):
    text = "a;b;y\n" + "".join(f"{i},5;{i}.{i:03d},25;{i % 2}\n" for i in range(1, 41))
    assert "numbers with commas are no inputs: 'a', 'b'. Give decimal=comma" in problem(tmp_path, text)
    thousands = "a,y\n" + "".join(f'"{i},000",{i % 2}\n' for i in range(1, 41))
    assert "numbers with commas are no inputs: 'a'" in problem(tmp_path, thousands)
    data = open_dataset(csv(tmp_path, text, "target=y,decimal=comma"))
    x = np.concatenate([data.column(split, "x").values for split in ("train", "test")])
    assert sorted(x.tolist()) == [[i + 0.5, 1000.0 * i + i + 0.25] for i in range(1, 41)]


@pytest.mark.parametrize("write", ["1/{}/21", "{:02d}.02.22", "2021-02-{:02d} 10:00"])
def test_dates_of_any_form_are_refused(tmp_path, write):
    text = "d,y\n" + "".join(f"{write.format(i)},{i % 2}\n" for i in range(1, 29))
    assert "dates and times are no inputs: 'd'" in problem(tmp_path, text)


def test_large_numbers_keep_their_differences(tmp_path, capfd):
    text = "time,y\n" + "".join(f"{1_700_000_000 + i},{i % 2}\n" for i in range(200))
    data = open_dataset(csv(tmp_path, text))
    assert "relative to their mean, as float32 has 7 digits: 'time'" in capfd.readouterr().err
    offset = json.loads(data.attachment("table.json"))["relative to"]["time"]
    x = np.concatenate([data.column(split, "x").values[:, 0] for split in ("train", "test")])
    assert np.array_equal(np.sort(np.round(x + (offset - 1_700_000_000), 3)), np.arange(200))
    normal = read_column(data, "train", "x").values
    assert abs(normal.mean()) < 1e-6
    assert abs(normal.std() - 1) < 1e-6


def test_classes_beyond_exact_numbers_are_refused(tmp_path):
    text = "a,y\n" + "".join(f"{i},{2**53 + i % 2}\n" for i in range(40))
    assert "are not told apart; give categorical=y" in problem(tmp_path, text)
    data = open_dataset(csv(tmp_path, text, "target=y,categorical=y"))
    assert data.info.features.class_names == (str(2**53), str(2**53 + 1))


def test_words_for_empty_cells_may_be_categories(tmp_path):
    text = "n,c,y\n" + "".join(f"{i},{('NA', 'EU')[i % 2]},{i % 2}\n" for i in range(40))
    assert "the cell is empty" in problem(tmp_path, text)
    data = open_dataset(csv(tmp_path, text, "target=y,empty-words=no"))
    assert json.loads(data.attachment("table.json"))["categories"] == {"c": ["EU", "NA"]}


def test_wide_header_is_read_in_linear_time(tmp_path):
    names = ",".join(f"c{i}" for i in range(60_000))
    assert "no rows" in problem(tmp_path, f"{names},y\n")
    assert "field larger than field limit" in problem(tmp_path, f"{'a' * 300_000},y\n1,2\n")
    assert "write parquet:" in problem(tmp_path, "PAR1,y\n1,0\n")


def all_rows(table, blocks):
    """Return columns and lines of all blocks, or the error."""
    columns, places = [[] for _ in table.names], []
    try:
        for block in blocks:
            for column, cells in zip(columns, block.columns, strict=True):
                column += cells
            places += block.places
    except UsageError as error:
        return str(error)
    return columns, places


CELLS = st.sampled_from(["1", "", "-2.5", "a b", "ü", '"x,y"', '"a\nb"', 'q"', "1,2", "\0", "'", "\u2028"])
ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r", "\n\n", ""])
ROWS = st.tuples(st.lists(CELLS, min_size=1, max_size=3), ENDS)


@settings(deadline=None, max_examples=400)
@given(st.lists(ROWS, max_size=12), st.sampled_from(["a,b\n", "a\n", "\ufeffa,b,c\r\n", '"a",b\n']), st.integers(8, 64))
def test_divided_lines_equal_parsed_ones(tmp_path_factory, made, header, size):
    path = tmp_path_factory.mktemp("lines") / "t.csv"
    path.write_bytes((header + "".join(",".join(cells) + end for cells, end in made)).encode())
    table = CsvTable(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_rows, "PIECE_BYTES", size)
        divided = all_rows(table, table.blocks())
    assert divided == all_rows(table, table._parsed(0, 0, path.stat().st_size))


def parquet_of(folder, columns):
    arrow, parquet = (
        pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed"),
        pytest.importorskip("pyarrow.parquet"),
    )
    parquet.write_table(arrow.table(columns), folder / "t.parquet")
    return folder / "t.parquet"


def test_parquet_without_its_index_and_with_words(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"a": ["NA", "EU", "AS"] * 20, "n": range(60), "y": [0, 1] * 30, "list": [[1, 2]] * 60})
    frame[frame.n > 5].to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="the column 'list' holds several values in a cell"):
        open_dataset(f"parquet:{tmp_path}/t.parquet?target=y")
    described = json.loads(open_dataset(f"parquet:{tmp_path}/t.parquet?target=y,leave-out=list").attachment("table.json"))
    assert (described["numbers"], described["categories"]) == (["n"], {"a": ["AS", "EU", "NA"]})


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), missing=st.sampled_from(["mean", "drop"]))
def test_parquet_and_csv_of_the_same_rows_are_one_dataset(tmp_path_factory, seed, missing):
    draw, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("tables")
    count = 60
    numbers = [
        None if gap else float(np.float32(value)) for value, gap in zip(draw.standard_normal(count), draw.random(count) < 0.1, strict=True)
    ]
    words = [None if gap else str(word) for word, gap in zip(draw.choice(["a", "b", "ü"], count), draw.random(count) < 0.1, strict=True)]
    labels = [number % 3 for number in range(count)]
    file = parquet_of(folder, {"n": numbers, "word": words, "flag": [bool(label) for label in labels], "y": labels})
    cells = zip(numbers, words, labels, strict=True)
    text = "n,word,flag,y\n" + "".join(f"{'' if n is None else repr(n)},{word or ''},{int(bool(y))},{y}\n" for n, word, y in cells)
    opened = [
        open_dataset(name) for name in (csv(folder, text, f"target=y,missing={missing}"), f"parquet:{file}?target=y,missing={missing}")
    ]
    assert opened[0].info.features == opened[1].info.features
    for split in ("train", "test"):
        for column in ("x", "y"):
            assert np.array_equal(*(data.column(split, column).values for data in opened))


def test_bad_parquet_files_get_one_sentence(tmp_path):
    days = np.arange("2026-01-01", "2026-03-01", dtype="datetime64[D]")
    file = parquet_of(tmp_path, {"day": days, "y": np.arange(len(days)) % 2})
    with pytest.raises(UsageError, match="dates and times are no inputs: 'day'"):
        open_dataset(f"parquet:{file}?target=y")
    infinite = parquet_of(tmp_path, {"n": [1.0, np.inf] * 20, "y": [0, 1] * 20})
    with pytest.raises(UsageError, match="row 2, column 'n': 'inf' is beyond"):
        open_dataset(f"parquet:{infinite}?target=y")
    content = file.read_bytes()
    for damaged in (b"a,y\n1,2\n", b"", content[: len(content) // 2], content[:4] + b"\xff" * (len(content) - 12) + content[-8:]):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="no sound Parquet file"):
            open_dataset(f"parquet:{file}?target=y")
