"""Is the network the limit, and does what one node receives follow what another sends?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..catalog.run import Run
from ..diagnosis.links import busiest
from ..diagnosis.verdict import NEARLY_ALL, Explanation
from ..diagnosis.words import bits_text
from ..series.arrays import NodeSeries
from .answer import Answer, digits3, percent
from .common_grid import LEAST_POINTS, correlation, grid_of, on_grid

__all__ = ["network_use"]

MOST_NODES = 16
"""Nodes that are held against each other, the first ones: 240 pairs."""

FOLLOWS = 0.7
"""From this correlation on, half of what varies in one series goes with the other."""

_CAUSES = {
    "link": "limited by the link",
    "messages": "latency and overhead more than bandwidth",
    "transfer": "copying and summing take the time",
    "waiting": "mostly overhead and waiting, not the exchange itself",
}


def network_use(run: Run, explanation: Explanation, nodes: Sequence[NodeSeries]) -> Answer | None:
    """Return whether the exchange limits the run, and the correlations of each pair of nodes; None for a task by itself."""
    summary = explanation.evidence.summary
    if summary["nodes"] == 1 and summary["workers"] == 1 and summary["mode"] == "sync":
        return None
    limited, limit_text = _limit(explanation)
    began = explanation.evidence.part_began_seconds or 0.0
    pairs = pair_correlations(nodes, began, run.summary["run_seconds"])
    link = busiest(explanation.evidence.links)
    figures = {
        "limit": limited,
        "step_fraction": explanation.step_fractions.get("network") if explanation.calibrated else None,
        "cause": explanation.network_cause,
        "busiest_link_node": None if link is None else link.node,
        "busiest_link_fraction": None if link is None else link.fraction,
        "pairs": pairs,
        "nodes_left_out": max(0, len(nodes) - MOST_NODES),
    }
    follows = _pairs_text(pairs, summary["nodes"])
    return Answer("network", "network", limit_text + (f"; {follows}" if follows else ""), figures)


def _limit(explanation: Explanation) -> tuple[bool | None, str]:
    """Return whether the network is the limit (None: not known), and why."""
    link = busiest(explanation.evidence.links)
    full = (
        "" if link is None else f"node {link.node} uses {percent(link.fraction)} of its {bits_text(link.limit_bytes_per_second or 0)} link"
    )
    if explanation.starved is not None:
        return None, "unknown: CPU contention from other programs" + (f"; {full}" if full else "")
    if not explanation.calibrated:
        if link is not None and (link.fraction or 0.0) >= NEARLY_ALL:
            return True, f"the bottleneck: {full}"
        return None, "unknown without a calibration" + (f"; {full}" if full else "; the links' capacity is unknown")
    step, run = (percent(fractions["network"]) for fractions in (explanation.step_fractions, explanation.run_fractions))
    share = f"communication is {step} of a worker's step and {run} of the run time"
    known = f", {full}" if full else ""
    if explanation.verdict == "network":
        why = _CAUSES.get(explanation.network_cause or "", "")
        return True, f"the bottleneck: {share}" + (f", {why}" if why else "") + known
    if "network" in explanation.candidates:
        return None, f"possibly the bottleneck: {share}{known}"
    return False, f"not the bottleneck: {share}{known}"


def pair_correlations(nodes: Sequence[NodeSeries], began: float, until: float) -> list[dict[str, Any]]:
    """Return for each pair of two different nodes how what the second receives follows what the first sends, over intervals of the samples.

    ``correlation`` is Pearson's, None with ``why`` where it cannot be told; ``samples`` are the intervals where both are known.
    """
    kept = nodes[:MOST_NODES]
    grid = grid_of(kept, began, until)
    if grid is None:
        return []
    sent = [on_grid(grid, node.time_seconds, node.sent_bytes_per_second) for node in kept]
    received = [on_grid(grid, node.time_seconds, node.received_bytes_per_second) for node in kept]
    found = []
    for one, sender in enumerate(kept):
        for other, receiver in enumerate(kept):
            if one == other:
                continue
            r, count = correlation(sent[one], received[other])
            why = None if r is not None else "fewer than 10 samples" if count < LEAST_POINTS else "a rate that does not vary"
            found.append({"sender": sender.node, "receiver": receiver.node, "correlation": r, "samples": count, "why": why})
    return found


def _pairs_text(pairs: Sequence[Mapping[str, Any]], nodes: int) -> str | None:
    if nodes < 2:
        return None
    known = [pair for pair in pairs if pair["correlation"] is not None]
    if not known:
        most = max((pair["samples"] for pair in pairs), default=0)
        why = f"{most} samples of at least {LEAST_POINTS}" if most < LEAST_POINTS else pairs[0]["why"]
        return f"correlation of received and sent rates between nodes not computed: {why}"
    ordered = sorted(known, key=lambda pair: pair["correlation"])
    low, high = ordered[0], ordered[-1]
    if len(known) <= 2:
        each = ", ".join(f"{_pair(pair)} {digits3(pair['correlation'])}" for pair in known)
        return f"received rates {_follows(low, high)} sent rates: correlation {each} ({low['samples']} samples)"
    return (
        f"received rates {_follows(low, high)} sent rates: correlation {digits3(low['correlation'])} ({_pair(low)}) to "
        f"{digits3(high['correlation'])} ({_pair(high)}) over {len(known)} pairs of nodes ({low['samples']} samples)"
    )


def _pair(pair: Mapping[str, Any]) -> str:
    return f"{pair['sender']}→{pair['receiver']}"


def _follows(low: Mapping[str, Any], high: Mapping[str, Any]) -> str:
    if low["correlation"] >= FOLLOWS:
        return "follow"
    return "partly follow" if high["correlation"] >= FOLLOWS else "do not follow"
