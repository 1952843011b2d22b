"""Runs and checkpoints in command lines, and the requested run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import ValidationError

from ..checkpoint import CHECKPOINTS, is_checkpoint, list_checkpoints
from ..core.bounded_json import first_problem
from ..core.cluster import read_procs_per_node
from ..core.console import json_text, note
from ..core.errors import UsageError, writing
from ..core.job import Job
from ..core.settings.job_fields import flag_name
from ..core.settings.personal import PERSONAL_OPTIONS, GivenOption
from ..core.settings.sources import Resolved, given_settings
from ..engine.protocol.transport import read_secret
from ..launch.driver.resumption import refuse_at_work
from ..launch.launchers.environments import Membership, detect, refuse_step
from ..launch.launchers.host_list import Host, parse_hosts
from ..launch.launchers.registry import (
    FOLLOW_OTHERS,
    LauncherPlugin,
    LaunchRequest,
    allocated,
    launcher_plugin,
    launcher_taking,
    name_of_launcher,
    placed_without,
    takes_option,
)
from ..launch.launchers.ssh import shape_of_hosts
from ..records.store.jsonl import DamagedRunError
from ..records.store.run_directory import RunReader
from ..report.runs.locate import find_readable_runs, find_run, is_run
from ..report.runs.run import Run, lost_updates
from .options import FURTHER_PLACES, given_hosts, given_options, given_python


def find_run_or_checkpoint(path: Path) -> Path:
    """Return a run or checkpoint by path, also below TRAINER_OUT or ``runs``. Raises UsageError."""
    out = _output_directory()
    for folder in (path, out / path):
        if is_checkpoint(folder) or list_checkpoints(folder):
            return folder
        if folder.parent.name == CHECKPOINTS and is_run(folder.parent.parent):
            run = folder.parent.parent
            names = ", ".join(checkpoint.name for checkpoint in list_checkpoints(run)) or "none"
            raise UsageError(f"checkpoint: there is no {str(folder)!r}; checkpoints of the run {run.name!r}: {names}.")
    return find_run(str(path), out)


def _output_directory() -> Path:
    return Path(os.environ.get("TRAINER_OUT") or "runs")


def recorded_start_timeout(path: Path) -> float | None:
    """Return a run's start timeout, None if not on this node. Raises DamagedRunError."""
    for folder in (path, _output_directory() / path):
        run = folder.parent.parent if is_checkpoint(folder) else folder
        if not (run / "job.json").is_file():
            continue
        value = RunReader(run).job().get("start_timeout", Job.model_fields["start_timeout"].default)
        try:
            return Job.model_validate({"start_timeout": value}).start_timeout
        except ValidationError as error:
            raise DamagedRunError(f"{run / 'job.json'}: {first_problem(error)}.") from error
    return None


def readable_runs(texts: Sequence[str], out: Path) -> list[Run]:
    """Return the runs of `texts`; of folders the readable ones, with notes. Raises UsageError."""
    return _note_skipped(*find_readable_runs(texts, out), "unreadable files")


def finished_runs(texts: Sequence[str], out: Path) -> list[Run]:
    """Return the runs with figures of `texts`; note a folder's others. Raises UsageError."""
    return _note_skipped(*find_readable_runs(texts, out, with_figures=True), "no readable figures")


def _note_skipped(runs: list[Run], left_out: Sequence[Run], problem: str) -> list[Run]:
    if left_out:
        note(f"skipped ({problem}): {', '.join(run.path.name for run in left_out)}")
    warn_of_lost_updates(runs)
    return runs


def warn_of_lost_updates(runs: Sequence[Run]) -> None:
    """Warn of successful runs that miss updates. Raises DamagedRunError for a bad summary."""
    for run in runs:
        if (lost := lost_updates(run)) is not None:
            note(f"warning: {lost}.")


