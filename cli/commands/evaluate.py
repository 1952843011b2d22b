"""``trainer evaluate``: loss and metrics of a trained model, on any backend."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

from ...backends.base import State
from ...checkpoint.reader import rebuilt_model
from ...checkpoint.selection import ChosenWeights, Selection
from ...core.console import json_text, note
from ...core.drafts import replacing
from ...core.errors import UsageError, writing
from ...core.job import Job
from ...data.base import Split
from ...data.store.stored_dataset import StoredDataset
from ...launch.standalone_evaluation import Evaluated, Evaluator
from ...metrics import MetricInfo
from ...models.decoding import refuse_unscorable
from ...models.objectives import refuse_uncomputable
from ...records.store.jsonl import finite_json
from ...records.text import count_text, figure_text
from ...report.runs.translation_scores import Searched
from ..options import GivenPath, check_choice, decoding_options, model_option, trust_option
from ..trained_job import TaskSettings, checkpoint_options, fitting_data, trained_job, trained_weights

SPLITS = ("test", "train")


@click.command(short_help="Evaluate a trained model on a dataset, on any backend.")
@click.argument("source", type=GivenPath(), metavar="RUN|CHECKPOINT")
@checkpoint_options
@model_option
@click.option("--data", metavar="NAME", help="A name from `trainer data list` [default: what it was trained on].")
@click.option("--data-dir", type=GivenPath(), help="Folder with the dataset's original files.")
@click.option("--backend", metavar="NAME", help="A name from `trainer backends` [default: the one that trained it].")
@click.option("--precision", metavar="fp32|bf16|fp16", help="Number format of convolutions and matrix products [default: the run's].")
@click.option("--device", metavar="auto|cpu|gpu", help="Device [default: the run's].")
@decoding_options
@click.option("--split", default="test", metavar="|".join(SPLITS), help="Split of the dataset. [default: test]")
@click.option("--predictions", type=GivenPath(), help="Write logits and labels into this new .npz file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@trust_option("Trust")
def evaluate(
    source: Path,
    selection: Selection,
    split: str,
    predictions: Path | None,
    as_json: bool,
    trust_run: bool,
    **settings: Any,
) -> None:
    """Evaluate a trained model on every example of a dataset's split.

    RUN is a run directory, with its newest valid checkpoint by default; CHECKPOINT is one of its checkpoints.
    """
    check_choice("--split", split, SPLITS)
    if predictions is not None:
        _check_new(predictions)
    task_settings = TaskSettings(**settings)
    chosen = trained_weights(source, selection, settings, trusted=trust_run)
    meta = chosen.meta
    job = trained_job(meta, task_settings)
    dataset = fitting_data(meta, job)
    spec = rebuilt_model(meta)
    state = State(chosen.parameters(), {}, meta.step, chosen.buffers())
    if spec.objective.translation is None and (task_settings.beam, task_settings.length_penalty) != (None, None):
        raise UsageError(
            f"--{'beam' if task_settings.beam is not None else 'length-penalty'}: does nothing here, as {job.model!r} translates nothing."
        )
    if predictions is not None and not spec.classes:
        raise UsageError(f"--predictions: {job.model!r} has no classes, so that there are no logits of examples to write.")
    refuse_uncomputable(spec.objective)
    if spec.objective.translation is not None:
        refuse_unscorable(dataset, spec.objective.translation)
    evaluator = Evaluator(job, spec, dataset, note)
    evaluated = evaluator.evaluate(state, cast(Split, split), logits=predictions is not None)
    if evaluated.without_numbers and spec.objective.translation is None:
        note(f"the logits of {evaluated.without_numbers:,} of {evaluated.result.examples:,} examples are not finite")
    elif evaluated.without_numbers:
        note(f"the model's output is not finite for {evaluated.without_numbers:,} sentences; each of them counts as an empty translation")
    _print(_figures(chosen, job, dataset, evaluated, predictions), spec.objective.infos, as_json=as_json)
    if predictions is not None and evaluated.logits is not None:
        with writing(predictions), replacing(predictions) as draft, draft.open("wb") as file:
            np.savez(file, logits=evaluated.logits, labels=dataset.column(cast(Split, split), spec.target).values)


def _check_new(path: Path) -> None:
    if path.exists():
        raise UsageError(f"--predictions: {str(path)!r} exists, and nothing is overwritten. Remove it or give another file.")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--predictions: {str(path.parent)!r} is no folder that can be written. Give another file.")


def _figures(chosen: ChosenWeights, job: Job, dataset: StoredDataset, evaluated: Evaluated, predictions: Path | None) -> Mapping[str, Any]:
    result, meta = evaluated.result, chosen.meta
    return {
        "checkpoint": str(chosen.path),
        "averaged_checkpoints": chosen.averaged,
        "weights": chosen.weights,
        "step": meta.step,
        "model": job.model,
        "trained_by": meta.backend,
        "trained_on": meta.data["name"],
        "backend": job.backend,
        "data": job.data,
        "synthetic": dataset.info.synthetic,
        "split": result.split,
        "precision": job.precision,
        "precision_used": evaluated.precision_used,
        "examples": result.examples,
        "translation_signature": evaluated.signature,
        **evaluated.figures,
        "seconds": result.seconds,
        "predictions": None if predictions is None else str(predictions),
    }


def _print(figures: Mapping[str, Any], infos: Sequence[MetricInfo], *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(finite_json(figures), indent=1))
        return
    synthetic = ", synthetic" if figures["synthetic"] else ""
    lines = [(info.label, figure_text(info.name, figures[info.name])) for info in infos]
    examples = f"{figures['examples']:,} examples of {figures['data']} ({figures['split']}{synthetic})"
    lines.append(("on", f"{examples}, {figures['backend']}, {figures['precision_used']}, {figures['seconds']:.2f} s"))
    if figures["translation_signature"] is not None:
        how = Searched.from_signatures([figures["translation_signature"]])
        lines.append(("decoded", f"{count_text(how.sentences)} sentences of these, {how.method or 'as its signature says'}"))
        lines.append(("signature", figures["translation_signature"]))
    width = max(len(label) for label, _ in lines)
    averaged = figures["averaged_checkpoints"]
    mean = f", mean of {len(averaged)} checkpoints" if averaged else ""
    ema = ", moving average of the weights" if figures["weights"] == "ema" else ""
    trained = f"trained by {figures['trained_by']} on {figures['trained_on']}"
    click.echo(f"{figures['model']} after {figures['step']:,} updates{mean}{ema}, {trained}")
    for label, text in lines:
        click.echo(f"{label:<{width}}  {text}")
