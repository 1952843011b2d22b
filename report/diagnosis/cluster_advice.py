"""Advice to change the cluster, against time spent communicating and waiting: nodes, links, cores, parameter servers, the mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .batch_size_advice import Advice, batch_dependent_seconds, larger_batch
from .evidence import Evidence
from .links import busiest
from .time_shares import Worker
from .verdict import NEARLY_ALL, NOTABLE, Explanation

__all__ = ["network", "peers"]

_UPDATES_TOGETHER = "updates are then made together, so tune the learning rate again and check the quality"


# Network --------------------------------------------------------------------------------------------------------------


def network(explanation: Explanation) -> Iterator[Advice]:
    """Recommend against an exchange that takes long."""
    yield from larger_batch(explanation)
    yield from _direct_exchange(explanation)
    yield from _one_worker(explanation)
    if len(set(explanation.evidence.job.get("cores_per_node") or ())) > 1:
        yield from _slow_node(explanation)  # an exchange takes as long as its slowest node
    if explanation.network_cause == "link":
        yield from _wider_link(explanation)
        if explanation.evidence.summary["mode"] == "async":
            yield from _spread_servers(explanation)


def _direct_exchange(explanation: Explanation) -> Iterator[Advice]:
    """A whole step with it was calibrated; what lies between commands stays."""
    costs = explanation.exchange_costs
    if costs is not None and costs.direct_exchange_speedup_estimate is not None:
        yield Advice("--exchange direct", "a step with it was tried after the run", costs.direct_exchange_speedup_estimate, "about")


def _one_worker(explanation: Explanation) -> Iterator[Advice]:
    """The quickest worker by itself, without any exchange; its computing was measured without one.

    It was measured while the others computed too: where they shared its cores, it is quicker alone. What its steps took beyond its own work
    and the exchange by itself is overhead that it may have alone, too. A batch that was given for all workers is then its own, and
    computing grows as from half a batch to a whole one. A lower bound is below by as much as what was calibrated varied.
    """
    evidence = explanation.evidence
    summary, workers = evidence.summary, evidence.workers
    count = summary["workers"]
    if count == 1 or summary["nodes"] not in (1, count):
        return
    quickest = min(workers, key=lambda worker: worker.own_seconds)
    together, overhead = sum(1.0 / worker.step_seconds for worker in workers), _overhead(evidence, quickest)
    if evidence.job.get("global_batch_size") is None:
        alone = 1.0 / (quickest.own_seconds + overhead)
        caution = None if summary["mode"] == "async" else "the global batch is then one worker's"
    else:
        more, caution = batch_dependent_seconds(explanation, quickest), None
        if more is None:
            return
        alone = count / (quickest.own_seconds + overhead + (count - 1) * more)
    shared = summary["nodes"] == 1 or (summary["nodes_sharing_cores"] or 1) > 1
    one = "one task" if summary["nodes"] == 1 else "one node"
    reason = f"{one} alone: no communication{', and no sharing of cores' * shared}"
    option = "--procs-per-node 1" if summary["nodes"] == 1 else _only_nodes(explanation, [quickest.node])
    mode = " --mode sync" if summary["mode"] == "async" else ""
    if shared or mode:
        yield Advice(f"{option}{mode}", reason, alone / together / (1.0 + quickest.spread), "at least", caution)
    else:
        yield Advice(option, reason, alone / together, "about", caution)


def _overhead(evidence: Evidence, worker: Worker) -> float:
    """Return the seconds of a worker's step beyond its parts, each by itself; 0 where its exchange was not calibrated."""
    entries = (evidence.calibration or {}).get("workers", ())
    exchange = next((entry["communicate_seconds"] for entry in entries if entry["worker"] == worker.worker), None)
    return 0.0 if exchange is None else max(0.0, worker.communicate_seconds - exchange)


def _only_nodes(explanation: Explanation, kept: Sequence[int]) -> str:
    """Return the options for a run on some of its nodes, with the CPU limits that these have."""
    limits = explanation.evidence.job.get("cores_per_node") or []
    option = f"--nodes {len(kept)}"
    return option if len(limits) <= 1 else f"{option} --cores-per-node {','.join(f'{limits[node]:g}' for node in kept)}"


def _wider_link(explanation: Explanation) -> Iterator[Advice]:
    link, evidence = busiest(explanation.evidence.links), explanation.evidence
    if link is None or link.limit_source != "bandwidth" or evidence.shares is None:
        return
    saved = evidence.shares.step["network"] / 2
    yield Advice(f"--bandwidth {_doubled(evidence.job['bandwidth'])}", "the bytes pass in half the time", 1.0 / (1.0 - saved), "at most")


def _doubled(bandwidth: str) -> str:
    number = re.match(r"[\d.]+", bandwidth.strip())
    return f"{_plain(2 * float(number[0]))}{bandwidth.strip()[number.end() :].strip()}" if number else bandwidth


