"""A model on TensorFlow: its forward function, its loss and the gradient of that loss, written once for every mode.

Shapes: x_bchw [batch, channels, height, width]; y_b [batch] int32; logits_bk [batch, classes].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from ...core import plugins
from ...core.errors import UsageError
from ...models.base import ModelSpec

__all__ = ["TfModel", "build_model"]

Forward = Callable[..., tf.Tensor]


@dataclass(frozen=True, slots=True)
class TfModel:
    """A model's functions over parameters given as tensors by canonical name."""

    spec: ModelSpec
    forward: Forward

    def loss_and_gradients(
        self, parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, y_b: tf.Tensor, global_size: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return Σ example losses / `global_size` and its gradients in the order of the spec's parameters.

        `global_size` counts the examples of all workers, so both add up over workers, whatever the slices (an empty one gives zeros).
        """
        order = [parameters[parameter.name] for parameter in self.spec.parameters]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(order)
            losses_b = _cross_entropy(self.forward(parameters, x_bchw, training=True), y_b)
        # The gradient of the division and the sum, written out: a third fewer ops in a small model's step.
        weights_b = tf.fill(tf.shape(losses_b), 1.0 / global_size)
        gradients = tape.gradient(losses_b, order, weights_b, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return tf.reduce_sum(losses_b) / global_size, gradients

    def sums(self, parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, y_b: tf.Tensor) -> tf.Tensor:
        """Return float64 [3]: the sum of the example losses, the number of correct predictions, the number of examples."""
        logits_bk = self.forward(parameters, x_bchw, training=False)
        losses_b = tf.cast(_cross_entropy(logits_bk, y_b), tf.float64)
        correct_b = tf.cast(tf.argmax(logits_bk, axis=1, output_type=tf.int32) == y_b, tf.float64)
        return tf.stack([tf.reduce_sum(losses_b), tf.reduce_sum(correct_b), tf.cast(tf.size(y_b), tf.float64)])

    def unflattened(self, flat: tf.Tensor) -> dict[str, tf.Tensor]:
        """Cut a flat vector [spec.size] into the parameters, in the spec's order."""
        parts = tf.split(flat, [parameter.size for parameter in self.spec.parameters])
        return {parameter.name: tf.reshape(part, parameter.shape) for parameter, part in zip(self.spec.parameters, parts, strict=True)}


def flattened(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the elements of all tensors, one after another, as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def build_model(name: str, spec: ModelSpec) -> TfModel:
    """Find the forward function of the model called `name`. Raises UsageError where it has none, or where its loss is unknown here."""
    if spec.loss != "cross_entropy":
        raise UsageError.of("loss", spec.loss, "cross_entropy", ["cross_entropy"])
    module = plugins.load(plugins.forward_plugin(name, "tf"), "forward")
    return TfModel(spec, module.forward)


def _cross_entropy(logits_bk: tf.Tensor, y_b: tf.Tensor) -> tf.Tensor:
    """Return each example's −log softmax(logits)[label]. The raw op: the public function adds checks of shapes that are right here."""
    losses_b, _ = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits_bk, labels=y_b)
    return losses_b
