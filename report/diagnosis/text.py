"""An explanation in plain words: the verdict and why, a line a node, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ...records.text.many_nodes import MOST_NODES_SHOWN, ends_of
from ...records.text.numbers import MEMORY_BASIS, UNKNOWN, bytes_text, number_text
from ..catalog.divergence import diverged_text
from .batch_size_advice import Advice
from .exchange_costs import exchange_text
from .headline import headline
from .links import busiest
from .padding import padding_text
from .time_shares import BESIDE_TRAINING, SELDOM
from .verdict import Explanation, NodeView
from .words import NAMES, percent

__all__ = ["notes", "page"]

NOT_CALIBRATED = (
    "This run has no calibration (--no-calibrate, or it did not come to its end), so the parts of a step are not known. "
    "Only what was counted during the run is shown."
)


MIXED = (
    "An older release of this program added up its steps over all parts, so those of the part that was calibrated are not known. "
    "Only what was counted during the run is shown."
)


def _basis(explanation: Explanation) -> str:
    over = "the whole run" if explanation.evidence.part_began_seconds is None else "the run since it was resumed"
    again = ", with what restarts had done again" if explanation.evidence.summary.get("restart_seconds_lost") else ""
    return f"CPU cores: means over {over}, evaluations and pauses included; sent and received: over its training time{again}"


def _memory(explanation: Explanation) -> list[str]:
    nodes = explanation.evidence.summary["per_node"]
    figures = [[(node.get(f"memory_{kind}_bytes") or {}).get("max") or 0 for node in nodes] for kind in ("rss", "pss")]
    rss, pss = (bytes_text(max(found, default=0) or None) for found in figures)
    return [] if rss == UNKNOWN else [f"memory of a node: peak RSS {rss}, largest sampled PSS {pss}. {MEMORY_BASIS}"]


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
    of = "of the run's time" if began is None else f"of the time since the run was resumed at {number_text(began, 2)} s"
    idle = f" ({NAMES['idle']} {percent(run['idle'])})" if run.get("idle") else ""
    training = f"{of}: training {percent(explanation.training_fraction)}{idle}, {_beside(explanation)}"
    if not explanation.calibrated:
        return training
    steps = ", ".join(f"{NAMES[component]} {percent(fraction)}" for component, fraction in explanation.step_fractions.items())
    costs = "" if explanation.exchange_costs is None else f"\n{exchange_text(explanation.exchange_costs)}"
    return f"{training}\nof each step: {steps}{costs}"


def _beside(explanation: Explanation) -> str:
    fractions, job = explanation.run_fractions, explanation.evidence.job
    expected = {"translating": job.get("translation_signatures"), "profiling": job.get("profile")}
    shown = [name for name in (*BESIDE_TRAINING, "other") if name not in SELDOM or expected[name] or fractions[name]]
    return ", ".join(f"{NAMES[component]} {percent(fractions[component])}" for component in shown)


def _nodes(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("node", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for name in ("computing", "data", "peers", "exchange", "CPU cores", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True)
    shown, some = ends_of(explanation.nodes, _waiting)
    if some:
        table.caption = f"Of {len(explanation.nodes):,} nodes: those that wait least for others, and those that wait most."
    for view in shown:
        step = view.step_fractions or {}
        shares = (percent(step.get(component)) for component in ("compute", "data", "peers", "network"))
        cores = (
            UNKNOWN if view.cpu_cores_used is None else f"{number_text(view.cpu_cores_used, 2)} of {number_text(view.cores_available, 2)}"
        )
        table.add_row(str(view.node), view.limit or UNKNOWN, *shares, cores, *_traffic(view))
    return table


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
    ended = "was killed before it could write one" if state == "died" else f"is {state}"
    why = "is still at work" if at_work else ended
    until, more = number_text(recorded_until, 1), "whatever comes yet" if at_work else "what it did after its last record"
    return (
        f"The run has no summary.json, for it {why}: all figures are from its records up to {until} s on the run clock. "
        f"Missing: its calibration, how long start-up took in full, how long its end takes, and {more}."
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
        parts = "--cores-per-node would give virtual nodes a part each, --threads says how many threads each task has"
        found.append(f"{sharing} nodes share the same cores and compete for them; {parts}.")
    held_up = [text for text in (_held_up(explanation, view) for view in explanation.nodes) if text]
    if len(held_up) > MOST_NODES_SHOWN:
        held_up = [*held_up[:MOST_HELD_UP], f"So did {len(held_up) - MOST_HELD_UP:,} more of the {len(explanation.nodes):,} nodes."]
    found += held_up
    if "network" in explanation.candidates and busiest(evidence.links) is None:
        found.append("No link has a known limit, so how full they are is not known (--bandwidth sets one for virtual nodes).")
    return found


MOST_HELD_UP = 3
"""Of very many nodes that were held up so many are named."""

HELD_UP = 0.75
"""A task that computes needs one core at least; a node that had less than this of that was held up by others."""


def _held_up(explanation: Explanation, view: NodeView) -> str | None:
    """What there is to say of a node that computes all the time and yet is seldom on a core."""
    summary = explanation.evidence.summary
    if view.step_fractions is None or view.limit not in ("CPU", "data") or None in (view.cpu_cores_used, view.cores_available):
        return None
    working = sum(view.step_fractions[component] for component in ("compute", "data"))
    training = sum(explanation.run_fractions[component] for component in explanation.step_fractions)
    needed = working * training * min(summary["workers"] / summary["nodes"], view.cores_available or 0.0)
    if (view.cpu_cores_used or 0.0) >= HELD_UP * needed:
        return None
    return (
        f"Node {view.node} works for {percent(working)} of its steps, which takes {number_text(needed, 2)} cores at least, and had "
        f"{number_text(view.cpu_cores_used, 2)}: something else used the processor."
    )


def _native(explanation: Explanation) -> list[str]:
    """What the framework itself said about waiting, for a run that was not calibrated."""
    summary = explanation.evidence.summary
    workers = summary["workers"] if summary["mode"] == "async" else 1
    whole = workers * summary["train_seconds"]
    figures = (("data", summary["data_wait_seconds"]), ("other tasks", summary["network_wait_seconds"]))
    known = [f"for {what} {percent(seconds / whole)}" for what, seconds in figures if seconds is not None and whole]
    return [f"Measured by the backend while it trained, of the training time: waiting {', '.join(known)}."] if known else []


FAR = 10.0
"""A speed-up from this on is an estimate without decimals."""


def _advice_line(entry: Advice) -> str:
    effect = "" if entry.speedup is None else f" ({entry.bound} {number_text(entry.speedup, 2 if entry.speedup < FAR else 0)}x)"
    caution = f"; {entry.caution}" if entry.caution else ""
    return f"{entry.option}: {entry.reason}{effect}{caution}"
