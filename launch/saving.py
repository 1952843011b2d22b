"""Checkpoints onto the disk: a thread of the driver writes each state as its parts arrive, while the run goes on.

A save that fails is an event and a line for the user, and not the end of the run.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint import CHECKPOINTS, ArrayEntry, CheckpointWriter, Meta, described_data, described_model, prune
from ..core.job import Job
from ..data.store import StoredDataset
from ..engine.messages import Message, RawArray
from ..engine.parties import Save
from ..models.base import ModelSpec
from .recording import Recording

__all__ = ["CheckpointSaver", "Subject"]

RESERVE_BYTES = 8 * 2**20
"""Room that a save leaves on the disk: the run's other records have to go on even where a checkpoint does not fit."""


@dataclass(frozen=True)
class Subject:
    """What the checkpoints of a run are of."""

    job: Job
    model: ModelSpec
    data: StoredDataset


@dataclass(frozen=True)
class _Begin:
    meta: Meta
    entries: tuple[ArrayEntry, ...]
    stall_seconds: float


class CheckpointSaver:
    """Writes a run's checkpoints; the `Saver` of its training loop.

    `acknowledge` is called for each part that has been dealt with; `spent` returns the seconds spent so far, for the checkpoint.
    """

    def __init__(
        self, subject: Subject, recording: Recording, acknowledge: Callable[[], None], spent: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._subject = subject
        self._recording = recording
        self._acknowledge = acknowledge
        self._spent = spent
        self._queue: queue.SimpleQueue[_Begin | memoryview | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._abandoned = False
        self._error: Exception | None = None
        self.newest: Path | None = None
        threading.Thread(target=self._work, name="saver", daemon=True).start()

    # What the loop says -----------------------------------------------------------------------------------------------

    def begin(self, save: Save, message: Message) -> None:
        """A state begins to arrive."""
        with self._changed:
            self._unfinished += 1
        entries = tuple(ArrayEntry(key, dtype, tuple(shape)) for key, dtype, shape in message["entries"])
        self._queue.put(_Begin(self._meta(save, message), entries, save.stall_seconds))

    def part(self, message: Message) -> None:
        """A part of it has arrived."""
        raw = message.arrays["data"]
        if not isinstance(raw, RawArray):
            raise TypeError("a part of a state is raw bytes")
        self._queue.put(memoryview(raw.data))

    def end(self) -> None:
        """All of it has arrived."""
        self._queue.put(None)

    def wait(self) -> None:
        """Wait until all that arrived is on the disk or has failed. Raises what is not a matter of the disk."""
        with self._changed:
            while self._unfinished and self._error is None:
                self._changed.wait(0.1)  # a bounded wait lets signals through
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Give up what is being saved, and leave nothing half-written; the run has failed."""
        with self._changed:
            self._abandoned = True
            if not self._unfinished:
                return
        self._queue.put(None)
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished or self._error is not None, timeout=5.0)

    def _meta(self, save: Save, message: Message) -> Meta:
        job, evaluation = self._subject.job, save.evaluation
        return Meta(
            step=save.cursor.step,
            epoch=save.cursor.epoch,
            examples=save.cursor.examples,
            run_seconds=max(0.0, save.run_seconds),
            seed=job.seed,
            job=job.recorded(),
            model=described_model(self._subject.model),
            data=described_data(self._subject.data.info, self._subject.data.digest, job.data_dir),
            scalars=dict(message["scalars"]),
            metrics=None if evaluation is None else {"loss": evaluation.loss, "accuracy": evaluation.accuracy},
            spent={**self._spent(), "updates": message["updates"]},
            created_at=datetime.now().astimezone().isoformat(timespec="milliseconds"),
            backend=job.backend,
            mode=job.mode,
            workers=job.workers,
        )

    # The thread -------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if not isinstance(item, _Begin):
                continue
            try:
                self._save(item)
            except Exception as error:  # noqa: BLE001 — handed to the loop's thread, which raises it
                self._error = error
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _save(self, begin: _Begin) -> None:
        """Write one checkpoint, taking its parts from the queue; after a failure of the disk they are taken all the same."""
        began = time.monotonic()
        writer: CheckpointWriter | None = None
        failure: OSError | None = None
        try:
            self._room_for(sum(entry.bytes for entry in begin.entries))
            writer = CheckpointWriter(self._recording.path / CHECKPOINTS, begin.meta, begin.entries)
        except OSError as error:
            failure = error
        while (part := self._queue.get()) is not None:
            if isinstance(part, _Begin):
                raise RuntimeError("a state began before the one before it had ended")
            try:
                if failure is None and writer is not None:
                    writer.write(part)
            except OSError as error:
                failure = error
            self._acknowledge()
        if self._abandoned:
            if writer is not None:
                writer.abort()
            return
        if failure is None and writer is not None:
            try:
                self._finished(begin, writer.finish(), time.monotonic() - began)
            except OSError as error:
                failure = error
        if failure is not None:
            self._failed(begin.meta.step, failure)

    def _finished(self, begin: _Begin, path: Path, seconds: float) -> None:
        job = self._subject.job
        size = sum(file.stat().st_size for file in path.iterdir())
        self.newest = path
        self._recording.event(
            "checkpoint_saved",
            path=str(path.relative_to(self._recording.path)),
            step=begin.meta.step,
            bytes=size,
            seconds=seconds,
            stall_seconds=begin.stall_seconds,
        )
        prune(self._recording.path, job.keep, job.keep_best)

    def _failed(self, step: int, error: OSError) -> None:
        cause = error.strerror or str(error)
        self.newest = None
        self._recording.event("checkpoint_failed", step=step, cause=cause, errno=error.errno)
        self._recording.progress.message(f"the checkpoint after step {step:,} was not saved ({cause}); the run goes on")

    def _room_for(self, size: int) -> None:
        """Raise OSError (no space left) where a checkpoint would take the room that the run's other records need."""
        free = shutil.disk_usage(self._recording.path).free
        if free < size + RESERVE_BYTES:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free:,} bytes are free, {size:,} are needed and some to spare")
