"""TensorFlow's ring all-reduce, called as MultiWorkerMirroredStrategy does.

Many are in one `tf.function`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import tensorflow as tf
from place import Place, main


class RingAdder:
    """Adds up a tensor of zeros."""

    def __init__(self, place: Place) -> None:
        workers = [f"{address}:{port}" for address, port in zip(place.addresses, place.ports, strict=False)]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}})
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)  # a collective that waits must not hold the only thread
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self._barrier = self.prepare(1)

    def prepare(self, elements: int) -> Callable[[int], None]:
        """Return a function that sums vectors; each sum is the next one's input.

        So none starts before the previous one has ended.
        """
        vector = tf.zeros(elements)

        def on_replica(value: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
        def many(iterations: tf.Tensor) -> tf.Tensor:
            total = tf.identity(vector)
            for _ in tf.range(iterations):
                total = self._strategy.run(on_replica, args=(total,))
            return total

        return lambda iterations: many(tf.constant(iterations))[0].numpy()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._barrier(1)

    def close(self) -> None:
        """Nothing is left to do."""


main(RingAdder)
