"""The figures behind a diagnosis; of a resumed run those of its last segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...core.units import parse_bandwidth
from ...records.node_usage import per_node
from ...records.store.jsonl import DamagedRunError
from ...records.store.schema import Clock
from ...records.text import UNKNOWN
from ...records.time_shares import COMPONENTS, nodes_of_last_segment, resumed_seconds, with_segments
from ..compare.caveats import changed_text, restarts_text
from ..runs.run import Run, as_recorded

STEP_COMPONENTS = {
    "compute": "compute_seconds",
    "data": "data_seconds",
    "peers": "peers_seconds",
    "network": "communicate_seconds",
}  # all of a step, and their figures of a worker
TRAINING_COMPONENTS = (*STEP_COMPONENTS, "idle")  # async workers may be idle
PAUSE_COMPONENTS = {
    "evaluating": "eval_seconds",
    "translating": "translate_seconds",
    "saving": "checkpoint_seconds",
    "profiling": "profile_seconds",
}  # other components of a run's clock, and their figures in a summary
SELDOM = ("translating", "profiling")  # most runs have none


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker's step: seconds per update, and the relative spread of its calibration."""

    worker: int
    node: int
    step_seconds: float
    data_seconds: float
    compute_seconds: float
    peers_seconds: float
    communicate_seconds: float
    spread: float
    updates: int | None = None

    @property
    def work_seconds(self) -> float:
        """The worker's own work in a step."""
        return self.data_seconds + self.compute_seconds

    @property
    def fractions(self) -> dict[str, float]:
        """The components of its step as fractions."""
        return {component: getattr(self, name) / self.step_seconds for component, name in STEP_COMPONENTS.items()}


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time went, as fractions."""

    step: Mapping[str, float]  # of training, by `STEP_COMPONENTS`; sync: of a median worker, its wait for the slowest, and the rest
    run: Mapping[str, float]  # of the run clock: those, `idle`, and all others; their sum is 1
    uncertainty: Mapping[str, float]  # of each component of `run`, from the spread of the calibration
    slowest: Worker  # worker with the most own time
    slowness: float  # its own time over the median worker's
    slowness_uncertainty: float


def read_workers(summary: Mapping[str, Any]) -> list[Worker]:
    """Return the workers of ``time_shares`` with updates and all components."""
    counts = summary.get("updates_by_worker") or []
    names = ("worker", "node", "step_seconds", *STEP_COMPONENTS.values())
    return [
        Worker(
            **{name: entry[name] for name in names},
            spread=entry["spread"] or 0.0,
            updates=counts[entry["worker"]] if entry["worker"] < len(counts) else None,
        )
        for entry in summary["time_shares"]["workers"]
        if entry["step_seconds"] and None not in [entry[name] for name in COMPONENTS]
    ]


def calibrated_segment(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a summary with the clock and updates of the calibrated segment."""
    shares = summary.get("time_shares")
    if not shares or not (shares.get("part_began_seconds") or summary.get("profiled_updates")):
        return summary
    clock = {name: seconds for name, seconds in shares["run"].items() if name != "other_seconds"}
    updates = {worker["worker"]: worker["updates"] for worker in shares["workers"]}
    by_worker = [updates.get(worker) or 0 for worker in range(summary["workers"])] if summary["mode"] == "async" else None
    return {**summary, **clock, "run_seconds": sum(shares["run"].values()), "updates_by_worker": by_worker}


