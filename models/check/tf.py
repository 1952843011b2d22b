"""Passes of a model on TensorFlow; see `passes`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its notes about the processor would be taken for a problem

import tensorflow as tf

from ..base import ModelSpec
from ..imported.graph import Traced
from ..layers.tf import HeldParameters
from .passes import RATE, Array, Compute, serve


class TensorFlow:
    """TensorFlow's `Framework`."""

    name = "tf"

    def tensor(self, array: Array) -> tf.Tensor:
        """Return an array as a tensor, whole numbers as int32."""
        return tf.constant(array.astype(np.int32) if array.dtype.kind in "iu" else array)

    def varying(self, array: Array) -> tf.Variable:
        """Return a variable whose number of rows is unknown while a step is traced."""
        value = self.tensor(array)
        return tf.Variable(value, trainable=False, shape=[None, *value.shape[1:]])

    def array(self, tensor: Any) -> Array | None:
        """Return a tensor as an array; None for anything else."""
        return np.asarray(tensor) if tf.is_tensor(tensor) else None

    def masked(self, x: tf.Tensor, kept: Array, rate: float) -> tf.Tensor:
        """Return x without the elements that are not kept, and the others divided by 1 − rate."""
        return x * tf.constant(kept, x.dtype) / (1 - rate)

    def dropped(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        """Return x with elements dropped by TensorFlow's own random numbers."""
        return tf.nn.dropout(x, rate)

    def variables(self, spec: ModelSpec, module: Any, values: Mapping[str, Array]) -> tuple[Mapping[str, tf.Tensor], Sequence[tf.Variable]]:
        """Return trained parameters as backends hold them, by name and in order."""
        layouts = module.storage_layouts(spec) if hasattr(module, "storage_layouts") else {}
        held = {name: tf.Variable(layouts[name].to_storage(value) if name in layouts else value) for name, value in values.items()}
        return HeldParameters(spec, layouts, held), list(held.values())

    def in_float64(self) -> AbstractContextManager[None]:
        """Return a context without effect: no module of a user is TensorFlow's own."""
        return nullcontext()

    def as_in_training(self, compute: Compute) -> Compute:
        """Return a function of parameters as training carries it out, which is traced."""
        traced: Compute = tf.function(compute, autograph=False)
        return traced

    def gradients(
        self, compute: Compute, parameters: Mapping[str, Array], slopes: Callable[[Sequence[int]], Array]
    ) -> tuple[tf.Tensor, dict[str, Array]]:
        """Return the result of `compute`, and the gradients of its product with `slopes`."""
        leaves = {name: tf.constant(value) for name, value in parameters.items()}
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            result = compute(leaves)
        gradients = tape.gradient(result, leaves, tf.constant(slopes(result.shape)), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return result, {name: tf.convert_to_tensor(gradient).numpy() for name, gradient in gradients.items()}

    def step(self, compute: Callable[[], tf.Tensor], trained: Sequence[tf.Variable]) -> Callable[[], None]:
        """Return a traced training step of SGD on the sum of `compute`'s result."""
        leaves = list(trained)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def take() -> tf.Tensor:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(leaves)
                result = compute()
            for leaf, gradient in zip(leaves, tape.gradient(result, leaves), strict=True):
                if gradient is not None:
                    leaf.assign_sub(RATE * tf.convert_to_tensor(gradient))
            return tf.size(result)

        return lambda: take().numpy()

    def float64_pass(self) -> Callable[..., tuple[Any, list[Traced]]]:
        """Import and return the function that computes imported models in float64."""
        from ..imported.tf.float64_pass import float64_pass

        return float64_pass


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)  # times of several threads depend on what else runs
    serve(TensorFlow())
