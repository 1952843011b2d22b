"""``trainer doctor``: what this machine has, what it lacks, and what to do about each lack."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...core.untrusted.console import note
from ...launch.launchers.host_list import Host
from ...launch.machine_checks import Check, check_machine
from ..options import PLACES, NumberRange, given_hosts, given_personal, given_python, personal_options

__all__ = ["doctor"]


@click.command("doctor", short_help="Check this machine and say what to do about each lack.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@personal_options(*PLACES)
@click.option(
    "--timeout", type=NumberRange(1, 86_400), default=30.0, show_default=True, help="Seconds within which the hosts have to answer."
)
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, timeout: float, **_personal: Any) -> None:
    """Check this machine: frameworks, GPUs, cores and memory with their limits, virtual nodes, room on disk.

    Exits 0 when at least one backend can train, 1 otherwise. Takes a few seconds, as each framework is imported once.

    With --hosts or --hostfile (or their variables) it checks those machines by ssh instead, all at once: releases, cores, memory, clocks,
    and whether they reach each other. Exits 0 when a run could begin on them, 1 otherwise.
    """
    personal = given_personal(ctx)
    typed = {name: given for name, given in personal.items() if not given.of_own_file}
    if named := given_hosts(typed):
        ctx.exit(_check_hosts(named, given_python(personal), timeout, as_json=as_json))
    if any(name in personal for name in ("hosts", "hostfile")):
        note("your own file names hosts for runs; this is about this machine, and --hosts or --hostfile about them")
    checks, can_train = check_machine()
    if as_json:
        click.echo(json.dumps({"can_train": can_train, "python": platform.python_version(), "checks": list(map(asdict, checks))}, indent=2))
    else:
        click.echo("\n".join(map(_line, checks)))
        click.echo(f"\n{_verdict(checks, can_train)}")
    ctx.exit(0 if can_train else 1)


def _check_hosts(hosts: Sequence[Host], python: Path | None, timeout_seconds: float, *, as_json: bool) -> int:
    from ...launch.launchers.host_checks import HostChecks
    from ...launch.launchers.ssh import make_starter
    from ...launch.preflight.findings import table

    checks = HostChecks(make_starter(hosts, timeout_seconds), len(hosts), python)
    try:
        found = checks.findings(timeout_seconds)
    finally:
        checks.close()
    bad = {one.host for one in found if one.state == "bad"}
    if as_json:
        click.echo(
            json.dumps({"can_train": not bad, "hosts": [host.name for host in hosts], "findings": list(map(asdict, found))}, indent=2)
        )
    else:
        click.echo(table(found))
        click.echo(f"\n{f'{len(bad)} of {len(hosts)} hosts cannot take part in a run.' if bad else 'A run can begin on these hosts.'}")
    return 1 if bad else 0


def _line(check: Check) -> str:
    mark = "ok  " if check.state == "ok" else "LACK"
    remedy = f"\n      {'':<18}→ {check.remedy}" if check.remedy else ""
    return f"{mark}  {check.name:<18}{check.found}{remedy}"


def _verdict(checks: list[Check], can_train: bool) -> str:
    if not can_train:
        return "No backend can train here; see the remedies above."
    lacks = sum(check.state == "lack" for check in checks)
    return "Ready to train." if not lacks else f"Ready to train; {lacks} thing{'s' if lacks > 1 else ''} could be better."
