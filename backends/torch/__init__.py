"""How does torch carry out a job? DistributedDataParallel in sync mode, our own parameter server on plain TCP in async mode.

Importing this package imports no torch: the driver asks it for `placement` and `modes` only.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

from ...core.cluster import Placed, Task
from ...core.job import Job
from ...data.base import Dataset
from ...models.base import ModelSpec
from ..base import Availability, Server, Session, parameter_server_placement, ranks_placement
from ..export import Export
from .export_formats import EXPORT_FORMATS

__all__ = ["BACKEND", "TorchBackend"]

INSTALL = "pip install 'crosstrain[torch]'"


class TorchBackend:
    """The backend called ``torch``."""

    name = "torch"
    modes: frozenset[Literal["sync", "async"]] = frozenset({"sync", "async"})
    export_formats = EXPORT_FORMATS

    def probe(self) -> Availability:
        """Import torch and list its devices."""
        if importlib.util.find_spec("torch") is None:
            return Availability(self.name, None, problem="torch is not installed", hint=INSTALL)
        from .runtime import availability

        return availability(self.name, INSTALL)

    def placement(self, job: Job) -> list[Placed]:
        """Sync: one rank a worker. Async: the chief is the first parameter server."""
        return ranks_placement(job) if job.mode == "sync" else parameter_server_placement(job, chief_is_first_ps=True)

    def preload(self, job: Job) -> None:
        """Import torch, and the part of this package that every worker of the job needs."""
        if job.mode == "sync":
            from .sync import session  # noqa: F401
        else:
            from .asynchronous import worker  # noqa: F401

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up; the task's role decides what comes back."""
        from .runtime import prepare

        device = prepare(task, job)
        if job.mode == "sync":
            from .sync.session import SyncSession

            return SyncSession(task, job, model, data, device)
        if task.placed.role == "chief":
            from .asynchronous.session import AsyncSession

            return AsyncSession(task, job, model, data)
        if task.placed.role == "ps":
            from .asynchronous.server import ShardServer

            return ShardServer(task, job, model)
        from .asynchronous.worker import Worker

        return Worker(task, job, model, data, device)

    def export(self, request: Export) -> None:
        """Write a trained model in one of the formats; see `Exporter`."""
        from .export import export

        export(request)


BACKEND = TorchBackend()
