"""``trainer doctor``: checks of this machine or of hosts, with fixes for problems."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from ...core.console import json_text, note
from ...core.errors import UsageError
from ...core.job import Job
from ...core.settings.job_fields import flag_name
from ...core.settings.personal import GivenOption
from ...launch.launchers.host_list import LooksAtHosts
from ...launch.launchers.machine_checks import Check, check_machine
from ...launch.launchers.registry import LaunchRequest, allocated, choose_launcher, launcher_plugin, name_of_launcher, takes_option
from ...launch.preflight.findings import table
from ..options import (
    FURTHER_PLACES,
    NAMING_NODES,
    PLACES,
    NumberRange,
    given_hosts,
    given_personal,
    given_python,
    name_settings,
    personal_options,
)


@click.command("doctor", short_help="Check this machine and suggest fixes for problems.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.option("--fresh", is_flag=True, help="Ignore cached probe results.")
@click.option("--launcher", default=None, metavar="NAME", help="Check the hosts of this launcher: ssh, slurm, ray or a plugin.")
@personal_options(*PLACES, *FURTHER_PLACES)
@click.option("--timeout", type=NumberRange(1, 86_400), default=30.0, show_default=True, help="Seconds for the hosts to answer.")
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, fresh: bool, launcher: str | None, timeout: float, **_personal: Any) -> None:
    """Check this machine: frameworks, GPUs, cores, memory, virtual nodes, disk space.

    Exits 0 if at least one backend can train, 1 otherwise. The first call takes a few seconds, as each framework is imported; results are
    cached, as by `trainer backends`.

    With --hosts or --hostfile (or their variables) it checks those machines by ssh instead, in parallel: versions, cores, memory, clocks,
    and connections between them. --launcher ray (or --ray-address) checks the nodes of a Ray cluster, --launcher slurm those of a Slurm
    allocation, and --launcher NAME those of a plugin. Exits 0 if a run could start on them, 1 otherwise.
    """
    personal = given_personal(ctx)
    name_settings({"launcher": "flag"})
    counted = {name: option for name, option in personal.items() if _is_relevant(option, launcher)}
    if launcher is not None or counted.keys() & {*NAMING_NODES}:
        ctx.exit(_check_hosts(launcher, counted, timeout, as_json=as_json))
    _note_other_hosts(personal)
    checks, can_train = check_machine(fresh=fresh)
    if as_json:
        click.echo(json_text({"can_train": can_train, "python": platform.python_version(), "checks": list(map(asdict, checks))}, indent=2))
    else:
        click.echo("\n".join(map(_line, checks)))
        click.echo(f"\n{_verdict(checks, can_train)}")
    ctx.exit(0 if can_train else 1)


def _is_relevant(option: GivenOption, launcher: str | None) -> bool:
    name = option.option.name
    if option.typed or name not in NAMING_NODES:
        return True
    return not option.is_from_file if launcher is None else takes_option(launcher, name)


def _note_other_hosts(personal: Mapping[str, GivenOption]) -> None:
    if personal.keys() & {*NAMING_NODES}:
        note("your own file names hosts for runs; this is about this machine, and --hosts, --hostfile or --launcher about them")
        return
    request = LaunchRequest(Job(), note, allocated=allocated("auto", os.environ)[0], environment=os.environ)
    launcher = name_of_launcher(request)
    if words := launcher_plugin(launcher).nodes_in_words:
        note(f"this is about this machine, and --launcher {launcher} about {words}")


def _check_hosts(launcher: str | None, personal: Mapping[str, GivenOption], timeout_seconds: float, *, as_json: bool) -> int:
    from ...launch.launchers.ssh import shape_of_hosts

    hosts, batch = given_hosts(personal), allocated(launcher or "auto", os.environ)[0]
    further = {name: personal[name].value for name in FURTHER_PLACES if name in personal}
    if further and hosts:
        raise UsageError(f"{flag_name(next(iter(further)))} and --hosts: both say where the nodes are; give one of them")
    shape = {"nodes": str(len(batch) or 1)} if not hosts else shape_of_hosts(hosts)
    job = Job.model_validate({"launcher": launcher or "auto", "start_timeout": timeout_seconds, **shape})
    request = LaunchRequest(job, note, hosts=hosts, allocated=batch, python=given_python(personal), options=further, environment=os.environ)
    chosen = choose_launcher(request)
    if not isinstance(chosen, LooksAtHosts):
        raise UsageError(f"--launcher: got {launcher!r}, which starts nothing on other hosts; leave it out to have this machine checked")
    try:
        findings = chosen.look(timeout_seconds)
    finally:
        chosen.close()
    names = list(dict.fromkeys(finding.host for finding in findings))
    bad = {finding.host for finding in findings if finding.state == "bad"}
    if as_json:
        click.echo(json_text({"can_train": not bad, "hosts": names, "findings": list(map(asdict, findings))}, indent=2))
    else:
        click.echo(table(findings))
        click.echo(f"\n{f'{len(bad)} of {len(names)} hosts cannot take part in a run.' if bad else 'A run can begin on these hosts.'}")
    return 1 if bad else 0


def _line(check: Check) -> str:
    mark = "ok  " if check.state == "ok" else "FAIL"
    remedy = f"\n      {'':<18}→ {check.remedy}" if check.remedy else ""
    return f"{mark}  {check.name:<18}{check.found}{remedy}"


def _verdict(checks: list[Check], can_train: bool) -> str:
    if not can_train:
        return "No backend can train here; see the remedies above."
    failed = sum(check.state == "lack" for check in checks)
    return "Ready to train." if not failed else f"Ready to train, but {failed} check{'s' if failed > 1 else ''} failed."
