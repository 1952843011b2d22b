"""MLflow logger; a thread sends batches, and a lost server costs points, not the run."""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...core.errors import MissingPackageError, UsageError
from ...core.job import Job, without_password
from ...core.plugins import module_exists
from ..node_usage import Counter
from ..store.schema import EventRecord, SystemRecord
from .base import CurveLogger, Spacing, settings

SYSTEM_SPACING_SECONDS = 1.0  # at first; MLflow's own monitor uses 10 s


class NodeFigures:
    """Samples of a node as points under MLflow's names.

    Traffic counts from the first sample of training.
    """

    def __init__(self) -> None:
        self.points = 0
        self._segment: float | None = None
        self._traffic = {name: Counter() for name in ("network_sent_bytes", "network_received_bytes")}
        self._spacing = Spacing(SYSTEM_SPACING_SECONDS)
        self._since: float | None = None

    def values(self, record: SystemRecord) -> dict[str, float] | None:
        """Return a sample's point; None during initialisation or too soon after the last one."""
        self._count(record)
        if record.initialising:
            return None
        now = record.time_seconds
        if self._since is not None and not self._spacing.is_due(self._since, now):
            return None
        self._since = now
        self._spacing.count()
        self.points += 1
        known = {
            "cpu_utilization_percentage": _scaled(record.cpu_fraction, 100),
            "system_memory_usage_megabytes": _scaled(record.memory_rss_bytes, 1e-6),
            "network_transmit_megabytes": self._megabytes(record, "network_sent_bytes"),
            "network_receive_megabytes": self._megabytes(record, "network_received_bytes"),
        }
        for number, gpu in enumerate(record.gpus or ()):
            known[f"gpu_{number}_utilization_percentage"] = _scaled(gpu.get("utilization"), 100)
            known[f"gpu_{number}_memory_usage_megabytes"] = _scaled(gpu.get("memory_bytes"), 1e-6)
            known[f"gpu_{number}_power_usage_watts"] = gpu.get("power_watts")
        return {name: value for name, value in known.items() if value is not None}

    def _count(self, record: SystemRecord) -> None:
        """Add traffic since the first sample of training.

        In later segments since the last one before the clock.
        """
        if record.initialising or record.part_began_seconds != self._segment:
            for counter in self._traffic.values():
                counter.reset()
        self._segment = record.part_began_seconds
        if self.points or not record.initialising:
            for name, counter in self._traffic.items():
                counter.add(getattr(record, name), record.time_seconds)

    def _megabytes(self, record: SystemRecord, name: str) -> float | None:
        return None if getattr(record, name) is None else (self._traffic[name].increase or 0.0) * 1e-6


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


SEND_SECONDS = 1.0  # between two batches
RETRY_SECONDS = 5.0  # between two attempts without an answer
CLOSE_SECONDS = 15.0  # limit for unsent points at the end of a run
FIRST_SPACING_SECONDS = 0.5  # between the training curves' points at first
MAX_POINTS = 20_000  # kept while unsent; the oldest are dropped
BATCH_METRICS, BATCH_PARAMS = 1000, 100  # MLflow's limits of a request (``mlflow/utils/validation.py``)
MAX_TAG_CHARACTERS = 5000  # limit of a tag's value before MLflow 2.13
CONNECT_SECONDS = 5.0
# Retries are made here, standard output is for data, and telemetry is off.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
Point = tuple[str, float, int, int]  # key, value, Unix time in milliseconds, step


def check_mlflow(uri: str) -> None:
    """Check that mlflow is installed and that a server listens, without an import.

    Raises MissingPackageError, or UsageError without a listener at an http address.
    """
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


