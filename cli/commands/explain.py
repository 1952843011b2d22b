"""``trainer explain``: what holds a run back, in plain words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ...core.errors import UsageError
from ...core.units import MOST_AMOUNT
from ...core.untrusted.console import json_text
from ...records.store.jsonl import finite_json
from ...report.catalog.locate import find_run
from ...report.catalog.run import Run
from ...report.catalog.unfinished import as_recorded
from ...report.diagnosis.advice import advise
from ...report.diagnosis.text import headline, notes, page
from ...report.diagnosis.verdict import explain as explain_run
from ...report.questions.answers import answers, answers_json, answers_page
from ...report.questions.duration import Wanted
from ...report.tables.run_tables import to_text
from ..options import GivenPath, IntegerRange
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
@click.option("--planned-steps", type=IntegerRange(1, MOST_AMOUNT), help="Say how long the run would take with so many updates in all.")
@click.option("--planned-epochs", type=IntegerRange(1, MOST_AMOUNT), help="The same in epochs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(run: str, out: Path, planned_steps: int | None, planned_epochs: int | None, as_json: bool) -> None:
    """Say what holds a run back: computing, the network, data, a slow node, evaluating or saving; for each node too, and what would help.

    Then the questions that people ask of a run: how long the plan takes, whether it still learns, how busy processors and network are, why
    the learning rate has its shape, how large training set and checkpoints are.

    RUN is a run directory, or the name of one below --out. Of one that is still at work, or was killed, it says what the records tell so
    far, and what is missing; trainer watch has the time left of one at work.
    """
    if planned_steps is not None and planned_epochs is not None:
        raise UsageError("planned-steps and planned-epochs: give one of the two.")
    found = as_recorded(Run(find_run(run, out)))
    explanation = explain_run(found)
    warn_of_lost_updates([found])
    advice = advise(explanation)
    answered = answers(found, explanation, Wanted(planned_steps, planned_epochs))
    if as_json:
        words = {"text": headline(explanation), "notes": notes(explanation), "advice": [asdict(entry) for entry in advice]}
        document = {**explanation.to_json(), **words, "questions": answers_json(answered)}
        click.echo(json_text(finite_json(document), indent=1))
    else:
        click.echo(to_text(page(explanation, advice)), nl=False)
        click.echo(to_text(answers_page(answered)), nl=False)
