"""Losses and metrics that a job chooses by name, for any model and framework.

``NAME?key=value&…`` names a function of ``tf.py`` and ``torch.py``, ``name(loss, outputs, target, context) -> [batch]``. `outputs`:
of labels [batch, classes] (binary cross entropy: [batch] or [batch, 1]); of numbers of the target's shape, or [batch, 1] for [batch].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ...core.units import decimal_number
from ...data.base import LABEL, DataInfo, Dataset
from ...metrics.base import ACCURACY, Metric
from ...metrics.counts import (
    AUC,
    MAX_CLASSES,
    SCORE_COUNTS,
    TOP,
    TOP_ACCURACY,
    class_counts,
    macro_f1,
)
from ..arguments import Argument, Range, read_arguments, write_arguments
from ..objectives import CLASS_WEIGHTS, COUNTED, CROSS_ENTROPY, LOSS_SUM, Objective, StandardLoss

TALLY = "tally"  # the part of a batch's sums that is a vector
WEIGHTED, BINARY, MULTI_LABEL = "weighted_cross_entropy", "binary_cross_entropy", "multi_label"
BALANCED = "balanced"
SCORE_SCALE = 4.0  # a score s is binned by s / (4 + |s|), finely around 0 and up to large scores
_LOSSES: Mapping[str, Mapping[str, Argument]] = {
    CROSS_ENTROPY: {
        "smoothing": Argument("smoothing", float, (), 0.0, Range(0.0, 1.0)),
        "class_weights": Argument("class_weights", str, (), None),
    },
    BINARY: {},
    MULTI_LABEL: {},
}


def functions_on(backend: str) -> ModuleType:
    """Import and return the loss functions of a built-in backend."""
    return import_module(f"{__name__}.{backend}")


def _read(text: str) -> tuple[str, dict[str, Any]]:
    name = text.partition("?")[0]
    if name not in _LOSSES:
        raise UsageError.of("loss", name, ", ".join(_LOSSES), _LOSSES)
    return name, dict(read_arguments(text, _LOSSES[name], "loss"))


def canonical_loss(text: str | None) -> str | None:
    """Return a loss's text without defaults. Raises UsageError for invalid ones."""
    if text is None:
        return None
    name, options = _read(text)
    weights = options.get("class_weights")
    if weights is not None and weights != BALANCED:
        options["class_weights"] = _written(_numbers(weights))
    return write_arguments(name, options, _LOSSES[name])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(decimal_number, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < 1e30 for number in numbers):
        allowed = f"{BALANCED}, or a number above 0 for each class, such as 1,2.5"
        raise UsageError.of("loss: class_weights of cross_entropy", text, allowed, (BALANCED,))
    return numbers


def _written(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:.7g}" for number in numbers)


def resolved_loss(text: str | None, data: Dataset) -> str | None:
    """Return a loss's text with numbers in place of ``balanced``.

    The weight of a class is n / (classes · n of the class), of the training split (King and Zeng 2001, as scikit-learn computes it).
    Raises UsageError for a class without examples.
    """
    if text is None or _read(text)[1].get("class_weights") != BALANCED:
        return text
    name, options = _read(text)
    classes = data.info.classes
    counts = np.bincount(data.column("train", LABEL).values, minlength=classes)
    if missing := np.flatnonzero(counts == 0).tolist():
        raise UsageError(
            f"loss: got {text!r}, but class {missing[0]} of {data.info.name!r} has no training example to be balanced by. "
            "Give class_weights a number for each class."
        )
    options["class_weights"] = _written(tuple((counts.sum() / (classes * counts)).tolist()))
    return write_arguments(name, options, _LOSSES[name])


def class_weights(text: str | None, data: DataInfo) -> tuple[float, ...]:
    """Return the weight of each class by a resolved text; empty without weights.

    Raises UsageError for another number of them than classes.
    """
    listed = None if text is None else _read(text)[1].get("class_weights")
    if listed is None:
        return ()
    numbers = _numbers(listed)
    if len(numbers) != data.classes:
        raise UsageError(f"loss: got {len(numbers)} class_weights, but {data.name!r} has {data.classes} classes. Give one for each.")
    return numbers


def outputs_per_example(text: str | None, data: DataInfo) -> int:
    """Return how many numbers a model has to return for an example. Raises UsageError."""
    name = CROSS_ENTROPY if text is None else _read(text)[0]
    if name == BINARY:
        if data.classes != 2:
            raise UsageError(f"loss: got {text!r}, which is for two classes; {data.name!r} has {data.classes}. Choose {CROSS_ENTROPY}.")
        return 1
    return data.classes


def with_outputs(text: str | None, data: DataInfo) -> DataInfo:
    """Return the data as a model sees them that computes a number for each of their `classes`."""
    if text is None or (outputs := outputs_per_example(text, data)) == data.classes:
        return data
    return replace(data, features=replace(data.images, classes=outputs))


def objective_of(text: str | None, data: DataInfo) -> Objective:
    """Return the objective of a model with a standard loss; by default that of the data.

    Raises UsageError for a loss that does not fit the data.
    """
    name, options = (CROSS_ENTROPY, {}) if text is None else _read(text)
    outputs_per_example(text, data)
    weights, smoothing = class_weights(text, data), options.get("smoothing", 0.0)
    if weights or smoothing:
        name = WEIGHTED
    return objective_of_loss(StandardLoss(name, data.classes, weights, smoothing))


def objective_of_loss(loss: StandardLoss) -> Objective:
    """Return the objective of a loss, with the metrics of its targets."""
    sums, tally, metrics = [LOSS_SUM, "correct", COUNTED], [], [ACCURACY]
    if loss.class_weights:
        sums.append(CLASS_WEIGHTS)
    if loss.classes > TOP:
        sums.append("in_top")
        metrics.append(TOP_ACCURACY)
    if loss.classes <= MAX_CLASSES:
        tally += class_counts(loss.classes)
        metrics.append(macro_f1(loss.classes))
    if loss.classes == 2:
        tally += SCORE_COUNTS
        metrics.append(AUC)
    weight = CLASS_WEIGHTS if loss.class_weights else COUNTED
    return _objective("classification", loss, sums, tally, metrics, weight)


def _objective(name: str, loss: StandardLoss, sums: list[str], tally: list[str], metrics: list[Metric], weight: str = COUNTED) -> Objective:
    return Objective(name, loss.name, (*sums, *tally), tuple(metrics), weight, standard=loss, tally=tuple(tally))
