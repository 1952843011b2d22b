"""A task's entry point: joins the cluster through its backend and executes the training loop's commands.

Started by the agent as ``python -m crosstrain.engine.task --fd N``; descriptor N is one end of a socket pair to the agent. Standard output
and error are the task's log. The process ends with its agent: at the end of the stream, and by the parent-death signal.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..backends.base import Server, Session, State, StepResult
from ..backends.compiling.choice import Timing, decide_by
from ..backends.loading import install_hint, load_backend
from ..checkpoint import data_info
from ..core.cluster import Cluster, Task, TaskSpec
from ..core.errors import MissingPackageError, RunFailedError
from ..core.job import Job
from ..core.liveness.stack_dump import write_stacks_on_signal
from ..core.liveness.startup_watchdog import add_phase_listener, startup_deadline, startup_phase
from ..core.process import die_with_parent, ignore_interrupts
from ..data.base import Dataset
from ..data.placeholder import PlaceholderText
from ..data.store.stored_dataset import open_dataset
from ..models.build import build_model
from .peer_loss import caused_by_peer_loss
from .protocol.codec import (
    calibrated_to_message,
    calibration_from_message,
    eval_to_message,
    plan_from_message,
    state_from_message,
    steps_to_message,
)
from .protocol.error_report import error_message
from .protocol.heartbeat import INTERVAL_SECONDS
from .protocol.messages import Message, PreparedJson, Stream
from .protocol.state_transfer import StateReceiver, StateSender
from .protocol.translation_messages import decoded_message, decoding_of, sources_of, still_decoding_message, translated_message

__all__ = ["PROFILE_VARIABLE", "import_framework", "main", "run_task", "task_from_message", "task_to_fields"]

PROFILE_VARIABLE = "TRAINER_PROFILE_DIR"
"""Tells a backend in which folder to leave the traces of ``--profile``; set where traces are asked for."""


def task_to_fields(task: Task, cluster: PreparedJson | None = None) -> dict[str, Any]:
    """Encode a task for the ``open`` message; `cluster` is what its own is in JSON, where that is prepared for all tasks."""
    described = task.cluster.to_json() if cluster is None else cluster
    return {"task": task.name, "cluster": described, "threads": task.threads, "local_index": task.local_index}


def task_from_message(message: Message) -> Task:
    """Decode the task of an ``open`` message."""
    cluster = Cluster.from_json(message["cluster"])
    placed: TaskSpec = next(placed for placed in cluster.tasks if placed.name == message["task"])
    return Task(placed, cluster, message["threads"], message["local_index"])


class Inbox:
    """The task's inbox: a thread reads messages, so that the end of the stream is seen while the task computes.

    Chunks of a state are dealt with at once, in that thread: those that arrive are put together, those that leave are acknowledged.
    """

    def __init__(self, stream: Stream, states: StateSender) -> None:
        self._stream = stream
        self._states = states
        self._arriving: StateReceiver | None = None
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.closing = threading.Event()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._stream.receive()
            except OSError:
                message = None
            if message is None:
                os._exit(70)
            if message.kind.startswith("state_"):
                self._states.answer(message.kind)
            elif message.kind == "load_begin":
                self._arriving = StateReceiver(message)
            elif message.kind == "load_part" and self._arriving is not None:
                self._arriving.add(message)
            else:
                if message.kind == "close":
                    self._states.abandon()
                    self.closing.set()
                self._queue.put(message)

    def next(self) -> Message:
        """Wait for the next command."""
        return self._queue.get()

    def arrived(self) -> State | None:
        """Return the state that came in chunks before a command ``load``, or None where it came otherwise; it is forgotten here."""
        arriving, self._arriving = self._arriving, None
        return None if arriving is None else arriving.state()


class CommandLoop:
    """Executes commands on a leading task's session, one after another."""

    def __init__(self, session: Session, stream: Stream, commands: Inbox, states: StateSender, *, reports: bool) -> None:
        self._session = session
        self._stream = stream
        self._commands = commands
        self._states = states
        self._reports = reports
        self._leaving: State | None = None
        self._trained_seconds = 0.0

    def run(self) -> None:
        """Execute commands until ``close``; every other one is answered by ``done`` with the seconds that it took.

        A state follows its ``done``, while the next commands are executed.
        """
        while True:
            command = self._commands.next()
            begin = time.perf_counter()
            if command.kind == "close":
                self._session.close()
                return
            drained = self._execute(command)
            seconds = time.perf_counter() - begin
            self._stream.send(
                Message("done", {"sequence": command["sequence"], "command": command.kind, "seconds": seconds, "drain_seconds": drained})
            )
            if self._leaving is not None:
                self._states.send(self._leaving, command["sequence"])
                self._leaving = None

    def _execute(self, command: Message) -> float:
        """Execute one command; return the seconds spent on making the cluster quiescent, which is training time."""
        if command.kind == "train":
            self._report(self._session.train(plan_from_message(command)))
            return 0.0
        begin = time.perf_counter()
        self._report(self._session.drain())
        drained = time.perf_counter() - begin
        if command.kind == "evaluate":
            result = self._session.evaluate(command["split"])
            if self._reports:
                self._stream.send(eval_to_message(result, command["sequence"]))
        elif command.kind == "state":
            self._states.wait()  # the session's copy is still on its way otherwise
            state = self._session.state()
            if self._reports:
                self._leaving = state
        elif command.kind == "load":
            self._session.load(self._loaded(command) if self._reports else None)
        elif command.kind == "predict":
            logits_bk = self._session.predict(command["split"], command["start"], command["stop"])
            self._stream.send(Message("predicted", {"start": command["start"]}, {"logits": logits_bk}))
        elif command.kind == "decode":
            self._states.wait()  # a session may decode with its copy
            began = time.perf_counter()
            decoding, tell = decoding_of(command), self._telling(command)
            scored = self._session.translating().scored(command["split"], command["start"], command["stop"], decoding, tell)
            self._stream.send(decoded_message(command, scored.sums, scored.without_numbers, time.perf_counter() - began))
        elif command.kind == "translate":
            found = self._session.translating().translate(sources_of(command), decoding_of(command), command["n_best"])
            self._stream.send(translated_message(command, found))
        elif command.kind == "calibrate":
            for calibrated in self._session.calibrate(calibration_from_message(command)):
                self._stream.send(calibrated_to_message(calibrated))
        elif command.kind != "drain":
            raise ValueError(f"unknown command {command.kind!r}")
        return drained

    def _telling(self, order: Message) -> Callable[[], None]:
        """Return what is to be called again and again while an order to translate is carried out, and says once a second that it is."""
        told = time.monotonic()

        def tell() -> None:
            nonlocal told
            if time.monotonic() - told >= INTERVAL_SECONDS:
                self._stream.send(still_decoding_message(order))
                told = time.monotonic()

        return tell

    def _loaded(self, command: Message) -> State:
        arrived = self._commands.arrived()
        return state_from_message(command) if arrived is None else arrived

    def _report(self, results: Iterable[StepResult]) -> None:
        """Send the results; one that was profiled with the seconds in training since the one before, maybe in an earlier command."""
        since = time.perf_counter() - self._trained_seconds
        for result in results:
            now = time.perf_counter()
            if self._reports:
                self._stream.send(steps_to_message(replace(result, profiled_seconds=now - since) if result.profiled else result))
            since = now
        self._trained_seconds = time.perf_counter() - since


