"""Resuming a run: the checkpoint, the resulting job, and whether they match."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import State, batch_lengths
from ...checkpoint import Checkpoint, DamagedCheckpointError, find_checkpoint, is_checkpoint
from ...checkpoint.meta import Meta
from ...checkpoint.reader import data_problem, model_problem
from ...core.console import note
from ...core.errors import UsageError
from ...core.job import Job, split_digest
from ...core.plugins import BUILT_IN, SEPARATE, available, is_reference, model_base
from ...core.schedules import SCHEDULES
from ...core.settings.job_fields import DECLARED, fields_with_role, flag_name
from ...core.settings.personal import PERSONAL_OPTIONS
from ...core.settings.sources import BUDGETS, Resolved, ResumedRun, resolve, shipped
from ...core.units import Target
from ...core.update_rules import EMA, slot_names
from ...data.sampler import run_sampler
from ...data.store.stored_dataset import StoredDataset, open_dataset
from ...engine.epochs import DataCursor, EpochIndex
from ...engine.policies import Triggers
from ...engine.protocol.state_transfer import state_from_arrays
from ...engine.translation import described
from ...models.base import ModelSpec
from ...models.build import build_model, written_out
from ...models.imported.description import file_digest
from ...models.losses import resolved_loss
from ...models.objectives import Objective
from ...records.store.heartbeat import SILENT_SECONDS, is_silent
from ...records.store.run_directory import RunReader
from .position import Origin, Resumption, cursor_from_meta, later_checkpoints

# Run directories are untrusted: only the user may choose code, destinations and outside paths, by typing them or with ``--trust-run``.
TRUST_RUN = "--trust-run"
CONFIG = "config"  # settings file of a sweep; not a setting of a job
LINK = "link"  # link that leads out of a run directory or a sweep's folder


def _is_module(value: Any) -> bool:
    """Return whether a model's text names code of the user's; imports none."""
    if not isinstance(value, str):
        return False
    base = model_base(value)
    return is_reference(base) or ("." in base and base not in available("model"))


def _names_a_path(value: Any) -> bool:
    """Return whether a dataset's arguments name a folder; third-party arguments may."""
    if not isinstance(value, str) or ":" not in value:
        return False
    if value.partition(":")[0] not in {*SEPARATE["dataset"], *(plugin.name for plugin in BUILT_IN["dataset"])}:
        return True
    from ...data.store.location import resolve

    try:
        return resolve(value).folder_in_name
    except UsageError:
        return False  # reported where the value is used


def _is_given(value: Any) -> bool:
    return value not in (None, "")


def _is_user_file(value: Any) -> bool:
    return value is not None and value not in shipped()


_USES: Mapping[str, str] = {  # what the command would do with such a value
    **{name: declared.foreign for name, declared in DECLARED.items() if declared.foreign is not None},
    CONFIG: "read the settings of the file {}",
    LINK: "write through the link {}",
}
_IS_MEANT: Mapping[str, Callable[[Any], bool]] = {"model": _is_module, "data": _names_a_path, CONFIG: _is_user_file}


def foreign_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run's files may not decide."""
    return {field: value for field, value in settings.items() if field in _USES and _IS_MEANT.get(field, _is_given)(value)}


def refuse_foreign(settings: Mapping[str, Any], source: Path, typed: Collection[str], *, trusted: bool) -> None:
    """Raise UsageError if settings from files of `source` need trust; imports nothing.

    `typed` are the fields for which the command has an option.
    """
    foreign = {} if trusted else foreign_settings(settings)
    if not foreign:
        return
    uses = " and ".join(_USES[field].format(repr(value)) for field, value in foreign.items())
    again = f", or type {' and '.join(map(flag_name, foreign))} yourself" if set(foreign) <= set(typed) else ""
    raise UsageError(
        f"run: the files of {str(source)!r} would have this command {uses}, which a run's files alone do not decide, as they may come from "
        f"anybody. If you know them, add {TRUST_RUN}{again}."
    )


