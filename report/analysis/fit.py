"""The cost model's parameters, fitted to calibrations of finished runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from .cost_model import (
    BACKWARD_SHARE,
    WIRE_BYTES,
    Compute,
    Exchange,
    Link,
    Ring,
    Server,
    Topology,
    on_link,
    ring_step,
    server_rounds,
    traffic,
)
from .observations import SAME, Observed

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
    first = runs[0]
    for other in runs[1:]:
        for name in SAME:
            if first.same[name] != other.same[name]:
                raise UsageError(
                    f"run: {first.name!r} and {other.name!r} are not the same work: {name} is {first.same[name]} and {other.same[name]}. "
                    "Runs of one prediction may differ in mode, nodes, batch size and bandwidth."
                )
        if first.payload_bytes != other.payload_bytes:
            raise UsageError(
                f"run: {first.name!r} and {other.name!r} send different amounts: {first.payload_bytes} and {other.payload_bytes} bytes."
            )
    for other in runs[1:]:
        if other.compiled != runs[0].compiled:
            on, off = (runs[0], other) if runs[0].compiled else (other, runs[0])
            raise UsageError(
                f"run: {on.name!r} computed compiled steps, and {off.name!r} others (compile): what computing takes is not one figure."
            )
    own: list[Exchange] = [run.exchange for run in runs if run.mode == "sync" and run.communicates]
    chosen = exchange or (own[0] if own else "native")
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
        ring=ring or replace(_ring_like(server) if server else Ring(), exchange=chosen),
        server=server or _server_like(ring or Ring(), shared),
        measured=measured,
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
        whole = run.slowest if run.mode == "sync" else run.mean("own")
        points.append((run.batch_size, whole))
        if all(worker.half_own is not None for worker in run.workers):
            points.append((run.half_batch_size, whole * run.mean("half_own") / run.mean("own")))
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
    beyond = [max(0.0, run.mean("communicate") - _on_link(run)) for run in runs]
    messages = [
        min(run.mean("message") * all_of.messages / small.messages, rest)
        for run, all_of, small, rest in zip(runs, whole, few, beyond, strict=True)
    ]
    hop = fmean(seconds / all_of.messages for seconds, all_of in zip(messages, whole, strict=True))
    per_byte = fmean((rest - seconds) / all_of.sent_bytes for rest, seconds, all_of in zip(beyond, messages, whole, strict=True))
    plain = Ring(hop, per_byte, exchange=exchange_of)
    own = np.array([compute.seconds(run.batch_size) for run in runs])
    exchange = np.array([ring_step(0.0, run.payload_bytes, len(run.workers), run.nodes, plain, _link(run)).seconds for run in runs])
    return _overlapping(plain, own, exchange, np.array([run.mean("step") for run in runs]))


def _overlapping(plain: Ring, own: Vector, exchange: Vector, steps: Vector) -> Ring:
    """Return the ring with the hidden fraction and window that describe the steps best."""
    # Nothing is hidden if steps take longer than own work and exchange; a window below the backward pass must explain clearly more.
    hidden = own + exchange - steps
    if float(np.sum(hidden / steps)) <= 0:
        return replace(plain, other_seconds=float(np.mean(-hidden)))
    fractions = np.clip([*(hidden / exchange), hidden @ exchange / (exchange @ exchange)], 0.0, 1.0)
    windows = [BACKWARD_SHARE, *np.clip(hidden / own, 0.0, BACKWARD_SHARE)]

    def cost(fraction: float, window: float) -> float:
        errors = (np.minimum(fraction * exchange, window * own) - hidden) / steps
        return float(errors @ errors) + (SMALLER_WINDOW_COST if window < BACKWARD_SHARE else 0.0)

    _, fraction, window = min((cost(float(one), float(other)), float(one), float(other)) for one in fractions for other in windows)
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
        found = server(x)
        return np.array([weight * math.log(predicted / seen) for run in runs for predicted, seen, weight in _against(run, found)])

    return server(least_squares(residuals, [0.25] * 4, bounds=(1e-6, np.inf)).x)


def _against(run: Observed, server: Server) -> list[tuple[float, float, float]]:
    link, once = _link(run), replace(server, pulls_per_update=1.0)

    def cycles(own: float, payload: float, server: Server) -> tuple[float, float]:
        near, far = server_rounds(own, payload, run.procs_per_node, run.nodes, run.ps, server, link)
        return sum(near.values()), sum(far.values())

    measured: list[tuple[str, tuple[float, float], float]] = [
        ("message", cycles(0.0, 0.0, once), 1.0),
        ("communicate", cycles(0.0, run.payload_bytes, once), 1.0),
        ("step", cycles(run.mean("own"), run.payload_bytes, server), math.sqrt(2)),
    ]
    groups = (run.beside_server, run.elsewhere)
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


def _on_link(run: Observed) -> float:
    return on_link(run.exchange, run.payload_bytes, len(run.workers), run.nodes) * WIRE_BYTES * _link(run).seconds_per_byte


def _ring_like(server: Server) -> Ring:
    return Ring(
        hop_seconds=(server.service_seconds + server.worker_seconds) / 2,
        seconds_per_byte=server.service_seconds_per_byte + server.worker_seconds_per_byte,
    )


def _server_like(ring: Ring, shared: bool) -> Server:
    per_byte = ring.seconds_per_byte
    return Server(ring.hop_seconds, per_byte, ring.hop_seconds, per_byte, WIRE_BYTES, shared_cores=shared)


def describe(fitted: Fitted, topology: Topology) -> dict[str, Any]:
    """Return the fitted figures by name, for JSON."""
    cost = fitted.ring if topology == "ring" else fitted.server
    return {"compute": asdict(fitted.compute), topology: asdict(cost)}
