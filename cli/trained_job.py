"""What a command that uses a trained state works with: its weights, the job of its one task, and data that fits the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..backends.loading import load_backend
from ..checkpoint import Meta, data_info
from ..checkpoint.selection import ChosenWeights, Selection, choose
from ..core.errors import MissingPackageError, UsageError
from ..core.job import Job
from ..core.plugins import available, forward_backends, forward_plugin
from ..core.settings.job_fields import choices
from ..core.untrusted.console import note
from ..data.base import DataInfo, TextFeatures
from ..data.sources.translation.tokenizer import pieces_digest
from ..data.store.resolve import written_out
from ..data.store.stored_dataset import StoredDataset, open_dataset
from ..launch.resume.trust import refuse_foreign
from ..models.decoding.settings import BEAM
from .options import check_typed_model, name_settings
from .run_arguments import find_run_or_checkpoint

__all__ = ["fitting_data", "trained_job", "trained_weights"]


def _known_dir(meta: Meta, data: str | None) -> str | None:
    """Return the folder that the checkpoint names for the data, where these are the data to evaluate on."""
    known: str | None = meta.data.get("data_dir") if data is None or data == meta.job["data"] else None
    return known


def trained_weights(
    source: Path, selection: Selection, typed: Mapping[str, Any], *, trusted: bool, reads_data: Callable[[Path], bool] = lambda _: True
) -> ChosenWeights:
    """Return the weights that are asked for, and tell of damaged checkpoints that others are taken for.

    `reads_data` says, given the path of the checkpoint, whether the command needs the run's data, which are nothing to trust otherwise.
    `typed` has the settings that the command has options for, by field, None where they are not typed. Raises UsageError where what is not
    typed would be taken from a run of somebody else's that is not `trusted`.
    """
    chosen = choose(find_run_or_checkpoint(source), selection)
    for error in chosen.damaged:
        note(f"{error} Another one is taken.")
    name_settings({field: "flag" if value is not None else f"checkpoint {chosen.path.name}" for field, value in typed.items()})
    model, data, data_dir = (typed.get(field) for field in ("model", "data", "data_dir"))
    check_typed_model(model, chosen.meta.job["model"])
    taken = _taken_settings(chosen.meta, model, data, data_dir)
    if not reads_data(chosen.path):
        taken = {field: value for field, value in taken.items() if field == "model"}
    refuse_foreign(taken, chosen.path, typed, trusted=trusted)
    return chosen


def _taken_settings(meta: Meta, model: str | None, data: str | None, data_dir: Path | None) -> dict[str, Any]:
    """Return what is taken from the checkpoint, as nothing else is given."""
    taken = {}
    if model is None:
        taken["model"] = meta.job["model"]
    if data is None:
        taken["data"] = meta.job["data"]
    if data_dir is None:
        taken["data_dir"] = _known_dir(meta, data)
    return taken


def trained_job(
    meta: Meta,
    data: str | None,
    data_dir: Path | None,
    backend: str | None,
    precision: str | None,
    device: str | None,
    beam: int | None = None,
    length_penalty: float | None = None,
    *,
    reads_data: bool = True,
) -> Job:
    """Return the job of the one task that works with a checkpoint's state; what is None is as the run had it.

    Not `reads_data`: the data are named as the run had them, and nothing is looked for.
    """
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
        beam=meta.job.get("beam", BEAM.beam) if beam is None else beam,
        length_penalty=meta.job.get("length_penalty", BEAM.length_penalty) if length_penalty is None else length_penalty,
        monitor=False,
        tensorboard=False,
    )
    return written_out(job) if reads_data else job


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


def fitting_data(meta: Meta, job: Job) -> StoredDataset:
    """Open the dataset, normalised as the model's training data was. Raises UsageError where the model does not fit it."""
    dataset = open_dataset(job.data, job.data_dir)
    info, trained = dataset.info, meta.data
    if "columns" in trained or info.normalisation is None:
        _require_same_columns(info, data_info(trained), job.data)
        _require_same_pieces(dataset, trained, job.data)
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


def _require_same_pieces(dataset: StoredDataset, trained: Mapping[str, Any], name: str) -> None:
    """Raise UsageError where the numbers of a dataset's text stand for other pieces than in training: the model would read nonsense."""
    expected = trained.get("pieces_sha256")
    if expected is not None and pieces_digest(dataset) != expected:
        raise UsageError(
            f"--data: the vocabulary of {name!r} has other pieces than the one that the model was trained with: its text, or what prepares"
            " it, has changed since. Give the text as it was then, or train again."
        )


def _require_same_columns(info: DataInfo, trained: DataInfo, name: str) -> None:
    """Raise UsageError where data that is not images, or not only, is of another shape than what the model was trained on."""

    def described(of: DataInfo) -> str:
        vocabularies = of.features.vocabulary_sizes if isinstance(of.features, TextFeatures) else {}
        return ", ".join(f"{column.name} ({vocabularies.get(column.name, column.dtype)})" for column in of.columns)

    here, there = (of.features.languages if isinstance(of.features, TextFeatures) else () for of in (info, trained))
    if here != there:
        said = [" to ".join(languages) or "no languages" for languages in (here, there)]
        raise UsageError(
            f"--data: {name!r} has {said[0]}, but the model was trained on {trained.name!r} with {said[1]}. Give the same languages."
        )
    if (info.columns, info.features) != (trained.columns, trained.features):
        raise UsageError(
            f"--data: {name!r} has the columns {described(info)}, but the model was trained on {trained.name!r} with "
            f"{described(trained)}. Give a dataset of the same columns."
        )
