"""Position of a run: its checkpoint, its segments, and the documents that a resume replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...backends.base import State
from ...checkpoint import Checkpoint, DamagedCheckpointError, Meta, list_checkpoints, newest_sound, peek_meta
from ...checkpoint.writer import remove
from ...core.errors import RunFailedError, TrainerError, UsageError
from ...core.settings.sources import Resolved
from ...engine.epochs import DataCursor
from ...engine.loop_interfaces import ResumePoint
from ...engine.protocol.state_transfer import state_from_arrays
from ...records.store.run_directory import RunReader


@dataclass(frozen=True)
class Origin:
    """Start of an attempt: a checkpoint, or without one the beginning of the run."""

    start: ResumePoint = field(default_factory=ResumePoint)
    state: State | None = None
    checkpoint: Checkpoint | None = None
    damaged: tuple[DamagedCheckpointError, ...] = ()  # newer, unusable checkpoints

    @classmethod
    def from_checkpoint(
        cls, run: Path, checkpoint: Checkpoint, damaged: Sequence[DamagedCheckpointError], state: State, cursor: DataCursor | None = None
    ) -> Origin:
        """Return the start at a checkpoint of a run, by default at the checkpoint's cursor.

        It has the evaluations on test examples until then. A target that one of them reached does not stop training again.
        """
        meta = checkpoint.meta
        evaluations = (record for record in RunReader(run).evals() if record.split == "test")
        described = (saved for path in reversed(list_checkpoints(run)) if (saved := peek_meta(path)) is not None)
        start = ResumePoint(
            cursor or cursor_from_meta(meta),
            evaluations=tuple(record for record in evaluations if record.step <= meta.step and record.time_seconds <= meta.run_seconds),
            saved=tuple(saved.metrics for saved in described if saved.step <= meta.step and saved.metrics is not None),
            **{name: meta.spent.get(name, 0.0) for name in ("train_seconds", "eval_seconds", "checkpoint_seconds")},
        )
        return cls(start, state, checkpoint, tuple(damaged))

    @property
    def spent(self) -> Mapping[str, Any]:
        """The seconds so far, as in checkpoints."""
        return {} if self.checkpoint is None else self.checkpoint.meta.spent

    @property
    def place(self) -> dict[str, Any]:
        """The position in training, for the run's records."""
        cursor = self.start.cursor
        saved = {} if self.checkpoint is None else {"checkpoint": self.checkpoint.path.name}
        return {"step": cursor.step, "epoch": cursor.epoch, "examples": cursor.examples, **saved}

    def with_node_seconds_before(self, seconds: Sequence[float | None]) -> list[float | None]:
        """Add the training seconds of each node at the checkpoint."""
        before = [*self.spent.get("train_seconds_by_node", ()), *[None] * len(seconds)]
        both = zip(seconds, before[: len(seconds)], strict=True)
        return [None if now is None and then is None else (now or 0.0) + (then or 0.0) for now, then in both]

    @property
    def run_seconds(self) -> float:
        """The run clock at the checkpoint."""
        return 0.0 if self.checkpoint is None else self.checkpoint.meta.run_seconds

    def remove_later_checkpoints(self, run: Path) -> None:
        """Remove the run's newer checkpoints: they are damaged, or their updates are repeated."""
        for path in list_checkpoints(run) if self.checkpoint is None else later_checkpoints(run, self.checkpoint):
            remove(path)


def cursor_from_meta(meta: Meta) -> DataCursor:
    """Return the position of a run at its checkpoint."""
    return DataCursor(meta.step, meta.epoch, meta.examples, meta.arranged)


def later_checkpoints(run: Path, checkpoint: Checkpoint) -> list[Path]:
    """Return the checkpoints of a run that are newer than this one, newest first."""
    return list(takewhile(lambda path: not path.samefile(checkpoint.path), list_checkpoints(run)))  # paths may be relative


@dataclass(frozen=True)
class Resumption:
    """A run to resume, read and verified, but not changed yet."""

    path: Path
    resolved: Resolved
    origin: Origin
    changed: Mapping[str, tuple[Any, Any]]  # the run's and the job's value of each field that differs
    segments: Sequence[Mapping[str, Any]]  # the run's so far
    notes: tuple[str, ...]
    compiled: bool | None = None  # the choice of ``--compile auto``, unless a setting that it depends on has changed


