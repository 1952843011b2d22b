"""What a step would take with the direct exchange: tried by ranks that have trained with another one, when their run is over."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from ....core.cluster import Task
from ....exchange.mesh.beside import Vector, open_beside
from ....exchange.mesh.mesh import Mesh
from ...base import CalibrationOrder, CalibrationResult
from .calibration import Calibrator
from .collectives import Collectives
from .direct import DirectRanks

__all__ = ["DirectTrial"]


class DirectTrial:
    """A mesh beside the run's own exchange, and a step that uses it. `make` makes what repeats the components of such a step.

    Gradients of a GPU are not tried: the direct exchange adds up in the host's memory.
    """

    def __init__(
        self,
        task: Task,
        ranks: Collectives,
        device: str,
        silence_seconds: float,
        sequential: bool,
        make: Callable[[DirectRanks], Calibrator],
    ) -> None:
        self._rank = task.rank
        self._mesh: Mesh | None = None
        self._calibrator: Calibrator | None = None
        if device.startswith("GPU"):
            self._refused: str | None = "it is for CPUs"
            return

        def sum_of(vector: tf.Tensor) -> tf.Tensor:
            return ranks.on_replica(ranks.add_in_order, vector)

        traced = ranks.traced(sum_of, tf.TensorSpec([None], tf.float32))

        def add_up(vector: Vector) -> Vector:
            found: Vector = traced(tf.constant(vector)).numpy()
            return found

        self._mesh, self._refused = open_beside(task, add_up, silence_seconds)
        if self._mesh is not None:
            self._calibrator = make(DirectRanks(self._mesh, device, sequential=sequential))

    def run(self, order: CalibrationOrder) -> CalibrationResult:
        """Repeat a component; see `Session.calibrate`."""
        if self._calibrator is None:
            return CalibrationResult(self._rank, 0, 0.0, refused=self._refused)
        return CalibrationResult(self._rank, *self._calibrator.run(order))

    def close(self) -> None:
        """Close the mesh; a second call does nothing."""
        if self._mesh is not None:
            self._mesh.close()
