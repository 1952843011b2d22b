"""Ranks of a local mesh: tasks, and vectors whose sum depends on the summation order."""

from __future__ import annotations

import secrets

import numpy as np
from processes import free_ports

from crosstrain.core.cluster import Cluster, Task, TaskSpec

ADDRESS = "127.0.0.1"


def tasks_of(ranks, first_port=None, secret=None):
    first_port = first_port or free_ports(ranks)
    placed = tuple(TaskSpec("worker", rank, rank, leading=True) for rank in range(ranks))
    ports = {spec.name: first_port + spec.index for spec in placed}
    cluster = Cluster(placed, (ADDRESS,) * ranks, ports, secret or secrets.token_hex(32))
    return [Task(spec, cluster, threads=1) for spec in placed]


def in_rank_order(vectors):
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total = total + vector
    return total


def vectors_of(ranks, elements, kind, seed):
    """Numbers of very different sizes, so that another order of summation gives another sum."""
    random = np.random.default_rng(seed)
    return [(random.standard_normal(elements) * 10.0 ** random.integers(-6, 6, elements)).astype(kind) for _ in range(ranks)]