class RunPosition:
    """Position of a run: its `segments` and the `origin` of its present attempt.

    There is a segment per start, resume and change of nodes. `first` is the origin of this process's first attempt. A resumed run writes
    its documents at `commit`, so a failed start changes nothing.
    """

    def __init__(self, nodes: int, command: Sequence[str], resumption: Resumption | None = None) -> None:
        self._beginning = Origin()  # of a run without a checkpoint
        self.first = self.origin = self._beginning if resumption is None else resumption.origin
        self.resumed: dict[str, Any] = {}  # where and with which changes, for the records
        self.init_seconds = float(self.first.spent.get("init_seconds", 0.0))  # of the earlier segments
        self.total_seconds = self.init_seconds + self.first.run_seconds  # of the earlier segments, up to the checkpoint
        self.earlier = self._earlier(self.first.run_seconds)  # time before the last segment, for `Clock.earlier`
        self.status_to_restore: Mapping[str, Any] | None = None  # of a resumed run until the commit
        self._command = list(command)
        self._places = tuple(range(nodes))
        self._segment_step = 0  # where the nodes changed
        self._waiting: list[Callable[[], None]] = []
        self.segments: list[Mapping[str, Any]] = []  # for ``job.json``
        if resumption is not None:
            self.resumed = {**self.first.place, "changed": {field: list(values) for field, values in resumption.changed.items()}}
            self.segments += resumption.segments
        self.segments.append({**self._segment(self.first.run_seconds), **self.resumed})

    def begin_with(self, state: State) -> None:
        """Begin a new run with this state instead of the seed's initial values."""
        self.first = self.origin = self._beginning = Origin(state=state)

    def _segment(self, run_seconds: float) -> dict[str, Any]:
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        return {"started_at": now, "command": self._command, **self.origin.place, "run_seconds": run_seconds}

    def _earlier(self, run_seconds: float) -> dict[str, float]:
        start = self.origin.start
        spent = {"train_seconds": start.train_seconds, "eval_seconds": start.eval_seconds, "checkpoint_seconds": start.checkpoint_seconds}
        return {"run_seconds": run_seconds, **spent}

    def begin_segment(self, places: Sequence[int], run_seconds: float) -> bool:
        """Begin a segment if the nodes differ or training goes back before their last change.

        `run_seconds` is the run clock. Returns whether a segment began.
        """
        if tuple(places) == self._places and self.origin.start.cursor.step >= self._segment_step:
            return False
        self.segments.append({**self._segment(run_seconds), "changed": {"nodes": [len(self._places), len(places)]}})
        self.earlier, self._segment_step = self._earlier(run_seconds), self.origin.start.cursor.step
        self._places = tuple(places)
        return True

    def go_back(self, run: Path, failure: TrainerError | None = None) -> None:
        """Continue from the newest valid checkpoint of the run, if any, or from its beginning.

        A target reached before the checkpoint is reached again at the next such evaluation. Raises RunFailedError if all checkpoints are
        damaged, after the `failure` because of which they are read.
        """
        try:
            self.origin = self._newest_origin(run)
        except UsageError as error:
            before = "" if failure is None else f"{failure}; and "
            raise RunFailedError(f"{before}the run cannot go on: {error}", getattr(failure, "task", None)) from failure or error

    def _newest_origin(self, run: Path) -> Origin:
        if not list_checkpoints(run):
            return self._beginning
        checkpoint, damaged = newest_sound(run)
        first = self.first.checkpoint
        if first is not None and first.path.exists() and checkpoint.path.samefile(first.path):
            return self.first  # the job may have changed there
        meta = checkpoint.meta
        state = state_from_arrays(dict(checkpoint.arrays), int(meta.spent.get("updates", meta.step)), meta.scalars)
        return Origin.from_checkpoint(run, checkpoint, damaged, state)

    def write(self, document: Callable[[], None]) -> None:
        """Write a document now, or at the commit in order."""
        if self.status_to_restore is None:
            document()
        else:
            self._waiting.append(document)

    def commit(self) -> None:
        """Write the deferred documents, and later ones immediately, as the run has resumed."""
        self.status_to_restore = None
        for document in self._waiting:
            document()
        self._waiting.clear()
