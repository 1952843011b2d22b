"""``trainer compare``: finished runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..metrics.lines import finite_json
from ..report.compare import load, row
from ..report.tables import side_by_side, to_text

__all__ = ["compare"]


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN RUN…")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: a flat row for each run.")
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Lay finished runs side by side, a column each; RUN is a run directory.

    The first run is the one that the others are relative to.
    """
    summaries = load(runs)
    if as_json:
        click.echo(json.dumps({"runs": finite_json([row(summary) for summary in summaries])}, indent=1))
    else:
        click.echo(to_text(side_by_side(summaries)), nl=False)
