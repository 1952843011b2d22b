"""What holds a run back? A verdict with the figures behind it, from the run directory alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ..catalog.cpu_starvation import CpuStarvation, cpu_starvation
from ..catalog.run import Run
from .evidence import Evidence, read_evidence
from .exchange_costs import ExchangeCosts, exchange_costs
from .links import Link, NetworkCause, message_fraction, network_cause
from .time_shares import BESIDE_TRAINING, TRAINING_COMPONENTS, Shares, Worker, around_training, node_fractions

__all__ = ["Evidence", "Explanation", "NodeView", "explain", "read_evidence"]

Verdict = Literal[
    "starved",
    "compute",
    "network",
    "data",
    "peers",
    "idle",
    "evaluating",
    "translating",
    "saving",
    "profiling",
    "other",
    "mixed",
    "unclear",
    "unknown",
]

SLOW = 1.5
"""From this on a worker counts as slow: its own work takes so many times that of a worker of ordinary speed."""

DOMINANT = 0.4
"""Below this nothing dominates: with ten components, what is less has another of nearly its size beside it or is spread over many."""

LEAST_DIFFERENCE = 0.05
"""Shares of two runs of one job differ by so much on a machine that does other things too; a smaller lead decides nothing."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: what limits it, and the figures. Fractions of its own steps by component; None for what was not observed.

    - `limit`: ``CPU``, ``GPU``, ``data``, ``link``, ``exchange`` (messages or copies at a link that is not full), ``peer``, or ``nothing``
      where none dominates; None without a calibration
    - `slowness`: its slowest worker's own time over that of a worker of ordinary speed
    - `updates_fraction`: async: its share of all updates
    - `cpu_cores_used`, `cpu_fraction`, `sent_bytes_per_second`, `received_bytes_per_second`: means over the whole run, or the part of it
      that `Evidence` are of, evaluations and pauses included; those of `link` are over the training alone
    """

    node: int
    limit: str | None
    step_fractions: Mapping[str, float] | None
    slowness: float | None
    updates_fraction: float | None
    cpu_cores_used: float | None
    cores_available: float | None
    cpu_fraction: float | None
    gpu_utilization: float | None
    sent_bytes_per_second: float | None
    received_bytes_per_second: float | None
    link: Link


@dataclass(frozen=True, slots=True)
class Explanation:
    """The verdict on a run.

    - `verdict`: the component of the run that holds it back; ``starved``, without candidates, where other programs had the cores;
      ``unclear`` between `candidates` that differ by less than the figures are known;
      ``mixed`` where none of several dominates; ``unknown`` where the run has no calibration and the rest says nothing either
    - `network_cause`: why the exchange takes long, where it does
    - `slow_node`: the node that is slow, if one is
    - `run_fractions`, `run_uncertainty`, `step_fractions`: those of `Shares`; without calibration only what the clock tells
    """

    verdict: Verdict
    candidates: tuple[str, ...]
    network_cause: NetworkCause | None
    message_fraction: float | None
    slow_node: int | None
    slowness: float | None
    run_fractions: Mapping[str, float]
    run_uncertainty: Mapping[str, float]
    step_fractions: Mapping[str, float]
    nodes: tuple[NodeView, ...]
    evidence: Evidence = field(repr=False)

    @property
    def starved(self) -> CpuStarvation | None:
        """What other programs did to the run, where that is the verdict."""
        return cpu_starvation(self.evidence.summary)

    @property
    def exchange_costs(self) -> ExchangeCosts | None:
        """What messages and bytes of the exchange cost, and what the direct exchange would gain."""
        return exchange_costs(self.evidence, starved=self.starved is not None)

    @property
    def calibrated(self) -> bool:
        """Whether the run's calibration stands behind the verdict."""
        return self.evidence.shares is not None

    @property
    def training_fraction(self) -> float:
        """The share of training in the run's time, as the clock has it."""
        return sum(self.run_fractions[name] for name in (TRAINING_COMPONENTS if self.calibrated else ("training",)))

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without the documents that they were read from."""
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("evidence", "nodes")}
        nodes = [{**asdict(node), "link": _link_json(node.link)} for node in self.nodes]
        by = None if self.starved is None else asdict(self.starved)
        began = self.evidence.part_began_seconds
        until = self.evidence.recorded_until
        return {
            "run": self.evidence.name,
            "state": self.evidence.state,
            "recorded_until_seconds": until,
            "calibrated": self.calibrated,
            "part_began_seconds": began,
            "starved": by,
            **own,
            "training_fraction": self.training_fraction,
            **{name: self.evidence.summary.get(name) for name in _RESTARTS},
            "exchange_costs": None if self.exchange_costs is None else asdict(self.exchange_costs),
            "nodes": nodes,
        }


_RESTARTS = ("restarts", "restart_seconds_lost", "worker_restarts", "worker_absent_seconds")
"""What a summary says of losses after which the run went on by itself."""


def _link_json(link: Link) -> dict[str, Any]:
    return {**asdict(link), "sent_fraction": link.sent_fraction, "received_fraction": link.received_fraction}


def explain(run: Run) -> Explanation:
    """Return what holds back a run. Raises UsageError where it has recorded no update (yet)."""
    return judge(read_evidence(run))


# The verdict --------------------------------------------------------------------------------------------------------------


def judge(evidence: Evidence) -> Explanation:
    """Return the verdict that the evidence allow: none on the run itself where other programs had its cores."""
    found = _judged(evidence)
    return found if found.starved is None else replace(found, verdict="starved", candidates=(), slow_node=None)


def _judged(evidence: Evidence) -> Explanation:
    shares = evidence.shares
    if shares is None:
        around = around_training(evidence.summary)
        long = [component for component in (*BESIDE_TRAINING, "other") if around[component] > LARGEST_UNSEEN]
        verdict: Verdict = long[0] if long else "unknown"  # type: ignore[assignment]
        views = tuple(_view(evidence, node, None, None) for node in range(len(evidence.summary["per_node"])))
        return Explanation(verdict, tuple(long), None, None, None, None, around, {}, {}, views, evidence)
    exchange = shares.step["network"]
    seconds = sum(worker.communicate_seconds for worker in evidence.workers) / len(evidence.workers)
    cause = network_cause(exchange, evidence.links, evidence.calibration, seconds) if exchange >= NOTABLE else None
    short = _saturated_node(evidence) if cause != "link" else None
    verdict, candidates = _ranked(shares, short is not None)
    slow = (shares.slowest.node if short is None else short) if "peers" in candidates else None
    views = tuple(_view(evidence, node, cause, short) for node in range(len(evidence.summary["per_node"])))
    message = message_fraction(evidence.calibration)
    figures = (shares.run, shares.uncertainty, shares.step)
    return Explanation(verdict, candidates, cause, message, slow, shares.slowness, *figures, views, evidence)


LARGEST_UNSEEN = 0.5
"""Without a calibration a component beside training is the verdict if it is more than training and all else together."""

NOTABLE = 0.2
"""A cause is looked for where the exchange takes at least so much of the training."""

_WORK = ("compute", "data", "peers")


def _saturated_node(evidence: Evidence) -> int | None:
    """Sync: return the node that has no core to spare where each other one may use more and does not; None where there is none.

    What a node computes for an exchange takes it as much longer as its own work, and all wait for it.
    """
    nodes = evidence.summary["per_node"]
    known = [(node["cores_available"], _mean(node["cpu_fraction"])) for node in nodes]
    if evidence.summary["mode"] == "async" or len(nodes) < 2 or any(None in pair for pair in known):
        return None
    least, *others = sorted(range(len(nodes)), key=lambda node: known[node][0])
    spare = all(known[node][0] >= SLOW * known[least][0] and (known[node][1] or 0.0) < NEARLY_ALL for node in others)
    return least if spare and (known[least][1] or 0.0) > NEARLY_ALL else None


NEARLY_ALL = 0.85
"""A node that uses this much of its cores has none to spare: the rest is waiting between threads and tasks."""


def _ranked(shares: Shares, short_of_cores: bool) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and the components that may be the largest.

    Where a worker is slow, its work stands for waiting: not computing as such holds the run back but that one node computes slowly. So
    does the exchange where a node is short of cores for it.
    """
    order = sorted(shares.run, key=lambda component: -shares.run[component])
    largest = order[0]
    if _combined_share(shares, largest, short_of_cores) < DOMINANT:
        return "mixed", tuple(component for component in order if shares.run[component] >= shares.run[largest] / 2)
    near = [component for component in order if _certain_lead(shares, largest, component) <= LEAST_DIFFERENCE]
    candidates = list(dict.fromkeys(name for component in near for name in _named(component, shares, short_of_cores)))
    if len(candidates) > 1:
        return "unclear", tuple(candidates)
    verdict: Verdict = candidates[0]  # type: ignore[assignment]
    return verdict, (verdict,)


