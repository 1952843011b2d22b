"""What would help? Settings that the product has, each with the effect that this run's figures lead to expect.

Every estimate changes one thing and keeps the rest as it was measured. A figure is called ``about`` where all that it rests on was
measured, and ``at most`` or ``at least`` where something was not and could only lessen or add to the effect. Where the run does not tell
the other end of a change, there is no figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..core.units import Cadence
from .explain import NOTABLE, Explanation
from .explain_links import busiest
from .explain_shares import Worker, idle_fraction

__all__ = ["Advice", "advise"]

WORTH_SAYING = 1.1
"""Least speed-up for which a setting is named."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting: the option as it would be typed, and why.

    `speedup`: examples per second over those of this run (for evaluating and saving: this run's time over that with the setting); None
    where the run's figures cannot tell. `caution`: what else it changes.
    """

    option: str
    reason: str
    speedup: float | None
    bound: Literal["about", "at least", "at most"] | None
    caution: str | None = None


UPDATES_TOGETHER = "updates are then made together, so that learning rate and accuracy need another look"

LEARNS_OTHERWISE = "each update then sees twice the examples, so that learning rate and accuracy need another look (--scale-lr)"


def advise(explanation: Explanation) -> list[Advice]:
    """Return what would help against each candidate of the verdict, the largest certain effect first; empty where nothing is known to."""
    found: dict[str, Advice] = {}
    for part in explanation.candidates:
        for advice in _BY_PART[part](explanation):
            if advice.speedup is None or advice.speedup >= WORTH_SAYING:
                found.setdefault(advice.option, advice)
    return sorted(found.values(), key=lambda advice: (advice.speedup is None, advice.bound == "at most", -(advice.speedup or 0.0)))


# What a step would take -----------------------------------------------------------------------------------------------


def _step_seconds(explanation: Explanation) -> float:
    """Return the mean time of a step over the workers: in sync mode that of each of them."""
    workers = explanation.facts.workers
    return sum(worker.step_seconds for worker in workers) / len(workers)


def _growing(explanation: Explanation, worker: Worker) -> float | None:
    """Return the part of a worker's own seconds that grows with its batch: data, and of computing what half a batch saves, twice.

    None where half a batch was not measured.
    """
    entries = (explanation.facts.calibration or {}).get("workers", ())
    entry = next((entry for entry in entries if entry["worker"] == worker.worker), None)
    if entry is None or not entry["half_compute_seconds"] or not entry["compute_seconds"]:
        return None
    calibration: Mapping[str, Any] = explanation.facts.calibration or {}
    left_out = 1.0 - float(calibration["half_batch_size"]) / float(calibration["batch_size"])
    saved = 1.0 - float(entry["half_compute_seconds"]) / float(entry["compute_seconds"])
    growing = min(1.0, max(0.0, saved / left_out))
    return worker.data_seconds + worker.compute_seconds * growing


def _larger_batch(explanation: Explanation) -> Iterator[Advice]:
    """Twice the batch: what does not grow with it is paid half as often; for an example the time between commands stays what it was."""
    facts = explanation.facts
    if facts.shares is None:
        return
    slowest = facts.shares.slowest
    sync = facts.summary["mode"] == "sync"
    grown = [_growing(explanation, worker) for worker in ([slowest] if sync else facts.workers)]
    known = [value for value in grown if value is not None]
    if len(known) < len(grown) or not known:
        return
    before, idle = _step_seconds(explanation), idle_fraction(facts.summary)
    steps = 2 * before / (before + sum(known) / len(known))
    speedup = 1.0 / (idle + (1.0 - idle) / steps)
    option = "--batch-size" if facts.job.get("global_batch_size") is None else "--global-batch-size"
    now = facts.summary["batch_size"] if option == "--batch-size" else facts.summary["global_batch_size"]
    exchanging = facts.shares.step["network"] > 0
    once = "the exchange is" if exchanging else "what a step costs besides its examples is"
    yield Advice(f"{option} {2 * now}", f"{once} paid once for twice the examples", speedup, "about", LEARNS_OTHERWISE)


# Network --------------------------------------------------------------------------------------------------------------


def _network(explanation: Explanation) -> Iterator[Advice]:
    yield from _larger_batch(explanation)
    yield from _one_worker(explanation)
    if len(set(explanation.facts.job.get("cores_per_node") or ())) > 1:
        yield from _peers(explanation)  # an exchange takes as long as its slowest node
    if explanation.network_cause == "link":
        yield from _wider_link(explanation)
        if explanation.facts.summary["mode"] == "async":
            yield from _spread_servers(explanation)


def _one_worker(explanation: Explanation) -> Iterator[Advice]:
    """The quickest worker by itself, without any exchange; its computing was measured without one.

    It was measured while the others computed too: where they shared its cores, it is quicker alone. So it is where it fetched and sent
    for each step, of which a process alone makes many in one go. A batch that was given for all workers is then its own, and computing
    grows as from half a batch to a whole one.
    """
    facts = explanation.facts
    summary, workers = facts.summary, facts.workers
    count = summary["workers"]
    if count == 1 or summary["nodes"] not in (1, count):
        return
    quickest = min(workers, key=lambda worker: worker.own_seconds)
    together = sum(1.0 / worker.step_seconds for worker in workers)
    if facts.job.get("global_batch_size") is None:
        alone, caution = 1.0 / quickest.own_seconds, None if summary["mode"] == "async" else "the global batch is then that of one task"
    else:
        growing, caution = _growing(explanation, quickest), None
        if growing is None:
            return
        alone = count / (quickest.own_seconds + (count - 1) * growing)
    shared = summary["nodes"] == 1 or (summary["nodes_sharing_cores"] or 1) > 1
    one = "one task" if summary["nodes"] == 1 else "one node"
    reason = f"{one} computes by itself faster than all of these with their exchange{', and has the cores to itself' if shared else ''}"
    option = "--procs-per-node 1" if summary["nodes"] == 1 else _only_nodes(explanation, [quickest.node])
    mode = " --mode sync" if summary["mode"] == "async" else ""
    yield Advice(f"{option}{mode}", reason, alone / together, "at least" if shared or mode else "about", caution)


def _only_nodes(explanation: Explanation, kept: Sequence[int]) -> str:
    """Return the options for a run on some of its nodes, with the CPU limits that these have."""
    limits = explanation.facts.job.get("cores_per_node") or []
    option = f"--nodes {len(kept)}"
    return option if len(limits) <= 1 else f"{option} --cores-per-node {','.join(f'{limits[node]:g}' for node in kept)}"


def _wider_link(explanation: Explanation) -> Iterator[Advice]:
    link, facts = busiest(explanation.facts.links), explanation.facts
    if link is None or link.limit_source != "bandwidth" or facts.shares is None:
        return
    saved = facts.shares.step["network"] / 2
    yield Advice(f"--bandwidth {_doubled(facts.job['bandwidth'])}", "the bytes pass in half the time", 1.0 / (1.0 - saved), "at most")


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
    facts, link = explanation.facts, busiest(explanation.facts.links)
    if facts.calibration is None or link is None or link.limit_bytes_per_second is None:
        return
    nodes, workers, servers = (facts.summary[name] for name in ("nodes", "workers", "parameter_servers"))
    whole = link.limit_bytes_per_second / facts.calibration["payload_bytes"]
    now = sum(1.0 / worker.step_seconds for worker in facts.workers)
    alone = sum(1.0 / worker.own_seconds for worker in facts.workers)
    if servers < nodes:
        updates = min(alone, whole * nodes / ((nodes - 1) / (servers + 1) + servers / (servers + 1)))
        yield Advice(f"--ps {servers + 1}", "the parameters' way is then shared by more links", updates / now, "at most")
    if workers > 1:
        updates = min(alone, whole * workers / (2 * (workers - 1) / workers))
        yield Advice("--mode sync", "a ring of all-reduce burdens all links alike", updates / now, "at most", UPDATES_TOGETHER)


# A slow node ----------------------------------------------------------------------------------------------------------


def _peers(explanation: Explanation) -> Iterator[Advice]:
    yield from _even_cores(explanation)
    facts = explanation.facts
    if facts.shares is None or facts.summary["mode"] == "async":
        return
    nodes, step = facts.summary["nodes"], facts.shares.step
    if nodes > 1 and explanation.slow_node is not None and facts.job.get("global_batch_size") is None:
        speedup = (nodes - 1) / nodes / (1.0 - step["peers"])
        what = f"without node {explanation.slow_node}, the others wait for nobody"
        option = _only_nodes(explanation, [node for node in range(nodes) if node != explanation.slow_node])
        yield Advice(option, what, speedup, "at least", "the global batch is then smaller")
    reason, caution = "each node goes on at its own pace", "updates are then made one by one on parameters that others change meanwhile"
    if step["network"] < NOTABLE:
        alone = sum(worker.step_seconds / worker.own_seconds for worker in facts.workers) / len(facts.workers)
        yield Advice("--mode async", reason, alone, "at most", caution)
    else:
        unknown = f"{reason}; what an exchange with a parameter server takes, this run does not tell"
        yield Advice("--mode async", unknown, None, None, caution)


def _even_cores(explanation: Explanation) -> Iterator[Advice]:
    """The same cores, evenly shared among the nodes: what the cores computed takes inversely as long, and waiting stays what it was.

    How much of its time a node computed, own work and exchange alike, is the part that it used of the cores it may use; all of it, where it
    had none to spare. In sync mode the node with the fewest cores decides; in async mode each worker's own work goes with its node, and its
    exchange with that of the servers.
    """
    facts = explanation.facts
    cores, used = facts.job.get("cores_per_node"), [view.cpu_fraction for view in explanation.nodes]
    if not cores or len(set(cores)) == 1 or None in used:
        return
    even = sum(cores) / len(cores)
    computing = [1.0 if (part or 0.0) > NEARLY_ALL else part or 0.0 for part in used]
    longer = [1.0 + part * (mine / even - 1.0) for mine, part in zip(cores, computing, strict=True)]
    now = [worker.step_seconds for worker in facts.workers]
    if facts.summary["mode"] == "sync":
        own = max(worker.own_seconds * cores[worker.node] / even for worker in facts.workers)
        speedup = max(now) / max(own, max(now) * longer[cores.index(min(cores))])
    else:
        serving = max(longer[: facts.summary["parameter_servers"]])
        then = [worker.own_seconds * longer[worker.node] + worker.communicate_seconds * serving for worker in facts.workers]
        speedup = sum(1.0 / seconds for seconds in then) / sum(1.0 / seconds for seconds in now)
    yield Advice(f"--cores-per-node {even:g}", "the same cores, shared evenly", speedup, "about")


# Computing and data ---------------------------------------------------------------------------------------------------


def _compute(explanation: Explanation) -> Iterator[Advice]:
    yield from _larger_batch(explanation)
    yield from _more_cores(explanation)
    facts = explanation.facts
    if facts.summary["precision"] == "fp32":
        share = facts.shares.step["compute"] if facts.shares else 0.0
        reason = f"touches computing alone, {share:.0%} of each step; by how much, depends on the processor"
        yield Advice("--precision bf16", reason, None, None, "convolutions and products are then rounded to 8 bits")


def _data(explanation: Explanation) -> Iterator[Advice]:
    facts = explanation.facts
    if facts.shares is not None and facts.job.get("augment", "none") != "none":
        speedup = 1.0 / max(0.01, 1.0 - facts.shares.step["data"])
        reason = "images are then used as they are, and normalised once where they fit into memory"
        yield Advice("--augment none", reason, speedup, "at most", "the model then learns from fewer images")
    yield from _more_cores(explanation)


def _more_cores(explanation: Explanation) -> Iterator[Advice]:
    """Cores that the machine has and the nodes may not use, or that a task may use and was told not to.

    What threads the product chose by itself stands: for small steps one is quicker than several.
    """
    facts, shares = explanation.facts, explanation.facts.shares
    if shares is None:
        return
    work = shares.step["compute"] + shares.step["data"] + shares.step["peers"]
    cores = facts.job.get("cores_per_node")
    busiest_cpu = max((view.cpu_fraction or 0.0 for view in explanation.nodes), default=0.0)
    if cores and len(set(cores)) == 1 and busiest_cpu > NEARLY_ALL and facts.env:
        spare = (facts.env[0]["cores_logical"] or 0) / facts.summary["nodes"] / cores[0]
        if spare > 1:
            speedup = 1.0 / (1.0 - work * (1.0 - 1.0 / spare))
            yield Advice(f"--cores-per-node {cores[0] * spare:g}", f"each node uses {busiest_cpu:.0%} of what it may", speedup, "at most")
    threads, first = facts.job.get("threads"), explanation.nodes[0]
    free = int((first.cores_available or 0.0) * facts.summary["nodes"] / facts.summary["workers"])
    if threads is not None and (facts.summary["nodes_sharing_cores"] or 1) == 1 and first.limit == "CPU" and free > threads:
        speedup = 1.0 / (1.0 - work * (1.0 - threads / free))
        yield Advice(f"--threads {free}", f"each task computes with {threads} of the {free} cores it has", speedup, "at most")


NEARLY_ALL = 0.85
"""A node that uses this much of its cores has none to spare: the rest is waiting between threads and tasks."""


# Beside training ------------------------------------------------------------------------------------------------------


def _evaluating(explanation: Explanation) -> Iterator[Advice]:
    facts = explanation.facts
    yield from _less_often("--eval-every", facts.job["eval_every"], facts.summary["eval_seconds"], explanation)


def _saving(explanation: Explanation) -> Iterator[Advice]:
    facts = explanation.facts
    if facts.job["checkpoint_every"] is not None:
        yield from _less_often("--checkpoint-every", facts.job["checkpoint_every"], facts.summary["checkpoint_seconds"], explanation)


def _less_often(option: str, cadence: str, seconds: float, explanation: Explanation) -> Iterator[Advice]:
    run_seconds = explanation.facts.summary["run_seconds"]
    every = Cadence.parse(cadence)
    if every.unit == "end" or run_seconds <= seconds / 2:
        return
    unit = {"epochs": "epochs", "steps": "steps", "seconds": "s"}[every.unit]
    doubled = f"{option} {2 * every.amount:g}{unit}"
    yield Advice(doubled, f"half of it, {seconds / 2:.2f} s, would not take place", run_seconds / (run_seconds - seconds / 2), "about")


def _other(explanation: Explanation) -> Iterator[Advice]:
    facts = explanation.facts
    given = facts.job.get("steps_per_call")
    if given is not None and facts.summary["run_seconds"]:
        reason = f"with {given} steps a call, much of the time passes between calls"
        yield Advice("leave --steps-per-call out", reason, 1.0 / max(0.01, 1.0 - explanation.run_fractions["other"]), "at most")


_BY_PART: Mapping[str, Callable[[Explanation], Iterator[Advice]]] = {
    "network": _network,
    "peers": _peers,
    "compute": _compute,
    "data": _data,
    "evaluating": _evaluating,
    "saving": _saving,
    "other": _other,
}
