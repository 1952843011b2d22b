"""``trainer run``: from the command line to a job, and the job to the driver."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.plugins import model_base
from ...core.settings.job_fields import flag_name
from ...core.settings.personal import GivenOption
from ...core.settings.personal_options import shown_command
from ...core.settings.sources import Resolved, ResumedRun, given_settings, resolve
from ...core.settings.sweeps import MOST_REPEATS, SWEEP_FILE, Grid, read_grid
from ...core.topics import Topic
from ...core.untrusted.console import json_text, note
from ...core.worker_layout import read_procs_per_node
from ...launch.environments.base import Membership
from ...launch.environments.detect import detect
from ...launch.environments.manual import BY_HAND
from ...launch.environments.slurm_step import refuse_step
from ...launch.launchers.host_list import Host
from ...launch.launchers.registry import (
    FOLLOW_OTHERS,
    LauncherPlugin,
    LaunchRequest,
    allocated,
    choose_launcher,
    launcher_plugin,
    name_of_launcher,
    placed_without,
    takes_option,
    who_takes,
)
from ...launch.launchers.remote import shape_of_hosts
from ...launch.notices.news import RunNews
from ...launch.notices.notifier import Notifier
from ...launch.resume.trust import TRUST_RUN
from ..grouped_help import GroupedCommand, topic_option
from ..interrupts import DeferredInterrupts, TerminationAsInterrupt
from ..options import (
    FURTHER_PLACES,
    PLACES,
    GivenPath,
    IntegerRange,
    given_hosts,
    given_options,
    given_personal,
    given_python,
    job_options,
    name_settings,
    personal_options,
    trust_option,
)
from ..run_arguments import find_run_or_checkpoint, recorded_start_timeout
from ..shown_settings import settings_as_json, settings_as_text

if TYPE_CHECKING:
    from ...launch.resume.resumption import Resumption

__all__ = ["run"]

AUTO = Path("auto")
"""With --resume: the run that the job names, whether it begins or goes on."""


@click.command("run", cls=GroupedCommand, short_help="Train one job and write a comparable run directory.")
@topic_option(Topic.COMMON, "--config", metavar="PATH|NAME", help="A TOML file with any of these settings, or the name of a shipped one.")
@job_options
@topic_option(Topic.OUTPUT, "--print-config", is_flag=True, help="Show each setting and where it came from, and exit.")
@topic_option(Topic.OUTPUT, "--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@topic_option(
    Topic.CLUSTER,
    "--node-rank",
    type=IntegerRange(),
    envvar="TRAINER_NODE_RANK",
    metavar="I",
    help="This node's number, where you start the nodes by hand.",
)
@topic_option(
    Topic.CLUSTER, "--rendezvous", envvar="TRAINER_RENDEZVOUS", metavar="HOST:PORT", help="Where nodes started by hand meet: on node 0."
)
@topic_option(
    Topic.CLUSTER,
    "--secret-file",
    type=GivenPath(),
    envvar="TRAINER_SECRET_FILE",
    help="File with the secret that nodes started by hand share; or the variable TRAINER_SECRET.",
)
@personal_options(*PLACES, *FURTHER_PLACES, "notify", "on_failure")
@topic_option(Topic.OUTPUT, "--quiet", is_flag=True, help="No progress on standard error.")
@topic_option(
    Topic.CHECKPOINTS,
    "--resume",
    type=GivenPath(),
    metavar="RUN|CHECKPOINT|auto",
    help="Go on with a run from its newest sound checkpoint, or from this one. Settings given besides replace the run's; "
    "--steps +500 counts from where it stands, --epochs +1 from the end of the epoch that it stands in. auto: begin the run of this "
    "--name, or go on with it.",
)
@topic_option(
    Topic.CHECKPOINTS,
    "--like",
    metavar="RUN",
    help="Begin a new run with the settings of this one; those given besides replace its, so that one thing can be another.",
)
@topic_option(
    Topic.CHECKPOINTS, "--force", is_flag=True, help="With --resume: go on although model, data or seed are not the checkpoint's."
)
@trust_option("With --resume or --like: take")
@topic_option(
    Topic.RECORDS,
    "--repeats",
    type=IntegerRange(1, MOST_REPEATS),
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
    typed = _Typed(ctx, config, resume, rendezvous, node_rank, secret_file, given_personal(ctx), quiet=quiet, like=like)
    _refuse_contradictions(resume, like, force=force, trust_run=trust_run, repeats=repeats)
    if resume == AUTO:
        typed, succeeded = _standing(typed)
        if succeeded is not None:
            note(f"the run {succeeded.name} has succeeded already")
            from ...records.store.run_directory import RunReader

            _print_summary(str(succeeded), RunReader(succeeded).summary() or {}, as_json=as_json)
            return 0
        resume = typed.resume
    if resume is not None and not print_config and (place := _place(typed, typed.given_settings)) is not None and not place.is_driver:
        return _join_resumed(typed, resume, place)
    resolved, resumption = _resolved_job(typed, force=force, trust_run=trust_run)
    resolved.refuse_idle_flags()
    if print_config:
        click.echo(settings_as_json(resolved, typed.personal) if as_json else settings_as_text(resolved, typed.personal))
        return 0
    _tell_notes(typed, resolved, resumption)
    place = _place(typed, resolved.job.model_dump() if resume is None else typed.given_settings)
    _check_place(typed, resolved.job, place)
    if place is not None and place.contract == BY_HAND and resolved.sources["nodes"].startswith("default"):
        raise UsageError(f"{BY_HAND}: this node would train alone, as nothing says how many there are; give --nodes on each of them")
    if repeats is not None:
        if place is not None:
            raise UsageError("--repeats: starts new runs on nodes of its own; it does not go with nodes started elsewhere")
        from .run_repeats import repeat

        return repeat(resolved.job, ctx.obj or (), repeats, as_json=as_json)
    resolved, hosts = _within_allocation(typed, resolved, place)
    sources: Mapping[str, str] = resolved.sources
    request = replace(_request(typed, resolved.job), allocated=hosts)
    if place is not None:
        sources, request = _request_elsewhere(typed, resolved, place)
        if not place.is_driver:
            from ...launch.launchers.joining import join_run

            with TerminationAsInterrupt():
                return join_run(request.asked, place, request.secret, request.job.start_timeout)
    command, notifier = shown_command(["trainer", *(ctx.obj or ())]), Notifier(typed.personal, note)
    return _run_with_launcher(request, sources, command, resumption, notifier, quiet=quiet, as_json=as_json)


@dataclass(frozen=True)
class _Typed:
    """What the command was given, apart from the settings of the job."""

    ctx: click.Context
    config: str | None
    resume: Path | None
    rendezvous: str | None
    node_rank: int | None
    secret_file: Path | None
    personal: Mapping[str, GivenOption]
    quiet: bool
    like: str | None = None
    automatic: Resolved | None = None
    """With ``--resume auto``: the job as it is typed, alike for every process, whether the run begins or goes on."""

    @cached_property
    def hosts(self) -> Sequence[Host]:
        """The hosts of the nodes. Those of the user's own file stand for every run, so they count where nothing else places this one's."""
        named = self.named_hosts
        return () if named is None or not self._counts(named) else given_hosts(self.personal)

    @property
    def named_hosts(self) -> GivenOption | None:
        """The option that names hosts, whether they count or not."""
        return next((self.personal[name] for name in ("hosts", "hostfile") if name in self.personal), None)

    @property
    def hosts_set_aside(self) -> bool:
        """Whether hosts are named where they do not count, as the nodes of this run are elsewhere."""
        named = self.named_hosts
        return named is not None and not self._counts(named)

    @cached_property
    def further_places(self) -> Mapping[str, str]:
        """What else says where the nodes are, such as ``ray_address``, by name; those of the user's own file count as its hosts do."""
        given = [self.personal[name] for name in FURTHER_PLACES if name in self.personal]
        return {one.option.name: one.value for one in given if not one.of_own_file or self._counts(one)}

    @cached_property
    def _launcher(self) -> str:
        """The launcher that was asked for, ``auto`` where none was."""
        return str(given_settings(given_options(self.ctx), os.environ, self.config).get("launcher", "auto"))

    def _counts(self, given: GivenOption) -> bool:
        """Whether an option that says where nodes are does so for this run: it is typed, or for a launcher that was named and takes it.

        Where none was named, a variable counts, and what stands in the user's own file if nothing else has placed this run.
        """
        if given.typed:
            return True
        if self._launcher not in FOLLOW_OTHERS:
            return takes_option(self._launcher, given.option.name)
        if not given.of_own_file:
            return True
        started = self.rendezvous is not None or self.node_rank is not None or detect(os.environ, None, None, None) is not None
        return takes_option(self._launcher, given.option.name) and not started and not placed_without(given.option.name, os.environ)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The settings of the job that were typed, with those that the hosts decide. Raises UsageError where these disagree."""
        typed = given_options(self.ctx)
        decided = shape_of_hosts(self.hosts) if self.hosts else {}
        for key, value in decided.items():
            if typed.get(key, value) != value:
                whose = self.named_hosts
                assert whose is not None
                remedy = "; --launcher local leaves the hosts alone" if whose.of_own_file else ""
                raise UsageError(f"{key}: got {typed[key]}, but {whose.key} says {value}; leave it out or make them agree{remedy}")
        if self.automatic is not None and self.resume is not None:
            typed = {key: value for key, value in typed.items() if key not in ("out", "name")}  # they have led to the run
        return {**typed, **decided}

    @cached_property
    def given_settings(self) -> dict[str, Any]:
        """Of a run that goes on: the settings that were given for that, by flag, variable or file."""
        return given_settings(self.options, os.environ, self.config)


def _standing(typed: _Typed) -> tuple[_Typed, Path | None]:
    """Return what was typed with the run to go on with in the place of ``auto``, none where it begins; and the run if it has succeeded."""
    from ..automatic_resume import Standing, standing_run

    new = replace(typed, resume=None)
    resolved = resolve(new.options, os.environ, new.config)
    place = _place(new, resolved.job.model_dump())
    if place is not None and not place.is_driver:
        return replace(new, automatic=resolved), None
    standing, path = standing_run(resolved.job)
    if standing is Standing.HAS_SUCCEEDED:
        return new, path
    return replace(new, automatic=resolved, resume=path if standing is Standing.GOES_ON else None), None


def _refuse_contradictions(resume: Path | None, like: str | None, *, force: bool, trust_run: bool, repeats: int | None) -> None:
    """Raise UsageError for options that mean nothing without ``--resume``, or nothing with it."""
    if force and resume is None:
        raise UsageError("--force: belongs to --resume")
    if trust_run and resume is None and like is None:
        raise UsageError(f"{TRUST_RUN}: belongs to --resume or --like")
    if like is not None and resume is not None:
        raise UsageError("--like: begins a new run, and --resume goes on with one; give one of the two")
    if repeats is not None and resume is not None:
        raise UsageError("--repeats: starts new runs, and --resume goes on with one; give one of the two")


def _join_resumed(typed: _Typed, resume: Path, place: Membership) -> int:
    """Take part in a run that goes on elsewhere: this node need not have its files. Returns the run's exit code."""
    from ...engine.protocol.transport import read_secret
    from ...launch.launchers.joining import join_run, resume_request

    given = typed.given_settings
    with TerminationAsInterrupt():
        return join_run(resume_request(resume, given, place), place, read_secret(typed.secret_file), _start_timeout(resume, given))