class MLflowWriter(CurveLogger):
    """Thread-safe logger to a new MLflow run, which never blocks.

    Steps are updates; samples are under ``system/``.
    """

    def __init__(
        self,
        path: Path,
        job: Job,
        command: Sequence[str],
        began_unix_seconds: float,
        report: Callable[..., None],
        zero_unix_seconds: float | None = None,
    ) -> None:
        """Start logging the run in `path`, whose `command` started then.

        Raises UsageError where mlflow cannot be imported.
        """
        super().__init__(FIRST_SPACING_SECONDS, zero_unix_seconds)
        self._mlflow, self._client = load_mlflow(job.mlflow)
        self._path = path.absolute()
        self._job = job
        self._uri = without_password(job.mlflow or "")
        self._command = shlex.join(command)
        self._report = report
        self._began_ms = round(1000 * min(began_unix_seconds, zero_unix_seconds or began_unix_seconds))
        self._points: deque[Point] = deque()
        self._lost = 0
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

    def system(self, record: SystemRecord) -> None:
        """Log a sample of training, at most one per second and node, without unobserved figures."""
        with self._lock:
            node = self._nodes.setdefault(record.node, NodeFigures())
            values = node.values(record)
            if values:
                prefix = f"system/node_{record.node}/" if self._job.nodes > 1 else "system/"
                self._add({f"{prefix}{name}": value for name, value in values.items()}, node.points - 1, record.time_seconds)

    def event(self, record: EventRecord) -> None:
        """Keep the cause of a failure or interruption for the tag ``crosstrain.cause``."""
        if record.event in ("run_failed", "run_interrupted"):
            self._cause = str(record.detail["cause"])[:MAX_TAG_CHARACTERS]

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Log the rest of the curve, ``summary/…`` and the status.

        The status is FINISHED, FAILED, or KILLED if interrupted.
        """
        super().on_end(state, summary)
        self._status = _STATUS.get(state, "FAILED")

    def close(self) -> None:
        """Wait at most `CLOSE_SECONDS` for unsent points; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        with self._lock:
            left = len(self._points) + self._lost
        if left or self._thread.is_alive() or not self._answers:
            self._report_event("mlflow_incomplete", points=left, run_id=self._run_id)
        with self._report_lock:
            self._abandoned = True

    def _add(self, values: Mapping[str, float], step: int, time_seconds: float) -> None:
        milliseconds = round(1000 * self._unix_seconds(time_seconds))
        for key, value in values.items():
            self._points.append((key, value, milliseconds, step))
        while len(self._points) > MAX_POINTS:
            self._points.popleft()
            self._lost += 1

    def _work(self) -> None:
        while True:
            closing = self._closing.is_set()  # read before sending: nothing is added later
            try:
                run_id = self._run_id = self._run_id or self._make_run()
                self._describe(run_id)
                self._send(run_id)
                if closing:
                    if self._cause is not None:
                        self._client.set_tag(run_id, "crosstrain.cause", self._cause)
                    self._client.set_terminated(run_id, self._status)
            except Exception as error:  # noqa: BLE001 — MLflow's, its transport's and its database's, recorded as an event
                if self._answers:
                    self._answers = False
                    lines = str(error).splitlines()
                    self._report_event("mlflow_lost", cause=f"{type(error).__name__}: {lines[0] if lines else ''}")
            else:
                if not self._answers:
                    self._answers = True
                    self._report_event("mlflow_back", points_lost=self._lost)
            if closing:
                return
            self._closing.wait(SEND_SECONDS if self._answers else RETRY_SECONDS)

    def _make_run(self) -> str:
        name = self._job.mlflow_experiment
        experiment_found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if experiment_found is None else experiment_found.experiment_id
        tags = {
            "mlflow.source.name": self._command,
            "mlflow.source.type": "LOCAL",
            "crosstrain.run": self._path.name,
            "crosstrain.run_directory": str(self._path),
        }
        made = self._client.create_run(experiment, start_time=self._began_ms, tags=tags, run_name=self._path.name)
        run_id: str = made.info.run_id
        self._report_event("mlflow_started", run_id=run_id, experiment=name, uri=self._uri)
        return run_id

    def _describe(self, run_id: str) -> None:
        if self._described:
            return
        params = [self._mlflow.entities.Param(key, str(value)) for key, value in settings(self._job).items()]
        for first in range(0, len(params), BATCH_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + BATCH_PARAMS])
        self._described = True

    def _send(self, run_id: str) -> None:
        while True:
            with self._lock:
                batch = [self._points.popleft() for _ in range(min(BATCH_METRICS, len(self._points)))]
            if not batch:
                return
            try:
                self._client.log_batch(run_id, metrics=[self._mlflow.entities.Metric(*point) for point in batch])
            except Exception:
                with self._lock:
                    self._points.extendleft(reversed(batch))
                raise

    def _report_event(self, event: str, **detail: Any) -> None:
        with self._report_lock:
            if not self._abandoned:
                self._report(event, **detail)


def load_mlflow(uri: str | None) -> tuple[Any, Any]:
    """Import mlflow; return it and a client of the URI. Raises UsageError."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        mlflow = importlib.import_module("mlflow")
        client: Any = importlib.import_module("mlflow.tracking").MlflowClient(uri)
    except Exception as error:  # the package and its stores may raise anything
        shown = without_password(uri or "")
        problem = str(error).replace(uri, shown) if uri else str(error)
        raise UsageError(f"mlflow: {shown!r} cannot be used ({type(error).__name__}: {problem})") from error
    return mlflow, client
