"""Step costs of finished runs, from their calibrations, and the cost model fitted to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import node_by_worker, workers_by_node
from ...core.errors import UsageError
from ...core.units import parse_bandwidth
from ...records.store.jsonl import DamagedRunError
from ..runs.cpu_starvation import cpu_starvation
from ..runs.run import Run, diverged, real_batch
from .cost_model import (
    BACKWARD_SHARE,
    WIRE_BYTES,
    Compute,
    Exchange,
    Link,
    Ring,
    Server,
    Topology,
    link_bytes,
    ring_step,
    server_rounds,
    traffic,
)

# Equal among the runs of one fit: their steps are the same work on the same processors.
SAME = ("backend", "model", "data", "precision", "optimizer", "procs_per_node", "cores_per_node", "threads_per_task")
_LENGTH_ALONE = frozenset({"steps", "epochs", "examples", "until"})  # change the length of a run, and no step
_MIN_SECONDS = 1e-12  # of a step; less is no step


@dataclass(frozen=True, slots=True)
class Worker:
    """Seconds of a worker's step."""

    node: int
    kind: str  # the node's processor and its share
    work: float  # work on a whole batch
    half_work: float | None  # on half a batch (None for a batch of one)
    communicate: float | None  # exchange of its payload alone
    message: float | None  # exchange of a few bytes (None for a single worker)
    step: float  # in training
    direct: tuple[float, float, float] | None = None  # exchange, message and step tried with the direct exchange


@dataclass(frozen=True, slots=True)
class Observed:
    """A run's step costs, from its calibration."""

    name: str
    mode: str
    same: Mapping[str, Any]
    nodes: int
    procs_per_node: int
    ps: int
    batch_size: int
    half_batch_size: int
    global_batch_size: int
    batch_tokens: int | None
    payload_bytes: int
    bytes_per_second: float | None  # limit of each node's link
    shared_cores: bool
    server_cores: float  # of node 0
    nodes_sharing_cores: int
    served_bytes: tuple[int, int] | None  # sent and received by parameter servers' links, None if unknown or shared
    workers: tuple[Worker, ...]
    reported_examples_per_second: float | None = None  # includes the time between steps
    exchange: Exchange = "native"
    tried: bool = False  # `exchange` is not the run's own
    untried: str | None = None  # why the direct exchange was not tried
    compiled: bool = False
    contended: bool = False  # CPU contention

    def with_exchange(self, exchange: Exchange) -> Observed | None:
        """Return the observation with an exchange, the run's own or one tried after it, if any."""
        if exchange == self.exchange:
            return self
        tried = [(worker, worker.direct) for worker in self.workers if worker.direct is not None]
        if exchange != "direct" or len(tried) < len(self.workers):
            return None
        workers = tuple(replace(worker, communicate=whole, message=few, step=step) for worker, (whole, few, step) in tried)
        return replace(self, workers=workers, exchange=exchange, tried=True, reported_examples_per_second=None)

    @property
    def communicates(self) -> bool:
        """Whether communication was calibrated."""
        return all(worker.communicate is not None and worker.message is not None for worker in self.workers)

    @property
    def slowest(self) -> float:
        """Seconds of own work on the slowest kind of node; differences within a kind are chance."""
        kinds = {worker.kind for worker in self.workers}
        return max(self.mean("work", [worker for worker in self.workers if worker.kind == kind]) for kind in kinds)

    def mean(self, figure: str, workers: Sequence[Worker] | None = None) -> float:
        """Return the mean of a figure over the workers."""
        return fmean(getattr(worker, figure) for worker in (self.workers if workers is None else workers))

    @property
    def examples_per_second(self) -> float:
        """The throughput of all workers while they train."""
        if self.mode == "sync":
            return self.global_batch_size / self.mean("step")
        return sum(self.batch_size / worker.step for worker in self.workers)


