"""Utilization of processors and network, and step time over traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from ...core.cluster import workers_by_node
from ...records.text import bytes_text, seconds_text
from ..runs.run import Run
from ..runs.series import pauses, training_clock
from ..runs.series_arrays import Floats, NodeSeries, StepSeries
from .diagnosis import NEARLY_ALL, Diagnosis, NodeView
from .evidence import NAMES, Answer, bits_text, digits3, percent

MAX_NAMED = 3  # nodes named one by one; of more only the least and most busy
_NODE_FIGURES = ("node", "cpu_cores_used", "cores_available", "cpu_fraction", "gpu_utilization")
MIN_WAIT = 0.05  # minimum share of the run time to be named


def hardware_use(diagnosis: Diagnosis) -> Answer | None:
    """Return the mean utilization of processors over the whole run; None without samples."""
    nodes = diagnosis.nodes
    if all(view.cpu_fraction is None and view.gpu_utilization is None for view in nodes):
        return None
    gpus = [view for view in nodes if view.gpu_utilization is not None]
    shared = (diagnosis.evidence.summary["nodes_sharing_cores"] or 1) > 1
    fractions, unknown = _fractions(nodes, shared), [view.node for view in nodes if not _is_known(view, shared)]
    least, most = min(fractions, default=None), max(fractions, default=None)
    fully = _fully_used(least, shared, unknown)
    fractions_of_run = diagnosis.run_fractions
    waits = {name: share for name in NAMES if name != "compute" and (share := fractions_of_run.get(name, 0.0)) >= MIN_WAIT}
    figures = {
        "nodes": [{name: getattr(view, name) for name in _NODE_FIGURES} for view in nodes],
        "nodes_share_cores": shared,
        "cpu_fraction_least": least,
        "cpu_fraction_most": most,
        "cpu_unknown_nodes": unknown,
        "cpus_fully_used": fully,
        "gpus_fully_used": min(view.gpu_utilization or 0.0 for view in gpus) >= NEARLY_ALL if gpus else None,
        "threads_per_task": list(diagnosis.evidence.job.get("threads_per_task") or ()),
        "waits": waits,
    }
    parts = [_gpu_text(gpus)] if gpus else []
    parts.append(_cpu_text(nodes, shared, fractions, fully, unknown))
    if not fully or figures["gpus_fully_used"] is False:
        parts += [text for text in (_threads_text(diagnosis), _waits_text(diagnosis, waits)) if text]
    return Answer("hardware_use", "GPUs and CPUs" if gpus else "CPUs", "; ".join(parts), figures)


def _is_known(view: NodeView, shared: bool) -> bool:
    return (view.cpu_cores_used if shared else view.cpu_fraction) is not None


def _fractions(nodes: Sequence[NodeView], shared: bool) -> list[float]:
    if not shared:
        return [view.cpu_fraction for view in nodes if view.cpu_fraction is not None]
    used = [view.cpu_cores_used for view in nodes if view.cpu_cores_used is not None]
    cores = max((view.cores_available or 0.0 for view in nodes), default=0.0)
    return [sum(used) / cores] if cores and used else []


def _fully_used(least: float | None, shared: bool, unknown: Sequence[int]) -> bool | None:
    if least is None:
        return None
    fully = least >= NEARLY_ALL
    decided = fully if shared else not fully  # for any values of the unknown ones
    return fully if decided or not unknown else None


def _verdict(least: float, most: float, what: str) -> str:
    if least >= NEARLY_ALL:
        return f"{what} fully used"
    return f"not all {what} fully used" if most >= NEARLY_ALL else f"{what} not fully used"


def _cpu_text(nodes: Sequence[NodeView], shared: bool, fractions: Sequence[float], fully: bool | None, unknown: Sequence[int]) -> str:
    if fully is None:
        use = "whether all cores were fully used is unknown"
    else:
        use = "not all cores fully used" if unknown and not fully else _verdict(min(fractions), max(fractions), "cores")
    return use + (f": {_used_text(nodes, shared)}{_unknown_text(unknown)}" if fractions else "")


def _used_text(nodes: Sequence[NodeView], shared: bool) -> str:
    if shared:
        cores = max(view.cores_available or 0.0 for view in nodes)
        used = sum(view.cpu_cores_used or 0.0 for view in nodes)
        counted = sum(_is_known(view, shared) for view in nodes)
        by = f"all {len(nodes)} nodes" if counted == len(nodes) else f"{counted} of {len(nodes)} nodes"
        first_node = digits3(nodes[0].cpu_cores_used)
        return f"{digits3(used)} of {digits3(cores)} shared cores ({percent(used / cores)}) by {by}, {first_node} by node 0"
    known = [view for view in nodes if view.cpu_fraction is not None]
    by_node = ", ".join(
        f"node {view.node} {digits3(view.cpu_cores_used)} of {digits3(view.cores_available)} cores ({percent(view.cpu_fraction)})"
        for view in _extremes(known, lambda view: view.cpu_fraction)
    )
    return f"{f'least and most busy of {len(known)} nodes: ' if len(known) > MAX_NAMED else ''}{by_node}"


def _extremes(views: Sequence[NodeView], figure: Callable[[NodeView], float | None]) -> Sequence[NodeView]:
    """Return all nodes, or of many the ones with the lowest and the highest figure."""
    ordered = sorted(views, key=lambda view: figure(view) or 0.0)
    return sorted(views, key=lambda view: view.node) if len(views) <= MAX_NAMED else [ordered[0], ordered[-1]]


def _unknown_text(unknown: Sequence[int]) -> str:
    if not unknown:
        return ""
    if len(unknown) == 1:
        return f"; unknown for node {unknown[0]}"
    named = ", ".join(map(str, unknown[:MAX_NAMED])) + (f" and {len(unknown) - MAX_NAMED:,} more" if len(unknown) > MAX_NAMED else "")
    return f"; unknown for {len(unknown):,} nodes ({named})"


def _gpu_text(gpus: Sequence[NodeView]) -> str:
    used = [view.gpu_utilization or 0.0 for view in gpus]
    some = _extremes(gpus, lambda view: view.gpu_utilization)
    by_node = ", ".join(f"node {view.node} {percent(view.gpu_utilization)} of the time" for view in some)
    return f"{_verdict(min(used), max(used), 'GPUs')}: {by_node}"


def _threads_text(diagnosis: Diagnosis) -> str | None:
    threads = diagnosis.evidence.job.get("threads_per_task") or ()
    tasks = workers_by_node(diagnosis.evidence.job["procs_per_node"], diagnosis.evidence.job["nodes"])
    cores = [view.cores_available for view in diagnosis.nodes]
    spare = [
        count
        for count, node_cores, workers in zip(threads, cores, tasks, strict=False)
        if count is not None and node_cores is not None and count * workers <= node_cores - 1
    ]
    if not spare:
        return None
    return f"each task computes with {spare[0]} thread{'s' if spare[0] != 1 else ''} (--threads)"


def _waits_text(diagnosis: Diagnosis, waits: Mapping[str, float]) -> str | None:
    if not diagnosis.calibrated:
        return "the rest of the time is unknown without a calibration"
    if not waits:
        return None
    named = ", ".join(f"{NAMES[name]} {percent(share)}" for name, share in sorted(waits.items(), key=lambda item: -item[1]))
    return f"of the run time: {named}"


MIN_POINTS = 10  # minimum intervals of a correlation
MAX_POINTS = 2000  # maximum intervals of a run
CONSTANT = 0.02  # coefficient of variation below which a series is constant but for clock jitter


def make_grid(nodes: Sequence[NodeSeries], began: float, until: float, least_seconds: float = 0.0) -> Floats | None:
    """Return the edges [k + 1] in seconds of two or more equal intervals, if any.

    They are at least `least_seconds` and a sampling interval long; seconds are on the run clock.
    """
    times = [node.time_seconds for node in nodes if len(node.time_seconds) > 1]
    if not times:
        return None
    began, until = (
        max(began, min(float(node_times[0]) for node_times in times)),
        min(until, max(float(node_times[-1]) for node_times in times)),
    )
    apart = np.concatenate([np.diff(node_times) for node_times in times])
    apart = apart[apart > 0]
    if not len(apart) or not until > began:
        return None
    width = max(float(np.median(apart)), least_seconds)
    count = min(MAX_POINTS, int((until - began) / width))
    return np.linspace(began, until, count + 1) if count >= 2 else None


def rates_on_grid(edges: Floats, time_seconds: Floats, per_second: Floats) -> Floats:
    """Return the mean rate since the sample before, by interval [k]; NaN if half is unknown."""
    if len(time_seconds) < 2:
        return np.full(len(edges) - 1, np.nan)
    order = np.argsort(time_seconds, kind="stable")
    times, rates = time_seconds[order], per_second[order]
    lengths = np.diff(times)
    known = np.isfinite(rates[1:])
    amount = np.concatenate([[0.0], np.cumsum(np.where(known, np.where(known, rates[1:], 0.0) * lengths, 0.0))])
    covered = np.concatenate([[0.0], np.cumsum(np.where(known, lengths, 0.0))])
    amounts, seconds = np.diff(np.interp(edges, times, amount)), np.diff(np.interp(edges, times, covered))
    enough = seconds >= 0.5 * (edges[1] - edges[0])
    return np.where(enough, amounts / np.where(enough, seconds, 1.0), np.nan)


def is_varying(values: Floats) -> bool:
    """Return whether finite values [k] are not constant."""
    mean = float(np.mean(np.abs(values))) if len(values) else 0.0
    return bool(mean > 0 and float(np.std(values)) > CONSTANT * mean)


def correlation(first: Floats, second: Floats) -> tuple[float | None, int]:
    """Return Pearson's r (None: too few, or constant) and the number of known intervals."""
    known = np.isfinite(first) & np.isfinite(second)
    count = int(known.sum())
    x, y = first[known], second[known]
    if count < MIN_POINTS or not is_varying(x) or not is_varying(y):
        return None, count
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    return float(np.clip(np.mean(x * y), -1.0, 1.0)), count