def refuse_personal(document: Mapping[str, Any], source: Path) -> None:
    """Raise UsageError if a run's file has `PERSONAL_OPTIONS`, which no run writes."""
    named = sorted(PERSONAL_OPTIONS.keys() & document.keys())
    if named:
        raise UsageError(
            f"run: {str(source)!r} has {', '.join(named)}, which the files of a run never decide, and which trainer writes into none: this "
            f"file is not as it was written. Take {'it' if len(named) == 1 else 'them'} out, and give "
            f"{', '.join(PERSONAL_OPTIONS[name].flag for name in named)} yourself."
        )


def trust_flag(*settings: Mapping[str, Any]) -> str:
    """Return the option that a resume with these settings needs: `` --trust-run``, or nothing."""
    return f" {TRUST_RUN}" if any(map(foreign_settings, settings)) else ""


def _refuse_special_files(run: Path) -> None:
    """Raise UsageError for a special file in a run directory: opening a pipe may block forever."""
    for folder, _, files in os.walk(run):  # does not follow links
        for name in files:
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:  # removed by a running run
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                special = os.path.relpath(path, run)
                raise UsageError(f"run: {special!r} in {str(run)!r} is neither a file nor a folder, and no run has written it. Remove it.")


def links_outside(run: Path) -> Iterator[str]:
    """Yield the links that lead out of a run directory or a sweep's folder, relative to it."""
    root = os.path.realpath(run)
    for folder, folders, files in os.walk(root):  # does not follow links
        for name in sorted((*folders, *files)):
            path = os.path.join(folder, name)
            if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(root):
                yield os.path.relpath(path, root)


_RELEASE = re.compile(r"(?<=\|version:)[^|]+")  # version of sacrebleu in a signature


def score_problem(recorded: Mapping[str, Any], job: Job, objective: Objective, test_examples: int) -> list[str]:
    """Return how scores would differ from the run's, with the fix: at most one sentence.

    Raises MissingPackageError if sacrebleu is not installed.
    """
    before = (recorded.get("translation_signatures") or {}).get("training")
    if before is None or objective.translation is None:
        return []
    now = described(job, objective, test_examples)
    if now is None or now["training"] == before:
        return []
    remedies = []
    if (sentences := recorded.get("eval_sentences")) not in (None, job.eval_sentences):
        remedies.append(f"give --eval-sentences {sentences}")
    releases = [None if version is None else version[0] for version in map(_RELEASE.search, (before, now["training"]))]
    if None not in releases and releases[0] != releases[1]:
        remedies.append(f"install the release of sacrebleu that it had: pip install sacrebleu=={releases[0]}")
    remedy = f" ({', and '.join(remedies)})" if remedies else ""
    return [f"evaluations would be scored by {now['training']!r}, and so far they were by {before!r}{remedy}"]