def import_framework(job: Job, deadline: float, report: Callable[[str], None]) -> None:
    """Import the job's framework; end the process where that has not ended by `deadline`, as `startup_deadline` does.

    The collector rests meanwhile, and leaves what was imported alone from then on: looking through a framework's objects again and again
    is a seventh of the time that importing torch takes. Raises MissingPackageError where it cannot be imported.
    """
    backend = load_backend(job.backend)
    startup_phase(f"importing what {job.backend} needs")
    gc.disable()
    try:
        with startup_deadline(deadline, report):
            backend.preload(job)
    except (ImportError, OSError) as error:  # the second: a shared library that cannot be loaded
        what = f"backend {job.backend!r} cannot import what it needs: {type(error).__name__}: {error}"
        raise MissingPackageError(f"{what}. {install_hint(job.backend)}") from error
    finally:
        gc.freeze()
        gc.enable()


def take_log(opened: Message) -> None:
    """Move this process's output to the task's log, with what it has written so far, where it was started before it was that task."""
    if opened.get("log") is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    early = Path(opened["early_log"])
    with open(opened["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        log.write(early.read_bytes())
    early.unlink()


def serve(stream: Stream, opened: Message) -> None:
    """Open the backend and work until told to stop."""
    states = StateSender(stream)
    commands = Inbox(stream, states)
    if opened.get("profile_folder") is not None:
        os.environ[PROFILE_VARIABLE] = opened["profile_folder"]
    task = task_from_message(opened)
    add_phase_listener(lambda name: stream.send(Message("phase", {"name": name})))
    decide_by(partial(_ask_whether_to_compile, stream, commands))
    with startup_deadline(opened["start_deadline"], partial(_report_stuck, stream)):
        session = open_session(task, opened)
    if opened["job"].get("max_restarts") and load_backend(opened["job"]["backend"]).capabilities.rejoins and task.placed.leading:
        session.on_stalled_worker = lambda worker: stream.send(Message("worker_stalled", {"worker": worker}))  # type: ignore[union-attr]
    used = {name: getattr(session, name, None) for name in ("precision_used", "device_used")}
    stream.send(Message("ready", used))
    if task.placed.leading:
        first = next(placed for placed in task.cluster.tasks if placed.leading)
        CommandLoop(session, stream, commands, states, reports=task.placed == first).run()  # type: ignore[arg-type]
    else:
        session.serve(commands.closing)  # type: ignore[union-attr]


def _ask_whether_to_compile(stream: Stream, commands: Inbox, timing: Timing, tasks: int) -> bool:
    """Tell the driver what this task has measured, and await what follows from the timings of all."""
    startup_phase("awaiting whether to compile", for_others=True)
    found = {"plain_seconds": timing.plain_seconds, "compiled_seconds": timing.compiled_seconds, "reason": timing.reason}
    stream.send(Message("compile_timed", {**found, "tasks": tasks}))
    answer = commands.next()
    if answer.kind != "compile":
        raise RunFailedError(f"the driver answered {answer.kind!r} to the question whether to compile")
    return bool(answer["compile"])


def open_session(task: Task, opened: Message) -> Session | Server:
    """Put together what the backend needs and have it join its cluster and warm up."""
    job = Job.model_validate(opened["job"])
    startup_phase("opening the dataset and the model")
    data = _open_data(job, opened)
    model = build_model(job.model, data.info)
    startup_phase("joining the cluster", for_others=True)
    return load_backend(job.backend).open(task, job, model, data)


def _open_data(job: Job, opened: Message) -> Dataset:
    if opened.get("placeholder") is not None:
        return PlaceholderText.of(data_info(opened["placeholder"]))
    data = open_dataset(job.data, job.data_dir)
    return data if opened.get("normalisation") is None else data.normalised_as(*opened["normalisation"])


def main(arguments: list[str] | None = None) -> None:
    """Run one task to its end."""
    parser = argparse.ArgumentParser(prog="crosstrain.engine.task")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--stacks", type=int, help="the descriptor of a file for the stacks, which the agent asks for")
    options = parser.parse_args(arguments)
    run_task(socket.socket(fileno=options.fd), options.parent, options.stacks)


def run_task(connection: socket.socket, parent_pid: int, stacks: int | None) -> NoReturn:
    """Be a task, whose agent is at the other end of `connection`, and end the process with it.

    `stacks` is a descriptor to which stacks are written when they are asked for. Leaves with os._exit, because a framework's own exit
    handlers may wait for peers that are gone.
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
    except BaseException as error:  # noqa: BLE001 — the report of a task's death must not depend on what killed it
        code = 1
        traceback.print_exc()
        _report_error(stream, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _allow_open_files() -> None:
    """Have as many open files as the system allows: a framework that listens keeps whatever connects, and aborts at the limit."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # where the kernel has a smaller limit of its own, what there is has to do
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _await_opening(stream: Stream) -> Message:
    """Return the ``open`` message, with the framework imported; a ``prepare`` before it has the import begin earlier."""
    message = _received(stream)
    job = Job.model_validate(message["job"])
    import_framework(job, time.monotonic() + job.start_timeout, partial(_report_stuck, stream))
    if message.kind == "prepare":
        message = _received(stream)
        take_log(message)
    return message


def _received(stream: Stream) -> Message:
    message = stream.receive()
    if message is None:
        os._exit(70)
    return message


def _report_stuck(stream: Stream, message: str) -> None:
    _report_error(stream, RunFailedError(message))


def _report_error(stream: Stream, error: BaseException) -> None:
    try:
        stream.send(error_message(error, peer_lost=caused_by_peer_loss(error)))
    except OSError:
        traceback.print_exc()


if __name__ == "__main__":
    main()
