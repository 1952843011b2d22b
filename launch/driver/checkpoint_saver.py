"""Saving of checkpoints in a thread, from a task's memory or its messages."""

from __future__ import annotations

import errno
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ...checkpoint import CHECKPOINTS, ArrayEntry, CheckpointWriter, Meta, described_model, prune
from ...engine.loop_interfaces import PendingCheckpoint
from ...engine.protocol.messages import ImpossibleAnswerError
from ...engine.protocol.state_transfer import WINDOW, PeerMemory, StateBegin, StatePart
from ...metrics import LOSS
from .recorder import RunRecorder
from .training_job import TrainingJob

READ_CHUNK_BYTES = 2**19  # stays in the processor's cache until it is hashed and written
PEER_MEMORY_VARIABLE = "TRAINER_PEER_MEMORY"  # ``off``: never read memory, for systems that punish the attempt
FREE_SPACE_RESERVE_BYTES = 8 * 2**20  # left for other records; the last save may use it, as few records follow
MAX_SLOTS = 8  # values that an optimiser keeps per parameter: two with Adam


@dataclass(frozen=True)
class _SaveRequest:
    meta: Meta
    entries: tuple[ArrayEntry, ...]
    memory: PeerMemory
    addresses: tuple[int, ...]
    stall_seconds: float

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(address, entry.bytes) for address, entry in zip(self.addresses, self.entries, strict=True) if entry.bytes]


class _Arriving:
    """A state of `size` bytes, `taken` from memory or `sent`; set before each answer."""

    def __init__(self, size: int = 0) -> None:
        self.taken = self.sent = False
        self._left = size
        self._unacknowledged = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            self._left -= size
            self._unacknowledged += 1
            if not self.sent or self._left < 0 or self._unacknowledged > WINDOW:
                raise ImpossibleAnswerError("a part of a state that was not asked for")

    def acknowledged(self) -> None:
        with self._lock:
            self._unacknowledged -= 1

    def end(self) -> None:
        if not self.taken and (not self.sent or self._left):
            raise ImpossibleAnswerError("the end of a state that has not arrived")


