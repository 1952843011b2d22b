"""Synchronous training: every rank takes its slice of the global batch, and one update follows from all of them together.

The gradient of an update is Σ losses / global batch size, exactly, however unevenly the batch is shared: DistributedDataParallel
averages over ranks, so each rank scales its summed losses by world size / global batch size. A rank with an empty slice takes part
with zeros.

Buffers (running statistics) are each rank's own while it trains, and averaged over ranks before they are evaluated or saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from ....core.cluster import Task, split_evenly
from ....core.job import Job
from ....core.liveness.startup_watchdog import startup_phase
from ....core.update_rules import slot_names, weights_to_evaluate
from ....data.base import Dataset, Split
from ....data.sampler import Batches
from ....models.base import Array, ModelSpec
from ...base import CalibrationOrder, CalibrationResult, EvalResult, Plan, State, StepResult, calibration_batches, make_sampler
from ...compiling.choice import TIMED_SECONDS, to_be_chosen
from ...timing import Calibrator, DirectTrial, Exchange
from ...translating import Translating
from ..calibration import make_calibrator
from ..compiler.choice import choose
from ..data import ColumnTensors, resident_splits
from ..model import MicroBatch, Model, micro_batches_of
from ..optimizers import make_rule, reset_slots
from ..precision import LossScale, precision_used
from ..profiler import make_tracer
from ..runtime import keep_steps_memory, kind_of
from ..state import StateMemory, each_value
from .calibration import reducer_figures
from .direct import DirectGradients, DirectRanks
from .direct_trial import TRIED, open_trial
from .exchanges import join
from .gradients import GradientSource, OneRank
from .update import Updater

__all__ = ["SyncSession"]

GROUP_SECONDS = 0.5
"""A result is yielded about this often by a single process (ranks yield one a plan, since their losses are reduced together)."""


class SyncSession:
    """One rank; every rank is a leading task and calls the same methods in the same order."""

    def __init__(self, task: Task, job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> None:
        self._spec, self._job, self._device = model, job, device
        timing = to_be_chosen(job, model, data)
        self._task, self._rank, self._world = task, task.rank, task.cluster.workers
        self._sampler = make_sampler(job, data, model.objective.weight)
        self._splits = resident_splits(job, model, data, device)
        self._data, self._sizes = data, dict(data.info.sizes)
        self._translating: Translating | None = None
        self._model = Model.initial(job, model, task.rank, device)
        self._rule = make_rule(job, self._model.values)
        weights = weights_to_evaluate(self._model.values, self._rule.slots)
        self._evaluated = self._model if weights is self._model.values else self._model.on_values(weights)
        self._slots = slot_names(job)
        self._loss_scale = LossScale() if job.precision == "fp16" else None
        self.precision_used, self.device_used = precision_used(job.precision, device), kind_of(device)
        self._averaged = True
        self._memory: StateMemory | None = None
        self._calibrator: Calibrator | None = None
        self._trial: DirectTrial | None = None
        self._tracer, self._left_to_trace = make_tracer(task, job, device), job.profile
        self._open, self._healthy = True, True
        exchange = join(task, job, self._model, self._loss_scale, device)
        self._ranks, self._source, self._exchange, self._distributed = exchange
        self._updater = Updater(job, self._rule, self._loss_scale, self._source)
        keep_steps_memory()
        startup_phase("warming up")
        first = self._sampler.for_rank(0, 0, 1, self._rank)
        choose(job, self._model, self._splits["train"], first, self._time_of_step, job.workers, timing=timing)
        self._warm_up()

    def _time_of_step(self) -> float:
        """Return the seconds of a step without communication."""
        calibrator = self._make_calibrator(OneRank(self._model, self._loss_scale, slices=self._exchange is not None), None)
        calibrator.run(CalibrationOrder("compute", 1))
        count, seconds = calibrator.run(CalibrationOrder("compute", 1, TIMED_SECONDS))
        return seconds / count

    def _warm_up(self) -> None:
        """Run two steps that leave no trace: first kernels, and the rebuild of DDP's buckets after the first backward pass.

        The rebuild changes the order of summation, so that without it a run that is resumed would differ in the last bits.
        """
        count = self._sampler.examples_at_once(self._job.micro_batch)
        x, y = self._splits["train"].span(0, count)
        for _ in range(2):
            began = time.perf_counter()
            float(self._updater.update(x, y, 1.0, 0.0, self._model.passes.training(0, Batches.single(count), 0)))
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
        """Undo what the warm-up has changed. With the learning rate 0 that is no parameter, so that no copy of them is needed."""
        reset_slots(self._rule.slots, self._model.values)
        for buffer, spec in zip(self._model.buffers, self._spec.buffers, strict=True):
            buffer.fill_(spec.constant)
        self._rule.updates, self._averaged = 0, True
        if self._loss_scale is not None:
            self._loss_scale.restore({})

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan; see `Session.train`. A peer that dies raises RuntimeError here."""
        batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self._rank, plan.skip, plan.arranged)
        self._healthy = self._averaged = False
        first = 0
        while first < plan.count:
            count, profiled = self._group(plan.count - first), self._left_to_trace > 0
            if self._tracer is not None:
                self._tracer.begin()
            result = self._run(plan, batches, first, count)
            self._left_to_trace = max(0, self._left_to_trace - count)
            if self._tracer is not None:
                self._tracer.done(count)
            yield replace(result, profiled=profiled)
            first += count
        self._healthy = True

    def _group(self, remaining: int) -> int:
        """Return how many updates the next result covers; the same on every rank."""
        if self._left_to_trace:
            return min(remaining, self._left_to_trace)
        if self._job.steps_per_call is not None:
            return min(remaining, self._job.steps_per_call)
        if self._exchange is not None or remaining <= 2 * self._steps_per_group:
            return remaining
        return self._steps_per_group

    def _run(self, plan: Plan, batches: Batches, first: int, count: int) -> StepResult:
        """Apply the updates first … first + count − 1 of a plan as one group."""
        began = time.perf_counter()
        data = self._splits["train"]
        data.wait_seconds = 0.0
        own = batches.slice(first, count)
        scales = (self._source.factor / own.weights).tolist()
        rates = plan.learning_rates[first : first + count].tolist()
        if self._job.accumulate > 1:
            losses = self._accumulate(own, scales, rates, plan.first_step + first)
        else:
            losses = []
            update, context, step = self._updater.update, self._model.passes.training, plan.first_step + first
            for block in data.blocks(own):
                for x, y in block:
                    position = len(losses)
                    losses.append(update(x, y, scales[position], rates[position], context(step + position, own, position)))
        reduced = self._reduce(losses)
        seconds = time.perf_counter() - began
        self._steps_per_group = max(1, min(4 * count, int(count * GROUP_SECONDS / seconds)))
        wait = data.wait_seconds if self._device.type == "cpu" else None
        return StepResult(plan.first_step + first, reduced, int(own.examples.sum()), seconds, data_wait_seconds=wait)

    def _accumulate(self, own: Batches, scales: list[float], rates: list[float], first_step: int) -> list[torch.Tensor]:
        """Apply an update for each batch, computed in micro-batches; return their losses."""
        cut, counts = own.in_micro_batches(self._job.accumulate)
        examples, passes = enumerate(batch for block in self._splits["train"].blocks(cut) for batch in block), self._model.passes

        def of_update(step: int, count: int) -> Iterator[MicroBatch]:
            for number, (position, (x, y)) in enumerate(islice(examples, count)):
                yield x, y, passes.training(step, cut, position, number)

        return [
            self._updater.accumulate(of_update(first_step + position, count), count, scales[position], rates[position])
            for position, count in enumerate(counts.tolist())
        ]

    def _reduce(self, losses: list[torch.Tensor]) -> Array:
        """Return the mean losses over the global batches, float32 [count]: one all-reduce for the group."""
        stacked = torch.stack(losses)
        if self._exchange is not None:
            stacked = stacked.to(torch.float64)
            self._ranks.add_up(stacked)
            stacked /= self._source.factor
        result: Array = stacked.cpu().numpy().astype(np.float32)
        return result

    def drain(self) -> Iterator[StepResult]:
        """Nothing is ever outstanding."""
        return iter(())

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate the rank's share of the split and add up over ranks; see `Session.evaluate`."""
        began = time.perf_counter()
        self._average_buffers()
        start, stop = split_evenly(self._sizes[split], self._world)[self._rank]
        sums = torch.tensor(self._evaluated.sums(self._splits[split], start, stop), dtype=torch.float64, device=self._device)
        self._healthy = False
        self._ranks.add_up(sums)
        self._healthy = True
        seconds = time.perf_counter() - began
        return EvalResult.of(self._spec.objective, split, self._sizes[split], sums.tolist(), seconds, self._rule.updates)

    def translating(self) -> Translating:
        """Return what translates this rank's share; see `Session.translating`."""
        self._average_buffers()
        if self._translating is None:
            self._translating = Translating(self._data, self._spec.objective, self._evaluated.stepper(), self._rank, self._world)
        return self._translating

    def _average_buffers(self) -> None:
        """Replace every rank's buffers by their mean over the ranks. A second call before further updates changes nothing, not a bit."""
        if self._exchange is not None and not self._averaged and self._model.buffers:
            flat = torch.cat([buffer.flatten() for buffer in self._model.buffers])
            self._healthy = False
            self._ranks.add_up(flat)
            self._healthy = True
            flat /= self._world
            for buffer, mean in zip(self._model.buffers, flat.split([buffer.numel() for buffer in self._model.buffers]), strict=True):
                buffer.copy_(mean.view(buffer.shape))
        self._averaged = True

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Return logits; see `Session.predict`. Raises RuntimeError where there are several ranks."""
        if self._world > 1:
            raise RuntimeError(f"predict: needs a single worker, and this run has {self._world}")
        return self._evaluated.logits(self._splits[split], start, stop)

    def _tensors(self) -> list[torch.Tensor]:
        """Return what the state consists of, in the order of `each_value`."""
        slots = [tensor for slot in self._slots for tensor in self._rule.slots[slot]]
        return [*self._model.values, *slots, *self._model.buffers]

    def _state_memory(self) -> StateMemory | None:
        """Return the room for a copy of the state, taken once; on the first rank alone, which has all of it."""
        if self._memory is None and self._rank == 0:
            self._memory = StateMemory(self._spec, self._slots, pinned=self._device.type == "cuda")
        return self._memory

    def state(self) -> State:
        """Return a copy of the state; complete on the first rank, without values on the others."""
        self._average_buffers()
        memory = self._state_memory()
        if memory is None:
            return State({}, updates=self._rule.updates)
        memory.take(self._tensors())
        return memory.state(self._rule.updates, self._scalars())

    def _scalars(self) -> dict[str, float]:
        return {} if self._loss_scale is None else self._loss_scale.scalars

    def load(self, state: State | None) -> None:
        """Take over the first rank's state. Raises ValueError where it does not fit the model."""
        if self._rank == 0:
            if state is None:
                raise ValueError("load: the first rank was given no state")
            self._install(state)
        self._spread()
        self._averaged = True

    def _install(self, state: State) -> None:
        """Write a state into this rank's tensors."""
        for tensor, value in zip(self._tensors(), each_value(self._spec, self._slots, state), strict=True):
            tensor.zero_() if value is None else tensor.copy_(value)
        self._rule.updates = state.updates
        if self._loss_scale is not None:
            self._loss_scale.restore(state.scalars)

    def _spread(self) -> None:
        """Give the first rank's state to the others."""
        self._healthy = False
        for tensor in self._tensors():
            self._ranks.spread(tensor)
        scale = [0.0, 0.0] if self._loss_scale is None else list(self._loss_scale.scalars.values())
        numbers = torch.tensor([float(self._rule.updates), *scale], dtype=torch.float64, device=self._device)
        self._ranks.spread(numbers)
        updates, loss_scale, clean_steps = numbers.tolist()
        self._healthy = True
        self._rule.updates = int(updates)
        if self._loss_scale is not None:
            self._loss_scale.restore({"loss_scale": loss_scale, "clean_steps": clean_steps})

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Repeat a component of a step with the other ranks; see `Session.calibrate`. Buffers and slots change, parameters do not."""
        self._healthy = False
        found = self._tried(order) if order.component in TRIED else self._calibrated(order)
        self._healthy = True
        return [found]

    def _calibrated(self, order: CalibrationOrder) -> CalibrationResult:
        native = reducer_figures(self._distributed) if self._calibrator is None else {}
        if self._calibrator is None:
            exchange = None if self._exchange is None else self._exchange()
            self._calibrator = self._make_calibrator(OneRank(self._model, self._loss_scale, slices=exchange is not None), exchange)
        return CalibrationResult(self._rank, *self._calibrator.run(order), native)

    def _tried(self, order: CalibrationOrder) -> CalibrationResult:
        def make(ranks: DirectRanks) -> Calibrator:
            direct = DirectGradients(self._model, self._loss_scale, ranks)
            return self._make_calibrator(direct, direct.exchange_alone())

        if self._trial is None:
            self._trial = open_trial(self._task, self._ranks, self._device, self._job.node_timeout, make)
        return self._trial.run(order)

    def _make_calibrator(self, source: GradientSource, exchange: Exchange | None) -> Calibrator:
        """Return what repeats components of a step whose gradients come from a source."""
        batches = calibration_batches(self._sampler, self._rank)
        updater = Updater(self._job, self._rule, self._loss_scale, source)

        def compute(x: ColumnTensors, y: ColumnTensors, batch: Batches) -> None:
            scale, passes = self._source.factor / float(batch.weights[0]), self._model.passes
            if self._job.accumulate == 1:
                updater.update(x, y, scale, 0.0, passes.training(0, batch, 0))
                return
            micro_batches = micro_batches_of(self._model, x, y, batch, self._job.accumulate)
            updater.accumulate(micro_batches, 0, scale, 0.0)  # how many there are is of no importance without DDP

        return make_calibrator(self._splits["train"], batches, compute, exchange, self._device)

    def close(self) -> None:
        """Leave together with the other ranks (at once where this one failed); a second call does nothing."""
        if self._open:
            self._open = False
            if self._trial is not None:
                self._trial.close()
            self._ranks.leave(healthy=self._healthy)
