"""Asynchronous training by ParameterServerStrategy.

Its coordinator repeats a lost worker's ticket from its beginning.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from ....core.cluster import Task, split_evenly
from ....core.errors import RunFailedError
from ....core.job import Job
from ....core.liveness import startup_phase
from ....core.update_rules import decayed_spans
from ....data.base import Dataset, Split
from ....models.base import Array, ModelSpec, ParameterSpec
from ....models.layers.tf import HeldParameters
from ...base import (  # fmt: skip
    CalibrationOrder,
    CalibrationResult,
    EvalResult,
    Plan,
    State,
    StepComponent,
    StepResult,
    calibration_batches,
    make_sampler,
)
from ...compiling import TIMED_SECONDS, compiled_sizes, settle, should_time, timed
from ...decoding_functions import Translating
from ...vectors import ChiefLossScale, StateMemory
from ...vectors import cut as cut_flat
from ..calibration import LIMITS, StepProfiler, order_limits
from ..compiler import compiled, xla_errors
from ..data import layout_for, with_mapped_files
from ..model import Buffers, ForwardContexts, TfModel, build_model
from ..optimizers import Optimizer, build_optimizer
from ..runtime import call_within, checked_values, set_tf_config, translated_errors
from .calibration import WorkerComponents
from .result_queue import ResultQueue
from .shards import make_mask, make_shard
from .tickets import SPAN, Ticket, cut, pack, read_outcome
from .worker import WorkerFunctions, element_spec, local_dataset

Traced: TypeAlias = tf.types.experimental.ConcreteFunction
STEPS_PER_TICKET = 100  # handing one out costs about two updates of a small model
TICKETS_PER_WORKER = 4  # minimum in a plan, so that workers share it by their speed
OUTSTANDING_PER_WORKER = 3  # one in progress, two so that an early worker never waits for the chief
WARM_SPLIT: Split = "test"  # evaluated in runs; a few of its examples during warm-up
MAX_ROUNDS = 20  # tries to have all workers calibrate together; the first succeeds if workers are idle
EVALUATIONS_PER_WORKER = 2


def open_chief(task: Task, job: Job, spec: ModelSpec, data: Dataset) -> AsyncSession:
    """Connect to all servers, create parameters and datasets, and warm up every worker."""
    chooses = should_time(job, spec, data)
    set_tf_config(task)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with translated_errors(task):
        strategy = call_within(job.start_timeout, "forming the cluster", lambda: tf.distribute.ParameterServerStrategy(resolver))
    session = AsyncSession(job, spec, data, strategy)
    startup_phase("warming up")
    session.compile(on=session.compile_is_faster() if chooses else job.compile == "on")
    with xla_errors(job):
        session.warm_up(job.start_timeout)
    return session


class AsyncSession:
    """The chief; implements `Session` and `ReplacesWorkers`. It computes nothing itself."""

    on_stalled_worker: Callable[[int], None] | None = None  # unused, as TensorFlow hides which worker has what

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, strategy: tf.distribute.ParameterServerStrategy) -> None:
        self._job, self._spec, self._sizes = job, spec, dict(data.info.sizes)
        self.precision_used = job.precision
        self._sampler = make_sampler(job, data, spec.objective.weight)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        optimizer, self._model, self._passes = build_optimizer(job), build_model(job.model, spec), ForwardContexts(job, spec, 0)
        self._slots = optimizer.slots
        bounds = split_evenly(spec.size + spec.buffers_size, job.ps)
        self._loss_scale = ChiefLossScale() if job.precision == "fp16" else None
        skipping, marking = self._loss_scale is not None, job.max_restarts > 0
        self._shards = [
            make_shard(index, *bound, spec.size, rule, skipping=skipping, marking=marking)
            for index, (bound, rule) in enumerate(zip(bounds, self._rules_of_shards(optimizer, bounds), strict=True))
        ]
        layout = self._layout = with_mapped_files(layout_for(job, spec, data.info), data)
        make_dataset = tf.autograph.experimental.do_not_convert(lambda: local_dataset(layout))
        self._datasets = iter(self._coordinator.create_per_worker_dataset(make_dataset))
        self._evaluations: dict[Split, Traced] = {}
        self._op_by_op = self._model
        self._component_functions: dict[StepComponent, Traced] = {}
        self._memory: StateMemory | None = None
        self._data = data
        self._decoded: dict[str, tf.Variable] = {}
        self._translating: Translating | None = None
        self._window = OUTSTANDING_PER_WORKER * job.workers
        self._tickets: ResultQueue[Ticket] = ResultQueue(self._window)
        self._outstanding: set[int] = set()
        self._tracer = StepProfiler(job.profile, here=True)
        self.scheduled = 0
        self._begin()

    def _rules_of_shards(self, optimizer: Optimizer, bounds: Sequence[tuple[int, int]]) -> list[Optimizer]:
        if self._job.weight_decay_except is None:
            return [optimizer] * len(bounds)
        size = self._spec.size
        spans = decayed_spans(self._job, {parameter.name: parameter.size for parameter in self._spec.parameters})
        trained = [(min(start, size), min(stop, size)) for start, stop in bounds]
        return [build_optimizer(self._job, make_mask(index, *bound, spans)) for index, bound in enumerate(trained)]

    def compile(self, *, on: bool) -> None:
        """Have workers compute gradients by XLA, or op by op."""
        self._model = self._compiled_model() if on else self._op_by_op
        functions = WorkerFunctions(self._job, self._model, self._passes, self._shards, self._layout)
        self._train = self._traced(functions.training(), tf.TensorSpec([None], tf.int32))
        self._component_functions.clear()

    def _compiled_model(self) -> TfModel:
        size = int(self._sampler.whole(0, 0, 1).offsets[-1])
        return compiled(self._op_by_op, compiled_sizes(size, self._job.accumulate))

    def compile_is_faster(self) -> bool:
        """Return whether compiled gradients are faster on all workers together; leaves no trace."""
        function = self._component_function("compute", self._compiled_model())

        def time_compiled_step() -> float:
            self._component_functions["compute"] = function
            return self._measure_step()

        timing = timed(self._measure_step, partial(self._on_each_worker, function, CalibrationOrder("compute", 1)), time_compiled_step)
        return settle(timing, 1)

    def _measure_step(self) -> float:
        self.calibrate(CalibrationOrder("compute", 1))
        results = self.calibrate(CalibrationOrder("compute", 1, TIMED_SECONDS))
        return sum(result.seconds / result.count for result in results) / len(results)

    def _begin(self) -> None:
        self.load(State(self._spec.initial(self._job.seed), buffers=self._spec.initial_buffers(self._job.seed)))

    def warm_up(self, seconds: float) -> None:
        """Have every worker run every function, then restore the initial state."""
        deadline = time.monotonic() + seconds
        steps = itertools.count()
        seen: set[int | None] = set()
        while len(seen) < self._job.workers:
            if time.monotonic() > deadline:
                raise RunFailedError(f"start_timeout: only workers {sorted(map(str, seen))} of {self._job.workers} became ready")
            for _ in range(self._job.workers):
                self._schedule(Plan(next(steps), 1, 0, 0, np.zeros(1)), 0, 1)
            seen.update(result.worker for result in self.drain())
        few = (0, min(self._job.micro_batch, self._sizes[WARM_SPLIT]))
        self._sums_of(WARM_SPLIT, [few] * (EVALUATIONS_PER_WORKER * self._job.workers))
        if self._spec.objective.translation is not None:
            self.translating().warm_up()
        self._begin()
        self.scheduled = 0
        if self._job.saved_every is not None:
            self.state()

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Hand out the plan until its last ticket is queued.

        Yield finished tickets of this and earlier plans.
        """
        self._tracer.begin()
        tickets = TICKETS_PER_WORKER * self._job.workers
        for begin, count in cut(plan, min(self._job.steps_per_call or STEPS_PER_TICKET, SPAN), tickets):
            stop = plan.first_step + begin + count
            while self._tickets.outstanding >= self._window or (self._outstanding and stop - min(self._outstanding) > SPAN):
                yield self._finished()
            self._schedule(plan, begin, count)

    def drain(self) -> Iterator[StepResult]:
        """Wait for all outstanding tickets and yield them."""
        while self._tickets.outstanding:
            yield self._finished()

    def _finished(self) -> StepResult:
        ticket, outcome = self._tickets.next()
        self._outstanding.discard(ticket.first_step)
        result, loss_scale = read_outcome(ticket, outcome)
        if self._loss_scale is not None:
            self._loss_scale.learn(ticket.loss_scale, loss_scale, ticket.count)
        if self._tracer.left:
            self._tracer.done(result.count)
            return replace(result, profiled=True)
        return result

    def evaluate(self, split: Split) -> EvalResult:
        """Have the workers evaluate pieces of the split, and sum; the number of examples is checked."""
        self._require_quiescence("evaluate")
        started = time.perf_counter()
        pieces = split_evenly(self._sizes[split], EVALUATIONS_PER_WORKER * self._job.workers)
        sums = self._sums_of(split, pieces)
        seconds = time.perf_counter() - started
        return EvalResult.of(self._spec.objective, split, self._sizes[split], sums.tolist(), seconds, self._updates_applied())

    def _sums_of(self, split: Split, pieces: Sequence[tuple[int, int]]) -> Array:
        """Have the workers evaluate pieces, the examples start … stop − 1 each; return the sum."""
        results = self._results_of(self._evaluation(split), [(tf.constant(piece, tf.int32),) for piece in pieces])
        total: Array = np.sum(list(results), axis=0)
        return total

    def translating(self) -> Translating:
        """Return a translator with a copy of the parameters on the chief's CPU.

        Workers run only graphs, and a search is none.
        """
        state = self.state().to_evaluate()
        for name, value in {**state.parameters, **state.buffers}.items():
            held = self._model.to_storage(name, value)
            if name in self._decoded:
                self._decoded[name].assign(held)
            else:
                with tf.device("CPU:0"):
                    self._decoded[name] = tf.Variable(held, name=name, trainable=False)
        if self._translating is None:
            stepper = self._model.stepper(self._decoded_values, self._passes.evaluation, "CPU:0")
            self._translating = Translating(self._data, self._spec.objective, stepper, 0, 1)
        return self._translating

    def _decoded_values(self) -> tuple[HeldParameters, Buffers]:
        read = {name: tf.convert_to_tensor(variable) for name, variable in self._decoded.items()}
        held = {parameter.name: read[parameter.name] for parameter in self._spec.parameters}
        return self._model.parameters(held), {buffer.name: read[buffer.name] for buffer in self._spec.buffers}

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Raise RuntimeError: only a single sync worker predicts; see `Session.predict`."""
        raise RuntimeError("predict: needs a single worker in mode sync, and this run is async")

    def state(self) -> State:
        """Return a copy of the state from the parameter servers."""
        self._require_quiescence("state")
        if self._memory is None:
            self._memory = StateMemory(self._spec, self._slots)
        memory = self._memory
        for shard in self._shards:
            shard.copy_to(memory.vectors[0], dict(zip(self._slots, memory.vectors[1:], strict=True)), memory.buffers)
        for vector in memory.vectors:
            for name, value in cut_flat(vector, self._spec.parameters).items():
                if name in self._model.layouts:
                    self._model.layouts[name].make_canonical(value)
        return memory.state(self._updates_applied(), None if self._loss_scale is None else self._loss_scale.scalars)

    def load(self, state: State | None) -> None:
        """Replace the state on the parameter servers.

        Raises ValueError if it does not fit the model or optimiser.
        """
        if state is None:
            raise RuntimeError("the chief is the only leading task, so it has to be given the state")
        self._require_quiescence("load")
        checked_values(self._spec, self._slots, state)
        values = self._flat([*self._spec.parameters, *self._spec.buffers], {**state.parameters, **state.buffers})
        slots = {slot: self._flat(self._spec.parameters, of) for slot, of in state.slots.items()}
        for shard in self._shards:
            shard.load(values, slots, state.updates)
        if self._loss_scale is not None:
            self._loss_scale.restore(state.scalars)

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Have every worker repeat a component at a learning rate of 0.

        Raises RunFailedError if one never gets the order.
        """
        self._require_quiescence("calibrate")
        if order.component not in self._component_functions:
            self._component_functions[order.component] = self._component_function(order.component, self._model)
        for _ in range(MAX_ROUNDS):
            answers = self._on_each_worker(self._component_functions[order.component], order)
            by_worker = {worker: CalibrationResult(int(worker), int(count), seconds) for worker, count, seconds in answers}
            complete = len(by_worker) == self._job.workers
            if complete or not order.count:  # a count of 0 only prepares, which a restarting worker does later
                return list(by_worker.values())
        raise RunFailedError(
            f"in {MAX_ROUNDS} rounds the {self._job.workers} workers never had a part of a step to repeat at the same time"
        )

    def _component_function(self, component: StepComponent, model: TfModel) -> Traced:
        components = WorkerComponents(self._job, model, self._passes, self._shards, self._layout)
        return self._traced(components.function(component), tf.TensorSpec([None], tf.int32), LIMITS)

    def _on_each_worker(self, function: Traced, order: CalibrationOrder) -> list[tuple[float, ...]]:
        """Give an order to as many workers as there are, or to some of them repeatedly.

        Return the answers.
        """
        batches = calibration_batches(self._sampler)
        arguments = tf.constant(pack(batches, np.zeros(len(batches)), 0)), tf.constant(order_limits(order))
        return [tuple(answer.tolist()) for answer in self._results_of(function, [arguments] * self._job.workers)]

    def _results_of(self, function: Traced, calls: Sequence[tuple[tf.Tensor, ...]]) -> Iterator[Array]:
        """Have workers call a function of their dataset and further arguments.

        Yield results as they are ready.
        """
        results: ResultQueue[None] = ResultQueue(self._job.workers)
        for arguments in calls:
            results.put(None, self._coordinator.schedule(function, args=(self._datasets, *arguments)))
        while results.outstanding:
            yield results.next()[1]

    def close(self) -> None:
        """Do nothing: servers end with their processes.

        TensorFlow's coordinator would wait forever for a dead worker.
        """

    def _evaluation(self, split: Split) -> Traced:
        if split not in self._evaluations:
            functions = WorkerFunctions(self._job, self._model, self._passes, self._shards, self._layout)
            self._evaluations[split] = self._traced(functions.evaluation(split), tf.TensorSpec([2], tf.int32))
        return self._evaluations[split]

    def _traced(self, function: Callable[..., tf.Tensor], *signature: tf.TensorSpec) -> Traced:
        iterator = tf.data.IteratorSpec(element_spec(self._layout))
        return tf.function(function, input_signature=[iterator, *signature], autograph=False).get_concrete_function()

    def _schedule(self, plan: Plan, begin: int, count: int) -> None:
        batches = self._sampler.whole(plan.epoch, plan.first_in_epoch + begin, count, plan.skip, plan.arranged)
        loss_scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        vector = pack(batches, plan.learning_rates[begin : begin + count], plan.first_step + begin, loss_scale)
        remote = self._coordinator.schedule(self._train, args=(self._datasets, tf.constant(vector)))
        self._tickets.put(Ticket(plan.first_step + begin, count, len(batches.indices), loss_scale), remote)
        self._outstanding.add(plan.first_step + begin)
        self.scheduled += count

    def _updates_applied(self) -> int:
        return int(self._shards[0].version.numpy())

    def _require_quiescence(self, what: str) -> None:
        if self._tickets.outstanding:
            raise RuntimeError(f"{what} was called with {self._tickets.outstanding} tickets outstanding; drain first")

    def _flat(self, specs: Sequence[ParameterSpec], values: Mapping[str, Array]) -> Array:
        return np.concatenate([self._model.to_storage(spec.name, values[spec.name]).ravel() for spec in specs])