def _resolved_job(typed: _Typed, *, force: bool, trust_run: bool) -> tuple[Resolved, Resumption | None]:
    """Return the job with the source of each setting, and what a run that goes on begins with."""
    if typed.resume is None:
        resolved = resolve(typed.options, os.environ, typed.config, _like(typed, trust_run=trust_run))
        name_settings(resolved.sources)
        return _with_lasting_names(resolved), None
    from ...launch.resume.resumption import load_resumption

    name_settings(dict.fromkeys(typed.options, "flag"))
    target = find_run_or_checkpoint(typed.resume)
    resumption = load_resumption(target, typed.options, os.environ, typed.config, force=force, trusted=trust_run)
    name_settings(resumption.resolved.sources)
    return resumption.resolved, resumption


def _like(typed: _Typed, *, trust_run: bool) -> ResumedRun | None:
    """Return the run whose settings stand below those that are given, None where there is none."""
    if typed.like is None:
        return None
    from ...launch.resume.like import earlier_run
    from ...report.catalog.locate import find_run

    name_settings(dict.fromkeys(typed.options, "flag"))
    out = typed.options.get("out") or os.environ.get("TRAINER_OUT") or "runs"
    return earlier_run(find_run(typed.like, Path(out)), trusted=trust_run)


def _tell_notes(typed: _Typed, resolved: Resolved, resumption: Resumption | None) -> None:
    """Tell on standard error what a user may not expect of these settings."""
    for text in () if resumption is None else resumption.notes:
        note(text)
    if typed.quiet:
        return
    for text in (*resolved.notes, *resolved.idle_notes()):
        note(text)
    if typed.config is not None and not (resolved.job.out / SWEEP_FILE).exists() and read_grid(typed.config) != Grid():
        note(f"{typed.config} describes a sweep: this is its base job; `trainer sweep {typed.config}` runs all of its points")


