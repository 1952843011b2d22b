"""From flags, environment and file to a job: flags > ``TRAINER_*`` environment > ``--config`` TOML > defaults.

Each value remembers where it came from, so that it can be shown, and named when it is wrong.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import MissingPackageError, UsageError
from ..job import Job
from ..plugins import BUILT_IN, NO_MODULE, Kind, Plugin, available, find, forward_plugin, load, missing_packages, model_base, module_exists
from ..suggestions import nearest
from ..untrusted.console import one_line
from .config_files import SWEEP, read_config
from .given_names import named
from .ineffective import idle_settings
from .job_fields import ENVIRONMENT_PREFIX, allowed, environment_name, flag_name, is_boolean, schema
from .personal import own_file
from .personal_options import PERSONAL_OPTIONS
from .reserved_variables import RESERVED_VARIABLES
from .validation_errors import GivenValue, as_usage_error

__all__ = [
    "BUDGETS",
    "SWEEP_KEYS",
    "Resolved",
    "ResumedRun",
    "given_settings",
    "is_axis",
    "refuse_misplaced",
    "resolve",
]

_SWITCHES = ("TRAINER_PEER_MEMORY",)
"""Those of them that are on or off."""

SWEEP_KEYS: Mapping[str, str] = {
    "grid": "write its settings into a table [sweep.grid]",
    "cases": "write each of its tables as [[sweep.cases]]",
    "repeats": "write it into a table [sweep]",
}
"""What the table ``[sweep]`` may have, and what to do with it where it stands outside."""

RUNS_POINTS = "and `trainer sweep` runs its points."

_PLUGIN_FIELDS: Mapping[str, Kind] = {"backend": "backend", "model": "model", "data": "dataset"}

BUDGETS = ("epochs", "steps", "examples")

_ALTERNATIVES = (("batch_size", "global_batch_size", "batch_tokens"), BUDGETS)
"""Fields of which a job takes one: given on a higher layer, one replaces the other of a lower layer."""


_FLAG = "flag"
"""The source of a value that stands on the command line."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A job and where each value came from: ``flag``, ``environment TRAINER_X``, ``file PATH`` or ``default``.

    `notes` are choices made for the user that a command tells on standard error. `idle` are settings that were given and do nothing,
    with a sentence about each, by field name.
    """

    job: Job
    sources: dict[str, str]
    notes: tuple[str, ...] = ()
    idle: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def refuse_idle_flags(self) -> None:
        """Raise UsageError where an option that was typed does nothing."""
        for name, why in self.idle.items():
            if self.sources[name] == _FLAG:
                raise UsageError(why)

    def idle_notes(self) -> list[str]:
        """Return what is to be told of settings that do nothing and were not typed."""
        return [why for name, why in self.idle.items() if self.sources[name] != _FLAG]


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run that is to go on, or to be repeated: its job's fields and name, and where it stands.

    That are the updates done, after which epochs ``--epochs +0`` would end, and the examples it has trained on; None where that is not
    known, or where nothing goes on.

    A layer below the file's: what is not given anew stays as it was. `admit` gets what stays, before any of it is used, and raises
    UsageError where the run's files may not decide that.
    """

    fields: Mapping[str, Any]
    name: str
    steps: int | None
    epochs: int | None
    admit: Callable[[Mapping[str, Any]], None]
    examples: int | None = None

    @property
    def origin(self) -> str:
        """Where a value of this layer comes from."""
        return f"run {one_line(self.name)}"

    def absolute(self, field: str, value: GivenValue) -> GivenValue:
        """Return ``+N`` steps, epochs or examples as the number at which the run then ends; any other value as it is."""
        if not _is_relative(field, value):
            return value
        text = value.value.strip()
        stands = {"steps": self.steps, "epochs": self.epochs, "examples": self.examples}[field]
        if stands is None:
            raise UsageError(f"{value.key}: got {text!r}, but nothing is known of {self.name} to count from; give the number in all")
        return replace(value, value=stands + int(text[1:]), origin=f"{value.origin} ({text} from {stands})")


