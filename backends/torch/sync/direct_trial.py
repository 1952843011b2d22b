"""What a step would take with the direct exchange: tried by ranks that have trained with another one, when their run is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ....core.cluster import Task
from ....exchange.mesh.beside import Vector, open_beside
from ...base import StepComponent
from ...timing import Calibrator, DirectTrial
from .collectives import Ranks
from .direct import DirectRanks

__all__ = ["TRIED", "open_trial"]

TRIED: Mapping[StepComponent, str] = {"direct": "communicate", "direct_message": "message", "direct_step": "step"}
"""The components that are tried, and what each is where the direct exchange is the run's own."""


def open_trial(
    task: Task, ranks: Ranks, device: torch.device, silence_seconds: float, make: Callable[[DirectRanks], Calibrator]
) -> DirectTrial:
    """Open a mesh beside the run's own exchange. `make` makes what repeats the components of a step that uses it.

    Gradients of a GPU are not tried: the direct exchange adds up in the host's memory.
    """
    if device.type != "cpu":
        return DirectTrial(task.rank, "it is for CPUs")

    def add_up(vector: Vector) -> Vector:
        ranks.add_up(tensor := torch.from_numpy(vector.copy()))
        found: Vector = tensor.numpy()
        return found

    mesh, refused = open_beside(task, add_up, silence_seconds)
    if mesh is None:
        return DirectTrial(task.rank, refused)
    calibrator = make(DirectRanks(mesh))
    return DirectTrial(task.rank, None, mesh, lambda order: calibrator.run(order, TRIED[order.component]))
