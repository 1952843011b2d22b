"""Commands that use a trained state: weights, job, fitting data, lines of input."""

from __future__ import annotations

import functools
import os
import select
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ..backends.loading import load_backend
from ..checkpoint import Meta, data_info
from ..checkpoint.selection import WEIGHTS, ChosenWeights, Selection, choose
from ..core.console import note
from ..core.errors import InterruptedRunError, MissingPackageError, UsageError
from ..core.job import Job
from ..core.plugins import available, forward_backends, forward_plugin
from ..core.settings.job_fields import choices
from ..data.base import DataInfo, ImageFeatures, TableFeatures, TextFeatures
from ..data.sources.translation.tokenizer import pieces_digest
from ..data.store.location import written_out
from ..data.store.stored_dataset import StoredDataset, open_dataset
from ..launch.driver.resumption import refuse_foreign
from ..models.decoding import BEAM
from .options import IntegerRange, check_choice, check_typed_model, name_settings
from .run_request import find_run_or_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """The settings given for the task that uses a trained state; None: as in the run."""

    model: str | None
    data: str | None = None
    data_dir: Path | None
    backend: str | None
    precision: str | None
    device: str | None
    beam: int | None
    length_penalty: float | None


_DECODING = ("beam", "length_penalty")


def _known_dir(meta: Meta, data: str | None) -> str | None:
    known: str | None = meta.data.get("data_dir") if data in (None, meta.job["data"]) else None
    return known


def trained_weights(
    source: Path, selection: Selection, typed: Mapping[str, Any], *, trusted: bool, reads_data: Callable[[Path], bool] = lambda _: True
) -> ChosenWeights:
    """Return the selected weights. Raises UsageError if untyped settings need a `trusted` run."""
    chosen = choose(find_run_or_checkpoint(source), selection)
    for error in chosen.damaged:
        note(f"{error} Another one is taken.")
    recorded = f"checkpoint {chosen.path.name}"
    name_settings({field: recorded if value is None else "flag" for field, value in typed.items() if field not in _DECODING})
    model, data = typed["model"], typed.get("data")
    check_typed_model(model, chosen.meta.job["model"])
    taken = {} if model is not None else {"model": chosen.meta.job["model"]}
    if reads_data(chosen.path):
        taken |= {} if data is not None else {"data": chosen.meta.job["data"]}
        taken |= {} if typed["data_dir"] is not None else {"data_dir": _known_dir(chosen.meta, data)}
    refuse_foreign(taken, chosen.path, typed, trusted=trusted)
    return chosen


def trained_job(meta: Meta, settings: TaskSettings, *, reads_data: bool = True) -> Job:
    """Return the job that uses a checkpoint; without `reads_data` no data are looked up."""
    for field, value in (("precision", settings.precision), ("device", settings.device)):
        check_choice(f"--{field}", value, choices(field))
    run, length_penalty = meta.job, settings.length_penalty
    job = Job(
        backend=_backend(meta, settings.backend),
        model=run["model"],
        data=settings.data or run["data"],
        data_dir=settings.data_dir or _known_dir(meta, settings.data),
        precision=settings.precision or run.get("precision", "fp32"),
        device=settings.device or run.get("device", "auto"),
        loss=run.get("loss"),
        seed=meta.seed,
        beam=run.get("beam", BEAM.beam) if settings.beam is None else settings.beam,
        length_penalty=run.get("length_penalty", BEAM.length_penalty) if length_penalty is None else length_penalty,
        monitor=False,
        tensorboard=False,
    )
    return written_out(job) if reads_data else job


