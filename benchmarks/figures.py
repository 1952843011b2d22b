"""Figures of a run and of repeats: medians, ranges, ratios and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Figure = Literal[
    "steps_per_second",
    "examples_per_second",
    "first_step_seconds",
    "monitor_cores",
    "peak_memory_bytes",
    "tree_memory_bytes",
    "data_wait_fraction",
    "time_to_target_seconds",
    "stall_seconds",
    "save_cost_seconds",
    "target_tokens_per_second",
    "padding_share",
    "exchange_seconds",
]

SAME_LEVEL = 0.1
"""Largest relative difference between mean losses where the updates are not the same: asynchronous runs, the framework's own dropout."""

PACE_RESULTS = 10
"""Number of results before and after a save that show the speed without it."""


@dataclass(frozen=True)
class Measured:
    """The figures of one run. Rates are those after the warm-up.

    `losses` has one for each update, from the first; a peer may have fewer, or none. `mean_loss` is over the first `mean_over` updates
    after the warm-up. `monitor_cores` is the monitoring cost of the busiest node, in cores; None without monitoring. `threads` are those
    of each task.

    `peak_memory_bytes` is the peak resident memory of the largest process, which trains, from wait4(2) (with its descendants if their
    parents waited for them); `tree_memory_bytes` the sum of the peaks of all processes. `data_wait_fraction` is the fraction of a step
    that gathers its batch, `time_to_target_seconds` on the run clock. Saving: `saves` in the measured window, the longest stall, the
    bytes of a checkpoint, and the median of `save_costs`. Text: target tokens without padding, and the fraction of padding.
    `exchange_seconds` is a separate all-reduce of all gradients, on the slowest worker. None if not measured.
    """

    steps_per_second: float
    examples_per_second: float | None
    first_step_seconds: float | None
    monitor_cores: float | None
    threads: int
    warmup: int
    steps: int
    losses: tuple[float, ...] = field(repr=False)
    mean_loss: float
    mean_over: int
    peak_memory_bytes: int | None = None
    tree_memory_bytes: int | None = None
    data_wait_fraction: float | None = None
    time_to_target_seconds: float | None = None
    saves: int = 0
    stall_seconds: float | None = None
    checkpoint_bytes: int | None = None
    save_cost_seconds: float | None = None
    target_tokens_per_second: float | None = None
    padding_share: float | None = None
    exchange_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything but the single losses."""
        values = {**vars(self)}
        del values["losses"]
        return values


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some figures."""

    median: float
    least: float
    most: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError where there are none."""
        if not values:
            raise ValueError("no figures to summarise")
        return cls(median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours ÷ theirs for each repeat.

    Neighbours in time are compared, so both include the same load of the machine.
    """
    return [mine / theirs_of_run for mine, theirs_of_run in zip(ours, theirs, strict=True)]


def copies(ours: Sequence[Measured], theirs: Sequence[Measured], figure: Figure) -> list[float]:
    """Return for each repeat by how many checkpoints a figure in bytes exceeds the peer's.

    The product saved a checkpoint in every one.
    """
    return [
        (getattr(mine, figure) - getattr(peer, figure)) / mine.checkpoint_bytes
        for mine, peer in zip(ours, theirs, strict=True)
        if mine.checkpoint_bytes is not None
    ]


def window(counts: Sequence[int], seconds: Sequence[float], warmup: int) -> tuple[int, float]:
    """Return the updates and seconds from the end of the warm-up to the last result.

    `counts` are the updates in each result, `seconds` when it arrived. Raises ValueError where nothing follows the warm-up.
    """
    done = np.cumsum(counts)
    begin = int(np.searchsorted(done, warmup))
    if begin >= len(done) - 1:
        raise ValueError(f"{done[-1] if len(done) else 0} updates leave nothing to measure after a warm-up of {warmup}")
    return int(done[-1] - done[begin]), seconds[-1] - seconds[begin]


def save_costs(counts: Sequence[int], seconds: Sequence[float], saves: Sequence[tuple[float, float]]) -> list[float]:
    """Return by how many seconds each save prolonged the results that overlap it.

    A result's own pace is its seconds an update; without the save it would have had the median pace of the results next to it, at most
    PACE_RESULTS on either side, that overlap no save. `counts` and `seconds` as in `window`, `saves` their begins and ends. A save
    without such results has no known cost and is skipped.
    """
    begins, ends, updates = np.asarray(seconds[:-1]), np.asarray(seconds[1:]), np.asarray(counts[1:])
    lasting = ends - begins
    touched = np.array([(ends > begin) & (begins < end) for begin, end in saves]).reshape(len(saves), len(ends))
    quiet = ~touched.any(axis=0)
    costs = []
    for mine in touched:
        positions = np.flatnonzero(mine)
        if not len(positions):
            continue
        near = np.concatenate(
            [np.flatnonzero(quiet[: positions[0]])[-PACE_RESULTS:], positions[-1] + np.flatnonzero(quiet[positions[-1] :])[:PACE_RESULTS]]
        )
        if len(near):
            pace = np.median(lasting[near] / updates[near])
            costs.append(float(lasting[mine].sum() - pace * updates[mine].sum()))
    return costs


def differs(ours: Measured, theirs: Measured, losses: Literal["each", "level"], same_loss: float, same_mean: float) -> str | None:
    """Describe how a peer's losses differ from the product's, or return None.

    `each`: those of every update have to agree within `same_loss` (norm-wise), and the means within `same_mean`; `level`: only the
    means, and roughly.
    """
    covered = ours.losses[theirs.warmup : theirs.warmup + theirs.mean_over]
    if len(covered) < theirs.mean_over:
        return f"{theirs.mean_over} updates after the warm-up, which the product did not take"
    expected = float(np.mean(covered))
    if not abs(theirs.mean_loss - expected) <= (same_mean if losses == "each" else SAME_LEVEL) * expected:
        return f"mean loss {theirs.mean_loss:.6g} instead of {expected:.6g}"
    count = min(len(ours.losses), len(theirs.losses)) if losses == "each" else 0
    mine, peer = _array(ours.losses[:count]), _array(theirs.losses[:count])
    if count and not float(np.linalg.norm(mine - peer)) <= same_loss * float(np.linalg.norm(mine)):
        worst = int(np.argmax(np.abs(mine - peer)))
        return f"loss {peer[worst]:.6g} instead of {mine[worst]:.6g} at update {worst}"
    return None


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
