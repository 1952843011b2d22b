"""Messages of commands when standard output or standard error cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import make_run

from crosstrain.cli.group import invoke
from crosstrain.cli.streams import _Output
from crosstrain.core.errors import OutputError
from crosstrain.records.store.run_directory import RunReader

TRAINER = [sys.executable, "-m", "crosstrain.cli.main"]
REFUSED = "error: standard output cannot be written ({}); what was to be printed there is not whole.\n"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    for name in ("one", "two"):
        make_run(folder, name, steps=40, calibrated=True)
    return folder


def on_full_device(arguments, cwd):
    with open("/dev/full", "wb") as full:
        return subprocess.run([*TRAINER, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, cwd=cwd)


@pytest.mark.quick_cases("--help")
@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "runs --out . --json",
        "runs show one --out .",
        "compare one two --out .",
        "compare one two --out . --curves loss --over seconds --points 30000",
        "explain one --out .",
        "watch one --out . --json",
        "runs export one --out . --what steps -o -",
        "run --backend torch --print-config --json",
    ],
)
def test_full_device_gives_one_line_and_exit_1(out, command):
    done = on_full_device(command.split(), out)
    assert (done.returncode, done.stderr) == (1, REFUSED.format("No space left on device"))


@pytest.mark.thorough
def test_closed_standard_output_is_reported(out):
    script = ["sh", "-c", f"{' '.join(TRAINER)} compare one two --out . >&-"]
    done = subprocess.run(script, stderr=subprocess.PIPE, text=True, cwd=out)
    assert (done.returncode, done.stderr) == (1, REFUSED.format("Bad file descriptor"))


@pytest.mark.thorough
def test_reader_of_one_line_is_no_error(out):
    command = [*TRAINER, *["compare", "one", "two", "--out", ".", "--curves", "loss", "--over", "seconds", "--points", "30000"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out) as pipe:
        assert pipe.stdout.readline() == "seconds,one,two\n"
        pipe.stdout.close()
        assert (pipe.stderr.read(), pipe.wait()) == ("", 1)


COPY = "standard output cannot be written ({}); the exit code is that of the work, which is complete\n"


@pytest.mark.thorough
@pytest.mark.parametrize("refusal", ["Bad file descriptor", "No space left on device", "Broken pipe"])
@pytest.mark.parametrize("command", ["runs export one --out . --what steps --overwrite -o {}/steps.csv", "plot one --out . -o {}/figures"])
def test_files_written_keep_the_exit_code(out, tmp_path, command, refusal):
    assert run_refused(command.format(tmp_path).split(), out, refusal) == (0, COPY.format(refusal))
    assert any(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(("more", "code", "end"), [((), 0, ""), (("--model", "cnn", "--lr", "1e30", "--json"), 1, "error: ")])
def test_run_keeps_its_exit_code_without_a_summary(tmp_path, more, code, end):
    arguments = ["run", "--backend", "torch", "--steps", "40", "--no-calibrate", "--quiet", "--name", "one", "--out", str(tmp_path), *more]
    exit_code, output = run_refused(arguments, tmp_path, "Broken pipe")
    assert exit_code == code == RunReader(tmp_path / "one").status()["exit_code"]
    assert output.startswith(COPY.format("Broken pipe") + end)


def run_refused(arguments, cwd, refusal):
    """Run a command whose standard output refuses data; return its exit code and standard error."""
    script = {
        "Bad file descriptor": '"$@" >&-',
        "No space left on device": '"$@" >/dev/full',
        "Broken pipe": '{ "$@"; echo $? >code; } | true',
    }
    done = subprocess.run(["sh", "-c", script[refusal], "sh", *TRAINER, *arguments], stderr=subprocess.PIPE, text=True, cwd=cwd)
    return int((cwd / "code").read_text()) if refusal == "Broken pipe" else done.returncode, done.stderr


@pytest.mark.thorough
def test_run_continues_when_nobody_reads_its_messages(tmp_path):
    """As behind ``2>&1
    tee``, which Ctrl-C ends too.
    """
    command = [*TRAINER, "run", "--backend", "torch", "--steps", "40", "--no-calibrate", "--name", "one", "--out", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline()
        process.stderr.close()
        assert process.wait(120) == 1  # the code for lost messages
    assert RunReader(tmp_path / "one").status()["state"] == "succeeded"


@pytest.mark.thorough
def test_unwritable_messages_keep_the_exit_code(out):
    with open("/dev/full", "wb") as full:
        codes = [
            subprocess.run([*TRAINER, *command], stdout=subprocess.DEVNULL, stderr=full, cwd=out).returncode
            for command in (["compare", "nothing"], ["runs", "--out", ".", "--where", "accuracy>2"], ["runs", "--out", ".", "--wide"])
        ]
    assert codes == [2, 1, 0]


@pytest.mark.parametrize("command", [["report", "one", "-o"], ["runs", "export", "one", "--what", "steps", "--overwrite", "-o"]])
def test_pipe_is_refused_as_an_output_file(out, tmp_path, capsys, command):
    """A device would have been replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert invoke([*command, str(pipe), "--out", str(out)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: --output: {str(pipe)!r} is a device or a pipe, and a file is to be written. Give another name.\n"
    )
    assert pipe.is_fifo()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40_000), max_size=5))
def test_refused_write_is_raised_once_for_any_sizes(sizes):
    """The interpreter's last flush finds the rest of the refused data, and raises nothing."""
    with open("/dev/full", "wb", buffering=0) as full:
        raw = _Output(full.fileno())
        raised = 0
        for size in sizes:
            try:
                raw.write(bytes(size))
            except OutputError:
                raised += 1
        assert raised == min(len(sizes), 1)
