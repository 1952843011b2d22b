"""``trainer run``: builds a job from the command line and executes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ...core.console import json_text, note
from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.plugins import is_reference, model_base
from ...core.settings.personal import shown_command
from ...core.settings.sources import Resolved, ResumedRun, resolve
from ...core.settings.sweeps import MAX_REPEATS, SWEEP_FILE, Grid, read_grid
from ...core.topics import Topic
from ...engine.progress import make_progress
from ...engine.protocol.transport import read_secret
from ...launch.driver import driver
from ...launch.driver.notify import Notifier, RunNews
from ...launch.driver.position import Resumption
from ...launch.driver.resumption import TRUST_RUN, earlier_run, load_resumption
from ...launch.launchers.environments import BY_HAND, Membership
from ...launch.launchers.registry import LaunchRequest, choose_launcher
from ...models.build import written_out
from ...records.store.run_directory import RunReader
from ...report.runs.locate import find_run
from ..group import GroupedCommand, topic_option
from ..interrupts import TerminationAsInterrupt, deferred_interrupts
from ..options import (
    FURTHER_PLACES,
    PLACES,
    GivenPath,
    IntegerRange,
    given_personal,
    job_options,
    name_settings,
    personal_options,
    trust_option,
)
from ..run_request import (
    ResumeState,
    TypedRun,
    check_place,
    find_run_or_checkpoint,
    launch_request,
    place_of,
    recorded_start_timeout,
    request_elsewhere,
    run_to_resume,
    settings_as_json,
    settings_as_text,
    within_allocation,
)
from ..streams import echo_wrapped, output_is_a_copy

AUTO = Path("auto")  # with --resume: resume the run that the job names, or start it


@click.command("run", cls=GroupedCommand, short_help="Train one job and write a comparable run directory.")
@topic_option(Topic.COMMON, "--config", metavar="PATH|NAME", help="A TOML file with any of these settings, or the name of a shipped one.")
@job_options()
@topic_option(Topic.OUTPUT, "--print-config", is_flag=True, help="Show each setting and where it came from, and exit.")
@topic_option(Topic.OUTPUT, "--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@topic_option(
    Topic.CLUSTER,
    "--node-rank",
    type=IntegerRange(),
    envvar="TRAINER_NODE_RANK",
    metavar="I",
    help="This node's number, for manual start.",
)
@topic_option(
    Topic.CLUSTER, "--rendezvous", envvar="TRAINER_RENDEZVOUS", metavar="HOST:PORT", help="Rendezvous address on node 0, for manual start."
)
@topic_option(
    Topic.CLUSTER,
    "--secret-file",
    type=GivenPath(),
    envvar="TRAINER_SECRET_FILE",
    help="File with the shared secret for manual start; or the variable TRAINER_SECRET.",
)
@personal_options(*PLACES, *FURTHER_PLACES, "notify", "on_failure")
@topic_option(Topic.OUTPUT, "--quiet", is_flag=True, help="Print no progress on standard error.")
@topic_option(
    Topic.CHECKPOINTS,
    "--resume",
    type=GivenPath(),
    metavar="RUN|CHECKPOINT|auto",
    help="Resume a run from its newest valid checkpoint, or from the given one. Settings given here override the run's; "
    "--steps +500 adds 500 updates to those done; --epochs +1 finishes the current epoch and adds one. auto: resume the run called "
    "--name if it exists, else start it.",
)
@topic_option(
    Topic.CHECKPOINTS,
    "--like",
    metavar="RUN",
    help="Start a new run from this run's settings; settings given here override them.",
)
@topic_option(
    Topic.CHECKPOINTS, "--force", is_flag=True, help="With --resume: resume even if model, data or seed differ from the checkpoint."
)
@trust_option("With --resume or --like: trust")
@topic_option(
    Topic.RECORDS,
    "--repeats",
    type=IntegerRange(1, MAX_REPEATS),
    metavar="N",
    help="Run N times, with seeds from --seed on, and report mean and standard deviation.",
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
    like: str | None,
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
    typed = TypedRun(ctx, config, resume, rendezvous, node_rank, secret_file, given_personal(ctx), quiet=quiet, like=like)
    _refuse_contradictions(resume, like, force=force, trust_run=trust_run, repeats=repeats)
    if not print_config:
        output_is_a_copy()
    if resume == AUTO:
        typed, succeeded = _find_run_to_resume(typed)
        if succeeded is not None:
            return _print_succeeded(succeeded, as_json=as_json)
    if typed.resume is not None and not print_config:
        place = place_of(typed, typed.given_settings)
        if place is not None and not place.is_driver:
            return _join_resumed(typed, typed.resume, place)
    resolved, resumption = _resolve_job(typed, force=force, trust_run=trust_run)
    resolved.refuse_idle_flags()
    if print_config:
        click.echo(settings_as_json(resolved, typed.personal) if as_json else settings_as_text(resolved, typed.personal))
        return 0
    _print_notes(typed, resolved, resumption)
    place = _check_membership(typed, resolved, repeats)
    if repeats is not None:
        from .run_repeats import repeat

        return repeat(resolved.job, ctx.obj or (), repeats, as_json=as_json)
    return _drive_or_join(typed, resolved, place, resumption, as_json=as_json)


def _check_membership(typed: TypedRun, resolved: Resolved, repeats: int | None) -> Membership | None:
    place = place_of(typed, resolved.job.model_dump() if typed.resume is None else typed.given_settings)
    check_place(typed, resolved.job, place)
    if place is not None and place.contract == BY_HAND and resolved.sources["nodes"].startswith("default"):
        raise UsageError(f"{BY_HAND}: this node would train alone, as nothing says how many there are; give --nodes on each of them")
    if place is not None and repeats is not None:
        raise UsageError("--repeats: starts new runs on nodes of its own; it does not go with nodes started elsewhere")
    return place


def _drive_or_join(typed: TypedRun, resolved: Resolved, place: Membership | None, resumption: Resumption | None, *, as_json: bool) -> int:
    resolved, hosts = within_allocation(typed, resolved, place)
    sources: Mapping[str, str] = resolved.sources
    request = replace(launch_request(typed, resolved.job), allocated=hosts)
    if place is not None:
        sources, request = request_elsewhere(typed, resolved, place)
        if not place.is_driver:
            from ...launch.launchers.joining import join_run

            with TerminationAsInterrupt():
                return join_run(request.asked, place, request.secret, request.job.start_timeout)
    note_lone_exchange(typed, request.job)
    command, notifier = shown_command(["trainer", *(typed.ctx.obj or ())]), Notifier(typed.personal, note)
    return _run_with_launcher(request, sources, command, resumption, notifier, quiet=typed.quiet, as_json=as_json)


def note_lone_exchange(typed: TypedRun, job: Job) -> None:
    """Note a given direct exchange without peers, which a sweep over nodes may begin with."""
    if not typed.quiet and job.workers == 1 and job.mode == "sync" and typed.given_settings.get("exchange") == "direct":
        note("exchange: direct has no effect with one worker")


def _find_run_to_resume(typed: TypedRun) -> tuple[TypedRun, Path | None]:
    """Replace ``--resume auto`` by the run to resume, if any; also return a run that succeeded."""
    new = replace(typed, resume=None)
    resolved = resolve(new.options, os.environ, new.config)
    place = place_of(new, resolved.job.model_dump())
    if place is not None and not place.is_driver:
        return replace(new, automatic=resolved), None
    state, path = run_to_resume(resolved.job)
    if state is ResumeState.SUCCEEDED:
        return new, path
    return replace(new, automatic=resolved, resume=path if state is ResumeState.RESUMES else None), None


def _refuse_contradictions(resume: Path | None, like: str | None, *, force: bool, trust_run: bool, repeats: int | None) -> None:
    if force and resume is None:
        raise UsageError("--force: belongs to --resume")
    if trust_run and resume is None and like is None:
        raise UsageError(f"{TRUST_RUN}: belongs to --resume or --like")
    if like is not None and resume is not None:
        raise UsageError("--like starts a new run and --resume continues one; use one of the two")
    if repeats is not None and resume is not None:
        raise UsageError("--repeats starts new runs and --resume continues one; use one of the two")


def _join_resumed(typed: TypedRun, resume: Path, place: Membership) -> int:
    from ...launch.launchers.joining import join_run, resume_request

    settings = typed.given_settings
    with TerminationAsInterrupt():
        return join_run(resume_request(resume, settings, place), place, read_secret(typed.secret_file), _start_timeout(resume, settings))


def _resolve_job(typed: TypedRun, *, force: bool, trust_run: bool) -> tuple[Resolved, Resumption | None]:
    if typed.resume is None:
        resolved = resolve(typed.options, os.environ, typed.config, _read_like(typed, trust_run=trust_run))
        name_settings(resolved.sources)
        return _write_out_names(resolved), None
    name_settings(dict.fromkeys(typed.options, "flag"))
    target = find_run_or_checkpoint(typed.resume)
    resumption = load_resumption(target, typed.options, os.environ, typed.config, force=force, trusted=trust_run)
    name_settings(resumption.resolved.sources)
    return resumption.resolved, resumption


def _read_like(typed: TypedRun, *, trust_run: bool) -> ResumedRun | None:
    if typed.like is None:
        return None
    name_settings(dict.fromkeys(typed.options, "flag"))
    out = typed.options.get("out") or os.environ.get("TRAINER_OUT") or "runs"
    return earlier_run(find_run(typed.like, Path(out)), trusted=trust_run)


def _print_notes(typed: TypedRun, resolved: Resolved, resumption: Resumption | None) -> None:
    for text in () if resumption is None else resumption.notes:
        note(text)
    if typed.quiet:
        return
    for text in (*resolved.notes, *resolved.idle_notes()):
        note(text)
    if typed.config is not None and not (resolved.job.out / SWEEP_FILE).exists() and read_grid(typed.config) != Grid():
        note(f"{typed.config} describes a sweep: this is its base job; `trainer sweep {typed.config}` runs all of its points")


def _start_timeout(resume: Path, settings: Mapping[str, Any]) -> float:
    if "start_timeout" in settings:
        return float(settings["start_timeout"])
    recorded = recorded_start_timeout(resume)
    return recorded if recorded is not None else float(Job.model_fields["start_timeout"].default)


def _write_out_names(resolved: Resolved) -> Resolved:
    """Make data and model names independent of the working directory."""
    job = resolved.job
    plain_model = model_base(job.model) == job.model and not is_reference(job.model)
    if ":" not in job.data and job.data_dir is None and job.vocabulary is None and plain_model:
        return resolved  # nothing to name, and no import before the nodes start
    return replace(resolved, job=written_out(resolved.job))


def _run_with_launcher(
    request: LaunchRequest,
    sources: Mapping[str, str],
    command: Sequence[str],
    resumption: Resumption | None,
    notifier: Notifier,
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    job, launcher = request.job, choose_launcher(request)
    starts_again = request.membership is not None and request.membership.starts_again
    if job.mlflow is not None:
        from ...records.loggers.mlflow import check_mlflow

        check_mlflow(job.mlflow)
    with TerminationAsInterrupt(notices=True):
        try:
            with deferred_interrupts():
                launcher.prestart()
            progress = make_progress(sys.stderr, quiet)
            path, summary = driver.run(
                job,
                driver.Invocation(command, sources),
                progress=progress,
                launcher=launcher,
                resumption=resumption,
                notifier=notifier,
                starts_again=starts_again,
            )
        except BaseException as error:
            notifier.send_end(RunNews.before_start(job.name, error))  # unless the driver has sent it
            if as_json and isinstance(error, RunFailedError | InterruptedRunError) and error.run is not None:
                _print_partial_result(error.run)
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
    from ...report.compare.run_tables import one_run, to_text

    echo_wrapped(to_text(one_run(summary, RunReader(path).job(), Path(path))) + "\n")
    click.echo(f"run directory: {path}")
    if summary["profile"] is not None:
        folder = Path(path) / summary["profile"]
        click.echo(f"traces: {folder} (tensorboard --logdir {folder}; a .json also in chrome://tracing or https://ui.perfetto.dev)")


def _print_succeeded(path: Path, *, as_json: bool) -> int:
    note(f"the run {path.name} has succeeded already")
    _print_summary(str(path), RunReader(path).summary() or {}, as_json=as_json)
    return 0


def _print_partial_result(path: Path) -> None:
    reader = RunReader(path)
    ended = {name: reader.status()[name] for name in ("state", "cause", "task", "exit_code")}
    _print_json(path, {**ended, **(reader.summary() or {})})


def _print_json(path: object, summary: Mapping[str, Any]) -> None:
    click.echo(json_text({"path": str(path), **summary}, indent=2))
