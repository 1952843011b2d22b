"""The command line for users: output streams, exit codes and messages."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import click
import psutil
import pytest

from crosstrain.cli.commands.run import note_lone_exchange, run
from crosstrain.cli.group import COMMANDS, load_command
from crosstrain.cli.main import main
from crosstrain.cli.run_request import TypedRun
from crosstrain.core.job import Job
from crosstrain.core.plugins import available
from crosstrain.core.settings.job_fields import flag_name, is_boolean
from crosstrain.core.settings.personal import PERSONAL_OPTIONS

TRAINER = [sys.executable, "-m", "crosstrain.cli.main"]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TRAINER_") and name != "TRAINER_DATA_CACHE":
            monkeypatch.delenv(name)


def call(capsys, *arguments):
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(("typed", "waits"), [([], "0.5"), (["--start-timeout", "0.25"], "0.25")])
@pytest.mark.parametrize("below", ["", "elsewhere"])
def test_node_of_resumed_run_uses_its_start_timeout(capsys, monkeypatch, tmp_path, typed, waits, below):
    monkeypatch.setenv("TRAINER_SECRET", "x" * 32)
    monkeypatch.setenv("TRAINER_OUT", str(tmp_path / below))
    folder = tmp_path / below / "mine"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"schema": 1, **Job(start_timeout=0.5).model_dump(mode="json")}))
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, err = call(capsys, "run", "--resume", "mine", "--rendezvous", f"127.0.0.1:{port}", "--node-rank", "1", *typed)
    assert code == 1
    assert f"within {waits} s (--start-timeout)" in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("repeats", "message", "settings"),
    [
        (2, "run 2 (seed 4) was not started. To start it: ", {"seed": 4, "name": "my job-r2"}),
        (4, "runs 2 to 4 (seeds 4 to 6) were not started. To start them: ", {"seed": 4, "name": "my job-from-r2"}),
    ],
)
def test_failed_repeats_report_how_to_start_the_rest(tmp_path, repeats, message, settings):
    arguments = ["run", "--cores-per-node", "4000", "--seed", "3", "--name=my job", f"--repeats={repeats}", "--out", str(tmp_path / "it's")]
    done = subprocess.run([*TRAINER, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert f"trainer: run 1 of {repeats} did not succeed, and {message}trainer run --cores-per-node 4000 --out " in line
    again = shlex.split(line.partition("To start ")[2].partition(": ")[2])
    assert again[0] == "trainer"
    shown = subprocess.run([*TRAINER, *again[1:], "--print-config", "--json"], capture_output=True, text=True, timeout=100, check=True)
    values = {name: entry["value"] for name, entry in json.loads(shown.stdout).items()}
    assert {name: values[name] for name in settings} == settings
    assert values["out"] == str(tmp_path / "it's")
    assert ("--repeats" in again) == (repeats > 2)
    if repeats > 2:
        assert again[again.index("--repeats") + 1] == str(repeats - 1)


def test_help_and_version_import_no_subcommands_or_libraries():
    script = (
        "import sys; from crosstrain.cli.main import main; assert main(['--help']) == 0; assert main(['--version']) == 0;"
        "print(sorted({'pydantic', 'numpy', 'rich', 'psutil', 'crosstrain.core.job', 'tensorflow', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"  {name} " in done.stdout and summary in done.stdout for name, summary in COMMANDS.items())


LOADED_WHERE_THEY_ARE_USED = {"matplotlib", "plotly", "pyroute2", "scipy", "pyarrow", "duckdb", "ray", "tensorflow", "torch"}
"""Libraries that take long to import, which no command needs before it does what it needs them for."""


def test_commands_load_without_slow_libraries():
    loaded = "".join(f"load_command({name!r}); " for name in COMMANDS if name != "plot")  # plot draws with matplotlib
    script = f"""
