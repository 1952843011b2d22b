"""A hand-written ParameterServerStrategy loop: the coordinator schedules a closure per step.

Started under TF_CONFIG, one process for each task. Each worker has a copy of the data and a prefetched pipeline. Staleness is not counted,
which favours this peer.
"""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import tensorflow as tf
from workload import Timer, Workload, read_workload


def serve(work: Workload, contract: dict) -> None:
    """Be a worker or a parameter server until the coordinator's end."""
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=work.threads, inter_op_parallelism_threads=2)
    task = contract["task"]
    server = tf.distribute.Server(contract["cluster"], task["type"], task["index"], protocol="grpc", config=config)
    threading.Event().wait()
    del server


def pipeline(work: Workload, arrays: dict[str, str]) -> tf.data.Dataset:
    """Return endless batches in random order of arrays that each worker reads once."""
    shape = work.inputs.shape
    inputs = tf.reshape(tf.io.decode_raw(tf.io.read_file(arrays["inputs"]), tf.float32), shape)
    labels = tf.reshape(tf.io.decode_raw(tf.io.read_file(arrays["labels"]), tf.int64), shape[:1])
    batches = tf.data.Dataset.range(shape[0]).shuffle(shape[0]).repeat().batch(work.batch_size)
    return batches.map(lambda batch: (tf.gather(inputs, batch), tf.gather(labels, batch))).prefetch(tf.data.AUTOTUNE)


def coordinate(work: Workload, arrays: dict[str, str]) -> None:
    """Be the chief: own the variables, hand out the steps, and time them."""
    timer = Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight, bias = tf.Variable(work.weight.T), tf.Variable(work.bias)
    batches = iter(coordinator.create_per_worker_dataset(lambda: pipeline(work, arrays)))

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        inputs, labels = next(iterator)
        with tf.GradientTape() as tape:
            logits = inputs @ weight + bias
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, [weight, bias])
        for variable, gradient in zip([weight, bias], gradients, strict=True):
            variable.assign_sub(work.learning_rate * gradient)
        return loss

    losses = [coordinator.schedule(step, args=(batches,))]
    coordinator.join()
    timer.first_step()
    losses += [coordinator.schedule(step, args=(batches,)) for _ in range(work.warmup - 1)]
    coordinator.join()
    timer.begin()
    losses += [coordinator.schedule(step, args=(batches,)) for _ in range(work.steps)]
    coordinator.join()
    timer.end()
    values = np.array([loss.fetch() for loss in losses[work.warmup :]])
    timer.report_mean(work, float(values.mean()), work.steps)


def main() -> None:
    """Take the place that TF_CONFIG gives."""
    contract = json.loads(os.environ["TF_CONFIG"])
    work = read_workload()
    if contract["task"]["type"] != "chief":
        serve(work, contract)
    folder = os.environ["BENCHMARK_FOLDER"]
    arrays = {"inputs": os.path.join(folder, "inputs.raw"), "labels": os.path.join(folder, "labels.raw")}
    work.inputs.tofile(arrays["inputs"])
    work.labels.tofile(arrays["labels"])
    coordinate(work, arrays)
    os._exit(0)  # TensorFlow's coordinator has no way to leave while servers are up


main()
