"""Losses and metrics that a job chooses by name, for any model and framework.

``NAME?key=value&…`` names a function of ``tf.py`` and ``torch.py``, ``name(loss, outputs, target, context) -> [batch]``. `outputs`:
of labels [batch, classes] (binary cross entropy: [batch] or [batch, 1]); of numbers of the target's shape, or [batch, 1] for [batch].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ...core.units import decimal_number
from ...data.base import DataInfo, Dataset
from ...metrics import counts
from ...metrics.base import ACCURACY, Metric
from ..arguments import Argument, Range, read_arguments, write_arguments
from ..objectives import CLASS_WEIGHTS, COUNTED, CROSS_ENTROPY, LOSS_SUM, Objective, StandardLoss

TALLY = "tally"  # the part of a batch's sums that is a vector
WEIGHTED, BINARY, MULTI_LABEL, MSE = "weighted_cross_entropy", "binary_cross_entropy", "multi_label", "mse"
BALANCED = "balanced"
SCORE_SCALE = 4.0  # a score s is binned by s / (4 + |s|), finely around 0 and up to large scores
_LOSSES: Mapping[str, Mapping[str, Argument]] = {
    CROSS_ENTROPY: {
        "smoothing": Argument("smoothing", float, (), 0.0, Range(0.0, 1.0)),
        "class_weights": Argument("class_weights", str, (), None),
    },
    BINARY: {},
    MULTI_LABEL: {},
    MSE: {},
    "mae": {},
    "huber": {"delta": Argument("delta", float, (), 1.0, Range(1e-6, 1e6))},
}
_LABELS, _LABEL_SETS, _NUMBERS = "one of several classes", "any of several classes", "numbers"  # what a target is
_DEFAULTS = {_LABELS: CROSS_ENTROPY, _LABEL_SETS: MULTI_LABEL, _NUMBERS: MSE}
_TARGETS = {CROSS_ENTROPY: {_LABELS}, BINARY: {_LABELS}, MULTI_LABEL: {_LABELS, _LABEL_SETS}}  # of other losses: numbers


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
    examples = np.bincount(data.column("train", data.info.target).values, minlength=classes)
    if missing := np.flatnonzero(examples == 0).tolist():
        raise UsageError(
            f"loss: got {text!r}, but class {missing[0]} of {data.info.name!r} has no training example to be balanced by. "
            "Give class_weights a number for each class."
        )
    options["class_weights"] = _written(tuple((examples.sum() / (classes * examples)).tolist()))
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
    """Return how many numbers a model has to return for an example; 0 for one without an axis.

    Raises UsageError for a loss that does not fit the data.
    """
    target = _target(text, data)
    name = _DEFAULTS[target] if text is None else _read(text)[0]
    if target not in _TARGETS.get(name, {_NUMBERS}):
        fitting = ", ".join(known for known in _LOSSES if target in _TARGETS.get(known, {_NUMBERS}))
        raise UsageError(f"loss: got {text!r}, but the target of {data.name!r} is {target}; allowed there: {fitting}.")
    if name == BINARY and data.classes != 2:
        raise UsageError(f"loss: got {text!r}, which is for two classes; {data.name!r} has {data.classes}. Choose {CROSS_ENTROPY}.")
    if target == _LABELS:
        return 0 if name == BINARY else data.classes
    shape = data.column(data.target).fixed_shape
    return math.prod(shape) if shape else 0


def _target(text: str | None, data: DataInfo) -> str:
    if not data.target:
        raise UsageError(f"loss: got {text!r}, but {data.name!r} has no column that is to be predicted. Leave --loss out.")
    if data.features.classes:
        return _LABELS
    return _LABEL_SETS if data.column(data.target).dtype == "uint8" else _NUMBERS


def with_outputs(text: str | None, data: DataInfo) -> DataInfo:
    """Return the data as a model sees them that computes a number for each of their `classes`."""
    if text is None or outputs_per_example(text, data) or not data.features.classes:
        return data
    return replace(data, features=replace(data.features, classes=1))


def objective_of(text: str | None, data: DataInfo) -> Objective:
    """Return the objective of a model with a standard loss; by default that of the data.

    Raises UsageError for a loss that does not fit the data.
    """
    outputs, target = outputs_per_example(text, data), _target(text, data)
    name, options = (_DEFAULTS[target], {}) if text is None else _read(text)
    weights, smoothing = class_weights(text, data), options.get("smoothing", 0.0)
    if weights or smoothing:
        name = WEIGHTED
    return objective_of_loss(StandardLoss(name, data.features.classes, max(1, outputs), weights, smoothing, options.get("delta", 1.0)))


def objective_of_loss(loss: StandardLoss) -> Objective:
    """Return the objective of a loss, with the metrics of its targets."""
    if loss.classes:
        return _of_labels(loss)
    if loss.name == MULTI_LABEL:
        return _objective("multi-label", loss, [LOSS_SUM, COUNTED, *counts.LABEL_COUNTS], [], [*counts.MULTI_LABEL])
    tally = [*counts.output_sums(loss.outputs)] if loss.outputs <= counts.MAX_CLASSES else []
    metrics = [counts.RMSE, counts.MAE, *([counts.r_squared(loss.outputs)] if tally else [])]
    return _objective("regression", loss, [LOSS_SUM, COUNTED, *counts.ERROR_SUMS], tally, metrics)


def _of_labels(loss: StandardLoss) -> Objective:
    sums, metrics = [LOSS_SUM, "correct", COUNTED], [ACCURACY]
    tally: list[str] = []
    if loss.class_weights:
        sums.append(CLASS_WEIGHTS)
    if loss.classes > counts.TOP:
        sums.append("in_top")
        metrics.append(counts.TOP_ACCURACY)
    if loss.classes <= counts.MAX_CLASSES:
        tally += counts.class_counts(loss.classes)
        metrics.append(counts.macro_f1(loss.classes))
    if loss.classes == 2:
        tally += counts.SCORE_COUNTS
        metrics.append(counts.AUC)
    return _objective("classification", loss, sums, tally, metrics)


def _objective(name: str, loss: StandardLoss, sums: list[str], tally: list[str], metrics: list[Metric]) -> Objective:
    weight = CLASS_WEIGHTS if loss.class_weights else COUNTED
    return Objective(name, loss.name, (*sums, *tally), tuple(metrics), weight, standard=loss, tally=tuple(tally))
