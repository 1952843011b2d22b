"""``trainer doctor``: what this machine has, what it lacks, and what to do about each lack."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from ...core.errors import UsageError
from ...core.job import Job
from ...core.plugins import available
from ...core.settings.personal import GivenOption
from ...core.untrusted.console import json_text, note
from ...launch.environments.ray_job import in_ray_job
from ...launch.launchers.slurm import allocated_hosts
from ...launch.machine_checks import Check, check_machine
from ..options import PLACES, NumberRange, given_hosts, given_personal, given_python, personal_options

__all__ = ["doctor"]

NOT_ELSEWHERE = ("local", "rendezvous")
"""Launchers that start nothing on other hosts."""

LAUNCHER_OF = {"hosts": "ssh", "hostfile": "ssh", "ray_address": "ray"}
"""The launcher that starts what an option names."""


@click.command("doctor", short_help="Check this machine and say what to do about each lack.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.option("--fresh", is_flag=True, help="Ask the frameworks again, whatever is known of them.")
@click.option("--launcher", default=None, metavar="NAME", help="The hosts that it would start nodes on: ssh, slurm or ray.")
@personal_options(*PLACES, "ray_address")
@click.option(
    "--timeout", type=NumberRange(1, 86_400), default=30.0, show_default=True, help="Seconds within which the hosts have to answer."
)
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, fresh: bool, launcher: str | None, timeout: float, **_personal: Any) -> None:
    """Check this machine: frameworks, GPUs, cores and memory with their limits, virtual nodes, room on disk.

    Exits 0 when at least one backend can train, 1 otherwise. Takes a few seconds the first time, as each framework is imported then; what
    it said is kept, as by `trainer backends`.

    With --hosts or --hostfile (or their variables) it checks those machines by ssh instead, all at once: releases, cores, memory, clocks,
    and whether they reach each other. So it does with all nodes of a Ray cluster (--launcher ray, or --ray-address), and with those that
    Slurm has allocated (--launcher slurm, inside of salloc or sbatch). Exits 0 when a run could begin on them, 1 otherwise.
    """
    personal = given_personal(ctx)
    counted = {name: given for name, given in personal.items() if _counts(name, given, launcher)}
    if launcher is not None or counted.keys() & LAUNCHER_OF.keys():
        ctx.exit(_check_hosts(launcher, counted, timeout, as_json=as_json))
    _tell_others(personal)
    checks, can_train = check_machine(fresh=fresh)
    if as_json:
        click.echo(json_text({"can_train": can_train, "python": platform.python_version(), "checks": list(map(asdict, checks))}, indent=2))
    else:
        click.echo("\n".join(map(_line, checks)))
        click.echo(f"\n{_verdict(checks, can_train)}")
    ctx.exit(0 if can_train else 1)


def _counts(name: str, given: GivenOption, launcher: str | None) -> bool:
    """Whether an option says which hosts to look at: your own file does for its launcher alone, a variable unless another is named."""
    belongs = LAUNCHER_OF.get(name, launcher)
    return given.typed or belongs == launcher or (launcher in (None, "auto") and not given.of_own_file)


def _tell_others(personal: Mapping[str, GivenOption]) -> None:
    """Say that this is about this machine, where runs would be on others."""
    if personal.keys() & LAUNCHER_OF.keys():
        note("your own file names hosts for runs; this is about this machine, and --hosts, --hostfile or --launcher about them")
    elif in_ray_job(os.environ):
        note("this is about this machine, and --launcher ray about the nodes of the cluster that runs this job")
    elif len(allocated_hosts(os.environ)) > 1:
        note("this is about this machine, and --launcher slurm about the nodes that Slurm has allocated")


def _check_hosts(launcher: str | None, given: Mapping[str, GivenOption], timeout_seconds: float, *, as_json: bool) -> int:
    from ...launch.launchers.host_checks import LooksAtHosts
    from ...launch.launchers.registry import LaunchRequest, choose_launcher
    from ...launch.launchers.remote import shape_of_hosts
    from ...launch.preflight.findings import table

    _refuse_unknown(launcher)
    if "ray_address" in given and given.keys() & {"hosts", "hostfile"}:
        raise UsageError("--ray-address and --hosts: both say where the nodes are; give one of them")
    hosts, allocated = given_hosts(given), allocated_hosts(os.environ)
    shape = {"nodes": str(len(allocated) or 1)} if not hosts else shape_of_hosts(hosts)
    job = Job.model_validate({"launcher": launcher or "auto", "start_timeout": timeout_seconds, **shape})
    address = given["ray_address"].value if "ray_address" in given else None
    chosen = choose_launcher(LaunchRequest(job, note, hosts=hosts, allocated=allocated, python=given_python(given), ray_address=address))
    if not isinstance(chosen, LooksAtHosts):
        raise UsageError(f"--launcher: got {launcher!r}, which starts nothing on other hosts; leave it out to have this machine checked")
    try:
        found = chosen.look(timeout_seconds)
    finally:
        chosen.close()
    names = list(dict.fromkeys(one.host for one in found))
    bad = {one.host for one in found if one.state == "bad"}
    if as_json:
        click.echo(json_text({"can_train": not bad, "hosts": names, "findings": list(map(asdict, found))}, indent=2))
    else:
        click.echo(table(found))
        click.echo(f"\n{f'{len(bad)} of {len(names)} hosts cannot take part in a run.' if bad else 'A run can begin on these hosts.'}")
    return 1 if bad else 0


def _refuse_unknown(launcher: str | None) -> None:
    """Raise UsageError for a launcher that there is not, or that starts nothing on other hosts."""
    known = [name for name in available("launcher") if name not in NOT_ELSEWHERE]
    if launcher is not None and launcher not in ("auto", *known):
        remedy = "" if launcher not in NOT_ELSEWHERE else "; without --launcher and --hosts this machine is checked"
        raise UsageError.of("--launcher", launcher, f"auto, {', '.join(known)}{remedy}", known)


def _line(check: Check) -> str:
    mark = "ok  " if check.state == "ok" else "LACK"
    remedy = f"\n      {'':<18}→ {check.remedy}" if check.remedy else ""
    return f"{mark}  {check.name:<18}{check.found}{remedy}"


def _verdict(checks: list[Check], can_train: bool) -> str:
    if not can_train:
        return "No backend can train here; see the remedies above."
    lacks = sum(check.state == "lack" for check in checks)
    return "Ready to train." if not lacks else f"Ready to train; {lacks} thing{'s' if lacks > 1 else ''} could be better."