def clock_fractions(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the fractions of the run clock in training, `PAUSE_COMPONENTS` and otherwise."""
    pauses = {component: summary[name] for component, name in PAUSE_COMPONENTS.items()}
    seconds = {"training": summary["train_seconds"], **pauses}
    whole = max(summary["run_seconds"], sum(seconds.values()))
    fractions = {component: value / whole if whole else 0.0 for component, value in seconds.items()}
    return {**fractions, "other": max(0.0, 1.0 - sum(fractions.values()))}


def read_shares(summary: Mapping[str, Any], workers: Sequence[Worker]) -> Shares:
    """Return the shares of a run from its summary and its workers (at least one)."""
    slowest = max(workers, key=lambda worker: worker.work_seconds)
    usual = sorted(workers, key=lambda worker: worker.work_seconds)[(len(workers) - 1) // 2]  # the median, of two in the middle the faster
    sync = summary["mode"] == "sync"
    common = {
        "compute": usual.compute_seconds,
        "data": usual.data_seconds,
        "peers": slowest.work_seconds - usual.work_seconds,
        "network": sum(worker.communicate_seconds for worker in workers) / len(workers),
    }
    step = _normalised(common) if sync else _all_steps_fractions(workers)
    idle = 0.0 if sync else _idle(summary, workers)
    around = clock_fractions(summary)
    training = around["training"] * (1.0 - idle)
    run = {component: fraction * training for component, fraction in step.items()} | {"idle": around["training"] * idle}
    run |= {component: around[component] for component in PAUSE_COMPONENTS}
    run["other"] = max(0.0, 1.0 - sum(run.values()))
    uncertain = _uncertainty(step, usual, slowest, mode=summary["mode"], single=len(workers) == 1)
    uncertainty = {component: uncertain.get(component, 0.0) * training for component in run}
    slowness = slowest.work_seconds / usual.work_seconds if usual.work_seconds else 1.0
    doubt = slowness * (slowest.spread + usual.spread) if len(workers) > 1 else 0.0
    return Shares(step, run, uncertainty, slowest, slowness, doubt)


def _uncertainty(step: Mapping[str, float], usual: Worker, slowest: Worker, *, mode: str, single: bool) -> dict[str, float]:
    if single and mode == "sync":
        return dict.fromkeys(("compute", "data"), usual.spread * step["data"])
    work = step["compute"] + step["data"]
    calibrated = {component: usual.spread * step[component] for component in ("compute", "data")}
    if mode == "async":
        return {**calibrated, "network": usual.spread * work}
    left = slowest.spread * (work + step["peers"])
    return {**calibrated, "peers": usual.spread * work + left, "network": left}


def step_fractions(workers: Sequence[Worker]) -> dict[str, float]:
    """Return the fractions of all steps of some workers."""
    weights = [1 if worker.updates is None else worker.updates for worker in workers]
    pairs = [*zip(weights, workers, strict=True)]
    sums = {component: sum(weight * getattr(worker, name) for weight, worker in pairs) for component, name in STEP_COMPONENTS.items()}
    return _normalised(sums)


def _all_steps_fractions(workers: Sequence[Worker]) -> dict[str, float]:
    seconds = dict.fromkeys(STEP_COMPONENTS, 0.0)
    for worker in workers:
        spent = (1 if worker.updates is None else worker.updates) * worker.step_seconds
        for component, fraction in worker.fractions.items():
            seconds[component] += spent * fraction
    return _normalised(seconds)


def _idle(summary: Mapping[str, Any], workers: Sequence[Worker]) -> float:
    whole: float = len(workers) * summary["train_seconds"]
    if whole <= 0 or any(worker.updates is None for worker in workers):
        return 0.0
    return max(0.0, 1.0 - sum((worker.updates or 0) * worker.step_seconds for worker in workers) / whole)


def idle_fraction(summary: Mapping[str, Any]) -> float:
    """Return the fraction of the last segment's training without steps for async workers."""
    if summary["mode"] == "sync" or not summary.get("time_shares"):
        return 0.0
    segment = calibrated_segment(summary)
    workers = read_workers(segment)
    return _idle(segment, workers) if workers else 0.0


def _normalised(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {component: value / whole if whole else 0.0 for component, value in seconds.items()}


NetworkCause = Literal["link", "messages", "transfer", "waiting"]  # messages: latency and overhead; transfer: bytes, but not a full link


@dataclass(frozen=True, slots=True)
class Link:
    """A node's link in training: bytes per second, their limit, if known, and its source."""

    node: int
    sent_bytes_per_second: float | None
    received_bytes_per_second: float | None
    limit_bytes_per_second: float | None
    limit_source: str | None

    @property
    def fractions(self) -> dict[str, float | None]:
        """Utilization of both directions, None if unknown."""
        rates, limit = {"sent": self.sent_bytes_per_second, "received": self.received_bytes_per_second}, self.limit_bytes_per_second
        return {f"{way}_fraction": rate / limit if rate is not None and limit else None for way, rate in rates.items()}

    @property
    def fraction(self) -> float | None:
        """Utilization of the busier direction."""
        return max((fraction for fraction in self.fractions.values() if fraction is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with the utilization of both directions."""
        return {**asdict(self), **self.fractions}


def read_links(summary: Mapping[str, Any], job: Mapping[str, Any], env: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Return each node's link, with its bytes per second of training and profiling."""
    addresses = job.get("cluster", {}).get("addresses", ())
    links = []
    for figures in summary["per_node"]:
        node = figures["node"]
        address = addresses[node] if node < len(addresses) else None
        limit, source = _limit(job.get("bandwidth"), env[node] if node < len(env) else {}, address)
        seconds = summary["train_seconds"] + summary.get("profile_seconds", 0.0)
        amounts = (figures[f"network_{way}_bytes"] for way in ("sent", "received"))
        sent, received = (amount / seconds if amount is not None and seconds > 0 else None for amount in amounts)
        links.append(Link(node, sent, received, limit, source))
    return links


def _limit(bandwidth: str | None, host: Mapping[str, Any], address: str | None) -> tuple[float | None, str | None]:
    if bandwidth is not None:
        return parse_bandwidth(bandwidth) / 8, "bandwidth"
    for name, interface in (host.get("interfaces") or {}).items():
        if address in interface["addresses"] and interface["speed_bits_per_second"]:
            return interface["speed_bits_per_second"] / 8, name
    return None, None


DOMINANT_FRACTION = 0.5  # minimum share of the time for a cause to be named


@dataclass(frozen=True, slots=True)
class Evidence:
    """The basis of a verdict; clock, nodes and counts are of a calibrated last segment."""

    name: str
    summary: Mapping[str, Any]
    job: Mapping[str, Any]
    env: Sequence[Mapping[str, Any]]
    calibration: Mapping[str, Any] | None
    workers: Sequence[Worker]
    shares: Shares | None
    links: Sequence[Link]
    evaluations: int
    saved: int
    part_began_seconds: float | None  # start of the last segment
    changed: str | None  # note on a resume with other settings
    restarted: str | None  # note on restarts after failures
    steps_mixed: bool  # step times are of all segments together, as in older releases
    state: str
    recorded_until: float | None  # run clock of a summary computed from records

    @property
    def calibrated_workers(self) -> Sequence[Mapping[str, Any]]:
        """The workers' seconds in the calibration; empty without one."""
        workers: Sequence[Mapping[str, Any]] = (self.calibration or {}).get("workers", ())
        return workers

    def find_calibration(self, worker: Worker) -> Mapping[str, Any]:
        """Return a worker's seconds in the calibration; empty without them."""
        return next((entry for entry in self.calibrated_workers if entry["worker"] == worker.worker), {})

    @property
    def busiest_link(self) -> Link | None:
        """The link with the highest utilization; None if no limit is known."""
        known = [link for link in self.links if link.fraction is not None]
        return max(known, key=lambda link: link.fraction or 0.0, default=None)

    @property
    def exchange_seconds(self) -> float | None:
        """The seconds of an exchange alone on its slowest worker, if known."""
        return max((entry["communicate_seconds"] for entry in self.calibrated_workers if entry["communicate_seconds"]), default=None)

    @property
    def message_fraction(self) -> float | None:
        """The time of a few bytes over that of an exchange on its slowest worker, if known."""
        known = [entry for entry in self.calibrated_workers if entry["communicate_seconds"] and entry["message_seconds"] is not None]
        if not known:
            return None
        longest = max(known, key=lambda entry: entry["communicate_seconds"])
        return float(min(1.0, longest["message_seconds"] / longest["communicate_seconds"]))

    def network_cause(self, network_fraction: float, seconds: float) -> NetworkCause:
        """Return why communication takes `network_fraction` of a step, which is `seconds`."""
        # The link, if the bytes at its full rate take at least half of that; waiting, if the exchange alone takes less than half; messages,
        # if a few bytes take at least half as long as all; else the transfer through memory and processor.
        link = self.busiest_link
        if link is not None and (link.fraction or 0.0) >= DOMINANT_FRACTION * network_fraction:
            return "link"
        if self.exchange_seconds is not None and self.exchange_seconds < DOMINANT_FRACTION * seconds:
            return "waiting"
        return "messages" if (self.message_fraction or 0.0) >= DOMINANT_FRACTION else "transfer"


def read_evidence(run: Run) -> Evidence:
    """Return the basis of a verdict on a run. Raises UsageError without a recorded update."""
    run = as_recorded(run)
    summary, job, env = run.summary, run.job, run.nodes
    shares, workers, began, mixed = None, [], 0.0, False
    if (known := summary.get("time_shares")) is not None:
        mixed = known.get("part_began_seconds") is None and changed_text(run) is not None
        began = known.get("part_began_seconds") or 0.0
        summary = _last_segment_summary(run, began) if began else summary
        workers = [] if mixed else read_workers(summary)
        _expect_figures_of_nodes(run, workers)
        shares = read_shares(summary, workers) if workers and summary["run_seconds"] else None
    return Evidence(
        run.own_name,
        summary,
        job,
        env,
        run.calibration,
        workers,
        shares,
        read_links(summary, job, env),
        evaluations=sum(record.time_seconds > began for record in run.evals),
        saved=sum(record.event == "checkpoint_saved" and record.time_seconds > began for record in run.events),
        part_began_seconds=began or None,
        changed=changed_text(run, "the verdict and the figures here are those of its last part") if began else changed_text(run),
        restarted=restarts_text(run),
        steps_mixed=mixed,
        state=run.state,
        recorded_until=run.recorded_until,
    )


def _expect_figures_of_nodes(run: Run, workers: Sequence[Worker]) -> None:
    count = len(run.summary["per_node"])
    without = sorted({worker.node for worker in workers if worker.node >= count})
    if without:
        raise DamagedRunError(
            f"{run.path / 'summary.json'}: per_node has figures of {count} nodes, but time_shares has workers on node {without[0]}; "
            "they do not belong together."
        )


_WHOLE_RUN_FIGURES = ("foreign_cpu_cores_used", "cpu_cores_lost", "starved_fraction")


def _last_segment_summary(run: Run, began: float) -> dict[str, Any]:
    summary, nodes = run.summary, nodes_of_last_segment(run.job)
    segment = calibrated_segment({**summary, "nodes": nodes, "workers": summary["workers"] // summary["nodes"] * nodes})
    samples = (record for record in with_segments(run.samples(), resumed_seconds(run.job)) if record.part_began_seconds == began)
    spent = {name: segment[name] for name in ("init_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "total_seconds")}
    used = per_node(samples, len(summary["per_node"]), Clock(run_seconds=summary["run_seconds"], **spent))
    whole = [{name: node.get(name) for name in _WHOLE_RUN_FIGURES} for node in summary["per_node"]]
    return {**segment, "per_node": [{**recorded, **unsegmented} for recorded, unsegmented in zip(used, whole, strict=True)]}


_MUCH = 0.3  # batches of similar sentence lengths have about a quarter


def padding_text(summary: Mapping[str, Any]) -> str | None:
    """Return a sentence about a run's padding; None for other data and older releases."""
    share = summary.get("padding_share")
    if share is None:
        return None
    advice = "; --batch-tokens groups sentences of similar length" if share > _MUCH else ""
    return f"{share:.0%} of the computed token positions were padding{advice}."


NAMES = {
    "compute": "computation",
    "network": "communication",
    "data": "data loading",
    "peers": "waiting for stragglers",
    "idle": "idle workers",
    "evaluating": "evaluation",
    "translating": "final translation",
    "saving": "checkpoint pauses",
    "profiling": "profiling",
    "other": "idle and coordination",
}


def percent(fraction: float | None) -> str:
    """Return a fraction as whole percent, with a decimal below 1 %; UNKNOWN for None."""
    if fraction is None:
        return UNKNOWN
    return f"{fraction:.1%}" if 0 < abs(fraction) < 0.0095 else f"{fraction:.0%}"


def bits_text(bytes_per_second: float) -> str:
    """Return a link's speed as text, such as ``100 Mbit/s``."""
    bits = bytes_per_second * 8
    units = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
    factor, name = next((unit for unit in units if bits >= unit[0]), (1.0, "bit/s"))
    return f"{bits / factor:g} {name}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A one-line answer: its `key` in JSON, `question` on the page, and JSON `figures`."""

    key: str
    question: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def digits3(value: float | None) -> str:
    """Return a figure with three significant digits: ``0.0123``, ``4.56``, ``78,900``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e9 else f"{rounded:.3g}"


def time_text(seconds: float | None) -> str:
    """Return a time with three digits: ``0.34 s``, ``2.08 min``, ``3.12 h``, ``2.9 days``."""
    if seconds is None:
        return UNKNOWN
    units = ((3, 86_400.0, "days"), (2, 3600.0, "h"), (2, 60.0, "min"))
    _, factor, name = next((unit for unit in units if seconds >= unit[0] * unit[1]), (0, 1.0, "s"))
    return f"{digits3(seconds / factor)} {name}"
