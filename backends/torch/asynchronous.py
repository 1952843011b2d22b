"""Computation of an async worker with torch.

On the CPU parameters and gradients lie in the network's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ...core.cluster import Task
from ...core.job import Job
from ...core.liveness import startup_phase
from ...data.base import Dataset, Split
from ...data.sampler import Batches, Sampler
from ...exchange.parameter_server.shards import Vector
from ...models.base import ModelSpec
from ..base import State, calibration_batches
from ..compiling import should_time
from ..decoding_functions import Translating
from ..parameter_server.worker import Computed
from ..timing import Calibrator, Exchange, measure_step
from .calibration import StepProfiler, make_calibrator
from .compiler import choose
from .data import Columns, resident_splits
from .gradients import Computed as LossAndGradients
from .gradients import LocalGradients
from .model import Model, updates_in_micro_batches
from .optimizers import LossScale, Wrapping, clipped, make_rule, precision_used, unscaled
from .runtime import cut, device_kind, each_value, retain_memory


class TorchComputation:
    """A `Computation` on a device; ready when it is made."""

    def __init__(self, task: Task, job: Job, model: ModelSpec, data: Dataset, sampler: Sampler, device: torch.device) -> None:
        self._job, self._device = job, device
        self._splits = resident_splits(job, model, data, device)
        elements = model.size + model.buffers_size
        pinned = device.type == "cuda"
        self._values, self._gradient = torch.zeros(elements, pin_memory=pinned), torch.zeros(elements, pin_memory=pinned)
        self.values, self.gradient = self._values.numpy(), self._gradient.numpy()
        self._on_device = self._values if device.type == "cpu" else self._values.to(device)
        self._model = Model.from_vector(job, model, task.rank, self._on_device)
        self._tail = self._on_device[model.size :]
        self._loss_scale = LossScale() if job.precision == "fp16" else None
        self._source = LocalGradients(self._model, self._loss_scale, slices=False)
        self.precision_used, self.device_used = precision_used(job.precision, device), device_kind(device)
        self._tracer = StepProfiler(task, job, device)
        self._gradient_views = cut(self._gradient[: model.size], model.parameters)
        self._moves = self._gradient[model.size :]
        self._before: torch.Tensor | None = None
        retain_memory()
        startup_phase("warming up")
        first, timing = sampler.whole(0, 0, 1), should_time(job, model, data)
        choose(job, self._model, self._splits["train"], first, lambda: self._measure_step(sampler), job.workers, timing=timing)
        self._warm_up(sampler.examples_per_pass(job.micro_batch))

    def _measure_step(self, sampler: Sampler) -> float:
        return measure_step(self.calibrator(calibration_batches(sampler), None).run)

    def _warm_up(self, count: int) -> None:
        data = self._splits["train"]
        for _ in range(2):
            self._receive()
            self._hand_over(self._source.compute_gathered(*data.span(0, count), Batches.single(count), 1, 1 / count))
        self._model.sums(self._splits["test"], 0, 1)

    @property
    def loss_scale(self) -> float | None:
        """See `Computation`."""
        return None if self._loss_scale is None else self._loss_scale.scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        if self._loss_scale is not None and scale is not None:
            self._loss_scale.scale = scale

    def _receive(self) -> None:
        """Take the worker's values, and keep a copy of the buffers, if there are any."""
        if self._on_device is not self._values:
            self._on_device.copy_(self._values, non_blocking=True)
        self._before = self._tail.clone() if len(self._tail) else None

    def _hand_over(self, computed: LossAndGradients) -> Computed:
        loss, gradients = computed
        overflowed = self._loss_scale is not None and not unscaled(gradients, self._loss_scale.scale)
        torch._foreach_copy_(self._gradient_views, clipped(gradients, self._job.clip_norm) if self._job.clip_norm else gradients)
        if self._before is not None:
            self._moves.copy_(self._before - self._tail)
        return float(loss), overflowed

    def gradients(self, batches: Batches, first_step: int) -> Iterator[Computed]:
        """Compute updates; see `Computation.gradients`."""
        if not self._tracer.left:
            yield from self._compute_updates(batches, first_step)
            return
        updates = self._compute_updates(batches, first_step)
        for _ in range(len(batches)):
            self._tracer.begin()
            yield next(updates)
            self._tracer.done()

    def _compute_updates(self, batches: Batches, first_step: int) -> Iterator[Computed]:
        shares = (1 / batches.weights).tolist()
        if self._job.accumulate > 1:
            updates = updates_in_micro_batches(self._model, self._splits["train"], batches, self._job.accumulate, first_step)
            for update, share in zip(updates, shares, strict=True):
                self._receive()
                yield self._hand_over(self._source.compute_micro_batches(*update, share))
            return
        compute, context, position = self._source.compute_batch, self._model.passes.training, 0
        for block in self._splits["train"].blocks(batches):
            for x, y in block:
                self._receive()
                yield self._hand_over(compute(x, y, shares[position], context(first_step + position, batches, position)))
                position += 1

    def sums(self, split: Split, start: int, stop: int) -> list[float]:
        """Return an evaluation's sums; see `Computation.sums`."""
        if self._on_device is not self._values:
            self._on_device.copy_(self._values)
        return self._model.sums(self._splits[split], start, stop)

    def calibrator(self, batches: Batches, exchange: Exchange | None) -> Calibrator:
        """Return the calibrator; see `Computation.calibrator`."""

        def compute(x: Columns, y: Columns, batch: Batches) -> None:
            self._receive()
            self._hand_over(self._source.compute_gathered(x, y, batch, self._job.accumulate, 1 / float(batch.weights[0])))

        return make_calibrator(self._splits["train"], batches, compute, exchange, self._device)


class FlatRule(Wrapping):
    """The rule on a flat vector; an `UpdateRule`."""

    def __init__(self, job: Job, parameters: Vector) -> None:
        self._rule = make_rule(job, [torch.from_numpy(parameters)])
        self.slots: Mapping[str, Vector] = {name: tensor.numpy() for name, (tensor,) in self._rule.slots.items()}

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply one update; see `UpdateRule`."""
        self._rule.step([torch.from_numpy(gradient)], lr)


class ChiefTranslating:
    """Translator on the chief, with a copy of the model made on first use.

    It is a `Translate` of `backends.parameter_server`.
    """

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset) -> None:
        self._job = job if job.precision != "fp16" else job.model_copy(update={"precision": "fp32"})  # fp16 takes a GPU
        self._spec, self._data = spec, data
        self._made: tuple[Model, Translating] | None = None

    def __call__(self, state: State) -> Translating:
        """Return a translator with these weights."""
        if self._made is None:
            copy = Model.initial(self._job, self._spec, 0, torch.device("cpu"))
            self._made = copy, Translating(self._data, self._spec.objective, copy.stepper(), 0, 1)
        model, translating = self._made
        for tensor, value in zip([*model.values, *model.buffers], each_value(self._spec, (), state), strict=True):
            if value is not None:
                tensor.copy_(value)
        return translating
