"""``trainer runs``: selection, order and columns of the list, and the details of one run."""

from __future__ import annotations

import json
import math
import os
import pty
import random
import shlex
import subprocess
import sys
from datetime import datetime, timedelta

import pytest
from run_folders import STARTED, documents, many_runs, variant, write_run
from run_samples import a_job, async_run, open_run, sync_run

from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.report.compare.run_tables import SYNTHETIC
from crosstrain.report.compare.runs_list import runs_table
from crosstrain.report.runs.locate import find_run
from crosstrain.report.runs.query import FIGURES, Condition, figure_name, fitting, in_order, list_runs, parse_since
from crosstrain.report.runs.run import repeat_command

EMPTY = dict.fromkeys(FIGURES)


def rows(**columns):
    """Return rows with the given figures and no others; the first one is the newest."""
    (count,) = {len(values) for values in columns.values()}
    made = [(STARTED - timedelta(hours=number)).isoformat() for number in range(count)]
    return [
        {**row, "path": f"runs/{row['run']}"}
        for number in range(count)
        for row in [
            {**EMPTY, "created_at": made[number], "run": f"r{number}", **{name: values[number] for name, values in columns.items()}}
        ]
    ]


def names(table_rows):
    return [row["run"] for row in table_rows]


# Conditions ----------------------------------------------------------------------------------------------------------

NUMBERS = [0.5, 0.9, None, "NaN", "Infinity", 1, [None, 0.2, 3.0]]


@pytest.mark.parametrize(
    ("condition", "fits"),
    [
        (">=0.9", {"r1", "r4", "r5", "r6"}),
        (" > 0.9", {"r4", "r5", "r6"}),
        ("<=.5", {"r0", "r6"}),
        ("<9e-1", {"r0", "r6"}),
        ("=1", {"r5"}),
        ("==1.0", {"r5"}),
        ("!=1", {"r0", "r1", "r3", "r4", "r6"}),
        ("=null", {"r2"}),
        ("!=null", {"r0", "r1", "r3", "r4", "r5", "r6"}),
    ],
)
def test_numeric_condition_selects_rows(condition, fits):
    fitting_rows = fitting(rows(examples_per_second=NUMBERS), [Condition.parse(f"examples_per_second{condition}")])
    assert set(names(fitting_rows)) == fits


@pytest.mark.parametrize(
    ("condition", "fits"),
    [("run=7", ["7"]), ("run!=7", ["a b", "x>=1"]), ("run=a b", ["a b"]), ("name = x>=1", ["x>=1"])],
)
def test_text_condition_is_literal(condition, fits):
    assert names(fitting(rows(run=["7", "a b", "x>=1"]), [Condition.parse(condition)])) == fits


def test_conditions_are_combined():
    table = rows(target_reached=[True, True, False, None], eval_accuracy=[0.9, 0.8, 0.95, 1.0])
    wanted = [Condition.parse(text) for text in ("target_reached=true", "accuracy>0.85")]
    assert names(fitting(table, wanted)) == ["r0"]
    assert names(fitting(table, [Condition.parse("target_reached!=true")])) == ["r2"]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("acuracy>=0.9", "got 'acuracy'; .* Did you mean 'accuracy'"),
        ("sent>=1", "Did you mean 'node_network_sent_bytes_per_second'"),
        ("zzz=1", "Some are: name, when, accuracy"),
        ("accuracy", "got 'accuracy'; allowed: FIGURE>=VALUE"),
        ("accuracy>=", "allowed: FIGURE>=VALUE"),
        ("accuracy>=high", "a value as eval_accuracy has them: a number"),
        ("target_reached=1", "a value as target_reached has them: true or false"),
        ("backend>=tf", "= and != only"),
        ("accuracy<null", "= and != only"),
    ],
)
def test_invalid_condition_is_explained(condition, message):
    table = rows(eval_accuracy=[0.5, None], target_reached=[True, False], backend=["tf", "torch"])
    with pytest.raises(UsageError, match=message):
        fitting(table, [Condition.parse(condition)])


def test_every_figure_can_be_requested():
    assert [figure_name("--sort", name) for name in FIGURES] == list(FIGURES)
    assert figure_name("--sort", "Examples-per-second") == "examples_per_second"


