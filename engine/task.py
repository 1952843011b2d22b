"""Entry point of a task, which executes the training loop's commands."""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn

from ..backends.base import Server, Session, State, StepResult
from ..backends.compiling import Timing, decide_by
from ..backends.loading import install_hint, load_backend
from ..checkpoint import data_info
from ..core.cluster import Cluster, Task
from ..core.errors import MissingPackageError, RunFailedError
from ..core.job import Job
from ..core.liveness import add_phase_listener, startup_deadline, startup_phase, write_stacks_on_signal
from ..core.process import die_with_parent, ignore_interrupts
from ..data.base import Dataset
from ..data.store.stored_dataset import open_dataset, placeholder_text
from ..models.build import build_model
from .protocol import task_messages as messages
from .protocol.messages import INTERVAL_SECONDS, MessageParser, Stream, WireMessage
from .protocol.node_messages import Error, Open, Phase, PlacedTask, Prepare, ToTask
from .protocol.state_transfer import LoadBegin, LoadPart, StateAnswer, StateReceiver, StateSender
from .worker_watch import caused_by_peer_loss

PROFILE_VARIABLE = "TRAINER_PROFILE_DIR"  # names the folder for the traces of ``--profile``


_MESSAGES: MessageParser[WireMessage] = MessageParser(Prepare, ToTask)


def placed_task(task: Task, cluster: str | None = None) -> PlacedTask:
    """Return a task as a part of messages.

    `cluster` is its cluster's JSON, if prepared for all tasks.
    """
    return PlacedTask(task.name, cluster or json.dumps(task.cluster.to_json()), task.threads, task.local_index)


def task_from_message(message: PlacedTask) -> Task:
    """Return the task of a message."""
    cluster = Cluster.from_json(json.loads(message.cluster))
    placed = next(placed for placed in cluster.tasks if placed.name == message.task)
    return Task(placed, cluster, message.threads, message.local_index)


class Inbox:
    """Inbox of a task; its thread also assembles incoming states and handles acknowledgements."""

    def __init__(self, stream: Stream, states: StateSender) -> None:
        self._stream = stream
        self._states = states
        self._arriving: StateReceiver | None = None
        self._queue: queue.SimpleQueue[WireMessage] = queue.SimpleQueue()
        self.closing = threading.Event()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = _received(self._stream)
            except OSError:
                os._exit(70)
            if isinstance(message, StateAnswer):
                self._states.answer(message.answer)
            elif isinstance(message, LoadBegin):
                self._arriving = StateReceiver(message)
            elif isinstance(message, LoadPart) and self._arriving is not None:
                self._arriving.add(message)
            else:
                if isinstance(message, messages.Close):
                    self._states.abandon()
                    self.closing.set()
                self._queue.put(message)

    def next(self) -> WireMessage:
        """Wait for the next command."""
        return self._queue.get()

    def arrived(self) -> State | None:
        """Return the state received in chunks before ``load``, once; None if none came."""
        arriving, self._arriving = self._arriving, None
        return None if arriving is None else arriving.state()