def _check_fit_for_use(run: Run) -> Mapping[str, Any]:
    summary, job, calibration, path = run.summary, run.job, run.calibration, run.path
    if (since := diverged(summary)) is not None:
        raise UsageError(
            f"run: the loss of {str(path)!r} was not finite (NaN or infinite) {since}: its speed is not that of training, and nothing is "
            "predicted from it. Take another run."
        )
    if calibration is None or summary.get("time_shares") is None:
        raise UsageError(
            f"run: {str(path)!r} is not calibrated, and a prediction rests on that (it is {summary['state']}). A run is calibrated when it "
            "comes to its end, unless it was started with --no-calibrate: train a short one again."
        )
    if not run.nodes:
        raise UsageError(f"run: {str(path)!r} has no env.json, which says what its nodes are. Take another run.")
    by_node = workers_by_node(job["procs_per_node"], job["nodes"])
    if len(set(by_node)) > 1:
        numbers = ", ".join(map(str, by_node))
        raise UsageError(
            f"run: {str(path)!r} has nodes with different numbers of workers ({numbers}), and a prediction is for nodes that are alike. "
            "Take another run."
        )
    changed = {field for segment in job.get("segments", ())[1:] for field in segment.get("changed") or {}} - _LENGTH_ALONE
    if summary["resumed"] and changed:
        named = ", ".join(sorted(changed))
        raise UsageError(
            f"run: {str(path)!r} was resumed with other settings ({named}), so that its steps are not alike. Take another run."
        )
    return calibration


def observe(run: Run) -> Observed:
    """Return the observation of a run. Raises UsageError if no prediction can be based on it."""
    calibration = _check_fit_for_use(run)
    _expect_agreement(run, calibration)
    summary, job = run.summary, run.job
    steps = {worker["worker"]: worker["step_seconds"] for worker in summary["time_shares"]["workers"]}
    if (
        len(steps) != summary["workers"]
        or min((seconds or 0.0) for seconds in steps.values()) < _MIN_SECONDS
        or {entry["worker"] for entry in calibration["workers"]} != set(steps)
    ):
        raise UsageError(
            f"run: {str(run.path)!r} is too short: a worker in it made no update, or was not there at its end. Train for longer."
        )
    server_cores, per_node = _cores(job, run.nodes[0], 0), workers_by_node(job["procs_per_node"], job["nodes"])[0]
    return Observed(
        name=run.name,
        mode=job["mode"],
        same={
            **{name: job.get(name) for name in SAME},
            "cores_per_node": sorted(set(job["cores_per_node"] or ())),
            "threads_per_task": job["threads_per_task"][-1],  # of the last node, which has workers only
        },
        nodes=job["nodes"],
        procs_per_node=per_node,
        ps=job["ps"],
        batch_size=calibration["batch_size"],
        half_batch_size=calibration["half_batch_size"] or calibration["batch_size"],
        global_batch_size=real_batch(job, summary["global_batch_size"]),
        batch_tokens=job.get("batch_tokens"),
        payload_bytes=calibration["payload_bytes"],
        bytes_per_second=None if job["bandwidth"] is None else parse_bandwidth(job["bandwidth"]) / 8,
        shared_cores=server_cores < per_node * job["threads_per_task"][0] + 1,
        server_cores=server_cores,
        nodes_sharing_cores=summary["nodes_sharing_cores"] or 1,
        served_bytes=_served_bytes(job, summary["per_node"]),
        workers=tuple(_worker(run, calibration, figures, steps[figures["worker"]]) for figures in calibration["workers"]),
        reported_examples_per_second=summary["examples_per_second"],
        exchange=job.get("exchange") or "native",
        untried=calibration.get("direct_untried"),
        compiled=bool(summary.get("compiled")),
        contended=cpu_starvation(summary) is not None,
    )


