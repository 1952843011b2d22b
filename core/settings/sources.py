"""From layers to a job: flags > ``TRAINER_*`` environment > ``--config`` TOML > defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..bounded_json import parse_toml
from ..console import one_line
from ..errors import MissingPackageError, UsageError
from ..job import Job
from ..plugins import (
    BUILT_IN,
    NO_MODULE,
    Kind,
    Plugin,
    available,
    find,
    forward_plugin,
    is_reference,
    load,
    missing_packages,
    model_base,
    module_exists,
    plugin_code,
)
from ..suggestions import nearest
from .job_fields import (
    ENVIRONMENT_PREFIX,
    GivenValue,
    allowed,
    as_usage_error,
    environment_name,
    flag_name,
    idle_settings,
    is_boolean,
    merge_layers,
    requirement_flags,
    takes_list,
    value_shown,
)
from .personal import PERSONAL_OPTIONS, personal_file

MAX_CONFIG_BYTES = 1 << 20
SWEEP = "sweep"  # a file's table for `trainer sweep`; no setting of a job


def shipped() -> dict[str, Traversable]:
    """Return the shipped configurations by name."""
    configs = {Path(entry.name).stem: entry for entry in files("crosstrain.configs").iterdir() if entry.name.endswith(".toml")}
    return dict(sorted(configs.items()))


def read_config(config: Path | str) -> tuple[str, dict[str, Any]]:
    """Return the label (``file PATH``) and keys of a file or shipped name. Raises UsageError."""
    place, source = _locate(config)
    try:
        with source.open("rb") as file:  # may be a pipe
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--config: {place} cannot be read: {error.strerror}.") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError(f"--config: {place} is larger than {MAX_CONFIG_BYTES >> 20} MiB, the most that is read of one.")
    return place, parse_toml(data, "--config", place)


def _locate(config: Path | str) -> tuple[str, Traversable]:
    known = shipped()
    if str(config) in known:
        return f"file {config}.toml (shipped)", known[str(config)]
    path = Path(config)
    if str(config) and path.exists():
        return f"file {path}", path
    raise UsageError.of("--config", config, f"the path of a TOML file, or a shipped one: {', '.join(known)}", known)


# Errors name fields (``data_dir: …``); where the sources are known, that becomes ``--data-dir: …``.


def setting_key(field: str, origin: str) -> str:
    """Return the option, variable or file key of a field from `origin` (`sources.Resolved`)."""
    if origin.startswith(("flag", "default")):
        return flag_name(field)
    if origin.startswith("environment "):
        return origin.split()[1]
    return f"{field} ({'in' if origin.startswith('file ') else 'from'} {origin})"


def named(message: str, sources: Mapping[str, str]) -> str:
    """Return a message whose leading fields (``epochs and steps: …``) are named as given."""
    head, sign, rest = message.partition(": ")
    fields = head.split(" and ")
    if not sign or not all(field in sources for field in fields):
        return message
    return f"{' and '.join(setting_key(field, sources[field]) for field in fields)}: {rest}"


NOTIFICATION_VARIABLES: Mapping[str, str] = {  # for --on-failure; empty: unknown
    "TRAINER_RUN_EVENT": "failed",
    "TRAINER_RUN_TEXT": "all of it in a sentence",
    "TRAINER_RUN_NAME": "the run's name",
    "TRAINER_RUN_PATH": "its directory",
    "TRAINER_RUN_HOST": "the host of its driver",
    "TRAINER_RUN_CAUSE": "what ended it, in a line",
    "TRAINER_RUN_TASK": "the task that failed first",
    "TRAINER_RUN_STEPS": "updates that were done",
    "TRAINER_RUN_SECONDS": "what it has taken",
    "TRAINER_RUN_EXIT_CODE": "its exit code",
    "TRAINER_RUN_RESTARTS": "number of restarts so far",
}
RESERVED_VARIABLES: Mapping[str, str] = {  # variables with our prefix that are no fields of the job
    "TRAINER_DATA_CACHE": "folder of the prepared datasets",
    "TRAINER_RECORD": "folder in which `crosstrain.recorder` records a script of one's own",
    "TRAINER_PEER_MEMORY": "off: checkpoints are sent by the tasks, not read from their memory",
    "TRAINER_SECRET": "shared secret of nodes that are started by hand",
    "TRAINER_SECRET_FILE": "file with that secret",
    "TRAINER_RENDEZVOUS": "HOST:PORT where nodes that are started by hand meet",
    "TRAINER_NODE_RANK": "number of a node that is started by hand",
    "TRAINER_PROFILE_DIR": "folder for traces, for every task",
    **{option.variable: option.help for option in PERSONAL_OPTIONS.values()},
    **{name: f"for the command of --on-failure: {what}" for name, what in NOTIFICATION_VARIABLES.items()},
}
_SWITCHES = ("TRAINER_PEER_MEMORY",)  # on or off
SWEEP_KEYS: Mapping[str, str] = {  # keys of ``[sweep]``, and fixes for them outside
    "grid": "write its settings into a table [sweep.grid]",
    "cases": "write each of its tables as [[sweep.cases]]",
    "repeats": "write it into a table [sweep]",
}
RUNS_POINTS = "and `trainer sweep` runs its points."
_PLUGIN_FIELDS: Mapping[str, Kind] = {"backend": "backend", "model": "model", "data": "dataset"}
BUDGETS = ("epochs", "steps", "examples")
_ALTERNATIVES = (("batch_size", "global_batch_size", "batch_tokens"), BUDGETS)  # a higher layer's replaces the others
_FLAG = "flag"  # the source of typed values


@dataclass(frozen=True, slots=True)
class Resolved:
    """A job with the source of each value."""

    job: Job
    sources: dict[str, str]  # ``flag``, ``environment TRAINER_X``, ``file PATH`` or ``default``
    notes: tuple[str, ...] = ()  # automatic choices to report
    idle: Mapping[str, str] = dataclasses.field(default_factory=dict)  # given settings without effect, with a sentence each

    def refuse_idle_flags(self) -> None:
        """Raise UsageError for a typed option without effect."""
        for name, why in self.idle.items():
            if self.sources[name] == _FLAG:
                raise UsageError(why)

    def idle_notes(self) -> list[str]:
        """Return the notes about settings without effect that were not typed."""
        return [why for name, why in self.idle.items() if self.sources[name] != _FLAG]


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run to resume or repeat, as a layer below the file's: its job, name and progress."""

    fields: Mapping[str, Any]
    name: str
    steps: int | None  # updates done; None: unknown, or not resumed
    epochs: int | None  # at which ``--epochs +0`` would end
    admit: Callable[[Mapping[str, Any]], None]  # raises UsageError for values that the run's files may not decide
    examples: int | None = None  # trained on

    @property
    def origin(self) -> str:
        """The source of this layer's values."""
        return f"run {one_line(self.name)}"

    def absolute(self, field: str, value: GivenValue) -> GivenValue:
        """Return ``+N`` steps, epochs or examples as the run's new end; any other value unchanged."""
        if not _is_relative(field, value):
            return value
        text = value.value.strip()
        done = {"steps": self.steps, "epochs": self.epochs, "examples": self.examples}[field]
        if done is None:
            raise UsageError(f"{value.key}: got {text!r}, but nothing is known of {self.name} to count from; give the number in all")
        return replace(value, value=done + int(text[1:]), origin=f"{value.origin} ({text} from {done})")


