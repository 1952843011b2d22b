"""Latency and bandwidth cost of a sync step, and the estimate for the direct exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ...records.text import number_text, rate_text, seconds_text
from .evidence import Evidence, percent

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
    calibrated = (evidence.calibration or {}).get("workers", ())
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
    entries, shares = (evidence.calibration or {}).get("workers", ()), evidence.shares
    steps = {worker.worker: worker.step_seconds for worker in evidence.workers if worker.communicate_seconds <= 1e-9 * worker.step_seconds}
    slower = any(entry["data_seconds"] + entry["compute_seconds"] > steps.get(entry["worker"], math.inf) for entry in entries)
    if shares is None or not slower or len(steps) < len(evidence.workers) or evidence.summary["workers"] == 1:
        return None
    alone = max((entry["communicate_seconds"] or 0.0) / steps[entry["worker"]] for entry in entries if entry["worker"] in steps)
    return min(1.0, max(alone, shares.slowest.spread))


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
    low, high = rate_text(costs.direct_exchange_steps_per_second_low), rate_text(costs.direct_exchange_steps_per_second_high)
    rate = rate_text(costs.direct_exchange_steps_per_second_estimate)
    return (
        f"{spent}; estimated with --exchange direct: {rate[:-2]} steps/s ({low[:-2]} to {high[:-2]}), "
        f"{number_text(costs.direct_exchange_speedup_estimate, 2)} × the {rate_text(1 / costs.step_seconds)[:-2]} of these steps"
    )
