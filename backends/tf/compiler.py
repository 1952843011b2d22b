"""Gradients compiled by XLA for most batch sizes.

They contain no Python functions and collectives, which would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.job import Job
from ...data.sampler import Batches
from ...models.base import Array
from ...models.layers.tf import HeldParameters
from .data import Columns, Tensors
from .model import Context, Dropout, TfModel, dropped

NOT_CONVERTED = "tf2xla conversion failed"  # no XLA code: with op determinism e.g. a max pool's gradient
Found = tuple[tf.Tensor, list[tf.Tensor], Mapping[str, tf.Tensor]]  # Σ losses, gradients, new buffers


class CompiledGradients:
    """`TfModel.loss_and_gradients` of one micro-batch, by XLA for those of `sizes` examples."""

    def __init__(self, model: TfModel, sizes: Iterable[int]) -> None:
        self._model, self._sizes = model, sorted({size for size in sizes if size})
        self._functions: dict[int, Callable[..., Found]] = {}

    def __call__(
        self, parameters: HeldParameters, x: Columns, y: Columns, weight: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return Σ example losses and the gradients of `weight` times that, in ops.

        New buffers are in `context`.
        """

        def op_by_op() -> Found:
            separate: Context = _like(context, context.buffers)
            separate.dropout = context.dropout
            return *self._model.loss_and_gradients(parameters, [(x, y)], weight, separate), dict(separate.updated)

        def by_xla(size: int) -> Found:
            shaped = tf.nest.map_structure(partial(_of_size, size), (x, y))
            masks = self._masks(parameters, shaped[0], context)
            if size not in self._functions:
                self._functions[size] = tf.function(self._function(context), jit_compile=True, autograph=False)
            return self._functions[size](dict(parameters.held), dict(context.buffers), *shaped, weight, masks)

        target = tf.nest.flatten(y)[0]

        def choosing(size: int, otherwise: Callable[[], Found]) -> Callable[[], Found]:
            if target.shape[0] is not None:  # known as it is traced
                return (lambda: by_xla(size)) if target.shape[0] == size else otherwise
            return lambda: tf.cond(tf.equal(tf.shape(target)[0], size), lambda: by_xla(size), otherwise)

        compute: Callable[[], Found] = op_by_op
        for size in self._sizes:
            compute = choosing(size, compute)
        loss_sum, gradients, updated = compute()
        context.updated.update(updated)
        return loss_sum, list(gradients)

    def _function(self, outer: Context) -> Callable[..., Found]:
        def compute(
            held: Mapping[str, tf.Tensor],
            buffers: Mapping[str, tf.Tensor],
            x: Columns,
            y: Columns,
            weight: tf.Tensor,
            masks: Tensors,
        ) -> Found:
            context, left = _like(outer, buffers), iter(masks)
            context.dropout = lambda x, rate, layer: dropped(x, next(left), rate)
            loss_sum, gradients = self._model.loss_and_gradients(self._model.parameters(held), [(x, y)], weight, context)
            return loss_sum, gradients, dict(context.updated)

        return compute

    def _masks(self, parameters: HeldParameters, x: Columns, outer: Context) -> list[tf.Tensor]:
        dropout = outer.dropout
        if not isinstance(dropout, Dropout):
            return []
        drawn: list[tuple[tf.TensorShape, float, int]] = []

        def note(x: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
            drawn.append((x.shape, rate, layer))
            return x

        def forward(held: Mapping[str, tf.Tensor], buffers: Mapping[str, tf.Tensor], x: Columns) -> tf.Tensor:
            context = _like(outer, buffers)
            context.dropout = note
            return self._model.forward(self._model.parameters(held), x, context)

        arguments = (dict(parameters.held), dict(outer.buffers), x)
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), arguments)
        tf.function(forward, autograph=False).get_concrete_function(*specs)  # traced to see the shapes, and never run
        return [dropout.kept(shape, tf.constant(shape.as_list()), rate, layer) for shape, rate, layer in drawn]


def _of_size(size: int, tensor: tf.Tensor) -> tf.Tensor:
    """Set a tensor's number of examples for tracing.

    It is unchecked: TensorFlow's optimiser would move a check out of its branch.
    """
    sized = tf.identity(tensor)
    sized.set_shape([size, *tensor.shape[1:]])
    return sized


