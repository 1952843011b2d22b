"""``trainer runs export``: tables equal the records in each format; no file is overwritten."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import astuple, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from run_samples import EVALUATION, STEP, SYSTEM, a_job, async_run, open_run, sample, sync_run

from crosstrain.cli.group import invoke
from crosstrain.records.store.jsonl import DamagedRunError
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.pages.export import TABLES, table_of
from crosstrain.report.runs.columns import row
from crosstrain.report.runs.run import Run

TYPES = {
    "integer": int,
    "number": float,
    "text": str,
    "truth": lambda text: {"True": True, "False": False}[text],
    "moment": datetime.fromisoformat,
}


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sync_run(tmp_path / "runs")
    async_run(tmp_path / "runs")
    writer = open_run(a_job(tmp_path / "runs", name="odd"))
    writer.step(replace(STEP, count=3, losses=(math.nan, math.inf, -math.inf), learning_rates=(0.1, 0.2, 0.3)))
    writer.step(replace(STEP, step=3, count=1, losses=(0.1,), data_wait_seconds=0.125, epoch=1))
    writer.evaluation(replace(EVALUATION, loss=math.nan))
    gpu = {"name": 'A "GPU", fast', "utilization": 0.5, "memory_bytes": 2**40}
    writer.system(replace(SYSTEM, cpu_seconds=None, gpus=(gpu,), problems=()))
    writer.system(sample(1, 1.0, network_sent_bytes=10))
    writer.system(sample(0, 2.0, network_sent_bytes=4000, network_received_bytes=1000))
    writer.close()
    return tmp_path / "runs"


def read(path):
    """Return the columns of an exported file, and its rows as dictionaries."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow (extra parquet) is not installed")
        table = parquet.read_table(path)
        return table.column_names, table.to_pylist()
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return reader.fieldnames, rows


def in_utc(value):
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def exported(capsys, *arguments):
    code = invoke(["runs", "export", *arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def cells(path, table):
    """Return rows as representations of tuples of typed values, as NaN differs from itself."""
    names, rows = read(path)
    assert names == [column.name for column in table.columns]
    kinds = [TYPES[column.kind] for column in table.columns]
    text = path.suffix == ".csv"
    return [
        repr(
            tuple(
                None if row[name] in (None, "") else in_utc(kind(row[name]) if text else row[name])
                for name, kind in zip(names, kinds, strict=True)
            )
        )
        for row in rows
    ]


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
@pytest.mark.parametrize("run", ["one", "two", "odd"])
def test_tables_round_trip(out, tmp_path, capsys, run, file_format):
    if file_format == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    output = exported(capsys, run, "--format", file_format)
    for what in TABLES:
        path = tmp_path / f"{run}-tables" / f"{what}.{file_format}"
        table = table_of(what, [Run(Path("runs") / run)])
        rows = [
            tuple(
                TYPES[column.kind](value) if column.kind in ("number", "moment") and value is not None else value
                for column, value in zip(table.columns, row, strict=True)
            )
            for row in table.rows
        ]
        assert cells(path, table) == [repr(tuple(map(in_utc, row))) for row in rows]
        assert f"{what}.{file_format}  ({len(rows)} row{'' if len(rows) == 1 else 's'})\n" in output


def test_steps_row_is_an_update(out, tmp_path, capsys):
    exported(capsys, "two", "--what", "steps")
    names, rows = read(tmp_path / "two-steps.csv")
    assert names[0] == "run"
    records = list(RunReader(out / "two").steps())
    assert [row["run"] for row in rows] == ["two"] * 16
    assert [int(row["step"]) for row in rows] == list(range(16))
    assert [float(row["loss"]) for row in rows] == [loss for record in records for loss in record.losses]
    assert [int(row["staleness"]) for row in rows] == [stale for record in records for stale in record.staleness]
    assert [int(row["worker"]) for row in rows] == [0] * 12 + [1] * 4
    assert [float(row["time_seconds"]) for row in rows[:5]] == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.35])
    assert [row["group_first_step"] for row in rows[3:5]] == ["0", "4"]
    assert {(row["group_examples"], row["group_updates"], row["learning_rate"], row["group_network_wait_seconds"]) for row in rows} == {
        ("20", "4", "0.05", "")
    }