def _request(typed: _Typed, job: Job) -> LaunchRequest:
    """Return what is asked of the launcher of a run that starts its nodes itself, without what a batch system has allocated."""
    python, further = given_python(typed.personal), typed.further_places
    return LaunchRequest(job, note, hosts=typed.hosts, python=python, options=further, environment=os.environ)


def _launcher(typed: _Typed, job: Job) -> LauncherPlugin:
    """Return what the launcher of such a run says of itself."""
    request = replace(_request(typed, job), allocated=allocated(job.launcher, os.environ)[0])
    return launcher_plugin(name_of_launcher(request))


def _check_place(typed: _Typed, job: Job, place: Membership | None) -> None:
    """Refuse, or tell of, what belongs to another way of starting the nodes."""
    if place is None:
        launcher = _launcher(typed, job)
        if job.launcher == "auto" and not launcher.own_cluster:
            refuse_step(os.environ, typed.ctx.obj or ("run",))
        if typed.secret_file is not None:
            _tell_unused(typed, "secret_file", "this run starts all of its nodes itself", "--rendezvous and --node-rank")
        if typed.hosts_set_aside and (named := typed.named_hosts) is not None and not named.of_own_file:
            _tell_unused(typed, named.option.name, f"--launcher {job.launcher} has its nodes elsewhere", "--launcher ssh")
        python, others = typed.personal.get("python"), typed.hosts or allocated(job.launcher, os.environ)[0] or "python" in launcher.takes
        if python is not None and not python.of_own_file and not others:
            _tell_unused(typed, "python", "this run has no other hosts", "--hosts")
        for name in typed.further_places:
            if typed.hosts:
                raise UsageError(f"{flag_name(name)} and --hosts: both say where the nodes are; give one of them")
            if name not in launcher.takes:
                _tell_unused(typed, name, f"--launcher {job.launcher} does not take it", f"--launcher {who_takes(name)}")
    elif typed.hosts and (named := typed.named_hosts) is not None:
        remedy = "leave one of the two out" if named.typed else f"unset {named.option.variable}"
        raise UsageError(f"{named.key}: starts the nodes, but {place.contract} has started them already; {remedy}")
    elif typed.further_places:
        flag = flag_name(next(iter(typed.further_places)))
        raise UsageError(f"{flag}: asks for nodes, but {place.contract} has started them already; leave one of the two out")
    if typed.options.get("tensorboard") and not typed.quiet and (place is None or place.is_driver):
        note(f"to look at the runs: tensorboard --logdir {shlex.quote(str(job.out))}")


