"""A run as everything in `report` takes it: its documents and records, each read when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import UsageError
from ...core.untrusted.console import one_line
from ...metrics import MetricInfo
from ...metrics.recorded import read_metrics, read_translation_metrics
from ...records.schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from ...records.store.run_directory import RunReader, state_now
from ...records.summary.segments import resumed_seconds
from .labels import labels

if TYPE_CHECKING:
    from ..series.arrays import NodeSeries, StepSeries

__all__ = ["Run", "finished_run", "labelled", "started_runs"]

_STATES = {"died": "it was killed before it could write one", "failed": "it failed", "interrupted": "it was interrupted"}


class Run:
    """A run directory, read once: a file is opened when something in it is first asked for, and what was read is kept.

    So a command opens only the files that it needs, and all that it says of a run is said of one state of it. Documents, evaluations,
    events and the nodes' series are kept; updates and samples, of which there may be millions, are read anew at each call of their methods.
    Any of these raises DamagedRunError where its file cannot be read. A run at work is followed by `live.watched_run.WatchedRun`.

    `recorded_until`: the run clock at the last record, of a run whose summary was computed from its records (`unfinished`); None where it
    was read.

    `path` is the directory. `label` is what the run is called among others (`labels.labels`), None where it stands alone. `number` is its
    place among runs that are shown side by side, from 0.
    """

    def __init__(self, path: Path | str, *, label: str | None = None, number: int = 0) -> None:
        """Raises UsageError where `path` is no run directory."""
        self._reader = RunReader(path)
        self.path = self._reader.path
        self.label = label
        self.number = number
        self.recorded_until: float | None = None

    @classmethod
    def of_documents(
        cls,
        summary: Mapping[str, Any],
        job: Mapping[str, Any],
        nodes: Sequence[Mapping[str, Any]] = (),
        *,
        path: Path = Path(),
        label: str | None = None,
    ) -> Run:
        """Return a run whose documents are at hand: ``summary.json``, ``job.json``, and the nodes of ``env.json``. It has no records."""
        run = cls.__new__(cls)
        run.path, run.label, run.number, run.recorded_until = path, label, 0, None
        vars(run).update(
            _summary=summary, job=job, nodes=nodes, _environment=None, state=summary["state"], calibration=None, evals=[], events=[]
        )
        return run

    def with_figures(self, summary: Mapping[str, Any], recorded_until: float) -> Run:
        """Return the same run with a summary that was computed from its records, which go so far on the run clock."""
        other = copy(self)
        vars(other).update(_summary=summary, recorded_until=recorded_until)
        return other

    def called(self, label: str, number: int = 0) -> Run:
        """Return the same run under a label among others; what has been read of it is not read again."""
        other = copy(self)
        other.label, other.number = label, number
        return other

    @property
    def own_name(self) -> str:
        """The directory's name, on one line."""
        return one_line(self.path.resolve().name)

    @property
    def name(self) -> str:
        """What it is called: its label, or alone its directory's name."""
        return self.label or self.own_name

    # Documents ----------------------------------------------------------------------------------------------------------

    @cached_property
    def status(self) -> Mapping[str, Any]:
        """``status.json``."""
        return self._reader.status()

    @cached_property
    def state(self) -> str:
        """The state when it was first asked for; ``died`` where the run is said to be at work, and its driver is gone."""
        return state_now(self.status)

    @property
    def cause(self) -> str | None:
        """Why it ended as it did, where that was written down."""
        cause: str | None = self.status["cause"]
        return cause

    @cached_property
    def job(self) -> Mapping[str, Any]:
        """``job.json``."""
        return self._reader.job()

    @property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """The metrics of its evaluations, the headline first and the loss last."""
        return read_metrics(self.job)

    @property
    def translation_metrics(self) -> frozenset[str]:
        """The names of those metrics that come from translations, of another search while it trains than at its end."""
        return read_translation_metrics(self.job)

    @property
    def metrics_at_the_end(self) -> list[MetricInfo]:
        """The metrics that its summary has of translations of all test sentences at its end; none where there were none."""
        scores = (self._summary or {}).get("translated") or {}
        return [info for info in self.metrics if info.name in self.translation_metrics and scores.get(info.name) is not None]

    @cached_property
    def _environment(self) -> Mapping[str, Any] | None:
        return self._reader.environment()

    @cached_property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """What each node is, in node order, from ``env.json``; empty where the run never came so far."""
        return [] if self._environment is None else list(self._environment["nodes"])

    @property
    def code(self) -> Mapping[str, Any] | None:
        """Which code the driver ran, from ``env.json``; None where the run does not tell, as those of earlier releases."""
        code: Mapping[str, Any] | None = (self._environment or {}).get("code")
        return code

    @cached_property
    def _summary(self) -> Mapping[str, Any] | None:
        return self._reader.summary()

    @property
    def has_summary(self) -> bool:
        """Whether there are figures of the run: it ended well, or trained before it ended otherwise."""
        return self._summary is not None

    @property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``. Raises UsageError, which says why and what to do, where the run has none (yet)."""
        if self._summary is not None:
            return self._summary
        cause = f" ({self.cause})" if self.cause else ""
        advice = "Wait until it has ended." if self.state in ("starting", "running") else "Run it again, or leave it out."
        raise UsageError(f"run: {str(self.path)!r} has no summary.json; {_STATES.get(self.state, f'it is {self.state}')}{cause}. {advice}")

    @cached_property
    def calibration(self) -> Mapping[str, Any] | None:
        """``calibration.json``: what the components of a step cost at the run's end; None where they were not measured."""
        return self._reader.calibration()

    # Records ------------------------------------------------------------------------------------------------------------

    @cached_property
    def evals(self) -> Sequence[EvalRecord]:
        """The evaluations, in the order of their arrival."""
        return list(self._reader.evals())

    @property
    def tests(self) -> list[EvalRecord]:
        """The evaluations on the test split."""
        return [record for record in self.evals if record.split == "test"]

    @cached_property
    def events(self) -> Sequence[EventRecord]:
        """The events, in the order of their arrival."""
        return list(self._reader.events())

    def steps(self) -> Iterator[StepRecord]:
        """Yield the groups of updates in the order of their arrival."""
        return self._reader.steps()

    def samples(self) -> Iterator[SystemRecord]:
        """Yield the resource samples of all nodes in the order of their arrival."""
        return self._reader.system()

    def step_series(self, learning_rates: bool = False) -> StepSeries:
        """Return the updates as arrays, with their learning rates where these are asked for."""
        from ..series.arrays import read_steps  # with numpy, which a list of runs does without

        return read_steps(self.path, learning_rates)

    def node_series(self) -> list[NodeSeries]:
        """Return the resource samples of each node as arrays, in node order; empty where there are none."""
        return self._node_series

    @cached_property
    def _node_series(self) -> list[NodeSeries]:
        from ..series.arrays import read_samples

        return read_samples(self.path / "system.jsonl", resumed_seconds(self.job))

    @property
    def run_seconds(self) -> float | None:
        """The run clock at the run's end, or as far as its evaluations and events go; None where it never started."""
        if self.has_summary:
            return float(self.summary["run_seconds"])
        known = [*(record.time_seconds for record in self.evals), *(event.time_seconds for event in self.events)]
        return max(known) if known and any(event.event in ("run_started", "run_resumed") for event in self.events) else None


def labelled(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, numbered, with labels that tell them apart, where they have none yet."""
    found = labels([run.path for run in runs])
    return [run.called(run.label or label, number) for number, (run, label) in enumerate(zip(runs, found, strict=True))]


def finished_run(path: Path | str) -> Run:
    """Return a run that has figures, with its documents read.

    Raises UsageError for a path that is no run or a run without a summary, DamagedRunError for one that cannot be read.
    """
    run = Run(path)
    _ = run.summary, run.job, run.nodes
    return run


def started_runs(runs: Iterable[Run]) -> list[Run]:
    """Return runs to be shown however they ended, labelled, with their documents read.

    Raises UsageError for one that is not far enough to have a ``job.json``, DamagedRunError for one that cannot be read.
    """
    known = list(runs)
    for run in known:
        if not (run.path / "job.json").is_file():
            raise UsageError(f"run: {str(run.path)!r} ended before anything was known about it (there is no job.json). Leave it out.")
        _ = run.state, run.job, run.nodes, run.has_summary
    return labelled(known)
