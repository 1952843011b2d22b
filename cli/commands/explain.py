"""``trainer explain``: what holds a run back, in plain words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ...records.store.jsonl import finite_json
from ...report.catalog.locate import find_run
from ...report.catalog.run import Run
from ...report.diagnosis.advice import advise
from ...report.diagnosis.text import headline, notes, page
from ...report.diagnosis.verdict import explain as explain_run
from ...report.tables.run_tables import to_text
from ..options import GivenPath
from ..run_arguments import warn_of_lost_updates

__all__ = ["explain"]


@click.command(short_help="Say what holds a run back, with the figures behind it.")
@click.argument("run", metavar="RUN")
@click.option(
    "--out",
    type=GivenPath(),
    default=Path("runs"),
    envvar="TRAINER_OUT",
    show_default=True,
    help="Folder in which run directories are made.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(run: str, out: Path, as_json: bool) -> None:
    """Say what holds a run back: computing, the network, data, a slow node, evaluating or saving; for each node too, and what would help.

    RUN is a run directory, or the name of one below --out. The run has to have ended.
    """
    found = Run(find_run(run, out))
    explanation = explain_run(found)
    warn_of_lost_updates([found])
    advice = advise(explanation)
    if as_json:
        words = {"text": headline(explanation), "notes": notes(explanation), "advice": [asdict(entry) for entry in advice]}
        click.echo(json.dumps(finite_json({**explanation.to_json(), **words}), indent=1))
    else:
        click.echo(to_text(page(explanation, advice)), nl=False)
