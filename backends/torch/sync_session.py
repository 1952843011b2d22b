"""Synchronous training: all ranks make one update together.

Each takes its slice of the global batch. DistributedDataParallel averages over ranks, so each scales its losses by world size / global
batch size, exact for uneven slices too. Buffers are averaged over ranks before they are evaluated or saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from ...core.cluster import Task
from ...core.job import Job
from ...core.liveness import startup_phase
from ...core.update_rules import slot_names, weights_to_evaluate
from ...data.base import Dataset, Split
from ...data.sampler import Batches
from ...exchange.mesh import Mesh, Vector
from ...models.base import Array, ModelSpec
from ..base import Plan, State, StepResult, calibration_batches
from ..compiling import should_time
from ..rank_session import RankSession
from ..timing import Calibrator, CarryOut, DirectTrial, Exchange, measure_step
from .calibration import StepProfiler, make_calibrator, reducer_figures
from .compiler import choose
from .data import Columns, resident_splits
from .decoding import TorchStepper
from .direct import TRIED, TcpCollectives, TcpGradients, init_collectives
from .gradients import Computed, LocalGradients
from .model import Model, updates_in_micro_batches
from .optimizers import LossScale, Rule, clipped, make_rule, precision_used, reset_slots
from .runtime import StateMemory, device_kind, each_value, retain_memory


class Updater:
    """Applies gradients by a rule."""

    def __init__(self, job: Job, rule: Rule, loss_scale: LossScale | None) -> None:
        self._rule, self._loss_scale = rule, loss_scale
        self._clip_norm = job.clip_norm

    def apply(self, computed: Computed, lr: float) -> torch.Tensor:
        """Apply one update; return its loss."""
        loss, gradients = computed
        if self._loss_scale is not None and not self._loss_scale.unscale(gradients):
            self._rule.updates += 1  # an update that changes nothing: the cursor of the run counts it
        else:
            self._rule.step(clipped(gradients, self._clip_norm) if self._clip_norm else gradients, lr)
        return loss


GROUP_SECONDS = 0.5  # for a single process; ranks yield one result per plan


class SyncSession(RankSession[StateMemory]):
    """A rank; every rank is a leading task and calls the same methods in the same order."""

    def __init__(self, task: Task, job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> None:
        super().__init__(task, job, model, data)
        self._device, timing = device, should_time(job, model, data)
        self._splits = resident_splits(job, model, data, device)
        self._model = Model.initial(job, model, task.rank, device)
        self._rule = make_rule(job, self._model.values, [parameter.name for parameter in model.parameters])
        weights = weights_to_evaluate(self._model.values, self._rule.slots)
        self._evaluated = self._model if weights is self._model.values else self._model.with_values(weights)
        self._slots = slot_names(job)
        self._loss_scale = LossScale() if job.precision == "fp16" else None
        self.precision_used, self.device_used = precision_used(job.precision, device), device_kind(device)

        self._tracer = StepProfiler(task, job, device)
        exchange = init_collectives(task, job, self._model, self._loss_scale, device)
        self._ranks, self._source, self._exchange, self._distributed = exchange
        self._updater = Updater(job, self._rule, self._loss_scale)
        retain_memory()
        startup_phase("warming up")
        first = self._sampler.for_rank(0, 0, 1, self._rank)
        choose(job, self._model, self._splits["train"], first, self._measure_step, job.workers, timing=timing)
        self._warm_up()

    def _measure_step(self) -> float:
        return measure_step(
            self._make_calibrator(LocalGradients(self._model, self._loss_scale, slices=self._exchange is not None), None).run
        )

    def _warm_up(self) -> None:
        """Run two steps without effect.

        They run first kernels, and DDP's rebuild of buckets, which changes the order of summation.
        """
        count = self._sampler.examples_per_pass(self._job.micro_batch)
        x, y = self._splits["train"].span(0, count)
        for _ in range(2):
            began = time.perf_counter()
            float(self._updater.apply(self._source.compute_gathered(x, y, Batches.single(count), 1, 1.0), 0.0))
            seconds = time.perf_counter() - began
        self._steps_per_group = max(1, min(64, int(GROUP_SECONDS / seconds)))
        self._evaluated.sums(self._splits["test"], 0, min(count, self._sizes["test"]))
        if self._spec.objective.translation is not None:
            self.translating().warm_up()
        self._ranks.barrier()
        self._reset_state()
        if self._job.saved_every is not None:
            self._state_memory()

    def _reset_state(self) -> None:
        reset_slots(self._rule.slots, self._model.values)
        values = self._spec.initial_buffers(self._job.seed)
        for buffer, spec in zip(self._model.buffers, self._spec.buffers, strict=True):
            buffer.copy_(torch.from_numpy(values[spec.name]))
        self._rule.updates, self._averaged = 0, True
        if self._loss_scale is not None:
            self._loss_scale.restore({})

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan; see `Session.train`. Raises RuntimeError if a peer dies."""
        batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self._rank, plan.skip, plan.arranged)
        self._healthy = self._averaged = False
        first = 0
        while first < plan.count:
            count, profiled = self._group(plan.count - first), self._tracer.left > 0
            self._tracer.begin()
            result = self._run(plan, batches, first, count)
            self._tracer.done(count)
            yield replace(result, profiled=profiled)
            first += count
        self._healthy = True

    def _group(self, remaining: int) -> int:
        if self._tracer.left:
            return min(remaining, self._tracer.left)
        if self._job.steps_per_call is not None:
            return min(remaining, self._job.steps_per_call)
        if self._exchange is not None or remaining <= 2 * self._steps_per_group:
            return remaining
        return self._steps_per_group

    def _run(self, plan: Plan, batches: Batches, first: int, count: int) -> StepResult:
        began = time.perf_counter()
        data = self._splits["train"]
        data.wait_seconds = 0.0
        group = batches.slice(first, count)
        scales = (self._source.factor / group.weights).tolist()
        rates, apply = plan.learning_rates[first : first + count].tolist(), self._updater.apply
        if self._job.accumulate > 1:
            updates = updates_in_micro_batches(self._model, data, group, self._job.accumulate, plan.first_step + first)
            accumulate = self._source.compute_micro_batches
            losses = [apply(accumulate(*update, scale), rate) for update, scale, rate in zip(updates, scales, rates, strict=True)]
        else:
            losses = []
            compute, context, step = self._source.compute_batch, self._model.passes.training, plan.first_step + first
            for block in data.blocks(group):
                for x, y in block:
                    position = len(losses)
                    losses.append(apply(compute(x, y, scales[position], context(step + position, group, position)), rates[position]))
        reduced = self._reduce(losses)
        seconds = time.perf_counter() - began
        self._steps_per_group = max(1, min(4 * count, int(count * GROUP_SECONDS / seconds)))
        wait = data.wait_seconds if self._device.type == "cpu" else None
        return StepResult(plan.first_step + first, reduced, int(group.examples.sum()), seconds, data_wait_seconds=wait)

    def _reduce(self, losses: list[torch.Tensor]) -> Array:
        stacked = torch.stack(losses)
        if self._exchange is not None:
            stacked = stacked.to(torch.float64)
            self._ranks.all_reduce(stacked)
            stacked /= self._source.factor
        return np.asarray(stacked.cpu().numpy(), np.float32)

    def _sums(self, split: Split) -> list[float]:
        sums = torch.tensor(self._evaluated.sums(self._splits[split], *self._share(split)), dtype=torch.float64, device=self._device)
        with self._meeting():
            self._ranks.all_reduce(sums)
        return list(sums.tolist())

    def _stepper(self) -> TorchStepper:
        return self._evaluated.stepper()

    def _average(self) -> None:
        flat = torch.cat([buffer.flatten() for buffer in self._model.buffers])
        with self._meeting():
            self._ranks.all_reduce(flat)
        flat /= self._world
        for buffer, mean in zip(self._model.buffers, flat.split([buffer.numel() for buffer in self._model.buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _logits(self, split: Split, start: int, stop: int) -> Array:
        return self._evaluated.logits(self._splits[split], start, stop)

    def _tensors(self) -> list[torch.Tensor]:
        slots = [tensor for slot in self._slots for tensor in self._rule.slots[slot]]
        return [*self._model.values, *slots, *self._model.buffers]

    def _make_memory(self) -> StateMemory:
        return StateMemory(self._spec, self._slots, pinned=self._device.type == "cuda")

    def _copy_to(self, memory: StateMemory) -> None:
        memory.take(self._tensors())

    @property
    def _updates_done(self) -> int:
        return self._rule.updates

    @property
    def _scalars(self) -> dict[str, float]:
        return {} if self._loss_scale is None else self._loss_scale.scalars

    def load(self, state: State | None) -> None:
        """Take over the first rank's state. Raises ValueError where it does not fit the model."""
        if self._rank == 0:
            if state is None:
                raise ValueError("load: the first rank was given no state")
            self._install(state)
        self._broadcast()
        self._averaged = True

    def _install(self, state: State) -> None:
        for tensor, value in zip(self._tensors(), each_value(self._spec, self._slots, state), strict=True):
            tensor.zero_() if value is None else tensor.copy_(value)
        self._rule.updates = state.updates
        if self._loss_scale is not None:
            self._loss_scale.restore(state.scalars)

    def _broadcast(self) -> None:
        scale = [0.0, 0.0] if self._loss_scale is None else list(self._loss_scale.scalars.values())
        numbers = torch.tensor([float(self._rule.updates), *scale], dtype=torch.float64, device=self._device)
        with self._meeting():
            for tensor in (*self._tensors(), numbers):
                self._ranks.broadcast(tensor)
        updates, loss_scale, clean_steps = numbers.tolist()
        self._rule.updates = int(updates)
        if self._loss_scale is not None:
            self._loss_scale.restore({"loss_scale": loss_scale, "clean_steps": clean_steps})

    def _native_figures(self) -> Mapping[str, float]:
        return reducer_figures(self._distributed)

    def _make_repetition(self) -> CarryOut:
        exchange = None if self._exchange is None else self._exchange()
        return self._make_calibrator(LocalGradients(self._model, self._loss_scale, slices=exchange is not None), exchange).run

    def _open_trial(self) -> DirectTrial:
        def all_reduce(vector: Vector) -> Vector:
            self._ranks.all_reduce(tensor := torch.from_numpy(vector.copy()))
            return np.asarray(tensor.numpy())

        def make(mesh: Mesh) -> CarryOut:
            direct = TcpGradients(self._model, self._loss_scale, TcpCollectives(mesh))
            calibrator = self._make_calibrator(direct, direct.exchange_alone())
            return lambda order: calibrator.run(order, TRIED[order.component])

        return DirectTrial.open(self._task, self._device.type == "cpu", all_reduce, self._job.node_timeout, make)

    def _make_calibrator(self, source: LocalGradients, exchange: Exchange | None) -> Calibrator:
        batches = calibration_batches(self._sampler, self._rank)

        def compute(x: Columns, y: Columns, batch: Batches) -> None:
            scale = self._source.factor / float(batch.weights[0])
            self._updater.apply(source.compute_gathered(x, y, batch, self._job.accumulate, scale), 0.0)

        return make_calibrator(self._splits["train"], batches, compute, exchange, self._device)

    def _leave(self) -> None:
        self._ranks.leave(healthy=self._healthy)
