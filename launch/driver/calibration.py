"""The end of a run that came to its end: its calibration, into the run directory. What goes wrong here is an event, not a failure."""

from __future__ import annotations

from ...core.errors import InterruptedRunError, RunFailedError
from ...core.job import Job
from ...engine.calibration import calibrate
from ...models.base import ModelSpec
from .recorder import Recording
from .task_group import Control

__all__ = ["calibrate_run"]


def calibrate_run(job: Job, model: ModelSpec, control: Control, recording: Recording, train_seconds: float) -> None:
    """Calibrate and write ``calibration.json``. The run clock has ended and every checkpoint is safe: nothing can be lost here."""
    try:
        document = calibrate(job, model, control, train_seconds)
    except (RunFailedError, InterruptedRunError) as error:
        cause = str(error).splitlines()[0]
        recording.event("calibration_failed", cause=cause)
        recording.progress.message(f"the run is complete, but was not calibrated ({cause})")
        return
    recording.writer.write_calibration(document)