import sys; from crosstrain.cli.group import load_command; load_command("run"); print("rich" in sys.modules); {loaded}
import crosstrain.report.pages.live_server, crosstrain.launch.node.supervisor
print(sorted({LOADED_WHERE_THEY_ARE_USED} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n[]\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "job", "noted"),
    [
        (["--exchange", "direct"], {}, True),
        (["--exchange", "direct"], {"nodes": 2}, False),
        (["--exchange", "native"], {}, False),
        ([], {"exchange": "direct"}, False),
    ],
)
def test_a_direct_exchange_with_one_worker_is_noted(arguments, job, noted, capsys):
    typed = TypedRun(run.make_context("run", arguments), None, None, None, None, None, {}, quiet=False)
    note_lone_exchange(typed, Job(**job))
    assert capsys.readouterr().err == ("exchange: direct has no effect with one worker\n" if noted else "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_loads_and_has_help(capsys, name):
    command = load_command(name)
    assert isinstance(command, click.Command)
    assert command.name == name
    code, out, err = call(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: trainer {name} ")


def test_run_has_option_with_help_and_default_for_every_field(capsys):
    options = {option.name: option for option in load_command("run").params}
    for field, info in Job.model_fields.items():
        assert options[field].opts == [flag_name(field)]
        assert options[field].help.startswith(info.description)
        if is_boolean(field):
            assert options[field].secondary_opts == [f"--no-{flag_name(field)[2:]}"]
        elif info.default is not None:
            assert options[field].help.endswith(f"[default: {info.default}]")


def test_missing_command_shows_help_and_fails(capsys):
    code, out, err = call(capsys)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: trainer ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "error: got 'rnu'; there is no such command; allowed: run, "),
        (
            ["run", "--batchsize", "3"],
            "error: --batchsize: `trainer run` has no such option. Did you mean '--batch-size'? See `trainer run --help`.",
        ),
        (["run", "extra"], "error: Got unexpected extra argument (extra). See `trainer run --help`."),
        (["run", "--batch-size"], "error: Option '--batch-size' requires an argument. See `trainer run --help`."),
        (["run", "--out", ""], "error: --out: got ''; allowed: a path, such as . for this folder."),
        (["run", "--data-dir", ""], "error: --data-dir: got ''; allowed: a path, such as . for this folder."),
        (["run", "--config", ""], "error: --config: got ''; allowed: the path of a TOML file, or a shipped one: "),
        (["run", "--resume", ""], "error: Invalid value for '--resume': '' is no path; this folder is '.'. See `trainer run --help`."),
        (["evaluate", ""], "error: Invalid value for 'RUN|CHECKPOINT': '' is no path; this folder is '.'."),
        (["run", "--model", "."], "error: --model: got '.'; allowed: logreg, "),
        (["run", "--model", "..a"], "error: --model: got '..a'; allowed: logreg, "),
        (["run", "--mlflow-experiment", ""], "error: --mlflow-experiment: got ''; allowed: text of 1 to 500 characters."),
        (
            ["run", "--backend", "tf", "--batch-size", "0"],
            "error: --batch-size: got '0'; allowed: a whole number of at least 1 and at most",
        ),
        (["run", "--repeats", "99999999999"], "error: Invalid value for '--repeats': 99999999999 is not in the range 1<=x<=10000."),
        (["run", "--backend", "jax"], "error: --backend: got 'jax'; allowed: auto, tf, torch"),
        (["compare", "x", "--curves", "loss", "--smooth", "nan"], "error: Invalid value for '--smooth': 'nan' is not in the range 0<=x<1."),
        (
            ["compare", "x", "--curves", "loss", "--smooth", ".0_5"],
            "error: Invalid value for '--smooth': '.0_5' is not in the range 0<=x<1.",
        ),
        (
            ["run", "--model", "transformer:tiny?dropout=1", "--data", "numbers", "--print-config"],
            "error: --model: dropout of 'transformer': got '1'; allowed: a number from 0 up to, but not including, 1.",
        ),
        (["run", "--model", "alexnett"], "error: --model: got 'alexnett'; allowed: "),
    ],
)
def test_usage_error_is_one_line_and_exit_2(capsys, arguments, expected):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(expected)
    assert err.count("\n") == 1


