"""The resources that a run requests of a Ray cluster, and the description of a shortage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Bundle = Mapping[str, float]  # Ray's resources of one node by name: ``CPU``, ``GPU``
PLACE_ON_EACH = "a place on each of its nodes"  # what a request for the whole cluster waits for
SLIVER = 0.001  # amount of each node's own resource, of which it has 1; Ray's resolution is a tenth of this


def bundles_everywhere(nodes: Sequence[Mapping[str, Any]]) -> list[Bundle]:
    """Return each living CPU node's own resource (its address), which nothing else uses."""
    usable = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    return [{f"node:{node['NodeManagerAddress']}": SLIVER} for node in sorted(usable, key=lambda node: str(node["NodeManagerAddress"]))]


def bundles_for_workers(
    workers_by_node: Sequence[int], threads: int | None, device: str, nodes: Sequence[Mapping[str, Any]]
) -> list[Bundle]:
    """Return each node's resources: a CPU per worker thread (default 1), and a GPU per worker."""
    gpus = device == "gpu" or (device == "auto" and any(node["Alive"] and node["Resources"].get("GPU") for node in nodes))
    return [{"CPU": workers * (threads or 1), **({"GPU": workers} if gpus else {})} for workers in workers_by_node]


def describe_bundles(bundles: Sequence[Bundle]) -> str:
    """Describe the request: ``2 nodes with 1 CPU each and 1 with 2 CPUs``."""
    counted = Counter(tuple(bundle.items()) for bundle in bundles)
    parts = []
    for place, (bundle, count) in enumerate(counted.items()):
        resources = " and ".join(f"{value:g} {name}{'' if value == 1 else 's'}" for name, value in bundle)
        noun = ("node" if count == 1 else "nodes") if place == 0 else ""
        parts.append(" ".join(part for part in (str(count), noun, "with", resources, "each" if count > 1 else "") if part))
    return " and ".join(parts)


def shortage(nodes: Sequence[Mapping[str, Any]], bundles: Sequence[Bundle]) -> str:
    """Describe the missing resources; `nodes` is `ray.nodes()`, which includes dead ones."""
    alive = [node for node in nodes if node["Alive"]]
    largest = max(bundles, key=lambda bundle: sum(bundle.values()))
    fit = sum(all(node["Resources"].get(name, 0) >= value for name, value in largest.items()) for node in alive)
    if not alive:
        has = "no node yet"
    else:
        has = f"{len(alive)} node{'' if len(alive) == 1 else 's'}"
        if fit < len(bundles):
            has += f", {fit} of them large enough"
        else:
            has += f", {f'{fit} of them ' if len(alive) > 1 else ''}large enough, but others use {'them' if len(alive) > 1 else 'it'}"
    return f"{describe_bundles(bundles)}; the cluster has {has}"