@dataclass
class CommandLoop:
    """Execution of commands on a leading task's session; one task `reports` for all."""

    session: Session
    stream: Stream
    commands: Inbox
    states: StateSender
    reports: bool
    _outgoing: State | None = None
    _trained_seconds: float = 0.0

    def run(self) -> None:
        """Execute commands until ``close``.

        Answer others with ``done`` and their seconds, then with any state.
        """
        while True:
            command = self.commands.next()
            begin = time.perf_counter()
            if isinstance(command, messages.Close):
                self.session.close()
                return
            if not isinstance(command, messages.Command):
                raise ValueError(f"unknown command {command.kind!r}")
            drained = self._execute(command)
            seconds = time.perf_counter() - begin
            self.stream.send(messages.Done(command.sequence, command.kind, seconds, drained))
            if self._outgoing is not None:
                self.states.send(self._outgoing, command.sequence)
                self._outgoing = None

    def _execute(self, command: messages.Command) -> float:
        """Execute a command; return the seconds of draining, which count as training."""
        if isinstance(command, messages.Train):
            self._report(self.session.train(command.plan()))
            return 0.0
        begin = time.perf_counter()
        self._report(self.session.drain())
        drained = time.perf_counter() - begin
        if not isinstance(command, messages.Drain):
            self._WHILE_QUIESCENT[type(command)](self, command)
        return drained

    def _evaluate(self, command: messages.Evaluate) -> None:
        result = self.session.evaluate(command.split)
        if self.reports:
            self.stream.send(messages.Evaluated.from_result(result, command.sequence))

    def _copy_state(self, command: messages.SendState) -> None:
        self.states.wait()  # the session's copy may still be in transfer
        state = self.session.state()
        if self.reports:
            self._outgoing = state

    def _load(self, command: messages.Load) -> None:
        self.session.load(self.commands.arrived() if self.reports else None)

    def _predict(self, command: messages.Predict) -> None:
        logits_bk = self.session.predict(command.split, command.start, command.stop)
        self.stream.send(messages.Predicted(command.start, arrays={"logits": logits_bk}))

    def _decode(self, command: messages.Decode) -> None:
        self.states.wait()  # decoding may use the session's copy
        began = last_report = time.perf_counter()

        def report_alive() -> None:
            nonlocal last_report
            if time.perf_counter() - last_report >= INTERVAL_SECONDS:
                self.stream.send(messages.Decoded.heartbeat(command.start))
                last_report = time.perf_counter()

        scored = self.session.translating().scored(command.split, command.start, command.stop, command.decoding, report_alive)
        seconds = time.perf_counter() - began
        self.stream.send(messages.Decoded(command.start, dict(scored.sums), scored.without_numbers, seconds, complete=True))

    def _translate(self, command: messages.Translate) -> None:
        hypotheses = self.session.translating().translate(command.sources(), command.decoding, command.n_best)
        self.stream.send(messages.Translated.from_hypotheses(hypotheses, command.sequence))

    def _calibrate(self, command: messages.Calibrate) -> None:
        for calibrated in self.session.calibrate(command.order):
            self.stream.send(messages.Calibrated(calibrated))

    _WHILE_QUIESCENT: ClassVar[Mapping[type, Callable[..., None]]] = {
        messages.Evaluate: _evaluate,
        messages.SendState: _copy_state,
        messages.Load: _load,
        messages.Predict: _predict,
        messages.Decode: _decode,
        messages.Translate: _translate,
        messages.Calibrate: _calibrate,
    }

    def _report(self, results: Iterable[StepResult]) -> None:
        """Send results; a profiled one with the training seconds since the last one."""
        since = time.perf_counter() - self._trained_seconds
        for result in results:
            now = time.perf_counter()
            if self.reports:
                self.stream.send(messages.Steps.from_result(replace(result, profiled_seconds=now - since) if result.profiled else result))
            since = now
        self._trained_seconds = time.perf_counter() - since


def import_framework(job: Job, deadline: float, report: Callable[[str], None]) -> None:
    """Import the job's framework, or end the process at `deadline`. Raises MissingPackageError.

    Without garbage collection, which takes a seventh of importing torch.
    """
    backend = load_backend(job.backend)
    startup_phase(f"importing what {job.backend} needs")
    gc.disable()
    try:
        with startup_deadline(deadline, report):
            backend.preload(job)
    except (ImportError, OSError) as error:  # OSError: a shared library fails to load
        what = f"backend {job.backend!r} cannot import what it needs: {type(error).__name__}: {error}"
        raise MissingPackageError(f"{what}. {install_hint(job.backend)}") from error
    finally:
        gc.freeze()
        gc.enable()