def _expect_agreement(run: Run, calibration: Mapping[str, Any]) -> None:
    nodes, by_node = run.job["nodes"], workers_by_node(run.job["procs_per_node"], run.job["nodes"])
    places = node_by_worker(by_node)
    workers = len(places)
    counts = {"summary.json": run.summary["nodes"], "env.json": len(run.nodes), "summary.json's per_node": len(run.summary["per_node"])}
    wrong = {name: f"{count} nodes" for name, count in counts.items() if count != nodes}
    numbers = {entry["worker"]: entry["node"] for entry in calibration["workers"]}
    if len(numbers) < len(calibration["workers"]) or any(worker >= workers or node != places[worker] for worker, node in numbers.items()):
        wrong["calibration.json"] = "other workers, or other nodes for them"
    if len(run.job.get("threads_per_task", ())) != nodes:
        wrong["its threads_per_task"] = "another number of nodes"
    if wrong:
        faults = ", ".join(f"{name} has {text}" for name, text in wrong.items())
        raise DamagedRunError(f"{run.path}: job.json has {nodes} nodes with {workers} workers, but {faults}; they do not belong together.")


def _cores(job: Mapping[str, Any], host: Mapping[str, Any], node: int) -> float:
    limits = job["cores_per_node"]
    return float(host["cores_available"] if limits is None else limits[node if len(limits) > 1 else 0])


def _worker(run: Run, calibration: Mapping[str, Any], figures: Mapping[str, Any], step: float) -> Worker:
    node, half = figures["node"], figures["half_compute_seconds"]
    share = calibration["half_batch_size"] / calibration["batch_size"] if half is not None else 0.0
    host = run.nodes[node]
    exchange, message, tried = (figures.get(name) for name in ("direct_seconds", "direct_message_seconds", "direct_step_seconds"))
    return Worker(
        node=node,
        kind=f"{_cores(run.job, host, node):g} cores of {host['cpu_model']}",
        work=figures["data_seconds"] + figures["compute_seconds"],
        half_work=None if half is None else figures["data_seconds"] * share + half,
        communicate=figures["communicate_seconds"],
        message=figures["message_seconds"],
        step=step,
        direct=None if exchange is None or message is None or tried is None else (exchange, message, tried),
    )