def test_print_config_shows_values_and_sources(capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_LR", "0.25")
    code, out, err = call(capsys, "run", "--config", "quickstart", "--backend", "torch", "--no-monitor", "--print-config")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert list(rows) == [*Job.model_fields, *PERSONAL_OPTIONS]
    assert rows["backend"] == ['"torch"', "flag"]
    assert rows["lr"] == ["0.25", "environment TRAINER_LR"]
    assert rows["nodes"] == ["3", "file quickstart.toml (shipped)"]
    assert rows["monitor"] == ["false", "flag"]
    assert rows["steps"] == ["null", "default"]


def test_print_config_as_json(capsys):
    code, out, _ = call(capsys, "run", "--backend", "tf", "--cores-per-node", "2", "--print-config", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["cores_per_node"] == {"value": [2.0], "source": "flag"}
    assert Job.model_validate({key: shown[key]["value"] for key in Job.model_fields}).backend == "tf"


def test_models(capsys):
    code, out, _ = call(capsys, "models", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert set(rows) == set(available("model"))
    assert rows["logreg"]["parameters"] == 10 * 64 + 10
    assert rows["logreg"]["backends"] == ["tf", "torch"]
    assert [name for name, row in rows.items() if row["problem"] is not None] == []
    transformer = rows["transformer"]
    assert (transformer["parameters"], transformer["parameters_data"]) == (512 * 8000 + 44_103_680, "text of 8,000 pieces")
    text = call(capsys, "models")[1]
    assert "650 parameters on digits; backends: tf, torch" in text
    assert "Multinomial logistic regression: one dense layer and a softmax." in text
    assert "?" not in text


def test_closed_pipe_ends_command_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run([*TRAINER, "run", "--backend", "tf", "--print-config"], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_ends_command_with_130_and_one_line():
    command = subprocess.Popen(
        [*TRAINER, "backends", "--fresh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not psutil.Process(command.pid).children():
        assert command.poll() is None
        time.sleep(0.01)
    os.killpg(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (130, "")
    assert err.strip() == "error: interrupted"


@pytest.mark.parametrize("library", ["click", "pydantic"])
def test_ctrl_c_during_import_ends_with_130(tmp_path, library):
    """The first library on the path simulates one with a long import."""
    (tmp_path / f"{library}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n")
    done = subprocess.run([*TRAINER, "run"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


AGES = """
import time
from crosstrain.core.process import process_age_seconds
def birth():  # of the reading that took the shortest time
    readings = [(time.monotonic(), process_age_seconds(), time.monotonic()) for _ in range(50)]
    began, age, ended = min(readings, key=lambda reading: reading[2] - reading[0])
    return began - age
first = birth()
time.sleep(0.5)
print(birth() - first, process_age_seconds())
"""


def test_age_of_a_process_is_exact():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", AGES], capture_output=True, text=True, check=True)
    error, age = map(float, done.stdout.split())
    assert abs(error) < 0.1
    assert 0.5 <= age <= time.monotonic() - began + 0.02


def test_interrupt_in_exec_of_library_ends_with_130(tmp_path):
    (tmp_path / "pydantic.py").write_text("exec('raise KeyboardInterrupt')\n")
    done = subprocess.run([*TRAINER, "run"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "error: interrupted")


def test_shell_completion_lists_commands_and_options():
    environ = {**os.environ, "_TRAINER_COMPLETE": "bash_complete"}

    def complete(words, position):
        variables = {**environ, "COMP_WORDS": words, "COMP_CWORD": str(position)}
        return subprocess.run(TRAINER, env=variables, capture_output=True, text=True).stdout.split()

    assert complete("trainer do", 1) == ["plain,doctor"]
    assert complete("trainer run --glob", 2) == ["plain,--global-batch-size"]


@pytest.mark.parametrize("more", [(), ("--launcher", "local"), ("--repeats", "2")])
def test_unused_secret_file_is_refused(capsys, tmp_path, more):
    arguments = ["run", "--backend", "torch", "--secret-file", str(tmp_path / "secret"), "--out", str(tmp_path / "runs"), *more]
    code, output, errors = call(capsys, *arguments)
    assert (code, output) == (2, "")
    assert "--secret-file: this run starts all of its nodes itself" in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("/dev/zero", "is a device, not a file"),
        ("/dev/urandom", "is a device, not a file"),
        ("pipe", "is a pipe, not a file"),
        ("folder", "is a folder, not a file"),
        ("huge", "has more than 4096 bytes"),
        ("none", "cannot read"),
        ("bytes", "is no text"),
        ("short", "a shared secret of at least 16 characters is needed"),
    ],
)
def test_invalid_secret_file_is_refused_within_bounds(tmp_path, kind, message):
    place = tmp_path / kind.removeprefix("/dev/")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "huge":
        place.touch()
        os.truncate(place, 1 << 40)
    elif kind in ("bytes", "short"):
        place.write_bytes(b"\xff" * 30 if kind == "bytes" else b"short")
    elif kind != "none":
        place.symlink_to(kind)
    arguments = [
        "run",
        "--backend",
        "torch",
        "--nodes",
        "2",
        "--rendezvous",
        "127.0.0.1:1",
        "--node-rank",
        "0",
        "--secret-file",
        str(place),
    ]
    limited = ["bash", "-c", 'ulimit -v 2000000; exec "$@"', "bash", *TRAINER, *arguments, "--out", str(tmp_path / "runs")]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert kind == "short" or repr(str(place)) in done.stderr


SECRET_FILE = ("--secret-file", "none")
"""Refused only after the place of the process is known."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "trainer run --backend torch --nodes 2 --procs-per-node 2 --rendezvous n7:29400 --node-rank $SLURM_NODEID"),
        (("run", *SECRET_FILE), "Slurm started 4"),
        (("run", "--launcher", "local", *SECRET_FILE), "--secret-file: this run"),
        (("run", "--nodes", "2", "--rendezvous", "127.0.0.1:1", "--node-rank", "0", *SECRET_FILE), "--secret-file: cannot read"),
        (("sweep", "--grid", "seed=1,2"), "Slurm started 4"),
    ],
)
def test_slurm_step_of_several_tasks_needs_rendezvous(capsys, monkeypatch, tmp_path, arguments, message):
    for name, value in {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[7-8]"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    code, _, errors = call(capsys, arguments[0], "--backend", "torch", *arguments[1:])
    assert code == 2
    assert message in errors
    assert list(tmp_path.iterdir()) == []


def test_incomplete_rank_variables_are_refused_except_local(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    code, _, errors = call(capsys, "run", "--backend", "torch")
    assert code == 2
    assert "RANK WORLD_SIZE" in errors
    assert "not MASTER_ADDR MASTER_PORT;" in errors
    code, _, errors = call(capsys, "run", "--backend", "torch", "--launcher", "local", *SECRET_FILE)
    assert "--secret-file: this run" in errors


def test_rendezvous_without_nodes_is_refused(capsys):
    code, _, err = call(capsys, "run", "--backend", "torch", "--rendezvous", "127.0.0.1:29400", "--node-rank", "0")
    assert code == 2
    assert err == ("error: --rendezvous: this node would train alone, as nothing says how many there are; give --nodes on each of them\n")


def test_node_0_must_have_rendezvous_address(capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "x" * 32)
    arguments = ["run", "--backend", "torch", "--nodes", "2", "--rendezvous", "192.0.2.1:29400", "--node-rank", "0"]
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert "cannot listen for the other nodes on 192.0.2.1, port 29400" in err
    assert "; node 0 has to have this address" in err