def _is_relative(field: str, value: GivenValue) -> bool:
    text = value.value.strip() if isinstance(value.value, str) else ""
    return field in BUDGETS and text.startswith("+") and text[1:].isascii() and text[1:].isdecimal()


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None = None, resumed: ResumedRun | None = None
) -> Resolved:
    """Merge the layers and validate the job, without importing a framework.

    `config` is a TOML path or a shipped name; ``backend = auto`` becomes the first installed one. Raises UsageError.
    """
    values = merge_layers(_read_layers(flags, environ, config), _read_run(resumed), _ALTERNATIVES)
    if resumed is not None:
        resumed.admit({field: value.value for field, value in values.items() if value.origin == resumed.origin})
        values = {field: resumed.absolute(field, value) for field, value in values.items()}
    for field, value in values.items():
        _refuse_boolean(field, value)
    try:
        job = Job.model_validate({field: value.value for field, value in values.items()})
    except ValidationError as error:
        raise as_usage_error(error, values) from None
    sources = {field: values[field].origin if field in values else "default" for field in Job.model_fields}
    for field, kind in _PLUGIN_FIELDS.items():
        _check_name(kind, field, getattr(job, field), values)
    new_values = {field: value for field, value in values.items() if resumed is None or value.origin != resumed.origin}
    try:
        resolved = replace(_resolve_backend(job, sources), idle=_find_idle(job, new_values))
        return _drop_compilation(resolved, new_values) if job.deterministic and job.compile != "off" else resolved
    except UsageError as error:
        raise type(error)(named(str(error), sources)) from None


