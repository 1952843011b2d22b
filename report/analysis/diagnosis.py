"""The diagnosis of a run: its bottleneck and figures, from the run directory only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from ...records.text import number_text, rate_text, seconds_text
from ..runs.cpu_starvation import CpuStarvation, cpu_starvation
from ..runs.run import Run
from .evidence import (
    PAUSE_COMPONENTS,
    TRAINING_COMPONENTS,
    Evidence,
    Link,
    NetworkCause,
    Shares,
    Worker,
    clock_fractions,
    percent,
    read_evidence,
    step_fractions,
)

BAND = 0.25  # relative error of an estimate; all on a quiet machine were within it (docs/where-the-time-goes.md)
SLOWER = "the calibration was slower than the run itself"  # why communication is unknown
UNMEASURABLE = "too little to be measured"  # if an exchange of a few bytes took as long as the whole


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """The exchange of a sync step that computation does not hide, in seconds of one step."""

    exchange: str
    step_seconds: float
    messages_seconds_per_step: float | None = None  # an exchange of a few bytes; None without a usable calibration, as the next two
    bytes_seconds_per_step: float | None = None  # added by the gradients' bytes, None if unknown
    around_seconds_per_step: float | None = None  # the rest beyond these and own work
    messages_fraction: float | None = None  # of the step
    exchange_fraction_at_most: float | None = None  # `hidden_exchange`
    direct_exchange_step_seconds_estimate: float | None = None  # calibrated with ``--exchange direct``, as all below
    direct_exchange_steps_per_second_estimate: float | None = None
    direct_exchange_steps_per_second_low: float | None = None
    direct_exchange_steps_per_second_high: float | None = None
    direct_exchange_speedup_estimate: float | None = None
    no_estimate: str | None = None  # the reason, if there is none


def exchange_costs(evidence: Evidence, *, starved: bool) -> ExchangeCosts | None:
    """Return a sync exchange's costs, if calibrated; no estimate if `starved` (CPU contention)."""
    calibrated = evidence.calibrated_workers
    known = [entry for entry in calibrated if entry["communicate_seconds"] and entry["message_seconds"]]
    if evidence.summary["mode"] != "sync" or evidence.shares is None or not known or len(known) < len(calibrated):
        return None
    step, exchange = fmean(worker.step_seconds for worker in evidence.workers), evidence.job.get("exchange") or "native"
    if (most := hidden_exchange(evidence)) is not None:
        reason = None if exchange != "native" else SLOWER
        return ExchangeCosts(exchange, step, exchange_fraction_at_most=most, no_estimate=reason)
    seen = fmean(worker.communicate_seconds for worker in evidence.workers)
    whole = fmean(entry["communicate_seconds"] for entry in known)
    few = fmean(entry["message_seconds"] for entry in known)
    messages = min(whole, few)
    shown = min(1.0, seen / whole)  # of the exchange; computing hides the rest
    costs = ExchangeCosts(
        exchange=exchange,
        step_seconds=step,
        messages_seconds_per_step=shown * messages,
        bytes_seconds_per_step=None if few > whole else shown * (whole - messages),
        around_seconds_per_step=max(0.0, seen - whole),
        messages_fraction=shown * messages / step,
    )
    return costs if exchange != "native" else _with_estimate(costs, evidence.calibration or {}, starved=starved)


def hidden_exchange(evidence: Evidence) -> float | None:
    """Return the maximum fraction of communication, if the calibration was slower than the run."""
    # Own work fills the step there, so the maximum is the exchange calibrated alone, or the calibration's spread.
    entries, shares = evidence.calibrated_workers, evidence.shares
    steps = {worker.worker: worker.step_seconds for worker in evidence.workers if worker.communicate_seconds <= 1e-9 * worker.step_seconds}
    slower = any(entry["data_seconds"] + entry["compute_seconds"] > steps.get(entry["worker"], math.inf) for entry in entries)
    if shares is None or not slower or len(steps) < len(evidence.workers) or evidence.summary["workers"] == 1:
        return None
    exchange_fraction = max((entry["communicate_seconds"] or 0.0) / steps[entry["worker"]] for entry in entries if entry["worker"] in steps)
    return min(1.0, max(exchange_fraction, shares.slowest.spread))


