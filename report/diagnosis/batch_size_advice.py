"""Advice to change the batch size: how long a worker's step takes with another batch; and `Advice`, which all advice consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..catalog.batches import real_batch
from .time_shares import Worker, idle_fraction
from .verdict import Explanation

__all__ = ["Advice", "batch_dependent_seconds", "larger_batch"]

_LEARNS_OTHERWISE = "{} doubles, so tune the learning rate again{} and check the quality"

DISTURBED = 1.5
"""Half a batch cannot take longer than a whole one; what scatters takes so many times as long at most."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting: the option as it would be typed, and why.

    `speedup`: examples per second over those of this run (for evaluating and saving: this run's time over that with the setting); None
    where the run's figures cannot tell. `caution`: what else it changes. `now`: what the run had.
    """

    option: str
    reason: str
    speedup: float | None
    bound: Literal["about", "at least", "at most"] | None
    caution: str | None = None
    now: str | None = None

    @property
    def change(self) -> str:
        """The option, and what the run had: ``--batch-size 64 (now 32 per worker)``."""
        return f"{self.option} ({self.now})" if self.now else self.option


def _step_seconds(explanation: Explanation) -> float:
    """Return the mean time of a step over the workers: in sync mode that of each of them."""
    workers = explanation.evidence.workers
    return sum(worker.step_seconds for worker in workers) / len(workers)


def batch_dependent_seconds(explanation: Explanation, worker: Worker) -> float | None:
    """Return the seconds of a worker's step that grow in proportion to its batch: reading data, and computing less its fixed cost.

    The fixed cost follows from the calibrated times of a whole and of half a batch. None where half a batch was not measured, or took so
    much longer than a whole one that other programs had the core for one of the two.
    """
    entries = (explanation.evidence.calibration or {}).get("workers", ())
    entry = next((entry for entry in entries if entry["worker"] == worker.worker), None)
    if entry is None or not entry["half_compute_seconds"] or not entry["compute_seconds"]:
        return None
    if entry["half_compute_seconds"] > DISTURBED * entry["compute_seconds"]:
        return None
    calibration: Mapping[str, Any] = explanation.evidence.calibration or {}
    left_out = 1.0 - float(calibration["half_batch_size"]) / float(calibration["batch_size"])
    saved = 1.0 - float(entry["half_compute_seconds"]) / float(entry["compute_seconds"])
    return worker.data_seconds + worker.compute_seconds * min(1.0, max(0.0, saved / left_out))


def larger_batch(explanation: Explanation) -> Iterator[Advice]:
    """Twice the batch: what does not grow with it is paid half as often; for an example the time between commands stays what it was."""
    evidence = explanation.evidence
    if evidence.shares is None:
        return
    slowest = evidence.shares.slowest
    sync = evidence.summary["mode"] == "sync"
    update = 2 * evidence.summary["global_batch_size" if sync else "batch_size"]
    if real_batch(evidence.job, update) < update:  # no update has more than all training examples
        return
    grown = [batch_dependent_seconds(explanation, worker) for worker in ([slowest] if sync else evidence.workers)]
    known = [value for value in grown if value is not None]
    if not known:
        return
    before, idle = _step_seconds(explanation), idle_fraction(evidence.summary)
    steps = 2 * before / (before + sum(known) / len(known))
    speedup = 1.0 / (idle + (1.0 - idle) / steps)
    exchanging = evidence.shares.step["network"] > 0
    halves = f"halves the {'communication' if exchanging else 'fixed cost of a step'} per"
    if (tokens := evidence.job.get("batch_tokens")) is not None:  # --scale-lr goes with batches of a number of examples alone
        caution = _LEARNS_OTHERWISE.format("the batch", "")
        yield Advice(f"--batch-tokens {2 * tokens}", f"{halves} token", speedup, "about", caution, f"now {tokens}")
        return
    option = "--batch-size" if evidence.job.get("global_batch_size") is None else "--global-batch-size"
    at_once = evidence.summary["batch_size"] // int(evidence.job.get("accumulate") or 1)
    whole = evidence.summary["global_batch_size"]
    now = at_once if option == "--batch-size" else whole
    caution = _LEARNS_OTHERWISE.format("the global batch" if sync else "the batch of an update", " (--scale-lr)")
    each = " per worker" if option == "--batch-size" else ""
    yield Advice(f"{option} {2 * now}", f"{halves} example", speedup, "about", caution, f"now {now}{each}")
