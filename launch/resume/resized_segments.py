"""The segments of a run that went on by itself on other nodes: what ``job.json`` says of them, and what was spent before the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from .origin import Origin

__all__ = ["ResizedSegments"]


class ResizedSegments:
    """One for each time that the nodes changed; none as long as a run is on all of its `nodes`. `command` is what the user typed.

    `described` is what belongs to the ``segments`` of ``job.json``. `earlier` is what had been spent before the last segment, as
    `Clock.earlier` has it, and None where there is none.
    """

    def __init__(self, nodes: int, command: Sequence[str]) -> None:
        self.described: list[dict[str, Any]] = []
        self.earlier: Mapping[str, float] | None = None
        self._command = list(command)
        self._places = tuple(range(nodes))

    def goes_on(self, places: Sequence[int], origin: Origin) -> bool:
        """Return whether training on these nodes from `origin` on belongs to the segment that there is, and so needs no other."""
        within = not self.described or origin.start.cursor.step >= self.described[-1]["step"]
        return within and tuple(places) == self._places

    def begin(self, places: Sequence[int], origin: Origin, run_seconds: float) -> None:
        """A segment begins on these nodes, from `origin` on, at `run_seconds` of the run clock."""
        start = origin.start
        started = datetime.now().astimezone().isoformat(timespec="milliseconds")
        where = {**origin.place, "run_seconds": run_seconds, "changed": {"nodes": [len(self._places), len(places)]}}
        self.described.append({"started_at": started, "command": self._command, **where})
        spent = {"train_seconds": start.train_seconds, "eval_seconds": start.eval_seconds, "checkpoint_seconds": start.checkpoint_seconds}
        self.earlier = {"run_seconds": run_seconds, **spent}
        self._places = tuple(places)