def _served_bytes(job: Mapping[str, Any], per_node: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return (sent, received); several servers' links also carry their workers' traffic."""
    counts = [per_node[0][f"network_{way}_bytes"] for way in ("sent", "received")]
    if job["mode"] == "sync" or job["nodes"] == 1 or job["ps"] > 1 or None in counts:
        return None
    return counts[0], counts[1]


SMALLER_WINDOW_COST = 1e-3  # added to the squared relative errors: an error of 3 %, about a calibration's repeatability
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The cost model of a job."""

    runs: tuple[Observed, ...]
    compute: Compute
    ring: Ring
    server: Server
    measured: frozenset[Topology]  # whose communication is calibrated; the other's is derived, or zero without two workers

    @property
    def first(self) -> Observed:
        """The run whose batch, payload and workers per node are predicted for."""
        return self.runs[0]


def fit(runs: Sequence[Observed], exchange: Exchange | None = None) -> Fitted:
    """Fit the model to runs, sync ones with `exchange`. Raises UsageError if their work differs."""
    _expect_same_work(runs)
    exchanges: list[Exchange] = [run.exchange for run in runs if run.mode == "sync" and run.communicates]
    chosen = exchange or (exchanges[0] if exchanges else "native")
    runs = [run.with_exchange(chosen) or run if run.mode == "sync" else run for run in runs]
    sync = [run for run in runs if run.mode == "sync" and run.communicates and run.exchange == chosen]
    if not sync and exchange is not None:
        _refuse_unknown(runs, exchange)
    by_ps = [run for run in runs if run.mode == "async" and run.communicates]
    compute = fit_compute(runs)
    ring, server = fit_ring(sync, compute) if sync else None, fit_server(by_ps) if by_ps else None
    measured: frozenset[Topology] = frozenset((*(("ring",) if ring else ()), *(("ps",) if server else ())))
    shared = any(run.shared_cores for run in runs)
    return Fitted(
        runs=tuple(runs),
        compute=compute,
        ring=ring or replace(_ring_like(server), exchange=chosen),
        server=server or _server_like(ring or Ring(), shared),
        measured=measured,
    )


def _expect_same_work(runs: Sequence[Observed]) -> None:
    first, *rest = runs
    for run in rest:
        both = f"run: {first.name!r} and {run.name!r}"
        for name in SAME:
            if first.same[name] != run.same[name]:
                raise UsageError(
                    f"{both} are not the same work: {name} is {first.same[name]} and {run.same[name]}. "
                    "Runs of one prediction may differ in mode, nodes, batch size and bandwidth."
                )
        if first.payload_bytes != run.payload_bytes:
            raise UsageError(f"{both} send different amounts: {first.payload_bytes} and {run.payload_bytes} bytes.")
    for run in rest:
        if run.compiled != first.compiled:
            on, off = (first, run) if first.compiled else (run, first)
            raise UsageError(
                f"run: {on.name!r} computed compiled steps, and {off.name!r} others (compile): what computing takes is not one figure."
            )


def _refuse_unknown(runs: Sequence[Observed], exchange: Exchange) -> None:
    reasons = [f"{run.name!r} {_why_unknown(run, exchange)}" for run in runs if run.communicates]
    if reasons:
        raise UsageError(
            f"exchange: nothing is known of {exchange!r}: {', '.join(reasons)}. Add a short run of two nodes with --exchange {exchange}."
        )


def _why_unknown(run: Observed, exchange: Exchange) -> str:
    if run.mode == "async":
        return "is async"
    if exchange == "native":
        return f"trained with {run.exchange} alone"
    return f"did not try it ({run.untried or 'it was made by a release that did not'})"


def fit_compute(runs: Sequence[Observed]) -> Compute:
    """Fit own time = fixed + per example × batch (sync: of the slowest kind of node)."""
    points: list[tuple[float, float]] = []
    for run in runs:
        whole = run.slowest if run.mode == "sync" else run.mean("work")
        points.append((run.batch_size, whole))
        if all(worker.half_work is not None for worker in run.workers):
            points.append((run.half_batch_size, whole * run.mean("half_work") / run.mean("work")))
    if len({batch for batch, _ in points}) == 1:
        return Compute(fmean(seconds for _, seconds in points), 0.0)
    matrix = np.array([[1 / seconds, batch / seconds] for batch, seconds in points])
    from scipy.optimize import nnls  # scipy takes a second to import

    fixed, slope = nnls(matrix, np.ones(len(points)))[0]
    return Compute(float(fixed), float(slope))


def fit_ring(runs: Sequence[Observed], compute: Compute) -> Ring:
    """Fit an all-reduce to sync runs of several workers."""
    # The exchange beyond its bytes on the link is software: up to the time of a few bytes it is per message, the rest per byte.
    exchange_of = runs[0].exchange
    whole = [traffic(exchange_of, run.payload_bytes, len(run.workers)) for run in runs]
    few = [traffic(exchange_of, 0.0, len(run.workers)) for run in runs]
    wired = [
        link_bytes(exchange_of, run.payload_bytes, len(run.workers), run.nodes) * WIRE_BYTES * _link(run).seconds_per_byte for run in runs
    ]
    beyond = [max(0.0, run.mean("communicate") - seconds) for run, seconds in zip(runs, wired, strict=True)]
    messages = [
        min(run.mean("message") * all_of.messages / small.messages, rest)
        for run, all_of, small, rest in zip(runs, whole, few, beyond, strict=True)
    ]
    hop = fmean(seconds / all_of.messages for seconds, all_of in zip(messages, whole, strict=True))
    per_byte = fmean((rest - seconds) / all_of.sent_bytes for rest, seconds, all_of in zip(beyond, messages, whole, strict=True))
    plain = Ring(hop, per_byte, exchange=exchange_of)
    work = np.array([compute.seconds(run.batch_size) for run in runs])
    exchange = np.array([ring_step(0.0, run.payload_bytes, len(run.workers), run.nodes, plain, _link(run)).seconds for run in runs])
    return _overlapping(plain, work, exchange, np.array([run.mean("step") for run in runs]))


def _overlapping(plain: Ring, work: Vector, exchange: Vector, steps: Vector) -> Ring:
    """Return the ring with the hidden fraction and window that describe the steps best."""
    # Nothing is hidden if steps take longer than own work and exchange; a window below the backward pass must explain clearly more.
    hidden = work + exchange - steps
    if float(np.sum(hidden / steps)) <= 0:
        return replace(plain, other_seconds=float(np.mean(-hidden)))
    fractions = np.clip([*(hidden / exchange), hidden @ exchange / (exchange @ exchange)], 0.0, 1.0)
    windows = [BACKWARD_SHARE, *np.clip(hidden / work, 0.0, BACKWARD_SHARE)]

    def cost(fraction: float, window: float) -> float:
        errors = (np.minimum(fraction * exchange, window * work) - hidden) / steps
        return float(errors @ errors) + (SMALLER_WINDOW_COST if window < BACKWARD_SHARE else 0.0)

    _, fraction, window = min((cost(share, part), share, part) for share in map(float, fractions) for part in map(float, windows))
    return replace(plain, hidden_fraction=fraction, window_fraction=window)


def fit_server(runs: Sequence[Observed]) -> Server:
    """Fit the parameter servers' costs to async runs by least squares of the logarithms."""
    # Fitted are exchange, messages and step of workers on a server's node and elsewhere; the step, measured longest, counts twice. Pulls
    # per update follow from the bytes that the servers' nodes sent and received.
    from scipy.optimize import least_squares  # scipy takes a second to import

    payload, shared = runs[0].payload_bytes, any(run.shared_cores for run in runs)
    slowdown = max(1.0, 1 / min(run.server_cores for run in runs))
    pulls = _pulls_per_update(runs)
    unit = fmean(run.mean("message") for run in runs)
    full = fmean(run.mean("communicate") for run in runs)
    scale = np.array([unit, full / payload, unit, full / payload])

    def server(x: Vector) -> Server:
        service, service_byte, worker, worker_byte = (float(value) for value in x[:4] * scale)
        return Server(service, service_byte, worker, worker_byte, pulls_per_update=pulls, shared_cores=shared, slowdown=slowdown)

    def residuals(x: Vector) -> Vector:
        candidate = server(x)
        return np.array(
            [weight * math.log(predicted / seen) for run in runs for predicted, seen, weight in _predicted_and_measured(run, candidate)]
        )

    return server(least_squares(residuals, [0.25] * 4, bounds=(1e-6, np.inf)).x)


def _predicted_and_measured(run: Observed, server: Server) -> list[tuple[float, float, float]]:
    link, once = _link(run), replace(server, pulls_per_update=1.0)

    def cycles(work: float, payload: float, server: Server) -> tuple[float, float]:
        near, far = server_rounds(work, payload, run.procs_per_node, run.nodes, run.ps, server, link)
        return sum(near.values()), sum(far.values())

    measured: list[tuple[str, tuple[float, float], float]] = [
        ("message", cycles(0.0, 0.0, once), 1.0),
        ("communicate", cycles(0.0, run.payload_bytes, once), 1.0),
        ("step", cycles(run.mean("work"), run.payload_bytes, server), math.sqrt(2)),
    ]
    groups = [[worker for worker in run.workers if (worker.node < run.ps) is near] for near in (True, False)]
    return [
        (predicted[place], run.mean(figure, group), weight)
        for figure, predicted, weight in measured
        for place, group in enumerate(groups)
        if group
    ]


def _pulls_per_update(runs: Sequence[Observed]) -> float:
    """Return the bytes that servers sent over those received, at least 1; 1 if not counted."""
    counted = [run for run in runs if run.served_bytes is not None]
    sent, received = (sum(run.served_bytes[way] for run in counted if run.served_bytes is not None) for way in (0, 1))
    return max(1.0, sent / received) if received else 1.0


def _link(run: Observed) -> Link:
    return Link(run.bytes_per_second)


def _ring_like(server: Server | None) -> Ring:
    if server is None:
        return Ring()
    hop = (server.service_seconds + server.worker_seconds) / 2
    return Ring(hop, server.service_seconds_per_byte + server.worker_seconds_per_byte)


def _server_like(ring: Ring, shared: bool) -> Server:
    per_byte = ring.seconds_per_byte
    return Server(ring.hop_seconds, per_byte, ring.hop_seconds, per_byte, WIRE_BYTES, shared_cores=shared)