# Order ---------------------------------------------------------------------------------------------------------------


def test_newest_run_is_first_and_undated_last():
    table = rows(seed=[0, 1, 2, 3])
    table[1]["created_at"], table[2]["created_at"] = None, "yesterday"
    random.Random(0).shuffle(table)
    assert names(in_order(table, None))[:2] == ["r0", "r3"]
    assert names(in_order(table, "when"))[:2] in (["r2", "r3"], ["r3", "r0"])


def test_missing_numbers_are_last_in_both_directions():
    table = rows(examples_per_second=[5, None, math.nan, "Infinity", 7.5, "NaN", [1, None, 6]])
    assert names(in_order(table, "examples_per_second")) == ["r0", "r6", "r4", "r3", "r2", "r5", "r1"]
    assert names(in_order(table, "examples_per_second:desc")) == ["r3", "r4", "r6", "r0", "r2", "r5", "r1"]


def test_equal_rows_stay_newest_first():
    table = rows(backend=["b", "a", "b", "a"])
    assert names(in_order(table, "backend")) == ["r1", "r3", "r0", "r2"]
    assert names(in_order(table, "backend:desc")) == ["r0", "r2", "r1", "r3"]


@pytest.mark.parametrize(("order", "message"), [("speed:down", "FIGURE, FIGURE:asc or FIGURE:desc"), ("sped", "allowed: a figure")])
def test_invalid_order_is_explained(order, message):
    with pytest.raises(UsageError, match=message):
        in_order([], order)


NOW = datetime(2026, 3, 10, 15, 30).astimezone()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("30min", NOW - timedelta(minutes=30)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("7d", NOW - timedelta(days=7)),
        ("2w", NOW - timedelta(days=14)),
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=NOW.tzinfo)),
        ("2026-03-01T12:00+02:00", datetime.fromisoformat("2026-03-01T12:00+02:00")),
    ],
)
def test_since_accepts_durations_and_dates(text, moment):
    assert parse_since(text, NOW) == moment


@pytest.mark.parametrize("text", ["yesterday", "7", "-7d", "2026-13-01", "9" * 30 + "w", ""])
def test_invalid_time_is_explained(text):
    with pytest.raises(UsageError, match=r"--since: .* 7d or 2w, or a date"):
        parse_since(text, NOW)


# The table -----------------------------------------------------------------------------------------------------------

TABLE = """\
name   state        backend  mode   model   data                          nodes  batch  examples/s    loss  accuracy  time to target  when
one    succeeded    tf       sync   logreg  digits                            2     10        62.5  0.6000    0.9000          1.67 s  {one}
two    succeeded    torch    async  logreg  synthetic-images (synthetic)      2     10          50  0.7000    0.8000               -  {two}
\\x09g  damaged      -        -      -       -                                 -      -           -       -         -               -  -
live   interrupted  tf       sync   cnn     digits                            1  1,024           -       -         -               -  {live}
"""