def _with_estimate(costs: ExchangeCosts, calibration: Mapping[str, Any], *, starved: bool) -> ExchangeCosts:
    tried = [entry["direct_step_seconds"] for entry in calibration["workers"] if entry.get("direct_step_seconds")]
    if starved or not tried:
        untried = calibration.get("direct_untried") or "the version that made this run did not measure it"
        return replace(costs, no_estimate="other programs had the cores" if starved else untried)
    step = fmean(tried)
    spread = max(entry.get("direct_spread") or 0.0 for entry in calibration["workers"])
    factor = 1 + math.hypot(BAND, spread)
    return replace(
        costs,
        direct_exchange_step_seconds_estimate=step,
        direct_exchange_steps_per_second_estimate=1 / step,
        direct_exchange_steps_per_second_low=1 / step / factor,
        direct_exchange_steps_per_second_high=1 / step * factor,
        direct_exchange_speedup_estimate=costs.step_seconds / step,
    )


def exchange_text(costs: ExchangeCosts) -> str:
    """Return the communication costs and the estimate for the direct all-reduce as text."""
    step = f"communication in a step of {seconds_text(costs.step_seconds)} (mean without the first updates)"
    if costs.messages_seconds_per_step is None:
        return f"{step}: unknown, at most about {percent(costs.exchange_fraction_at_most)}, as {SLOWER}"
    parts = {
        "latency": costs.messages_seconds_per_step,
        "transfer of the bytes": costs.bytes_seconds_per_step,
        "framework overhead and waiting around the all-reduce": costs.around_seconds_per_step,
    }
    shown = [f"{name} {seconds_text(cost)} ({percent(cost / costs.step_seconds)})" for name, cost in parts.items() if cost]
    shown += [] if costs.bytes_seconds_per_step is not None else [f"transfer of the bytes {UNMEASURABLE}"]
    spent = f"{step}: {', '.join(shown)}"
    if costs.exchange != "native":
        return f"{spent}, with --exchange {costs.exchange}"
    if costs.direct_exchange_steps_per_second_estimate is None:
        return f"{spent}; the gain of --exchange direct is unknown: {costs.no_estimate}"
    rates = [getattr(costs, f"direct_exchange_steps_per_second_{name}") for name in ("estimate", "low", "high")]
    rate, low, high, now = (rate_text(value, "") for value in (*rates, 1 / costs.step_seconds))
    faster = f"{number_text(costs.direct_exchange_speedup_estimate, 2)} × the {now} of these steps"
    return f"{spent}; estimated with --exchange direct: {rate} steps/s ({low} to {high}), {faster}"