def _like(context: Context, buffers: Mapping[str, tf.Tensor]) -> Context:
    return Context(training=True, buffers=buffers, compute=context.compute, settings=context.settings)


@contextmanager
def xla_errors(job: Job) -> Iterator[None]:
    """Raise UsageError within the block if XLA has no code for a model."""
    try:
        yield
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError) as error:
        if job.compile == "off" or NOT_CONVERTED not in str(error):
            raise
        lines = (line.strip() for line in str(error).splitlines())
        why = next(line for line in lines if line and not line.startswith(("Graph execution error", "Detected at", "<stack")))
        raise UsageError(
            f"compile: got {job.compile!r}, but XLA cannot compile model {job.model!r} here: {why} Allowed for it: off, auto (which does "
            "not compile it)."
        ) from error


def compiled(model: TfModel, sizes: Iterable[int]) -> TfModel:
    """Return the model with gradients compiled for micro-batches of these sizes."""
    return replace(model, computing=CompiledGradients(model, sizes))


MAX_INDICES = 1 << 22  # of all batches of a call: 16 MiB
Traced = Callable[..., tf.Tensor]
Step = Callable[..., tf.Tensor]  # (indices int32 [size], scalars) -> Σ losses, in ops


class CompiledLoop:
    """Compiled loop of steps on batches of `size`.

    Calls always have one `capacity` and end early, as XLA compiles for one shape.
    """

    def __init__(self, function: Traced, size: int, capacity: int) -> None:
        self._function, self._size, self._capacity = function, size, capacity

    @classmethod
    def from_step(cls, step: Step, compiled: Callable[..., Traced | None], size: int, scalars: int, most_steps: int) -> CompiledLoop | None:
        """Return a loop of steps with so many scalars each, None if `compiled` cannot compile it."""
        if not size:
            return None
        capacity = max(1, min(most_steps, MAX_INDICES // size))
        indices, rows, count = tf.TensorSpec([capacity, size], tf.int32), tf.TensorSpec([capacity, scalars]), tf.TensorSpec([], tf.int32)
        function = compiled(partial(_steps, step, capacity), indices, tf.TensorSpec([capacity]), rows, count)
        return None if function is None else cls(function, size, capacity)

    def parts(self, batches: Batches) -> Iterator[tuple[int, int, bool]]:
        """Cut consecutive batches into parts: first number, count, and whether this loop takes them."""
        first = 0
        for fits, sizes in groupby((np.diff(batches.offsets) == self._size).tolist()):
            stop = first + len(list(sizes))
            while first < stop:
                count = min(self._capacity, stop - first) if fits else stop - first
                yield first, count, fits
                first += count

    def __call__(self, batches: Batches, scalars_ks: Array) -> Array:
        """Make a part's steps and return their losses, float32 [k].

        Row i of `scalars_ks` is for step i.
        """
        count = len(batches)
        indices_kb = batches.indices[batches.offsets[0] : batches.offsets[-1]].reshape(count, self._size)
        arguments = (self._filled(array) for array in (indices_kb, batches.weights.astype(np.float32), scalars_ks))
        losses: Array = self._function(*arguments, tf.constant(count)).numpy()
        return losses[:count]

    def _filled(self, rows: Array | NDArray[np.int32]) -> tf.Tensor:
        filled = np.ones((self._capacity, *rows.shape[1:]), rows.dtype)
        filled[: len(rows)] = rows
        return tf.constant(filled)


def _steps(step: Step, capacity: int, indices_kb: tf.Tensor, weights_k: tf.Tensor, scalars_ks: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    def body(number: tf.Tensor, loss_sums: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        loss_sum = step(tf.gather(indices_kb, number), *tf.unstack(tf.gather(scalars_ks, number)))
        return number + 1, loss_sums.write(number, loss_sum)

    loss_sums = tf.TensorArray(tf.float32, size=capacity, element_shape=[])
    _, loss_sums = tf.while_loop(lambda number, _: number < count, body, (tf.constant(0), loss_sums))
    return loss_sums.stack() / weights_k
