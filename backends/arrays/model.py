"""Interface of a framework on numpy arrays, and passes over a split with it.

A framework implements `ArrayModel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...core.errors import UsageError
from ...core.job import Job
from ...core.liveness import startup_phase
from ...data.base import IMAGE, LABEL, Dataset, Split
from ...data.sampler import Batches, Sampler
from ...models.base import Array, ModelSpec
from ...models.objectives import CROSS_ENTROPY
from ..capabilities import Device
from ..parameter_server.tickets import cut_evaluation
from ..parameter_server.worker import Computed
from ..timing import Calibrator, Exchange
from ..vectors import ColumnArrays, FlatValues, GatheredSplit, clip, evaluation_batch, evaluation_passes

Values = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Batch:
    """At least one example; `inputs` and `target` are numpy as in models/base.py.

    Images normalised, float32 [n, c, h, w], labels int64 [n]; other whole numbers int64, others float32. `indices` int32 [n] are their
    numbers in the split; `step` and `micro_batch` are for dropout.
    """

    inputs: ColumnArrays
    target: ColumnArrays
    indices: NDArray[np.int32]
    step: int = 0
    micro_batch: int = 0

    def __len__(self) -> int:
        return len(self.indices)


class Gradients(NamedTuple):
    """A training pass: the loss, its gradient by parameter, and new values of changed buffers."""

    loss: float
    parameters: Mapping[str, ArrayLike]
    buffers: Mapping[str, ArrayLike] = {}


@dataclass(frozen=True, slots=True)
class Outputs:
    """Result of a forward pass.

    `logits` are those of a classifier, [n, classes]; `losses` [n]; `sums`: the objective's further ones, [n] by name.
    """

    logits: ArrayLike
    losses: ArrayLike
    sums: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


class ArrayModel(Protocol):
    """A model on a device.

    Parameters and buffers are float32 by canonical name, in canonical layout, and must not be changed.
    """

    device_used: Device

    def gradients(self, parameters: Values, buffers: Values, batch: Batch, weight: float) -> Gradients:
        """Return Σ example losses / `weight`, with its gradients.

        `weight` is that of the whole update's examples.
        """

    def outputs(self, parameters: Values, buffers: Values, batch: Batch) -> Outputs:
        """Return the outputs for evaluations and predictions."""


def refuse_other_columns(spec: ModelSpec, backend: str) -> None:
    """Raise UsageError for a model that reads anything but images and labels."""
    if (*spec.inputs, spec.target) != (IMAGE, LABEL):
        read = ", ".join((*spec.inputs, spec.target))
        raise UsageError(f"model: {spec.name!r} reads {read}; backend {backend} knows images and labels alone.")


def refuse_own_losses(spec: ModelSpec, backend: str) -> None:
    """Raise UsageError for a loss other than cross entropy with one label per example."""
    if spec.objective.loss != CROSS_ENTROPY:
        raise UsageError(f"model: {spec.name!r} has the loss {spec.objective.loss!r}; backend {backend} knows {CROSS_ENTROPY} alone.")


WARM_SIZES = 8  # maximum of batch sizes in a warm-up


class Passes:
    """Passes over the data; `gather_seconds` grows by the time of gathering."""

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, model: ArrayModel) -> None:
        self._spec, self._model, self._most = spec, model, job.accumulate

        def split(name: Split, *, changing: bool) -> GatheredSplit:
            return GatheredSplit(data, name, inputs=spec.inputs, target=spec.target, changing=changing)

        self._splits = {"train": split("train", changing=job.augment != "none"), "test": split("test", changing=False)}
        self.gather_seconds = 0.0

    def gather(self, batches: Batches, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the non-empty micro-batches of each update; batch i is update `first_step` + i."""
        cut, counts = batches.in_micro_batches(self._most)
        position = 0
        for step, count in enumerate(counts.tolist(), first_step):
            began = time.perf_counter()
            places = ((number, cut.offsets[position + number], cut.offsets[position + number + 1]) for number in range(count))
            gathered = [self._gathered(cut, begin, end, step, number) for number, begin, end in places if end > begin]
            self.gather_seconds += time.perf_counter() - began
            yield gathered
            position += count

    def _gathered(self, batches: Batches, begin: int, end: int, step: int, number: int) -> Batch:
        indices = batches.indices[begin:end]
        changes = None if batches.changes is None else batches.changes[begin:end]
        return Batch(*self._splits["train"].take(indices, changes), indices, step, number)

    def gradients(self, batches: Batches, first_step: int, values: FlatValues, out: FlatValues) -> Iterator[float]:
        """Yield each update's loss, with its gradient in `out`.

        `out` also gets each buffer's old value less its new one; all are zeros without examples.
        """
        for gathered, weight in zip(self.gather(batches, first_step), batches.weights.tolist(), strict=True):
            yield self.gradient(gathered, weight, values, out)

    def gradient(self, micro_batches: list[Batch], weight: float, values: FlatValues, out: FlatValues) -> float:
        """Compute one update; see `gradients`."""
        loss, before = 0.0, values.tail.copy()
        if not micro_batches:
            out.trained.fill(0.0)
        for number, batch in enumerate(micro_batches):
            result = self._model.gradients(values.parameters, values.buffers, batch, weight)
            loss += float(result.loss)
            for name, view in out.parameters.items():
                gradient = np.asarray(result.parameters[name])
                np.copyto(view, gradient) if number == 0 else np.add(view, gradient, out=view)
            for name, value in result.buffers.items():
                np.copyto(values.buffers[name], np.asarray(value))
        np.subtract(before, values.tail, out=out.tail)
        return loss

    def sums(self, values: FlatValues, split: Split, start: int, stop: int) -> list[float]:
        """Return the objective's sums, in its order, over the examples start … stop − 1."""
        names = self._spec.objective.sums
        total = np.zeros(len(names))
        for outputs, batch in self._evaluated(values, split, start, stop):
            parts = self._example_sums(outputs, batch)
            total += [float(np.sum(parts[name], dtype=np.float64)) for name in names]
        return total.tolist()

    def _example_sums(self, outputs: Outputs, batch: Batch) -> dict[str, NDArray[Any]]:
        parts = self._spec.objective.common_parts(np.asarray(outputs.losses), np.ones(len(batch)), batch.inputs, batch.target)
        if "correct" in self._spec.objective.sums and "correct" not in outputs.sums:
            parts["correct"] = np.asarray(outputs.logits).argmax(1) == batch.target
        parts |= {name: np.asarray(value) for name, value in outputs.sums.items()}
        self._spec.objective.check_parts({name: value.ndim for name, value in parts.items()})
        return parts

    def logits(self, values: FlatValues, split: Split, start: int, stop: int) -> Array:
        """Return the logits of the examples start … stop − 1, float32 [stop − start, classes]."""
        pieces = [np.asarray(outputs.logits, np.float32) for outputs, _ in self._evaluated(values, split, start, stop)]
        return np.concatenate([np.zeros((0, self._spec.classes), np.float32), *pieces])

    def _evaluated(self, values: FlatValues, split: Split, start: int, stop: int) -> Iterator[tuple[Outputs, Batch]]:
        data = self._splits[split]
        for first, last in evaluation_passes(self._spec, data.longest, start, stop):
            indices = np.arange(first, last, dtype=np.int32)
            batch = Batch(*data.take(indices), indices)
            yield self._model.outputs(values.parameters, values.buffers, batch), batch

    def warm_up(self, batches: Batches, values: FlatValues, out: FlatValues, pieces: list[tuple[int, int]]) -> None:
        """Train once with each batch size, and evaluate these pieces of the test split.

        Buffers change.
        """
        _, places = np.unique(np.diff(batches.offsets), return_index=True)
        for place in places[::-1][:WARM_SIZES].tolist():
            for _ in self.gradients(batches.slice(place, 1), 0, values, out):
                pass
        for start, stop in pieces:
            self.sums(values, "test", start, stop)