IDENTITY = ("model", "data", "seed")  # may differ from the checkpoint's only with ``--force``
_MEASURED = frozenset(  # if one of these changes, ``--compile auto`` measures again
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


@dataclass(frozen=True)
class _SavedRun:
    path: Path
    reader: RunReader
    checkpoint: Checkpoint
    damaged: Sequence[DamagedCheckpointError]
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        return {field: self.document[field] for field in Job.model_fields if field in self.document}

    @property
    def initial_weights(self) -> Path | None:
        recorded = self.document.get("initial_weights")
        return None if recorded is None else Path(str(recorded))


@dataclass(frozen=True)
class _Match:
    model: ModelSpec
    data: StoredDataset
    problems: Sequence[str]  # differences that ``--force`` allows
    same_data: bool


def load_resumption(
    target: Path, flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None, *, force: bool, trusted: bool = False
) -> Resumption:
    """Read the run or checkpoint to resume, and apply the given settings to the run's job.

    Raises UsageError if there is no valid checkpoint, the run is at work or complete; without `force` if model, data or seed differ from
    the checkpoint or scores would not be comparable; without `trusted` if the run's files decide what they may not (`refuse_foreign`).
    """
    saved = _read_run(target, force=force)
    resolved = _resolve_settings(saved, flags, environ, config, trusted=trusted)
    match = _match_training(saved, resolved.job, force=force)
    job = resolved.job.model_copy(update={"initial_weights": saved.initial_weights})  # typed ones have the same content, or no effect
    return _prepare(saved, replace(resolved, job=job), match)


def _read_run(target: Path, *, force: bool) -> _SavedRun:
    path = target.resolve().parent.parent if is_checkpoint(target) else target
    reader = RunReader(path)
    refuse_at_work(reader, force=force)
    try:
        checkpoint, damaged = find_checkpoint(target)
    except DamagedCheckpointError as error:
        raise UsageError(str(error)) from error
    document = reader.job()
    refuse_personal(document, path / "job.json")
    return _SavedRun(path, reader, checkpoint, damaged, document)


def _resolve_settings(
    saved: _SavedRun, flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None, *, trusted: bool
) -> Resolved:
    """Apply the given settings to the run's, with the checkpoint's model, data and seed."""
    meta, not_kept = saved.checkpoint.meta, {"out", "name"}
    for place in ("out", "name"):
        if place in flags:
            raise UsageError(f"--{place}: a resumed run continues in its own directory, {str(saved.path)!r}")
    if flags.get("mode") == "sync" and "ps" not in flags:
        not_kept.add("ps")  # async mode only, so not to be reset by the user
    if flags.get("optimizer", "sgd") != "sgd":
        not_kept |= {"momentum", "nesterov"}  # SGD only
    fields = {field: value for field, value in saved.settings.items() if field not in not_kept}
    fields |= {field: meta.job[field] for field in IDENTITY}
    if meta.job["data"] != saved.settings["data"]:
        fields["data_dir"] = meta.job["data_dir"]
    admit = _admission(saved.path, trusted=trusted)
    seen = _examples_seen(saved.document, meta)
    run = ResumedRun(fields, saved.name, meta.step, meta.epoch + (meta.examples > 0), admit, seen)
    resolved = resolve(flags, environ, config, run)
    job = written_out(resolved.job).model_copy(update={"out": saved.path.resolve().parent, "name": saved.name})
    return replace(resolved, job=job)


def _match_training(saved: _SavedRun, job: Job, *, force: bool) -> _Match:
    meta = saved.checkpoint.meta
    differing = [field for field in IDENTITY if getattr(job, field) != meta.job[field]]
    problems = [f"{field} is {getattr(job, field)!r} instead of {meta.job[field]!r}" for field in differing] + _weights_problem(job, saved)
    if "model" in differing and model_base(job.model) == model_base(meta.job["model"]) and not force:
        more = f" The rest differs as well: {'; '.join(problems[1:])}." if len(problems) > 1 else ""
        raise UsageError(
            f"resume: the checkpoint is of the model {meta.job['model']!r}, and {job.model!r} has other arguments. Type its name with "
            f"them: --model {shlex.quote(meta.job['model'])}; or begin another training from it with --force.{more}"
        )
    _require_same_training(problems, force=force)
    data = open_dataset(job.data, job.data_dir)
    model = build_model(job.model, data.info, resolved_loss(job.loss, data))
    data_problems = data_problem(data, meta)
    if "model" not in differing:
        problems += model_problem(model, meta)
    if "data" not in differing:
        problems += data_problems
    if not data_problems and not {"model", "data"} & set(differing):
        problems += score_problem(saved.document, job, model.objective, data.info.sizes["test"])
    _require_same_training(problems, force=force)
    return _Match(model, data, problems, same_data=not data_problems)


def _weights_problem(job: Job, saved: _SavedRun) -> list[str]:
    """Return how a job's initial weights differ from the run's: at most one sentence."""
    before, patterns = saved.initial_weights, saved.document.get("initial_weights_except")
    if job.initial_weights is not None:
        path, _ = split_digest(job.initial_weights)
        if before is None or split_digest(before)[1] != file_digest(path):
            return [f"the content of {str(path)!r} is not the initial weights that the run began with"]
    if job.initial_weights_except != patterns:
        return [f"initial_weights_except is {job.initial_weights_except!r} instead of {patterns!r}"]
    return []


def _prepare(saved: _SavedRun, resolved: Resolved, match: _Match) -> Resumption:
    job, checkpoint, meta, before = resolved.job, saved.checkpoint, saved.checkpoint.meta, saved.settings
    cursor = cursor_from_meta(meta) if match.same_data else DataCursor(meta.step, meta.epoch, 0)
    state, dropped = _state(checkpoint, job, meta.job, match.model)
    destinations = fields_with_role("destination")
    compared = {field: value for field, value in job.model_dump(mode="json").items() if field in before and field not in destinations}
    changed = {field: (before[field], value) for field, value in compared.items() if before[field] != value}
    sampler = run_sampler(job, match.data.info.sizes["train"], batch_lengths(job, match.data))
    _require_remaining_steps(saved.reader, job, EpochIndex(sampler, cursor), resolved)
    notes = [f"{error} The one before it is used." for error in saved.damaged]
    notes.append(f"resuming {saved.name} from step {meta.step:,} (epoch {cursor.epoch + 1}, {cursor.examples:,} examples into it)")
    if later := later_checkpoints(saved.path, checkpoint):
        names = ", ".join(path.name for path in reversed(later))
        notes.append(f"later steps are repeated: once training resumes, their records and {names} are removed")
    origin = Origin.from_checkpoint(saved.path, checkpoint, saved.damaged, state, cursor)
    target = None if job.until is None else Target.parse(job.until)
    evaluations = origin.start.evaluations
    reached = next((record for record in evaluations if target is not None and target.reached(record.figure(target.metric))), None)
    if reached is not None and not (resolved.sources["until"].startswith("run ") and _stopped_by(saved.reader, job, meta.run_seconds)):
        notes.append(f"an evaluation after step {reached.step:,} reached {job.until} already; this part ends at the next one that does")
        reached = None
    notes += [f"going on although {problem} (--force)" for problem in match.problems] + dropped
    if SCHEDULES[job.schedule].ends_with_training and any(before.get(field) != getattr(job, field) for field in BUDGETS):
        course = f"the {job.schedule} of the learning rate"
        notes.append(f"{course} now reaches to the new end of training, so the rate resumes from a higher value")
    if reached is not None:
        origin = replace(origin, start=replace(origin.start, time_to_target_seconds=reached.time_seconds))
    compiled = None if _MEASURED & changed.keys() else saved.document.get("compiled")
    return Resumption(saved.path, resolved, origin, changed, saved.document.get("segments", ()), tuple(notes), compiled)


def _require_same_training(problems: Sequence[str], *, force: bool) -> None:
    if problems and not force:
        raise UsageError(f"resume: the checkpoint does not match this job: {'; '.join(problems)}. Use --force to resume anyway.")


def refuse_at_work(reader: RunReader, *, force: bool = False, watch_seconds: float = SILENT_SECONDS) -> None:
    """Raise UsageError for a run at work, and for special files in its directory."""
    _refuse_special_files(reader.path)
    if reader.state() not in ("starting", "running"):
        return
    driver = reader.status()["driver"]
    active = f"resume: the run {reader.name} is still at work (process {driver['pid']} on {driver['host']})"
    if reader.driver_alive() is not None:
        raise UsageError(active)
    if force:
        return
    note(f"the run {reader.name} was at work on {driver['host']}; whether it still is will be known in {watch_seconds:g} s")
    silent = is_silent(reader.path, watch_seconds)  # watches a run whose driver was on another host
    if silent is None:
        raise UsageError(f"{active}, or it ended without recording its status; use --force to resume it")
    if not silent:
        raise UsageError(active)
    note(f"the driver on {driver['host']} has given no sign of life for {watch_seconds:g} s and is taken for gone")


def _examples_seen(described: Mapping[str, Any], meta: Meta) -> int | None:
    size = ((described.get("dataset") or {}).get("sizes") or {}).get("train")
    return meta.epoch * size + meta.examples if isinstance(size, int) else None


def _require_remaining_steps(reader: RunReader, job: Job, calendar: EpochIndex, resolved: Resolved) -> None:
    """Raise UsageError if the run is complete and not extended; lost checkpoints are repeated."""
    total, step = Triggers(job, calendar).total, calendar.start.step
    summary = reader.summary()
    done = step if summary is None else max(step, summary["steps"])
    extended = any(not resolved.sources[field].startswith(("run ", "default")) for field in (*BUDGETS, "until", "patience"))
    finished = reader.status()["state"] == "succeeded"
    if total < step or (finished and (total == step or (step == done and not extended))):
        budget = next((f"{getattr(job, field):,} {field}" for field in BUDGETS if getattr(job, field) is not None), None)
        what = budget or "the default epochs"
        raise UsageError(
            f"resume: the run {reader.name} has done {step:,} steps and its job ends with {what}; "
            "say how much further it is to go: --epochs +1, --steps +500 or --examples +5000"
        )


def _state(checkpoint: Checkpoint, job: Job, before: Mapping[str, Any], spec: ModelSpec) -> tuple[State, list[str]]:
    """Return the checkpoint's state as far as it fits the job, and notes on dropped parts."""
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
    updates = int(meta.spent.get("updates", meta.step))  # including those skipped by a loss scale
    state = state_from_arrays(arrays, updates, meta.scalars if before.get("precision") == job.precision else {})
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    if {name: value.shape for name, value in state.parameters.items()} != shapes:
        state = _fill_missing_parameters(state, spec, job.seed)
        notes.append("parameters that are not in the checkpoint, or have another shape there, begin at their initial values")
    return state, notes


def _fill_missing_parameters(state: State, spec: ModelSpec, seed: int) -> State:
    def fill(initial: Mapping[str, NDArray[np.float32]], known: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        return {name: known[name] if name in known and known[name].shape == value.shape else value for name, value in initial.items()}

    buffers = fill(spec.initial_buffers(seed), state.buffers)
    return State(fill(spec.initial(seed), state.parameters), {}, state.updates, buffers, state.scalars)


def _stopped_by(reader: RunReader, job: Job, run_seconds: float) -> bool:
    """Return whether the target ended an earlier segment, and was not given later."""
    events = (event for event in reader.events() if event.event == "target_reached" and event.time_seconds <= run_seconds)
    return any(event.detail.get("target") == job.until for event in events)


def _admission(path: Path, *, trusted: bool) -> Callable[[Mapping[str, Any]], None]:
    """Refuse links out of a run directory; return the check of settings from its files."""
    refuse_foreign({LINK: next(links_outside(path), None)}, path, (), trusted=trusted)
    return partial(refuse_foreign, source=path, typed=Job.model_fields, trusted=trusted)


def earlier_run(path: Path, *, trusted: bool) -> ResumedRun:
    """Return a run's settings for a new run, except its name and place.

    Raises UsageError if its files decide what they may not (`refuse_foreign`), DamagedRunError if they are unreadable.
    """
    described = RunReader(path).job()
    refuse_personal(described, path / "job.json")
    fields = {field: described[field] for field in Job.model_fields if field in described and field not in ("out", "name")}
    return ResumedRun(fields, path.resolve().name, None, None, _admission(path, trusted=trusted))