def _backend(meta: Meta, typed: str | None) -> str:
    model = meta.job["model"]
    known = available("backend")
    if typed is not None:
        check_choice("--backend", typed, list(known))
        load_backend(typed)  # raises if its framework is not installed
        forward_plugin(model, typed)
        return typed
    on = forward_backends(model)
    if not on:
        raise UsageError(f"model: {model!r} has no forward function on any backend ({', '.join(known)}).")
    for name in dict.fromkeys([meta.backend, *on]):
        if name in on and known[name].installed:
            if name != meta.backend:
                why = "is not installed" if meta.backend in on else "has no forward function of it here"
                note(f"backend: {name}, because {meta.backend}, which trained this model, {why}")
            return name
    hints = " or ".join(f"`{known[name].install}`" for name in on)
    raise MissingPackageError(f"backend: none is installed that has the model {model!r}. Install one with {hints}.")


def fitting_data(meta: Meta, job: Job) -> StoredDataset:
    """Open the dataset, normalised as in training. Raises UsageError if the model does not fit."""
    dataset = open_dataset(job.data, job.data_dir)
    info, trained = dataset.info, meta.data
    expected = data_info(trained)
    if not (isinstance(info.features, ImageFeatures) and isinstance(expected.features, ImageFeatures)):
        _require_same_columns(info, expected, job.data)
        _require_same_pieces(dataset, trained, job.data)
        return dataset if expected.normalisation is None else _normalised_as(dataset, expected, job.data)
    for what, value, wanted in (
        ("images of shape", list(info.input_shape), list(trained["input_shape"])),
        ("classes:", info.classes, trained["classes"]),
    ):
        if value != wanted:
            raise UsageError(
                f"--data: {job.data!r} has {what} {value}, but the model was trained on {trained['name']!r} with {what} {wanted}."
                " Give a dataset of the same shape and classes."
            )
    names = info.images.class_names
    known = trained.get("class_names") or names
    if names and list(names) != list(known):
        label, name, trained_name = next((i, a, b) for i, (a, b) in enumerate(zip(names, known, strict=True)) if a != b)
        raise UsageError(
            f"--data: class {label} of {job.data!r} is called {name!r}, but the model was trained on {trained['name']!r}, where it is"
            f" {trained_name!r}. Labels would not mean the same; give a dataset with the same classes."
        )
    return _normalised_as(dataset, expected, job.data)


def _normalised_as(dataset: StoredDataset, trained: DataInfo, name: str) -> StoredDataset:
    if dataset.info.normalisation != trained.normalisation:
        note(f"data: {name} is normalised by the mean and standard deviation of {trained.name}, as in training")
    return dataset.normalised_as(*(trained.normalisation or ()))


def _require_same_pieces(dataset: StoredDataset, trained: Mapping[str, Any], name: str) -> None:
    expected = trained.get("pieces_sha256")
    if expected is not None and pieces_digest(dataset) != expected:
        raise UsageError(
            f"--data: the vocabulary of {name!r} has other pieces than the one that the model was trained with: its text, or what prepares"
            " it, has changed since. Give the text as it was then, or train again."
        )


def _require_same_columns(info: DataInfo, trained: DataInfo, name: str) -> None:

    def described(of: DataInfo) -> str:
        vocabularies = of.features.vocabulary_sizes if isinstance(of.features, TextFeatures) else {}
        return ", ".join(f"{column.name} ({vocabularies.get(column.name, column.dtype)})" for column in of.columns)

    languages_here, trained_languages = (of.features.languages if isinstance(of.features, TextFeatures) else () for of in (info, trained))
    if languages_here != trained_languages:
        texts = [" to ".join(languages) or "no languages" for languages in (languages_here, trained_languages)]
        raise UsageError(
            f"--data: {name!r} has {texts[0]}, but the model was trained on {trained.name!r} with {texts[1]}. Give the same languages."
        )
    features = replace(info.features, mean={}, std={}) if isinstance(info.features, TableFeatures) else info.features
    expected = replace(trained.features, mean={}, std={}) if isinstance(trained.features, TableFeatures) else trained.features
    if (info.columns, features) != (trained.columns, expected):
        raise UsageError(
            f"--data: {name!r} has the columns {described(info)}, but the model was trained on {trained.name!r} with "
            f"{described(trained)}. Give a dataset of the same columns."
        )


