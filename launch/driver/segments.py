"""The segments of a run: one per start, resume and change of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.job import Job
from ...data.sampler import run_sampler
from ...engine.epochs import START, EpochIndex
from ...engine.policies import Triggers
from .position import Origin
from .resumption import Resumption


class Segments:
    """The segments of earlier processes and, last of `described`, of this one."""

    def __init__(self, resumption: Resumption | None, command: Sequence[str]) -> None:
        segment: dict[str, Any] = {"started_at": _now(), "command": list(command), "step": 0, "epoch": 0, "examples": 0, "run_seconds": 0.0}
        self.event: dict[str, Any] = {}
        self._spent: Mapping[str, Any] = {}
        self._run_seconds = 0.0
        earlier: Sequence[Mapping[str, Any]] = ()
        if resumption is not None:
            origin, earlier = resumption.origin, resumption.segments
            self._spent, self._run_seconds = origin.spent, origin.run_seconds
            self.event = {**origin.place, "changed": {field: list(values) for field, values in resumption.changed.items()}}
            segment |= {**self.event, "run_seconds": origin.run_seconds}
        self.described = [*earlier, segment]

    @property
    def earlier_init_seconds(self) -> float:
        """Initialisation of the earlier segments, in seconds."""
        return float(self._spent.get("init_seconds", 0.0))

    @property
    def total_before(self) -> float:
        """Duration of the earlier segments, up to the checkpoint, in seconds."""
        return self.earlier_init_seconds + self._run_seconds

    @property
    def earlier(self) -> dict[str, float]:
        """Time of the earlier segments on the run clock, for `Clock.earlier`."""
        names = ("train_seconds", "eval_seconds", "checkpoint_seconds")
        return {"run_seconds": self._run_seconds, **{name: float(self._spent.get(name, 0.0)) for name in names}}


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def total_steps(
    job: Job, train_examples: int, resumption: Resumption | None, lengths: Mapping[str, NDArray[np.int64]] | None = None
) -> int:
    """Return the maximum number of updates of a run, including those before a resume."""
    start = START if resumption is None else resumption.origin.start.cursor
    return Triggers(job, EpochIndex(run_sampler(job, train_examples, lengths), start)).total


class ResizedSegments:
    """The segments that begin with a change of nodes, after a start on all `nodes`."""

    def __init__(self, nodes: int, command: Sequence[str]) -> None:
        self.described: list[dict[str, Any]] = []  # for the ``segments`` of ``job.json``
        self.earlier: Mapping[str, float] | None = None  # time before the last segment, for `Clock.earlier`
        self._command = list(command)
        self._places = tuple(range(nodes))

    def goes_on(self, places: Sequence[int], origin: Origin) -> bool:
        """Return whether training on these nodes from `origin` belongs to the last segment."""
        within = not self.described or origin.start.cursor.step >= self.described[-1]["step"]
        return within and tuple(places) == self._places

    def begin(self, places: Sequence[int], origin: Origin, run_seconds: float) -> None:
        """Begin a segment on these nodes from `origin`, at `run_seconds` of the run clock."""
        start = origin.start
        where = {**origin.place, "run_seconds": run_seconds, "changed": {"nodes": [len(self._places), len(places)]}}
        self.described.append({"started_at": _now(), "command": self._command, **where})
        spent = {"train_seconds": start.train_seconds, "eval_seconds": start.eval_seconds, "checkpoint_seconds": start.checkpoint_seconds}
        self.earlier = {"run_seconds": run_seconds, **spent}
        self._places = tuple(places)


class DeferredWrites:
    """Writes that wait for `commit` in a resumed run, so a failed start changes nothing."""

    def __init__(self, status_before: Mapping[str, Any] | None = None) -> None:
        self.status_to_restore = status_before  # None for a new run, and after the commit
        self._waiting: list[Callable[[], None]] = []

    def make(self, write: Callable[[], None]) -> None:
        """Write now, or at the commit in order."""
        if self.status_to_restore is None:
            write()
        else:
            self._waiting.append(write)

    def commit(self) -> None:
        """Make the deferred writes, and later ones at once, as the run has resumed."""
        self.status_to_restore = None
        for write in self._waiting:
            write()
        self._waiting.clear()
