"""Logs a run to MLflow: its settings as parameters, its curves and its nodes' figures as metrics, its end as the run's status.

Everything that takes time happens in a thread, in batches; if the server goes away, points are lost there, and nothing here. MLflow is
imported when the first writer is made.
"""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...core.errors import MissingPackageError, UsageError
from ...core.job import Job, without_password
from ...core.plugins import module_exists
from ..schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from .base import RunLogger
from .curve_points import TrainingCurve, end_figures, settings
from .mlflow_system_metrics import NodeFigures

__all__ = ["MLflowWriter", "check_mlflow", "load_mlflow"]

SEND_SECONDS = 1.0
"""Time between two batches."""

RETRY_SECONDS = 5.0
"""Time between two attempts while nobody answers."""

CLOSE_SECONDS = 15.0
"""How long the end of a run waits for what has not been sent."""

FIRST_SPACING_SECONDS = 0.5
"""Distance of the training curves' points at first."""

MOST_POINTS = 20_000
"""Kept while they cannot be sent; beyond that the oldest go."""

BATCH_METRICS, BATCH_PARAMS = 1000, 100
"""Most of each that MLflow takes in one request (``mlflow/utils/validation.py``)."""

LONGEST_TAG_CHARACTERS = 5000
"""Of a tag's value; releases of MLflow before 2.13 take no more."""

CONNECT_SECONDS = 5.0

