"""Processes in the pods of a Kubernetes Job: an Indexed Job's index, or the variables that Kubeflow's operators set for torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import UsageError
from .base import Membership, Options, endpoint
from .manual import host_and_port

__all__ = ["indexed_job", "kubeflow"]

INDEX = "JOB_COMPLETION_INDEX"

_KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_PROCESSES = "PET_NPROC_PER_NODE"
_BY_DEVICES = ("auto", "cpu", "gpu")
"""Numbers of processes that torchrun would find out; here the job says how many there are."""


def indexed_job(environment: Mapping[str, str], options: Options) -> Membership | None:
    """Return the place of a pod of an Indexed Job, whose index is its node; None for a pod that is told of no others to meet.

    Such a Job may be an array of runs, each on its own: what makes it one run is a rendezvous, the host name that a headless Service gives
    to pod 0. JobSet and Kubeflow's TrainJob start such Jobs too.
    """
    index = environment.get(INDEX, "").strip()
    if not index or options.rendezvous is None or options.node_rank is not None:
        return None
    nodes = options.nodes
    if not index.isdecimal() or (nodes is not None and int(index) >= nodes):
        raise UsageError.of(INDEX, index, "a whole number" if nodes is None else f"0 to {nodes - 1} (--nodes {nodes})")
    shape = {} if nodes is None else {"nodes": nodes}
    return Membership(INDEX, int(index), 0, host_and_port("--rendezvous", options.rendezvous), shape, starts_again=True)


def kubeflow(environment: Mapping[str, str], options: Options) -> Membership | None:
    """Return the place of a pod of a TrainJob or a PyTorchJob, of which each is a node; None where not all of its variables are there.

    They are what torchrun would read in place of its options. torchrun itself, started by them, sets its own for the processes of a node.
    """
    given = {name: environment[name].strip() for name in (*_KUBEFLOW, _PROCESSES) if environment.get(name, "").strip()}
    if any(name not in given for name in _KUBEFLOW):
        return None
    nodes, node = (_number(given, name) for name in ("PET_NNODES", "PET_NODE_RANK"))
    if not 0 <= node < nodes:
        raise UsageError(f"PET_NODE_RANK {node} and PET_NNODES {nodes} do not fit; nodes run from 0 to PET_NNODES - 1")
    if nodes == 1:
        return None
    shape = {"nodes": nodes}
    if given.get(_PROCESSES, "auto") not in _BY_DEVICES:
        shape["procs_per_node"] = _number(given, _PROCESSES)
    try:
        host, port = endpoint(f"{given['PET_MASTER_ADDR']}:{given['PET_MASTER_PORT']}")
    except ValueError as error:
        raise UsageError.of("PET_MASTER_PORT", given["PET_MASTER_PORT"], "a port from 1 to 65535") from error
    return Membership("Kubeflow (PET_NNODES)", node, 0, (host, (port,)), shape, starts_again=True)


def _number(given: Mapping[str, str], name: str) -> int:
    if not given[name].isdecimal():
        allowed = "one number of nodes, not a range, as a run does not change it by itself" if ":" in given[name] else "a whole number"
        raise UsageError.of(name, given[name], allowed)
    return int(given[name])
