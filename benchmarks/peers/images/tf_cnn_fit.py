"""Keras `model.fit` on the small CNN, arrays in memory, 50 steps per compiled call."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from workload import Timer, Workload, read_workload

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


def build(work: Workload) -> keras.Model:
    """Return the model with the initial weights in Keras's layouts.

    HWIO, [in, out], features in the order height, width, channel.
    """
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *(layers.Conv2D(6, 5, activation="relu"), layers.MaxPooling2D(2)),
            *(layers.Conv2D(16, 5, padding="same", activation="relu"), layers.MaxPooling2D(2)),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(work.spec.classes)),
        ]
    )
    conv1, bias1, conv2, bias2, dense1, bias3, dense2, bias4 = work.initial.values()
    dense1 = dense1.reshape(64, 16, 7, 7).transpose(2, 3, 1, 0).reshape(784, 64)
    model.set_weights([conv1.transpose(2, 3, 1, 0), bias1, conv2.transpose(2, 3, 1, 0), bias2, dense1, bias3, dense2.T, bias4])
    return model


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    model = build(work)
    model.compile(
        optimizer=keras.optimizers.SGD(work.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=STEPS_PER_EXECUTION,
        jit_compile=False,
    )
    per_epoch = min(work.steps, len(work.labels) // work.batch_size)
    if work.steps % per_epoch:
        raise SystemExit(f"{work.steps} steps are not whole epochs of {per_epoch}")
    inputs = np.ascontiguousarray(work.inputs_nchw.transpose(0, 2, 3, 1))
    order = work.order().ravel()
    before, after = order[: work.warmup * work.batch_size], order[work.warmup * work.batch_size :][: per_epoch * work.batch_size]
    options = {"batch_size": work.batch_size, "shuffle": False, "verbose": 0}
    model.fit(inputs[before], work.labels[before], **options)
    history = model.fit(inputs[after], work.labels[after], epochs=work.steps // per_epoch, callbacks=[Clock(timer)], **options)
    timer.report_mean(work, history.history["loss"][0], per_epoch)


main()
