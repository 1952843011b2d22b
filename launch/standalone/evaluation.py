"""Evaluates a trained state on this machine, without a run: one task is started and ended as a run's are, and nothing is recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ...backends.base import EvalResult, State
from ...backends.capabilities import refuse_unsupported
from ...backends.loading import load_backend
from ...core.errors import InterruptedRunError, TrainerError
from ...core.job import Job
from ...data.base import Split
from ...data.store.stored_dataset import StoredDataset
from ...engine.protocol.codec import eval_from_message
from ...engine.protocol.messages import Message
from ...models.base import Array, ModelSpec
from ..ending_signals import EndingSignals
from ..launchers.local import LocalLauncher
from ..driver.cluster_setup import infer_isolation, make_cluster, make_tasks, threads_per_task
from ..driver.nodes import Nodes
from ..driver.task_group import TaskGroup, load_state

__all__ = ["Evaluated", "Evaluator"]

CLOSE_GRACE_SECONDS = 10.0

PREDICTION_BLOCK = 1024
"""Examples whose logits travel in one message: few bytes, and an interrupt is noticed between two of them."""

PREDICTION_BYTES = 16 * 2**20
"""Of the logits of one message: fewer examples where there are very many classes."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came out.

    The sums, the figures that they make by name, the precision that was really used, and logits float32 [n, classes] where they were
    asked for.
    """

    result: EvalResult
    figures: Mapping[str, float]
    precision_used: str
    logits: Array | None


class Evaluator:
    """Evaluates a state by a job of a single sync worker, which says on which backend, data and device.

    The task opens the job's data itself; `data` is the same store, perhaps normalised by other numbers than its own. Raises UsageError
    where the job asks for what its backend does not declare.
    """

    def __init__(self, job: Job, model: ModelSpec, data: StoredDataset, warn: Callable[[str], None]) -> None:
        self._job = job
        self._model = model
        self._data = data
        self._backend = load_backend(job.backend)
        refuse_unsupported(job, job.backend, self._backend.capabilities)
        self._launcher = LocalLauncher(job, warn)
        self._nodes: Nodes | None = None
        self._tasks: TaskGroup | None = None
        self._signals = EndingSignals(self._interrupt, self._end_at_once)

    def evaluate(self, state: State, split: Split, *, logits: bool) -> Evaluated:
        """Evaluate on every example of a split. Every process is ended when this returns or raises, whatever happened.

        Raises RunFailedError where the task dies, InterruptedRunError after SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.
        """
        code = 1
        with self._signals:
            try:
                evaluated = self._evaluate(self._start(), state, split, logits=logits)
                code = 0
                return evaluated
            except TrainerError as error:
                code = error.exit_code
                raise
            finally:
                self._end(code)

    def _start(self) -> TaskGroup:
        """Bring the one task to life, warm."""
        deadline = time.monotonic() + self._job.start_timeout
        channels = self._launcher.start()
        nodes = self._nodes = Nodes(
            channels, lambda sample: None, lambda node, task, text: None, node_timeout_seconds=self._job.node_timeout
        )
        if self._signals.interrupted:
            raise InterruptedRunError("interrupted by the user")
        hosts = nodes.greet(deadline - time.monotonic())
        infer_isolation(channels, hosts)
        placed = self._backend.placement(self._job)
        tasks = self._tasks = TaskGroup(nodes, placed)
        cluster = make_cluster(placed, channels, tasks.reserve_ports({0: len(placed)}, deadline - time.monotonic()))
        threads = threads_per_task(self._job, self._model, channels, hosts, placed)
        request = {
            "job": self._job.model_dump(mode="json"),
            "log_folder": None,  # with the agent's temporary files; the end of a log is in the message where the task dies
            "sample_interval_seconds": None,
            "isolated": channels[0].isolated,
            "cores_available": channels[0].cores,
            "start_seconds": deadline - time.monotonic(),
            "normalisation": self._data.info.normalisation,
        }
        tasks.start_tasks(make_tasks(cluster, threads), lambda node: request)
        self._precisions = tasks.await_ready(deadline - time.monotonic())
        return tasks

    def _evaluate(self, tasks: TaskGroup, state: State, split: Split, *, logits: bool) -> Evaluated:
        load_state(tasks, state, self._job.start_timeout)
        (message,) = _answers(tasks, Message("evaluate", {"sequence": 1, "split": split}))
        used = next(iter(self._precisions.values())) or self._job.precision
        result = eval_from_message(message)
        return Evaluated(result, self._model.objective.figures(result.sums), used, self._predict(tasks, split) if logits else None)

    def _predict(self, tasks: TaskGroup, split: Split) -> Array:
        size = self._data.info.sizes[split]
        logits_nk: Array = np.empty((size, self._model.classes), np.float32)
        block = max(1, min(PREDICTION_BLOCK, PREDICTION_BYTES // (logits_nk.itemsize * self._model.classes)))
        for sequence, start in enumerate(range(0, size, block), 2):
            stop = min(start + block, size)
            fields = {"sequence": sequence, "split": split, "start": start, "stop": stop}
            (message,) = _answers(tasks, Message("predict", fields))
            logits_bk = message.array("logits")
            if logits_bk.shape != (stop - start, self._model.classes):
                tasks.refuse(0, f"logits of shape {logits_bk.shape} for {stop - start} examples of {self._model.classes} classes")
            logits_nk[start:stop] = logits_bk
        return logits_nk

    def _end(self, code: int) -> None:
        if self._tasks is not None:
            self._tasks.end_tasks(CLOSE_GRACE_SECONDS, politely=code == 0)
        if self._nodes is not None:
            self._nodes.finish(code)
        self._launcher.close()

    def _interrupt(self) -> None:
        if self._nodes is not None:
            self._nodes.interrupt()

    def _end_at_once(self) -> NoReturn:
        self._launcher.kill()
        os._exit(InterruptedRunError.exit_code)


def _answers(tasks: TaskGroup, command: Message) -> list[Message]:
    """Send a command and return what is answered before its ``done``. The task's death, or an interrupt, is raised meanwhile."""
    tasks.send(command)
    answers: list[Message] = []
    while True:
        received = tasks.receive(1.0)
        if received is None:
            continue
        message: Any = received[1]
        if message.kind == "done":
            return answers
        answers.append(message)
