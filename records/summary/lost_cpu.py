"""How much of the CPU time that a node's tasks asked for went to other programs? Computed from what the run's nodes used and waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["LEAST_SECONDS", "CpuUse", "LostCpu", "lost_cpu", "mean_over_segments"]

_Figure = TypeVar("_Figure")

LEAST_SECONDS = 2.0
"""Samples of less time tell nothing: the end of the start, which the tasks' samples do not have all of, is a large part of it."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """One node during one segment of a run, in cores (CPU seconds a second) over `seconds`; None for what was not observed.

    `used` by its tasks, `waited` by its tasks' threads for a core, `trainer` used by agent and driver, `machine` by all programs of its
    machine on the cores that the node may use, which are `available`. Of a node that has a limit: `granted` by it while the node ran at
    all, and `throttled`, how long it held the node up.
    """

    used: float | None
    waited: float | None
    trainer: float | None
    machine: float | None
    available: float | None
    granted: float | None = None
    throttled: float | None = None
    seconds: float = LEAST_SECONDS


@dataclass(frozen=True, slots=True)
class LostCpu:
    """What other programs did to a node, in cores: they had `foreign`, and its tasks would have used `lost` more than they `used`."""

    foreign: float
    lost: float | None
    used: float
    seconds: float

    @property
    def fraction(self) -> float | None:
        """The fraction (0 to 1) of the CPU time that its tasks asked for that others took."""
        if self.lost is None:
            return None
        return self.lost / (self.used + self.lost) if self.lost else 0.0


def lost_cpu(nodes: Sequence[CpuUse], machines: Sequence[str | None]) -> list[LostCpu | None]:
    """Return for each node what others took during a segment of a run; None where it is not known how many cores they had.

    `machines` says which nodes share one; a node of which it says None is taken to be on that of every other.

    Tasks lost to others no more than they waited for them, no more than the others used, and no more than they might have used beyond what
    they did. So waiting for each other is no loss, as where several nodes share a machine, and neither is waiting at a limit of the node's
    own. What others used is lost once, however many nodes waited for it.
    """
    foreign = [_foreign(node, _beside(nodes, machines, index)) for index, node in enumerate(nodes)]
    lost = [_lost(node, others) for node, others in zip(nodes, foreign, strict=True)]
    found: list[LostCpu | None] = []
    for index, (node, others, own) in enumerate(zip(nodes, foreign, lost, strict=True)):
        if others is None or node.used is None:
            found.append(None)
            continue
        all_lost = sum(cores or 0.0 for cores in _beside(lost, machines, index))
        share = None if own is None else own * min(1.0, others / all_lost) if all_lost else 0.0
        found.append(LostCpu(others, share, node.used, node.seconds))
    return found


def mean_over_segments(segments: Iterable[LostCpu | None]) -> LostCpu | None:
    """Return what a node lost over several segments of a run, as the mean over those of which it is known; None where it is of none."""
    known = [segment for segment in segments if segment is not None]
    seconds = sum(segment.seconds for segment in known)
    if not seconds:
        return None
    observed = [segment for segment in known if segment.lost is not None] or known
    spans = sum(segment.seconds for segment in observed)
    foreign, used = (sum(getattr(segment, name) * segment.seconds for segment in observed) / spans for name in ("foreign", "used"))
    lost = sum(segment.lost * segment.seconds for segment in observed if segment.lost is not None) / spans
    return LostCpu(foreign, None if observed[0].lost is None else lost, used, spans)


def _beside(figures: Sequence[_Figure], machines: Sequence[str | None], index: int) -> list[_Figure]:
    """Return the figures of all nodes that are on the machine of this one, its own among them."""
    own = machines[index]
    return [figure for figure, where in zip(figures, machines, strict=True) if own is None or where is None or where == own]


def _foreign(node: CpuUse, here: Sequence[CpuUse]) -> float | None:
    """Return how many of a node's cores programs had that are not the run's; `here` are all nodes of its machine."""
    own = [figure for other in here for figure in (other.used, other.trainer)]
    if node.machine is None or None in own:
        return None
    return max(0.0, node.machine - sum(figure or 0.0 for figure in own))


def _lost(node: CpuUse, foreign: float | None) -> float | None:
    """Return what a node lost to others that had `foreign` of its cores.

    While a thread waits for a core, somebody else has it: others in the proportion that they have of all that is not the node's own use.
    The kernel counts as waiting too what a thread stands still for its group's limit. One thread at least does so for as long as the group
    is held up; how many more do is not known. So what the limit granted counts besides: what a period's limit was used up for is not lost
    to anybody, however long some thread waited in it, and in a period without any use nothing was asked for.
    """
    if foreign is None or node.used is None or node.waited is None or node.available is None or node.machine is None:
        return None
    besides = node.machine - node.used
    waited = max(0.0, node.waited - (node.throttled or 0.0)) * (min(1.0, foreign / besides) if besides > 0 else 0.0)
    most = node.available if node.granted is None else min(node.available, node.granted)
    return max(0.0, min(waited, foreign, most - node.used))
