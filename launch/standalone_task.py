"""The tasks of a sync job on this machine, without a run and its records."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from ..backends.base import State
from ..backends.capabilities import refuse_unsupported
from ..backends.loading import load_backend
from ..core.errors import InterruptedRunError, TrainerError
from ..core.job import Job
from ..engine.protocol.messages import WireMessage
from ..engine.protocol.node_messages import Start
from ..engine.protocol.state_transfer import StateAnswer, StateBegin, StateEnd, StatePart, StateReceiver
from ..engine.protocol.task_messages import Command, Done, SendState
from ..models.base import ModelSpec
from .driver.cluster_setup import assign_gpus, infer_isolation, make_cluster, make_tasks, threads_per_task
from .driver.nodes import Nodes
from .driver.task_group import TaskGroup, load_state
from .launchers.local import LocalLauncher
from .launchers.machine_checks import EndingSignals
from .preflight.findings import requested_device

CLOSE_GRACE_SECONDS = 10.0


class StandaloneTask:
    """The tasks of a sync job on one node, usually one; every process ends with this context.

    It opens the job's data itself; `normalisation` has the (mean, std) of its inputs, if not the data's own. `placeholder`, the
    `described_data` of a text, replaces it with one made-up example (`placeholder_text`). Raises UsageError for what the backend does not
    support, RunFailedError if the task dies, InterruptedRunError after SIGINT, SIGTERM, SIGHUP (unless ignored), SIGUSR1 or SIGUSR2.
    """

    def __init__(
        self,
        job: Job,
        model: ModelSpec,
        warn: Callable[[str], None],
        *,
        normalisation: tuple[Any, Any] | None = None,
        placeholder: Mapping[str, Any] | None = None,
    ) -> None:
        self._job, self._model = job, model
        self._normalisation, self._placeholder = normalisation, placeholder
        self._backend = load_backend(job.backend)
        refuse_unsupported(job, job.backend, self._backend.capabilities)
        self._launcher = LocalLauncher(job, warn)
        self._nodes: Nodes | None = None
        self._tasks: TaskGroup | None = None
        self._signals = EndingSignals(self._interrupt, self._end_immediately)
        self._sequence = 0
        self.precision_used: str = job.precision

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        code = 0 if error is None else error.exit_code if isinstance(error, TrainerError) else 1
        try:
            self._end(code)
        finally:
            self._signals.__exit__(kind, error, trace)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has come; check it while not waiting for the task."""
        return self._signals.interrupted

    def start(self, state: State) -> None:
        """Start the task, wait until it is warm, and load a state."""
        deadline = time.monotonic() + self._job.start_timeout
        channels = self._launcher.start()
        nodes = self._nodes = Nodes(channels, node_timeout_seconds=self._job.node_timeout)
        if self.interrupted:
            raise InterruptedRunError("interrupted by the user")
        hosts = nodes.greet(deadline - time.monotonic())
        infer_isolation(channels, hosts)
        placed = self._backend.placement(self._job)
        tasks = self._tasks = TaskGroup(nodes, placed)
        cluster = make_cluster(placed, channels, tasks.reserve_ports({0: len(placed)}, deadline - time.monotonic()))
        threads = threads_per_task(self._job, self._model, channels, hosts, placed)
        gpus = assign_gpus(requested_device(self._job), placed, [0], hosts, nodes.name, strict=False)
        request = Start(
            job=json.dumps(self._job.model_dump(mode="json")),
            log_folder=None,  # with the agent's temporary files; an error has the end of the log
            sample_interval_seconds=None,
            isolated=channels[0].isolated,
            cores_available=channels[0].cores,
            gpu_of_task=gpus.on_node(0, placed),
            start_seconds=deadline - time.monotonic(),
            profiles=bool(self._job.profile),
            normalisation=self._normalisation,
            placeholder=self._placeholder,
        )
        tasks.start_tasks(make_tasks(cluster, threads), lambda node: request)
        ready = tasks.await_ready(deadline - time.monotonic())
        self.precision_used = next(iter(ready.values())).precision_used or self._job.precision
        self.load(state)

    def load(self, state: State) -> None:
        """Load a state."""
        load_state(self._running(), state, self._job.start_timeout)

    def ask(self, command: Command) -> Any:
        """Send a command and return its answer, after any heartbeats."""
        *_signs, answer = self.ask_for_all(command)
        return answer

    def ask_for_all(self, command: Command) -> list[WireMessage]:
        """Send a command and return what the tasks answer until each has carried it out."""
        tasks = self._running()
        self._sequence += 1
        command.sequence = self._sequence
        tasks.send(command)
        answers: list[WireMessage] = []
        waiting = len(tasks)
        while waiting:
            message = self._next()
            if isinstance(message, Done):
                waiting -= 1
            else:
                answers.append(message)
        return answers

    def state(self) -> State:
        """Return a copy of the state."""
        tasks, arrived = self._running(), self.ask_for_all(SendState())
        receiver: StateReceiver | None = None
        while True:
            message = arrived.pop(0) if arrived else self._next()
            if isinstance(message, StateBegin):
                receiver = StateReceiver(message)
                tasks.send_to_first(StateAnswer("send"))
            elif isinstance(message, StatePart) and receiver is not None:
                receiver.add(message)
                tasks.send_to_first(StateAnswer("ack"))
            elif isinstance(message, StateEnd) and receiver is not None:
                return receiver.state()

    def _next(self) -> WireMessage:
        while (received := self._running().receive(1.0)) is None:
            pass
        return received[1]

    def refuse(self, wrong: str) -> NoReturn:
        """Reject the task's invalid answer. Raises RunFailedError."""
        self._running().refuse(0, wrong)

    def _running(self) -> TaskGroup:
        if self._tasks is None:
            raise RuntimeError("the task was not started")
        return self._tasks

    def _end(self, code: int) -> None:
        if self._tasks is not None:
            self._tasks.end_tasks(CLOSE_GRACE_SECONDS, graceful=code == 0)
        if self._nodes is not None:
            self._nodes.finish(code)
        self._launcher.close()

    def _interrupt(self) -> None:
        if self._nodes is not None:
            self._nodes.interrupt()

    def _end_immediately(self) -> NoReturn:
        self._launcher.kill()
        os._exit(InterruptedRunError.exit_code)