@dataclass(frozen=True)
class TypedRun:
    """The options of `trainer run`; settings of the job are in its context."""

    ctx: click.Context
    config: str | None
    resume: Path | None
    rendezvous: str | None
    node_rank: int | None
    secret_file: Path | None
    personal: Mapping[str, GivenOption]
    quiet: bool
    like: str | None = None
    automatic: Resolved | None = None  # with ``--resume auto``: the typed job, equal in all processes

    @cached_property
    def hosts(self) -> Sequence[Host]:
        """The hosts of the nodes, empty if they do not apply to this run."""
        named = self.named_hosts
        return () if named is None or not self.counts(named) else given_hosts(self.personal)

    @property
    def named_hosts(self) -> GivenOption | None:
        """The option that names hosts, applicable or not."""
        return next((self.personal[name] for name in ("hosts", "hostfile") if name in self.personal), None)

    @cached_property
    def further_places(self) -> Mapping[str, str]:
        """Other options for the nodes' location, such as ``ray_address``, by name."""
        options = [self.personal[name] for name in FURTHER_PLACES if name in self.personal]
        return {option.option.name: option.value for option in options if not option.is_from_file or self.counts(option)}

    @cached_property
    def _launcher(self) -> str:
        return str(given_settings(given_options(self.ctx), os.environ, self.config).get("launcher", "auto"))

    def counts(self, option: GivenOption) -> bool:
        """Return whether an option for the nodes applies: typed, or for the run's launcher."""
        if option.typed:
            return True
        if self._launcher not in FOLLOW_OTHERS:
            return takes_option(self._launcher, option.option.name)
        if not option.is_from_file:
            return True
        started = self.rendezvous is not None or self.node_rank is not None or detect(os.environ, None, None, None) is not None
        return takes_option(self._launcher, option.option.name) and not started and not placed_without(option.option.name, os.environ)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The typed settings, with those that the hosts imply. Raises UsageError if contradictory."""
        typed = given_options(self.ctx)
        decided = shape_of_hosts(self.hosts) if self.hosts else {}
        for key, value in decided.items():
            if typed.get(key, value) != value:
                whose = self.named_hosts
                assert whose is not None
                remedy = "; --launcher local leaves the hosts alone" if whose.is_from_file else ""
                raise UsageError(f"{key}: got {typed[key]}, but {whose.key} says {value}; leave it out or make them agree{remedy}")
        if self.automatic is not None and self.resume is not None:
            typed = {key: value for key, value in typed.items() if key not in ("out", "name")}  # these named the run
        return {**typed, **decided}

    @cached_property
    def given_settings(self) -> dict[str, Any]:
        """For a resumed run: the settings given by flag, variable or file."""
        return given_settings(self.options, os.environ, self.config)


def place_of(typed: TypedRun, settings: Mapping[str, Any]) -> Membership | None:
    """Return this process's place among processes started elsewhere; None if alone."""
    if settings.get("launcher", "auto") in FOLLOW_OTHERS:
        nodes, tasks = settings.get("nodes"), read_procs_per_node(settings.get("procs_per_node", 1))
        return detect(os.environ, typed.rendezvous, typed.node_rank, nodes, tasks)
    if typed.rendezvous is not None or typed.node_rank is not None:
        raise UsageError(
            f"--launcher: {settings['launcher']!r} starts the nodes itself; --rendezvous and --node-rank need 'auto' or 'rendezvous'"
        )
    return None


def launch_request(typed: TypedRun, job: Job) -> LaunchRequest:
    """Return the launch request of a run that starts its nodes, without allocated hosts."""
    python, further = given_python(typed.personal), typed.further_places
    return LaunchRequest(job, note, hosts=typed.hosts, python=python, options=further, environment=os.environ)


def _launcher(typed: TypedRun, job: Job) -> LauncherPlugin:
    request = replace(launch_request(typed, job), allocated=allocated(job.launcher, os.environ)[0])
    return launcher_plugin(name_of_launcher(request))


def check_place(typed: TypedRun, job: Job, place: Membership | None) -> None:
    """Reject options of another way of starting the nodes; report such variables."""
    if place is None:
        _check_started_nodes(typed, job)
    elif typed.hosts and (named := typed.named_hosts) is not None:
        remedy = "leave one of the two out" if named.typed else f"unset {named.option.variable}"
        raise UsageError(f"{named.key}: starts the nodes, but {place.contract} has started them already; {remedy}")
    elif typed.further_places:
        flag = flag_name(next(iter(typed.further_places)))
        raise UsageError(f"{flag}: asks for nodes, but {place.contract} has started them already; leave one of the two out")
    if typed.options.get("tensorboard") and not typed.quiet and (place is None or place.is_driver):
        note(f"to look at the runs: tensorboard --logdir {shlex.quote(str(job.out))}")


def _check_started_nodes(typed: TypedRun, job: Job) -> None:
    launcher, named, python = _launcher(typed, job), typed.named_hosts, typed.personal.get("python")
    if job.launcher == "auto" and not launcher.own_cluster:
        refuse_step(os.environ, typed.ctx.obj or ("run",), parse_hosts)
    if typed.secret_file is not None:
        _reject_unused(typed, "secret_file", "this run starts all of its nodes itself", "--rendezvous and --node-rank")
    if named is not None and not typed.counts(named) and not named.is_from_file:
        _reject_unused(typed, named.option.name, f"--launcher {job.launcher} has its nodes elsewhere", "--launcher ssh")
    has_other_hosts = typed.hosts or allocated(job.launcher, os.environ)[0] or "python" in launcher.takes
    if python is not None and not python.is_from_file and not has_other_hosts:
        _reject_unused(typed, "python", "this run has no other hosts", "--hosts")
    for name in typed.further_places:
        if typed.hosts:
            raise UsageError(f"{flag_name(name)} and --hosts: both say where the nodes are; give one of them")
        if name not in launcher.takes:
            _reject_unused(typed, name, f"--launcher {job.launcher} does not take it", f"--launcher {launcher_taking(name)}")


