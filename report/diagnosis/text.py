"""An explanation in plain words: the verdict and why, a line a node, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ...records.summary.lost_cpu import LEAST_SECONDS
from ...records.text.many_nodes import MOST_NODES_SHOWN, ends_of
from ...records.text.numbers import UNKNOWN, bytes_text, memory_basis, number_text
from ..catalog.divergence import diverged_text
from .batch_size_advice import Advice
from .exchange_costs import exchange_text, hidden_exchange
from .headline import headline
from .links import busiest
from .padding import padding_text
from .time_shares import BESIDE_TRAINING, SELDOM
from .verdict import Explanation, NodeView
from .words import NAMES, percent

__all__ = ["notes", "page"]

NOT_CALIBRATED = (
    "This run has no calibration (--no-calibrate, or it did not complete), so the components of its steps are unknown. "
    "Only figures that were recorded during the run are shown."
)


MIXED = (
    "An older version of this program recorded step times over all parts of the run, so those of the calibrated part are unknown. "
    "Only figures that were recorded during the run are shown."
)


def _basis(explanation: Explanation) -> str:
    over = "the whole run" if explanation.evidence.part_began_seconds is None else "the run since it was resumed"
    again = ", with what restarts had done again" if explanation.evidence.summary.get("restart_seconds_lost") else ""
    shares = "bottleneck and shares: of the node's steps; " if explanation.calibrated else ""
    return f"{shares}CPU cores: means over {over}, evaluations and pauses included; sent and received: over its training time{again}"


def _memory(explanation: Explanation) -> list[str]:
    nodes = explanation.evidence.summary["per_node"]
    figures = [[(node.get(f"memory_{kind}_bytes") or {}).get("max") or 0 for node in nodes] for kind in ("rss", "pss")]
    rss, pss = (bytes_text(max(found, default=0) or None) for found in figures)
    sampled = "" if pss == UNKNOWN else f", sampled PSS {pss}"
    return [] if rss == UNKNOWN else [f"largest memory of a node: peak RSS {rss}{sampled}. {memory_basis(bool(sampled))}"]


def page(explanation: Explanation, advice: Sequence[Advice]) -> RenderableType:
    """Return everything that `trainer explain` prints."""
    parts: list[RenderableType] = [headline(explanation), "", _run_line(explanation), "", _nodes(explanation)]
    parts += [_basis(explanation), *_memory(explanation)]
    for note in notes(explanation):
        parts += ["", note]
    if advice:
        parts += ["", "What would help, by this run's figures:", *(f"  {_advice_line(entry)}" for entry in advice)]
    return Group(*parts)


def _run_line(explanation: Explanation) -> str:
    run, began = explanation.run_fractions, explanation.evidence.part_began_seconds
    of = "of the run time" if began is None else f"of the time since the run was resumed at {number_text(began, 2)} s"
    idle = f" ({NAMES['idle']} {percent(run['idle'])}: async, no updates to compute)" if run.get("idle") else ""
    training = f"{of}: training {percent(explanation.training_fraction)}{idle}, {_beside(explanation)}"
    if not explanation.calibrated:
        return training
    unknown = hidden_exchange(explanation.evidence)
    shares = {component: percent(fraction) for component, fraction in explanation.step_fractions.items()}
    shares |= {} if unknown is None else {"network": f"unknown, at most about {percent(unknown)}"}
    steps = ", ".join(f"{NAMES[component]} {share}" for component, share in shares.items())
    costs = "" if explanation.exchange_costs is None else f"\n{exchange_text(explanation.exchange_costs)}"
    return f"{training}\nof a worker's step: {steps}{costs}"


def _beside(explanation: Explanation) -> str:
    fractions, job = explanation.run_fractions, explanation.evidence.job
    expected = {"translating": job.get("translation_signatures"), "profiling": job.get("profile")}
    shown = [name for name in (*BESIDE_TRAINING, "other") if name not in SELDOM or expected[name] or fractions[name]]
    return ", ".join(f"{NAMES[component]} {percent(fractions[component])}" for component in shown)


def _nodes(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("node", no_wrap=True, vertical="bottom")
    table.add_column("bottleneck", no_wrap=True, vertical="bottom")
    for name in ("computation", "data\nloading", "waiting for\nstragglers", "communication", "CPU cores", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    shown, some = ends_of(explanation.nodes, _waiting)
    if some:
        table.caption = f"Of {len(explanation.nodes):,} nodes: those that wait least for stragglers, and those that wait most."
    unknown = hidden_exchange(explanation.evidence) is not None
    for view in shown:
        step = {**(view.step_fractions or {}), **({"network": None} if unknown else {})}
        shares = (percent(step.get(component)) for component in ("compute", "data", "peers", "network"))
        cores = (
            UNKNOWN if view.cpu_cores_used is None else f"{number_text(view.cpu_cores_used, 2)} of {number_text(view.cores_available, 2)}"
        )
        table.add_row(str(view.node), _BOTTLENECKS.get(view.limit or UNKNOWN, view.limit), *shares, cores, *_traffic(view))
    return table


_BOTTLENECKS = {UNKNOWN: UNKNOWN, "data": "data loading", "exchange": "communication", "peer": "stragglers", "nothing": "none"}
"""Limits of a node whose word in the table is another one."""


def _waiting(view: NodeView) -> float | None:
    """How much of a step a node waits for others; of one that was not calibrated, what it does not compute."""
    if view.step_fractions is not None:
        return view.step_fractions.get("peers")
    return None if view.cpu_fraction is None else -view.cpu_fraction


def _traffic(view: NodeView) -> tuple[str, str]:
    limit = view.link.limit_bytes_per_second
    sent, received = (
        bytes_text(rate, per_second=True) + (f" ({percent(rate / limit)})" if rate is not None and limit else "")
        for rate in (view.link.sent_bytes_per_second, view.link.received_bytes_per_second)
    )
    return sent, received


def _unfinished(state: str, recorded_until: float) -> str:
    """Say what is missing of a run that has written no summary."""
    at_work = state in ("starting", "running")
    ended = "was killed before it could write one" if state == "died" else f"ended without one (state: {state})"
    why = "is still running" if at_work else ended
    until, more = number_text(recorded_until, 1), "all later records" if at_work else "everything after its last record"
    return (
        f"The run has no summary.json, as it {why}: all figures are from its records up to {until} s on the run clock. "
        f"Missing: the calibration, a part of the start-up time, the shutdown time, and {more}."
    )


def notes(explanation: Explanation) -> list[str]:
    """Return what a reader has to know beside the figures."""
    evidence = explanation.evidence
    found = [] if evidence.recorded_until is None else [_unfinished(evidence.state, evidence.recorded_until)]
    found += [
        text for text in (evidence.restarted, evidence.changed, diverged_text(evidence.summary), padding_text(evidence.summary)) if text
    ]
    if not explanation.calibrated:
        found.append(MIXED if evidence.steps_mixed else NOT_CALIBRATED)
        found += _native(explanation)
    if explanation.starved is not None:
        return found
    sharing = evidence.summary["nodes_sharing_cores"] or 1
    if sharing > 1:
        parts = "--cores-per-node gives each virtual node its own share; --threads sets the threads of each task"
        found.append(f"{sharing} nodes share the same cores and compete for them. {parts}.")
    held_up = [text for text in (_held_up(explanation, view) for view in explanation.nodes) if text]
    if len(held_up) > MOST_NODES_SHOWN:
        held_up = [*held_up[:MOST_HELD_UP], f"So are {len(held_up) - MOST_HELD_UP:,} more of {len(explanation.nodes):,} nodes."]
    found += held_up
    if "network" in explanation.candidates and busiest(evidence.links) is None:
        found.append("The links' capacity is unknown, so their utilisation cannot be computed (--bandwidth sets one for virtual nodes).")
    return found


MOST_HELD_UP = 3
"""Of very many nodes that were held up so many are named."""

HELD_UP = 0.75
"""A task that computes needs one core at least; a node that had less than this of that was held up by others."""


def _held_up(explanation: Explanation, view: NodeView) -> str | None:
    """What there is to say of a node that computes all the time and yet is seldom on a core."""
    summary = explanation.evidence.summary
    if (
        summary["run_seconds"] < LEAST_SECONDS
        or view.step_fractions is None
        or view.limit not in ("CPU", "data")
        or None in (view.cpu_cores_used, view.cores_available)
    ):
        return None
    working = sum(view.step_fractions[component] for component in ("compute", "data"))
    training = sum(explanation.run_fractions[component] for component in explanation.step_fractions)
    needed = working * training * min(summary["workers"] / summary["nodes"], view.cores_available or 0.0)
    if (view.cpu_cores_used or 0.0) >= HELD_UP * needed:
        return None
    return (
        f"Node {view.node} is short of CPU: it computes or loads data for {percent(working)} of its steps, which needs at least "
        f"{number_text(needed, 2)} cores, and got {number_text(view.cpu_cores_used, 2)}: other processes used the CPU."
    )


def _native(explanation: Explanation) -> list[str]:
    """What the framework itself said about waiting, for a run that was not calibrated."""
    summary = explanation.evidence.summary
    workers = summary["workers"] if summary["mode"] == "async" else 1
    whole = workers * summary["train_seconds"]
    figures = (("data", summary["data_wait_seconds"]), ("other tasks", summary["network_wait_seconds"]))
    known = [f"for {what} {percent(seconds / whole)}" for what, seconds in figures if seconds is not None and whole]
    return [f"Recorded by the framework, as shares of the training time: waiting {', '.join(known)}."] if known else []


FAR = 10.0
"""A speed-up from this on is an estimate without decimals."""


def _advice_line(entry: Advice) -> str:
    effect = "" if entry.speedup is None else f" ({entry.bound} {number_text(entry.speedup, 2 if entry.speedup < FAR else 0)} × as fast)"
    caution = f"; {entry.caution}" if entry.caution else ""
    return f"{entry.change}: {entry.reason}{effect}{caution}"
