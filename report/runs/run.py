"""A run's documents and records, each read on first use."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ...core.console import one_line
from ...core.errors import UsageError
from ...core.job import Job
from ...core.settings.job_fields import environment_name, flag_name, idle_settings, is_boolean
from ...metrics import MetricInfo
from ...metrics.base import read_metrics, read_translation_metrics
from ...records.store.jsonl import NON_FINITE, DamagedRunError
from ...records.store.lockstep_results import Comparison
from ...records.store.run_directory import RunReader, RunState, state_now
from ...records.store.schema import Clock, EvalRecord, EventRecord, StepRecord, SystemRecord
from ...records.summary import DriverFacts, summarise
from ...records.text import UNKNOWN, count_text
from ...records.time_shares import resumed_seconds
from .series import checkpoint_pauses, end_translations, pauses, training_clock
from .series_arrays import NodeSeries, StepSeries, read_pieces, read_samples, read_steps


def number(value: Any) -> float | None:
    """Return a figure of a summary as a float, maybe non-finite; None for other values."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    return float(value) if isinstance(value, int | float) else None


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a unique label for each run directory, with parent folders or a number if needed."""
    parts = [path.resolve().parts for path in paths]
    depths = [1] * len(parts)
    while True:
        labels_so_far = [one_line("/".join(part[-depth:])) for part, depth in zip(parts, depths, strict=True)]
        counts = Counter(label for label, _ in set(zip(labels_so_far, parts, strict=True)))
        longer = [counts[label] > 1 and depth < len(part) for label, depth, part in zip(labels_so_far, depths, parts, strict=True)]
        if not any(longer):
            return _numbered(labels_so_far)
        depths = [depth + more for depth, more in zip(depths, longer, strict=True)]


def _numbered(names_given: Sequence[str]) -> list[str]:
    taken, numbered = set(names_given), []
    seen: set[str] = set()
    for label in names_given:
        names = itertools.chain([label], (f"{label} #{number}" for number in itertools.count(2)))
        numbered.append(next(name for name in names if name not in (seen if name == label else taken)))
        seen.add(label)
        taken.add(numbered[-1])
    return numbered


_STATES = {"died": "it was killed before it could write one", "failed": "it failed", "interrupted": "it was interrupted"}


class Run:
    """A run directory; its documents are read once, its updates and samples at each call.

    They raise DamagedRunError. `label`, `number` (from 0): identity among several runs. `recorded_until`: run clock of a computed summary.
    """

    def __init__(self, path: Path | str, *, label: str | None = None, number: int = 0) -> None:
        """Raises UsageError if `path` is no run directory."""
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
        """Return a run without records from ``summary.json``, ``job.json`` and ``env.json``'s nodes."""
        run = cls.__new__(cls)
        run.path, run.label, run.number, run.recorded_until = path, label, 0, None
        vars(run).update(
            _summary=summary, job=job, nodes=nodes, _environment=None, state=summary["state"], calibration=None, evals=[], events=[]
        )
        return run

    def with_figures(self, summary: Mapping[str, Any], recorded_until: float) -> Run:
        """Return the run with a summary computed from records up to `recorded_until`."""
        run = copy(self)
        vars(run).update(_summary=summary, recorded_until=recorded_until)
        return run

    def called(self, label: str, number: int = 0) -> Run:
        """Return the run under another label, with what has been read."""
        run = copy(self)
        run.label, run.number = label, number
        return run

    @property
    def own_name(self) -> str:
        """The directory's name, on one line."""
        return one_line(self.path.resolve().name)

    @property
    def name(self) -> str:
        """The label, or else the directory's name."""
        return self.label or self.own_name

    @cached_property
    def status(self) -> Mapping[str, Any]:
        """``status.json``."""
        return self._reader.status()

    @cached_property
    def diverged(self) -> Comparison | None:
        """``diverge.json``, None if missing."""
        return self._reader.diverged()

    @cached_property
    def state(self) -> str:
        """The state on first use; ``died`` if the driver of a running job is gone."""
        return state_now(self.status)

    @property
    def cause(self) -> str | None:
        """Why it ended, if recorded."""
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
        """The names of translation metrics, whose search differs in training and at the end."""
        return read_translation_metrics(self.job)

    @property
    def metrics_at_the_end(self) -> list[MetricInfo]:
        """The metrics of its final translation."""
        scores = (self._summary or {}).get("translated") or {}
        return [info for info in self.metrics if info.name in self.translation_metrics and scores.get(info.name) is not None]

    @cached_property
    def _environment(self) -> Mapping[str, Any] | None:
        return self._reader.environment()

    @cached_property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """The hardware of each node, from ``env.json``; empty if missing."""
        return [] if self._environment is None else list(self._environment["nodes"])

    @property
    def code(self) -> Mapping[str, Any] | None:
        """The code version, from ``env.json``; None for older releases."""
        code: Mapping[str, Any] | None = (self._environment or {}).get("code")
        return code

    @cached_property
    def _summary(self) -> Mapping[str, Any] | None:
        return self._reader.summary()

    @property
    def known_figures(self) -> Mapping[str, Any] | None:
        """The summary without fields of later releases, for lists: faster if not read yet."""
        return self._summary if "_summary" in vars(self) else self._reader.known_figures()

    @property
    def has_summary(self) -> bool:
        """Whether the run has figures."""
        return self._summary is not None

    @property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``. Raises UsageError with reason and fix if the run has none (yet)."""
        if self._summary is not None:
            return self._summary
        cause = f" ({self.cause})" if self.cause else ""
        advice = "Wait until it has ended." if self.state in ("starting", "running") else "Run it again, or leave it out."
        raise UsageError(f"run: {str(self.path)!r} has no summary.json; {_STATES.get(self.state, f'it is {self.state}')}{cause}. {advice}")

    @cached_property
    def calibration(self) -> Mapping[str, Any] | None:
        """``calibration.json``, the costs of a step's components; None if not measured."""
        return self._reader.calibration()

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
        """Return the updates as arrays, optionally with learning rates."""
        return read_steps(self.path, learning_rates)

    def node_series(self) -> list[NodeSeries]:
        """Return the resource samples of each node as arrays."""
        return self._node_series

    @cached_property
    def _node_series(self) -> list[NodeSeries]:
        return read_samples(self.path / "system.jsonl", resumed_seconds(self.job))

    @property
    def recorded_times(self) -> list[float]:
        """The times of evaluations and events on the run clock, in seconds."""
        return [*(record.time_seconds for record in self.evals), *(event.time_seconds for event in self.events)]

    @property
    def run_seconds(self) -> float | None:
        """The run clock at the end, or at the last evaluation or event; None if never started."""
        if self.has_summary:
            return float(self.summary["run_seconds"])
        known = self.recorded_times
        return max(known) if known and any(event.event in ("run_started", "run_resumed") for event in self.events) else None


