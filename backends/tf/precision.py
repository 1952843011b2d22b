"""Number formats: what convolutions and matrix products are computed in, and the scaling of the loss that fp16 needs.

Weights, gradients as the optimiser sees them, normalisation, losses and reductions stay float32. What needs a GPU here (fp16, TF32) has
not been run on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ...core.errors import UsageError
from ...core.job import Job
from ...models.base import ForwardContext
from ..capabilities import unused_precision
from ..loss_scaling import FIRST_SCALE, next_scale, refuse_exhausted

__all__ = [
    "LossScale",
    "all_finite",
    "check_precision",
    "low_format",
    "precision_used",
    "unscaled",
    "watched",
]

TENSOR_FLOAT_CAPABILITY = (8, 0)
"""The first GPUs that know TF32."""

_FORMATS: Mapping[str, tf.DType | None] = {"fp32": None, "bf16": tf.bfloat16, "fp16": tf.float16}


def low_format(precision: str) -> tf.DType | None:
    """Return the format of convolutions and matrix products, None for float32."""
    return _FORMATS[precision]


def check_precision(job: Job, device: str) -> None:
    """Raise UsageError for fp16 on a device other than a GPU."""
    if job.precision == "fp16" and not device.startswith("GPU"):
        raise UsageError("precision: got 'fp16', which needs a GPU, and this run computes on the CPU; allowed here: fp32, bf16. Use bf16.")


def precision_used(precision: str, device: str) -> str:
    """Return the precision as a summary names it: fp32 says where a GPU computes convolutions and products in TF32."""
    if precision == "fp32" and device.startswith("GPU") and tf.config.experimental.tensor_float_32_execution_enabled():
        details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
        if any(detail.get("compute_capability", (0, 0)) >= TENSOR_FLOAT_CAPABILITY for detail in details):
            return "fp32 (TF32)"
    return precision


def watched(forward: Callable[..., tf.Tensor], model: str) -> Callable[..., tf.Tensor]:
    """Return a model's forward function, whose tracing raises UsageError where a low format is asked for and nothing computed in it."""

    def watching(parameters: Any, x: Any, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
        if context.compute is None or tf.executing_eagerly():
            return forward(parameters, x, context)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = forward(parameters, x, context)
        if not any(_computed_in(graph, before, context.compute)):
            raise unused_precision(next(name for name, low in _FORMATS.items() if low == context.compute), model, "tf")
        return result

    return watching


def _computed_in(graph: tf.Graph, first: int, low: tf.DType) -> Iterator[bool]:
    """Yield of each operation from the one numbered `first` on, and of the functions that they may call, whether its result is `low`.

    A change of format alone is no operation.
    """
    for operation in graph.get_operations()[first:]:
        yield operation.type != "Cast" and any(output.dtype.base_dtype == low for output in operation.outputs)
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            yield node.op != "Cast" and node.attr["T"].type == low.as_datatype_enum


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """In ops: return whether every element is finite, as a boolean scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def unscaled(gradients: Sequence[tf.Tensor], scale: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """In ops: return the gradients divided by the scale, and whether all of them are finite."""
    return [gradient / scale for gradient in gradients], all_finite(gradients)


class LossScale:
    """Dynamic scaling of the loss, in ops; see `backends.loss_scaling`."""

    @staticmethod
    def initial() -> dict[str, float]:
        """Return the scalars at the start of a run."""
        return {"loss_scale": FIRST_SCALE, "clean_steps": 0.0}

    def __init__(self) -> None:
        self.scale = tf.Variable(FIRST_SCALE, name="loss_scale")
        self._clean = tf.Variable(0.0, name="clean_steps")

    @property
    def scalars(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"loss_scale": float(self.scale.numpy()), "clean_steps": float(self._clean.numpy())}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Take over what a checkpoint kept; begin anew where it kept nothing."""
        values = {**self.initial(), **scalars}
        self.scale.assign(values["loss_scale"])
        self._clean.assign(values["clean_steps"])

    def check(self) -> None:
        """Raise RunFailedError where the scale is exhausted."""
        refuse_exhausted(float(self.scale.numpy()))

    def guarded(self, gradients: Sequence[tf.Tensor], apply: Callable[[Sequence[tf.Tensor]], object]) -> None:
        """In ops: call `apply` with the gradients divided by the scale where all are finite, else leave the update out; adapt the scale.

        Ranks whose gradients are added up together come to the same answer.
        """
        divided, finite = unscaled(gradients, self.scale)

        def take() -> tf.Tensor:
            apply(divided)
            return tf.constant(True)

        tf.cond(finite, take, lambda: tf.constant(False))
        scale, clean = next_scale(self.scale.read_value(), self._clean.read_value(), finite, where=tf.where, smaller=tf.minimum)
        self.scale.assign(scale)
        self._clean.assign(clean)
