"""Async worker's dataset and its computations, traced on the chief and run on the worker."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....core.cluster import Task
from ....core.job import Job
from ....data.base import Dataset, Split
from ....models.base import ModelSpec
from ....models.layers.tf import HeldParameters
from ...capabilities import Device
from ..data import SPLITS, VALUES, Batch, Layout, Resident, Tensors, file_contents, layout_for, resident_from_arrays, with_mapped_files
from ..model import Buffers, ForwardContexts, TfModel, flattened, summed
from ..optimizers import accumulated, clipped, precision_used, unscaled
from ..runtime import SERVER_INTER_OP_THREADS, cluster_tasks, device_kind, translated_errors
from .shards import PULL_EXTRA, SKIP, Shard, read_staleness
from .tickets import Work, pack_outcome, unpack

# TensorFlow's bare server runs no Python, but ops can read ``/dev/fd/N``: so the worker provides its arrays as anonymous files at agreed
# numbers, and no example crosses the network; large columns of sequences are mapped from the store's files.

_FIRST_DESCRIPTOR = 200
_FIRST_MAPPED_DESCRIPTOR = 400  # for the store's files; files at other numbers are emptied when read


def publish(data: Dataset, layout: Layout) -> None:
    """Provide the arrays and mapped files of every split, on a worker.

    Raises RuntimeError if a number is in use.
    """
    number = _FIRST_DESCRIPTOR
    for split in SPLITS:
        arrays = layout.arrays(data, split)
        for name in layout.array_specs(split):
            if name in arrays:
                _put(number, arrays[name])
            number += 1
    for number, file in enumerate(layout.mapped.values(), _FIRST_MAPPED_DESCRIPTOR):
        with open(file.filename, "rb") as opened:
            _give(number, opened)


def read(layout: Layout) -> Mapping[Split, Mapping[str, tf.Tensor]]:
    """Read each split's arrays by name, once, in ops on a worker.

    They fail if its dataset has another size.
    """
    arrays: dict[Split, dict[str, tf.Tensor]] = {}
    mapped = {
        (split, name + VALUES): file_contents(file, f"/dev/fd/{number}")
        for number, ((split, name), file) in enumerate(layout.mapped.items(), _FIRST_MAPPED_DESCRIPTOR)
    }
    number = _FIRST_DESCRIPTOR
    for split in SPLITS:
        arrays[split] = {}
        for name, spec in layout.array_specs(split).items():
            if (split, name) in mapped:
                arrays[split][name] = mapped[split, name]
            else:
                shape = [-1 if size is None else size for size in spec.shape.as_list()]
                arrays[split][name] = tf.reshape(_read(number, spec.dtype), shape)
            number += 1
    return arrays


def _put(number: int, array: NDArray[Any]) -> None:
    with _anonymous_file() as file:
        file.write(np.ascontiguousarray(array).data)
        file.flush()
        _give(number, file)


def _give(number: int, file: IO[bytes]) -> None:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        pass  # the number is free, as it should be
    else:
        raise RuntimeError(f"file descriptor {number} is in use, so the dataset cannot be handed to TensorFlow's worker")
    os.dup2(file.fileno(), number, inheritable=False)


def _anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dataset"), "wb")
    return tempfile.TemporaryFile()


def _read(number: int, dtype: tf.DType) -> tf.Tensor:
    path = f"/dev/fd/{number}"
    values = tf.io.decode_raw(tf.io.read_file(path), dtype)
    with tf.control_dependencies([values]):
        emptied = tf.io.write_file(path, "")
    with tf.control_dependencies([emptied]):
        return tf.identity(values)


def local_dataset(layout: Layout) -> tf.data.Dataset:
    """Return a dataset with one repeated element, in the worker's memory.

    It consists of the worker's index, train tensors and test tensors.
    """

    def load(worker: tf.Tensor) -> tuple[tf.Tensor, ...]:
        held = {split: resident_from_arrays(layout, split, arrays) for split, arrays in read(layout).items()}
        return (worker, *(tensor for split in SPLITS for tensor in held[split].tensors.values()))

    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return tf.data.Dataset.from_tensors(worker).map(tf.autograph.experimental.do_not_convert(load)).cache().repeat()


def element_spec(layout: Layout) -> tuple[tf.TensorSpec, ...]:
    """Return the types of an element of `local_dataset`."""
    return tf.TensorSpec([], tf.int64), *(spec for split in SPLITS for spec in layout.tensor_specs(split))


Values = tuple[HeldParameters, Buffers]
Gradients = tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]  # Σ losses, gradients · slope, buffer decrements
OnWorker = Callable[[Iterator[Any], tf.Tensor], tf.Tensor]


@dataclass(frozen=True, slots=True)
class WorkerFunctions:
    """Functions that workers run, traced on the chief.

    Gradients are those of a whole batch, or of `job.accumulate` micro-batches. `number` is an update's, for dropout.
    """

    job: Job
    model: TfModel
    passes: ForwardContexts
    shards: Sequence[Shard]
    layout: Layout

    def training(self) -> OnWorker:
        """Make the function (iterator of `local_dataset`, ticket) → outcome.

        Each dependency between ops of different tasks costs a message.
        """

        def loop(*arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
            *tensors, ticket = arguments
            work = unpack(ticket, changing=self.layout.changing)
            return self._updates(Resident.from_tensors(self.layout, "train", tensors), work)

        specs = self.layout.tensor_specs("train")
        updates = tf.compat.v1.wrap_function(loop, [*specs, tf.TensorSpec([None], tf.int32)])

        def train(iterator: Iterator[Any], ticket: tf.Tensor) -> tf.Tensor:
            worker, *tensors = next(iterator)
            return pack_outcome(worker, *updates(*tensors[: len(specs)], ticket))

        return train

    def _updates(self, data: Resident, work: Work) -> tuple[tf.Tensor, ...]:
        """Carry out a ticket.

        Return its seconds, float64, final loss scale, losses, and staleness, int64.
        """
        with tf.control_dependencies([work.indices]):
            started = tf.timestamp()
        with tf.control_dependencies([started]):
            # A loop's values stay where the first one is made: without the copy each message would travel three times.
            first_pull = [tf.identity(shard.pull()) for shard in self.shards]
        scaled = self.shards[0].skipping

        def body(
            step: tf.Tensor, scale: tf.Tensor, messages: list[tf.Tensor], losses: tf.TensorArray, staleness: tf.TensorArray
        ) -> tuple[Any, ...]:
            begin, end = tf.gather(work.offsets, step), tf.gather(work.offsets, step + 1)
            weight = tf.gather(work.weights, step)
            slope = scale / weight if scaled else 1.0 / weight
            values = self.pull(messages)
            update = work.first_step + tf.cast(step, tf.int64)
            number = update if self.passes.dropout else None

            def take(first: tf.Tensor, stop: tf.Tensor) -> tuple[Batch, tf.Tensor]:
                indices = work.indices[first:stop]
                return data.batch(indices, None if work.changes is None else work.changes[first:stop]), indices

            if self.job.accumulate == 1:
                loss_sum, gradients, decrements = self.compute_batch(*take(begin, end), values, slope, number)
            else:
                loss_sum, gradients, decrements = self.compute_micro_batches(
                    lambda first, stop: take(begin + first, begin + stop), end - begin, values, slope, number
                )
            rate = tf.gather(work.learning_rates, step)
            if scaled:
                gradients, finite = unscaled(gradients, scale)
                rate, scale = tf.where(finite, rate, SKIP), tf.where(finite, scale, scale / 2.0)
            if self.job.clip_norm:  # here, as no parameter server has all of the gradient
                gradients = clipped(gradients, self.job.clip_norm)
            gradient = flattened([*gradients, *decrements])
            messages = [
                shard.push(gradient[shard.start : shard.stop], rate, pulled, update)
                for shard, pulled in zip(self.shards, messages, strict=True)
            ]
            return step + 1, scale, messages, losses.write(step, loss_sum / weight), staleness.write(step, read_staleness(messages[0]))

        losses, staleness = (tf.TensorArray(dtype, size=work.count, element_shape=[]) for dtype in (tf.float32, tf.int64))
        _, scale, messages, losses, staleness = tf.while_loop(
            lambda step, *_: step < work.count, body, (tf.constant(0), work.loss_scale, first_pull, losses, staleness)
        )
        with tf.control_dependencies(messages):
            seconds = tf.timestamp() - started
        return seconds, scale, losses.stack(), staleness.stack()

    def compute_batch(
        self,
        batch: Batch,
        indices: tf.Tensor,
        values: Values,
        slope: tf.Tensor,
        number: tf.Tensor | None,
        micro_batch: tf.Tensor | None = None,
    ) -> Gradients:
        """Compute a batch, or a numbered micro-batch."""
        parameters, buffers = values
        context = self.passes.training(buffers, number, indices, micro_batch)
        loss_sum, gradients = self.model.loss_and_gradients(parameters, [batch], slope, context)
        return loss_sum, gradients, [value - context.updated.get(name, value) for name, value in buffers.items()]

    def compute_micro_batches(
        self,
        take: Callable[[tf.Tensor, tf.Tensor], tuple[Batch, tf.Tensor]],
        size: tf.Tensor,
        values: Values,
        slope: tf.Tensor,
        number: tf.Tensor | None,
    ) -> Gradients:
        """Compute in micro-batches of examples from `take(begin, end)`.

        Each begins with the buffers left by the one before.
        """
        parameters, buffers = values
        count = len(self.model.spec.parameters)
        moved: list[tf.Tensor] = [tf.zeros_like(value) for value in buffers.values()]

        def compute(begin: tf.Tensor, end: tf.Tensor, micro_batch: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
            batch, indices = take(begin, end)
            current = {name: buffers[name] - decrement for name, decrement in zip(buffers, sums[1 + count :], strict=True)}
            loss_sum, gradients, decrements = self.compute_batch(batch, indices, (parameters, current), slope, number, micro_batch)
            return [loss_sum, *gradients, *decrements]

        zeros = [tf.zeros([]), *(tf.zeros_like(parameters.held[parameter.name]) for parameter in self.model.spec.parameters), *moved]
        loss_sum, *sums = accumulated(compute, size, self.job.accumulate, zeros)
        return loss_sum, sums[:count], sums[count:]

    def evaluation(self, split: Split) -> OnWorker:
        """Make the function (iterator of `local_dataset`, bounds) → sums.

        Bounds (start, stop) int32 [2]; sums float64 [sums] of `TfModel.sums`.
        """
        specs = {name: len(self.layout.tensor_specs(name)) for name in SPLITS}
        begin = 1 + (specs["train"] if split == "test" else 0)

        def evaluate(iterator: Iterator[Any], bounds: tf.Tensor) -> tf.Tensor:
            element = next(iterator)
            data = Resident.from_tensors(self.layout, split, element[begin : begin + specs[split]])
            parameters, buffers = self.pull([shard.pull(to_evaluate=True) for shard in self.shards])
            return summed(self.model, data, parameters, self.passes.evaluation(buffers), bounds[0], bounds[1])

        return evaluate

    def pull(self, messages: Tensors) -> Values:
        """Return parameters and buffers in the shards' messages."""
        return self.model.unflattened(tf.concat([message[:-PULL_EXTRA] for message in messages], axis=0))


