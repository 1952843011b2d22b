"""Processes that something started with ``TF_CONFIG``, as TensorFlow reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...core.errors import UsageError
from ...core.worker_layout import procs_per_node_of
from .base import Membership, Options, endpoint, ports_above

__all__ = ["tf_config"]

_ROLES = ("chief", "worker", "ps")


def tf_config(environment: Mapping[str, str], options: Options) -> Membership | None:
    """Return the place that ``TF_CONFIG`` gives, a JSON object with ``cluster`` (role → list of host:port) and ``task`` (type, index)."""
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
        cluster: dict[str, list[str]] = {role: list(addresses) for role, addresses in config["cluster"].items()}
        own_role, own_index = str(config["task"]["type"]), int(config["task"]["index"])
        everyone = [(role, index, *endpoint(address)) for role in _ROLES for index, address in enumerate(cluster.get(role, []))]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"TF_CONFIG: got {text[:120]!r} ({type(error).__name__}: {error}); needs cluster (role: [host:port, …]) and task (type, index)"
        ) from error
    unknown = sorted(set(cluster) - set(_ROLES))
    if unknown:
        raise UsageError.of("TF_CONFIG", ", ".join(unknown), f"the roles {', '.join(_ROLES)}", _ROLES)
    own = next((entry for entry in everyone if entry[:2] == (own_role, own_index)), None)
    if own is None:
        there = ", ".join(f"{role} {_span(len(cluster[role]))}" for role in _ROLES if cluster.get(role)) or "no task at all"
        raise UsageError(f"TF_CONFIG: this process is to be {own_role} {own_index}, but the cluster has {there}; mend task or cluster")
    hosts = list(dict.fromkeys(host for _, _, host, _ in everyone))
    ranks = [entry for entry in everyone if entry[0] == "worker" or (entry[0] == "chief" and "ps" not in cluster)]
    per_host = {host: [entry for entry in ranks if entry[2] == host] for host in hosts}
    by_node = tuple(len(entries) for entries in per_host.values())
    if 0 in by_node:
        found = ", ".join(f"{host}: {len(entries)}" for host, entries in per_host.items())
        raise UsageError(
            f"TF_CONFIG: every host needs a worker (found {found}); where each task is in a container of its own, have workers alone: "
            "with --mode async and --ps the first of these nodes also get chief and parameter servers"
        )
    ordered = [entry for host in hosts for entry in per_host[host]]
    ports = {f"worker-{number}": port for number, (_, _, _, port) in enumerate(ordered)}
    ports |= {f"{role}-{index}": port for role, index, _, port in everyone if role == "ps" or (role == "chief" and "ps" in cluster)}
    node = hosts.index(own[2])
    here = [entry for entry in everyone if entry[2] == own[2]]
    used = {port for _, _, _, port in everyone}
    control = max(port for _, _, host, port in everyone if host == hosts[0])
    shape: dict[str, int | tuple[int, ...]] = {"nodes": len(hosts), "procs_per_node": procs_per_node_of(by_node)}
    if "ps" in cluster:
        shape["ps"] = len(cluster["ps"])
    return Membership(
        "TF_CONFIG", node, here.index(own), (hosts[0], ports_above(control, used)), shape, len(everyone) - len(hosts), tuple(hosts), ports
    )


def _span(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"
