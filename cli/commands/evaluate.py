"""``trainer evaluate``: loss and metrics of a trained model, on any backend, whichever one trained it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

from ...backends.base import State
from ...backends.loading import load_backend
from ...checkpoint import Meta, data_info
from ...checkpoint.compatibility import rebuilt_model
from ...checkpoint.selection import ChosenWeights, choose
from ...core.errors import MissingPackageError, UsageError, writing
from ...core.job import Job
from ...core.plugins import available, forward_backends, forward_plugin
from ...core.settings.job_fields import choices
from ...core.untrusted.console import note
from ...data.base import DataInfo, Split, TextFeatures
from ...data.store.resolve import written_out
from ...data.store.stored_dataset import StoredDataset, open_dataset
from ...launch.driver.standalone_evaluation import Evaluated, Evaluator
from ...launch.resume.trust import refuse_foreign
from ...metrics import MetricInfo
from ...records.store.jsonl import finite_json
from ...records.text.numbers import number_text
from ..checkpoint_options import checkpoint_options, selection_of
from ..options import GivenPath, check_typed_model, model_option, name_settings, trust_option
from ..run_arguments import find_run_or_checkpoint

__all__ = ["evaluate"]


@click.command(short_help="Evaluate a trained model on a dataset, on any backend.")
@click.argument("source", type=GivenPath(), metavar="RUN|CHECKPOINT")
@checkpoint_options
@model_option
@click.option("--data", metavar="NAME", help="A name from `trainer data list` [default: what it was trained on].")
@click.option("--data-dir", type=GivenPath(), help="Folder with the dataset's original files, where you have them.")
@click.option("--backend", metavar="NAME", help="A name from `trainer backends` [default: the one that trained it].")
@click.option("--precision", metavar="fp32|bf16|fp16", help="Number format of convolutions and matrix products [default: the run's].")
@click.option("--device", metavar="auto|cpu|gpu", help="Where to compute [default: as the run was asked to].")
@click.option("--split", default="test", metavar="test|train", help="Which part of the dataset. [default: test]")
@click.option("--predictions", type=GivenPath(), help="Write logits and labels into this new .npz file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@trust_option("Take")
def evaluate(
    source: Path,
    best: bool,
    checkpoint: str | None,
    average_checkpoints: int,
    weights: str | None,
    model: str | None,
    data: str | None,
    data_dir: Path | None,
    backend: str | None,
    precision: str | None,
    device: str | None,
    split: str,
    predictions: Path | None,
    as_json: bool,
    trust_run: bool,
) -> None:
    """Evaluate a trained model on every example of a dataset's split.

    RUN is a run directory, whose newest sound checkpoint is taken unless another is asked for; CHECKPOINT is one of those.
    """
    selection = selection_of(best=best, checkpoint=checkpoint, average_checkpoints=average_checkpoints, weights=weights)
    if split not in ("test", "train"):
        raise UsageError.of("--split", split, "test, train", ["test", "train"])
    if predictions is not None:
        _check_new(predictions)
    chosen = choose(find_run_or_checkpoint(source), selection)
    for error in chosen.damaged:
        note(f"{error} Another one is taken.")
    meta = chosen.meta
    options = {"model": model, "data": data, "data_dir": data_dir, "backend": backend, "precision": precision, "device": device}
    name_settings({field: "flag" if typed is not None else f"checkpoint {chosen.path.name}" for field, typed in options.items()})
    check_typed_model(model, meta.job["model"])
    taken = _taken(meta, model, data, data_dir)
    refuse_foreign(taken, chosen.path, ("model", "data", "data_dir"), trusted=trust_run)
    job = _job(meta, data, data_dir, backend, precision, device)
    dataset = _fitting_data(meta, job)
    spec = rebuilt_model(meta)
    state = State(chosen.parameters(), {}, meta.step, chosen.buffers())
    if predictions is not None and not spec.classes:
        raise UsageError(f"--predictions: {job.model!r} has no classes, so that there are no logits of examples to write.")
    evaluator = Evaluator(job, spec, dataset, note)
    evaluated = evaluator.evaluate(state, cast(Split, split), logits=predictions is not None)
    _print(_figures(chosen, job, dataset, evaluated, predictions), spec.objective.infos, as_json=as_json)
    if predictions is not None and evaluated.logits is not None:
        _write_predictions(predictions, evaluated.logits, dataset.labels(cast(Split, split)))


# What to evaluate, on what --------------------------------------------------------------------------------------------


def _known_dir(meta: Meta, data: str | None) -> str | None:
    """Return the folder that the checkpoint names for the data, where these are the data to evaluate on."""
    known: str | None = meta.data.get("data_dir") if data is None or data == meta.job["data"] else None
    return known


def _taken(meta: Meta, model: str | None, data: str | None, data_dir: Path | None) -> dict[str, Any]:
    """Return what is taken from the checkpoint, as nothing else is given."""
    taken = {}
    if model is None:
        taken["model"] = meta.job["model"]
    if data is None:
        taken["data"] = meta.job["data"]
    if data_dir is None:
        taken["data_dir"] = _known_dir(meta, data)
    return taken


def _job(meta: Meta, data: str | None, data_dir: Path | None, backend: str | None, precision: str | None, device: str | None) -> Job:
    """Return the job of the one task that evaluates."""
    for field, given in (("precision", precision), ("device", device)):
        if given is not None and given not in choices(field):
            raise UsageError.of(f"--{field}", given, ", ".join(choices(field)), choices(field))
    job = Job(
        backend=_backend(meta, backend),
        model=meta.job["model"],
        data=data or meta.job["data"],
        data_dir=data_dir or _known_dir(meta, data),
        precision=precision or meta.job.get("precision", "fp32"),
        device=device or meta.job.get("device", "auto"),
        seed=meta.seed,
        monitor=False,
        tensorboard=False,
    )
    return written_out(job)


def _backend(meta: Meta, asked: str | None) -> str:
    """Return the backend to use: the one that is asked for, else the one that trained the model, else another that is installed."""
    model = meta.job["model"]
    known = available("backend")
    if asked is not None:
        if asked not in known:
            raise UsageError.of("--backend", asked, ", ".join(known), known)
        load_backend(asked)  # raises where its framework is not installed
        forward_plugin(model, asked)
        return asked
    on = forward_backends(model)
    if not on:
        raise UsageError(f"model: {model!r} has no forward function on any backend ({', '.join(known)}).")
    for name in dict.fromkeys([meta.backend, *on]):
        if name in on and known[name].installed:
            if name != meta.backend:
                note(f"backend: {name}, because {meta.backend}, which trained this model, {_lacks(meta.backend, on)}")
            return name
    hints = " or ".join(f"`{known[name].install}`" for name in on)
    raise MissingPackageError(f"backend: none is installed that has the model {model!r}. Install one with {hints}.")


def _lacks(backend: str, on: Sequence[str]) -> str:
    return "is not installed" if backend in on else "has no forward function of it here"


def _fitting_data(meta: Meta, job: Job) -> StoredDataset:
    """Open the dataset, normalised as the model's training data was. Raises UsageError where the model does not fit it."""
    dataset = open_dataset(job.data, job.data_dir)
    info, trained = dataset.info, meta.data
    if "columns" in trained or info.normalisation is None:
        _require_same_columns(info, data_info(trained), job.data)
        return dataset
    for what, given, expected in (
        ("images of shape", list(info.input_shape), list(trained["input_shape"])),
        ("classes:", info.classes, trained["classes"]),
    ):
        if given != expected:
            raise UsageError(
                f"--data: {job.data!r} has {what} {given}, but the model was trained on {trained['name']!r} with {what} {expected}."
                " Give a dataset of the same shape and classes."
            )
    known = trained.get("class_names") or info.class_names
    if info.class_names and list(info.class_names) != list(known):
        label, here, there = next((i, a, b) for i, (a, b) in enumerate(zip(info.class_names, known, strict=True)) if a != b)
        raise UsageError(
            f"--data: class {label} of {job.data!r} is called {here!r}, but the model was trained on {trained['name']!r}, where it is"
            f" {there!r}. Labels would not mean the same; give a dataset with the same classes."
        )
    if (list(info.mean), list(info.std)) != (list(trained["mean"]), list(trained["std"])):
        note(f"data: {job.data} is normalised by the mean and standard deviation of {trained['name']}, as in training")
    return dataset.normalised_as(trained["mean"], trained["std"])


