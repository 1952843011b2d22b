"""Layers one by one on TensorFlow; see `backends.replay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...core.job import Job
from ...data.base import IMAGE, Dataset
from ...data.sampler import Batches
from ...models.base import Array, ForwardContext, ModelSpec
from ..vectors import columns_by_name, only_or_named
from .data import layout_for, resident
from .model import ForwardContexts, build_model


class TfPass:
    """TensorFlow's `ReplayedPass`."""

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(job.threads or 1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self.images_last = spec.inputs == (IMAGE,)
        self._spec, self._model = spec, build_model(job.model, spec, deterministic=job.deterministic)
        self._data = resident(data, "train", layout_for(job, spec, data.info))
        self._passes = ForwardContexts(job, spec, 0)
        self._held = {
            parameter.name: tf.constant(self._model.to_storage(parameter.name, parameters[parameter.name])) for parameter in spec.parameters
        }
        self._buffers = {name: tf.constant(value) for name, value in buffers.items()}

    def _batch(self, batches: Batches) -> tuple[Any, Any]:
        changes = None if batches.changes is None else tf.constant(batches.changes)
        return self._data.batch(tf.constant(batches.batch(0)), changes)

    def columns(self, batches: Batches) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return inputs and target; see `ReplayedPass`."""
        x, y = self._batch(batches)
        return columns_by_name(self._spec.inputs, x, self.array), columns_by_name((self._spec.target,), y, self.array)

    def forward(self, batches: Batches, context_layers: Callable[[Any], Any], step: int) -> ForwardContext[Any]:
        """Carry the forward function out; see `ReplayedPass`."""
        context = self._passes.training(self._buffers, tf.constant(step, tf.int64), tf.constant(batches.batch(0)))
        context.layers = context_layers
        self._model.forward(self._model.parameters(self._held), self._batch(batches)[0], context)
        return context

    def tensor(self, array: Array) -> tf.Tensor:
        """Return an array as a tensor."""
        return tf.constant(array)

    def array(self, tensor: Any) -> Array:
        """Return a tensor as an array, of low formats as float32."""
        tensor = tf.convert_to_tensor(tensor)
        return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype in (tf.bfloat16, tf.float16) else tensor)

    def like(self, tensor: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        """Return a tensor in the number format of another."""
        return tf.cast(tensor, result.dtype)

    def derived(
        self,
        compute: Callable[[Sequence[tf.Tensor]], Any],
        inputs: Sequence[tf.Tensor],
        parameters: Sequence[str],
        slopes: Sequence[tf.Tensor],
    ) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor], Mapping[str, Array]]:
        """Return results and derivatives; see `ReplayedPass`."""
        weights = [self._held[name] for name in parameters]
        with tf.GradientTape() as tape:
            tape.watch([*inputs, *weights])
            result = compute(list(inputs))
        outputs = result if isinstance(result, tuple) else (result,)
        if not slopes or not (inputs or weights):
            return outputs, [], {}
        wanted = [tf.cast(slope, output.dtype) for slope, output in zip(slopes, outputs, strict=True)]
        gradients = tape.gradient(outputs, [*inputs, *weights], output_gradients=wanted, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        by_parameters: dict[str, Array] = {}
        for name, gradient in zip(parameters, gradients[len(inputs) :], strict=True):
            value, layout = self.array(gradient), self._model.layouts.get(name)
            shape = next(parameter.shape for parameter in self._spec.parameters if parameter.name == name)
            by_parameters[name] = value if layout is None else layout.as_canonical(np.ascontiguousarray(value)).reshape(shape)
        return outputs, gradients[: len(inputs)], by_parameters

    def nodes(self, batches: Batches, step: int, tape_arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the nodes of an imported model's graph; see `ReplayedPass`."""
        from ...models.imported.tf.nodes import replayed_nodes

        x, _ = self._batch(batches)
        inputs = [x[name] for name in self._spec.settings.inputs] if isinstance(x, dict) else [x]
        context = self._passes.training(self._buffers, tf.constant(step, tf.int64), tf.constant(batches.batch(0)))
        return replayed_nodes(self._spec.settings, self._model.parameters(self._held), inputs, context, dict(tape_arrays))

    def loss(self, logits: tf.Tensor, target: Mapping[str, Array]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the sum of losses and its slope."""
        y = only_or_named(
            {name: self.tensor(value.astype(np.int32) if value.dtype.kind in "iu" else value) for name, value in target.items()}
        )
        if self._model.own_losses is None:
            losses_b, slopes_bk = self._model.cross_entropy(logits, y)
            return tf.reduce_sum(losses_b), slopes_bk
        context = self._passes.evaluation(self._buffers)
        with tf.GradientTape() as tape:
            tape.watch(logits)
            total = tf.reduce_sum(self._model.own_losses(logits, y, context))
        return total, tape.gradient(total, logits)
