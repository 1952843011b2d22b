"""Where the nodes of a typed run are: this process's place among those that something else started, or what is asked of a launcher."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from click.core import ParameterSource

from ..core.errors import UsageError
from ..core.job import Job
from ..core.settings.job_fields import flag_name
from ..core.settings.sources import Resolved
from ..core.untrusted.console import note
from ..core.worker_layout import read_procs_per_node
from ..launch.environments.base import Membership
from ..launch.environments.detect import detect
from ..launch.environments.slurm_step import refuse_step
from ..launch.launchers.host_list import Host, parse_hosts
from ..launch.launchers.registry import (
    FOLLOW_OTHERS,
    LauncherPlugin,
    LaunchRequest,
    allocated,
    launcher_plugin,
    name_of_launcher,
    who_takes,
)
from .options import given_python
from .typed_run import TypedRun

__all__ = ["check_place", "launch_request", "place_of", "request_elsewhere", "within_allocation"]


def place_of(typed: TypedRun, settings: Mapping[str, Any]) -> Membership | None:
    """Return where this process stands among those that something else started; None where it is alone. `settings`: as far as known."""
    if settings.get("launcher", "auto") in FOLLOW_OTHERS:
        nodes, tasks = settings.get("nodes"), read_procs_per_node(settings.get("procs_per_node", 1))
        return detect(os.environ, typed.rendezvous, typed.node_rank, nodes, tasks)
    if typed.rendezvous is not None or typed.node_rank is not None:
        raise UsageError(
            f"--launcher: {settings['launcher']!r} starts the nodes itself; --rendezvous and --node-rank need 'auto' or 'rendezvous'"
        )
    return None


def launch_request(typed: TypedRun, job: Job) -> LaunchRequest:
    """Return what is asked of the launcher of a run that starts its nodes itself, without what a batch system has allocated."""
    python, further = given_python(typed.personal), typed.further_places
    return LaunchRequest(job, note, hosts=typed.hosts, python=python, options=further, environment=os.environ)


def _launcher(typed: TypedRun, job: Job) -> LauncherPlugin:
    """Return what the launcher of such a run says of itself."""
    request = replace(launch_request(typed, job), allocated=allocated(job.launcher, os.environ)[0])
    return launcher_plugin(name_of_launcher(request))


def check_place(typed: TypedRun, job: Job, place: Membership | None) -> None:
    """Refuse, or tell of, what belongs to another way of starting the nodes."""
    if place is None:
        launcher = _launcher(typed, job)
        if job.launcher == "auto" and not launcher.own_cluster:
            refuse_step(os.environ, typed.ctx.obj or ("run",), parse_hosts)
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


def _tell_unused(typed: TypedRun, option: str, why: str, belongs_to: str) -> None:
    """Refuse an option that was typed and that nothing uses; a variable may be set for other runs, and is only told of."""
    why = f"{why}, and nothing uses it"
    if typed.ctx.get_parameter_source(option) == ParameterSource.COMMANDLINE:
        raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out, or give {belongs_to}")
    if not typed.quiet:
        note(f"TRAINER_{option.upper()}: {why}")


def within_allocation(typed: TypedRun, resolved: Resolved, place: Membership | None) -> tuple[Resolved, Sequence[Host]]:
    """Return the job, and the nodes that a batch system has allocated for it: as many of them as the job says, all where it does not."""
    if place is not None or typed.hosts or _launcher(typed, resolved.job).own_cluster:
        return resolved, ()
    hosts, variable = allocated(resolved.job.launcher, os.environ)
    if variable is None or not resolved.sources["nodes"].startswith("default"):
        return resolved, hosts
    job = Job.model_validate({**resolved.job.model_dump(), "nodes": len(hosts)})
    return replace(resolved, job=job, sources={**resolved.sources, "nodes": variable}), hosts


def request_elsewhere(typed: TypedRun, resolved: Resolved, place: Membership) -> tuple[Mapping[str, str], LaunchRequest]:
    """Return the sources of the settings, and the request to launch, of a run whose nodes something else has started."""
    from ..engine.protocol.transport import read_secret
    from ..launch.launchers.joining import automatic_request, job_request, resume_request
    from ..launch.launchers.rendezvous import apply_membership

    secret = read_secret(typed.secret_file)
    job, sources = apply_membership(resolved.job, resolved.sources, place)
    if typed.automatic is not None:
        asked = automatic_request(apply_membership(typed.automatic.job, typed.automatic.sources, place)[0])
    else:
        asked = job_request(job) if typed.resume is None else resume_request(typed.resume, typed.given_settings, place)
    return sources, LaunchRequest(job, note, place, secret, asked)
