"""What a step would take with the direct exchange: tried by ranks that have trained with another one, when their run is over."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from ....core.cluster import Task
from ....exchange.mesh.beside import Vector, open_beside
from ...timing import DirectTrial
from .calibration import Calibrator
from .collectives import Collectives
from .direct import DirectRanks

__all__ = ["open_trial"]


def open_trial(
    task: Task,
    ranks: Collectives,
    device: str,
    silence_seconds: float,
    sequential: bool,
    make: Callable[[DirectRanks], Calibrator],
) -> DirectTrial:
    """Open a mesh beside the run's own exchange. `make` makes what repeats the components of a step that uses it.

    Gradients of a GPU are not tried: the direct exchange adds up in the host's memory.
    """
    if device.startswith("GPU"):
        return DirectTrial(task.rank, "it is for CPUs")

    def sum_of(vector: tf.Tensor) -> tf.Tensor:
        return ranks.on_replica(ranks.add_in_order, vector)

    traced = ranks.traced(sum_of, tf.TensorSpec([None], tf.float32))

    def add_up(vector: Vector) -> Vector:
        found: Vector = traced(tf.constant(vector)).numpy()
        return found

    mesh, refused = open_beside(task, add_up, silence_seconds)
    if mesh is None:
        return DirectTrial(task.rank, refused)
    return DirectTrial(task.rank, None, mesh, make(DirectRanks(mesh, device, sequential=sequential)).run)
