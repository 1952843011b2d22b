"""The interface of loggers, which pass a run's records on to TensorBoard, MLPerf's log or MLflow. No figure is read back from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from ..store.run_directory import RunReader
from ..summary.segments import resumed_seconds, with_segments

__all__ = ["RunLogger", "replay"]


class RunLogger:
    """Hears each record as it is made. Override what you need; methods must return quickly and may be called from any thread."""

    def step(self, record: StepRecord) -> None:
        """A group of updates has been reported."""

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation has ended."""

    def event(self, record: EventRecord) -> None:
        """Something has happened."""

    def system(self, record: SystemRecord) -> None:
        """A node has been sampled."""

    def on_replayed(self) -> None:
        """What was heard so far was told again, of a run that goes on; what follows happens when it is heard."""

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """The run is over, in this state; `summary` is None where it never trained."""

    def close(self) -> None:
        """Nothing follows; a second call does nothing."""


def replay(reader: RunReader, follower: RunLogger) -> None:
    """Tell a follower of curves the records that a run has so far; for one that goes on."""
    for group in reader.steps():
        follower.step(group)
    for evaluation in reader.evals():
        follower.evaluation(evaluation)
    for sample in with_segments(reader.system(), resumed_seconds(reader.job())):
        follower.system(sample)
    follower.on_replayed()