MAX_NODES_IN_TABLE = 16  # the first nodes, compared in 240 pairs
FOLLOWS = 0.7  # correlation from which on half of the variance is shared
_CAUSES = {
    "link": "limited by the link",
    "messages": "latency and overhead more than bandwidth",
    "transfer": "copying and summing take the time",
    "waiting": "mostly overhead and waiting, not the exchange itself",
}


def network_use(run: Run, diagnosis: Diagnosis, nodes: Sequence[NodeSeries]) -> Answer | None:
    """Return whether communication limits the run, and the correlations of pairs of nodes."""
    summary = diagnosis.evidence.summary
    if summary["nodes"] == 1 and summary["workers"] == 1 and summary["mode"] == "sync":
        return None
    limited, limit_text = _limit(diagnosis)
    began = diagnosis.evidence.part_began_seconds or 0.0
    pairs = pair_correlations(nodes, began, run.summary["run_seconds"])
    link = diagnosis.evidence.busiest_link
    figures = {
        "limit": limited,
        "step_fraction": diagnosis.step_fractions.get("network") if diagnosis.calibrated else None,
        "cause": diagnosis.network_cause,
        "busiest_link_node": None if link is None else link.node,
        "busiest_link_fraction": None if link is None else link.fraction,
        "pairs": pairs,
        "nodes_left_out": max(0, len(nodes) - MAX_NODES_IN_TABLE),
    }
    follows = _pairs_text(pairs, summary["nodes"])
    return Answer("network", "network", limit_text + (f"; {follows}" if follows else ""), figures)