def _combined_share(shares: Shares, largest: str, short_of_cores: bool) -> float:
    """Return the share of the run, 0 to 1, that removing this bottleneck would free.

    A slow worker's is all of its work; where a node is short of cores, also the exchange that it holds up.
    """
    if short_of_cores and largest in (*_WORK, "network"):
        return sum(shares.run[component] for component in (*_WORK, "network"))
    slow = largest in _WORK and shares.slowness >= SLOW
    return sum(shares.run[component] for component in _WORK) if slow else shares.run[largest]


def _certain_lead(shares: Shares, largest: str, component: str) -> float:
    """Return the share of the run (0 to 1) by which `largest` certainly exceeds `component`; negative within the uncertainty of both."""
    if component == largest:
        return 0.0
    return shares.run[largest] - shares.run[component] - shares.uncertainty[largest] - shares.uncertainty[component]


def _named(component: str, shares: Shares, short_of_cores: bool) -> tuple[str, ...]:
    """Return what a component of the run means: work is that of a slow node where there is one; both where that is not certain."""
    if component == "network" and short_of_cores:
        return ("peers",)
    if component not in _WORK:
        return (component,)
    if shares.slowness >= SLOW + shares.slowness_uncertainty:
        return ("peers",)
    ordinary = component if component != "peers" else "compute"
    return (ordinary,) if shares.slowness < SLOW - shares.slowness_uncertainty else (ordinary, "peers")


