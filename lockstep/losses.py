"""Losses in float64, with their slopes by a forward function's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.columns import LENGTHS
from ..models.base import ModelSpec
from ..models.imported.description import ImportedSpec
from ..models.layers.reference import Call, Part
from ..models.losses import BINARY, MULTI_LABEL, WEIGHTED
from ..models.objectives import CROSS_ENTROPY, StandardLoss
from .rounding import LIMIT, error

Array = NDArray[Any]


def loss_of(spec: ModelSpec, outputs: Array, target: Mapping[str, Array]) -> tuple[Part, Part]:
    """Return the sum of the losses and its slope, each with its magnitude."""
    objective, labels = spec.objective, target[spec.target]
    if objective.standard is not None:
        return _standard(objective.standard, outputs, labels)
    if objective.loss == CROSS_ENTROPY:
        return cross_entropy(outputs, labels, np.ones(len(labels)), 0.0)
    if isinstance(spec, ImportedSpec):  # its own losses are its first result
        slope = np.zeros(outputs.shape)
        slope[:, 0] = 1.0
        return (outputs[:, 0].sum(), np.abs(outputs[:, 0]).sum()), (slope, slope)
    lengths, smoothing = target[spec.target + LENGTHS], spec.settings.smoothing
    inside = np.arange(labels.shape[1]) < lengths[:, None]
    flat = outputs.reshape(-1, outputs.shape[2])
    total, (slope, size) = cross_entropy(flat, labels.ravel(), inside.ravel().astype(np.float64), smoothing)
    return total, (slope.reshape(outputs.shape), size.reshape(outputs.shape))


def cross_entropy(logits: Array, labels: Array, weights: Array, smoothing: float) -> tuple[Part, Part]:
    """Return Σ weight · cross entropy with smoothed labels, and its slope."""
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    classes = logits.shape[1]
    wanted = np.full(logits.shape, smoothing / classes)
    wanted[np.arange(len(labels)), labels] += 1.0 - smoothing
    sizes = np.abs(logits).max(1, keepdims=True) + np.abs(logs)
    total = -(weights[:, None] * wanted * logs).sum(), (weights[:, None] * wanted * sizes).sum()
    shares = np.exp(logs)
    return total, (weights[:, None] * (shares - wanted), weights[:, None] * (shares * (1.0 + sizes) + wanted))


def _standard(loss: StandardLoss, outputs: Array, labels: Array) -> tuple[Part, Part]:
    if loss.name in (CROSS_ENTROPY, WEIGHTED):
        weights = np.array(loss.class_weights or [1.0] * loss.classes)
        return _weighted(outputs, labels, weights, loss.smoothing)
    flat = outputs.reshape(len(outputs), -1)
    if loss.name in ("mse", "mae", "huber"):
        return _of_numbers(loss, flat, labels.reshape(flat.shape).astype(np.float64), outputs.shape)
    if loss.name not in (BINARY, MULTI_LABEL):
        raise ValueError(f"the loss {loss.name!r} is not known in float64")
    wanted = labels.reshape(flat.shape).astype(np.float64) if not loss.classes or loss.classes == 2 else np.eye(loss.classes)[labels]
    values = np.maximum(flat, 0.0) - flat * wanted + np.log1p(np.exp(-np.abs(flat)))
    slope = (1.0 / (1.0 + np.exp(-flat)) - wanted) / flat.shape[1]
    return (values.mean(1).sum(), (np.abs(flat) + values).mean(1).sum()), (
        slope.reshape(outputs.shape),
        (np.abs(slope) + 1.0 / flat.shape[1]).reshape(outputs.shape),
    )


def _weighted(outputs: Array, labels: Array, weights: Array, smoothing: float) -> tuple[Part, Part]:
    shifted = outputs - outputs.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    wanted = np.full(outputs.shape, smoothing / outputs.shape[1])
    wanted[np.arange(len(labels)), labels] += 1.0 - smoothing
    wanted = wanted * weights
    slope = np.exp(logs) * wanted.sum(1, keepdims=True) - wanted
    sizes = np.abs(outputs).max(1, keepdims=True) + np.abs(logs)
    return (-(wanted * logs).sum(), (wanted * sizes).sum()), (slope, np.abs(slope) + wanted * (1.0 + sizes))


def _of_numbers(loss: StandardLoss, flat: Array, wanted: Array, shape: tuple[int, ...]) -> tuple[Part, Part]:
    error, count = flat - wanted, flat.shape[1]
    if loss.name == "mse":
        values, slope = error**2, 2.0 * error
    elif loss.name == "mae":
        values, slope = np.abs(error), np.sign(error)
    else:
        near = np.minimum(np.abs(error), loss.delta)
        values, slope = near * near / 2 + loss.delta * (np.abs(error) - near), np.clip(error, -loss.delta, loss.delta)
    sizes = np.abs(flat) + np.abs(wanted)
    size = values + 2.0 * np.abs(slope) * sizes
    return (values.mean(1).sum(), size.mean(1).sum()), (
        (slope / count).reshape(shape),
        ((np.abs(slope) + 2 * sizes) / count).reshape(shape),
    )


def cause_of_loss(spec: ModelSpec, target: Mapping[str, Array], call: Call, tensor: str, value: Array) -> str:
    """Return why a loss or its slope differs, in words; "" if no hypothesis explains it."""
    exact, magnitude = call.results[tensor]
    if tensor == "output" and "slope of input 0" in call.results:
        return ""  # one number fits many hypotheses; the slope says more
    outputs = call.inputs[0].array
    for words, (total, slope) in _hypotheses(spec, outputs, target):
        hypothesis = total[0] if tensor == "output" else slope[0]
        if error(np.asarray(value), np.asarray(hypothesis), magnitude)[0] <= 2 * LIMIT:
            return words
    factor = float(np.sum(value * exact)) / max(float(np.sum(np.square(exact))), 1e-300)
    if error(np.asarray(value), factor * np.asarray(exact), magnitude)[0] <= 2 * LIMIT:
        return f"its scale is {factor:.6g} times the right one"
    return ""


def _hypotheses(spec: ModelSpec, outputs: Array, target: Mapping[str, Array]) -> Iterator[tuple[str, tuple[Part, Part]]]:
    labels = target[spec.target]
    if spec.target + LENGTHS in target and not isinstance(spec, ImportedSpec):
        flat, smoothing = outputs.reshape(-1, outputs.shape[2]), spec.settings.smoothing
        everywhere = np.ones(labels.size)
        total, (slope, size) = cross_entropy(flat, labels.ravel(), everywhere, smoothing)
        yield "padding is counted as if it were tokens", (total, (slope.reshape(outputs.shape), size.reshape(outputs.shape)))
        inside = (np.arange(labels.shape[1]) < target[spec.target + LENGTHS][:, None]).ravel().astype(np.float64)
        for added in (0.05, 0.1, -0.1, 0.2):
            total, (slope, size) = cross_entropy(flat, labels.ravel(), inside, smoothing + added)
            yield (
                f"its label smoothing is {smoothing + added:.3g} instead of {smoothing:.3g}",
                (
                    total,
                    (slope.reshape(outputs.shape), size.reshape(outputs.shape)),
                ),
            )
    elif spec.objective.loss == CROSS_ENTROPY and labels.ndim == 1 and labels.dtype.kind in "iu":
        for smoothing in (0.05, 0.1, 0.2, 0.01):
            yield f"its label smoothing is {smoothing:g} instead of 0", cross_entropy(outputs, labels, np.ones(len(labels)), smoothing)