def labelled(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, numbered, with unique labels."""
    names = labels([run.path for run in runs])
    return [run.called(run.label or label, number) for number, (run, label) in enumerate(zip(runs, names, strict=True))]


def finished_run(path: Path | str) -> Run:
    """Return a run with figures. Raises UsageError, DamagedRunError."""
    run = Run(path)
    _ = run.summary, run.job, run.nodes
    return run


def started_runs(runs: Iterable[Run]) -> list[Run]:
    """Return labelled runs in any state. Raises UsageError without a job, DamagedRunError."""
    known = list(runs)
    for run in known:
        if not (run.path / "job.json").is_file():
            raise UsageError(f"run: {str(run.path)!r} ended before anything was known about it (there is no job.json). Leave it out.")
        _ = run.state, run.job, run.nodes, run.has_summary
    return labelled(known)


def train_size(job: Mapping[str, Any]) -> int | None:
    """Return the number of training examples, from ``job.json``; None if unknown."""
    size = ((job.get("dataset") or {}).get("sizes") or {}).get("train")
    return size if isinstance(size, int) and size > 0 else None


def real_batch(job: Mapping[str, Any], batch: int) -> int:
    """Return the examples of a batch's largest update: at most all training examples."""
    return min(batch, train_size(job) or batch)


def count_examples(job: Mapping[str, Any], steps: int, batch: int) -> int:
    """Return the examples of `steps` updates; the last of an epoch may be smaller."""
    size = train_size(job)
    if size is None or job.get("batch_tokens") is not None:
        return steps * batch
    epochs, rest = divmod(steps, math.ceil(size / batch))
    return epochs * size + rest * batch


def batch_text(count: float | None, tokens: int | None) -> str:
    """Return a batch size as text; ``about 71 sentences`` for a budget of `tokens`."""
    if count is None or tokens is None:
        return UNKNOWN if count is None else count_text(count)
    return f"about {count_text(count)} sentence{'' if round(count) == 1 else 's'}"


def measurements(runs: Sequence[Run]) -> list[list[Run]]:
    """Group copies of one measurement: runs whose documents are all equal."""
    copies: dict[str, list[Run]] = {}
    for run in runs:
        copies.setdefault(_identity(run), []).append(run)
    return list(copies.values())


def _identity(run: Run) -> str:
    figures = {key: value for key, value in run.summary.items() if key != "run"}
    return json.dumps([figures, dict(run.job), [dict(node) for node in run.nodes]], sort_keys=True, default=str)


def diverged(summary: Mapping[str, Any]) -> str | None:
    """Return since when the loss was non-finite to the end, such as ``from step 3 on``, if so."""
    if (step := summary.get("non_finite_from_step")) is not None:
        return f"from step {step:,} on"
    losses = (number(value) for value in (summary.get("final_train_loss"), (summary.get("eval") or {}).get("loss")))
    return "at the end" if all(loss is not None and not math.isfinite(loss) for loss in losses) else None


def diverged_text(summary: Mapping[str, Any]) -> str | None:
    """Return a sentence on the divergence of a run, if any."""
    since = diverged(summary)
    return None if since is None else f"The loss was not finite (NaN or infinite) {since}: speed and resources are not those of training."


_Line: Any = msgspec.defstruct("StepRecord", [("count", int)], gc=False)


def lost_updates(run: Run) -> str | None:
    """Return a sentence (without full stop) on damaged records of a successful run, if any."""
    if not run.has_summary or run.summary.get("state") != "succeeded":
        return None
    path, made = run.path / "steps.jsonl", int(run.summary["steps"])
    try:
        recorded = sum(line.count for lines in read_pieces(path, _Line) for line in lines)
    except DamagedRunError as error:
        return str(error).removesuffix(".")
    if recorded == made:
        return None
    what = f"holds {recorded:,} of the {made:,} updates" if path.exists() else f"is missing, with the {made:,} updates"
    return f"{path} {what} that the run made: it was changed after the run; tables have the run's own figures, curves what is left"


def as_recorded(run: Run) -> Run:
    """Return the run with a summary, computed if needed. Raises UsageError without updates."""
    if run.has_summary:
        return run
    updates = math.fsum(record.count for record in run.steps())
    if not updates:
        advice = "wait until it trains" if run.state in ("starting", "running") else "there is nothing to explain"
        raise UsageError(f"run: {str(run.path)!r} has no summary.json and no record of an update, for it is {run.state}; {advice}.")
    clock = _clock(run)
    sizes: Mapping[str, Any] = (run.job.get("dataset") or {}).get("sizes") or {}
    summary = summarise(
        run.path,
        clock,
        state=cast("RunState", run.status["state"]),
        updates_scheduled=int(updates),
        updates_applied=None,
        examples_per_epoch=sizes.get("train"),
        facts=DriverFacts(nodes_sharing_cores=_nodes_sharing_cores(run)),
    )
    return run.with_figures(summary, clock.run_seconds)


def _clock(run: Run) -> Clock:
    times = run.recorded_times
    last = max([*times, *(record.time_seconds for record in run.steps())])
    init = max(0.0, -min(times, default=0.0))
    saving = math.fsum(end - start for start, end in checkpoint_pauses(run.events))
    evaluating = math.fsum(record.seconds for record in run.evals)
    translated = end_translations(run.events)
    translating = math.fsum(end - start for start, end in translated)
    train = float(training_clock(np.array([last]), sorted([*pauses(run.evals, run.events), *translated]))[0])
    return Clock(init, last, max(0.0, train), evaluating, saving, init + last, translate_seconds=translating)


def _nodes_sharing_cores(run: Run) -> int | None:
    if not run.nodes or run.job.get("cores_per_node"):
        return None
    return max(Counter(str(node.get("hostname")) for node in run.nodes).values())


_PLACE = ("out", "name")  # the output location has no effect on the run


def repeat_command(described: Mapping[str, Any], environ: Container[str] = ()) -> str:
    """Return a ``trainer run`` with all settings not at their defaults, or set in `environ`."""
    words = ["trainer", "run"]
    idle = idle_settings({**Job().model_dump(), **described})
    for field, info in Job.model_fields.items():
        value = described.get(field)
        if field in (*_PLACE, *idle) or value is None or (value == info.default and environment_name(field) not in environ):
            continue
        if is_boolean(field):
            words.append(flag_name(field) if value else f"--no-{flag_name(field)[2:]}")
        else:
            words += [flag_name(field), ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def config_text(job: Mapping[str, Any]) -> str:
    """Return the job as a TOML file for `--config`: every setting with a value but its place."""
    fields = [field for field in Job.model_fields if field not in _PLACE and job.get(field) is not None]
    return "".join(f"{field} = {json.dumps(job[field], ensure_ascii=False)}\n" for field in fields).replace("\x7f", "\\u007f")