class CheckpointSaver:
    """Writes a run's checkpoints; the `CheckpointSink` of its training loop."""

    def __init__(
        self,
        training: TrainingJob,
        recording: RunRecorder,
        answer: Callable[[Literal["taken", "send", "ack"]], None],  # sends a `StateAnswer` to the task
        spent: Callable[[], Mapping[str, Any]],
        *,
        same_machine: bool,  # from the launcher: a node that lies could have any memory of this machine read
    ) -> None:
        self._training = training
        self._recording = recording
        self._same_machine = same_machine
        self._answer = answer
        self._spent = spent
        self.active_at = -math.inf
        self._queue: queue.SimpleQueue[_SaveRequest | memoryview | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._abandoned = False
        self._last_step: int | None = None
        self._refused_step: int | None = None
        self._error: Exception | None = None
        self.newest: Path | None = None  # of the last save; None if it failed
        self.unsaved: str | None = None  # step and reason, if the last save failed
        self._arriving = _Arriving()
        threading.Thread(target=self._work, name="saver", daemon=True).start()

    def begin(self, save: PendingCheckpoint, message: StateBegin) -> None:
        """Begin to save a state. Raises ImpossibleAnswerError if it does not fit the model."""
        entries = tuple(ArrayEntry(key, dtype, tuple(shape)) for key, dtype, shape in message.entries)
        self._expect_state_of_model(entries)
        with self._changed:
            self._unfinished += 1
        self._arriving = _Arriving(sum(entry.bytes for entry in entries))
        self._queue.put(_SaveRequest(self._meta(save, message), entries, message.memory, tuple(message.addresses), save.stall_seconds))

    def chunk(self, message: StatePart) -> None:
        """Add a chunk of the state. Raises ImpossibleAnswerError if it was not requested."""
        data = message.arrays["data"].data
        self._arriving.take(len(data))
        self._queue.put(memoryview(data))

    def end(self) -> None:
        """End the state. Raises ImpossibleAnswerError if it is incomplete."""
        self._arriving.end()
        self._queue.put(None)

    def wait(self) -> None:
        """Wait until all saves are complete or failed. Raises errors other than the disk's."""
        with self._changed:
            while self._unfinished and self._error is None:
                self._changed.wait(0.1)  # a bounded wait lets signals through
        if self._error is not None:
            raise self._error

    def ending(self, step: int) -> bool:
        """Let the last state, of this step, use the reserve; return whether it was refused before."""
        with self._changed:
            self._last_step = step
            return self._refused_step == step

    def abandon(self) -> None:
        """Stop saving, and leave nothing half-written."""
        with self._changed:
            self._abandoned = True
        self._queue.put(None)
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished or self._error is not None, timeout=5.0)

    def _expect_state_of_model(self, entries: Sequence[ArrayEntry]) -> None:
        model = self._training.model
        shapes = {f"parameters/{parameter.name}": parameter.shape for parameter in model.parameters}
        shapes |= {f"buffers/{parameter.name}": parameter.shape for parameter in model.buffers}
        arrived = {entry.key: entry.shape for entry in entries}
        slots = {key for key in arrived if key.startswith("slots/")}
        for key in slots:
            shapes[key] = shapes.get(f"parameters/{key.split('/', 2)[-1]}", ())
        slot_names = {key.split("/")[1] for key in slots}
        if (
            arrived != shapes
            or len(arrived) != len(entries)
            or len(slot_names) > MAX_SLOTS
            or any(entry.dtype != "<f4" for entry in entries)
        ):
            raise ImpossibleAnswerError("a state that is none of the run's model")

    def _meta(self, save: PendingCheckpoint, message: StateBegin) -> Meta:
        job, evaluation = self._training.job, save.evaluation
        return Meta(
            step=save.cursor.step,
            epoch=save.cursor.epoch,
            examples=save.cursor.examples,
            arranged=save.cursor.arranged,
            run_seconds=max(0.0, save.run_seconds),
            seed=job.seed,
            job={**self._training.requested.recorded(), "loss": job.loss},
            model=described_model(self._training.model),
            data=self._training.data_description,
            scalars=dict(message.scalars),
            metrics=None if evaluation is None else {LOSS.name: evaluation.loss, **evaluation.metrics},
            spent={**self._spent(), "updates": message.updates},
            created_at=datetime.now().astimezone().isoformat(timespec="milliseconds"),
            backend=job.backend,
            mode=job.mode,
            workers=job.workers,
        )

    def _work(self) -> None:
        while not (self._abandoned and not self._unfinished):
            item = self._queue.get()
            if not isinstance(item, _SaveRequest):
                continue
            try:
                self._save(item)
            except Exception as error:  # noqa: BLE001 — handed to the loop's thread, which raises it
                self._error = error
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _save(self, begin: _SaveRequest) -> None:
        """Write a checkpoint, and always answer the task. Raises DiskError if the run cannot write."""
        self._recording.check(immediately=True)
        began = time.monotonic()
        writer: CheckpointWriter | None = None
        failure: OSError | None = None
        read = self._can_read(begin)
        try:
            self._room_for(sum(entry.bytes for entry in begin.entries), begin.meta.step)
            writer = CheckpointWriter(self._recording.path / CHECKPOINTS, begin.meta, begin.entries)
        except OSError as error:
            failure = error
        try:
            for data in self._read(begin) if read else self._received():
                self.active_at = time.monotonic()
                if failure is None and writer is not None:
                    try:
                        writer.write(data)
                    except OSError as error:  # the rest is still received, and dropped
                        failure = error
        except OSError as error:
            failure = error
        if writer is not None:
            try:
                if failure is None and not self._abandoned and (path := self._publish(writer)) is not None:
                    self._finished(begin, path, time.monotonic() - began, read=read)
            except OSError as error:
                failure = error
            finally:
                writer.abort()
        if failure is not None and not self._abandoned:
            self._failed(begin.meta.step, failure)

    def _publish(self, writer: CheckpointWriter) -> Path | None:
        writer.seal()
        with self._changed:  # `abandon` finds the checkpoint, or it is never published
            return None if self._abandoned else writer.publish()

    def _can_read(self, begin: _SaveRequest) -> bool:
        wanted = self._same_machine and os.environ.get(PEER_MEMORY_VARIABLE) != "off"
        return wanted and begin.memory.readable(place for address, size in begin.places for place in (address, address + size - 1))

    def _read(self, begin: _SaveRequest) -> Iterator[memoryview]:
        room = memoryview(bytearray(READ_CHUNK_BYTES))
        try:
            for address, size in begin.places:
                for first in range(0, size, READ_CHUNK_BYTES):
                    if self._abandoned:
                        return
                    taken = room[: min(READ_CHUNK_BYTES, size - first)]
                    begin.memory.read(address + first, taken)
                    yield taken
        finally:
            self._arriving.taken = True
            self._answer("taken")
            while self._queue.get() is not None:
                pass

    def _received(self) -> Iterator[memoryview]:
        self._arriving.sent = True
        self._answer("send")
        while (chunk := self._queue.get()) is not None:
            if isinstance(chunk, _SaveRequest):
                raise RuntimeError("a state began before the one before it had ended")
            yield chunk
            self._arriving.acknowledged()
            self._answer("ack")

    def _finished(self, begin: _SaveRequest, path: Path, seconds: float, *, read: bool) -> None:
        job = self._training.job
        size = sum(file.stat().st_size for file in path.iterdir())
        self.newest, self.unsaved = path, None
        self._recording.event(
            "checkpoint_saved",
            path=str(path.relative_to(self._recording.path)),
            step=begin.meta.step,
            bytes=size,
            seconds=seconds,
            stall_seconds=begin.stall_seconds,
            taken_from="memory" if read else "messages",
        )
        best_by = self._training.model.objective.info(job.keep_best) if job.keep_best else None
        try:
            prune(self._recording.path, job.keep, best_by, job.keep_best_count)
        except OSError as error:
            cause = error.strerror or str(error)
            self._recording.progress.message(f"older checkpoints were not removed ({cause}); the run continues")
            self._recording.event("checkpoints_not_removed", cause=cause, errno=error.errno)

    def _failed(self, step: int, error: OSError) -> None:  # ends the run only if this is the last save
        cause = error.strerror or str(error)
        self.newest, self.unsaved = None, f"after step {step:,} ({cause})"
        self._recording.progress.message(f"the checkpoint after step {step:,} was not saved ({cause}); the run continues")
        self._recording.event("checkpoint_failed", step=step, cause=cause, errno=error.errno)

    def _room_for(self, size: int, step: int) -> None:
        with self._changed:  # `ending` either finds this state refused, or lets it use the reserve
            reserve = 0 if step == self._last_step else FREE_SPACE_RESERVE_BYTES
            free = shutil.disk_usage(self._recording.path).free
            if free >= size + reserve:
                return
            self._refused_step = step if free >= size else None
        reserved = f", and {reserve:,} are kept in reserve for the run's other records" if reserve else ""
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free:,} bytes are free, {size:,} are needed{reserved}")
