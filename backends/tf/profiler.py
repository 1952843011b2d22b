"""The trace of ``--profile``: a few updates, as files that TensorBoard's profile page opens.

In sync mode the first rank is traced. In async mode it is the chief, and so what is seen is how tickets go out and outcomes come back:
workers are TensorFlow's own servers, which do not know what they compute.
"""

from __future__ import annotations

import os

import tensorflow as tf

__all__ = ["StepProfiler", "make_tracer"]

FOLDER_VARIABLE = "TRAINER_PROFILE_DIR"


def make_tracer(updates: int, *, first: bool) -> StepProfiler | None:
    """Return what traces the first updates after warm-up, None where nothing is to be traced or this is not the `first` task."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return StepProfiler(folder, updates) if updates and folder and first else None


class StepProfiler:
    """Traces from the first `begin` on, until as many updates are done."""

    def __init__(self, folder: str, updates: int) -> None:
        self._folder = folder
        self._left = updates
        self._running = False

    @property
    def ended(self) -> bool:
        """Whether the trace is written."""
        return self._left <= 0

    def begin(self) -> None:
        """An update is about to begin; does nothing while the trace runs or when it is done."""
        if self._left > 0 and not self._running:
            tf.profiler.experimental.start(self._folder)
            self._running = True

    def done(self, updates: int) -> None:
        """So many more updates are done; with the last of them the trace is written, below ``plugins/profile``."""
        if not self._running:
            return
        self._left -= updates
        if self._left <= 0:
            tf.profiler.experimental.stop()
            self._running = False
