"""Where do the tasks of a job run? The two layouts that backends choose from: ranks, and parameter servers with workers."""

from __future__ import annotations

from ..core.cluster import TaskSpec
from ..core.job import Job
from ..core.worker_layout import nodes_of_workers

__all__ = ["parameter_server_placement", "ranks_placement"]


def ranks_placement(job: Job) -> list[TaskSpec]:
    """Place sync workers: consecutive ranks on each node, as many as it has workers, all leading."""
    return [TaskSpec("worker", rank, node, leading=True) for rank, node in enumerate(nodes_of_workers(job.workers_by_node))]


def parameter_server_placement(job: Job, *, chief_is_first_ps: bool) -> list[TaskSpec]:
    """Place an async cluster: the chief and the first ps on node 0, further ps round the nodes, workers as the ranks of sync mode.

    With `chief_is_first_ps` the chief holds the first shard itself, and ps tasks are numbered from 1.
    """
    chief = [TaskSpec("chief", 0, 0, leading=True)]
    first = 1 if chief_is_first_ps else 0
    servers = [TaskSpec("ps", index, index % job.nodes, leading=False) for index in range(first, job.ps)]
    workers = [TaskSpec("worker", index, node, leading=False) for index, node in enumerate(nodes_of_workers(job.workers_by_node))]
    return chief + servers + workers