# The nodes ----------------------------------------------------------------------------------------------------------------


def _view(evidence: Evidence, node: int, cause: NetworkCause | None, short: int | None) -> NodeView:
    figures = evidence.summary["per_node"][node]
    own = [worker for worker in evidence.workers if worker.node == node]
    step = node_fractions(evidence.workers, node)
    gpu = _gpu_utilization(figures["gpus"] or ())
    return NodeView(
        node,
        None if step is None or evidence.shares is None else _limit(evidence, node, step, cause, gpu, short),
        step,
        _slowness(evidence, own),
        _updates_fraction(evidence, own),
        _mean(figures["cpu_cores_used"]),
        figures["cores_available"],
        _mean(figures["cpu_fraction"]),
        gpu,
        figures["network_sent_bytes_per_second"],
        figures["network_received_bytes_per_second"],
        evidence.links[node],
    )


def _gpu_utilization(gpus: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean utilization of the busiest of the node's GPUs: of those that its tasks were given, where it is known which."""
    given = [gpu for gpu in gpus if gpu.get("tasks")] or gpus
    return max((gpu["utilization"]["mean"] for gpu in given if gpu.get("utilization")), default=None)


def _mean(figure: Mapping[str, float] | None) -> float | None:
    return None if figure is None else figure["mean"]


def _slowness(evidence: Evidence, own: Sequence[Worker]) -> float | None:
    if evidence.shares is None or not own or not evidence.shares.slowest.own_seconds:
        return None
    usual = evidence.shares.slowest.own_seconds / evidence.shares.slowness
    return max(worker.own_seconds for worker in own) / usual if usual else None


def _updates_fraction(evidence: Evidence, own: Sequence[Worker]) -> float | None:
    counts = evidence.summary["updates_by_worker"]
    return None if not counts or not sum(counts) else sum(worker.updates or 0 for worker in own) / sum(counts)


USED_GPU = 0.05
"""A GPU that was busy for less than this did not compute the steps."""


def _limit(
    evidence: Evidence, node: int, step: Mapping[str, float], cause: NetworkCause | None, gpu: float | None, short: int | None
) -> str:
    largest = max(step, key=lambda component: step[component])
    if step[largest] < DOMINANT:
        return "nothing"
    if largest == "compute":
        return "GPU" if (gpu or 0.0) > USED_GPU else "CPU"
    if largest == "network" and short is not None:
        return "CPU" if node == short else "peer"
    if largest == "network":
        return "link" if cause == "link" and not _serves_itself(evidence, node) else "exchange"
    return {"data": "data", "peers": "peer"}[largest]


def _serves_itself(evidence: Evidence, node: int) -> bool:
    """Async: whether the only parameter server is on this node, so that its workers' exchanges cross no link."""
    return evidence.summary["mode"] == "async" and evidence.summary["parameter_servers"] == 1 and node == 0