def _limit(diagnosis: Diagnosis) -> tuple[bool | None, str]:
    link = diagnosis.evidence.busiest_link
    full = (
        "" if link is None else f"node {link.node} uses {percent(link.fraction)} of its {bits_text(link.limit_bytes_per_second or 0)} link"
    )
    if diagnosis.starved is not None:
        return None, "unknown: CPU contention from other programs" + (f"; {full}" if full else "")
    if not diagnosis.calibrated:
        if link is not None and (link.fraction or 0.0) >= NEARLY_ALL:
            return True, f"the bottleneck: {full}"
        return None, "unknown without a calibration" + (f"; {full}" if full else "; the links' capacity is unknown")
    step, run = (percent(fractions["network"]) for fractions in (diagnosis.step_fractions, diagnosis.run_fractions))
    share = f"communication is {step} of a worker's step and {run} of the run time"
    known = f", {full}" if full else ""
    if diagnosis.verdict == "network":
        why = _CAUSES.get(diagnosis.network_cause or "", "")
        return True, f"the bottleneck: {share}" + (f", {why}" if why else "") + known
    if "network" in diagnosis.candidates:
        return None, f"possibly the bottleneck: {share}{known}"
    return False, f"not the bottleneck: {share}{known}"


def pair_correlations(nodes: Sequence[NodeSeries], began: float, until: float) -> list[dict[str, Any]]:
    """Return each pair of nodes' correlation (Pearson) of sent and received rates, or ``why``."""
    shown = nodes[:MAX_NODES_IN_TABLE]
    edges = make_grid(shown, began, until)
    if edges is None:
        return []
    sent = [rates_on_grid(edges, node.time_seconds, node.sent_bytes_per_second) for node in shown]
    received = [rates_on_grid(edges, node.time_seconds, node.received_bytes_per_second) for node in shown]
    pairs = []
    for sender, receiver in permutations(range(len(shown)), 2):
        r, count = correlation(sent[sender], received[receiver])
        why = None if r is not None else "fewer than 10 samples" if count < MIN_POINTS else "a rate that does not vary"
        nodes_of_pair = {"sender": shown[sender].node, "receiver": shown[receiver].node}
        pairs.append({**nodes_of_pair, "correlation": r, "samples": count, "why": why})
    return pairs


