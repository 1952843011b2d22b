"""An independent judge: logistic regression with every optimiser, clipped and averaged, written from the formulas in float64 numpy.

It shares the data order, the initial values and the learning rates with the product, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..data.augment import Changes, augmentation
from ..data.base import DataInfo, Dataset
from ..data.batching import FixedCount
from ..data.sampler import Sampler
from ..engine.epochs import EpochIndex
from ..engine.learning_rate import learning_rates
from ..engine.triggers import total_steps
from ..models.logreg import build

__all__ = ["Trained", "evaluation_loss", "train_logistic_regression"]

Values = dict[str, NDArray[np.float64]]
Weights = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Trained:
    """Losses float64 [updates], each before its update, and by canonical name the final weights and, with ``ema_decay``, their average."""

    losses: NDArray[np.float64]
    weights: Mapping[str, NDArray[np.float64]]
    average: Mapping[str, NDArray[np.float64]]


def train_logistic_regression(job: Job, data: Dataset) -> Trained:
    """Train one sync job on one worker in float64."""
    changed = augmentation(job.augment, data.info)
    sampler = Sampler(data.info.sizes["train"], job.seed, FixedCount(job.global_batch, 1, "sync"), 1, changed)
    total = total_steps(job, EpochIndex(sampler))
    rates = learning_rates(job, 0, total, sampler.steps_per_epoch, total)
    images_nchw = data.images("train")
    labels = data.labels("train")
    weights: Values = {name: value.astype(np.float64) for name, value in build(data.info).initial(job.seed).items()}
    update = _Optimizer(job, weights)
    average = {name: value.copy() for name, value in weights.items()} if job.ema_decay else {}
    losses = np.empty(total)
    for step in range(total):
        epoch, in_epoch = divmod(step, sampler.steps_per_epoch)
        batch = sampler.whole(epoch, in_epoch, 1)
        x_bi = _inputs(data.info, images_nchw[batch.indices], batch.changes)
        losses[step], gradients = _loss_and_gradients(weights, x_bi, labels[batch.indices])
        update.apply(_clipped(gradients, job.clip_norm), rates[step])
        for name, value in average.items():  # as docs/training.md has it
            decay = min(job.ema_decay, (2.0 + step) / (11.0 + step))
            average[name] = decay * value + (1.0 - decay) * weights[name]
    return Trained(losses, weights, average)


def evaluation_loss(weights: Weights, data: Dataset) -> float:
    """Return the mean loss over all test images."""
    return _loss_and_gradients(weights, _inputs(data.info, data.images("test"), None), data.labels("test"))[0]


def _clipped(gradients: Values, limit: float) -> Values:
    """Scale gradients whose norm over all parameters is above a limit down to it, as torch.nn.utils.clip_grad_norm_ does; 0 is no limit."""
    if not limit:
        return gradients
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
    return {name: gradient * min(1.0, limit / (norm + 1e-6)) for name, gradient in gradients.items()}


def _inputs(info: DataInfo, images_bchw: NDArray[np.uint8], changes: Changes | None) -> NDArray[np.float64]:
    """Return what the model reads, one row an example: each image moved and mirrored as its change says, and normalised."""
    channels, height, width = info.input_shape
    pixels_bchw = images_bchw.astype(np.float64)
    if changes is not None:
        rows, columns = np.arange(height), np.arange(width)
        for image_chw, (dy, dx, flip) in zip(pixels_bchw, changes, strict=True):
            from_rows, from_columns = rows - dy, (columns[::-1] if flip else columns) - dx
            inside = ((from_rows >= 0) & (from_rows < height))[:, None] & ((from_columns >= 0) & (from_columns < width))
            image_chw[:] = np.where(inside, image_chw[:, from_rows % height][:, :, from_columns % width], 0.0)
    mean_c, std_c = (np.array(values, dtype=np.float64).reshape(channels, 1, 1) for values in (info.mean, info.std))
    return ((pixels_bchw / 255.0 - mean_c) / std_c).reshape(len(images_bchw), -1)


def _loss_and_gradients(weights: Weights, x_bi: NDArray[np.float64], labels_b: NDArray[np.int64]) -> tuple[float, Values]:
    """Mean cross entropy of softmax(W x + b) and its gradients."""
    logits_bk = x_bi @ weights["dense.weight"].T + weights["dense.bias"]
    shifted_bk = logits_bk - logits_bk.max(axis=1, keepdims=True)
    log_sum_b = np.log(np.exp(shifted_bk).sum(axis=1))
    rows = np.arange(len(labels_b))
    loss = float(np.mean(log_sum_b - shifted_bk[rows, labels_b]))
    error_bk = np.exp(shifted_bk - log_sum_b[:, None])
    error_bk[rows, labels_b] -= 1.0
    error_bk /= len(labels_b)
    return loss, {"dense.weight": error_bk.T @ x_bi, "dense.bias": error_bk.sum(axis=0)}


class _Optimizer:
    """SGD with momentum, Nesterov momentum and weight decay; Adam; AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""

    def __init__(self, job: Job, weights: Values) -> None:
        self._job = job
        self._weights = weights
        self._first = {name: np.zeros_like(value) for name, value in weights.items()}
        self._second = {name: np.zeros_like(value) for name, value in weights.items()}
        self._updates = 0

    def apply(self, gradients: Values, rate: float) -> None:
        self._updates += 1
        for name, gradient in gradients.items():
            if self._job.optimizer == "sgd":
                self._weights[name] -= rate * self._momentum(name, gradient + self._job.weight_decay * self._weights[name])
            else:
                self._adam(name, gradient, rate)

    def _momentum(self, name: str, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._job.momentum:
            return gradient
        self._first[name] = self._job.momentum * self._first[name] + gradient
        return gradient + self._job.momentum * self._first[name] if self._job.nesterov else self._first[name]

    def _adam(self, name: str, gradient: NDArray[np.float64], rate: float) -> None:
        job, t = self._job, self._updates
        if job.optimizer == "adamw":
            self._weights[name] *= 1.0 - rate * job.weight_decay
        else:
            gradient = gradient + job.weight_decay * self._weights[name]
        self._first[name] = job.beta1 * self._first[name] + (1.0 - job.beta1) * gradient
        self._second[name] = job.beta2 * self._second[name] + (1.0 - job.beta2) * gradient**2
        mean = self._first[name] / (1.0 - job.beta1**t)
        root = np.sqrt(self._second[name] / (1.0 - job.beta2**t))
        self._weights[name] -= rate * mean / (root + job.epsilon)
