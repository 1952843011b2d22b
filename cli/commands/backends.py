"""``trainer backends``: which frameworks can train here, and how to get those that cannot."""

from __future__ import annotations

from dataclasses import asdict

import click

from ...backends.base import Availability
from ...core.untrusted.console import json_text
from ...engine.backend_probe import probe_all

__all__ = ["backends", "describe"]


@click.command("backends", short_help="Show the frameworks: version and devices, or how to get them.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
def backends(as_json: bool) -> None:
    """Show each known backend: its version and devices, or why it cannot be used and how to get it.

    Each framework is imported in a process of its own, which takes a few seconds.
    """
    found = probe_all()
    click.echo(json_text([asdict(one) for one in found], indent=2) if as_json else "\n".join(map(describe, found)))


def describe(found: Availability) -> str:
    """Write one backend in a line, with a second one for what to do where it is missing."""
    if found.problem is None:
        return f"{found.name:<8}{found.version}  on {', '.join(found.devices)}"
    return f"{found.name:<8}unusable: {found.problem}" + (f"\n        {found.hint}" if found.hint else "")