def take_log(opened: Open) -> None:
    """Redirect the output of a standby process to the task's log."""
    if opened.log is None or opened.early_log is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    early = Path(os.fsdecode(opened.early_log))
    with open(opened.log, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        log.write(early.read_bytes())
    early.unlink()


def serve(stream: Stream, opened: Open) -> None:
    """Open the backend and execute commands until ``close``."""
    states = StateSender(stream)
    commands = Inbox(stream, states)
    if opened.profile_folder is not None:
        os.environ[PROFILE_VARIABLE] = os.fsdecode(opened.profile_folder)
    job = Job.model_validate(json.loads(opened.job))
    task = task_from_message(opened.task)
    add_phase_listener(lambda name: stream.send(Phase(name)))
    decide_by(partial(_request_compile_decision, stream, commands))
    with startup_deadline(opened.start_deadline, partial(_report_stuck, stream)):
        session = open_session(task, job, opened)
    if job.max_restarts and load_backend(job.backend).capabilities.rejoins and task.placed.leading:
        session.on_stalled_worker = lambda worker: stream.send(messages.WorkerStalled(worker))  # type: ignore[union-attr]
    stream.send(messages.Ready(getattr(session, "precision_used", None), getattr(session, "device_used", None)))
    if task.placed.leading:
        first = next(placed for placed in task.cluster.tasks if placed.leading)
        CommandLoop(session, stream, commands, states, reports=task.placed == first).run()  # type: ignore[arg-type]
    else:
        session.serve(commands.closing)  # type: ignore[union-attr]


def _request_compile_decision(stream: Stream, commands: Inbox, timing: Timing, tasks: int) -> bool:
    """Send this task's timings; return the driver's decision from all timings."""
    startup_phase("awaiting whether to compile", for_others=True)
    stream.send(messages.CompileTimed(timing.plain_seconds, timing.compiled_seconds, timing.reason, tasks))
    answer = commands.next()
    if not isinstance(answer, messages.Compile):
        raise RunFailedError(f"the driver answered {answer.kind!r} to the question whether to compile")
    return answer.compile


def open_session(task: Task, job: Job, opened: Open) -> Session | Server:
    """Open dataset and model; join the cluster and warm up."""
    startup_phase("opening the dataset and the model")
    data = _open_data(job, opened)
    model = build_model(job.model, data.info, job.loss)
    startup_phase("joining the cluster", for_others=True)
    return load_backend(job.backend).open(task, job, model, data)


def _open_data(job: Job, opened: Open) -> Dataset:
    if opened.placeholder is not None:
        return placeholder_text(data_info(opened.placeholder))
    data = open_dataset(job.data, job.data_dir)
    return data if opened.normalisation is None else data.normalised_as(*opened.normalisation)


def main(arguments: list[str] | None = None) -> None:
    """Run one task to its end."""
    parser = argparse.ArgumentParser(prog="crosstrain.engine.task")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--stacks", type=int, help="the descriptor of a file for the stacks, which the agent asks for")
    options = parser.parse_args(arguments)
    run_task(socket.socket(fileno=options.fd), options.parent, options.stacks)


def run_task(connection: socket.socket, parent_pid: int, stacks: int | None) -> NoReturn:
    """Run a task whose agent is the peer of `connection`.

    It leaves with os._exit, as exit handlers may wait for lost peers.
    """
    ignore_interrupts()
    die_with_parent(parent_pid)
    _allow_open_files()
    if stacks is not None:
        write_stacks_on_signal(stacks)
    stream = Stream(connection.makefile("rb"), connection.makefile("wb"))
    code = 0
    try:
        opened = _await_opening(stream)
        serve(stream, opened)
    except BaseException as error:  # noqa: BLE001 — whatever killed the task is reported
        code = 1
        traceback.print_exc()
        _report_error(stream, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _allow_open_files() -> None:
    """Raise the limit of open files, at which a listening framework aborts."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # the kernel's limit may be smaller
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _await_opening(stream: Stream) -> Open:
    """Import the framework and return ``open``.

    A ``prepare`` before it starts the import earlier.
    """
    message = _received(stream)
    assert isinstance(message, Prepare | Open)
    job = Job.model_validate(json.loads(message.job))
    import_framework(job, time.monotonic() + job.start_timeout, partial(_report_stuck, stream))
    if isinstance(message, Prepare):
        message = _received(stream)
        assert isinstance(message, Open)
        take_log(message)
    return message


def _received(stream: Stream) -> WireMessage:
    message = stream.receive()
    if message is None:
        os._exit(70)
    return _MESSAGES.parse(message)


def _report_stuck(stream: Stream, message: str) -> None:
    _report_error(stream, RunFailedError(message))


def _report_error(stream: Stream, error: BaseException) -> None:
    try:
        stream.send(Error.from_exception(error, peer_lost=caused_by_peer_loss(error)))
    except OSError:
        traceback.print_exc()


if __name__ == "__main__":
    main()
