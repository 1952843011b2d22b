"""``trainer explain``: what holds a run back, in plain words."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from ...core.errors import UsageError
from ...core.units import MOST_AMOUNT
from ...core.untrusted.console import json_text
from ...records.store.jsonl import finite_json
from ...report.catalog.locate import find_run, is_run, run_names
from ...report.catalog.run import Run
from ...report.catalog.unfinished import as_recorded
from ...report.conclusion.several_explanations import explain_several
from ...report.diagnosis.advice import advise
from ...report.diagnosis.headline import headline
from ...report.diagnosis.text import notes, page
from ...report.diagnosis.verdict import explain as explain_run
from ...report.questions.answers import answers, answers_json, answers_page
from ...report.questions.duration import Wanted
from ...report.tables.run_tables import to_text
from ..options import GivenPath, IntegerRange
from ..run_arguments import finished_runs, warn_of_lost_updates
from ..streams import echo_wrapped

__all__ = ["explain"]


@click.command(short_help="Explain a run's bottleneck.")
@click.argument("run", metavar="RUN|SWEEP")
@click.option(
    "--out",
    type=GivenPath(),
    default=Path("runs"),
    envvar="TRAINER_OUT",
    show_default=True,
    help="Folder for run directories.",
)
@click.option("--planned-steps", type=IntegerRange(1, MOST_AMOUNT), help="Estimate the duration for this many updates in total.")
@click.option("--planned-epochs", type=IntegerRange(1, MOST_AMOUNT), help="The same in epochs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(run: str, out: Path, planned_steps: int | None, planned_epochs: int | None, as_json: bool) -> None:
    """Explain a run's bottleneck: computation, communication, data loading, stragglers, evaluation or checkpoints, and what would help.

    Also answers common questions: remaining time, convergence, use of processors and network, learning rate, training set, checkpoints.

    RUN is a run directory, or the name of one below --out. For a run that is in progress or was killed, the answers cover its records so
    far. For a SWEEP or another folder of runs there is one line per run, and the effect of each setting in which they differ.
    """
    if planned_steps is not None and planned_epochs is not None:
        raise UsageError("planned-steps and planned-epochs: give one of the two.")
    if (folder := _folder_of_runs(run, out)) is not None:
        if planned_steps is not None or planned_epochs is not None:
            raise UsageError("planned-steps and planned-epochs: are about one run; name one of the sweep")
        _explain_several(folder, out, as_json=as_json)
        return
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
        echo_wrapped(to_text(page(explanation, advice)))
        echo_wrapped(to_text(answers_page(answered)))


def _folder_of_runs(text: str, out: Path) -> Path | None:
    """Return the folder of runs that `text` means, such as a sweep's; None where it means a run, or nothing."""
    for folder in (Path(text), out / text):
        if os.path.isdir(folder) and not is_run(folder) and next(run_names(folder), None) is not None:
            return folder
    return None


def _explain_several(folder: Path, out: Path, *, as_json: bool) -> None:
    explained = explain_several(finished_runs([str(folder)], out))
    if as_json:
        click.echo(json_text(explained.to_json(), indent=1))
    else:
        echo_wrapped(to_text(explained.page()))
