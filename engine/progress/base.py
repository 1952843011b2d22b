"""Live progress on standard error: the step, the loss, the speed, the time left, and a line for each node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from ...core.job import Job
from ...metrics import MetricInfo
from ...records.schema import EvalRecord, SystemRecord
from .plain import PlainProgress
from .rich import RichProgress

__all__ = ["PlainProgress", "Progress", "QuietProgress", "RichProgress", "make_progress", "terminal"]


class Progress(Protocol):
    """Whom the driver tells how a run proceeds. Calls are cheap and come at any rate, from any thread."""

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """A run begins, whose evaluations have these metrics; `total_steps` is None where only a target ends it."""
        ...

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """`step` updates have been reported, the last with this loss, in this epoch (from 0)."""
        ...

    def node(self, record: SystemRecord) -> None:
        """A node has been sampled."""
        ...

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation has ended."""
        ...

    def doing(self, text: str | None) -> None:
        """What the run does meanwhile instead of training, and how far it is with it; None when that is over."""
        ...

    def message(self, text: str) -> None:
        """Something happened that a person should read."""
        ...

    def close(self) -> None:
        """Nothing follows; a second call does nothing."""
        ...


class QuietProgress:
    """Writes nothing."""

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """Say nothing."""

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Say nothing."""

    def node(self, record: SystemRecord) -> None:
        """Say nothing."""

    def evaluation(self, record: EvalRecord) -> None:
        """Say nothing."""

    def doing(self, text: str | None) -> None:
        """Say nothing."""

    def message(self, text: str) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""


def terminal(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether to draw on `stream`: a terminal that understands control sequences, and no NO_COLOR in the environment."""
    known = os.environ if environment is None else environment
    return stream.isatty() and not known.get("NO_COLOR") and known.get("TERM", "dumb") != "dumb"


def make_progress(stream: TextIO, quiet: bool) -> Progress:
    """Return what suits the stream: pictures on a terminal, plain lines elsewhere, nothing where `quiet`."""
    if quiet:
        return QuietProgress()
    return RichProgress(stream) if terminal(stream) else PlainProgress(stream)
