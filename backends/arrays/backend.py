"""A backend from what a framework computes with numpy arrays: gradients, and the results of a pass that trains nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ...core.cluster import Task, TaskSpec
from ...core.errors import UsageError
from ...core.job import Job
from ...core.liveness.startup_watchdog import startup_phase
from ...data.base import Dataset
from ...exchange.parameter_server.server import ShardServer
from ...exchange.parameter_server.shards import UpdateRule, Vector
from ...models.base import ModelSpec
from ..base import Availability, Server, Session, make_sampler
from ..capabilities import Capabilities
from ..parameter_server.session import AsyncSession
from ..parameter_server.worker import Worker
from ..placement import parameter_server_placement, ranks_placement
from ..vectors.vector_rule import VectorRule
from .computation import ArrayComputation
from .model import ArrayModel
from .ranks import Ranks, join_ranks
from .session import ArraySession

__all__ = ["ArrayBackend"]


class ArrayBackend(ABC):
    """A `Backend` for both modes; a subclass declares `name` and `capabilities`, and says how a model is computed.

    What it carries out of itself, and a subclass may declare: both modes and both exchanges (sums of sync ranks by the mesh, unless it
    brings its own), augmentation, micro-batches, clipping, moving averages of the weights, and that lost workers rejoin. It takes data of
    any columns, and no model that translates; fp16 needs a scaling of the loss, which it has not.
    """

    name: str
    capabilities: Capabilities

    @abstractmethod
    def probe(self) -> Availability:
        """See `Backend.probe`."""

    @abstractmethod
    def model(self, task: Task, job: Job, spec: ModelSpec) -> ArrayModel:
        """Return what computes a model in a task that trains: a sync rank or an async worker, with `task.threads` threads."""

    def rule(self, job: Job, parameters: Vector) -> UpdateRule:
        """Bind the job's update rule to a vector; the formulas in numpy, unless a subclass has faster ones. See `MakeRule`."""
        return VectorRule(job, parameters)

    def ranks(self, task: Task, job: Job) -> Ranks:
        """Join the other ranks of a sync run, by the mesh unless a subclass has collectives of its own."""
        return join_ranks(task, job)

    def placement(self, job: Job) -> list[TaskSpec]:
        """Sync: one rank a worker. Async: the chief is the first parameter server."""
        return ranks_placement(job) if job.mode == "sync" else parameter_server_placement(job, chief_is_first_ps=True)

    @abstractmethod
    def preload(self, job: Job) -> None:
        """See `Backend.preload`."""

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up; the task's role decides what comes back. Raises UsageError for what `ArrayBackend` has not."""
        if model.objective.translation is not None:
            raise UsageError(f"model: {job.model!r} translates, which backend {self.name} does not do.")
        if job.precision == "fp16":
            raise UsageError(f"precision: got 'fp16', for which backend {self.name} would have to scale the loss; use bf16 or fp32.")
        role = task.placed.role
        if role == "chief":
            return AsyncSession(task, job, model, data, self.rule)
        if role == "ps":
            return ShardServer(task, job, model, self.rule)
        computed = self.model(task, job, model)
        if job.mode == "async":
            sampler = make_sampler(job, data, model.objective.weight)
            return Worker(task, job, model, sampler, ArrayComputation(job, model, data, sampler, computed))
        startup_phase("joining the cluster", for_others=True)
        return ArraySession(task, job, model, data, computed, self.rule, self.ranks(task, job))