def _within_allocation(typed: _Typed, resolved: Resolved, place: Membership | None) -> tuple[Resolved, Sequence[Host]]:
    """Return the job, and the nodes that a batch system has allocated for it: as many of them as the job says, all where it does not."""
    if place is not None or typed.hosts or _launcher(typed, resolved.job).own_cluster:
        return resolved, ()
    hosts, variable = allocated(resolved.job.launcher, os.environ)
    if variable is None or not resolved.sources["nodes"].startswith("default"):
        return resolved, hosts
    job = Job.model_validate({**resolved.job.model_dump(), "nodes": len(hosts)})
    return replace(resolved, job=job, sources={**resolved.sources, "nodes": variable}), hosts


def _request_elsewhere(typed: _Typed, resolved: Resolved, place: Membership) -> tuple[Mapping[str, str], LaunchRequest]:
    """Return the sources of the settings, and the request to launch, of a run whose nodes something else has started."""
    from ...engine.protocol.transport import read_secret
    from ...launch.launchers.joining import automatic_request, job_request, resume_request
    from ...launch.launchers.rendezvous import apply_membership

    secret = read_secret(typed.secret_file)
    job, sources = apply_membership(resolved.job, resolved.sources, place)
    if typed.automatic is not None:
        asked = automatic_request(apply_membership(typed.automatic.job, typed.automatic.sources, place)[0])
    else:
        asked = job_request(job) if typed.resume is None else resume_request(typed.resume, typed.given_settings, place)
    return sources, LaunchRequest(job, note, place, secret, asked)