def _pairs_text(pairs: Sequence[Mapping[str, Any]], nodes: int) -> str | None:
    if nodes < 2:
        return None
    known = [pair for pair in pairs if pair["correlation"] is not None]
    if not known:
        most = max((pair["samples"] for pair in pairs), default=0)
        why = f"{most} samples of at least {MIN_POINTS}" if most < MIN_POINTS else pairs[0]["why"]
        return f"correlation of received and sent rates between nodes not computed: {why}"
    ordered = sorted(known, key=lambda pair: pair["correlation"])
    low, high = (ordered[place]["correlation"] for place in (0, -1))
    follow = "follow" if low >= FOLLOWS else "partly follow" if high >= FOLLOWS else "do not follow"
    listed = known if len(known) <= 2 else [ordered[0], ordered[-1]]
    named = [(f"{pair['sender']}→{pair['receiver']}", digits3(pair["correlation"])) for pair in listed]
    if len(known) <= 2:
        by_pair = ", ".join(f"{pair} {r}" for pair, r in named)
    else:
        by_pair = f"{' to '.join(f'{r} ({pair})' for pair, r in named)} over {len(known)} pairs of nodes"
    samples = f"{ordered[0]['samples']} samples"
    return f"received rates {follow} sent rates: correlation {by_pair} ({samples})"


FLAT = 0.05  # coefficient of variation below which a step time is constant
EQUAL_WITHIN = 0.1  # relative difference below which two amounts are equal
MIN_GROUPS = 5  # minimum groups of async updates per interval, as a part of those at its ends is outside
MAX_NODES = 64  # the traffic of the first nodes is summed


def step_time_and_network(run: Run, diagnosis: Diagnosis, series: StepSeries, nodes: Sequence[NodeSeries]) -> Answer | None:
    """Return the correlation of step time and traffic; None without communication or samples."""
    if diagnosis.evidence.summary["workers"] == 1 and diagnosis.evidence.summary["mode"] == "sync":
        return None
    course = _step_traffic(run, diagnosis, series, nodes[:MAX_NODES])
    if course is None:
        return None
    sync = diagnosis.evidence.summary["mode"] == "sync"
    figures = _figures(*course)
    return Answer("step_time_and_network", "step time", _text(figures, sync=sync), figures)