def _reject_unused(typed: TypedRun, option: str, why: str, belongs_to: str) -> None:
    why = f"{why}, and nothing uses it"
    if typed.ctx.get_parameter_source(option) == ParameterSource.COMMANDLINE:
        raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out, or give {belongs_to}")
    if not typed.quiet:
        note(f"TRAINER_{option.upper()}: {why}")


def within_allocation(typed: TypedRun, resolved: Resolved, place: Membership | None) -> tuple[Resolved, Sequence[Host]]:
    """Return the job and its allocated hosts; by default a job gets all of them."""
    if place is not None or typed.hosts or _launcher(typed, resolved.job).own_cluster:
        return resolved, ()
    hosts, variable = allocated(resolved.job.launcher, os.environ)
    if variable is None or not resolved.sources["nodes"].startswith("default"):
        return resolved, hosts
    job = Job.model_validate({**resolved.job.model_dump(), "nodes": len(hosts)})
    return replace(resolved, job=job, sources={**resolved.sources, "nodes": variable}), hosts


def request_elsewhere(typed: TypedRun, resolved: Resolved, place: Membership) -> tuple[Mapping[str, str], LaunchRequest]:
    """Return the settings' sources and the launch request for nodes started elsewhere."""
    from ..launch.launchers.joining import automatic_request, job_request, resume_request
    from ..launch.launchers.rendezvous import apply_membership

    secret = read_secret(typed.secret_file)
    job, sources = apply_membership(resolved.job, resolved.sources, place)
    if typed.automatic is not None:
        request = automatic_request(apply_membership(typed.automatic.job, typed.automatic.sources, place)[0])
    else:
        request = job_request(job) if typed.resume is None else resume_request(typed.resume, typed.given_settings, place)
    return sources, LaunchRequest(job, note, place, secret, request)


def _settings_shown(resolved: Resolved, personal: Mapping[str, GivenOption]) -> dict[str, tuple[Any, str]]:
    shown = {key: (value, resolved.sources[key]) for key, value in resolved.job.model_dump(mode="json").items()}
    for name, option in PERSONAL_OPTIONS.items():
        given_option = personal.get(name)
        shown[name] = (None, "default") if given_option is None else (option.shown(given_option.value), given_option.source)
    return shown


def settings_as_json(resolved: Resolved, personal: Mapping[str, GivenOption]) -> str:
    """Return all settings as a JSON document: by name, the value and its source."""
    shown = _settings_shown(resolved, personal)
    return json_text({key: {"value": value, "source": source} for key, (value, source) in shown.items()}, indent=2)


def settings_as_text(resolved: Resolved, personal: Mapping[str, GivenOption]) -> str:
    """Return one line per setting, in columns: name, value as JSON, source."""
    rows = [(key, json_text(value), source) for key, (value, source) in _settings_shown(resolved, personal).items()]
    width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for key, value, _ in rows if key not in PERSONAL_OPTIONS)
    return "\n".join(f"{key:<{width}}  {value:<{value_width}}  {source}" for key, value, source in rows)


class ResumeState(Enum):
    """The state of the run that ``--resume auto`` names."""

    STARTS = "starts"
    RESUMES = "resumes"
    SUCCEEDED = "succeeded"


def run_to_resume(job: Job) -> tuple[ResumeState, Path]:
    """Return the state of the run that the job names, and its directory.

    Moves a run without checkpoint aside. Raises UsageError if the job has no name, the run is in progress, or the path is taken.
    """
    if job.name is None:
        raise UsageError("--resume auto resumes the run of the same name; give the run a --name")
    path = job.out / job.name
    if not path.exists():
        return ResumeState.STARTS, path
    if not is_run(path):
        raise UsageError(f"--resume auto: {str(path)!r} is no run; give another --name")
    reader = RunReader(path)
    if reader.state() == "succeeded":
        return ResumeState.SUCCEEDED, path
    if list_checkpoints(path):
        return ResumeState.RESUMES, path
    refuse_at_work(reader)
    aside = next(place for number in range(1, 10_000) if not (place := path.with_name(f"{path.name}.before-{number}")).exists())
    with writing(path.parent):
        path.rename(aside)
    note(f"the run {path.name} ended before its first checkpoint and restarts; the old directory is now {aside}")
    return ResumeState.STARTS, path
