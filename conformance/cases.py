"""Cases of the backend suite, and an independent reference implementation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ..core.bounded_json import parse_json
from ..core.job import Job
from ..core.update_rules import learning_rates
from ..data.base import DataInfo, Dataset
from ..data.batching import FixedCount
from ..data.preprocessing import Changes, augmentation
from ..data.sampler import Sampler
from ..engine.epochs import EpochIndex
from ..engine.policies import total_steps
from ..models.logreg import build

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "momentum": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "schedule": "step", "schedule_gamma": 0.5},
    "nesterov": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "weight-decay": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 1e-2, "warmup_steps": 50},
    "adam": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-3},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 1e-2, "schedule": "cosine"},
}
QUICK = {"adam": 1, "adamw": 2}  # update rules, by number of workers, that are not slow


def every_optimizer() -> list[Any]:
    """Return each optimizer on 1, 2 and 3 workers.

    A global batch of 64 is 64, 32 + 32, 22 + 21 + 21.
    """
    return [
        pytest.param(name, 64, workers, id=f"{name}-{workers}w", marks=() if QUICK.get(name) == workers else pytest.mark.slow)
        for name in OPTIMIZERS
        for workers in (1, 2, 3)
    ]


# Global batches that do not divide; the hardest, below the number of workers, is not slow.
UNEVEN_BATCHES = [
    pytest.param("sgd", 10, 3, id="sgd-10-over-3w", marks=pytest.mark.slow),
    pytest.param("adam", 7, 2, id="adam-7-over-2w", marks=pytest.mark.slow),
    pytest.param("sgd", 2, 3, id="sgd-2-over-3w"),
]
# Requests that a backend need not support, by option.
OPTIONAL_CAPABILITIES: Mapping[str, Mapping[str, Any]] = {
    "mode": {"mode": "async"},
    "precision": {"precision": "bf16"},
    "device": {"device": "gpu"},
    "augment": {"augment": "crop"},
    "deterministic": {"deterministic": True},
    "profile": {"profile": 5},
    "compile": {"compile": "auto"},
    "accumulate": {"accumulate": 2},
    "clip_norm": {"clip_norm": 1.0},
    "ema_decay": {"ema_decay": 0.9},
    "loss": {"loss": "cross_entropy?smoothing=0.1"},
    "weight_decay_except": {"weight_decay": 0.1, "weight_decay_except": "*.bias"},
    "exchange": {"exchange": "direct", "nodes": 2},
}
PATIENCE_SECONDS = 300.0
LOOK_SECONDS = 0.02


def kill_task_once(path: Path, task: str) -> None:
    """Kill a task of the run at `path` once updates and a sample are recorded.

    The run may start later.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pid = _pid_of(path, task)
        if pid is not None and (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(LOOK_SECONDS)
    raise AssertionError(f"{task} of {path} never trained")


def _pid_of(path: Path, task: str) -> int | None:
    samples = path / "system.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True) if samples.exists() else []
    records = [parse_json(line) for line in lines if line.endswith(b"\n")]
    return next((entry["pid"] for record in records for entry in record["tasks"] if entry["task"] == task), None)


# The float64 reference of logistic regression shares only data order, initial values and learning rates with the product.
Values = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Trained:
    """Losses, final weights and, with ``ema_decay``, their average.

    Losses are float64 [updates], each before its update.
    """

    losses: NDArray[np.float64]
    weights: Values
    average: Values


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
        update.apply(_clip(gradients, job.clip_norm), rates[step])
        for name, value in average.items():  # formula of docs/training.md
            decay = min(job.ema_decay, (2.0 + step) / (11.0 + step))
            average[name] = decay * value + (1.0 - decay) * weights[name]
    return Trained(losses, weights, average)


def evaluation_loss(weights: Values, data: Dataset) -> float:
    """Return the mean loss over all test images."""
    return _loss_and_gradients(weights, _inputs(data.info, data.images("test"), None), data.labels("test"))[0]


def _clip(gradients: Values, limit: float) -> Values:
    """Clip the global gradient norm as torch.nn.utils.clip_grad_norm_; 0 disables it."""
    if not limit:
        return gradients
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
    return {name: gradient * min(1.0, limit / (norm + 1e-6)) for name, gradient in gradients.items()}


def _inputs(info: DataInfo, images_bchw: NDArray[np.uint8], changes: Changes | None) -> NDArray[np.float64]:
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


def _loss_and_gradients(weights: Values, x_bi: NDArray[np.float64], labels_b: NDArray[np.int64]) -> tuple[float, Values]:
    """Return the mean cross entropy of softmax(W x + b), and gradients."""
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
    """SGD with (Nesterov) momentum and weight decay; Adam; AdamW.

    Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """

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
