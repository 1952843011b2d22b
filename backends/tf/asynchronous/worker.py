"""Async: what a worker computes when the chief orders it to. These functions are traced on the chief and run on a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ....core.job import Job
from ....data.base import Split
from ....models.layers.tf.image import HeldParameters
from ..accumulation import accumulated
from ..data import SPLITS, Batch, Layout, Resident, resident_from_arrays
from ..evaluation import summed
from ..forward_context import Buffers, ForwardContexts
from ..model import TfModel, flattened
from ..optimizers import clipped
from ..precision import unscaled
from . import dataset_handover
from .shards import PULL_EXTRA, SKIP, Shard, staleness_of
from .tickets import Work, pack_outcome, unpack

__all__ = ["element_spec", "evaluation", "gradients_in_micro_batches", "local_dataset", "pulled", "training"]


def local_dataset(layout: Layout) -> tf.data.Dataset:
    """Return a dataset whose every element is (worker's index, the tensors of the train split, those of the test split).

    The arrays are made once, from what the worker offers; each later element is the same memory.
    """

    def load(worker: tf.Tensor) -> tuple[tf.Tensor, ...]:
        held = {split: resident_from_arrays(layout, split, arrays) for split, arrays in dataset_handover.read(layout).items()}
        return (worker, *(tensor for split in SPLITS for tensor in held[split].tensors.values()))

    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return tf.data.Dataset.from_tensors(worker).map(tf.autograph.experimental.do_not_convert(load)).cache().repeat()


def element_spec(layout: Layout) -> tuple[tf.TensorSpec, ...]:
    """Return the types of an element of `local_dataset`."""
    return tf.TensorSpec([], tf.int64), *(spec for split in SPLITS for spec in layout.tensor_specs(split))


def training(
    job: Job, model: TfModel, passes: ForwardContexts, shards: Sequence[Shard], layout: Layout
) -> Callable[[Iterator[Any], tf.Tensor], tf.Tensor]:
    """Make the function (iterator of `local_dataset`, ticket) → outcome of a job's workers; see tickets.py for the two vectors.

    Its loop is traced by `wrap_function`, which adds no control dependencies of its own. The order of reads and updates is stated op
    by op, and each further dependency between two tasks would be a message in every update: a quarter of a small model's time.
    """

    def loop(*given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        *tensors, ticket = given
        work = unpack(ticket, changing=layout.changing)
        return _updates(job, model, passes, shards, Resident.of(layout, "train", tensors), work)

    specs = layout.tensor_specs("train")
    updates = tf.compat.v1.wrap_function(loop, [*specs, tf.TensorSpec([None], tf.int32)])

    def train(iterator: Iterator[Any], ticket: tf.Tensor) -> tf.Tensor:
        worker, *tensors = next(iterator)
        return pack_outcome(worker, *updates(*tensors[: len(specs)], ticket))

    return train


def _updates(
    job: Job, model: TfModel, passes: ForwardContexts, shards: Sequence[Shard], data: Resident, work: Work
) -> tuple[tf.Tensor, ...]:
    """Carry out a ticket: return the seconds it took, float64, the loss scale at its end, each update's loss, and its staleness, int64."""
    with tf.control_dependencies([work.indices]):
        started = tf.timestamp()
    with tf.control_dependencies([started]):
        # A loop's values stay where the first one is made: without the copy each message would travel three times.
        first_pull = [tf.identity(shard.pull()) for shard in shards]

    scaled = shards[0].skipping

    def body(
        step: tf.Tensor, scale: tf.Tensor, messages: list[tf.Tensor], losses: tf.TensorArray, staleness: tf.TensorArray
    ) -> tuple[Any, ...]:
        begin, end = tf.gather(work.offsets, step), tf.gather(work.offsets, step + 1)
        weight = tf.gather(work.weights, step)
        slope = scale / weight if scaled else 1.0 / weight
        parameters, buffers = pulled(model, messages)
        this = work.first_step + tf.cast(step, tf.int64)
        number = this if passes.dropout else None
        if job.accumulate == 1:
            indices = work.indices[begin:end]
            batch = data.batch(indices, None if work.changes is None else work.changes[begin:end])
            context = passes.training(buffers, number, indices)
            loss_sum, gradients = model.loss_and_gradients(parameters, [batch], slope, context)
            decrements = [value - context.updated.get(name, value) for name, value in buffers.items()]
        else:

            def take(first: tf.Tensor, stop: tf.Tensor) -> tuple[Batch, tf.Tensor]:
                own = work.indices[begin + first : begin + stop]
                changes = None if work.changes is None else work.changes[begin + first : begin + stop]
                return data.batch(own, changes), own

            loss_sum, gradients, decrements = gradients_in_micro_batches(
                model, passes, job.accumulate, take, end - begin, parameters, buffers, slope, number
            )
        rate = tf.gather(work.learning_rates, step)
        if scaled:
            gradients, finite = unscaled(gradients, scale)
            rate, scale = tf.where(finite, rate, SKIP), tf.where(finite, scale, scale / 2.0)
        if job.clip_norm:  # here, as no parameter server has all of the gradient
            gradients = clipped(gradients, job.clip_norm)
        gradient = flattened([*gradients, *decrements])
        messages = [
            shard.push(gradient[shard.start : shard.stop], rate, pulled, this) for shard, pulled in zip(shards, messages, strict=True)
        ]
        return step + 1, scale, messages, losses.write(step, loss_sum / weight), staleness.write(step, staleness_of(messages[0]))

    losses, staleness = (tf.TensorArray(dtype, size=work.count, element_shape=[]) for dtype in (tf.float32, tf.int64))
    _, scale, messages, losses, staleness = tf.while_loop(
        lambda step, *_: step < work.count, body, (tf.constant(0), work.loss_scale, first_pull, losses, staleness)
    )
    with tf.control_dependencies(messages):
        seconds = tf.timestamp() - started
    return seconds, scale, losses.stack(), staleness.stack()


def gradients_in_micro_batches(
    model: TfModel,
    passes: ForwardContexts,
    most: int,
    take: Callable[[tf.Tensor, tf.Tensor], tuple[Batch, tf.Tensor]],
    size: tf.Tensor,
    parameters: HeldParameters,
    buffers: Buffers,
    slope: tf.Tensor,
    number: tf.Tensor | None,
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """In ops: return Σ example losses, the gradients of `slope` times that, and by how much the buffers become smaller.

    `take` gives the examples begin … end − 1 of `size`, as read, and their indices. Each micro-batch begins with the buffers that the one
    before has left.
    """
    names, count = list(buffers), len(model.spec.parameters)
    moved: list[tf.Tensor] = [tf.zeros_like(value) for value in buffers.values()]

    def compute(begin: tf.Tensor, end: tf.Tensor, micro_batch: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
        batch, indices = take(begin, end)
        current = {name: buffers[name] - decrement for name, decrement in zip(names, sums[1 + count :], strict=True)}
        context = passes.training(current, number, indices, micro_batch)
        loss_sum, gradients = model.loss_and_gradients(parameters, [batch], slope, context)
        return [loss_sum, *gradients, *(value - context.updated.get(name, value) for name, value in current.items())]

    zeros = [tf.zeros([]), *(tf.zeros_like(parameters.held[parameter.name]) for parameter in model.spec.parameters), *moved]
    loss_sum, *sums = accumulated(compute, size, most, zeros)
    return loss_sum, sums[:count], sums[count:]


def evaluation(
    model: TfModel, passes: ForwardContexts, shards: Sequence[Shard], layout: Layout, split: Split
) -> Callable[[Iterator[Any], tf.Tensor], tf.Tensor]:
    """Make the function (iterator of `local_dataset`, int32 [2] (start, stop)) → float64 [sums], as `TfModel.sums` of these examples."""
    specs = {one: len(layout.tensor_specs(one)) for one in SPLITS}
    begin = 1 + (specs["train"] if split == "test" else 0)

    def evaluate(iterator: Iterator[Any], bounds: tf.Tensor) -> tf.Tensor:
        element = next(iterator)
        data = Resident.of(layout, split, element[begin : begin + specs[split]])
        parameters, buffers = pulled(model, [shard.pull(to_evaluate=True) for shard in shards])
        return summed(model, data, parameters, passes.evaluation(buffers), bounds[0], bounds[1])

    return evaluate


def pulled(model: TfModel, messages: Sequence[tf.Tensor]) -> tuple[HeldParameters, dict[str, tf.Tensor]]:
    """Return parameters and buffers in the shards' messages."""
    return model.unflattened(tf.concat([message[:-PULL_EXTRA] for message in messages], axis=0))
