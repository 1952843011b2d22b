"""Prepares to resume a run: which checkpoint to load, which job results, and whether the two belong to the same training."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import State, batch_lengths
from ...checkpoint import Checkpoint, DamagedCheckpointError, find_checkpoint, is_checkpoint
from ...checkpoint.compatibility import data_problem, model_problem
from ...checkpoint.meta import Meta
from ...core.errors import UsageError
from ...core.job import Job
from ...core.plugins import model_base
from ...core.settings.sources import BUDGETS, Resolved, ResumedRun, resolve
from ...core.units import Target
from ...core.untrusted.console import note
from ...core.update_rules import EMA, slot_names
from ...data.sampler import run_sampler
from ...data.store.stored_dataset import open_dataset
from ...engine.epochs import DataCursor, EpochIndex
from ...engine.protocol.codec import state_from_arrays
from ...engine.triggers import Triggers
from ...models.base import ModelSpec
from ...models.build import build_model, written_out
from ...records.loggers.curve_points import NOT_SETTINGS
from ...records.schema import EvalRecord
from ...records.store.heartbeat import SILENT_SECONDS, is_silent
from ...records.store.run_directory import RunReader
from .origin import Origin, cursor_of, evaluations_until, later_checkpoints, resume_point, saved_figures
from .score_signature import score_problem
from .trust import LINK, links_outside, refuse_foreign, refuse_personal, refuse_special_files

__all__ = ["Resumption", "load_resumption", "refuse_at_work"]

IDENTITY = ("model", "data", "seed")
"""What makes a training this training: that of the checkpoint is gone on with, another one with ``--force`` only."""


_MEASURED = frozenset(
    {
        "compile",
        "backend",
        "mode",
        "model",
        "device",
        "precision",
        "batch_size",
        "global_batch_size",
        "accumulate",
        "threads",
        "deterministic",
    }
)
"""What ``--compile auto`` has chosen for: with another value of one of these it measures anew."""


@dataclass(frozen=True)
class Resumption:
    """A run that is to go on, read and verified; nothing of it has been changed yet.

    `changed` maps each field of the job that differs from the run's to both values. `segments` describes the segments of the run so far.
    `notes` are for the user. `compiled`: what ``--compile auto`` has chosen, where the run goes on as it was when that was measured.
    """

    path: Path
    resolved: Resolved
    origin: Origin
    changed: Mapping[str, tuple[Any, Any]]
    segments: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...]
    compiled: bool | None = None

    @property
    def run_seconds(self) -> float:
        """The run clock at the checkpoint."""
        return self.origin.run_seconds


def load_resumption(
    target: Path, flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None, *, force: bool, trusted: bool = False
) -> Resumption:
    """Read what ``--resume`` names, a run directory or a checkpoint within one, and lay the given settings over the run's job.

    Raises UsageError where nothing sound is there, where the run is still at work or has nothing left to do, unless `force` where
    model, data or seed are not those of the checkpoint or scores would not be comparable with those so far, and unless `trusted` where
    the run's files decide what they may not (`trust`).
    """
    path = target.resolve().parent.parent if is_checkpoint(target) else target
    reader = RunReader(path)
    refuse_at_work(reader, force=force)
    try:
        checkpoint, damaged = find_checkpoint(target)
    except DamagedCheckpointError as error:
        raise UsageError(str(error)) from error
    meta, described = checkpoint.meta, reader.job()
    refuse_personal(described, path / "job.json")
    before = {field: described[field] for field in Job.model_fields if field in described}
    for own in ("out", "name"):
        if own in flags:
            raise UsageError(f"--{own}: a resumed run continues in its own directory, {str(path)!r}")
    given_name, origin = path.resolve().name, meta.job
    fields = {key: value for key, value in before.items() if key not in ("out", "name")}
    fields |= {field: origin[field] for field in IDENTITY}
    if origin["data"] != before["data"]:
        fields["data_dir"] = origin["data_dir"]
    if flags.get("mode") == "sync" and "ps" not in flags:
        del fields["ps"]  # what only async mode knows does not have to be taken back by hand
    if flags.get("optimizer", "sgd") != "sgd":
        fields = {key: value for key, value in fields.items() if key not in ("momentum", "nesterov")}  # nor what only SGD knows
    refuse_foreign({LINK: next(links_outside(path), None)}, path, (), trusted=trusted)
    admit = partial(refuse_foreign, source=path, typed=Job.model_fields, trusted=trusted)
    seen = _examples_seen(described, meta)
    resolved = resolve(flags, environ, config, ResumedRun(fields, given_name, meta.step, meta.epoch + (meta.examples > 0), admit, seen))
    job = written_out(resolved.job).model_copy(update={"out": path.resolve().parent, "name": given_name})
    resolved = replace(resolved, job=job)

    differing = [field for field in IDENTITY if getattr(job, field) != origin[field]]
    problems = [f"{field} is {getattr(job, field)!r} instead of {origin[field]!r}" for field in differing]
    if "model" in differing and model_base(job.model) == model_base(origin["model"]) and not force:
        others = f" The rest differs as well: {'; '.join(problems[1:])}." if len(problems) > 1 else ""
        raise UsageError(
            f"resume: the checkpoint is of the model {origin['model']!r}, and {job.model!r} has other arguments. Type its name with them: "
            f"--model {shlex.quote(origin['model'])}; or begin another training from it with --force.{others}"
        )
    _require_same_training(problems, force=force)
    data = open_dataset(job.data, job.data_dir)
    spec: ModelSpec = build_model(job.model, data.info)
    other_data = data_problem(data, meta)
    problems += [*([] if "model" in differing else model_problem(spec, meta)), *([] if "data" in differing else other_data)]
    if not (other_data or {"model", "data"} & set(differing)):
        problems += score_problem(described, job, spec.objective, data.info.sizes["test"])
    _require_same_training(problems, force=force)
    cursor = DataCursor(meta.step, meta.epoch, 0) if other_data else cursor_of(meta)
    state, dropped = _state(checkpoint, job, origin, spec)
    compared = {field: value for field, value in job.model_dump(mode="json").items() if field in before and field not in NOT_SETTINGS}
    changed = {field: (before[field], value) for field, value in compared.items() if before[field] != value}
    sampler = run_sampler(job, data.info.sizes["train"], batch_lengths(job, data))
    _require_remaining_steps(reader, job, EpochIndex(sampler, cursor), resolved)
    notes = [*(f"{error} The one before it is used." for error in damaged)]
    notes.append(f"resuming {given_name} from step {meta.step:,} (epoch {cursor.epoch + 1}, {cursor.examples:,} examples into it)")
    if later := later_checkpoints(path, checkpoint):
        names = ", ".join(other.name for other in reversed(later))
        notes.append(f"later steps are repeated: once training resumes, their records and {names} are removed")
    evals = evaluations_until(reader, checkpoint)
    reached = _reached(job.until, evals)
    if reached is not None and not (resolved.sources["until"].startswith("run ") and _stopped_by(reader, job, meta.run_seconds)):
        notes.append(f"an evaluation after step {reached.step:,} reached {job.until} already; this part ends at the next one that does")
        reached = None
    notes += [f"going on although {problem} (--force)" for problem in problems] + dropped
    if job.schedule == "cosine" and any(before.get(field) != getattr(job, field) for field in BUDGETS):
        notes.append("the cosine of the learning rate now reaches to the new end of training, so the rate resumes from a higher value")
    start = resume_point(cursor, evals, saved_figures(path, meta.step), meta.spent, None if reached is None else reached.time_seconds)
    return Resumption(
        path,
        resolved,
        Origin(start, state, checkpoint, meta.spent, tuple(damaged)),
        changed,
        described.get("segments", ()),
        tuple(notes),
        None if _MEASURED & changed.keys() else described.get("compiled"),
    )


def _require_same_training(problems: Sequence[str], *, force: bool) -> None:
    if problems and not force:
        raise UsageError(f"resume: the checkpoint does not match this job: {'; '.join(problems)}. Use --force to resume anyway.")


def refuse_at_work(reader: RunReader, *, force: bool = False, watch_seconds: float = SILENT_SECONDS) -> None:
    """Raise UsageError for a run at work, and for a directory that nobody could open without waiting.

    A run whose driver was on another host is watched for a while; `force` says that it is gone.
    """
    refuse_special_files(reader.path)
    if reader.state() not in ("starting", "running"):
        return
    driver = reader.status()["driver"]
    told = f"resume: the run {reader.name} is still at work (process {driver['pid']} on {driver['host']})"
    if reader.driver_alive() is not None:
        raise UsageError(told)
    if force:
        return
    note(f"the run {reader.name} was at work on {driver['host']}; whether it still is will be known in {watch_seconds:g} s")
    silent = is_silent(reader.path, watch_seconds)
    if silent is None:
        raise UsageError(f"{told}, or it ended without recording its status; use --force to resume it")
    if not silent:
        raise UsageError(told)
    note(f"the driver on {driver['host']} has given no sign of life for {watch_seconds:g} s and is taken for gone")


def _examples_seen(described: Mapping[str, Any], meta: Meta) -> int | None:
    """Return how many examples a run has trained on by its checkpoint; None where it does not tell how many an epoch has."""
    size = ((described.get("dataset") or {}).get("sizes") or {}).get("train")
    return meta.epoch * size + meta.examples if isinstance(size, int) else None


def _require_remaining_steps(reader: RunReader, job: Job, calendar: EpochIndex, resolved: Resolved) -> None:
    """Raise UsageError where the run has come to its end and nobody says how much further it is to go.

    A run that succeeded and whose newest checkpoint is gone, or passed over, has the rest to do anew.
    """
    total, step = Triggers(job, calendar).total, calendar.start.step
    summary = reader.summary()
    done = step if summary is None else max(step, summary["steps"])
    extended = any(not resolved.sources[field].startswith(("run ", "default")) for field in (*BUDGETS, "until", "patience"))
    finished = reader.status()["state"] == "succeeded"
    if total < step or (finished and (total == step or (step == done and not extended))):
        given = next((f"{getattr(job, field):,} {field}" for field in BUDGETS if getattr(job, field) is not None), None)
        what = given or "the default epochs"
        raise UsageError(
            f"resume: the run {reader.name} has done {step:,} steps and its job ends with {what}; "
            "say how much further it is to go: --epochs +1, --steps +500 or --examples +5000"
        )


def _state(checkpoint: Checkpoint, job: Job, before: Mapping[str, Any], spec: ModelSpec) -> tuple[State, list[str]]:
    """Return the checkpoint's state as far as it fits the job, and what had to be left out, in words."""
    meta, notes = checkpoint.meta, []
    arrays: dict[str, NDArray[Any]] = dict(checkpoint.arrays)
    if any(before.get(field) != getattr(job, field) for field in ("optimizer", "momentum", "ema_decay")):
        left_out = {key.split("/")[1] for key in arrays if key.startswith("slots/")} - set(slot_names(job))
        arrays = {key: value for key, value in arrays.items() if not (key.startswith("slots/") and key.split("/")[1] in left_out)}
        if EMA in left_out:
            notes.append("the moving average of the weights is dropped, as --ema-decay is 0")
        if left_out - {EMA}:
            notes.append(f"the optimizer changed: {', '.join(sorted(left_out - {EMA}))} of the one before is dropped")
    if job.ema_decay and not any(key.startswith(f"slots/{EMA}/") for key in arrays):
        notes.append("the moving average of the weights begins here, as the weights of the checkpoint")
    updates = int(meta.spent.get("updates", meta.step))  # those that a loss scale made change nothing are counted, too
    state = state_from_arrays(arrays, updates, meta.scalars if before.get("precision") == job.precision else {})
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    if {name: value.shape for name, value in state.parameters.items()} != shapes:
        state = _fill_missing_parameters(state, spec, job.seed)
        notes.append("parameters that are not in the checkpoint, or have another shape there, begin at their initial values")
    return state, notes


def _fill_missing_parameters(state: State, spec: ModelSpec, seed: int) -> State:
    """Return the parts of a state that a model has too, the others at their initial values; slots begin anew."""

    def fill(initial: Mapping[str, NDArray[np.float32]], known: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        return {name: known[name] if name in known and known[name].shape == value.shape else value for name, value in initial.items()}

    buffers = fill(spec.initial_buffers(), state.buffers)
    return State(fill(spec.initial(seed), state.parameters), {}, state.updates, buffers, state.scalars)


def _stopped_by(reader: RunReader, job: Job, run_seconds: float) -> bool:
    """Return whether the target ended a segment of the run before the checkpoint; it may have been given after it had been reached."""
    events = (event for event in reader.events() if event.event == "target_reached" and event.time_seconds <= run_seconds)
    return any(event.detail.get("target") == job.until for event in events)


def _reached(until: str | None, evals: Sequence[EvalRecord]) -> EvalRecord | None:
    """Return the evaluation that reached the target first, if one did."""
    if until is None:
        return None
    target = Target.parse(until)
    return next((record for record in evals if target.reached(record.figure(target.metric))), None)