def _step_traffic(run: Run, diagnosis: Diagnosis, series: StepSeries, nodes: Sequence[NodeSeries]) -> tuple[Floats, Floats, Floats] | None:
    """Return (updates, seconds of training, bytes sent) [k]; updates err by a part of a group."""
    began = diagnosis.evidence.part_began_seconds or 0.0
    if not len(series.count) or not nodes:
        return None
    groups = float(np.median(series.seconds)) if len(series.seconds) else 0.0
    least = groups if diagnosis.evidence.summary["mode"] == "sync" else MIN_GROUPS * groups
    edges = make_grid(nodes, began, float(run.summary["run_seconds"]), least)
    if edges is None:
        return None
    ends = np.concatenate([[0.0], np.maximum.accumulate(series.group_time_seconds)])
    done = np.interp(edges, ends, np.concatenate([[0], np.cumsum(series.count * ~series.profiled_groups)]).astype(np.float64))
    stops = sorted([*pauses(run.evals, run.events), *series.profile_pauses()])
    steps, trained = np.diff(done), np.diff(training_clock(edges, stops))
    rates = np.sum([rates_on_grid(edges, node.time_seconds, node.sent_bytes_per_second) for node in nodes], axis=0)
    known = (steps > 0) & (trained > 0.5 * (edges[1] - edges[0])) & np.isfinite(rates)
    if not known.any():
        return None
    return steps[known], trained[known], rates[known] * (edges[1] - edges[0])


def _figures(steps: Floats, trained: Floats, amounts: Floats) -> dict[str, Any]:
    count, step_seconds, sent = len(steps), trained / steps, amounts / trained
    spread = float(np.std(step_seconds) / np.mean(step_seconds))
    figures: dict[str, Any] = {
        "intervals": count,
        "step_seconds": float(trained.sum() / steps.sum()),
        "step_seconds_spread": spread,
        "sent_bytes_per_second": float(amounts.sum() / trained.sum()),
        "correlation": None,
        "fastest_tenth": None,
        "slowest_tenth": None,
    }
    if count >= MIN_POINTS and spread >= FLAT:
        order, tenth = np.argsort(step_seconds, kind="stable"), max(1, count // 10)
        figures["correlation"] = correlation(step_seconds, sent)[0]
        for name, chosen in (("fastest_tenth", order[:tenth]), ("slowest_tenth", order[-tenth:])):
            made, seconds, amount = (float(values[chosen].sum()) for values in (steps, trained, amounts))
            figures[name] = {
                "step_seconds": seconds / made,
                "sent_bytes_per_second": amount / seconds,
                "bytes_per_step": amount / made,
            }
    return figures


def _text(figures: dict[str, Any], *, sync: bool) -> str:
    sent = bytes_text(figures["sent_bytes_per_second"], per_second=True)
    count, of = figures["intervals"], "" if sync else " per update of all workers"
    mean = f"{seconds_text(figures['step_seconds'])}{of}, mean of {count} sampled intervals, at {sent} sent by all nodes while training"
    if count < MIN_POINTS:
        return f"{mean}; correlation of step time and sent rate not computed: {count} intervals of at least {MIN_POINTS}"
    fast, slow = figures["fastest_tenth"], figures["slowest_tenth"]
    if fast is None:
        spread = percent(figures["step_seconds_spread"])
        return (
            f"{mean}; correlation of step time and sent rate not computed: the step time is flat (standard deviation {spread} of the mean)"
        )
    r = "" if figures["correlation"] is None else f" (correlation {digits3(figures['correlation'])})"
    rates = " and ".join(
        f"{seconds_text(part['step_seconds'])} at {bytes_text(part['sent_bytes_per_second'], per_second=True)}" for part in (fast, slow)
    )
    tenths = f"fastest and slowest tenth of {count} sampled intervals: {rates} sent by all nodes while training{r}{of and f', seconds{of}'}"
    return tenths if sync else f"{tenths}; {_interpretation(fast, slow)}"


def _interpretation(fast: dict[str, float], slow: dict[str, float]) -> str:
    if not fast["sent_bytes_per_second"]:
        return "nothing was sent"
    per_step = slow["bytes_per_step"] / fast["bytes_per_step"]
    if abs(slow["sent_bytes_per_second"] / fast["sent_bytes_per_second"] - 1) < EQUAL_WITHIN:
        return "the sent rate is the same in slow steps, so they move more bytes"
    if abs(per_step - 1) < EQUAL_WITHIN:
        return f"a step moves {bytes_text(fast['bytes_per_step'])} in both, so the sent rate follows the speed"
    return f"a slow step moves {digits3(per_step)} times the bytes of a fast one"
