"""What a run leaves behind: every record goes through here, onto the run clock, into the run directory and onto the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..backends.base import State
from ..core.job import Job
from ..engine.progress import Progress
from ..metrics.records import EvalRecord, EventRecord, StepRecord, SystemRecord, TaskSample
from ..metrics.rundir import RunWriter
from ..metrics.tensorboard import TensorBoardWriter

__all__ = ["Recording"]


class Recording:
    """A run's records and its clock. `began` is when the command started, in seconds of the machine's clock.

    What happens before the run clock starts is held back until then, because its time on that clock is not known earlier.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.writer = RunWriter.create(job)
        self.progress = progress
        self.began = psutil.Process().create_time()
        self.init_seconds = 0.0
        self._zero: float | None = None
        self._early: list[Callable[[], None]] = []
        self._tensorboard: TensorBoardWriter | None = None

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.writer.path

    # The clock ------------------------------------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Start the run clock and write what was held back; a second call does nothing."""
        if self._zero is not None:
            return
        self._zero = time.monotonic()
        self.init_seconds = time.time() - self.began
        for write in self._early:
            write()
        self._early.clear()

    def clock(self) -> float:
        """Return seconds on the run clock. Raises RuntimeError where it has not been started."""
        return self._since_zero(time.monotonic())

    def _since_zero(self, moment: float) -> float:
        if self._zero is None:
            raise RuntimeError("the run clock has not been started")
        return moment - self._zero

    def _at_its_time(self, write: Callable[[float], None]) -> None:
        """Write a record stamped with this moment: now, or as soon as the run clock starts."""
        moment = time.monotonic()
        if self._zero is None:
            self._early.append(lambda: write(self._since_zero(moment)))
        else:
            write(self._since_zero(moment))

    # Records --------------------------------------------------------------------------------------------------------

    def add_tensorboard(self) -> None:
        """Write TensorBoard's events too, from now on. Loading its writer takes a while: call it while the tasks load theirs."""
        if self._tensorboard is None:
            self._tensorboard = TensorBoardWriter(self.path)

    def step(self, record: StepRecord) -> None:
        """Record a group of updates."""
        self.writer.step(record)
        if self._tensorboard is not None:
            self._tensorboard.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        self.writer.evaluation(record)
        if self._tensorboard is not None:
            self._tensorboard.evaluation(record)

    def event(self, event: str, **detail: Any) -> None:
        """Record that something happened just now."""
        self._at_its_time(lambda now: self.writer.event(EventRecord(event, now, detail)))

    def sample(self, fields: Mapping[str, Any]) -> None:
        """Record a node's resources, as its agent sent them."""
        own = {key: value for key, value in fields.items() if key not in ("tasks", "time_seconds")}
        tasks = tuple(TaskSample(**task) for task in fields["tasks"])
        self._at_its_time(lambda now: self._system(SystemRecord(**own, time_seconds=now, tasks=tasks)))

    def _system(self, record: SystemRecord) -> None:
        self.writer.system(record)
        self.progress.node(record)
        if self._tensorboard is not None:
            self._tensorboard.system(record)

    def log(self, node: int, task: str, text: bytes) -> None:
        """Keep the log of a task whose node does not see our files."""
        self.writer.log_path(node, task).write_bytes(text)

    def weights(self, state: State) -> None:
        """Write the parameters, by canonical name, as ``weights.npz``."""
        values: dict[str, Any] = dict(state.parameters)
        np.savez(self.path / "weights.npz", **values)

    def close(self) -> None:
        """Flush and close everything, the display included."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        self.writer.close()
        self.progress.close()
