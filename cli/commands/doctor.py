"""``trainer doctor``: what this machine has, what it lacks, and what to do about each lack."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict

import click

from ...launch.machine_checks import Check, check_machine

__all__ = ["doctor"]


@click.command("doctor", short_help="Check this machine and say what to do about each lack.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this machine: frameworks, GPUs, cores and memory with their limits, virtual nodes, room on disk.

    Exits 0 when at least one backend can train, 1 otherwise. Takes a few seconds, as each framework is imported once.
    """
    checks, can_train = check_machine()
    if as_json:
        click.echo(json.dumps({"can_train": can_train, "python": platform.python_version(), "checks": list(map(asdict, checks))}, indent=2))
    else:
        click.echo("\n".join(map(_line, checks)))
        click.echo(f"\n{_verdict(checks, can_train)}")
    ctx.exit(0 if can_train else 1)


def _line(check: Check) -> str:
    mark = "ok  " if check.state == "ok" else "LACK"
    remedy = f"\n      {'':<18}→ {check.remedy}" if check.remedy else ""
    return f"{mark}  {check.name:<18}{check.found}{remedy}"


def _verdict(checks: list[Check], can_train: bool) -> str:
    if not can_train:
        return "No backend can train here; see the remedies above."
    lacks = sum(check.state == "lack" for check in checks)
    return "Ready to train." if not lacks else f"Ready to train; {lacks} thing{'s' if lacks > 1 else ''} could be better."
