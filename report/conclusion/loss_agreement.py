"""Do runs that should train alike do so: losses identical to the bit, equal within a bound, or parting, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..catalog.run import Run
from ..comparison.caveats import changed_on_resume
from ..comparison.factors import LOSS, RULES, Factor

__all__ = ["EQUAL_WITHIN", "LossAgreement", "loss_agreements"]

EQUAL_WITHIN = 1e-4
"""Relative difference of two losses up to which they count as equal: what other kernels and other orders of a sum come to (parity)."""

MOST_PAIRS = 20

_MAY_DIFFER = frozenset({"budget", "until", "patience", "trainer"})
"""Settings that do not change the course of the updates that two runs have in common."""


@dataclass(frozen=True, slots=True)
class LossAgreement:
    """How the losses of a run go with those of another one, over the first `updates`, which both have.

    `largest` is the largest relative difference; `parts_at` the first update, from 1, at which it is above `EQUAL_WITHIN`, with the losses
    of both there; None where there is none.
    """

    run: str
    other: str
    updates: int
    identical: bool
    largest: float
    parts_at: int | None
    losses: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


def loss_agreements(runs: Sequence[Run]) -> list[LossAgreement]:
    """Return how runs agree with the first that should train alike: sync, of one seed, data, batch and whatever else decides a loss."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.summary["mode"] == "sync" and not _changed_course(run):
            groups.setdefault(_course(run), []).append(run)
    found: list[LossAgreement] = []
    for first, *others in groups.values():
        held = others[: MOST_PAIRS - len(found)]
        losses = first.step_series().loss if held else np.zeros(0, np.float32)
        agreements = [_agreement(first.name, losses, other) for other in held]
        found += [agreement for agreement in agreements if agreement is not None]
    return found


def _changed_course(run: Run) -> bool:
    """Whether an earlier segment of a resumed run had other settings that decide the losses: the job has only those of the last one."""
    batch = {"global_batch_size", "accumulate"}
    if run.job.get("global_batch_size") is None:
        batch |= {"batch_size", "nodes", "procs_per_node"}
    return not batch.union(["mode"], (rule.key for rule in _rules())).isdisjoint(changed_on_resume(run))


def _rules() -> list[Factor]:
    return [rule for rule in RULES if (LOSS in rule.confounds or rule.key == "global_batch_size") and rule.key not in _MAY_DIFFER]


def _course(run: Run) -> tuple[Any, ...]:
    """Return what decides the losses of a sync run, whatever computes them."""
    return tuple(rule.value(run) for rule in _rules())


def _agreement(name: str, mine: NDArray[np.float32], other: Run) -> LossAgreement | None:
    """Return how a run agrees with the one of that name and these losses; None where it has recorded no update."""
    theirs = other.step_series().loss
    updates = min(len(mine), len(theirs))
    if not updates:
        return None
    ours, its = mine[:updates].astype(np.float64), theirs[:updates].astype(np.float64)
    same = (ours == its) | (np.isnan(ours) & np.isnan(its))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(ours - its) / np.maximum(np.abs(ours), np.abs(its))
    relative = np.where(same, 0.0, np.where(np.isfinite(relative), relative, np.inf))
    apart = np.flatnonzero(relative > EQUAL_WITHIN)
    first = int(apart[0]) if len(apart) else None
    losses = None if first is None else (float(ours[first]), float(its[first]))
    parts_at = None if first is None else first + 1
    return LossAgreement(other.name, name, updates, bool(same.all()), float(relative.max()), parts_at, losses)
