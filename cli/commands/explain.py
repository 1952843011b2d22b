"""``trainer explain``: the bottleneck of a run."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from ...core.console import json_text
from ...core.errors import UsageError
from ...core.units import MAX_AMOUNT
from ...records.store.jsonl import finite_json
from ...report.analysis.advice import advise
from ...report.analysis.diagnosis import diagnose as explain_run
from ...report.analysis.diagnosis_text import answers, answers_json, diagnose_several, headline, notes, page, render_answers
from ...report.analysis.duration import Wanted
from ...report.compare.run_tables import to_text
from ...report.runs.locate import find_run, is_run, run_names
from ...report.runs.run import Run, as_recorded
from ..options import IntegerRange, out_option
from ..run_request import finished_runs, warn_of_lost_updates
from ..streams import echo_wrapped


@click.command(short_help="Explain a run's bottleneck.")
@click.argument("run", metavar="RUN|SWEEP")
@out_option("Folder for run directories.")
@click.option("--planned-steps", type=IntegerRange(1, MAX_AMOUNT), help="Estimate the duration for this many updates in total.")
@click.option("--planned-epochs", type=IntegerRange(1, MAX_AMOUNT), help="The same in epochs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(run: str, out: Path, planned_steps: int | None, planned_epochs: int | None, as_json: bool) -> None:
    """Explain a run's bottleneck, and what would help.

    Bottlenecks are computation, communication, data loading, stragglers, evaluation and checkpoints. Also answers common questions:
    remaining time, convergence, use of processors and network, learning rate, training set, checkpoints.

    RUN is a run directory, or the name of one below --out. For a run that is in progress or was killed, the answers cover its records so
    far. For a SWEEP or another folder of runs there is one line per run, and the effect of each setting in which they differ.
    """
    if planned_steps is not None and planned_epochs is not None:
        raise UsageError("planned-steps and planned-epochs: give one of the two.")
    if (folder := _folder_of_runs(run, out)) is not None:
        if planned_steps is not None or planned_epochs is not None:
            raise UsageError("planned-steps and planned-epochs: are about one run; name one of the sweep")
        explained = diagnose_several(finished_runs([str(folder)], out))
        if as_json:
            click.echo(json_text(explained.to_json(), indent=1))
        else:
            echo_wrapped(to_text(explained.page()))
        return
    recorded = as_recorded(Run(find_run(run, out)))
    explanation = explain_run(recorded)
    warn_of_lost_updates([recorded])
    advice = advise(explanation)
    answered = answers(recorded, explanation, Wanted(planned_steps, planned_epochs))
    if as_json:
        words = {"text": headline(explanation), "notes": notes(explanation), "advice": [asdict(entry) for entry in advice]}
        document = {**explanation.to_json(), **words, "questions": answers_json(answered)}
        click.echo(json_text(finite_json(document), indent=1))
    else:
        echo_wrapped(to_text(page(explanation, advice)))
        echo_wrapped(to_text(render_answers(answered)))


def _folder_of_runs(text: str, out: Path) -> Path | None:
    for folder in (Path(text), out / text):
        if os.path.isdir(folder) and not is_run(folder) and next(run_names(folder), None) is not None:
            return folder
    return None
