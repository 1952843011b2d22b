"""Cases of standard losses, and their formulas in float64 numpy."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from crosstrain.models.losses import BINARY, MULTI_LABEL, WEIGHTED
from crosstrain.models.objectives import CROSS_ENTROPY, StandardLoss

SIZE = 40  # examples


@dataclass(frozen=True)
class Case:
    """A loss with outputs, targets and slices of them: the whole, shards, and an empty one."""

    loss: StandardLoss
    outputs: np.ndarray
    target: np.ndarray
    slices: tuple[tuple[int, int], ...]


def cases():
    """Make every loss, with outputs of all magnitudes, some equal to each other."""
    draw = np.random.default_rng(0)
    losses = []
    for classes in (2, 7):
        weights = tuple(draw.uniform(0.2, 3.0, classes).tolist())
        losses += [StandardLoss(CROSS_ENTROPY, classes), StandardLoss(MULTI_LABEL, classes)]
        losses += [StandardLoss(WEIGHTED, classes, 1, *options) for options in ((weights,), ((), 0.1), (weights, 0.25))]
    losses += [StandardLoss(BINARY, 2), StandardLoss(MULTI_LABEL, 0, 4), StandardLoss("huber", 0, delta=0.5)]
    losses += [StandardLoss(name, 0, outputs) for name in ("mse", "mae", "huber") for outputs in (1, 3)]
    return [_case(loss, draw) for loss in losses]


def _case(loss, draw):
    columns = 1 if loss.name == BINARY else loss.classes or loss.outputs
    outputs = np.round(draw.standard_normal((SIZE, columns)) * draw.choice([0.01, 1.0, 30.0], (SIZE, 1)), 2).astype(np.float32)
    if loss.classes:
        target = draw.integers(0, loss.classes, SIZE)
    elif loss.name == MULTI_LABEL:
        target = draw.integers(0, 2, (SIZE, columns)).astype(np.uint8)
    else:
        target = (1000 + draw.standard_normal((SIZE, columns))).astype(np.float32)
        outputs = (target + outputs).astype(np.float32)
        target = target if columns > 1 else target[:, 0]
    cuts = sorted(draw.integers(1, SIZE + 1, 3).tolist())
    return Case(loss, outputs, target, ((0, SIZE), *pairwise((0, 1, *cuts, SIZE)), (0, 0)))


def log_shares(outputs):
    shifted = outputs - outputs.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def binary(outputs, labels):
    """Return −log σ(x) for labels of 1, −log(1 − σ(x)) for 0."""
    return np.logaddexp(0.0, outputs) - labels * outputs


def losses(loss, outputs, target):
    """Return each example's loss, float64 [batch]."""
    outputs = outputs.astype(np.float64)
    if loss.name == BINARY:
        return binary(outputs[:, 0], target)
    if loss.name in ("mse", "mae", "huber"):
        errors = np.abs(outputs - target.reshape(outputs.shape))
        near = errors**2 / 2 if loss.name == "huber" else errors**2
        formulas = {"mse": near, "mae": errors, "huber": np.where(errors <= loss.delta, near, loss.delta * (errors - loss.delta / 2))}
        return formulas[loss.name].mean(1)
    labels = np.eye(loss.classes)[target] if loss.classes else target
    if loss.name == MULTI_LABEL:
        return binary(outputs, labels).mean(1)
    weights = np.array(loss.class_weights or (1.0,) * loss.classes)
    smoothed = (1 - loss.smoothing) * labels + loss.smoothing / loss.classes
    return -(weights * smoothed * log_shares(outputs)).sum(1)


def gradient(loss, outputs, target):
    """Return the gradient of the sum of losses, by central differences of the formula."""
    step, slopes = 1e-5, np.zeros(outputs.shape)
    for column in range(outputs.shape[1]):
        moved = np.zeros(outputs.shape[1])
        moved[column] = step
        higher, lower = (losses(loss, outputs.astype(np.float64) + sign * moved, target) for sign in (1, -1))
        slopes[:, column] = (higher - lower) / (2 * step)
    return slopes