def open_server(task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str) -> TfServer:
    """Start serving; a worker first provides its dataset.

    Raises OSError(EADDRINUSE) if the port was taken.
    """
    if task.placed.role == "worker":
        publish(data, with_mapped_files(layout_for(job, spec, data.info), data))
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=task.threads, inter_op_parallelism_threads=max(SERVER_INTER_OP_THREADS, task.threads)
    )
    if device.startswith("GPU"):
        config.gpu_options.visible_device_list = str(task.local_index % len(tf.config.list_physical_devices("GPU")))
        config.gpu_options.allow_growth = True
    else:
        config.device_count["GPU"] = 0
    with translated_errors(task):
        server = tf.distribute.Server(
            cluster_tasks(task.cluster), job_name=task.placed.role, task_index=task.placed.index, protocol="grpc", config=config
        )
    return TfServer(server, precision_used(job.precision, device), device_kind(device))


class TfServer:
    """Implements `Server`. TensorFlow's server cannot be stopped, and its `join` never returns."""

    def __init__(self, server: tf.distribute.Server, precision_used: str, device_used: Device) -> None:
        self._server = server
        self.precision_used, self.device_used = precision_used, device_used

    def serve(self, stop: threading.Event) -> None:
        """Wait until `stop` is set: TensorFlow's chief has no message that ends a server."""
        stop.wait()
