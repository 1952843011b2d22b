"""``python step_marks_tf.py SEED``: a shard's marks for repeated steps, in graphs."""

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import pytest
import tensorflow as tf

from crosstrain.backends.tf.asynchronous.tickets import SPAN, make_marks

PLACES = 50


def main(seed):
    marks = make_marks()
    counts, version = tf.Variable(tf.zeros([PLACES], tf.int64)), tf.Variable(0, dtype=tf.int64)

    def loop(steps):
        def body(position, before):
            with tf.control_dependencies([before]):  # sequential, as the updates of a worker
                step = tf.gather(steps, position)

            def apply():
                place, increment = tf.math.floormod(step, PLACES), tf.constant(1, tf.int64)
                counted = tf.raw_ops.ResourceScatterAdd(resource=counts.handle, indices=place, updates=increment)
                with tf.control_dependencies([counted]):
                    return tf.raw_ops.ResourceCountUpTo(resource=version.handle, limit=2**62, T=tf.int64)

            return position + 1, marks.once(step, apply, lambda: tf.raw_ops.ReadVariableOp(resource=version.handle, dtype=tf.int64))

        return tf.while_loop(lambda position, _: position < tf.size(steps), body, (0, tf.constant(0, tf.int64)))[1]

    push = tf.compat.v1.wrap_function(loop, [tf.TensorSpec([None], tf.int64)])
    drawn = np.random.default_rng(seed)
    for _ in range(10):
        base = int(drawn.integers(0, 5)) * SPAN
        steps = drawn.integers(base, base + PLACES, 200)
        marks.clear()
        counts.assign(tf.zeros([PLACES], tf.int64))
        version.assign(0)
        push(tf.constant(steps, tf.int64))
        actual, expected = counts.numpy(), np.zeros(PLACES)
        expected[np.unique(steps) % PLACES] = 1
        assert np.array_equal(actual, expected), (actual, expected)
        assert version.numpy() == len(np.unique(steps))
    marks.begun.scatter_nd_update([[7]], [7])  # started, then interrupted
    marks.applied.scatter_nd_update([[7]], [-1])
    before = version.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="cut in the middle"):
        push(tf.constant([7], tf.int64))
    assert version.numpy() == before


if __name__ == "__main__":
    main(int(sys.argv[1]))