def _is_relative(field: str, value: GivenValue) -> bool:
    """Return whether a value is ``+N`` steps, epochs or examples."""
    text = value.value.strip() if isinstance(value.value, str) else ""
    return field in BUDGETS and text.startswith("+") and text[1:].isascii() and text[1:].isdecimal()


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None = None, resumed: ResumedRun | None = None
) -> Resolved:
    """Merge the layers and validate the result. Imports no framework.

    `flags` has the options that were given, by field name; values may be strings. `config` is the path of a TOML file or the name of a
    shipped one. ``backend = auto`` becomes the first that is installed, our own ones first. Raises UsageError (MissingPackageError
    where no framework is installed) with one message for the first wrong value. `resumed` is the run that ``--resume`` names.
    """
    given = _merge(_from_run(resumed), _from_file(config), _from_environment(environ), _from_flags(flags))
    if resumed is not None:
        resumed.admit({field: value.value for field, value in given.items() if value.origin == resumed.origin})
        given = {field: resumed.absolute(field, value) for field, value in given.items()}
    for field, value in given.items():
        _refuse_boolean(field, value)
    try:
        job = Job.model_validate({field: value.value for field, value in given.items()})
    except ValidationError as error:
        raise as_usage_error(error, given) from None
    sources = {field: given[field].origin if field in given else "default" for field in Job.model_fields}
    for field, kind in _PLUGIN_FIELDS.items():
        _check_name(kind, field, getattr(job, field), given)
    own = {field: value for field, value in given.items() if resumed is None or value.origin != resumed.origin}
    try:
        found = replace(_with_backend(job, sources), idle=_idle(job, own))
        return _uncompiled(found, own) if job.deterministic and job.compile != "off" else found
    except UsageError as error:
        raise type(error)(named(str(error), sources)) from None


def given_settings(flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | str | None = None) -> dict[str, Any]:
    """Return what flags, environment and file say, JSON-ready and by field, where the run that goes on with it is not at hand.

    Each value is checked and brought to its field's form by itself; ``+N`` stays as it is, and so does, as text, what makes sense with the
    run's other settings only. Raises UsageError as `resolve` does.
    """
    given = _merge(_from_file(config), _from_environment(environ), _from_flags(flags))
    return {field: _by_itself(field, value) for field, value in given.items()}


def _by_itself(field: str, value: GivenValue) -> Any:
    _refuse_boolean(field, value)
    if _is_relative(field, value):
        return str(value.value).strip()
    try:
        return Job.model_validate({field: value.value}).model_dump(mode="json")[field]
    except ValidationError as error:
        if any(problem["loc"] for problem in error.errors(include_url=False)):
            raise as_usage_error(error, {field: value}) from None
        return str(value.value)


def _uncompiled(found: Resolved, own: Mapping[str, GivenValue]) -> Resolved:
    """Leave compiling out of a deterministic job where a file or a variable asks for it that does not ask for both.

    Such a setting holds for many runs, and compiled code rounds in another way than that of an earlier run which is to be repeated.
    """
    value, deterministic = own.get("compile"), own.get("deterministic")
    if value is None or value.origin == _FLAG or (deterministic is not None and deterministic.origin == value.origin):
        return found
    place = value.place or value.key
    note = f"{value.key}: {value.value} (from {place}) is ignored with --deterministic; --compile {value.value} typed enables both"
    sources = {**found.sources, "compile": f"default (without that of {place}, as deterministic is given)"}
    return replace(found, job=found.job.model_copy(update={"compile": "off"}), sources=sources, notes=(*found.notes, note))


def _from_run(resumed: ResumedRun | None) -> dict[str, GivenValue]:
    if resumed is None:
        return {}
    origin = resumed.origin
    return {field: GivenValue(value, field, origin, origin) for field, value in resumed.fields.items() if value is not None}


def _idle(job: Job, given: Mapping[str, GivenValue]) -> dict[str, str]:
    """Say of each setting that was given and does nothing what it would need."""
    values = job.model_dump()
    found = {}
    for name, needed in idle_settings(values).items():
        if name in given:
            value = given[name]
            has = "false" if values[needed.field] is False else values[needed.field] or "not given"
            place = f" (from {value.place})" if value.place else ""
            found[name] = (
                f"{value.key}: got {str(value.value)!r}{place}, which does nothing, as {needed.field} is {has}; "
                f"it belongs to {needed.flags()}."
            )
    return found


def _from_flags(flags: Mapping[str, Any]) -> dict[str, GivenValue]:
    unknown = [field for field in flags if field not in Job.model_fields]
    if unknown:
        near = nearest(unknown[0], map(flag_name, Job.model_fields))
        raise UsageError(_unknown(flag_name(unknown[0]), "no such option", near))
    return {field: GivenValue(value, flag_name(field), _FLAG) for field, value in flags.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, GivenValue]:
    """Read ``TRAINER_*``. An empty variable counts as not set, as is usual."""
    fields = {environment_name(field): field for field in Job.model_fields}
    found: dict[str, GivenValue] = {}
    for name in sorted(environ):
        if name in _SWITCHES and environ[name] not in ("", "on", "off"):
            raise UsageError(f"{name}: got {environ[name]!r}; allowed: on or off.")
        if not name.startswith(ENVIRONMENT_PREFIX) or name in RESERVED_VARIABLES or not environ[name]:
            continue
        if name not in fields:
            plain = {known.removeprefix(ENVIRONMENT_PREFIX): known for known in (*fields, *RESERVED_VARIABLES)}
            near = nearest(name.removeprefix(ENVIRONMENT_PREFIX), plain)
            raise UsageError(_unknown(name, "no setting has this environment variable", plain[near] if near else None))
        found[fields[name]] = GivenValue(environ[name], name, f"environment {name}")
    return found


