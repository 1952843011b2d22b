"""A task's entry point: joins the cluster through its backend and executes the training loop's commands.

Started by the agent as ``python -m crosstrain.engine.task --fd N``; descriptor N is one end of a socket pair to the agent. Standard output
and error are the task's log. The process ends with its agent: at the end of the stream, and by the parent-death signal.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from ..backends.base import Backend, Server, Session, StepResult
from ..core.cluster import Cluster, Placed, Task
from ..core.errors import TrainerError
from ..core.job import Job
from ..core.plugins import find, load
from ..core.process import die_with_parent
from ..data.store import open_dataset
from .codec import eval_to_message, plan_from_message, state_from_message, state_to_message, steps_to_message
from .messages import Message, Stream

__all__ = ["main", "task_from_message", "task_to_fields"]


def task_to_fields(task: Task) -> dict[str, Any]:
    """Encode a task for the ``open`` message."""
    return {"task": task.name, "cluster": task.cluster.to_json(), "threads": task.threads, "local_index": task.local_index}


def task_from_message(message: Message) -> Task:
    """Decode the task of an ``open`` message."""
    cluster = Cluster.from_json(message["cluster"])
    placed: Placed = next(placed for placed in cluster.tasks if placed.name == message["task"])
    return Task(placed, cluster, message["threads"], message["local_index"])


class Commands:
    """The task's inbox: a thread reads messages, so that the end of the stream is seen while the task computes."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
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
            if message.kind == "close":
                self.closing.set()
            self._queue.put(message)

    def next(self) -> Message:
        """Wait for the next command."""
        return self._queue.get()


class Leader:
    """Executes commands on a leading task's session, one after another."""

    def __init__(self, session: Session, stream: Stream, *, reports: bool) -> None:
        self._session = session
        self._stream = stream
        self._reports = reports

    def run(self, commands: Commands) -> None:
        """Execute commands until ``close``; every other one is answered by ``done`` with the seconds that it took."""
        while True:
            command = commands.next()
            begin = time.perf_counter()
            if command.kind == "close":
                self._session.close()
                return
            drained = self._execute(command)
            seconds = time.perf_counter() - begin
            self._stream.send(
                Message("done", {"sequence": command["sequence"], "command": command.kind, "seconds": seconds, "drain_seconds": drained})
            )

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
                self._stream.send(eval_to_message(result))
        elif command.kind == "state":
            state = self._session.state()
            if self._reports:
                self._stream.send(state_to_message(state))
        elif command.kind == "load":
            self._session.load(state_from_message(command) if self._reports else None)
        elif command.kind != "drain":
            raise ValueError(f"unknown command {command.kind!r}")
        return drained

    def _report(self, results: Iterable[StepResult]) -> None:
        for result in results:
            if self._reports:
                self._stream.send(steps_to_message(result))


def serve(stream: Stream, opened: Message, commands: Commands) -> None:
    """Open the backend and work until told to stop."""
    task = task_from_message(opened)
    job = Job.model_validate(opened["job"])
    data = open_dataset(job.data, job.data_dir)
    model = load(find("model", job.model), "model")(data.info)
    backend: Backend = load(find("backend", job.backend), "backend")
    session: Session | Server = backend.open(task, job, model, data)
    stream.send(Message("ready", {}))
    if task.placed.leading:
        first = next(placed for placed in task.cluster.tasks if placed.leading)
        Leader(session, stream, reports=task.placed == first).run(commands)  # type: ignore[arg-type]
    else:
        session.serve(commands.closing)  # type: ignore[union-attr]


def main(arguments: list[str] | None = None) -> None:
    """Run one task to its end. Leaves with os._exit, because a framework's own exit handlers may wait for peers that are gone."""
    parser = argparse.ArgumentParser(prog="crosstrain.engine.task")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    connection = socket.socket(fileno=options.fd)
    stream = Stream(connection.makefile("rb"), connection.makefile("wb"))
    opened = stream.receive()
    if opened is None:
        os._exit(70)
    code = 0
    try:
        serve(stream, opened, Commands(stream))
    except BaseException as error:  # noqa: BLE001 — the report of a task's death must not depend on what killed it
        code = 1
        traceback.print_exc()
        _report_error(stream, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_error(stream: Stream, error: BaseException) -> None:
    fields = {
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "errno": error.errno if isinstance(error, OSError) else None,
        "exit_code": error.exit_code if isinstance(error, TrainerError) else None,
    }
    try:
        stream.send(Message("error", fields))
    except OSError:
        traceback.print_exc()


if __name__ == "__main__":
    main()
