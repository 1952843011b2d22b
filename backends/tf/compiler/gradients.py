"""Gradients compiled by XLA: of batches of the sizes that almost all batches have, while others are computed op by op.

XLA compiles for one shape. A function that it has compiled holds no Python function and no collective: those end the process. So masks of
dropout, which may come from a Python function, are made before it and handed in, and what exchanges gradients comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import tensorflow as tf

from ....core.errors import UsageError
from ....core.job import Job
from ....models.layers.tf.image import HeldParameters
from ..data import ColumnTensors
from ..forward_context import Context, Dropout, dropped
from ..model import TfModel

__all__ = ["CompiledGradients", "compiled", "refusals_told"]

NOT_CONVERTED = "tf2xla conversion failed"
"""What TensorFlow says where XLA has no code for an op. With op determinism that is so of the gradient of a max pool, on a CPU too."""

Found = tuple[tf.Tensor, list[tf.Tensor], Mapping[str, tf.Tensor]]
"""Σ example losses, gradients, and new values of buffers by name."""


class CompiledGradients:
    """Computes what `TfModel.loss_and_gradients` returns of one micro-batch, for those of `sizes` examples by XLA."""

    def __init__(self, model: TfModel, sizes: Iterable[int]) -> None:
        self._model, self._sizes = model, sorted({size for size in sizes if size})
        self._functions: dict[int, Callable[..., Found]] = {}

    def __call__(
        self, parameters: HeldParameters, x: ColumnTensors, y: ColumnTensors, weight: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """In ops: return Σ example losses and the gradients of `weight` times that; `context` takes new values of buffers."""

        def op_by_op() -> Found:
            own: Context = _like(context, context.buffers)
            own.dropout = context.dropout
            return *self._model.loss_and_gradients(parameters, [(x, y)], weight, own), dict(own.updated)

        compute: Callable[[], Found] = op_by_op
        for size in self._sizes:
            compute = self._choosing(size, parameters, x, y, weight, context, compute)
        loss_sum, gradients, updated = compute()
        context.updated.update(updated)
        return loss_sum, list(gradients)

    def _choosing(
        self,
        size: int,
        parameters: HeldParameters,
        x: ColumnTensors,
        y: ColumnTensors,
        weight: tf.Tensor,
        context: Context,
        otherwise: Callable[[], Found],
    ) -> Callable[[], Found]:
        def by_xla() -> Found:
            shaped = tf.nest.map_structure(partial(_of_size, size), (x, y))
            masks = self._masks(parameters, shaped[0], context)
            if size not in self._functions:
                self._functions[size] = tf.function(self._function(context), jit_compile=True, autograph=False)
            return self._functions[size](dict(parameters.held), dict(context.buffers), *shaped, weight, masks)

        target = tf.nest.flatten(y)[0]
        if target.shape[0] is not None:  # known as it is traced
            return by_xla if target.shape[0] == size else otherwise
        return lambda: tf.cond(tf.equal(tf.shape(target)[0], size), by_xla, otherwise)

    def _function(self, outer: Context) -> Callable[..., Found]:
        """Make the function that XLA compiles: of tensors alone."""

        def compute(
            held: Mapping[str, tf.Tensor],
            buffers: Mapping[str, tf.Tensor],
            x: ColumnTensors,
            y: ColumnTensors,
            weight: tf.Tensor,
            masks: Sequence[tf.Tensor],
        ) -> Found:
            context, left = _like(outer, buffers), iter(masks)
            context.dropout = lambda x, rate, layer: dropped(x, next(left), rate)
            loss_sum, gradients = self._model.loss_and_gradients(self._model.parameters(held), [(x, y)], weight, context)
            return loss_sum, gradients, dict(context.updated)

        return compute

    def _masks(self, parameters: HeldParameters, x: ColumnTensors, outer: Context) -> list[tf.Tensor]:
        """Return the masks that a pass over such inputs draws, in their order."""
        dropout = outer.dropout
        if not isinstance(dropout, Dropout):
            return []
        drawn: list[tuple[tf.TensorShape, float, int]] = []

        def note(x: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
            drawn.append((x.shape, rate, layer))
            return x

        def forward(held: Mapping[str, tf.Tensor], buffers: Mapping[str, tf.Tensor], x: ColumnTensors) -> tf.Tensor:
            context = _like(outer, buffers)
            context.dropout = note
            return self._model.forward(self._model.parameters(held), x, context)

        given = (dict(parameters.held), dict(outer.buffers), x)
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), given)
        tf.function(forward, autograph=False).get_concrete_function(*specs)  # traced to see the shapes, and never run
        return [dropout.kept(shape, tf.constant(shape.as_list()), rate, layer) for shape, rate, layer in drawn]


def _of_size(size: int, tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor that is known to have so many examples, for tracing.

    Nothing checks it: TensorFlow's optimiser would take a check out of the branch that it is in.
    """
    found = tf.identity(tensor)
    found.set_shape([size, *tensor.shape[1:]])
    return found


def _like(context: Context, buffers: Mapping[str, tf.Tensor]) -> Context:
    """Return a context for a pass that trains on other tensors."""
    return Context(training=True, buffers=buffers, compute=context.compute, settings=context.settings)


@contextmanager
def refusals_told(job: Job) -> Iterator[None]:
    """Raise UsageError within the block where XLA has no code for what a model computes."""
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
    """Return the model with its gradients of micro-batches of these sizes compiled."""
    return model.computing_by(CompiledGradients(model, sizes))
