"""A worker's passes over its own examples: gradients of updates, evaluations and predictions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.job import Job
from ...data.base import Dataset, Split
from ...data.columns import LENGTHS, TOKENS
from ...data.sampler import Batches
from ...models.base import Array, ModelSpec
from ...models.objectives import COUNTED, LOSS_SUM
from ..vectors.evaluation_batches import evaluation_batch, examples_at_once
from ..vectors.flat_values import FlatValues
from ..vectors.gathering import GatheredSplit
from .model import ArrayModel, Batch, Outputs

__all__ = ["Passes"]

WARM_SIZES = 8
"""Sizes of batches that a warm-up tries, at most: a framework that compiles does so for each."""


class Passes:
    """`gather_seconds` grows by the time that gathering took."""

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, model: ArrayModel) -> None:
        self._spec, self._model, self._most = spec, model, job.accumulate

        def split(name: Split, *, changing: bool) -> GatheredSplit:
            return GatheredSplit(data, name, inputs=spec.inputs, target=spec.target, changing=changing)

        self._splits = {"train": split("train", changing=job.augment != "none"), "test": split("test", changing=False)}
        self.gather_seconds = 0.0

    def gather(self, batches: Batches, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield for each update, of which batch i is number `first_step` + i, its micro-batches; empty ones are left out."""
        cut, counts = batches.in_micro_batches(self._most)
        position = 0
        for step, count in enumerate(counts.tolist(), first_step):
            began = time.perf_counter()
            places = ((number, cut.offsets[position + number], cut.offsets[position + number + 1]) for number in range(count))
            found = [self._gathered(cut, begin, end, step, number) for number, begin, end in places if end > begin]
            self.gather_seconds += time.perf_counter() - began
            yield found
            position += count

    def _gathered(self, batches: Batches, begin: int, end: int, step: int, number: int) -> Batch:
        indices = batches.indices[begin:end]
        changes = None if batches.changes is None else batches.changes[begin:end]
        return Batch(*self._splits["train"].take(indices, changes), indices, step, number)

    def gradients(self, batches: Batches, first_step: int, values: FlatValues, out: FlatValues) -> Iterator[float]:
        """Compute one update after another and yield each's loss, the part of these examples in it; the gradient lies in `out` then.

        For a buffer that is its value before less its value after; the new one is written to `values`. Other values may be written there
        before the next update is asked for. No examples give zeros.
        """
        for found, weight in zip(self.gather(batches, first_step), batches.weights.tolist(), strict=True):
            yield self.gradient(found, weight, values, out)

    def gradient(self, micro_batches: list[Batch], weight: float, values: FlatValues, out: FlatValues) -> float:
        """Do the same for one update."""
        loss, before = 0.0, values.tail.copy()
        if not micro_batches:
            out.trained.fill(0.0)
        for number, batch in enumerate(micro_batches):
            found = self._model.gradients(values.parameters, values.buffers, batch, weight)
            loss += float(found.loss)
            for name, view in out.parameters.items():
                gradient = np.asarray(found.parameters[name])
                np.copyto(view, gradient) if number == 0 else np.add(view, gradient, out=view)
            for name, value in found.buffers.items():
                np.copyto(values.buffers[name], np.asarray(value))
        np.subtract(before, values.tail, out=out.tail)
        return loss

    def sums(self, values: FlatValues, split: Split, start: int, stop: int) -> list[float]:
        """Return the objective's sums, in its order, over the examples start … stop − 1."""
        names = self._spec.objective.sums
        total = np.zeros(len(names))
        for outputs, batch in self._evaluated(values, split, start, stop):
            found = self._example_sums(outputs, batch)
            total += [float(np.sum(found[name], dtype=np.float64)) for name in names]
        return total.tolist()

    def _example_sums(self, outputs: Outputs, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return what each example adds to the sums, [n] by name."""
        found: dict[str, NDArray[Any]] = {LOSS_SUM: np.asarray(outputs.losses), COUNTED: np.ones(len(batch))}
        for given in (batch.inputs, batch.target):
            if isinstance(given, dict):
                found |= {name.removesuffix(LENGTHS) + TOKENS: value for name, value in given.items() if name.endswith(LENGTHS)}
        if "correct" in self._spec.objective.sums and "correct" not in outputs.sums:
            found["correct"] = np.asarray(outputs.logits).argmax(1) == batch.target
        found |= {name: np.asarray(value) for name, value in outputs.sums.items()}
        self._spec.objective.check_parts({name: value.ndim for name, value in found.items()})
        return found

    def logits(self, values: FlatValues, split: Split, start: int, stop: int) -> Array:
        """Return the logits of the examples start … stop − 1, float32 [stop − start, classes]."""
        pieces = [np.asarray(outputs.logits, np.float32) for outputs, _ in self._evaluated(values, split, start, stop)]
        return np.concatenate([np.zeros((0, self._spec.classes), np.float32), *pieces])

    def _evaluated(self, values: FlatValues, split: Split, start: int, stop: int) -> Iterator[tuple[Outputs, Batch]]:
        """Yield the results of the examples start … stop − 1, as many at once as an evaluation takes."""
        data, step = self._splits[split], evaluation_batch(self._spec)
        while start < stop:
            most = min(step, stop - start)
            end = start + examples_at_once(self._spec, data.longest(start, start + most), most)
            indices = np.arange(start, end, dtype=np.int32)
            batch = Batch(*data.take(indices), indices)
            yield self._model.outputs(values.parameters, values.buffers, batch), batch
            start = end

    def warm_up(self, batches: Batches, values: FlatValues, out: FlatValues, pieces: list[tuple[int, int]]) -> None:
        """Run a training pass of each size of batch, and an evaluation of these pieces of the test split; values of buffers change."""
        _, places = np.unique(np.diff(batches.offsets), return_index=True)
        for place in places[::-1][:WARM_SIZES].tolist():
            for _ in self.gradients(batches.slice(place, 1), 0, values, out):
                pass
        for start, stop in pieces:
            self.sums(values, "test", start, stop)
