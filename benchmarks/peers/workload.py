"""What every peer has in common: the examples, their order, the initial weights, and one way to time and to report.

Order and weights are those of the product, so that a peer that trains synchronously has to find the same losses; `benchmarks` compares
them and says where a peer did other work. A batch of everything is drawn before the clock starts, which favours the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import psutil
from numpy.typing import NDArray

from crosstrain.core.process import die_with_parent
from crosstrain.data.sampler import permutation
from crosstrain.data.store.stored_dataset import StoredDataset, open_dataset
from crosstrain.models.base import ModelSpec
from crosstrain.models.build import build_model

__all__ = ["Timer", "Workload", "read_workload"]

LOSSES_SHOWN = 500


@dataclass(frozen=True)
class Workload:
    """The job: `warmup` + `steps` updates of SGD on batches of `batch_size` examples a worker; the clock sees the last `steps`.

    Of text, batches have at most `batch_tokens` tokens instead, and the update is Adam's with `beta2` and `epsilon`.

    `precision` is that of convolutions and matrix products. `variant` chooses among settings of a script that has several. `initial` has
    the initial weights, float32, by name in torch's layouts (dense [out, in], convolutions OIHW), in the order of the layers.
    """

    model: str
    steps: int
    warmup: int
    batch_size: int
    learning_rate: float
    momentum: float
    precision: str
    seed: int
    threads: int
    variant: str
    batch_tokens: int | None
    beta2: float
    epsilon: float
    data: StoredDataset
    spec: ModelSpec
    initial: dict[str, NDArray[np.float32]]

    @property
    def images(self) -> NDArray[np.uint8]:
        """The pixels, uint8 [n, c, h, w]."""
        return np.ascontiguousarray(self.data.images("train"))

    @property
    def images_channels_last(self) -> NDArray[np.uint8]:
        """The same as they are stored, uint8 [n, h, w, c], a map of the file."""
        return self.data.images("train").transpose(0, 2, 3, 1)

    @cached_property
    def inputs_nchw(self) -> NDArray[np.float32]:
        """Normalised pixels, float32 [n, c, h, w]."""
        return self.data.inputs("train")

    @cached_property
    def inputs(self) -> NDArray[np.float32]:
        """The same as rows, float32 [n, features]."""
        return self.inputs_nchw.reshape(len(self.labels), -1)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """Labels, int64 [n]."""
        return np.array(self.data.labels("train"))

    @property
    def weight(self) -> NDArray[np.float32]:
        """Initial weight of the only layer, [classes, features]."""
        return self.initial["dense.weight"]

    @property
    def bias(self) -> NDArray[np.float32]:
        """Initial bias of the only layer, [classes]."""
        return self.initial["dense.bias"]

    @property
    def updates(self) -> int:
        """Updates with the warm-up."""
        return self.warmup + self.steps

    def order(self, workers: int = 1, rank: int = 0) -> NDArray[np.int32]:
        """Return the examples of each update for one worker, int32 [updates, batch_size]."""
        needed = self.updates * workers * self.batch_size
        size = len(self.labels)
        if size % (workers * self.batch_size):
            raise SystemExit(f"{size} examples cannot be cut into batches of {self.batch_size} for {workers} workers")
        epochs = [permutation(self.seed, epoch, size) for epoch in range(-(-needed // size))]
        return np.concatenate(epochs)[:needed].reshape(self.updates, workers, self.batch_size)[:, rank].copy()


class Timer:
    """Wall time: of the process until the first finished update, and of the updates after the warm-up."""

    def __init__(self) -> None:
        self.first_step_seconds: float | None = None
        self._began = self._ended = 0.0

    def first_step(self) -> None:
        """Call when the result of the first update is there; later calls do nothing."""
        if self.first_step_seconds is None:
            self.first_step_seconds = time.time() - psutil.Process().create_time()

    def begin(self) -> None:
        """The warm-up is over."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """The last update is done."""
        self._ended = time.perf_counter()

    def report(self, workload: Workload, losses: NDArray[np.float32]) -> None:
        """Print what was measured, with the loss of every update."""
        values = losses.astype(np.float64)
        self.report_mean(workload, float(values[workload.warmup :].mean()), workload.steps, values[:LOSSES_SHOWN].tolist())

    def report_mean(
        self, workload: Workload, mean_loss: float, mean_over: int, losses: Sequence[float] = (), tokens: int | None = None
    ) -> None:
        """Print the one line that `benchmarks` reads. `mean_loss` is that of the first `mean_over` updates after the warm-up.

        `tokens` are those that were made, of a script that does not train.
        """
        found = {
            "steps": workload.steps,
            "warmup": workload.warmup,
            "seconds": self._ended - self._began,
            "first_step_seconds": self.first_step_seconds,
            "losses": list(losses),
            "mean_loss": mean_loss,
            "mean_over": mean_over,
            "threads": workload.threads,
            "tokens": tokens,
        }
        print("RESULT " + json.dumps(found), flush=True)


def read_workload() -> Workload:
    """Read the command line and open the data. The process ends with the one that started it."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("steps", int),
        ("warmup", int),
        ("lr", float),
        ("momentum", float),
        ("seed", int),
        ("threads", int),
        ("parent", int),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--epsilon", type=float, default=1e-8)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--batch-size", type=int, default=0)
    size.add_argument("--batch-tokens", type=int)
    given = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # under torchrun the parent is torchrun
        die_with_parent(given.parent)
    data = open_dataset(given.data)
    spec: ModelSpec = build_model(given.model, data.info)
    if (given.optimizer == "adam") != (given.batch_tokens is not None):
        raise SystemExit("a peer takes batches by tokens with Adam, or batches by examples with SGD")
    return Workload(
        model=given.model,
        steps=given.steps,
        warmup=given.warmup,
        batch_size=given.batch_size,
        learning_rate=given.lr,
        momentum=given.momentum,
        precision=given.precision,
        seed=given.seed,
        threads=given.threads,
        variant=given.variant,
        batch_tokens=given.batch_tokens,
        beta2=given.beta2,
        epsilon=given.epsilon,
        data=data,
        spec=spec,
        initial=spec.initial(given.seed),
    )
