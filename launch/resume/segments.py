"""The segments of a run, of its start and of each time that it was resumed: what ``job.json`` says of them, and what earlier ones spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.job import Job
from ...data.sampler import run_sampler
from ...engine.epochs import START, EpochIndex
from ...engine.triggers import Triggers
from .resumption import Resumption

__all__ = ["Segments", "total_steps"]


class Segments:
    """All segments of a run, the present one last. A run that was never resumed has one."""

    def __init__(self, resumption: Resumption | None, command: Sequence[str]) -> None:
        started = datetime.now().astimezone().isoformat(timespec="milliseconds")
        own: dict[str, Any] = {"started_at": started, "command": list(command), "step": 0, "epoch": 0, "examples": 0, "run_seconds": 0.0}
        self.event: dict[str, Any] = {}
        self._spent: Mapping[str, Any] = {}
        earlier: Sequence[Mapping[str, Any]] = ()
        if resumption is not None:
            self._spent, earlier = resumption.origin.spent, resumption.segments
            changed = {field: list(values) for field, values in resumption.changed.items()}
            self.event = {**resumption.origin.place, "changed": changed}
            own |= {**self.event, "run_seconds": resumption.run_seconds}
            self._run_seconds = resumption.run_seconds
        else:
            self._run_seconds = 0.0
        self.described = [*earlier, own]

    @property
    def earlier_init_seconds(self) -> float:
        """Initialisation of the earlier segments, in seconds."""
        return float(self._spent.get("init_seconds", 0.0))

    @property
    def total_before(self) -> float:
        """What the earlier segments took, up to the checkpoint, in seconds."""
        return self.earlier_init_seconds + self._run_seconds

    @property
    def earlier(self) -> dict[str, float]:
        """What the earlier segments spent of the run clock, as `Clock.earlier` has it."""
        names = ("train_seconds", "eval_seconds", "checkpoint_seconds")
        return {"run_seconds": self._run_seconds, **{name: float(self._spent.get(name, 0.0)) for name in names}}


def total_steps(
    job: Job, train_examples: int, resumption: Resumption | None, lengths: Mapping[str, NDArray[np.int64]] | None = None
) -> int:
    """Return how many updates a run may make in all, those before it was resumed included; one with a target may make fewer."""
    start = START if resumption is None else resumption.origin.start.cursor
    return Triggers(job, EpochIndex(run_sampler(job, train_examples, lengths), start)).total
