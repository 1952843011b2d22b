"""The figures of `trainer explain`; of a resumed run those of the calibrated segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.units import parse_bandwidth
from ...records.node_usage import per_node
from ...records.store.jsonl import DamagedRunError
from ...records.store.schema import Clock
from ...records.text import UNKNOWN
from ...records.time_shares import nodes_of_last_segment, resumed_seconds, with_segments
from ..compare.caveats import changed_text, restarts_text
from ..runs.run import Run, as_recorded
from .time_shares import Shares, Worker, calibrated_segment, read_shares, read_workers

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
    def sent_fraction(self) -> float | None:
        """Utilization of the sending direction."""
        return _fraction(self.sent_bytes_per_second, self.limit_bytes_per_second)

    @property
    def received_fraction(self) -> float | None:
        """Utilization of the receiving direction."""
        return _fraction(self.received_bytes_per_second, self.limit_bytes_per_second)

    @property
    def fraction(self) -> float | None:
        """Utilization of the busier direction."""
        known = [fraction for fraction in (self.sent_fraction, self.received_fraction) if fraction is not None]
        return max(known, default=None)


def _fraction(value: float | None, limit: float | None) -> float | None:
    return value / limit if value is not None and limit else None


def read_links(summary: Mapping[str, Any], job: Mapping[str, Any], env: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Return each node's link, with its bytes per second of training and profiling."""
    addresses = job.get("cluster", {}).get("addresses", ())
    found = []
    for figures in summary["per_node"]:
        node = figures["node"]
        address = addresses[node] if node < len(addresses) else None
        limit, source = _limit(job.get("bandwidth"), env[node] if node < len(env) else {}, address)
        seconds = summary["train_seconds"] + summary.get("profile_seconds", 0.0)
        sent, received = (_rate(figures[f"network_{way}_bytes"], seconds) for way in ("sent", "received"))
        found.append(Link(node, sent, received, limit, source))
    return found


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds > 0 else None


def _limit(bandwidth: str | None, host: Mapping[str, Any], address: str | None) -> tuple[float | None, str | None]:
    if bandwidth is not None:
        return parse_bandwidth(bandwidth) / 8, "bandwidth"
    for name, interface in (host.get("interfaces") or {}).items():
        if address in interface["addresses"] and interface["speed_bits_per_second"]:
            return interface["speed_bits_per_second"] / 8, name
    return None, None


def busiest(links: Sequence[Link]) -> Link | None:
    """Return the link with the highest utilization; None if no limit is known."""
    known = [link for link in links if link.fraction is not None]
    return max(known, key=lambda link: link.fraction or 0.0, default=None)


DOMINANT_FRACTION = 0.5  # minimum share of the time for a cause to be named


def network_cause(network_fraction: float, links: Sequence[Link], calibration: Mapping[str, Any] | None, seconds: float) -> NetworkCause:
    """Return why communication takes `network_fraction` of a step, which is `seconds`."""
    # The link, if the bytes at its full rate take at least half of that; waiting, if the exchange alone takes less than half; messages, if
    # a few bytes take at least half as long as all; else the transfer through memory and processor.
    link = busiest(links)
    if link is not None and (link.fraction or 0.0) >= DOMINANT_FRACTION * network_fraction:
        return "link"
    if (whole := exchange_seconds(calibration)) is not None and whole < DOMINANT_FRACTION * seconds:
        return "waiting"
    return "messages" if (message_fraction(calibration) or 0.0) >= DOMINANT_FRACTION else "transfer"


def exchange_seconds(calibration: Mapping[str, Any] | None) -> float | None:
    """Return the seconds of an exchange alone on its slowest worker, if known."""
    workers = calibration["workers"] if calibration else ()
    return max((entry["communicate_seconds"] for entry in workers if entry["communicate_seconds"]), default=None)


def message_fraction(calibration: Mapping[str, Any] | None) -> float | None:
    """Return the time of a few bytes over that of an exchange on its slowest worker, if known."""
    workers = calibration["workers"] if calibration else ()
    known = [entry for entry in workers if entry["communicate_seconds"] and entry["message_seconds"] is not None]
    if not known:
        return None
    longest = max(known, key=lambda entry: entry["communicate_seconds"])
    return float(min(1.0, longest["message_seconds"] / longest["communicate_seconds"]))


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


def read_evidence(run: Run) -> Evidence:
    """Return the basis of a verdict on a run. Raises UsageError without a recorded update."""
    run = as_recorded(run)
    summary, job, env = run.summary, run.job, run.nodes
    shares, workers, began, mixed = None, [], 0.0, False
    if (known := summary.get("time_shares")) is not None:
        mixed = known.get("part_began_seconds") is None and changed_text(run) is not None
        began = known.get("part_began_seconds") or 0.0
        summary = _of_last_segment(run, began) if began else summary
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


_OF_THE_WHOLE_RUN = ("foreign_cpu_cores_used", "cpu_cores_lost", "starved_fraction")


def _of_last_segment(run: Run, began: float) -> dict[str, Any]:
    summary, nodes = run.summary, nodes_of_last_segment(run.job)
    segment = calibrated_segment({**summary, "nodes": nodes, "workers": summary["workers"] // summary["nodes"] * nodes})
    samples = (record for record in with_segments(run.samples(), resumed_seconds(run.job)) if record.part_began_seconds == began)
    spent = {name: segment[name] for name in ("init_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "total_seconds")}
    used = per_node(samples, len(summary["per_node"]), Clock(run_seconds=summary["run_seconds"], **spent))
    whole = [{name: node.get(name) for name in _OF_THE_WHOLE_RUN} for node in summary["per_node"]]
    return {**segment, "per_node": [{**own, **other} for own, other in zip(used, whole, strict=True)]}


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
    for factor, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= factor:
            return f"{bits / factor:g} {name}"
    return f"{bits:g} bit/s"
