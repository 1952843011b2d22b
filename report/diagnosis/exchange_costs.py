"""How much of a synchronous step do its messages cost, how much their bytes, and what would the direct exchange make of it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...records.text.numbers import number_text, rate_text, seconds_text
from .evidence import Evidence
from .words import percent

__all__ = ["BAND", "ExchangeCosts", "exchange_costs", "exchange_text", "hidden_exchange"]

BAND = 0.25
"""How far an estimate may be off: as a fraction; all that were judged on a machine at rest were within it (docs/where-the-time-goes.md)."""

SLOWER = "the calibration was slower than the run itself"
"""Why communication is not known."""

UNMEASURABLE = "too little to be measured"
"""What the bytes take where an exchange of a few took as long as the whole one."""


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """The exchange of a sync step, not hidden by computation, in seconds of one step.

    - `messages_seconds_per_step`: what an exchange of a few bytes takes; `bytes_seconds_per_step`: what that of the gradients takes more;
      `around_seconds_per_step`: what the step takes besides both and its own work. The three add up to what the exchange adds to a step
    - `messages_fraction`: of the step. Where the calibration does not tell, all four are None, and where it does not tell messages from
      bytes, `bytes_seconds_per_step` is
    - `exchange_fraction_at_most`: `hidden_exchange`
    - `direct_exchange_…`: a step with ``--exchange direct`` as it was calibrated, what that is in steps per second, between which two
      figures those are expected, and how many times this run's. None with the reason in `no_estimate`
    """

    exchange: str
    step_seconds: float
    messages_seconds_per_step: float | None = None
    bytes_seconds_per_step: float | None = None
    around_seconds_per_step: float | None = None
    messages_fraction: float | None = None
    exchange_fraction_at_most: float | None = None
    direct_exchange_step_seconds_estimate: float | None = None
    direct_exchange_steps_per_second_estimate: float | None = None
    direct_exchange_steps_per_second_low: float | None = None
    direct_exchange_steps_per_second_high: float | None = None
    direct_exchange_speedup_estimate: float | None = None
    no_estimate: str | None = None


def exchange_costs(evidence: Evidence, *, starved: bool) -> ExchangeCosts | None:
    """Return what the exchange costs; None for a run that has none, is async or has no calibration.

    `starved`: other programs had the cores, so that nothing is estimated.
    """
    calibrated = (evidence.calibration or {}).get("workers", ())
    known = [entry for entry in calibrated if entry["communicate_seconds"] and entry["message_seconds"]]
    if evidence.summary["mode"] != "sync" or evidence.shares is None or not known or len(known) < len(calibrated):
        return None
    step, exchange = _mean([worker.step_seconds for worker in evidence.workers]), evidence.job.get("exchange") or "native"
    if (most := hidden_exchange(evidence)) is not None:
        reason = None if exchange != "native" else SLOWER
        return ExchangeCosts(exchange, step, exchange_fraction_at_most=most, no_estimate=reason)
    seen = _mean([worker.communicate_seconds for worker in evidence.workers])
    whole = _mean([entry["communicate_seconds"] for entry in known])
    few = _mean([entry["message_seconds"] for entry in known])
    messages = min(whole, few)
    shown = min(1.0, seen / whole)  # of the exchange; the rest is hidden behind computing
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
    """Return the fraction of a step that its exchange takes at most where that is unknown: the calibration was slower than the run itself.

    Own work fills the step there, though all steps exchange. That shows at most as it was calibrated by itself, or as far as the
    calibration varied. None where the exchange is known, or there is none.
    """
    entries, shares = (evidence.calibration or {}).get("workers", ()), evidence.shares
    steps = {worker.worker: worker.step_seconds for worker in evidence.workers if worker.communicate_seconds <= 1e-9 * worker.step_seconds}
    slower = any(entry["data_seconds"] + entry["compute_seconds"] > steps.get(entry["worker"], math.inf) for entry in entries)
    if shares is None or not slower or len(steps) < len(evidence.workers) or evidence.summary["workers"] == 1:
        return None
    alone = max((entry["communicate_seconds"] or 0.0) / steps[entry["worker"]] for entry in entries if entry["worker"] in steps)
    return min(1.0, max(alone, shares.slowest.spread))


def _with_estimate(costs: ExchangeCosts, calibration: Mapping[str, Any], *, starved: bool) -> ExchangeCosts:
    tried = [entry["direct_step_seconds"] for entry in calibration["workers"] if entry.get("direct_step_seconds")]
    given = {name: getattr(costs, name) for name in costs.__slots__}
    if starved or not tried:
        untried = calibration.get("direct_untried") or "the version that made this run did not measure it"
        return ExchangeCosts(**{**given, "no_estimate": "other programs had the cores" if starved else untried})
    step = _mean(tried)
    spread = max(entry.get("direct_spread") or 0.0 for entry in calibration["workers"])
    factor = 1 + math.hypot(BAND, spread)
    estimate = {
        "direct_exchange_step_seconds_estimate": step,
        "direct_exchange_steps_per_second_estimate": 1 / step,
        "direct_exchange_steps_per_second_low": 1 / step / factor,
        "direct_exchange_steps_per_second_high": 1 / step * factor,
        "direct_exchange_speedup_estimate": costs.step_seconds / step,
    }
    return ExchangeCosts(**{**given, **estimate})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def exchange_text(costs: ExchangeCosts) -> str:
    """Return in words what communication costs, and the estimate for the direct all-reduce."""
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
    low, rate, high = (
        rate_text(value)
        for value in (
            costs.direct_exchange_steps_per_second_low,
            costs.direct_exchange_steps_per_second_estimate,
            costs.direct_exchange_steps_per_second_high,
        )
    )
    return (
        f"{spent}; estimated with --exchange direct: {rate[:-2]} steps/s ({low[:-2]} to {high[:-2]}), "
        f"{number_text(costs.direct_exchange_speedup_estimate, 2)} × the {rate_text(1 / costs.step_seconds)[:-2]} of these steps"
    )
