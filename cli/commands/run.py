"""``trainer run``: from the command line to a job, and the job to the driver."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.settings.sources import Resolved, given_anew, resolve
from ...core.settings.sweeps import MOST_REPEATS, SWEEP_FILE, Grid, read_grid
from ...core.untrusted.console import note
from ...launch.environments.base import Membership
from ...launch.environments.detect import detect
from ...launch.environments.slurm_step import refuse_step
from ...launch.launchers.base import Launcher
from ...launch.launchers.registry import LaunchRequest, choose_launcher
from ...launch.resume.trust import TRUST_RUN
from ..interrupts import DeferredInterrupts
from ..options import GivenPath, given_options, job_options, name_settings, trust_option
from ..targets import find_target, standing_start_timeout

if TYPE_CHECKING:
    from ...launch.resume.resumption import Resumption

__all__ = ["run"]


@click.command("run", short_help="Train one job and write a comparable run directory.")
@click.option("--config", metavar="PATH|NAME", help="A TOML file with any of these settings, or the name of a shipped one.")
@job_options
@click.option("--print-config", is_flag=True, help="Show each setting and where it came from, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.option(
    "--node-rank", type=int, envvar="TRAINER_NODE_RANK", metavar="I", help="This node's number, where you start the nodes by hand."
)
@click.option("--rendezvous", envvar="TRAINER_RENDEZVOUS", metavar="HOST:PORT", help="Where nodes started by hand meet: on node 0.")
@click.option(
    "--secret-file",
    type=GivenPath(),
    envvar="TRAINER_SECRET_FILE",
    help="File with the secret that nodes started by hand share; or the variable TRAINER_SECRET.",
)
@click.option("--quiet", is_flag=True, help="No progress on standard error.")
@click.option(
    "--resume",
    type=GivenPath(),
    metavar="RUN|CHECKPOINT",
    help="Go on with a run from its newest sound checkpoint, or from this one. Settings given besides replace the run's; "
    "--steps +500 counts from where it stands, --epochs +1 from the end of the epoch that it stands in.",
)
@click.option("--force", is_flag=True, help="With --resume: go on although model, data or seed are not the checkpoint's.")
@trust_option("With --resume: take")
@click.option(
    "--repeats",
    type=click.IntRange(1, MOST_REPEATS),
    metavar="N",
    help="Run N times, with the seeds from --seed on, and give mean and spread.",
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    config: str | None,
    print_config: bool,
    as_json: bool,
    quiet: bool,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: Path | None,
    resume: Path | None,
    force: bool,
    trust_run: bool,
    repeats: int | None,
    **_options: Any,
) -> int:
    """Train one job on one framework and write a run directory.

    Without any option: logistic regression on scikit-learn's handwritten digits, in seconds, on the first installed framework.
    Every setting can also be given as environment variable (--batch-size: TRAINER_BATCH_SIZE) or as key of a --config file
    (batch_size); flags win over the environment, the environment over the file, the file over the defaults.
    """
    if force and resume is None:
        raise UsageError("--force: belongs to --resume")
    if trust_run and resume is None:
        raise UsageError(f"{TRUST_RUN}: belongs to --resume")
    if repeats is not None and resume is not None:
        raise UsageError("--repeats: starts new runs, and --resume goes on with one; give one of the two")
    resumption, given = None, {}
    if resume is None:
        resolved = resolve(given_options(ctx), os.environ, config)
        name_settings(resolved.sources)
        resolved = _with_absolute_data(resolved)
    else:
        given = given_anew(given_options(ctx), os.environ, config)
        if not print_config and (place := _place(given, rendezvous, node_rank)) is not None and not place.is_driver:
            from ...engine.protocol.transport import read_secret
            from ...launch.launchers.joining import asked_anew, join_run

            return join_run(asked_anew(resume, given, place), place, read_secret(secret_file), _start_timeout(resume, given))
        from ...launch.resume.resumption import load_resumption

        name_settings(dict.fromkeys(given_options(ctx), "flag"))
        resumption = load_resumption(find_target(resume), given_options(ctx), os.environ, config, force=force, trusted=trust_run)
        resolved = resumption.resolved
        name_settings(resolved.sources)
    resolved.refuse_idle_flags()
    if print_config:
        click.echo(_as_json(resolved) if as_json else _as_text(resolved))
        return 0
    if resumption is not None:
        for text in resumption.notes:
            note(text)
    if not quiet:
        for text in (*resolved.notes, *resolved.idle_notes()):
            note(text)
        if config is not None and not (resolved.job.out / SWEEP_FILE).exists() and read_grid(config) != Grid():
            note(f"{config} describes a sweep: this is its base job; `trainer sweep {config}` runs all of its points")
    command = ["trainer", *(ctx.obj or ())]
    job = resolved.job
    place = _place(job.model_dump() if resume is None else given, rendezvous, node_rank)
    if place is None:
        if job.launcher == "auto":
            refuse_step(os.environ, ctx.obj or ("run",))
        if secret_file is not None:
            _tell_unused(ctx, "secret_file", quiet=quiet)
    if given_options(ctx).get("tensorboard") and not quiet and (place is None or place.is_driver):
        note(f"to look at the runs: tensorboard --logdir {shlex.quote(str(job.out))}")
    if repeats is not None:
        if place is not None:
            raise UsageError("--repeats: starts new runs on nodes of its own; it does not go with nodes started elsewhere")
        from .run_repeats import repeat

        return repeat(job, ctx.obj or (), repeats, as_json=as_json)
    sources, request = resolved.sources, LaunchRequest(job, note)
    if place is not None:
        from ...engine.protocol.transport import read_secret
        from ...launch.launchers.joining import asked_anew, asked_of, join_run
        from ...launch.launchers.rendezvous import apply_membership

        secret = read_secret(secret_file)
        job, sources = apply_membership(job, sources, place)
        asked = asked_of(job) if resume is None else asked_anew(resume, given, place)
        if not place.is_driver:
            return join_run(asked, place, secret, job.start_timeout)
        request = LaunchRequest(job, note, place, secret, asked)
    return _run_with_launcher(job, sources, command, choose_launcher(request), resumption, quiet=quiet, as_json=as_json)


def _place(settings: Mapping[str, Any], rendezvous: str | None, node_rank: int | None) -> Membership | None:
    """Return where this process stands among those that something else started; None where it is alone. `settings`: as far as known."""
    if settings.get("launcher", "auto") == "auto":
        return detect(os.environ, rendezvous, node_rank, settings.get("nodes"), settings.get("procs_per_node", 1))
    if rendezvous is not None or node_rank is not None:
        raise UsageError("--launcher: 'local' starts all nodes here; --rendezvous and --node-rank need 'auto'")
    return None


def _start_timeout(resume: Path, given: Mapping[str, Any]) -> float:
    """Return how long a node waits for the driver of a run that goes on: as given, else as the run has it, where this node has the run."""
    if "start_timeout" in given:
        return float(given["start_timeout"])
    standing = standing_start_timeout(resume)
    return standing if standing is not None else float(Job.model_fields["start_timeout"].default)


def _tell_unused(ctx: click.Context, option: str, *, quiet: bool) -> None:
    """Refuse an option of nodes started by hand that was typed where nobody else takes part; a variable may be set for other runs."""
    why = "this run starts all of its nodes itself, and nothing uses it"
    if ctx.get_parameter_source(option) == ParameterSource.COMMANDLINE:
        raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out, or give --rendezvous and --node-rank")
    if not quiet:
        note(f"TRAINER_{option.upper()}: {why}")


def _with_absolute_data(resolved: Resolved) -> Resolved:
    """Name the data so that the run means the same from any directory."""
    if ":" not in resolved.job.data and resolved.job.data_dir is None:
        return resolved  # nothing to name, and no import before the nodes start
    from ...data.store.resolve import written_out

    return replace(resolved, job=written_out(resolved.job))


def _run_with_launcher(
    job: Job,
    sources: Mapping[str, str],
    command: Sequence[str],
    launcher: Launcher,
    resumption: Resumption | None,
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    """Start the nodes, load the driver while they load, run, and print the summary."""
    if job.mlflow is not None:
        from ...records.loggers.mlflow import check_mlflow

        check_mlflow(job.mlflow)
    try:
        with DeferredInterrupts():
            launcher.prestart()
            from ...engine.progress.base import make_progress
            from ...launch.driver import driver

        progress = make_progress(sys.stderr, quiet)
        path, summary = driver.run(job, sources=sources, progress=progress, command=command, launcher=launcher, resumption=resumption)
    except (RunFailedError, InterruptedRunError) as error:
        if as_json and error.run is not None:
            _print_what_there_is(error.run)
        raise
    finally:
        launcher.close()
    if job.profile and summary["profile"] is None:
        note(f"trainer: nothing was traced: the run ended before the {job.profile} steps of --profile were over")
    _print_summary(str(path), summary, as_json=as_json)
    return 0


def _print_summary(path: str, summary: dict[str, Any], *, as_json: bool) -> None:
    if summary["target"] is not None and not summary["target_reached"]:
        click.echo(f"The target {summary['target']} was not reached within the budget of {summary['steps']} steps.", err=True)
    if as_json:
        _print_json(path, summary)
        return
    from ...records.store.run_directory import RunReader
    from ...report.tables.run_tables import one_run, to_text

    click.echo(to_text(one_run(summary, RunReader(path).job())))
    click.echo(f"run directory: {path}")
    if summary["profile"] is not None:
        folder = Path(path) / summary["profile"]
        click.echo(f"traces: {folder} (tensorboard --logdir {folder}; a .json also in chrome://tracing or https://ui.perfetto.dev)")


def _print_what_there_is(path: Path) -> None:
    """Print the summary of a run that did not succeed, if it came so far; the error follows."""
    from ...records.store.run_directory import RunReader

    summary = RunReader(path).summary()
    if summary is not None:
        _print_json(path, summary)


def _print_json(path: object, summary: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"path": str(path), **summary}, indent=2))


def _as_json(resolved: Resolved) -> str:
    values = resolved.job.model_dump(mode="json")
    return json.dumps({key: {"value": value, "source": resolved.sources[key]} for key, value in values.items()}, indent=2)


def _as_text(resolved: Resolved) -> str:
    """Write a setting a line: name, value in JSON's notation, source; in columns."""
    values = {key: json.dumps(value) for key, value in resolved.job.model_dump(mode="json").items()}
    width = max(map(len, values))
    value_width = max(map(len, values.values()))
    return "\n".join(f"{key:<{width}}  {value:<{value_width}}  {resolved.sources[key]}" for key, value in values.items())