def given_settings(flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None = None) -> dict[str, Any]:
    """Return the given values, each checked by itself, for a run resumed elsewhere."""
    return {field: _normalised_value(field, value) for field, value in _read_layers(flags, environ, config).items()}


def _read_layers(flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None) -> dict[str, GivenValue]:
    file, variables, typed = _read_file(config), _read_environment(environ), _read_flags(flags)
    return merge_layers(typed, merge_layers(variables, file, _ALTERNATIVES), _ALTERNATIVES)


def _normalised_value(field: str, value: GivenValue) -> Any:
    _refuse_boolean(field, value)
    if _is_relative(field, value):
        return str(value.value).strip()
    try:
        return Job.model_validate({field: value.value}).model_dump(mode="json")[field]
    except ValidationError as error:
        if any(problem["loc"] for problem in error.errors(include_url=False)):
            raise as_usage_error(error, {field: value}) from None
        return str(value.value)


def _drop_compilation(resolved: Resolved, new_values: Mapping[str, GivenValue]) -> Resolved:
    """Drop an untyped compile setting of a deterministic job: compiled code rounds differently."""
    value, deterministic = new_values.get("compile"), new_values.get("deterministic")
    if value is None or value.origin == _FLAG or (deterministic is not None and deterministic.origin == value.origin):
        return resolved
    place = value.place or value.key
    note = f"{value.key}: {value.value} (from {place}) is ignored with --deterministic; --compile {value.value} typed enables both"
    sources = {**resolved.sources, "compile": f"default (without that of {place}, as deterministic is given)"}
    return replace(resolved, job=resolved.job.model_copy(update={"compile": "off"}), sources=sources, notes=(*resolved.notes, note))


def _read_run(resumed: ResumedRun | None) -> dict[str, GivenValue]:
    if resumed is None:
        return {}
    origin = resumed.origin
    return {field: GivenValue(value, field, origin, origin) for field, value in resumed.fields.items() if value is not None}


def _find_idle(job: Job, given_values: Mapping[str, GivenValue]) -> dict[str, str]:
    values = job.model_dump()
    problems = {}
    for name, needed in idle_settings(values).items():
        if name in given_values:
            value = given_values[name]
            has = "false" if values[needed.field] is False else values[needed.field] or "not given"
            place = f" (from {value.place})" if value.place else ""
            problems[name] = (
                f"{value.key}: got {str(value.value)!r}{place}, which does nothing, as {needed.field} is {has}; "
                f"it belongs to {requirement_flags(needed)}."
            )
    return problems


def _read_flags(flags: Mapping[str, Any]) -> dict[str, GivenValue]:
    unknown = [field for field in flags if field not in Job.model_fields]
    if unknown:
        near = nearest(unknown[0], map(flag_name, Job.model_fields))
        raise UsageError(_unknown_message(flag_name(unknown[0]), "no such option", near))
    return {field: GivenValue(value, flag_name(field), _FLAG) for field, value in flags.items()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, GivenValue]:
    fields = {environment_name(field): field for field in Job.model_fields}
    values: dict[str, GivenValue] = {}
    for name in sorted(environ):
        if name in _SWITCHES and environ[name] not in ("", "on", "off"):
            raise UsageError(f"{name}: got {environ[name]!r}; allowed: on or off.")
        if not name.startswith(ENVIRONMENT_PREFIX) or name in RESERVED_VARIABLES or not environ[name]:
            continue
        if name not in fields:
            plain = {known.removeprefix(ENVIRONMENT_PREFIX): known for known in (*fields, *RESERVED_VARIABLES)}
            near = nearest(name.removeprefix(ENVIRONMENT_PREFIX), plain)
            raise UsageError(_unknown_message(name, "no setting has this environment variable", plain[near] if near else None))
        values[fields[name]] = GivenValue(environ[name], name, f"environment {name}")
    return values


