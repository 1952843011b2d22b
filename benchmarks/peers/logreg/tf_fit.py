"""Keras `model.fit` on arrays in memory, with 50 steps per call of the compiled function."""

from __future__ import annotations

import keras
import tensorflow as tf
from workload import Timer, read_workload

STEPS_PER_EXECUTION = 50


class Clock(keras.callbacks.Callback):
    """Clock from the first epoch of a `fit` to its last, without its preparation."""

    def __init__(self, timer: Timer) -> None:
        super().__init__()
        self._timer = timer

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Start."""
        if epoch == 0:
            self._timer.begin()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """End, for the time being."""
        self._timer.end()


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    model = keras.Sequential([keras.Input((work.inputs.shape[1],)), keras.layers.Dense(len(work.bias))])
    model.layers[0].set_weights([work.weight.T, work.bias])
    model.compile(
        optimizer=keras.optimizers.SGD(work.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=STEPS_PER_EXECUTION,
        jit_compile=False,
    )
    per_epoch = min(work.steps, len(work.labels) // work.batch_size)
    if work.steps % per_epoch:
        raise SystemExit(f"{work.steps} steps are not whole epochs of {per_epoch}")
    order = work.order().ravel()
    before, after = order[: work.warmup * work.batch_size], order[work.warmup * work.batch_size :][: per_epoch * work.batch_size]
    options = {"batch_size": work.batch_size, "shuffle": False, "verbose": 0}
    model.fit(work.inputs[before], work.labels[before], **options)
    history = model.fit(work.inputs[after], work.labels[after], epochs=work.steps // per_epoch, callbacks=[Clock(timer)], **options)
    timer.report_mean(work, history.history["loss"][0], per_epoch)


main()
