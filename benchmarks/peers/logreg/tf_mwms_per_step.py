"""A hand-written MultiWorkerMirroredStrategy loop: one `tf.function` call per step.

Started under TF_CONFIG, one process for each worker.
"""

from __future__ import annotations

import json
import os

import tensorflow as tf
from workload import Timer, read_workload


def main() -> None:
    """Train as one of the workers that TF_CONFIG names."""
    contract = json.loads(os.environ["TF_CONFIG"])
    workers, rank = len(contract["cluster"]["worker"]), contract["task"]["index"]
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)  # a collective that waits must not hold the only thread
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    inputs, labels = tf.constant(work.inputs), tf.constant(work.labels)
    with strategy.scope():
        weight, bias = tf.Variable(work.weight.T), tf.Variable(work.bias)
    rate = tf.constant(work.learning_rate)

    def replica_step(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.gather(inputs, batch) @ weight + bias
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, batch), logits))
        gradients = tape.gradient(loss, [weight, bias])
        gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for variable, gradient in zip([weight, bias], gradients, strict=True):
            variable.assign_sub(rate * gradient)
        return loss

    @tf.function(input_signature=[tf.TensorSpec([work.batch_size], tf.int32)])
    def step(batch: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica_step, args=(batch,))

    def replica_mean(values: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, tf.identity(values))

    @tf.function
    def mean(values: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica_mean, args=(values,))

    batches = [tf.constant(batch) for batch in work.order(workers, rank)]
    losses = [step(batches[0])]
    losses[0].numpy()
    timer.first_step()
    losses += [step(batch) for batch in batches[1 : work.warmup]]
    losses[-1].numpy()
    timer.begin()
    losses += [step(batch) for batch in batches[work.warmup :]]
    losses[-1].numpy()
    timer.end()
    means = mean(tf.stack(losses)).numpy()
    mean(tf.zeros(1)).numpy()  # nobody leaves before everybody is here
    if rank == 0:
        timer.report(work, means)


main()
