"""A model on TensorFlow: its forward function, its loss and the gradient of that loss, written once for every mode.

Shapes: x_bchw [batch, channels, height, width]; y_b [batch] int32; logits_bk [batch, classes].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from ...core import plugins
from ...core.errors import UsageError
from ...core.job import Job
from ...data.base import IMAGE
from ...data.columns import LENGTHS, TOKENS
from ...models.base import ModelSpec
from ...models.layers.storage_layouts import StorageLayout
from ...models.layers.tf.image import HeldParameters
from ...models.objectives import COUNTED, CROSS_ENTROPY, LOSS_SUM
from ..decoding_functions import DecodingFunctions
from .data import Batch, ColumnTensors
from .decoding import TfStepper
from .forward_context import Buffers, Context
from .precision import watched

__all__ = ["EVALUATION_BATCH", "TfModel", "build_model", "evaluation_batch", "examples_at_once", "flattened", "micro_batches_on"]

LEAST_MICRO_BATCH = 8
"""Examples of a micro-batch, at least."""

MOST_IN_MICRO_BATCHES = 1 << 20
"""Parameters of a model whose steps are computed in micro-batches, at most: each has gradients of its own, which have to be added up."""

EVALUATION_BATCH = 1024
"""Examples evaluated at once, at most."""

EVALUATION_LOGITS_BYTES = 1 << 27
"""Bytes of logits evaluated at once of sequences, padding included; the softmax of them takes as much again."""

EVALUATION_BYTES = 1 << 25
"""Bytes of images evaluated at once. What a convolutional network computes from them takes some ten times as much: for AlexNet with
images of 224 × 224 (55 at once) less than training on 64 needs."""

Forward = Callable[..., tf.Tensor]
ExampleSums = Callable[[tf.Tensor, ColumnTensors, Context], Mapping[str, tf.Tensor]]
Losses = Callable[[tf.Tensor, ColumnTensors, Context], tf.Tensor]
"""From a forward function's result, the target and the context to what each example adds, [batch]."""

Computing = Callable[[HeldParameters, ColumnTensors, ColumnTensors, tf.Tensor, Context], tuple[tf.Tensor, list[tf.Tensor]]]
"""From parameters, inputs, target, weight and context to Σ example losses and the gradients of `weight` times that."""