_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Set unless the user has set them: repeating is done here, where the run's end is known; standard output is for data; and the package
reports to nobody but the server that is asked for."""

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")

_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

Point = tuple[str, float, int, int]
"""Key, value, Unix time in milliseconds, step."""

Report = Callable[..., None]
"""Records an event: its name, then its detail."""


def check_mlflow(uri: str) -> None:
    """Raise MissingPackageError where mlflow is not installed, and UsageError where nobody listens at an http address. Imports nothing."""
    if not module_exists("mlflow"):
        raise MissingPackageError("mlflow: the package is not installed. Install it with: pip install 'crosstrain[mlflow]'")
    parts = urlsplit(uri)
    if parts.scheme.partition("+")[0] in _DATABASES and not module_exists("sqlalchemy"):
        raise MissingPackageError(
            f"mlflow: {without_password(uri)!r} is a database, which needs the whole package. Install it with: pip install mlflow"
        )
    if parts.scheme not in ("http", "https"):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"mlflow: got {without_password(uri)!r}, but nobody answers there ({error}); allowed: the address of a server that runs, "
            "such as one of `mlflow server`, or sqlite:///FILE."
        ) from error


class MLflowWriter(RunLogger):
    """Tells a run to MLflow, as a run of its own; methods may be called from several threads and return at once.

    ``train/``, ``eval/`` and ``summary/`` have the number of updates as their step, ``system/`` counts samples. The names under ``system/``
    are those of MLflow's own monitor; with several nodes the node stands before them, as ``node_0/``. What they say is the run's use
    of a node, not all that happens there.
    """

    def __init__(
        self,
        path: Path,
        job: Job,
        command: Sequence[str],
        began_unix_seconds: float,
        report: Report,
        zero_unix_seconds: float | None = None,
    ) -> None:
        """Begin to tell of the run in the directory `path`, of a `command` that started at `began_unix_seconds`.

        `report` records events about the telling.

        Importing mlflow takes seconds. Where `zero_unix_seconds` is given, records happened at their time on the run clock after it, until
        `on_replayed`. Raises UsageError where mlflow cannot be imported.
        """
        self._mlflow, self._client = load_mlflow(job.mlflow)
        self._path = path.absolute()
        self._job = job
        self._uri = without_password(job.mlflow or "")
        self._command = shlex.join(command)
        self._report = report
        self._zero = zero_unix_seconds
        self._began_ms = round(1000 * min(began_unix_seconds, zero_unix_seconds or began_unix_seconds))
        self._lock = threading.Lock()
        self._points: deque[Point] = deque()
        self._lost = 0
        self._curve = TrainingCurve(FIRST_SPACING_SECONDS)
        self._time_seconds = 0.0
        self._nodes: dict[int, NodeFigures] = {}
        self._run_id: str | None = None
        self._described = False
        self._status = "FAILED"
        self._cause: str | None = None
        self._answers = True
        self._abandoned = False
        self._report_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    # What is told ---------------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        """Take in a step record; about two points a second are told at first, fewer in a long run."""
        with self._lock:
            self._time_seconds = record.time_seconds
            values = self._curve.add(record)
            if values is not None:
                self._add(values, self._curve.updates, record.time_seconds)

    def evaluation(self, record: EvalRecord) -> None:
        """Tell ``eval/loss`` and each metric, such as ``eval/accuracy`` (of another split than test: ``eval/<split>/…``)."""
        prefix = "eval" if record.split == "test" else f"eval/{record.split}"
        with self._lock:
            self._add(
                {f"{prefix}/{name}": value for name, value in (("loss", record.loss), *record.metrics.items())},
                record.step,
                record.time_seconds,
            )

    def system(self, record: SystemRecord) -> None:
        """Tell a sample of training, at most one a second and node; what was not observed is left out."""
        with self._lock:
            node = self._nodes.setdefault(record.node, NodeFigures())
            values = node.values(record)
            if values:
                prefix = f"system/node_{record.node}/" if self._job.nodes > 1 else "system/"
                self._add({f"{prefix}{name}": value for name, value in values.items()}, node.told - 1, record.time_seconds)

    def event(self, record: EventRecord) -> None:
        """Keep why the run failed or was interrupted, which becomes the tag ``crosstrain.cause``."""
        if record.event in ("run_failed", "run_interrupted"):
            self._cause = str(record.detail["cause"])[:LONGEST_TAG_CHARACTERS]

    def on_replayed(self) -> None:
        """What follows happens now."""
        with self._lock:
            self._zero = None

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Tell the rest of the curve, ``summary/…``, and the status: FINISHED, FAILED, or KILLED where it was interrupted."""
        with self._lock:
            self._add(self._curve.rest(self._time_seconds) or {}, self._curve.updates, self._time_seconds)
            self._add(end_figures(summary or {}), self._curve.updates, self._time_seconds)
            self._status = _STATUS.get(state, "FAILED")

    def close(self) -> None:
        """Wait until everything has been sent, or could not be, for at most `CLOSE_SECONDS`; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        with self._lock:
            left = len(self._points) + self._lost
        if left or self._thread.is_alive() or not self._answers:
            self._say("mlflow_incomplete", points=left, run_id=self._run_id)
        with self._report_lock:
            self._abandoned = True

    def _add(self, values: Mapping[str, float], step: int, time_seconds: float) -> None:
        moment = time.time() if self._zero is None else self._zero + time_seconds
        for key, value in values.items():
            self._points.append((key, value, round(1000 * moment), step))
        while len(self._points) > MOST_POINTS:
            self._points.popleft()
            self._lost += 1

    # The thread -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Send what there is, again and again, until the run has been closed; then once more."""
        while True:
            closing = self._closing.is_set()  # asked before sending: after it nothing is added
            try:
                run_id = self._run_id = self._run_id or self._make_run()
                self._describe(run_id)
                self._send(run_id)
                if closing:
                    if self._cause is not None:
                        self._client.set_tag(run_id, "crosstrain.cause", self._cause)
                    self._client.set_terminated(run_id, self._status)
            except Exception as error:  # noqa: BLE001 — MLflow's own, its transport's and its database's; told as an event
                self._on_error(error)
            else:
                self._on_success()
            if closing:
                return
            self._closing.wait(SEND_SECONDS if self._answers else RETRY_SECONDS)

    def _make_run(self) -> str:
        """Make the run, in its experiment; return its id."""
        name = self._job.mlflow_experiment
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {
            "mlflow.source.name": self._command,
            "mlflow.source.type": "LOCAL",
            "crosstrain.run": self._path.name,
            "crosstrain.run_directory": str(self._path),
        }
        made = self._client.create_run(experiment, start_time=self._began_ms, tags=tags, run_name=self._path.name)
        run_id: str = made.info.run_id
        self._say("mlflow_started", run_id=run_id, experiment=name, uri=self._uri)
        return run_id

    def _describe(self, run_id: str) -> None:
        """Tell the job as the run's parameters, once."""
        if self._described:
            return
        params = [self._mlflow.entities.Param(key, str(value)) for key, value in settings(self._job).items()]
        for first in range(0, len(params), BATCH_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + BATCH_PARAMS])
        self._described = True

    def _send(self, run_id: str) -> None:
        """Send all points, in batches; those that could not be sent stay."""
        while batch := self._take():
            try:
                self._client.log_batch(run_id, metrics=[self._mlflow.entities.Metric(*point) for point in batch])
            except Exception:
                with self._lock:
                    self._points.extendleft(reversed(batch))
                raise

    def _take(self) -> list[Point]:
        with self._lock:
            return [self._points.popleft() for _ in range(min(BATCH_METRICS, len(self._points)))]

    def _on_error(self, error: Exception) -> None:
        if self._answers:
            self._answers = False
            lines = str(error).splitlines()
            self._say("mlflow_lost", cause=f"{type(error).__name__}: {lines[0] if lines else ''}")

    def _on_success(self) -> None:
        if not self._answers:
            self._answers = True
            self._say("mlflow_back", points_lost=self._lost)

    def _say(self, event: str, **detail: Any) -> None:
        """Record an event, unless the run's records are closed."""
        with self._report_lock:
            if not self._abandoned:
                self._report(event, **detail)


def load_mlflow(uri: str | None) -> tuple[Any, Any]:
    """Import mlflow; return it and a client of the tracking URI. Raises UsageError where that cannot be."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        mlflow = importlib.import_module("mlflow")
        client: Any = importlib.import_module("mlflow.tracking").MlflowClient(uri)
    except Exception as error:  # a package of that size may raise anything, and so may the store of another scheme
        shown = without_password(uri or "")
        problem = str(error).replace(uri, shown) if uri else str(error)
        raise UsageError(f"mlflow: {shown!r} cannot be used ({type(error).__name__}: {problem})") from error
    return mlflow, client
