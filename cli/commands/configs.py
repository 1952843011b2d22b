"""``trainer configs``: a list of the shipped experiments, and the text of one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from ...core.bounded_json import parse_toml
from ...core.console import json_text
from ...core.errors import UsageError
from ...core.settings.sources import SWEEP, shipped


@dataclass(frozen=True, slots=True)
class ShippedConfig:
    """A shipped configuration: its name, a sentence about it, and the command that runs it."""

    name: str
    description: str
    command: str


def describe_configs() -> list[ShippedConfig]:
    """Return the shipped configurations; a file's first line is its description."""
    described = []
    for name, source in shipped().items():
        text = source.read_text(encoding="utf-8")
        first = text.splitlines()[0].removeprefix("#").strip()
        sweeps = SWEEP in parse_toml(text.encode(), "configs", name)
        described.append(ShippedConfig(name, first, f"trainer sweep {name}" if sweeps else f"trainer run --config {name}"))
    return described


@click.group("configs", invoke_without_command=True, short_help="List or show the shipped experiments.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output.")
@click.pass_context
def configs(ctx: click.Context, as_json: bool) -> None:
    """List the shipped experiments with their commands.

    `trainer configs show NAME` prints one as a starting point: trainer configs show quickstart > mine.toml
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise UsageError("--json: belongs to the list, and a configuration is TOML")
        return
    described = describe_configs()
    if as_json:
        click.echo(json_text([asdict(config) for config in described], indent=2))
        return
    wide = max(len(config.command) for config in described)
    click.echo("\n".join(f"{config.command:<{wide}}  {config.description}" for config in described))


@configs.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print the shipped configuration NAME."""
    known = shipped()
    if name not in known:
        raise UsageError.of("configs", name, ", ".join(known), known)
    click.echo(known[name].read_text(encoding="utf-8"), nl=False)