@dataclass(frozen=True, slots=True)
class TfModel:
    """A model's functions; `ForwardContexts` makes the contexts. `example_sums` is that of the model's module (`models.objectives`).

    `own_losses` is the model's own loss, None for cross entropy.

    `computing` computes the gradients of a micro-batch where it is not done op by op.

    Parameters are held in the layouts of `layouts` where the model's module names one (its `storage_layouts(spec)`), else in the canonical
    one.

    `deterministic`: only ops that GPUs compute alike each time.
    """

    spec: ModelSpec
    forward: Forward
    layouts: Mapping[str, StorageLayout]
    example_sums: ExampleSums | None = None
    own_losses: Losses | None = None
    decoding: DecodingFunctions | None = None
    computing: Computing | None = None
    deterministic: bool = False

    def computing_by(self, computing: Computing) -> TfModel:
        """Return the same model, whose gradients of each micro-batch `computing` computes."""
        return replace(self, computing=computing)

    def stepper(
        self, read: Callable[[], tuple[HeldParameters, Buffers]], evaluation: Callable[[Buffers], Context], device: str
    ) -> TfStepper:
        """Return what decodes with the parameters and buffers that `read` gives, in ops, at each call; `evaluation` makes its contexts.

        Raises RuntimeError for a model that does not translate.
        """
        quality, functions = self.spec.objective.translation, self.decoding
        if quality is None or functions is None:
            raise RuntimeError(f"{self.spec.name!r} does not translate")

        def bound(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                parameters, buffers = read()
                return function(parameters, *arguments, evaluation(buffers))

            return call

        own = DecodingFunctions(bound(functions.encode), functions.empty_cache, bound(functions.decode_step))
        return TfStepper(own, quality.source, self.spec.logits_per_position, device)

    def parameters(self, held: Mapping[str, tf.Tensor]) -> HeldParameters:
        """Return tensors by canonical name, as they are held, as what a forward function takes."""
        return HeldParameters(self.spec, self.layouts, held)

    def loss_and_gradients(
        self, parameters: HeldParameters, micro_batches: Sequence[Batch], weight: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return, over all micro-batches, Σ example losses, and the gradients of `weight` times that, in the spec's order, as held.

        With a weight of 1 / (what the examples of all workers weigh) the gradients add up over workers to those of the mean, whatever the
        slices (an empty one gives zeros). The sum is left as it is: a caller divides many of them at once. `context` takes new values of
        buffers.
        """
        compute = self._loss_and_gradients if self.computing is None else self.computing
        found = [compute(parameters, *batch, weight, context) for batch in micro_batches]
        if len(found) == 1:
            return found[0]
        loss_sums, gradients = zip(*found, strict=True)
        return tf.add_n(loss_sums), [tf.add_n(each) for each in zip(*gradients, strict=True)]

    def _loss_and_gradients(
        self, parameters: HeldParameters, x: ColumnTensors, y: ColumnTensors, weight: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        order = [parameters.held[parameter.name] for parameter in self.spec.parameters]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(order)
            logits_bk = self.forward(parameters, x, context)
            if self.own_losses is not None:
                loss_sum = tf.reduce_sum(self.own_losses(logits_bk, y, context))
        if self.own_losses is not None:
            return loss_sum, _dense(tape.gradient(loss_sum, order, weight, unconnected_gradients=tf.UnconnectedGradients.ZERO))
        # The tape ends at the logits: the loss comes with its own gradient, and each op less counts in a small model's step.
        losses_b, slopes_bk = self._cross_entropy(logits_bk, y)
        gradients = tape.gradient(logits_bk, order, weight * slopes_bk, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return tf.reduce_sum(losses_b), _dense(gradients)

    def sums(self, parameters: HeldParameters, micro_batches: Sequence[Batch], context: Context) -> tf.Tensor:
        """Return the objective's sums over all micro-batches, float64 [sums], in its order."""
        outputs = self.logits(parameters, micro_batches, context)
        x, y = micro_batches[0] if len(micro_batches) == 1 else (None, tf.concat([labels_b for _, labels_b in micro_batches], axis=0))
        losses_b = self._cross_entropy(outputs, y)[0] if self.own_losses is None else self.own_losses(outputs, y, context)
        found = {LOSS_SUM: losses_b, COUNTED: tf.ones_like(losses_b)}
        for given in (x, y):
            if isinstance(given, dict):
                found |= {name.removesuffix(LENGTHS) + TOKENS: value for name, value in given.items() if name.endswith(LENGTHS)}
        if self.own_losses is None and "correct" in self.spec.objective.sums:
            found["correct"] = tf.argmax(outputs, axis=1, output_type=tf.int32) == y
        if self.example_sums is not None:
            found |= self.example_sums(outputs, y, context)
        self.spec.objective.check_parts({name: value.shape.rank if tf.is_tensor(value) else None for name, value in found.items()})
        return tf.stack([tf.reduce_sum(tf.cast(found[name], tf.float64)) for name in self.spec.objective.sums])

    def _cross_entropy(self, logits_bk: tf.Tensor, y_b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return each example's −log softmax(logits)[label], [batch], and its gradient with respect to the logits, [batch, classes].

        The raw op: the public function adds checks of shapes that are right here. GPUs refuse it where ops have to be deterministic.
        """
        if not self.deterministic:
            losses_b, slopes_bk = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits_bk, labels=y_b)
            return losses_b, slopes_bk
        classes = logits_bk.shape[1]
        losses_b = -tf.gather(tf.nn.log_softmax(logits_bk), y_b, batch_dims=1)
        return losses_b, tf.nn.softmax(logits_bk) - tf.one_hot(y_b, classes)

    def logits(self, parameters: HeldParameters, micro_batches: Sequence[Batch], context: Context) -> tf.Tensor:
        """Return what the forward function does of all micro-batches: of images logits_bk."""
        found = [self.forward(parameters, x, context) for x, _ in micro_batches]
        return found[0] if len(found) == 1 else tf.concat(found, axis=0)

    def unflattened(self, flat: tf.Tensor) -> tuple[HeldParameters, dict[str, tf.Tensor]]:
        """Cut a flat vector [spec.size + spec.buffers_size] into parameters and buffers, in the spec's order."""
        every = (*self.spec.parameters, *self.spec.buffers)
        shapes = [self.layouts[one.name].shape if one.name in self.layouts else one.shape for one in every]
        pieces = [tf.reshape(piece, shape) for piece, shape in zip(tf.split(flat, [one.size for one in every]), shapes, strict=True)]
        count = len(self.spec.parameters)
        names = [one.name for one in every]
        return self.parameters(dict(zip(names[:count], pieces[:count], strict=True))), dict(zip(names[count:], pieces[count:], strict=True))


def evaluation_batch(spec: ModelSpec) -> int:
    """Return how many examples an evaluation takes at once, at most; of sequences `examples_at_once` may take fewer."""
    return max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // (4 * math.prod(spec.input_shape))))


def examples_at_once(spec: ModelSpec, longest: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    """In ops: return how many of `most` examples, of which the longest has `longest` elements, an evaluation takes: at least one."""
    bytes_each = 4 * spec.logits_per_position * tf.maximum(longest, tf.constant(1, tf.int64))
    fit = tf.minimum(EVALUATION_LOGITS_BYTES // bytes_each, EVALUATION_BATCH)
    return tf.maximum(1, tf.minimum(most, tf.cast(fit, tf.int32)))


def flattened(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the elements of all tensors, one after another, as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def micro_batches_on(device: str, job: Job, spec: ModelSpec, threads: int) -> int:
    """Return in how many micro-batches a sync worker with so many compute threads computes its steps: one a thread, or 1.

    A small convolution on two threads is hardly faster than on one, as they wait for each other in every op; with a thread for each
    they do so once a step: the small CNN makes 1.5 times as many steps of 16 examples, 1.2 times as many of 256. Large
    models have large ops. Statistics of the batch must see all of it, and micro-batches would draw the same dropout. Functions of async
    workers are traced by the chief, which does not know their threads.
    """
    convolves = any(len(parameter.shape) == 4 for parameter in spec.parameters)
    suitable = (
        job.mode == "sync"
        and spec.inputs == (IMAGE,)
        and convolves
        and device.startswith("CPU")
        and not spec.buffers
        and not spec.dropout
        and spec.size <= MOST_IN_MICRO_BATCHES
    )
    return threads if suitable and job.micro_batch >= LEAST_MICRO_BATCH * threads else 1


def build_model(name: str, spec: ModelSpec, *, deterministic: bool = False) -> TfModel:
    """Find the functions of the model called `name`; `deterministic` is that of `TfModel`.

    Raises UsageError where it has no forward function, or not the loss that it names.
    """
    module = plugins.load(plugins.forward_plugin(name, "tf"), "forward")
    loss = spec.objective.loss
    if loss != CROSS_ENTROPY and not hasattr(module, loss):
        raise UsageError(f"model: its objective names the loss {loss!r}, which is no function of {module.__name__}.")
    own_losses = None if loss == CROSS_ENTROPY else _checked(loss, getattr(module, loss))
    layouts = module.storage_layouts(spec) if hasattr(module, "storage_layouts") else {}
    return TfModel(
        spec,
        watched(module.forward, name),
        layouts,
        module.example_sums if hasattr(module, "example_sums") else None,
        own_losses,
        DecodingFunctions.of(module) if spec.objective.translation is not None else None,
        deterministic=deterministic,
    )


def _checked(name: str, function: Losses) -> Losses:
    """Return a model's loss, whose tracing raises UsageError where it is not a vector."""

    def checked(outputs: tf.Tensor, target: ColumnTensors, context: Context) -> tf.Tensor:
        losses_b = function(outputs, target, context)
        if not tf.is_tensor(losses_b) or losses_b.shape.rank != 1:
            found = losses_b.shape.as_list() if tf.is_tensor(losses_b) and losses_b.shape.rank is not None else type(losses_b).__name__
            raise UsageError(f"model: the loss {name!r} returned {found}; a number for each example is needed, [batch]")
        return losses_b

    return checked


def _dense(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    """Return gradients of which none is sparse (that of a gathered table is): all are summed and applied alike, as on torch."""
    return [tf.convert_to_tensor(gradient) for gradient in gradients]
