"""In which segment of a run was a resource sample taken? Each start, each resumption and each change of its nodes begins one.

Samples of a segment's initialisation are stamped when its clock starts. Where one goes on from a checkpoint, that is mostly within the time
that the segments before it trained, and their monitors counted by themselves. Records say when their segment's clock started
(`SystemRecord.part_began_seconds`), and with that what was initialisation; of runs from before they did so their order tells it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..schema import SystemRecord

__all__ = ["SegmentTracker", "last_segment", "nodes_of_last_segment", "resumed_seconds", "with_segments"]


def resumed_seconds(described: Mapping[str, Any]) -> list[float]:
    """Return the times on the run clock from which the run of a ``job.json`` went on, as far as it was not taken back further later."""
    found: list[float] = []
    for segment in described.get("segments", ())[1:]:
        found = [*(seconds for seconds in found if seconds < segment["run_seconds"]), segment["run_seconds"]]
    return found


def last_segment(described: Mapping[str, Any]) -> tuple[float, int]:
    """Return where the last segment of a ``job.json``'s run begins, on the run clock and in steps; 0 of both where it was never resumed."""
    segments = described.get("segments", ())
    return (segments[-1]["run_seconds"], segments[-1].get("step", 0)) if len(segments) > 1 else (0.0, 0)


def nodes_of_last_segment(described: Mapping[str, Any]) -> int:
    """Return on how many nodes the last segment of a ``job.json``'s run was: fewer than the job's where it went on without some."""
    changed = (described.get("segments") or [{}])[-1].get("changed", {}).get("nodes")
    now = changed[-1] if isinstance(changed, list) and changed else None
    nodes: int = described.get("nodes", 1)  # as the job's own default is
    return now if isinstance(now, int) and 1 <= now <= nodes else nodes


class SegmentTracker:
    """Tells the segment of each sample of a run; ask for all samples of all nodes, in the order of the records.

    The driver alone stamps samples, each as it arrives, so within a segment their times never fall, whichever nodes they are of. Where
    records do not say their segment, the next one has begun for all nodes where time falls after the present one's beginning, or passes the
    next's.
    """

    def __init__(self, resumed_seconds: Sequence[float]) -> None:
        """`resumed_seconds` are the times on the run clock from which the run went on, rising."""
        self._next = [*resumed_seconds]
        self._began_seconds = 0.0
        self._last_seconds = -math.inf

    def began_seconds(self, time_seconds: float, said: float | None) -> float:
        """Return when the clock of the sample's segment started, on the run clock; `said` is what the record says of it."""
        if said is not None:
            self._began_seconds = said
            self._next = [seconds for seconds in self._next if seconds > said]
        elif self._next and (time_seconds < self._last_seconds > self._began_seconds or time_seconds > self._next[0]):
            self._began_seconds = self._next.pop(0)
        self._last_seconds = time_seconds
        return self._began_seconds


def with_segments(samples: Iterable[SystemRecord], resumed_seconds: Sequence[float]) -> Iterator[SystemRecord]:
    """Yield the samples of a run with their segments, also where they do not say them themselves (`SegmentTracker`)."""
    segments = SegmentTracker(resumed_seconds)
    for record in samples:
        began = segments.began_seconds(record.time_seconds, record.part_began_seconds)
        yield record if record.part_began_seconds is not None else replace(record, part_began_seconds=began)