def test_runs_are_listed_as_a_table(tmp_path, capsys):
    out = tmp_path / "runs"
    for path in (sync_run(out), async_run(out)):
        run_documents = documents(path)
        run_documents["status.json"]["created_at"] = (STARTED - timedelta(minutes=path.name == "two")).isoformat()
        if path.name == "two":
            run_documents["summary.json"] |= {"data": "synthetic-images", "synthetic": True}
        for name, value in run_documents.items():
            (path / name).write_text(json.dumps(value))
    write_run(out / "\tg", {"job.json": "{", "status.json": "{"})
    writer = open_run(a_job(out, name="live", model="cnn", batch_size=1024))
    writer.write_status("interrupted")
    writer.close()
    assert invoke(["runs", "--wide", "--out", str(out), "--sort", "created_at:desc", "--where", "state!=x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    when = {line.split()[0]: line[-16:] for line in lines if line.startswith(("one", "two", "live"))}
    assert when["one"] == f"{STARTED:%Y-%m-%d %H:%M}"
    expected = TABLE.format(**when).splitlines()
    assert sorted(line for line in lines if line and line != SYNTHETIC) == sorted(expected)
    assert lines[-2:] == ["", SYNTHETIC]


def test_narrow_terminal_drops_columns_but_no_name():
    table = rows(run=["a" * 50, "b"], state=["succeeded"] * 2, eval_accuracy=[0.5, 0.75], examples_per_second=[10, 20])
    for width in (300, 160, 120, 80, 70, 10):
        text, left_out = runs_table(table, width)
        lines = text.splitlines()
        assert max(map(len, lines)) <= max(width, 61)
        assert lines[1].startswith("a" * 50)
        assert ("accuracy" in lines[0]) != ("accuracy" in left_out)
    assert runs_table(table, None) == runs_table(table, 300)
    assert left_out[-1] == "examples/s"


def test_requested_figure_keeps_its_column():
    figures = {
        "eval_accuracy": [0.5, 0.75],
        "staleness_mean": [1.25, None],
        "node_cpu_fraction_mean": [[0.5, None], None],
        "mode": ["sync"] * 2,
    }
    table = rows(run=["a" * 50, "b"], state=["succeeded"] * 2, **figures)
    requested = ["mode", "staleness_mean", "node_cpu_fraction_mean", "mode"]
    text, left_out = runs_table(table, 60, requested)
    assert text.splitlines()[0].split() == ["name", "state", "mode", "staleness_mean", "node_cpu_fraction_mean"]
    assert [line.split()[2:] for line in text.splitlines()[1:]] == [["sync", "1.2500", "0.5000,", "-"], ["sync", "-", "-"]]
    assert "accuracy" in left_out


def test_run_of_a_sweep_has_its_path_as_name(tmp_path, capsys):
    out = tmp_path / "runs"
    sync_run(out / "my-sweep", name="lr=0.1")
    async_run(out)
    assert invoke(["runs", "--out", str(out), "--where", "steps>0", "--sort", "eval_loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[1:3]) == ["my-sweep/lr=0.1", "two"]
    assert lines[0].endswith("steps")
    assert find_run("my-sweep/lr=0.1", out) == out / "my-sweep" / "lr=0.1"


@pytest.mark.thorough
def test_width_follows_the_terminal_or_pipe(tmp_path):
    many_runs(tmp_path / "runs", 3)
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "crosstrain.cli.main", "runs", "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, stdout=secondary, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "70"}, text=True)
    os.close(secondary)
    shown = os.read(primary, 10_000).decode()
    os.close(primary)
    assert done.returncode == 0
    assert all(len(line) <= 70 for line in shown.splitlines())
    assert "not shown, to fit into 70 columns: data, model, when" in done.stderr
    piped = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "70"})
    assert 70 < max(map(len, piped.stdout.splitlines())) <= 100
    assert "not shown, to fit into 100 columns: data, model" in piped.stderr
    assert piped.stderr.endswith("; --wide shows them\n")
    wide = subprocess.run([*command, "--wide"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "70"})
    assert (wide.stderr, wide.stdout.splitlines()[0].split()[-4:]) == ("", ["time", "to", "target", "when"])
    with_synthetic = [{**row, "synthetic": True} for row in list_runs(tmp_path / "runs")]
    assert max(map(len, runs_table(with_synthetic, 100)[0].splitlines())) <= 100


# The command ---------------------------------------------------------------------------------------------------------


def listed(capsys, *arguments):
    assert invoke(["runs", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_filters_agree_with_the_documents(tmp_path, capsys):
    out = tmp_path / "runs"
    made = many_runs(out, 60)
    summaries = {name.split("/")[-1]: selected["summary.json"] for name, selected in made.items()}
    good = {name for name, summary in summaries.items() if summary["eval"] and summary["eval"]["accuracy"] >= 0.5}
    torch = {name for name, summary in summaries.items() if summary["backend"] == "torch"}
    late = {f"run-{number:05}" for number in range(24, 60)}
    since = (STARTED + timedelta(hours=24)).isoformat()
    arguments = ["--out", str(out), "--backend", "Torch", "--where", "accuracy>=0.5", "--since", since]
    selected = listed(capsys, *arguments, "--sort", "accuracy:desc")
    assert names(selected) == sorted(good & torch & late, key=lambda name: -summaries[name]["eval"]["accuracy"])
    assert selected
    assert names(listed(capsys, "list", *arguments, "--sort", "accuracy:desc", "--limit", "2")) == names(selected)[:2]
    assert set(names(listed(capsys, "--out", str(out), "--backend", "tf", "--backend", "torch"))) == set(summaries)
    assert names(listed(capsys, "--out", str(out)))[0] == "run-00059"
    assert [row["path"] for row in selected] == [str(out / next(path for path in made if path.endswith(row["run"]))) for row in selected]


def test_states_and_datasets_are_filtered(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_OUT", str(tmp_path))
    run_documents = documents(sync_run(tmp_path))
    template = variant(run_documents, 1, name="synthetic", data="synthetic-images:64")
    write_run(tmp_path / "synthetic", template)
    write_run(tmp_path / "failed", {**template, "summary.json": None, "status.json": {**template["status.json"], "state": "failed"}})
    assert names(listed(capsys, "--data", "synthetic-images")) == ["synthetic"]
    assert names(listed(capsys, "--data", "synthetic-images:64")) == ["synthetic"]
    assert names(listed(capsys, "--state", "failed")) == ["failed"]
    assert set(names(listed(capsys, "--state", "failed", "--state", "SUCCEEDED"))) == {"failed", "synthetic", "one"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "snyc"], "--mode: got 'snyc'; allowed: sync, async. Did you mean 'sync'?"),
        (["--state", "done"], "--state: got 'done'; allowed: starting, running"),
        (["--where", "acuracy>=1"], "Did you mean 'accuracy'"),
        (["--sort", "foo"], "--sort: got 'foo'"),
        (["--since", "soon"], "--since: got 'soon'"),
        (["--limit", "0"], "'--limit'"),
        (["--out", "nowhere"], "--out: there is no folder 'nowhere'"),
        (["lsit"], "got 'lsit'; there is no such command; allowed: list, show, delete, export. Did you mean 'list'?"),
        (["show", "runn"], "got 'runn'; allowed: the path of a run directory"),
    ],
)
def test_invalid_request_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    sync_run(tmp_path / "runs")
    assert invoke(["runs", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1


def test_empty_list_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert listed(capsys) == []
    assert invoke(["runs"]) == 0
    assert capsys.readouterr() == ("", "'runs' has no runs\n")
    sync_run(tmp_path / "runs")
    assert invoke(["runs", "--backend", "torhc"]) == 0
    assert "no run has backend 'torhc'; there are: tf." in capsys.readouterr().err
    assert invoke(["runs", "--where", "accuracy>1"]) == 0
    assert "none of the runs in 'runs' fits (there is 1)" in capsys.readouterr().err


# One run -------------------------------------------------------------------------------------------------------------


def test_show_has_all_details(tmp_path, capsys):
    path = sync_run(tmp_path)
    (path / "checkpoints" / "step-000000010").mkdir(parents=True)
    (path / "checkpoints" / "step-000000010" / "checkpoint.json").write_text("{")
    node = {"hostname": "here", "cpu_model": "A Processor", "cores_available": 2.0, "memory_total_bytes": 8_000_000_000, "python": "3.12.1"}
    (path / "env.json").write_text(json.dumps({"schema": 1, "nodes": [node, {}]}))
    assert invoke(["runs", "show", "one", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for line in (
        "node 0: here, A Processor, 2 cores, 8.0 GB, Python 3.12.1",
        "node 1: unknown",
        f"files: {path.resolve()} (9 files,",
        "checkpoint: checkpoints/step-000000010 (cannot be read, 1 B)",
        "again: trainer run --backend tf --nodes 2 --batch-size 5 --until 'accuracy>=0.85'",
        "test accuracy               0.9000",
    ):
        assert line in text
    assert invoke(["runs", "show", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"] == documents(path)["summary.json"]
    assert document["row"]["eval_accuracy"] == 0.9
    assert (document["state"], document["damaged"], document["bytes"]) == (
        "succeeded",
        [],
        sum(file["bytes"] for file in document["files"]),
    )


def test_show_accepts_a_damaged_run(tmp_path, capsys):
    writer = open_run(a_job(tmp_path, name="bad"))
    writer.write_status("failed", cause="worker-1 died", exit_code=1)
    writer.close()
    (writer.path / "env.json").write_text("{")
    assert invoke(["runs", "show", "bad", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "state: failed; no summary\ncause: worker-1 died\ndamaged: " in text
    assert "env.json: not a whole JSON document" in text


CODE = {
    "packages": {"crosstrain": "1.0"},
    "crosstrain": {"commit": "abc1234" + 33 * "0", "changed": True},
    "typed_in": {"commit": "def5678" + 33 * "0", "changed": False},
}


def shown_with(capsys, path, **environment):
    """Return the output of `runs show` with this env.json, as text and as JSON."""
    (path / "env.json").write_text(json.dumps({"schema": 1, **environment}))
    printed = []
    for more in ([], ["--json"]):
        assert invoke(["runs", "show", str(path), *more]) == 0
        printed.append(capsys.readouterr().out)
    return printed[0], json.loads(printed[1])


def test_show_has_code_and_instruction_sets(tmp_path, capsys):
    node = {"hostname": "here", "cpu_model": "A Processor", "cpu_flags": ["fpu", "amx_bf16", "avx2"]}
    text, document = shown_with(capsys, sync_run(tmp_path), nodes=[node], code=CODE)
    assert "\nnode 0: here, A Processor, avx2 amx_bf16\n" in text
    assert "\ncode: crosstrain 1.0 at commit abc123400000 (changed), typed in a work tree at commit def567800000\n" in text
    assert document["code"] == CODE


@pytest.mark.parametrize("environment", [{"nodes": [{}]}, {"nodes": [{}], "code": None}, {"nodes": [{}], "code": {}}])
def test_show_omits_unrecorded_code(tmp_path, capsys, environment):
    text, document = shown_with(capsys, sync_run(tmp_path), **environment)
    assert "code:" not in text
    assert document["damaged"] == []


@pytest.mark.parametrize(
    ("code", "problem_text"),
    [
        ("abc1234", "code"),
        ({"packages": ["crosstrain"]}, "code.packages"),
        ({"packages": {"crosstrain": 1}}, "code.packages.crosstrain"),
        ({"packages": {"crosstrain": "1" * 5000}}, "code.packages.crosstrain"),
        ({"crosstrain": {"changed": True}}, "code.crosstrain.commit"),
        ({"crosstrain": {"commit": ["abc"]}}, "code.crosstrain.commit"),
        ({"typed_in": {"commit": "a" * 5000}}, "code.typed_in.commit"),
        ({"typed_in": {"commit": "abc", "changed": "perhaps"}}, "code.typed_in.changed"),
    ],
)
def test_show_names_damage_in_code_and_nodes(tmp_path, capsys, code, problem_text):
    text, document = shown_with(capsys, sync_run(tmp_path), nodes=[{}], code=code)
    (problem,) = document["damaged"]
    assert f"env.json: {problem_text}: " in problem
    assert "code: " not in text.replace(problem, "")
    assert max(map(len, text.splitlines())) < 1000


def test_show_escapes_control_characters_of_the_code(tmp_path, capsys):
    code = {"packages": {"crosstrain": "1\x1b[2J"}, "crosstrain": {"commit": "a\nb\x1b[31m", "changed": False}}
    text, _ = shown_with(capsys, sync_run(tmp_path), nodes=[{}], code=code)
    assert "\x1b" not in text
    assert sum(line.startswith("code:") for line in text.splitlines()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mode": "async", "ps": 2, "nodes": 3, "procs_per_node": 2, "global_batch_size": 100, "steps": 10},
        {"cores_per_node": [2, 0.5], "nodes": 2, "bandwidth": "100mbit", "tensorboard": False, "deterministic": True, "data_dir": "/a b/c"},
        {"optimizer": "adamw", "lr": 1e-3, "epsilon": 1e-7, "warmup_steps": 5, "until": "accuracy>=0.9", "name": "mine", "seed": 2**62},
    ],
)
def test_repeat_command_gives_the_same_job(tmp_path, fields, capsys):
    job = a_job(tmp_path, **fields)
    described = {**job.model_dump(mode="json"), "command": ["trainer"], "segments": []}
    command, subcommand, *options = shlex.split(repeat_command(described, os.environ))
    assert (command, subcommand) == ("trainer", "run")
    assert invoke(["run", *options, "--print-config", "--json"]) == 0
    again = {name: value["value"] for name, value in json.loads(capsys.readouterr().out).items() if name in Job.model_fields}
    place = {"out", "name"}
    assert Job.model_validate(again).model_dump(exclude=place) == job.model_dump(exclude=place)