def test_non_finite_numbers_are_spelled_as_in_the_records(out, tmp_path, capsys):
    exported(capsys, "odd", "--what", "steps", "-o", "steps.csv")
    _, rows = read(tmp_path / "steps.csv")
    assert [row["loss"] for row in rows[:3]] == ["NaN", "Infinity", "-Infinity"]
    assert [row["learning_rate"] for row in rows] == ["0.1", "0.2", "0.3", "0.05"]
    assert [row["group_data_wait_seconds"] for row in rows] == ["", "", "", "0.125"]


def test_system_row_is_a_sample_with_rates(out, tmp_path, capsys):
    exported(capsys, "odd", "--what", "system", "-o", "system.csv")
    _, rows = read(tmp_path / "system.csv")
    assert [(row["node"], row["time_seconds"], row["cpu_seconds"]) for row in rows] == [
        ("0", "0.5", ""),
        ("1", "1.0", "1.0"),
        ("0", "2.0", "1.0"),
    ]
    assert [row["network_sent_bytes_per_second"] for row in rows] == ["", "", "2000.0"]  # (4000 − 1000) / 1.5 s
    assert rows[2]["network_received_bytes_per_second"] == ""  # the counter was reset
    assert json.loads(rows[0]["gpus"]) == [{"name": 'A "GPU", fast', "utilization": 0.5, "memory_bytes": 2**40}]
    assert json.loads(rows[0]["interfaces"]) == {"node0": [1000, 2000]}
    assert json.loads(rows[0]["tasks"])[0]["task"] == "worker-0"


def test_summary_row_is_a_run_also_without_summary(out, tmp_path, capsys):
    exported(capsys, "one", "two", "odd", "--what", "summary", "-o", "summary.csv")
    names, rows = read(tmp_path / "summary.csv")
    assert [row["run"] for row in rows] == ["one", "two", "odd"]
    for exported_row, name in zip(rows, ("one", "two"), strict=False):
        figures = row(RunReader(out / name).summary())
        assert set(figures) <= set(names)
        for key, value in figures.items():
            assert exported_row[key] == (str(value) if isinstance(value, bool | str) else "" if value is None else json.dumps(value)), key
    assert (rows[2]["state"], rows[2]["steps"], rows[2]["backend"]) == ("running", "", "tf")