def _require_same_columns(info: DataInfo, trained: DataInfo, name: str) -> None:
    """Raise UsageError where data that is not images, or not only, is of another shape than what the model was trained on."""

    def described(of: DataInfo) -> str:
        vocabularies = of.features.vocabulary_sizes if isinstance(of.features, TextFeatures) else {}
        return ", ".join(f"{column.name} ({vocabularies.get(column.name, column.dtype)})" for column in of.columns)

    if (info.columns, info.features) != (trained.columns, trained.features):
        raise UsageError(
            f"--data: {name!r} has the columns {described(info)}, but the model was trained on {trained.name!r} with "
            f"{described(trained)}. Give a dataset of the same columns."
        )


# What comes out -------------------------------------------------------------------------------------------------------


def _check_new(path: Path) -> None:
    if path.exists():
        raise UsageError(f"--predictions: {str(path)!r} exists, and nothing is overwritten. Remove it or give another file.")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--predictions: {str(path.parent)!r} is no folder that can be written. Give another file.")


def _write_predictions(path: Path, logits_nk: Any, labels_n: Any) -> None:
    """Write the file in one move, so that there is never half of it. Raises DiskError."""
    with writing(path):
        descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
        try:
            with open(descriptor, "wb") as file:
                np.savez(file, logits=logits_nk, labels=labels_n)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise


def _figures(chosen: ChosenWeights, job: Job, dataset: StoredDataset, evaluated: Evaluated, predictions: Path | None) -> Mapping[str, Any]:
    result, meta = evaluated.result, chosen.meta
    return {
        "checkpoint": str(chosen.path),
        "averaged_checkpoints": [checkpoint.path.name for checkpoint in chosen.checkpoints] if len(chosen.checkpoints) > 1 else None,
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
        **evaluated.figures,
        "seconds": result.seconds,
        "predictions": None if predictions is None else str(predictions),
    }


def _print(figures: Mapping[str, Any], infos: Sequence[MetricInfo], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(finite_json(figures), indent=1))
        return
    synthetic = ", synthetic" if figures["synthetic"] else ""
    lines = [(info.label, number_text(figures[info.name])) for info in infos]
    lines.append(
        (
            "on",
            f"{figures['examples']:,} examples of {figures['data']} ({figures['split']}{synthetic}), {figures['backend']},"
            f" {figures['precision_used']}, {figures['seconds']:.2f} s",
        )
    )
    width = max(len(label) for label, _ in lines)
    averaged = figures["averaged_checkpoints"]
    mean = f", mean of {len(averaged)} checkpoints" if averaged else ""
    ema = ", moving average of the weights" if figures["weights"] == "ema" else ""
    click.echo(
        f"{figures['model']} after {figures['step']:,} updates{mean}{ema}, trained by {figures['trained_by']} on {figures['trained_on']}"
    )
    for label, text in lines:
        click.echo(f"{label:<{width}}  {text}")
