"""Common parts of all peers: examples, their order, initial weights, timing and report.

Order and weights are those of the product, so synchronous peers must have the same losses; `benchmarks` compares them and reports a
peer that did other work. All batches are drawn before the clock starts, which favours the peers.
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

LOSSES_SHOWN = 500


@dataclass(frozen=True)
class Workload:
    """The job: `warmup` + `steps` updates of SGD on `batch_size` examples per worker.

    The clock includes the last `steps`. For text: updates of Adam with `beta2` and `epsilon`, on at most `batch_tokens` target tokens.

    `precision` is that of convolutions and matrix products. `variant` selects among configurations of a script. `initial` has
    the initial weights, float32, by name in torch's layouts (dense [out, in], convolutions OIHW), in the order of the layers.
    """

    steps: int
    warmup: int
    batch_size: int
    learning_rate: float
    momentum: float
    precision: str
    seed: int
    threads: int
    variant: str
    data: StoredDataset
    spec: ModelSpec
    initial: dict[str, NDArray[np.float32]]
    batch_tokens: int = 0
    model: str = ""
    beta2: float = 0.0
    epsilon: float = 0.0

    @property
    def images(self) -> NDArray[np.uint8]:
        """The pixels, uint8 [n, c, h, w]."""
        return np.ascontiguousarray(self.data.images("train"))

    @property
    def images_channels_last(self) -> NDArray[np.uint8]:
        """The images as stored, uint8 [n, h, w, c], memory-mapped."""
        return self.data.images("train").transpose(0, 2, 3, 1)

    @cached_property
    def inputs_nchw(self) -> NDArray[np.float32]:
        """Normalised pixels, float32 [n, c, h, w]."""
        return self.data.inputs("train")

    @cached_property
    def inputs(self) -> NDArray[np.float32]:
        """The images as rows, float32 [n, features]."""
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
    """Wall times: start to first finished update, and updates after the warm-up."""

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

    def report_text(self, workload: Workload, target_tokens: float, losses: NDArray[np.float32]) -> None:
        """Print the report with the number of target tokens, without padding, after the warm-up."""
        values = losses.astype(np.float64)
        mean = float(values[workload.warmup :].mean())
        self.report_mean(workload, mean, workload.steps, values[:LOSSES_SHOWN].tolist(), target_tokens=target_tokens)

    def report_mean(self, workload: Workload, mean_loss: float, mean_over: int, losses: Sequence[float] = (), **further: float) -> None:
        """Print the report line that `benchmarks` reads.

        `mean_loss` is over the first `mean_over` updates after the warm-up.
        """
        figures = {
            "steps": workload.steps,
            "warmup": workload.warmup,
            "seconds": self._ended - self._began,
            "first_step_seconds": self.first_step_seconds,
            "losses": list(losses),
            "mean_loss": mean_loss,
            "mean_over": mean_over,
            "threads": workload.threads,
            **further,
        }
        print("RESULT " + json.dumps(figures), flush=True)


def read_workload() -> Workload:
    """Read the command line and open the data. The process ends with the one that started it."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("steps", int),
        ("warmup", int),
        ("lr", float),
        ("seed", int),
        ("threads", int),
        ("parent", int),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name, kind, without in (
        ("batch-size", int, 0),
        ("batch-tokens", int, 0),
        ("momentum", float, 0.0),
        ("beta2", float, 0.0),
        ("epsilon", float, 0.0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=without)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--variant", default="")
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # under torchrun the parent is torchrun
        die_with_parent(options.parent)
    data = open_dataset(options.data)
    spec: ModelSpec = build_model(options.model, data.info)
    if (options.optimizer == "adam") != bool(options.batch_tokens) or (not options.batch_size and not options.batch_tokens):
        raise SystemExit("the peers know SGD on batches of examples, and Adam on batches of target tokens")
    return Workload(
        steps=options.steps,
        warmup=options.warmup,
        batch_size=options.batch_size,
        learning_rate=options.lr,
        momentum=options.momentum,
        precision=options.precision,
        seed=options.seed,
        threads=options.threads,
        variant=options.variant,
        data=data,
        spec=spec,
        initial=spec.initial(options.seed),
        batch_tokens=options.batch_tokens,
        model=options.model,
        beta2=options.beta2,
        epsilon=options.epsilon,
    )