def _from_file(config: Path | str | None) -> dict[str, GivenValue]:
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
                f"{option.variable}, or write it into your own file ({own_file(os.environ)})"
            )
        if key not in Job.model_fields:
            name = one_line(key) or repr(key)
            raise UsageError(_unknown(f"{name} (in {label})", "no setting has this name", nearest(key, Job.model_fields)))
    return {key: GivenValue(value, key, label, label) for key, value in values.items()}


def refuse_misplaced(label: str, values: Mapping[str, Any]) -> None:
    """Raise UsageError, with where it belongs, where a file has what describes a sweep outside of its table ``[sweep]``."""
    for key, value in values.items():
        place = f"{key} (in {label})"
        if is_axis(key, value):
            raise UsageError(f"{place}: several values of it make a sweep; write it into a table [sweep.grid], {RUNS_POINTS}")
        if key in SWEEP_KEYS:
            raise UsageError(f"{place}: it describes a sweep; {SWEEP_KEYS[key]}, {RUNS_POINTS}")


def is_axis(key: str, value: Any) -> bool:
    """Return whether a file gives several values of a setting that takes one."""
    return isinstance(value, list) and key in Job.model_fields and schema(key).get("type") != "array"


def _unknown(key: str, problem: str, near: str | None) -> str:
    hint = f" Did you mean {near!r}?" if near else ""
    return f"{key}: {problem}.{hint} `trainer run --print-config` lists every setting."


def _merge(*layers: dict[str, GivenValue]) -> dict[str, GivenValue]:
    """Put each layer over the one before."""
    merged: dict[str, GivenValue] = {}
    for layer in layers:
        for fields in _ALTERNATIVES:
            if any(field in layer for field in fields):
                for field in fields:
                    merged.pop(field, None)
        merged.update(layer)
    return merged


def _refuse_boolean(field: str, value: GivenValue) -> None:
    """Refuse TOML's ``true`` where a number belongs; it would be taken for 1."""
    if isinstance(value.value, bool) and not is_boolean(field):
        raise UsageError.of(value.key, str(value.value).lower(), allowed(field), source=value.place)


def _check_name(kind: Kind, field: str, name: str, given: Mapping[str, GivenValue]) -> None:
    if field == "backend" and name == "auto":
        return
    value = given.get(field, GivenValue(name, flag_name(field), "default"))
    try:
        find(kind, name)
    except UsageError:
        names = (["auto"] if field == "backend" else []) + list(available(kind))
        listed = f"{', '.join(names)} (`trainer {'data list' if field == 'data' else f'{field}s'}` shows them)"
        if kind == "model":
            listed += ", or the dotted path of your own module, such as my_package.my_model"
        raise UsageError.of(value.key, name, listed, names, value.place) from None
    base = model_base(name)
    if kind == "model" and "." in base and base not in available(kind) and not module_exists(base):
        place = f" (from {value.place})" if value.place else ""
        raise UsageError(f"{value.key}: got {base!r}{place}, {NO_MODULE}")


def _with_backend(job: Job, sources: dict[str, str]) -> Resolved:
    notes: tuple[str, ...] = ()
    if job.backend == "auto":
        backend, among = _first_installed()
        job = job.model_copy(update={"backend": backend})
        sources = {**sources, "backend": f"{sources['backend']} (auto: the first installed of {', '.join(among)})"}
        notes = (f"backend: {backend} (the first installed of {', '.join(among)}; choose with --backend)",)
    forward_plugin(job.model, job.backend)
    return Resolved(job, sources, notes)


def _first_installed() -> tuple[str, list[str]]:
    """Return the first backend whose framework is installed, and those among which it was looked for: our own, then those of others."""
    ours = {plugin.name: plugin for plugin in BUILT_IN["backend"]}
    for name, plugin in ours.items():
        if plugin.installed:
            return name, list(ours)
    known, problems = available("backend"), []
    for name, plugin in known.items():
        if name not in ours and (problem := _unusable(plugin)) is None:
            return name, list(known)
        problems += [problem] if name not in ours and problem else []
    hints = " or ".join(f"`{plugin.install}`" for plugin in ours.values())
    raise MissingPackageError(" ".join([f"backend: no framework is installed. Install one with {hints}.", *problems]))


def _unusable(plugin: Plugin) -> str | None:
    """Say why a backend of somebody else's cannot be used; None where it can. It declares the packages that it needs."""
    try:
        declared = getattr(load(plugin, "backend"), "capabilities", None)
    except UsageError as error:
        return str(error)
    if declared is None:
        return f"Backend {plugin.name!r} declares no capabilities."
    missing = missing_packages(declared.packages)
    return f"Backend {plugin.name!r} needs the package {missing[0]!r}: {declared.install or plugin.provider}." if missing else None
