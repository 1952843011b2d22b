"""``trainer submit``: submits a run to a batch system, which resumes it."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import click

from ...core.console import note
from ...core.drafts import replacing
from ...core.errors import RunFailedError, UsageError, writing
from ...core.process import python as python_command
from ...core.settings.sources import Resolved
from ...core.topics import Topic
from ...launch.launchers.ssh import refuse_virtual_nodes
from ...launch.slurm_script import SlurmJob, script_text
from ..group import GroupedCommand, topic_option
from ..options import GivenPath, IntegerRange
from ..streams import output_is_a_copy
from .batched_run import CHECKPOINTS, check_settings


@click.group("submit", short_help="Submit a run to a batch system.")
def submit() -> None:
    """Submit a run to a batch system, which resumes it as often as necessary."""


@submit.command(
    "slurm",
    cls=GroupedCommand,
    short_help="Write and submit a Slurm job script.",
    context_settings={"ignore_unknown_options": True},
    epilog="What follows the options is given to `trainer run`: trainer submit slurm quickstart --nodes 3 --time 10 --batch-size 64",
)
@click.argument("config", metavar="CONFIG")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF RUN]")
@topic_option(Topic.COMMON, "--nodes", type=IntegerRange(1), required=True, help="Number of nodes of the job and the run.")
@topic_option(
    Topic.COMMON, "--time", "time_limit", required=True, metavar="H:MM:SS", help="Time limit of each job; a run may take several jobs."
)
@topic_option(Topic.COMMON, "--name", required=True, help="Name of the run; each job finds it by this name.")
@topic_option(Topic.CLUSTER, "--partition", help="Slurm partition.")
@topic_option(
    Topic.CLUSTER, "--array", metavar="0-4", help="Job array: one run per task, with the task's number in its name and as its seed."
)
@topic_option(Topic.CLUSTER, "--sbatch", "options", multiple=True, metavar="OPTION", help="Another option of sbatch, such as gres=gpu:2.")
@topic_option(
    Topic.CHECKPOINTS,
    "--warning",
    "warning_seconds",
    type=IntegerRange(10, 86_400),
    default=120,
    show_default=True,
    help="Seconds before the time limit at which the run saves a checkpoint and ends.",
)
@topic_option(Topic.CLUSTER, "--python", type=GivenPath(), help="The interpreter on the nodes. [default: the path of this one]")
@topic_option(Topic.OUTPUT, "--dry-run", is_flag=True, help="Print the script, and submit nothing.")
def submit_slurm(
    config: str,
    more: tuple[str, ...],
    nodes: int,
    time_limit: str,
    name: str,
    partition: str | None,
    array: str | None,
    options: tuple[str, ...],
    warning_seconds: int,
    python: Path | None,
    dry_run: bool,
) -> None:
    """Write and submit the script of a Slurm job that trains CONFIG.

    CONFIG is a file, or the name of a shipped one. Before the time limit the run saves a checkpoint and ends, and the job is requeued: the
    next one resumes in the same run directory. The script is kept next to the runs, as NAME.sbatch.
    """
    resolved = check_settings("the script of `trainer submit slurm`", config, more, nodes, name, os.environ)
    job = resolved.job
    if array is not None:
        _refuse_seed(resolved)
    refuse_virtual_nodes(job, "Slurm")
    fewer = job.max_restarts > 0 and job.min_nodes is not None and job.min_nodes < nodes
    slurm_job = SlurmJob(name, nodes, time_limit, warning_seconds, partition, array, options, outlives_nodes=fewer)
    out = job.out.absolute()
    if "%" in str(out):
        raise UsageError(f"out: got {str(out)!r}; Slurm has a meaning of its own for % in the name of a log, choose another folder")
    whole = os.path.abspath(config) if Path(config).exists() else config
    command = python_command("crosstrain.cli.main", "run", "--config", whole, *more, interpreter=None if python is None else str(python))
    if job.saved_every is None:
        command += ["--checkpoint-every", CHECKPOINTS]
    text = script_text(slurm_job, command, str(out / f"{name}-{'%A_%a' if array else '%j'}.log"))
    if dry_run:
        click.echo(text, nl=False)
        return
    output_is_a_copy()
    program = shutil.which("sbatch")
    if program is None:
        raise UsageError("submit: needs the program sbatch, which is not on PATH; type it where Slurm is (--dry-run prints the script)")
    script = out / f"{name}.sbatch"
    _write(script, text)
    done = subprocess.run([program, "--parsable", str(script)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RunFailedError(f"sbatch has refused {shlex.quote(str(script))}: {done.stderr.strip()[-2000:]}")
    number = done.stdout.strip().partition(";")[0]
    click.echo(f"job {number}: {script}")
    click.echo(f"the run: {out / name}; trainer watch {out / name}", err=True)


def _write(script: Path, text: str) -> None:
    with writing(script):
        script.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(script) and not stat.S_ISREG(os.lstat(script).st_mode):
            raise UsageError(f"--name: {str(script)!r}, where the script belongs, is no regular file; remove it, or give another --name")
        with replacing(script) as draft:
            draft.write_text(text, encoding="utf-8")


def _refuse_seed(resolved: Resolved) -> None:
    seed, source = resolved.job.seed, resolved.sources["seed"]
    why = "with --array each run has its task's number for a seed"
    if source == "flag":
        raise UsageError(f"--seed: got {seed}, but {why}; leave one of the two out")
    if source != "default":
        note(f"seed: {seed} ({source}) is not used, as {why}")