_OPTIONS = (
    click.option(
        "--best", is_flag=True, help="The best checkpoint by the run's --keep-best, or by its first metric. [default: the newest]"
    ),
    click.option("--checkpoint", metavar="NAME|N", help="One of the run's checkpoints: step-000000500, or 500."),
    click.option(
        "--average-checkpoints",
        type=IntegerRange(1, 1000),
        default=1,
        metavar="N",
        help="The mean of the weights of the N newest checkpoints, or with --best of the N best. [default: 1]",
    ),
    click.option(
        "--weights",
        metavar="|".join(WEIGHTS),
        help="The moving average that --ema-decay keeps, or the trained weights. [default: the average where there is one]",
    ),
)


def checkpoint_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add options that select weights; the command gets them as `selection`."""

    @functools.wraps(function)
    def selecting(*, best: bool, checkpoint: str | None, average_checkpoints: int, weights: str | None, **settings: Any) -> None:
        if weights not in (None, *WEIGHTS):
            raise UsageError.of("--weights", weights, ", ".join(WEIGHTS), WEIGHTS)
        function(selection=Selection(best, checkpoint, average_checkpoints, weights), **settings)

    for option in reversed(_OPTIONS):
        selecting = option(selecting)
    return selecting


MAX_LINE_BYTES = 1 << 16  # a sentence has some hundreds; longer lines are skipped unread
MAX_LINES, MAX_BYTES = 1024, 1 << 22  # of one group of lines
CHUNK_BYTES = 1 << 16
TICK_SECONDS = 0.2  # how often a wait for input checks for a stop


class _Lines:
    """Unprocessed input: whole lines without ends (None if too long), and a line's beginning."""

    def __init__(self) -> None:
        self.whole: list[bytes | None] = []
        self._bytes = 0
        self._rest = b""
        self._passing = False

    def add(self, chunk: bytes) -> None:
        *ended, rest = (self._rest + chunk).split(b"\n")
        for line in ended:
            whole_line = None if self._passing or len(line) > MAX_LINE_BYTES else line.removesuffix(b"\r")
            self.whole.append(whole_line)
            self._bytes += len(whole_line or b"")
            self._passing = False
        self._passing = self._passing or len(rest) > MAX_LINE_BYTES
        self._rest = b"" if self._passing else rest

    def end(self) -> None:
        if self._rest or self._passing:
            self.add(b"\n")

    @property
    def enough(self) -> bool:
        return len(self.whole) >= MAX_LINES or self._bytes >= MAX_BYTES

    def take(self) -> list[bytes | None]:
        taken, self.whole = self.whole[:MAX_LINES], self.whole[MAX_LINES:]
        self._bytes -= sum(len(line or b"") for line in taken)
        return taken


def arriving_lines(descriptor: int, stopped: Callable[[], bool]) -> Iterator[list[bytes | None]]:
    """Yield groups of arrived lines (None: too long). Raises InterruptedRunError if `stopped`."""
    lines, open_ = _Lines(), True
    while open_ or lines.whole:
        while open_ and not lines.enough and _await_input(descriptor, stopped, wait=not lines.whole):
            try:
                chunk = os.read(descriptor, CHUNK_BYTES)
            except OSError as error:
                raise UsageError(f"standard input cannot be read: {error.strerror}; give it lines.") from error
            lines.add(chunk)
            if not chunk:
                open_ = False
                lines.end()
        if lines.whole:
            yield lines.take()


def _await_input(descriptor: int, stopped: Callable[[], bool], *, wait: bool) -> bool:
    while True:
        if stopped():
            raise InterruptedRunError("interrupted by the user")
        if select.select([descriptor], [], [], TICK_SECONDS if wait else 0.0)[0]:
            return True
        if not wait:
            return False