def _read_file(config: Path | str | None) -> dict[str, GivenValue]:
    if config is None:
        return {}
    label, values = read_config(config)
    values.pop(SWEEP, None)
    refuse_misplaced(label, values)
    for key in values:
        if key in PERSONAL_OPTIONS:
            option = PERSONAL_OPTIONS[key]
            raise UsageError(
                f"{key} (in {label}): is never taken from a file of settings, as such files are handed around; give {option.flag} or "
                f"{option.variable}, or write it into your own file ({personal_file(os.environ)})"
            )
        if key not in Job.model_fields:
            name = one_line(key) or repr(key)
            raise UsageError(_unknown_message(f"{name} (in {label})", "no setting has this name", nearest(key, Job.model_fields)))
    return {key: GivenValue(value, key, label, label) for key, value in values.items()}


def refuse_misplaced(label: str, values: Mapping[str, Any]) -> None:
    """Raise UsageError if a file describes a sweep outside of its table ``[sweep]``."""
    for key, value in values.items():
        place = f"{key} (in {label})"
        if is_axis(key, value):
            raise UsageError(f"{place}: several values of it make a sweep; write it into a table [sweep.grid], {RUNS_POINTS}")
        if key in SWEEP_KEYS:
            raise UsageError(f"{place}: it describes a sweep; {SWEEP_KEYS[key]}, {RUNS_POINTS}")


def is_axis(key: str, value: Any) -> bool:
    """Return whether a file has several values of a setting that takes one."""
    return isinstance(value, list) and key in Job.model_fields and not takes_list(key)


def _unknown_message(key: str, problem: str, near: str | None) -> str:
    hint = f" Did you mean {near!r}?" if near else ""
    return f"{key}: {problem}.{hint} `trainer run --print-config` lists every setting."


def _refuse_boolean(field: str, value: GivenValue) -> None:
    """Refuse TOML's ``true`` for a number or in a list of them, as it would be taken for 1."""
    values = value.value if isinstance(value.value, list) else [value.value]
    if not is_boolean(field) and any(isinstance(part, bool) for part in values):
        raise UsageError.of(value.key, value_shown(value.value), allowed(field), source=value.place)


def _check_name(kind: Kind, field: str, name: str, values: Mapping[str, GivenValue]) -> None:
    if field == "backend" and name == "auto":
        return
    value = values.get(field, GivenValue(name, flag_name(field), "default"))
    try:
        find(kind, name)
    except MissingPackageError:
        raise
    except UsageError:
        names = (["auto"] if field == "backend" else []) + list(available(kind))
        listed = f"{', '.join(names)} (`trainer {'data list' if field == 'data' else f'{field}s'}` shows them)"
        if kind == "model":
            listed += ", or the dotted path of your own module, such as my_package.my_model"
        raise UsageError.of(value.key, name, listed, names, value.place) from None
    base = model_base(name)
    if kind == "model" and "." in base and not is_reference(base) and base not in available(kind) and not module_exists(base):
        place = f" (from {value.place})" if value.place else ""
        raise UsageError(f"{value.key}: got {base!r}{place}, {NO_MODULE}")


def _resolve_backend(job: Job, sources: dict[str, str]) -> Resolved:
    notes: tuple[str, ...] = ()
    if job.backend == "auto":
        backend, among = _find_backend()
        job = job.model_copy(update={"backend": backend})
        sources = {**sources, "backend": f"{sources['backend']} (auto: the first installed of {', '.join(among)})"}
        notes = (f"backend: {backend} (the first installed of {', '.join(among)}; choose with --backend)",)
    forward_plugin(job.model, job.backend)
    return Resolved(job, sources, notes)


def _find_backend() -> tuple[str, list[str]]:
    ours = {plugin.name: plugin for plugin in BUILT_IN["backend"]}
    for name, plugin in ours.items():
        if plugin.installed:
            return name, list(ours)
    known, problems = available("backend"), []
    for name, plugin in known.items():
        if name not in ours and (problem := _backend_problem(plugin)) is None:
            return name, list(known)
        problems += [problem] if name not in ours and problem else []
    hints = " or ".join(f"`{plugin.install}`" for plugin in ours.values())
    raise MissingPackageError(" ".join([f"backend: no framework is installed. Install one with {hints}.", *problems]))


def _backend_problem(plugin: Plugin) -> str | None:
    try:
        with plugin_code(plugin, "backend", "its declaration"):
            declared = getattr(load(plugin, "backend"), "capabilities", None)
    except UsageError as error:
        return str(error)
    if declared is None:
        return f"Backend {plugin.name!r} declares no capabilities."
    missing = missing_packages(declared.packages)
    return f"Backend {plugin.name!r} needs the package {missing[0]!r}: {declared.install or plugin.provider}." if missing else None
