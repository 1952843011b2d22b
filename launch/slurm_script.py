"""The script of a Slurm job for a run, requeued with a checkpoint at its time limit."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import UsageError

_TIME = re.compile(r"(?:\d{1,4}-)?\d{1,5}(?::\d{1,2}){0,2}")  # [days-]minutes[:seconds] or hours:minutes:seconds; see sbatch(1)
_ARRAY = re.compile(r"[0-9,:%-]{1,200}")
_NAME = re.compile(r"[\w.+-]{1,100}", re.ASCII)
_WORD = re.compile(r"[\w.:/=,+@%-]{1,200}", re.ASCII)  # text in a line for sbatch: no space, and nothing special in a shell
_RESERVED = {
    "job-name": "--name",
    "nodes": "--nodes; nodes=N with a larger number has spare ones too",
    "ntasks": "one task a node, which starts the node's processes (--procs-per-node)",
    "ntasks-per-node": "one task a node, which starts the node's processes (--procs-per-node)",
    "time": "--time",
    "signal": "--warning",
    "requeue": "its job goes back into the queue until the run has ended",
    "no-requeue": "its job goes back into the queue until the run has ended",
    "open-mode": "each job of the run appends to the same log",
    "output": "--out is the folder of the log, --name its name",
    "partition": "--partition",
    "array": "--array",
}  # options of sbatch that the script sets, and what determines each


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job; `options` are further sbatch options by long name.

    `name` is that of run and job; in an array each task's run has the task's number as suffix and seed. The signal comes `warning_seconds`
    before the end of `time`, for the checkpoint. `outlives_nodes`: the run can resume on fewer nodes, so Slurm does not requeue it.
    """

    name: str
    nodes: int
    time: str
    warning_seconds: int = 120
    partition: str | None = None
    array: str | None = None
    options: tuple[str, ...] = ()
    outlives_nodes: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError.of("--name", self.name, "letters, digits and ._+-, as it is the job's name too")
        if not _TIME.fullmatch(self.time):
            raise UsageError.of("--time", self.time, "minutes, or hours:minutes:seconds, such as 2:00:00, with days before: 1-12:00:00")
        if 0 < (limit := _seconds(self.time)) <= 2 * self.warning_seconds:
            allowed = f"less than half of the time limit, which is {limit} s (--time {self.time}), so that each job gets on"
            raise UsageError.of("--warning", self.warning_seconds, allowed)
        if self.array is not None and not _ARRAY.fullmatch(self.array):
            raise UsageError.of("--array", self.array, "numbers of tasks, such as 0-4 or 0-9%2")
        for option, text in (("--partition", self.partition), *(("--sbatch", text) for text in self.options)):
            if text is not None and not _WORD.fullmatch(text):
                raise UsageError.of(option, text, "letters, digits and .:/=,+@%- without a space")
        for text in self.options:
            self._refuse_reserved(text)

    def _refuse_reserved(self, text: str) -> None:
        if re.match(r"-[^-]|-*(=|$)", text):
            raise UsageError.of("--sbatch", text, "an option of sbatch by its long name, such as gres=gpu:2")
        name, _, value = text.lstrip("-").partition("=")
        reserved = name if name in _RESERVED else next((option for option in _RESERVED if option.startswith(name)), None)
        if reserved is None or (
            reserved == "nodes" and (at_least := re.match(r"\d+", value)) is not None and int(at_least[0]) >= self.nodes
        ):
            return
        raise UsageError(f"--sbatch: got {text!r}, but the script says that itself: {_RESERVED[reserved]}")


def _seconds(time: str) -> int:
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # minutes come first
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\{byte:03o}" for byte in os.fsencode(word)) + "'"


def script_text(job: SlurmJob, command: Sequence[str], log: str) -> str:
    """Return the script. `command` is ``trainer run`` without name, nodes and resume options.

    `log` is the output file with Slurm's placeholders (``%j``). Raises UsageError if sbatch cannot read it.
    """
    if not log.isprintable() or '"' in log or "\\" in log:
        raise UsageError(
            f"out: got {log!r}, which cannot stand in a script for sbatch; choose a folder of text without quotes and line ends"
        )
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--time={job.time}"]
    options += [f"--signal=B:USR1@{job.warning_seconds}", "--requeue", "--open-mode=append", f'--output="{log}"']
    options += ["--no-kill"] if job.outlives_nodes else []
    options += [f"--partition={job.partition}"] if job.partition is not None else []
    options += [f"--array={job.array}"] if job.array is not None else []
    options += [f"--{option.lstrip('-')}" for option in job.options]
    name = shlex.quote(job.name)
    if job.array is not None:
        name = f'{name}-"$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID"'
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""#!/bin/bash
{lines}

# Slurm signals this shell before the time is up. The run then saves a checkpoint and ends with 75, the job goes back into the queue, and
# the same command goes on with the run in the same directory. Any other end is the job's.
{" ".join(map(_quoted, command))} --nodes {job.nodes} --launcher slurm --name {name} --resume auto &
run=$! warned=
trap 'warned=1; kill -USR1 "$run" 2>/dev/null' USR1
trap 'kill -USR1 "$run" 2>/dev/null' TERM # of scancel, or of Slurm where it puts the job back itself
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do # a signal has ended the wait, not the run
    wait "$run"
    code=$?
done
if [ "$code" = 75 ] && [ -n "$warned" ]; then
    job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
    job=${{job:-$SLURM_JOB_ID}}
    if command -v scontrol >/dev/null; then
        scontrol requeue "$job" && sleep 60 # until Slurm ends this shell
    else
        echo "no scontrol here: submit this script again, or have Slurm requeue jobs that end with 75 (RequeueExit)" >&2
    fi
fi
exit "$code"
"""