def _plain(value: float) -> str:
    """Write a number without an exponent, which no unit may follow."""
    return f"{value:f}".rstrip("0").rstrip(".")


def _spread_servers(explanation: Explanation) -> Iterator[Advice]:
    """Async: as many updates as the links would carry with one parameter server more, and with all-reduce instead.

    With n nodes of as many workers and p servers on p of them, a server's node carries (n − 1) / p of the parameters for its clients and
    (p − 1) / p for its own worker, in each direction, while every node's worker makes an update; a ring of w workers carries 2 (w − 1) / w
    of them. What the workers do by themselves bounds both.
    """
    evidence, link = explanation.evidence, busiest(explanation.evidence.links)
    if evidence.calibration is None or link is None or link.limit_bytes_per_second is None:
        return
    nodes, workers, servers = (evidence.summary[name] for name in ("nodes", "workers", "parameter_servers"))
    whole = link.limit_bytes_per_second / evidence.calibration["payload_bytes"]
    now = sum(1.0 / worker.step_seconds for worker in evidence.workers)
    alone = sum(1.0 / worker.own_seconds for worker in evidence.workers)
    if servers < nodes:
        updates = min(alone, whole * nodes / ((nodes - 1) / (servers + 1) + servers / (servers + 1)))
        yield Advice(f"--ps {servers + 1}", "the parameters' way is then shared by more links", updates / now, "at most")
    if workers > 1:
        updates = min(alone, whole * workers / (2 * (workers - 1) / workers))
        yield Advice("--mode sync", "a ring of all-reduce burdens all links alike", updates / now, "at most", _UPDATES_TOGETHER)


# A slow node ----------------------------------------------------------------------------------------------------------


def peers(explanation: Explanation) -> Iterator[Advice]:
    """Recommend against a slow node, and in sync mode against an exchange in which others wait for it."""
    yield from _slow_node(explanation)
    if explanation.evidence.summary["mode"] == "sync" and explanation.step_fractions["network"] >= NOTABLE:
        yield from larger_batch(explanation)
        yield from _one_worker(explanation)


def _slow_node(explanation: Explanation) -> Iterator[Advice]:
    yield from _even_cores(explanation)
    evidence = explanation.evidence
    if evidence.shares is None or evidence.summary["mode"] == "async":
        return
    nodes, step = evidence.summary["nodes"], evidence.shares.step
    if nodes > 1 and explanation.slow_node is not None and evidence.job.get("global_batch_size") is None:
        speedup = (nodes - 1) / nodes / (1.0 - step["peers"])
        what = f"without node {explanation.slow_node}, the others wait for nobody"
        option = _only_nodes(explanation, [node for node in range(nodes) if node != explanation.slow_node])
        yield Advice(option, what, speedup, "at least", "the global batch is then smaller")
    reason, caution = "each node continues at its own pace", "updates are then made one by one on parameters that others change meanwhile"
    if step["network"] < NOTABLE:
        alone = sum(worker.step_seconds / worker.own_seconds for worker in evidence.workers) / len(evidence.workers)
        yield Advice("--mode async", reason, alone, "at most", caution)
    else:
        unknown = f"{reason}; what an exchange with a parameter server takes, this run does not tell"
        yield Advice("--mode async", unknown, None, None, caution)


def _even_cores(explanation: Explanation) -> Iterator[Advice]:
    """The same cores, evenly shared among the nodes: what the cores computed takes inversely as long, and waiting stays what it was.

    How much of its time a node computed, own work and exchange alike, is the fraction that it used of the cores it may use; all of it,
    where it had none to spare. In sync mode the node with the fewest cores decides; in async mode each worker's own work goes with its
    node, and its exchange with that of the servers.
    """
    evidence = explanation.evidence
    cores, used = evidence.job.get("cores_per_node"), [view.cpu_fraction for view in explanation.nodes]
    if not cores or len(set(cores)) == 1 or None in used:
        return
    even = sum(cores) / len(cores)
    computing = [1.0 if (fraction or 0.0) > NEARLY_ALL else fraction or 0.0 for fraction in used]
    longer = [1.0 + busy * (mine / even - 1.0) for mine, busy in zip(cores, computing, strict=True)]
    now = [worker.step_seconds for worker in evidence.workers]
    if evidence.summary["mode"] == "sync":
        own = max(worker.own_seconds * cores[worker.node] / even for worker in evidence.workers)
        speedup = max(now) / max(own, max(now) * longer[cores.index(min(cores))])
    else:
        serving = max(longer[: evidence.summary["parameter_servers"]])
        then = [worker.own_seconds * longer[worker.node] + worker.communicate_seconds * serving for worker in evidence.workers]
        speedup = sum(1.0 / seconds for seconds in then) / sum(1.0 / seconds for seconds in now)
    yield Advice(f"--cores-per-node {even:g}", "the same cores, shared evenly", speedup, "about")
