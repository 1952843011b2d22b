"""``trainer backends``: the frameworks, and how to install missing ones."""

from __future__ import annotations

from dataclasses import asdict

import click

from ...backends.base import Availability
from ...core.console import json_text
from ...launch.preflight.interview import probe_with_cache


@click.command("backends", short_help="List frameworks with versions and devices.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.option("--fresh", is_flag=True, help="Ignore cached probe results.")
def backends(as_json: bool, fresh: bool) -> None:
    """Show frameworks with versions and devices, or how to install them.

    Each framework is imported in a separate process, which takes a few seconds. Results are cached until the installation, the GPUs or
    their driver change.
    """
    availabilities = probe_with_cache(fresh=fresh)
    click.echo(
        json_text([asdict(backend) for backend in availabilities], indent=2) if as_json else "\n".join(map(describe, availabilities))
    )


def describe(backend: Availability) -> str:
    """Return a line about a backend, with the remedy below if it is unusable."""
    if backend.problem is None:
        return f"{backend.name:<8}{backend.version}  on {', '.join(backend.devices)}"
    return f"{backend.name:<8}unusable: {backend.problem}" + (f"\n        {backend.hint}" if backend.hint else "")
