"""Which environment started this process, and which place does it have there? The table of the environments that are recognised.

The first process of a node acts as its agent and starts all of the node's tasks; the first of all is the driver as well. The others
stand by, so that whoever started them sees the run's end and its exit code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.worker_layout import ProcsPerNode
from .base import Environment, Membership, Options
from .kubernetes import indexed_job, kubeflow
from .manual import manual
from .tf_config import tf_config
from .torchrun import torchrun, world_size

__all__ = ["ENVIRONMENTS", "detect"]

ENVIRONMENTS: Sequence[Environment] = (
    Environment("JOB_COMPLETION_INDEX", "an Indexed Job of Kubernetes, whose pods know where to meet", indexed_job),
    Environment("--rendezvous", "a person, who types it on each node", manual),
    Environment("torchrun", "torchrun, by all six of its variables", torchrun),
    Environment("PET_NNODES", "Kubeflow's TrainJob or PyTorchJob, a node a pod", kubeflow),
    Environment("TF_CONFIG", "whatever sets TF_CONFIG, as TensorFlow reads it", tf_config),
    Environment("WORLD_SIZE", "whatever sets the variables that torch reads", world_size),
)
"""In the order in which they are asked; the first that knows this process has the say."""


def detect(
    environment: Mapping[str, str], rendezvous: str | None, node_rank: int | None, nodes: int | None, procs_per_node: ProcsPerNode = 1
) -> Membership | None:
    """Return this process's place, or None where it was started by a person alone, on one machine.

    `nodes` is None where only the driver knows how many there are; `procs_per_node` says on how many nodes WORLD_SIZE processes are. Raises
    UsageError for half a contract or one that does not make sense.
    """
    options = Options(rendezvous, node_rank, nodes, procs_per_node)
    found = (one.membership(environment, options) for one in ENVIRONMENTS)
    return next((membership for membership in found if membership is not None), None)
