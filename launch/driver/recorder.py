"""Recording of a run on its clock, for the run directory, the display and the loggers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.console import UnsafeNameError, inside
from ...core.errors import DiskError, RunFailedError, writing
from ...core.job import Job
from ...core.process import process_age_seconds
from ...engine.progress import Progress
from ...records.loggers.base import RunLogger, replay
from ...records.loggers.mllog import MLLogWriter, Sizes
from ...records.loggers.tensorboard import TensorBoardWriter
from ...records.store.run_directory import RunReader, RunState, RunWriter
from ...records.store.sample_thinning import SampleThinner
from ...records.store.schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from ..node.stacks import STACKS, TaskStack, append_stacks

PROFILE = "profile"  # folder of a run directory with the traces of ``--profile``
CHECK_SECONDS = 2.0  # between checks that the run directory still exists
_URGENT_EVENTS = ("mlflow_lost", "mlflow_incomplete")  # loggers' events for the user


class RunRecorder:
    """A run's records, which wait for the start of the run clock; `resumed` is a run directory."""

    def __init__(self, job: Job, progress: Progress, resumed: Path | None = None) -> None:
        self.job = job
        self.writer = RunWriter.create(job) if resumed is None else RunWriter.reopen(resumed)
        self.progress = progress
        self.began = time.time() - process_age_seconds()  # of the command
        self.init_seconds = 0.0
        self.refused: DiskError | None = None  # raised by the record that failed and by every later one
        self.violation: RunFailedError | None = None  # of a node during the shutdown; fails the run
        self._tasks: dict[str, int] = {}
        self._driver_node: int | None = 0
        self._ending = False
        self._next_check = 0.0
        self._zero: float | None = None
        self._stopped_at: float | None = None
        self._part_began_seconds = 0.0
        self._thinner = SampleThinner()
        self._pending: list[Callable[[], None]] = []
        self._early_lock = threading.RLock()
        self._loggers: list[RunLogger] = []
        self._has_loggers = False

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.writer.path

    def start_clock(self, run_seconds: float = 0.0) -> None:
        """Start the run clock at `run_seconds`, and write the waiting records; idempotent."""
        with self._early_lock:
            if self._zero is None:
                self.init_seconds = time.time() - self.began
                self.flush_pending(run_seconds)

    def flush_pending(self, run_seconds: float) -> None:
        """Write the waiting records as if the run clock started at `run_seconds`, unless it has."""
        with self._early_lock:
            if self._zero is not None:
                return
            self.write_waiting_samples()
            self._zero = time.monotonic() - run_seconds
            self._part_began_seconds = run_seconds
            for write in self._pending:
                write()
            self._pending.clear()

    def begin_segment(self, run_seconds: float) -> None:
        """Assign later samples to a segment from `run_seconds`; the clock continues."""
        self.write_waiting_samples()
        self._part_began_seconds = run_seconds

    def stop_clock(self) -> None:
        """Stop `run_seconds`, but not later records' times; idempotent."""
        if self._stopped_at is None:
            self._stopped_at = self.clock()
            self._thinner.want_each()

    @property
    def run_seconds(self) -> float:
        """Seconds of the run on its clock, until its stop or now."""
        return self.clock() if self._stopped_at is None else self._stopped_at

    def clock(self) -> float:
        """Return seconds on the run clock. Raises RuntimeError if it has not been started."""
        return self._since_zero(time.monotonic())

    def _since_zero(self, moment: float) -> float:
        if self._zero is None:
            raise RuntimeError("the run clock has not been started")
        return moment - self._zero

    def _timestamped_at(self, moment: float, write: Callable[[float], None]) -> None:
        with self._early_lock:
            if self._zero is None:
                self._pending.append(lambda: write(self._since_zero(moment)))
                return
        write(self._since_zero(moment))

    def load_loggers(self) -> None:
        """Import the job's loggers. Raises UsageError before a resumed run is changed."""
        if self.job.mlflow is not None:
            from ...records.loggers.mlflow import load_mlflow

            load_mlflow(self.job.mlflow)

    def rewind(self, step: int, run_seconds: float) -> None:
        """Cut the records back to `step`, events and samples to `run_seconds`. Raises DiskError.

        The loggers' runs end as failed; add new ones. Call while nothing is written.
        """
        self.write_waiting_samples()
        loggers, self._loggers, self._has_loggers = self._loggers, [], False
        for logger in loggers:
            logger.on_end("failed", None)
            logger.close()
        self.writer.cut(step, run_seconds)

    def add_loggers(self, command: Sequence[str], run_seconds: float | None = None) -> None:
        """Add the job's TensorBoard and MLflow loggers, which are slow to import; idempotent.

        In a resumed run `run_seconds` is the run clock at the checkpoint; call after the records were cut, which are replayed first.
        """
        if self._has_loggers:
            return
        self._has_loggers = True
        zero = None if run_seconds is None else time.time() - run_seconds
        added: list[RunLogger] = []
        if self.job.tensorboard:
            with writing(self.path):
                added.append(TensorBoardWriter(self.path, self.job, zero, RunReader(self.path).metrics()))
        if self.job.mlflow is not None:
            from ...records.loggers.mlflow import MLflowWriter

            added.append(MLflowWriter(self.path, self.job, command, self.began, self._on_logger_event, zero))
        if zero is not None:
            for logger in added:
                replay(RunReader(self.path), logger)
        self._loggers += added

    def _on_logger_event(self, event: str, **detail: Any) -> None:
        if event in _URGENT_EVENTS:
            details = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in detail.items() if value is not None)
            self.progress.message(f"{event.replace('_', ' ')}: {details}")
        with suppress(DiskError):  # raised again by the next record
            self.event(event, **detail)

    def add_mllog(self, sizes: Sizes, run_seconds: float | None = None) -> None:
        """Also write MLPerf's event log; `sizes` are the examples of the splits."""
        zero = None if run_seconds is None else time.time() - run_seconds
        began = self.began if zero is None else zero - (time.time() - self.began)
        with writing(self.path):
            mllog = MLLogWriter(self.path, self.job, sizes, began, zero)
        if zero is not None:
            mllog.replay(RunReader(self.path))
        self._loggers.append(mllog)

    def step(self, record: StepRecord) -> None:
        """Record a group of updates."""
        self._append(lambda to: to.step(record))

    def evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        self._append(lambda to: to.evaluation(record))

    def event(self, event: str, **detail: Any) -> None:
        """Record an event with the present time."""

        def write(now: float) -> None:
            record = EventRecord(event, now, detail)
            self._append(lambda to: to.event(record))

        self._timestamped_at(time.monotonic(), write)

    def sample(self, sampled: SystemRecord) -> None:
        """Record an agent's sample of its node; of many, several share a line."""
        used = sampled.trainer_cpu_seconds
        if used is not None and sampled.node == self._driver_node:
            used += time.process_time()
        now = time.monotonic()  # the clock and the merging are the driver's, whatever a sample reports
        record = replace(sampled, trainer_cpu_seconds=used, time_seconds=now, part_began_seconds=None, samples=1, merged=None)
        before = self._thinner.samples_per_line
        lines = self._thinner.add(record)
        if self._thinner.samples_per_line != before:
            self.event("samples_thinned", samples_per_line=self._thinner.samples_per_line, nodes=self._thinner.nodes)
        for line in lines:
            self._write_sample(line)
        if record not in lines and self._zero is not None:
            self._show(self._on_run_clock(record, self._since_zero(record.time_seconds)))

    def write_waiting_samples(self) -> None:
        """Write the samples that wait to be merged."""
        for line in self._thinner.flush():
            self._write_sample(line)

    def _write_sample(self, line: SystemRecord) -> None:
        def write(now: float) -> None:
            record = self._on_run_clock(line, now)
            self._append(lambda to: to.system(record))
            self._thinner.wrote(self.writer.line_bytes)
            if line.samples == 1:
                self._show(record)

        self._timestamped_at(line.time_seconds, write)

    def _show(self, record: SystemRecord) -> None:
        if self._stopped_at is None:
            self.progress.node(record)

    def _on_run_clock(self, record: SystemRecord, now: float) -> SystemRecord:
        return replace(record, time_seconds=now, part_began_seconds=self._part_began_seconds)

    def _append(self, write: Callable[[RunWriter | RunLogger], None]) -> None:
        with self._disk_errors(self.path):
            if self.refused is not None:
                raise self.refused
            write(self.writer)
            for logger in self._loggers:
                write(logger)

    def check(self, *, immediately: bool = False) -> None:
        """Raise DiskError if a write failed or, at intervals, the directory is not writable."""
        with self._disk_errors(self.path):
            if self.refused is not None:
                raise self.refused
            if immediately or time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + CHECK_SECONDS
                self.writer.check()

    @contextmanager
    def _disk_errors(self, path: Path) -> Iterator[None]:
        """Keep the first disk error, and raise it as DiskError unless the run is ending."""
        try:
            with writing(path):
                yield
        except DiskError as error:
            self.refused = self.refused or error
            if not self._ending:
                raise

    def expect(self, tasks: Mapping[str, int], driver_node: int | None = 0) -> None:
        """Set each task's node, and the node whose samples include the driver's CPU time."""
        self._tasks = dict(tasks)
        self._driver_node = driver_node

    def log(self, node: int, task: str, text: bytes) -> None:
        """Append to a task's log from a node without shared files; a wrong name is a `violation`."""
        with self._checked_name(node, "log"):
            self._check_task(node, task)
            with self._disk_errors(self.path), _delete_if_incomplete(self.writer.log_path(node, task)) as path, path.open("ab") as file:
                file.write(text)

    def trace(self, node: int, path: str, data: bytes) -> None:
        """Append to a trace; a `path` other than ``<task>/<file>`` is a `violation`."""
        with self._checked_name(node, "trace"):
            self._check_task(node, path.partition("/")[0] if isinstance(path, str) else path)
            target = inside(self.path / PROFILE / str(node), path)
            if self.refused is not None:
                return  # a partial trace is useless
            with self._disk_errors(target):
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _delete_if_incomplete(target), target.open("ab") as file:
                    file.write(data)

    def stacks(self, occasion: str, stacks: Mapping[str, TaskStack]) -> None:
        """Write tasks' stacks to a file, and the innermost line of each to an event."""
        if not stacks:
            return
        with self._disk_errors(self.path / STACKS):
            append_stacks(self.path, occasion, stacks)
        self.event("stacks_found", tasks={task: stack.place or stack.problem for task, stack in stacks.items()})

    def _check_task(self, node: int, name: object) -> None:
        if not isinstance(name, str) or self._tasks.get(name) != node:
            raise UnsafeNameError(name)

    @contextmanager
    def _checked_name(self, node: int, what: str) -> Iterator[None]:
        try:
            yield
        except UnsafeNameError as error:
            violation = RunFailedError(
                f"node {node} sent a {what} called {error}, which is no file of a task of its: that node is broken, or hostile; "
                "nothing of it was written",
                f"agent-{node}",
            )
            if not self._ending:
                raise violation from error
            if self.violation is None:
                self.violation = violation
                self.event("name_refused", node=node, what=what, name=str(error))
                self.progress.message(str(violation))

    def ending(self) -> None:
        """From now on keep disk errors as `refused` without raising, to complete the shutdown."""
        self._ending = True

    def ended(self, state: RunState, summary: Mapping[str, Any] | None) -> None:
        """Pass the end of the run to all loggers, then raise any DiskError."""
        with writing(self.path), ExitStack() as calls:
            for logger in reversed(self._loggers):
                calls.callback(logger.on_end, state, summary)  # the last one is called first

    def close(self) -> None:
        """Close everything, including the display. Raises DiskError after all is closed."""
        with writing(self.path), ExitStack() as calls:
            for close in (self.progress.close, self.writer.close, *(logger.close for logger in reversed(self._loggers))):
                calls.callback(close)  # the last one is called first


@contextmanager
def _delete_if_incomplete(path: Path) -> Iterator[Path]:
    """Remove an incomplete file, to leave room for the run's status."""
    try:
        yield path
    except OSError:
        path.unlink(missing_ok=True)
        raise
