"""Slurm job scripts: what sbatch reads and what the shell runs, for any names."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from processes import wait_until

from crosstrain.cli.commands.submit import submit
from crosstrain.core.errors import UsageError
from crosstrain.launch.slurm_script import SlurmJob, script_text

ARGUMENTS = ["quickstart", "--nodes", "2", "--time", "10", "--name", "mine"]

GIVEN = st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))
"""What a word of a command line may have."""


@pytest.fixture
def submitted(tmp_path):
    """Return a function that runs the command in a new folder, with a fake sbatch there."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\ncp "$2" {tmp_path}/taken && echo 17\n')
    sbatch.chmod(0o700)
    environment = {**os.environ, "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}

    def submitting(*arguments):
        command = [sys.executable, "-m", "crosstrain.cli.main", "submit", "slurm", *ARGUMENTS, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)

    return submitting


def shown(*arguments):
    return CliRunner().invoke(submit, ["slurm", *arguments, "--dry-run"], standalone_mode=False)


def options(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_script_has_the_requested_options(tmp_path):
    more = ["--batch-size", "64", "--out", str(tmp_path), "--backend", "torch"]
    done = shown(
        "quickstart", "--nodes", "3", "--time", "2:00:00", "--name", "mine", "--partition", "long", "--sbatch", "gres=gpu:2", *more
    )
    assert done.exception is None, done.output
    assert options(done.output) == [
        "--job-name=mine",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--time=2:00:00",
        "--signal=B:USR1@120",
        "--requeue",
        "--open-mode=append",
        f'--output="{tmp_path}/mine-%j.log"',
        "--partition=long",
        "--gres=gpu:2",
    ]
    (line,) = [line for line in done.output.splitlines() if "crosstrain.cli.main" in line]
    command = shlex.split(line)
    assert command[1:6] == ["-P", "-m", "crosstrain.cli.main", "run", "--config"]
    assert command[6:-9] == ["quickstart", *more, "--checkpoint-every", "600s"]
    assert command[-9:] == ["--nodes", "3", "--launcher", "slurm", "--name", "mine", "--resume", "auto", "&"]
    assert not list(tmp_path.iterdir())


def test_array_has_a_run_per_task():
    text = script_text(SlurmJob("many", 2, "10", array="0-4"), ["trainer", "run"], "/runs/many-%A_%a.log")
    assert '--name many-"$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID" --resume auto' in text
    assert "--array=0-4" in options(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time", "soon"], "--time: got 'soon'"),
        (["--name", "a b"], "--name: got 'a b'"),
        (["--partition", "x\n#SBATCH --uid=0"], "--partition: got"),
        (["--sbatch", "comment=$(id)"], "--sbatch: got"),
        (["--array", "0-4;id"], "--array: got"),
        (["--sbatch", "time=5"], "--sbatch: got 'time=5', but the script says that itself: --time"),
        (["--sbatch", "--out=x"], "--sbatch: got '--out=x', but the script says that itself: --out is the folder of the log"),
        (["--sbatch", "nodes=1"], "--sbatch: got 'nodes=1', but the script says that itself: --nodes; nodes=N with a larger number"),
        (["--sbatch", "no-requeue"], "--sbatch: got 'no-requeue', but the script says that itself: its job goes back into the queue"),
        (["--sbatch", "-t5"], "--sbatch: got '-t5'; allowed: an option of sbatch by its long name, such as gres=gpu:2"),
        (["--sbatch", "--"], "--sbatch: got '--'; allowed"),
        (["--repeats", "3"], "--repeats: decided by the script of `trainer submit slurm`; --array 0-4 is a run for each of five seeds"),
        (["--config=other.toml"], "--config: decided by the script of `trainer submit slurm`; CONFIG, its first argument, says that"),
        (["--nodes", "3", "--hosts", "a,b"], "--hosts: decided by the script of `trainer submit slurm`"),
        (["--nodes", "3", "--notify=http://me:x@h"], "--notify: is not written into a script, which others may read; set its variable"),
        (["--batch-size", "none"], "--batch-size: got 'none'"),
        (["--out", "/tmp/%j"], "Slurm has a meaning of its own for %"),
        (["--array", "0-4", "--seed=7"], "--seed: got 7, but with --array each run has its task's number for a seed"),
        (["--time", "2"], "--warning: got '120'; allowed: less than half of the time limit, which is 120 s (--time 2)"),
        (["--print-config"], "--print-config: decided by the script of `trainer submit slurm`"),
        (["--secret-file", "/secret"], "--secret-file: decided by the script of `trainer submit slurm`"),
        (["--bandwidth", "100mbit"], "bandwidth: got '100mbit', which is for virtual nodes; these were started by Slurm"),
        (["--min-nodes", "1"], "--min-nodes: got '1', which does nothing"),
    ],
)
def test_invalid_sbatch_option_is_refused_immediately(arguments, message):
    done = shown("quickstart", "--nodes", "2", "--time", "10", "--name", "mine", *arguments)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("5", 300), ("5:31", 331), ("1:02:03", 3723), ("2-3", 183_600), ("1-02:03", 93_780), ("1-02:03:04", 93_784)],
)
def test_warning_leaves_time_for_progress(time, seconds):
    """Otherwise each job would save its results and requeue for ever."""
    with pytest.raises(UsageError, match=rf"--warning: got .* which is {seconds} s \(--time {time}\)"):
        SlurmJob("mine", 1, time, warning_seconds=(seconds + 1) // 2)
    assert SlurmJob("mine", 1, time, warning_seconds=(seconds - 1) // 2)
    assert SlurmJob("mine", 1, "0")  # none at all


def test_seed_unused_by_an_array_is_reported(monkeypatch):
    monkeypatch.setenv("TRAINER_SEED", "7")
    arguments = ["quickstart", "--nodes", "2", "--time", "10", "--name", "mine"]
    assert "seed: 7 (environment TRAINER_SEED) is not used" in shown(*arguments, "--array", "0-4").output
    assert "not used" not in shown(*arguments).output


def test_documentation_shows_the_printed_script(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('backend = "torch"\n')
    text = (repository / "docs/clusters.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^trainer submit slurm (mine\.toml .*) --dry-run ", text, re.MULTILINE)
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert shown(*command.split()).stdout.replace(str(tmp_path), "/home/you").replace(sys.executable, "/opt/env/bin/python") == block


@pytest.mark.parametrize(
    ("more", "outlives"), [([], False), (["--max-restarts", "3"], False), (["--max-restarts", "3", "--min-nodes", "1"], True)]
)
def test_failed_node_ends_the_job_unless_runs_may_shrink(more, outlives):
    """Slurm requeues such a job, and the next one has all nodes."""
    done = shown("quickstart", "--nodes", "2", "--time", "10", "--name", "mine", *more)
    assert ("--no-kill" in options(done.output)) == outlives


def test_further_sbatch_options_may_have_dashes():
    given_options = ("--gres=gpu:2", "mem=4G", "no-kill", "nodes=4", "--time-min=5", "nodelist=a,b")
    text = script_text(SlurmJob("mine", 3, "10", options=given_options), ["trainer", "run"], "/runs/log")
    assert options(text)[-6:] == ["--gres=gpu:2", "--mem=4G", "--no-kill", "--nodes=4", "--time-min=5", "--nodelist=a,b"]


@given(st.lists(st.binary(max_size=12).map(lambda word: os.fsdecode(word.replace(b"\0", b""))) | st.text(GIVEN, max_size=12), max_size=4))
def test_any_arguments_stay_one_command(words):
    """The shell passes each word unchanged, also if it is no text; the script is printable."""
    text = script_text(SlurmJob("mine", 1, "10"), ["printf", "%s\\0", *words], "/runs/log")
    line = text[text.index("printf") :].partition(" --nodes 1 --launcher slurm")[0]
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert os.fsdecode(done.stdout).split("\0")[:-1] == (words or [""])
    assert text.replace("\n", "").isprintable()
    assert text.encode().decode() == text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def catches(pid, number):
    """Return whether a process has a handler for a signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_job_is_requeued_on_time_limit_not_on_cancel(tmp_path, number, requeued):
    """The run exits with 75 in both cases."""
    requested = tmp_path / "asked"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {requested}\nexit 1\n')
    scontrol.chmod(0o700)
    run = ["bash", "-c", "trap 'exit 75' USR1; echo begun; while :; do sleep 0.05; done"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    text = script_text(SlurmJob("mine", 1, "10"), run, "/runs/log")
    with subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, env=environment, text=True) as job:
        assert job.stdout.readline() == "begun\n"
        wait_until(lambda: catches(job.pid, signal.SIGTERM), 10, "the last trap, which the script sets after the start of the run")
        job.send_signal(number)
        assert job.wait(10) == 75
    assert (requested.read_text() if requested.exists() else None) == ("requeue 7\n" if requeued else None)


@pytest.mark.quick_cases("folder")
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_script_is_not_written_through_links(submitted, tmp_path, kind):
    place, victim = tmp_path / "runs" / "mine.sbatch", tmp_path / "victim"
    place.parent.mkdir()
    victim.write_text("precious")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(victim if kind == "link" else tmp_path / "nothing")
    done = submitted("--out", "runs")
    assert done.returncode == 2
    assert done.stderr.decode() == (
        f"error: --name: {str(place)!r}, where the script belongs, is no regular file; remove it, or give another --name\n"
    )
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "taken").exists()
    assert os.listdir(place.parent) == ["mine.sbatch"]


@pytest.mark.thorough
def test_earlier_script_is_replaced_but_no_hard_link(submitted, tmp_path):
    place, other_link = tmp_path / "runs" / "mine.sbatch", tmp_path / "other"
    assert submitted("--out", "runs").stdout == f"job 17: {place}\n".encode()
    first = place.read_text()
    os.link(place, other_link)
    assert submitted("--out", "runs", "--seed", "5").returncode == 0
    assert other_link.read_text() == first
    assert "--seed 5" in place.read_text()
    assert os.listdir(place.parent) == ["mine.sbatch"]


@pytest.mark.thorough
def test_dry_run_equals_the_submission(submitted, tmp_path):
    names = [b"d\x80", "é".encode(), b"\x1b[31mred", b"two\nlines\x7f", "\u202e".encode(), b"it's"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(b"batch_size = 7\n")
        readable = name.decode(errors="replace").encode() == name  # settings are UTF-8, as records store them
        arguments = ("--out", "runs", "--python", name, *(("--data-dir", name) if readable else ()))
        dry, done = submitted(*arguments, "--dry-run"), submitted(*arguments)
        assert (dry.returncode, done.returncode) == (0, 0), done.stderr
        assert dry.stdout == (tmp_path / "taken").read_bytes()
        if readable:
            line = dry.stdout[dry.stdout.index(b" --data-dir ") :].partition(b" --checkpoint-every")[0]
            assert subprocess.run([b"bash", b"-c", b"printf '%s\\0'" + line], capture_output=True).stdout == b"--data-dir\0" + name + b"\0"
    assert submitted("--out", "runs", "--data-dir", names[0]).returncode == 2
    refused = submitted("--out", b"r\x80")
    assert refused.returncode == 2
    assert b"which cannot stand in a script for sbatch" in refused.stderr


def test_folder_that_cannot_be_made_is_named(submitted, tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = submitted("--out", "runs")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1
