"""Collectives in a traced function, of a single rank or through MultiWorkerMirroredStrategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ....core.cluster import Task
from ....core.job import Job
from ....models.base import Array
from ...base import set_nccl_interface
from ..data import Tensors
from ..runtime import call_within, fits_single_threaded_executor, set_tf_config, single_threaded_executor, translated_errors
from .rendezvous import meet

PACK_BYTES = 25 << 20  # one pack for a small model, several that overlap for a large one
Traced = Callable[..., tf.Tensor]


class Collectives:
    """Collectives of all ranks of a job, as one of them sees them.

    This class is a single rank without a strategy, others are derived from it. `sequential` executor: only for small ops; it does not
    rewrite ops for oneDNN, so a small CNN's step takes fifteen times as long.
    """

    def __init__(self, device: str, *, sequential: bool) -> None:
        self._device, self._sequential = device, sequential

    def traced(self, function: Traced, *signature: tf.TensorSpec) -> Traced:
        """Return `function` as a graph, called with tensors of the signature.

        A GPU always needs ops in parallel to the host's.
        """
        trace = partial(tf.function, self._placed(function), input_signature=signature, autograph=False)
        graph: Traced = _sequential(trace) if self._has_small_ops else trace()
        return graph

    def compiled(self, function: Traced, *signature: tf.TensorSpec) -> Traced | None:
        """Return a loop of steps compiled by XLA as a whole, None unless ops are small.

        Between large ones the loop costs nothing. On a GPU it has not been tried.
        """
        if not self._has_small_ops:
            return None
        graph: Traced = tf.function(self._placed(function), input_signature=signature, autograph=False, jit_compile=True)
        return graph

    @property
    def _has_small_ops(self) -> bool:
        return self._sequential and not self._device.startswith("GPU")

    def _placed(self, function: Traced) -> Traced:
        def placed(*arguments: tf.Tensor) -> tf.Tensor:
            with tf.device(self._device):
                return function(*arguments)

        return placed

    def on_replica(self, function: Traced, *arguments: tf.Tensor) -> tf.Tensor:
        """In a traced function, also in a loop: call `function` where it may use `all_reduce`."""
        return function(*arguments)

    def all_reduce(self, tensors: Tensors) -> Tensors:
        """In `on_replica`: return each tensor's sum over all ranks."""
        return tensors

    def sum_in_order(self, vector: tf.Tensor) -> tf.Tensor:
        """Return a vector's sum in rank order, in `on_replica`.

        No element depends on the number of others.
        """
        return vector

    def messages(self, sizes_bytes: Sequence[int]) -> int:
        """Return the number of messages for gradients of these sizes."""
        return 0

    def broadcast(self, array: Array | None, shape: tuple[int, ...]) -> Array:
        """Broadcast rank 0's float32 array; others give None. Called on all ranks."""
        if array is None:
            raise RuntimeError("the first leading task was given no state")
        return array

    def leave(self) -> None:
        """Wait until every rank is done."""


def _sequential(trace: Callable[[], Any]) -> Traced:
    """Return a function on the sequential executor if possible, else traced again.

    Loops are other ops on that executor.
    """
    chosen: list[Traced] = []

    def run_sequentially(function: Traced, *arguments: tf.Tensor) -> tf.Tensor:
        with single_threaded_executor():
            return function(*arguments)

    def run(*arguments: tf.Tensor) -> tf.Tensor:
        if not chosen:
            function = trace()
            fits = fits_single_threaded_executor(function.get_concrete_function().graph)
            chosen.append(partial(run_sequentially, trace()) if fits else function)
        return chosen[0](*arguments)

    return run


class NativeCollectives(Collectives):
    """Collectives of MultiWorkerMirroredStrategy."""

    def __init__(self, task: Task, job: Job, device: str) -> None:
        """Connect the rank.

        Raises RunFailedError after `job.start_timeout`, OSError(EADDRINUSE) if the port was taken.
        """
        super().__init__(device, sequential=False)
        set_tf_config(task)
        if device.startswith("GPU"):
            set_nccl_interface(task.address)
        # No timeout_seconds: each collective would keep a thread until then, and some thousand steps exhaust them.
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=PACK_BYTES)
        meet(task, job.start_timeout)

        def connect() -> Any:
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

        with translated_errors(task):
            self._strategy: tf.distribute.Strategy = call_within(job.start_timeout, "forming the cluster", connect)
        self._rank = task.rank
        self._sum = self.traced(
            lambda vector: self.on_replica(lambda v: self.all_reduce([v])[0], vector), tf.TensorSpec([None], tf.float32)
        )

    def traced(self, function: Traced, *signature: tf.TensorSpec) -> Traced:
        """Trace for TensorFlow's parallel executor, which collectives need."""
        graph: Traced = tf.function(function, input_signature=signature, autograph=False)
        return graph

    def compiled(self, function: Traced, *signature: tf.TensorSpec) -> Traced | None:
        """Return None: collectives in a function compiled by XLA end the process."""
        return None

    def on_replica(self, function: Traced, *arguments: tf.Tensor) -> tf.Tensor:
        """Run the function on this rank's replica."""
        return self._strategy.run(function, args=arguments)

    def all_reduce(self, tensors: Tensors) -> Tensors:
        """All-reduce the tensors; those of one type travel together, in packs."""
        placed = [tensor if tensor.device else tf.identity(tensor) for tensor in tensors]  # the strategy needs their devices
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed))

    def sum_in_order(self, vector: tf.Tensor) -> tf.Tensor:
        """All-reduce a matrix with a row per rank, then sum the rows.

        A reduced vector's order would depend on the place.
        """
        ranks = self._strategy.num_replicas_in_sync
        rows = tf.pad(vector[None], [[self._rank, ranks - 1 - self._rank], [0, 0]])
        first, *rest = tf.unstack(self.all_reduce([rows])[0], ranks)
        for row in rest:
            first += row
        return first

    def messages(self, sizes_bytes: Sequence[int]) -> int:
        """Return the number of packs for gradients of these sizes."""
        return max(1, math.ceil(sum(sizes_bytes) / PACK_BYTES))

    def broadcast(self, array: Array | None, shape: tuple[int, ...]) -> Array:
        """Add rank 0's array to the others' −0, which changes no number, not even a −0."""
        summand = np.full(shape, -0.0, np.float32) if array is None else array
        return np.asarray(self._sum(tf.constant(summand.ravel())).numpy().reshape(shape))

    def leave(self) -> None:
        """Pass two barriers: a rank may leave the first before another has read its last message.

        The second may fail.
        """
        self._sum(tf.zeros([1])).numpy()
        try:
            self._sum(tf.zeros([1])).numpy()
        except tf.errors.OpError as error:
            tf.get_logger().info("A peer left between the two closing barriers: %s", error)
