"""Components of a rank's step, repeated separately, for the calibration of a sync run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....data.sampler import Batches
from ...base import CalibrationOrder, StepComponent
from ...timing import repeat
from ..calibration import LIMITS, SMALL_ELEMENTS, State, Step, any_element, order_limits, ready_after, repeated
from ..data import Batch, Columns, Resident, Tensors, part_of
from .collectives import Collectives, Traced
from .steps import Replica

Gradients = Callable[[Columns, Columns, tf.Tensor, tf.Tensor | None, tf.Tensor], tuple[tf.Tensor, Tensors]]
Reduce = Callable[[Tensors], Tensors]


class Calibrator:
    """Execution of calibration orders on a sync rank.

    It uses the host's clock if deterministic or `compiled`; `make` makes state and step.
    """

    def __init__(
        self,
        traced: Callable[..., Traced],
        make: Callable[[StepComponent], tuple[State, Step]],
        *,
        deterministic: bool,
        compiled: Callable[..., Traced | None] | None = None,
    ) -> None:
        self._traced, self._make, self._deterministic, self._compiled = traced, make, deterministic, compiled
        self._functions: dict[StepComponent, Traced] = {}

    def run(self, order: CalibrationOrder) -> tuple[int, float]:
        """Return how often the component was repeated and the seconds that it took."""
        if order.component not in self._functions:
            self._functions[order.component] = self._made(order.component)
        function = self._functions[order.component]
        if self._is_by_count(order.component):
            function(tf.zeros([2], tf.float64))
            return repeat(order, lambda times: function(tf.constant([times, 0], tf.float64)).numpy())
        count, seconds = function(tf.constant(order_limits(order))).numpy().tolist()
        return int(count), seconds

    def _is_looped(self, component: StepComponent) -> bool:
        return self._compiled is not None and component in ("compute", "half")

    def _is_by_count(self, component: StepComponent) -> bool:
        return self._deterministic or self._is_looped(component)

    def _made(self, component: StepComponent) -> Traced:
        def run(limits: tf.Tensor) -> tf.Tensor:
            state, step = self._make(component)
            return repeated(step, state, limits, by_count=self._is_by_count(component))

        looped = self._compiled(run, LIMITS) if self._compiled is not None and self._is_looped(component) else None
        return looped or self._traced(run, LIMITS)


class RankComponents:
    """Components of a rank's step on the first of `batches`, and on those of its size.

    `scalars` are for a learning rate of 0.
    """

    def __init__(
        self,
        data: Resident,
        batches: Batches,
        gradients: Gradients,
        replica: Replica,
        ranks: Collectives,
        scalars: NDArray[np.float32],
        *,
        workers: int,
        dropout: bool,
    ) -> None:
        self._data, self._gradients, self._replica, self._ranks = data, gradients, replica, ranks
        self._scalars, self._workers, self._dropout = scalars, workers, dropout
        sizes = np.diff(batches.offsets)
        differing = np.flatnonzero(sizes != sizes[0])  # batches by tokens differ in size
        batches = batches.slice(0, int(differing[0]) if len(differing) else len(batches))
        examples = slice(int(batches.offsets[0]), int(batches.offsets[-1]))
        self._count = len(batches)
        self._weight = np.float32(1.0 / batches.weights[0])
        self._indices_kb = tf.constant(batches.indices[examples].reshape(self._count, -1))  # outside graphs, which would fold it
        self._changes_kb3 = None if batches.changes is None else tf.constant(batches.changes[examples].reshape(self._count, -1, 3))

    def make(self, component: StepComponent) -> tuple[State, Step]:
        """Return a component's first state and its step, in ops."""
        if component == "data":
            return ready_after([self._indices_kb]), self._gather
        if component in ("compute", "half"):
            size = self._indices_kb.shape[1]
            return self._computing(size // 2 if component == "half" else size)
        if component in ("communicate", "direct"):
            return self._all_reduced(self._replica.zeros()), self._exchange
        if component == "direct_step":
            return ready_after([self._indices_kb, *self._exchange_apart(None, self._small()[:1])]), self._whole
        return self._exchange_apart(None, self._small()), self._exchange_apart

    def _small(self) -> list[tf.Tensor]:
        messages = self._ranks.messages([4 * int(np.prod(zero.shape)) for zero in self._replica.zeros()])
        return [tf.zeros([SMALL_ELEMENTS * self._workers]) for _ in range(messages)]

    def _batch(self, position: tf.Tensor | int) -> Batch:
        changes = None if self._changes_kb3 is None else tf.gather(self._changes_kb3, position)
        return self._data.laid_batch(tf.gather(self._indices_kb, position), changes)

    def _gather(self, done: tf.Tensor, state: State) -> State:
        return [any_element(self._batch(tf.math.floormod(done, self._count)))]

    def _computing(self, size: int) -> tuple[State, Step]:
        batch, indices = part_of((self._batch(0), self._indices_kb[0]), 0, size)

        def compute(laid: Columns, target: Columns) -> tf.Tensor:
            return self._updated(laid, target, indices, lambda gradients: gradients)

        return ready_after([*tf.nest.flatten(batch), indices]), lambda done, state: [self._ranks.on_replica(compute, *batch)]

    def _whole(self, done: tf.Tensor, state: State) -> State:
        """Make a whole step as in training, after earlier ops.

        Loops with variables do not wait for an earlier exchange.
        """
        with tf.control_dependencies(state):
            position = tf.math.floormod(done, self._count)
        indices = tf.gather(self._indices_kb, position)

        def compute(laid: Columns, target: Columns) -> tf.Tensor:
            return self._updated(laid, target, indices, self._ranks.all_reduce)

        return [self._ranks.on_replica(compute, *self._batch(position))]

    def _updated(self, laid: Columns, target: Columns, indices: tf.Tensor, all_reduce: Reduce) -> tf.Tensor:
        number = tf.constant(0, tf.int64) if self._dropout else None
        loss_sum, gradients = self._gradients(laid, target, indices, number, tf.constant(self._weight))
        self._replica.apply(all_reduce(gradients), tf.unstack(tf.constant(self._scalars)))
        return tf.reshape(loss_sum + self._replica.any_element(), [1])

    def _exchange(self, _done: tf.Tensor, state: State) -> State:
        return self._all_reduced(state)

    def _exchange_apart(self, _done: tf.Tensor | None, state: State) -> State:
        return [self._all_reduced([tensor])[0] for tensor in state]

    def _all_reduced(self, tensors: State) -> State:
        summed: State = self._ranks.on_replica(lambda *local: tuple(self._ranks.all_reduce(local)), *tensors)
        return list(summed)