def _place(typed: _Typed, settings: Mapping[str, Any]) -> Membership | None:
    """Return where this process stands among those that something else started; None where it is alone. `settings`: as far as known."""
    if settings.get("launcher", "auto") in FOLLOW_OTHERS:
        nodes, tasks = settings.get("nodes"), read_procs_per_node(settings.get("procs_per_node", 1))
        return detect(os.environ, typed.rendezvous, typed.node_rank, nodes, tasks)
    if typed.rendezvous is not None or typed.node_rank is not None:
        raise UsageError(
            f"--launcher: {settings['launcher']!r} starts the nodes itself; --rendezvous and --node-rank need 'auto' or 'rendezvous'"
        )
    return None


def _start_timeout(resume: Path, given: Mapping[str, Any]) -> float:
    """Return how long a node waits for the driver of a run that goes on: as given, else as the run has it, where this node has the run."""
    if "start_timeout" in given:
        return float(given["start_timeout"])
    standing = recorded_start_timeout(resume)
    return standing if standing is not None else float(Job.model_fields["start_timeout"].default)


def _tell_unused(typed: _Typed, option: str, why: str, belongs_to: str) -> None:
    """Refuse an option that was typed and that nothing uses; a variable may be set for other runs, and is only told of."""
    why = f"{why}, and nothing uses it"
    if typed.ctx.get_parameter_source(option) == ParameterSource.COMMANDLINE:
        raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out, or give {belongs_to}")
    if not typed.quiet:
        note(f"TRAINER_{option.upper()}: {why}")


def _with_lasting_names(resolved: Resolved) -> Resolved:
    """Name the data and the model so that the run means the same from any directory, and one text stands for one meaning."""
    job = resolved.job
    if ":" not in job.data and job.data_dir is None and job.vocabulary is None and model_base(job.model) == job.model:
        return resolved  # nothing to name, and no import before the nodes start
    from ...models.build import written_out

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
    """Start the nodes, load the driver while they load, run, and print the summary. From here on whatever ends the run is told."""
    job, launcher = request.job, choose_launcher(request)
    starts_again = request.membership is not None and request.membership.starts_again
    if job.mlflow is not None:
        from ...records.loggers.mlflow import check_mlflow

        check_mlflow(job.mlflow)
    with TerminationAsInterrupt(notices=True):
        try:
            with DeferredInterrupts():
                launcher.prestart()
                from ...engine.progress.base import make_progress
                from ...launch.driver import driver

            progress = make_progress(sys.stderr, quiet)
            path, summary = driver.run(
                job,
                sources=sources,
                progress=progress,
                command=command,
                launcher=launcher,
                resumption=resumption,
                notifier=notifier,
                starts_again=starts_again,
            )
        except BaseException as error:
            notifier.ended(RunNews.before_start(job.name, error))  # unless the driver has told it
            if as_json and isinstance(error, RunFailedError | InterruptedRunError) and error.run is not None:
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

    click.echo(to_text(one_run(summary, RunReader(path).job(), Path(path))))
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
    click.echo(json_text({"path": str(path), **summary}, indent=2))
