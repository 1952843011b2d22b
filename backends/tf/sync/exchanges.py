"""Which exchange a job's ranks use: none, MultiWorkerMirroredStrategy's collectives, or our own."""

from __future__ import annotations

from ....core.cluster import Task
from ....core.job import Job
from ....exchange.limits import gpu_error
from ....exchange.mesh.mesh import Mesh
from .collectives import Collectives, MultiWorker, SingleProcess
from .direct import DirectRanks

__all__ = ["join"]


def join(task: Task, job: Job, device: str, *, sequential: bool) -> Collectives:
    """Connect the job's ranks; where none needs TensorFlow's parallel executor, `sequential` asks for the other one.

    Raises RunFailedError after `job.start_timeout`, OSError(EADDRINUSE) where the port was taken.
    """
    if not job.wrapped:
        return SingleProcess(device, sequential=sequential)
    if job.exchange == "direct":
        if device.startswith("GPU"):
            raise gpu_error()
        return DirectRanks(Mesh(task, job.start_timeout, job.node_timeout), device, sequential=sequential)
    return MultiWorker(task, job, device)
