"""Records a run: puts every record onto the run clock, writes it into the run directory, and shows it to the user and to loggers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ...core.errors import DiskError, RunFailedError, writing
from ...core.job import Job
from ...core.untrusted.path_names import UnsafeNameError, inside
from ...engine.progress.base import Progress
from ...records.loggers.base import RunLogger, replay
from ...records.loggers.mllog import MLLogWriter, Sizes
from ...records.loggers.tensorboard import TensorBoardWriter
from ...records.schema import EvalRecord, EventRecord, StepRecord, SystemRecord, TaskSample
from ...records.store.run_directory import RunReader, RunState, RunWriter
from ...records.store.sample_thinning import SampleThinner
from ..stacks.places import STACKS, TaskStack, append_stacks

__all__ = ["PROFILE", "Recording"]

PROFILE = "profile"
"""The folder of a run directory that holds the traces of ``--profile``."""

CHECK_SECONDS = 2.0
"""How often is looked whether the run directory is still there."""

_URGENT_EVENTS = ("mlflow_lost", "mlflow_incomplete")
"""Events about followers that a person should read at once."""

_DRIVER_FIELDS = ("tasks", "time_seconds", "part_began_seconds", "trainer_cpu_seconds", "samples", "merged")
"""Fields of a sample that are not taken as its agent sent them."""


class Recording:
    """A run's records and its clock. `began` is when the command started, in seconds of the machine's clock.

    What happens before the run clock starts is held back until then, because its time on that clock is not known earlier. `resumed` is
    the directory of a run that goes on.

    What the disk refuses ends the run: it raises DiskError in whoever made it, and so does every record after it, none of which is kept.
    `refused` is that error. `violation` is what a node did while the run was ending that makes it fail nevertheless.
    """

    def __init__(self, job: Job, progress: Progress, resumed: Path | None = None) -> None:
        self.job = job
        self.writer = RunWriter.create(job) if resumed is None else RunWriter.reopen(resumed)
        self.progress = progress
        self.began = psutil.Process().create_time()
        self.init_seconds = 0.0
        self.refused: DiskError | None = None
        self.violation: RunFailedError | None = None
        self._tasks: dict[str, int] = {}
        self._own_node: int | None = 0
        self._ending = False
        self._next_check = 0.0
        self._zero: float | None = None
        self._stopped_at: float | None = None
        self._part_began_seconds = 0.0
        self._thinner = SampleThinner()
        self._pending: list[Callable[[], None]] = []
        self._early_lock = threading.RLock()
        self._followers: list[RunLogger] = []
        self._following = False

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.writer.path

    # The clock ------------------------------------------------------------------------------------------------------

    def start_clock(self, run_seconds: float = 0.0) -> None:
        """Start the run clock, at `run_seconds`, and write what was held back; a second call does nothing."""
        with self._early_lock:
            if self._zero is None:
                self.init_seconds = time.time() - self.began
                self.flush_pending(run_seconds)

    def flush_pending(self, run_seconds: float) -> None:
        """Write what was held back, with `run_seconds` as the time on a run clock that has not been started; else there is nothing."""
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
        """A part of the run on other nodes begins at `run_seconds`: later samples are of it. The clock itself goes on."""
        self.write_waiting_samples()
        self._part_began_seconds = run_seconds

    def stop_clock(self) -> None:
        """The time until here is that of the run, `run_seconds`; a second call does nothing. What is recorded later has a later time."""
        if self._stopped_at is None:
            self._stopped_at = self.clock()
            self._thinner.want_each()

    @property
    def run_seconds(self) -> float:
        """What the run took, in seconds on its clock: until that was stopped, or until now."""
        return self.clock() if self._stopped_at is None else self._stopped_at

    def clock(self) -> float:
        """Return seconds on the run clock. Raises RuntimeError where it has not been started."""
        return self._since_zero(time.monotonic())

    def _since_zero(self, moment: float) -> float:
        if self._zero is None:
            raise RuntimeError("the run clock has not been started")
        return moment - self._zero

    def _timestamped(self, write: Callable[[float], None]) -> None:
        """Write a record stamped with this moment: now, or as soon as the run clock starts."""
        self._timestamped_at(time.monotonic(), write)

    def _timestamped_at(self, moment: float, write: Callable[[float], None]) -> None:
        with self._early_lock:
            if self._zero is None:
                self._pending.append(lambda: write(self._since_zero(moment)))
                return
        write(self._since_zero(moment))

    # Followers ------------------------------------------------------------------------------------------------------

    def load_followers(self) -> None:
        """Load what the job asks for, and no more: what cannot be told is known then before anything of a run that goes on is changed.

        Raises UsageError.
        """
        if self.job.mlflow is not None:
            from ...records.loggers.mlflow import load_mlflow

            load_mlflow(self.job.mlflow)

    def rewind(self, step: int, run_seconds: float) -> None:
        """Take the records back to a checkpoint of `step` updates; of events and samples those up to `run_seconds` stay.

        Who has heard the others hears that this attempt has failed; add followers anew. Call while nothing is written. Raises DiskError.
        """
        self.write_waiting_samples()
        followers, self._followers, self._following = self._followers, [], False
        for follower in followers:
            follower.on_end("failed", None)
            follower.close()
        self.writer.cut(step, run_seconds)

    def add_followers(self, command: Sequence[str], run_seconds: float | None = None) -> None:
        """Tell TensorBoard and MLflow too, as the job asks. Loading them takes a while: call it while the tasks load theirs.

        Where a run goes on, `run_seconds` is the run clock at its checkpoint; call after the records were cut, and what stays is told
        first. `command` is what the user typed. A second call does nothing.
        """
        if self._following:
            return
        self._following = True
        zero = None if run_seconds is None else time.time() - run_seconds
        added: list[RunLogger] = []
        if self.job.tensorboard:
            with writing(self.path):
                added.append(TensorBoardWriter(self.path, self.job, zero, RunReader(self.path).metrics()))
        if self.job.mlflow is not None:
            from ...records.loggers.mlflow import MLflowWriter

            added.append(MLflowWriter(self.path, self.job, command, self.began, self._on_logger_event, zero))
        if zero is not None:
            for follower in added:
                replay(RunReader(self.path), follower)
        self._followers += added

    def _on_logger_event(self, event: str, **detail: Any) -> None:
        """Tell the user what a follower says of itself, where it is bad news, and record it. Called from a follower's thread, too."""
        if event in _URGENT_EVENTS:
            told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in detail.items() if value is not None)
            self.progress.message(f"{event.replace('_', ' ')}: {told}")
        with suppress(DiskError):  # which the next record of the run raises where it ends the run
            self.event(event, **detail)

    def add_mllog(self, job: Job, sizes: Sizes, run_seconds: float | None = None) -> None:
        """Write MLPerf's event log too, from now on; `sizes` are the examples of the splits.

        Where a run goes on, `run_seconds` is the run clock at its checkpoint; call after the cut, and what stays is told first.
        """
        zero = None if run_seconds is None else time.time() - run_seconds
        began = self.began if zero is None else zero - (time.time() - self.began)
        with writing(self.path):
            mllog = MLLogWriter(self.path, job, sizes, began, zero)
        if zero is not None:
            mllog.replay(RunReader(self.path))
        self._followers.append(mllog)

    def step(self, record: StepRecord) -> None:
        """Record a group of updates."""
        self._append(lambda to: to.step(record))

    def evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation."""
        self._append(lambda to: to.evaluation(record))

    def event(self, event: str, **detail: Any) -> None:
        """Record that something happened just now."""

        def write(now: float) -> None:
            record = EventRecord(event, now, detail)
            self._append(lambda to: to.event(record))

        self._timestamped(write)

    def sample(self, fields: Mapping[str, Any]) -> None:
        """Take a node's resources, as its agent sent them. Where very many come in, a line stands for several (`SampleThinner`)."""
        own = {key: value for key, value in fields.items() if key not in _DRIVER_FIELDS}
        tasks = tuple(TaskSample(**task) for task in fields["tasks"])
        agent = fields["trainer_cpu_seconds"]
        used = agent + time.process_time() if agent is not None and fields["node"] == self._own_node else agent
        record = SystemRecord(**own, time_seconds=time.monotonic(), tasks=tasks, trainer_cpu_seconds=used)
        before = self._thinner.samples_per_line
        lines = self._thinner.add(record)
        if self._thinner.samples_per_line != before:
            self.event("samples_thinned", samples_per_line=self._thinner.samples_per_line, nodes=self._thinner.nodes)
        for line in lines:
            self._write_sample(line)
        if record not in lines and self._zero is not None:
            self._show(self._on_run_clock(record, self._since_zero(record.time_seconds)))

    def write_waiting_samples(self) -> None:
        """Write what stands for all samples that wait for others."""
        for line in self._thinner.flush():
            self._write_sample(line)

    def _write_sample(self, line: SystemRecord) -> None:
        """Write a line about a sample, whose time is still that of this machine's clock."""

        def write(now: float) -> None:
            record = self._on_run_clock(line, now)
            self._append(lambda to: to.system(record))
            self._thinner.wrote(self.writer.line_bytes)
            if line.samples == 1:
                self._show(record)

        self._timestamped_at(line.time_seconds, write)

    def _show(self, record: SystemRecord) -> None:
        """Tell who follows of a sample, unless the run clock has stopped: what nodes do then is no training."""
        if self._stopped_at is None:
            self.progress.node(record)

    def _on_run_clock(self, record: SystemRecord, now: float) -> SystemRecord:
        return replace(record, time_seconds=now, part_began_seconds=self._part_began_seconds)

    def _append(self, tell: Callable[[RunWriter | RunLogger], None]) -> None:
        """Write a record into the run directory, and tell the followers."""
        with self._disk_errors(self.path):
            if self.refused is not None:
                raise self.refused
            tell(self.writer)
            for follower in self._followers:
                tell(follower)

    def check(self, *, at_once: bool = False) -> None:
        """Raise DiskError where anything was refused, or the run directory can be written no more; looks every few seconds or `at_once`."""
        with self._disk_errors(self.path):
            if self.refused is not None:
                raise self.refused
            if at_once or time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + CHECK_SECONDS
                self.writer.check()

    @contextmanager
    def _disk_errors(self, path: Path) -> Iterator[None]:
        """Remember what the disk refuses within the block, and raise DiskError about it as long as the run is not ending anyway."""
        try:
            with writing(path):
                yield
        except DiskError as error:
            self.refused = self.refused or error
            if not self._ending:
                raise

    def expect(self, tasks: Mapping[str, int], own_node: int | None = 0) -> None:
        """Hear which tasks there are, by name, and on which node each is: no other's files are taken.

        `own_node` is the node whose samples count the driver's own CPU time, one on its machine.
        """
        self._tasks = dict(tasks)
        self._own_node = own_node

    def log(self, node: int, task: str, text: bytes) -> None:
        """Append to the log of a task whose node does not see our files; one under a name that is no task of the node is a `violation`."""
        with self._named(node, "log"):
            self._of_a_task(node, task)
            with self._disk_errors(self.path), _delete_if_incomplete(self.writer.log_path(node, task)) as path, path.open("ab") as file:
                file.write(text)

    def trace(self, node: int, path: str, data: bytes) -> None:
        """Append to a file of a task's trace; `path` is ``<task>/<file>`` on the node, and any other a `violation`."""
        with self._named(node, "trace"):
            self._of_a_task(node, path.partition("/")[0] if isinstance(path, str) else path)
            target = inside(self.path / PROFILE / str(node), path)
            if self.refused is not None:
                return  # part of a trace is of no use to anybody
            with self._disk_errors(target):
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _delete_if_incomplete(target), target.open("ab") as file:
                    file.write(data)

    def stacks(self, occasion: str, stacks: Mapping[str, TaskStack]) -> None:
        """Keep where tasks stand: all of it in a file of the run directory, the innermost line of each in an event."""
        if not stacks:
            return
        with self._disk_errors(self.path / STACKS):
            append_stacks(self.path, occasion, stacks)
        self.event("stacks_found", tasks={task: stack.place or stack.problem for task, stack in stacks.items()})

    def _of_a_task(self, node: int, name: object) -> None:
        if not isinstance(name, str) or self._tasks.get(name) != node:
            raise UnsafeNameError(name)

    @contextmanager
    def _named(self, node: int, what: str) -> Iterator[None]:
        """Make a violation of a name that no such file of the node can have: told and recorded once, and the run fails of it."""
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
        """From now on what the disk refuses raises nothing, so that the run is ended in good order; see `refused`."""
        self._ending = True

    def ended(self, state: RunState, summary: Mapping[str, Any] | None) -> None:
        """Tell the followers how the run ended; `summary` is None where it never trained. Raises DiskError, once all are told."""
        with writing(self.path), ExitStack() as telling:
            for follower in reversed(self._followers):
                telling.callback(follower.on_end, state, summary)  # the last one is called first

    def close(self) -> None:
        """Flush and close everything, the display included. Raises DiskError, once all is closed."""
        with writing(self.path), ExitStack() as closing:
            for close in (self.progress.close, self.writer.close, *(follower.close for follower in reversed(self._followers))):
                closing.callback(close)  # the last one is called first


@contextmanager
def _delete_if_incomplete(path: Path) -> Iterator[Path]:
    """Remove the file where the disk refuses part of it, so that there is room for what tells how the run ended."""
    try:
        yield path
    except OSError:
        path.unlink(missing_ok=True)
        raise
