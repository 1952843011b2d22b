"""``trainer diverge``: where two trainings part, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from ...checkpoint import list_checkpoints
from ...core.console import json_text, note
from ...core.errors import DiskError, UsageError
from ...core.job import Job
from ...core.settings.job_fields import fields_with_role
from ...core.settings.sources import resolve
from ...data.store.stored_dataset import open_dataset
from ...launch.driver.resumption import earlier_run
from ...launch.node.scratch import make_scratch, remove_scratch
from ...lockstep.compare import Comparer
from ...lockstep.jobs import differing_settings, expected_differences, on_this_machine, refuse_uncomparable, with_settings
from ...lockstep.recorded import is_recording
from ...lockstep.recordings import compare_recordings
from ...lockstep.text import sentence, text
from ...models.build import build_model, written_out
from ...records.store.jsonl import finite_json
from ...records.store.lockstep_results import Comparison
from ...records.store.run_directory import RunReader, write_diverged
from ...report.runs.locate import find_run
from ..interrupts import TerminationAsInterrupt
from ..options import IntegerRange, out_option, trust_option
from ..streams import echo_wrapped

MAX_UPTO = 1_000_000
PYTHON = "python"  # of ``--with``; any other name is a setting


@click.command(short_help="Find where two trainings part, and why.")
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="[RUN]", required=False)
@click.option("--with", "changes", multiple=True, metavar="SETTING=VALUE", help="Compare the run with itself under this; repeatable.")
@click.option("--upto", type=IntegerRange(0, MAX_UPTO), default=64, show_default=True, help="Last update that is probed, counted from 0.")
@out_option("Folder for run directories.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@trust_option("Compare")
def diverge(first: str, second: str | None, changes: tuple[str, ...], upto: int, out: Path, as_json: bool, trust_run: bool) -> None:
    """Find the update, the layer and the cause at which two trainings part beyond rounding.

    Both sides make single updates from equal states of the first run: 1, 2, 3, 5, 9, … Where they part, each layer is computed by itself
    on both sides from the same inputs, and judged against float64.

    The exit code is 0 whether they part or not. RUN is a run directory, or the name of one below --out. With --with, the second side is the
    first run with other settings, such as backend=tf, precision=bf16, exchange=native, compile=on, or python=/other/venv/bin/python; with
    nodes=3 the workers share the first run's global batch.
    """
    folders = [_recording(text, out) for text in (first, second) if text is not None]
    for text_of_run, folder in zip((first, second), folders, strict=False):
        if folder is None:
            find_run(str(text_of_run), out)
    if second is not None and changes:
        raise UsageError("second run: got a RUN and --with; give one of the two.")
    if second is None and not changes:
        raise UsageError("second run: give another RUN, or --with SETTING=VALUE.")
    if any(folders):
        if len(folders) < 2 or None in folders:
            raise UsageError("recordings: a recording is compared with another recording; give two of them, without --with.")
        paths = [folder for folder in folders if folder is not None]
        _print(compare_recordings((paths[0], paths[1]), (paths[0].name, paths[1].name)), as_json=as_json)
        return
    path = find_run(first, out)
    job, compiled = _job_of(path, trusted=trust_run)
    interpreter: str | None = None
    if second is not None:
        other_path = find_run(second, out)
        (changed, other_compiled), name = _job_of(other_path, trusted=trust_run), other_path.name
    else:
        settings, interpreter = _read_changes(changes)
        changed = _changed(path, {**_batch_of(job, settings), **settings}, trusted=trust_run)
        job = job.model_copy(update={"start_timeout": changed.start_timeout})
        shown = with_settings({**settings, **({PYTHON: interpreter} if interpreter else {})})
        other_compiled, name = compiled, f"{path.name} {shown}"
    refuse_uncomparable(job, changed)
    checkpoints = {int(checkpoint.name.removeprefix("step-")): checkpoint for checkpoint in list_checkpoints(path)}
    with TerminationAsInterrupt():
        comparison = _compared((job, changed), (compiled, other_compiled), (path.name, name), interpreter, upto, checkpoints)
    comparison.sentence = sentence(comparison)
    _print(comparison, as_json=as_json)
    try:
        write_diverged(path, comparison)
    except DiskError as error:
        note(f"not kept for the report page: {error}")


def _recording(text: str, out: Path) -> Path | None:
    """Return the folder of a recording, by its path or its name below `out`, if it is one."""
    return next((folder for folder in (Path(text), out / text) if text and is_recording(folder)), None)


def _print(comparison: Comparison, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(finite_json(msgspec.to_builtins(comparison)), indent=1))
    else:
        echo_wrapped(text(comparison))


def _compared(
    jobs: tuple[Job, Job],
    compiled: tuple[bool | None, bool | None],
    names: tuple[str, str],
    interpreter: str | None,
    upto: int,
    checkpoints: Mapping[int, Path],
) -> Comparison:
    spec = build_model(jobs[0].model, open_dataset(jobs[0].data, jobs[0].data_dir).info, jobs[0].loss)
    local = tuple(on_this_machine(job, deterministic=spec.dropout, compiled=chosen) for job, chosen in zip(jobs, compiled, strict=True))
    folder = make_scratch()
    try:
        comparison = Comparer((local[0], local[1]), names, folder, upto, checkpoints).compare((None, interpreter))
    finally:
        remove_scratch(folder)
    comparison.findings = [*differing_settings(*jobs), *comparison.findings]
    comparison.expected = expected_differences(*jobs, spec)
    return comparison


def _job_of(path: Path, *, trusted: bool) -> tuple[Job, bool | None]:
    """Return a run's job, and whether its steps were compiled."""
    described = RunReader(path).job()
    if missing := [name for name in ("backend", "model", "data") if name not in described]:
        raise UsageError(f"run: {str(path / 'job.json')!r} has no {missing[0]}, so it is not as trainer wrote it.")
    return _changed(path, {}, trusted=trusted), described.get("compiled")


def _batch_of(job: Job, settings: Mapping[str, str]) -> dict[str, object]:
    """Return the setting by which another number of workers shares a job's batch."""
    if not {"nodes", "procs_per_node"} & set(settings) or {"batch_size", "global_batch_size", "batch_tokens"} & set(settings):
        return {}
    return {"global_batch_size": job.global_batch}


def _changed(path: Path, settings: Mapping[str, object], *, trusted: bool) -> Job:
    """Return a run's job with other settings."""
    return written_out(resolve(settings, {}, None, earlier_run(path, trusted=trusted)).job)


def _read_changes(changes: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """Return settings by name, and the interpreter. Raises UsageError."""
    settings: dict[str, str] = {}
    interpreter = None
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not value:
            raise UsageError(f"--with: got {change!r}; write SETTING=VALUE, such as precision=bf16.")
        if name == PYTHON:
            if not os.access(value, os.X_OK):
                raise UsageError(f"--with: {value!r} is no program that can be executed.")
            interpreter = os.path.abspath(value)
        elif name in Job.model_fields and name not in fields_with_role("destination"):
            settings[name] = value
        else:
            raise UsageError.of("--with", name, "a setting of the job, or python", [*Job.model_fields, PYTHON])
    return settings, interpreter