class ArrayComputation:
    """A `Computation` of the parameter server; the constructor warms it up."""

    loss_scale: float | None = None

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, sampler: Sampler, model: ArrayModel) -> None:
        self._passes, self._clip_norm = Passes(job, spec, data, model), job.clip_norm
        self._values, self._gradient = FlatValues(spec), FlatValues(spec)
        self.values, self.gradient = self._values.vector, self._gradient.vector
        self.precision_used: str = job.precision
        self.device_used = model.device_used
        startup_phase("warming up")
        epoch = sampler.whole(0, 0, sampler.steps_per_epoch)
        tickets = cut_evaluation("test", data.info.sizes["test"], job.workers, evaluation_batch(spec))
        pieces = {ticket.stop - ticket.start: (ticket.start, ticket.stop) for ticket in tickets}
        self._passes.warm_up(epoch, self._values, self._gradient, list(pieces.values()))

    def gradients(self, batches: Batches, first_step: int) -> Iterator[Computed]:
        """Compute updates; see `Computation.gradients`."""
        for loss in self._passes.gradients(batches, first_step, self._values, self._gradient):
            if self._clip_norm:
                clip(self._gradient.trained, self._clip_norm)
            yield loss, False

    def sums(self, split: Split, start: int, stop: int) -> list[float]:
        """Return an evaluation's sums; see `Computation.sums`."""
        return self._passes.sums(self._values, split, start, stop)

    def calibrator(self, batches: Batches, exchange: Exchange) -> Calibrator:
        """Return the calibrator; see `Computation.calibrator`."""
        passes, values, gradient = self._passes, self._values, self._gradient
        return Calibrator(
            batches, passes.gather, lambda gathered, batch: passes.gradient(gathered, float(batch.weights[0]), values, gradient), exchange
        )