def test_summary_columns_have_fixed_types(out, tmp_path, capsys):
    """Also for a figure that no run has, so that several exports form one table."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("one", "two", "odd"):
        exported(capsys, name, "--what", "summary", "--format", "parquet", "-o", f"{name}.parquet")
    tables = [parquet.read_table(tmp_path / f"{name}.parquet") for name in ("one", "two", "odd")]
    types = {"created_at": arrow.timestamp("us", tz="UTC"), "time_to_target_seconds": arrow.float64(), "eval_loss": arrow.float64()}
    types |= {"final_train_loss": arrow.float64(), "steps": arrow.int64(), "target_reached": arrow.bool_(), "problem": arrow.string()}
    types |= {"updates_by_worker": arrow.string(), "network_source": arrow.string(), "node_cpu_fraction_mean": arrow.string()}
    for table in tables:
        assert {name: table.schema.field(name).type for name in types} == types
        shared = [name for name in table.schema.names if name in tables[0].schema.names]
        assert [table.schema.field(name) for name in shared] == [tables[0].schema.field(name) for name in shared]
    whole = arrow.concat_tables(tables, promote_options="default")
    assert whole.num_rows == 3
    assert "null" not in {str(field.type) for field in whole.schema}
    created = whole["created_at"].to_pylist()
    assert created == [datetime.fromisoformat(RunReader(out / name).status()["created_at"]) for name in ("one", "two", "odd")]


def test_several_runs_share_a_table(out, tmp_path, capsys):
    output = exported(capsys, "runs", "--what", "evals")
    assert output == "3-runs-evals.csv  (4 rows)\n"
    _, rows = read(tmp_path / "3-runs-evals.csv")
    records = [(name, *astuple(record)) for name in ("odd", "one", "two") for record in RunReader(out / name).evals()]
    records = [(*before, metrics["accuracy"], updates) for *before, metrics, updates in records]
    assert [[str(value) for value in record] for record in records] == [
        [value.replace("NaN", "nan") for value in row.values()] for row in rows
    ]
    (tmp_path / "elsewhere").mkdir()
    sync_run(tmp_path / "elsewhere")
    exported(capsys, "runs/one", "elsewhere/one", "--what", "evals", "-o", "same.csv")
    assert [row["run"] for row in read(tmp_path / "same.csv")[1]] == ["runs/one", "runs/one", "elsewhere/one", "elsewhere/one"]


def test_single_csv_goes_to_standard_output(out, capsys):
    text = exported(capsys, "one", "--what", "evals", "-o", "-")
    assert text.splitlines()[0].startswith("run,step,epoch,time_seconds")
    assert text.count("\n") == 3


@pytest.mark.parametrize(("output", "path"), [("new.csv", "new.csv"), ("folder", "folder/one-steps.csv"), ("made/", "made/one-steps.csv")])
def test_table_is_written_to_the_named_path(out, tmp_path, capsys, output, path):
    (tmp_path / "folder").mkdir()
    assert exported(capsys, "one", "--what", "steps", "-o", output).startswith(f"{path}  (10 rows)")
    assert (tmp_path / path).stat().st_mode & 0o777 == 0o644


def test_nothing_is_overwritten_without_force(out, tmp_path, capsys):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "system.csv").write_text("mine")
    for arguments in (["-o", "t"], ["--what", "system", "-o", "t/system.csv"]):
        assert invoke(["runs", "export", "one", *arguments]) == 2
        assert "'t/system.csv' exists. Give another name, or --overwrite." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["system.csv"]
    assert (tmp_path / "t" / "system.csv").read_text() == "mine"
    exported(capsys, "one", "-o", "t", "--overwrite")
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == sorted(f"{what}.csv" for what in TABLES)
    assert (tmp_path / "t" / "system.csv").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "xls"], "--format: got 'xls'; allowed: csv, parquet"),
        (["--what", "step"], "--what: got 'step'; allowed: steps, evals, system, summary. Did you mean 'steps'?"),
        (["--what", "steps", "-o", "x.parquet"], "--output: 'x.parquet' would hold csv; give it another name, or --format parquet."),
        (["-o", "-"], "--output: - prints one table as csv"),
        (["--what", "steps", "-o", "no/such/folder.csv"], "no/such' cannot be made"),
        (["-o", "file"], "file' cannot be made"),
        (["--what", "steps", "-o", "file/x.csv"], "file' cannot be made"),
    ],
)
def test_invalid_request_exits_with_2_and_writes_nothing(out, tmp_path, capsys, arguments, message):
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert invoke(["runs", "export", "one", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_record_is_named_and_leaves_no_file(out, tmp_path, capsys):
    with (out / "one" / "steps.jsonl").open("a") as file:
        file.write('{"torn\n{"schema": 1}\n')
    assert invoke(["runs", "export", "one", "--what", "steps", "-o", "steps.csv"]) == 2
    assert "steps.jsonl, line 6: not a whole JSON record" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_rows_are_streamed(out):
    """A run of any length fits into little memory."""
    with (out / "one" / "steps.jsonl").open("a") as file:
        file.write("damaged\n" * 2)
    rows = table_of("steps", [Run(out / "one")]).rows
    assert [next(rows)[1] for _ in range(10)] == list(range(10))
    with pytest.raises(DamagedRunError):
        next(rows)


def test_missing_pyarrow_names_the_package(out, tmp_path):
    script = "import sys; sys.modules['pyarrow'] = None; from crosstrain.cli.group import invoke; sys.exit(invoke(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "runs", "export", "one", "--format", "parquet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: format parquet needs the package pyarrow. Install it: pip install 'crosstrain[parquet]'\n"