Bottleneck = str  # a component of `NAMES`; starved: by other programs; mixed: nothing dominates; unclear; unknown: no calibration
SLOW = 1.5  # times the median worker's own work
DOMINANT = 0.4  # below this share nothing dominates
MIN_DIFFERENCE = 0.05  # repeats on a shared machine differ by so much; a smaller lead decides nothing


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node's bottleneck and figures, over the run or the segment of `Evidence`."""

    node: int
    limit: str | None  # CPU, GPU, data, link, exchange (the link is not full), peer or nothing; None without calibration
    step_fractions: Mapping[str, float] | None
    slowness: float | None  # slowest worker's own time over the median worker's
    updates_fraction: float | None  # share of all updates in async mode
    cpu_cores_used: float | None
    cores_available: float | None
    cpu_fraction: float | None
    gpu_utilization: float | None
    sent_bytes_per_second: float | None
    received_bytes_per_second: float | None
    link: Link  # in training alone


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict on a run."""

    verdict: Bottleneck
    candidates: tuple[str, ...]  # of an unclear verdict, within the uncertainty
    network_cause: NetworkCause | None  # why communication is slow, if it is
    message_fraction: float | None
    slow_node: int | None  # the straggler, if any
    slowness: float | None
    run_fractions: Mapping[str, float]  # as in `Shares`; without calibration only the clock's
    run_uncertainty: Mapping[str, float]
    step_fractions: Mapping[str, float]
    nodes: tuple[NodeView, ...]
    evidence: Evidence = field(repr=False)

    @property
    def starved(self) -> CpuStarvation | None:
        """The CPU contention, if that is the verdict."""
        return cpu_starvation(self.evidence.summary)

    @property
    def exchange_costs(self) -> ExchangeCosts | None:
        """The costs of the exchange, and the gain of the direct exchange."""
        return exchange_costs(self.evidence, starved=self.starved is not None)

    @property
    def calibrated(self) -> bool:
        """Whether the verdict is based on a calibration."""
        return self.evidence.shares is not None

    @property
    def training_fraction(self) -> float:
        """The share of training in the run's time."""
        return sum(self.run_fractions[name] for name in (TRAINING_COMPONENTS if self.calibrated else ("training",)))

    def to_json(self) -> dict[str, Any]:
        """Return the figures, without their source documents."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("evidence", "nodes")}
        return {
            "run": self.evidence.name,
            "state": self.evidence.state,
            "recorded_until_seconds": self.evidence.recorded_until,
            "calibrated": self.calibrated,
            "part_began_seconds": self.evidence.part_began_seconds,
            "starved": None if self.starved is None else asdict(self.starved),
            **fields,
            "training_fraction": self.training_fraction,
            **{name: self.evidence.summary.get(name) for name in _RESTARTS},
            "exchange_costs": None if self.exchange_costs is None else asdict(self.exchange_costs),
            "nodes": [{**asdict(node), "link": node.link.to_json()} for node in self.nodes],
        }


_RESTARTS = ("restarts", "restart_seconds_lost", "worker_restarts", "worker_absent_seconds")  # of a summary


def diagnose(run: Run) -> Diagnosis:
    """Return the verdict on a run. Raises UsageError without a recorded update."""
    return diagnose_evidence(read_evidence(run))


def diagnose_evidence(evidence: Evidence) -> Diagnosis:
    """Return the verdict of the evidence; only ``starved`` under CPU contention."""
    diagnosis = _diagnose(evidence)
    return diagnosis if diagnosis.starved is None else replace(diagnosis, verdict="starved", candidates=(), slow_node=None)


def _diagnose(evidence: Evidence) -> Diagnosis:
    shares = evidence.shares
    if shares is None:
        around = clock_fractions(evidence.summary)
        long = [component for component in (*PAUSE_COMPONENTS, "other") if around[component] > MAX_UNSEEN]
        views = tuple(_view(evidence, node, None, None) for node in range(len(evidence.summary["per_node"])))
        return Diagnosis(long[0] if long else "unknown", tuple(long), None, None, None, None, around, {}, {}, views, evidence)
    exchange = shares.step["network"]
    seconds = sum(worker.communicate_seconds for worker in evidence.workers) / len(evidence.workers)
    cause = evidence.network_cause(exchange, seconds) if exchange >= NOTABLE else None
    short = _saturated_node(evidence) if cause != "link" else None
    bottleneck, candidates = _rank_components(shares, short is not None)
    slow = (shares.slowest.node if short is None else short) if "peers" in candidates else None
    views = tuple(_view(evidence, node, cause, short) for node in range(len(evidence.summary["per_node"])))
    figures = (shares.run, shares.uncertainty, shares.step)
    return Diagnosis(bottleneck, candidates, cause, evidence.message_fraction, slow, shares.slowness, *figures, views, evidence)


MAX_UNSEEN = 0.5  # without calibration, a component above this is the verdict
NOTABLE = 0.2  # from this share of the training on, the cause of the communication is determined
_WORK = ("compute", "data", "peers")


def _saturated_node(evidence: Evidence) -> int | None:
    """Return the only node without spare cores in sync mode, so that all wait for its exchange."""
    nodes = evidence.summary["per_node"]
    known = [(node["cores_available"], _mean(node["cpu_fraction"])) for node in nodes]
    if evidence.summary["mode"] == "async" or len(nodes) < 2 or any(None in pair for pair in known):
        return None
    least, *rest = sorted(range(len(nodes)), key=lambda node: known[node][0])
    spare = all(known[node][0] >= SLOW * known[least][0] and (known[node][1] or 0.0) < NEARLY_ALL for node in rest)
    return least if spare and (known[least][1] or 0.0) > NEARLY_ALL else None


NEARLY_ALL = 0.85  # CPU fraction of a node without spare cores; the rest is waiting between threads and tasks


def _rank_components(shares: Shares, short_of_cores: bool) -> tuple[Bottleneck, tuple[str, ...]]:
    order = sorted(shares.run, key=lambda component: -shares.run[component])
    largest = order[0]
    if _combined_share(shares, largest, short_of_cores) < DOMINANT:
        return "mixed", tuple(component for component in order if shares.run[component] >= shares.run[largest] / 2)
    leads = {name: shares.run[largest] - shares.run[name] - shares.uncertainty[largest] - shares.uncertainty[name] for name in order}
    near = [component for component in order if component == largest or leads[component] <= MIN_DIFFERENCE]
    candidates = list(dict.fromkeys(name for component in near for name in _candidate_names(component, shares, short_of_cores)))
    return "unclear" if len(candidates) > 1 else candidates[0], tuple(candidates)


def _combined_share(shares: Shares, largest: str, short_of_cores: bool) -> float:
    if short_of_cores and largest in (*_WORK, "network"):
        return sum(shares.run[component] for component in (*_WORK, "network"))
    slow = largest in _WORK and shares.slowness >= SLOW
    return sum(shares.run[component] for component in _WORK) if slow else shares.run[largest]


def _candidate_names(component: str, shares: Shares, short_of_cores: bool) -> tuple[str, ...]:
    if component == "network" and short_of_cores:
        return ("peers",)
    if component not in _WORK:
        return (component,)
    if shares.slowness >= SLOW + shares.slowness_uncertainty:
        return ("peers",)
    ordinary = component if component != "peers" else "compute"
    return (ordinary,) if shares.slowness < SLOW - shares.slowness_uncertainty else (ordinary, "peers")


def _view(evidence: Evidence, node: int, cause: NetworkCause | None, short: int | None) -> NodeView:
    figures = evidence.summary["per_node"][node]
    workers = [worker for worker in evidence.workers if worker.node == node]
    step = step_fractions(workers) if workers else None
    gpu = _gpu_utilization(figures["gpus"] or ())
    return NodeView(
        node,
        None if step is None or evidence.shares is None else _limit(evidence, node, step, cause, gpu, short),
        step,
        _slowness(evidence, workers),
        _updates_fraction(evidence, workers),
        _mean(figures["cpu_cores_used"]),
        figures["cores_available"],
        _mean(figures["cpu_fraction"]),
        gpu,
        figures["network_sent_bytes_per_second"],
        figures["network_received_bytes_per_second"],
        evidence.links[node],
    )


def _gpu_utilization(gpus: Sequence[Mapping[str, Any]]) -> float | None:
    used = [gpu for gpu in gpus if gpu.get("tasks")] or gpus
    return max((gpu["utilization"]["mean"] for gpu in used if gpu.get("utilization")), default=None)


def _mean(figure: Mapping[str, float] | None) -> float | None:
    return None if figure is None else figure["mean"]


def _slowness(evidence: Evidence, workers: Sequence[Worker]) -> float | None:
    if evidence.shares is None or not workers or not evidence.shares.slowest.work_seconds:
        return None
    usual = evidence.shares.slowest.work_seconds / evidence.shares.slowness
    return max(worker.work_seconds for worker in workers) / usual if usual else None


def _updates_fraction(evidence: Evidence, workers: Sequence[Worker]) -> float | None:
    counts = evidence.summary["updates_by_worker"]
    return None if not counts or not sum(counts) else sum(worker.updates or 0 for worker in workers) / sum(counts)


USED_GPU = 0.05  # a GPU with less utilization did not compute the steps


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
        serves_itself = evidence.summary["mode"] == "async" and evidence.summary["parameter_servers"] == 1 and node == 0
        return "link" if cause == "link" and not serves_itself else "exchange"
    return {"data": "data", "peers": "peer"}[largest]
