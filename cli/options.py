"""Shared options; job options stay text, as `core/settings/sources.py` validates all layers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..core.errors import UsageError
from ..core.job import Job
from ..core.settings.job_fields import DECLARED, choices, flag_name, is_boolean, schema
from ..core.settings.personal import ALTERNATIVES, PERSONAL_OPTIONS, GivenOption, resolve_personal
from ..core.topics import Topic
from ..core.units import decimal_number
from ..launch.launchers.host_list import Host, parse_hosts, read_hostfile
from ..models.decoding import MAX_BEAM
from .group import SOURCES, topic_option

Function = TypeVar("Function", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of decimal numbers. Click's also accepts ``nan``, and 1_0 as 10."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail."""
        if isinstance(value, str):
            try:
                value = decimal_number(value)
            except ValueError:
                self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        return float(super().convert(value, param, ctx))


class IntegerRange(click.IntRange):
    """A range of integers. Click's also accepts 1_0 as 10, and shows no bounds as ``x<=None``."""

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the integer, or fail."""
        if isinstance(value, str) and re.fullmatch("[+-]?[0-9]+", value) is None:
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        return int(super().convert(value, param, ctx))


class GivenPath(click.Path):
    """A path that is not empty, as from an unset shell variable, which would mean this folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail."""
        if value == "":
            self.fail("'' is no path; this folder is '.'.", param, ctx)
        return super().convert(value, param, ctx)


def job_options(*, without: Collection[str] = ()) -> Callable[[Function], Function]:
    """Return a decorator that adds an option for each field of the job, except some."""

    def add(function: Function) -> Function:
        for field in reversed(list(Job.model_fields)):
            function = function if field in without else _option(field)(function)
        return function

    return add


def out_option(text: str) -> Callable[[Function], Function]:
    """Return a decorator that adds ``--out``, the folder with the runs; `text` is its help."""
    return click.option("--out", type=GivenPath(), default=Path("runs"), envvar="TRAINER_OUT", show_default=True, help=text)


def check_choice(option: str, value: str | None, allowed: Sequence[str]) -> None:
    """Raise UsageError for a value that is not allowed; None is."""
    if value is not None and value not in allowed:
        raise UsageError.of(option, value, ", ".join(allowed), allowed)


def trust_option(begins: str) -> Callable[[Function], Function]:
    """Return a decorator that adds ``--trust-run``; its help text begins with `begins`."""
    return topic_option(
        Topic.CHECKPOINTS,
        "--trust-run",
        is_flag=True,
        help=f"{begins} the run's files: also use the code, addresses and external paths that they name (a model's module, a data folder, "
        "MLflow's URI).",
    )


def decoding_options(function: Function) -> Function:
    """Add ``--beam`` and ``--length-penalty``."""
    beam = "Hypotheses that a translation follows at once; 1 is greedy [default: the run's]."
    penalty = "Log-probabilities are divided by ((5 + length) / 6) to this power [default: the run's]."
    function = click.option("--length-penalty", type=NumberRange(0, 10), help=penalty)(function)
    return click.option("--beam", type=IntegerRange(1, MAX_BEAM), help=beam)(function)


model_option = click.option(  # a checkpoint's model as typed, so that the files do not decide it
    "--model",
    metavar="NAME",
    help="The checkpoint's own model, typed again; replaces --trust-run for a dotted path. [default: as recorded]",
)


def check_typed_model(typed: str | None, recorded: str) -> None:
    """Raise UsageError if ``--model`` names another model than the checkpoint's."""
    from ..models.build import canonical_model

    if typed is not None and typed != recorded and canonical_model(typed) != recorded:
        raise UsageError(f"--model: got {typed!r}, but the checkpoint is of {recorded!r}; type that, or leave --model out.")


def name_settings(sources: Mapping[str, str]) -> None:
    """Set the sources of settings, by field, for errors about them."""
    click.get_current_context().meta[SOURCES] = sources


PLACES = ("hosts", "hostfile", "python")  # personal options for nodes and their interpreter
NAMING_NODES = ALTERNATIVES[0]  # a launcher declares which it takes (`takes` of `LauncherPlugin`)
FURTHER_PLACES = tuple(name for name in NAMING_NODES if name not in PLACES)


def personal_options(*names: str) -> Callable[[Function], Function]:
    """Return a decorator that adds personal options; see `given_personal`."""

    def add(function: Function) -> Function:
        for option in (PERSONAL_OPTIONS[name] for name in reversed(names)):
            kind = GivenPath() if option.metavar == "PATH" else str
            flag = topic_option(option.topic, option.flag, option.name, type=kind, metavar=option.metavar, help=option.help)
            function = flag(function)
        return function

    return add


def given_personal(ctx: click.Context) -> dict[str, GivenOption]:
    """Return the personal options given by flag, variable or own file. Raises UsageError."""
    names = [name for name in PERSONAL_OPTIONS if name in ctx.params]
    return resolve_personal(names, {name: ctx.params[name] for name in names}, os.environ)


def given_hosts(personal: Mapping[str, GivenOption]) -> Sequence[Host]:
    """Return the given hosts. Raises UsageError for an invalid list."""
    hosts, hostfile = personal.get("hosts"), personal.get("hostfile")
    if hosts is not None and hostfile is not None:
        raise UsageError(f"{hosts.key} and {hostfile.key}: both name the nodes' hosts; give one of them")
    if hosts is not None:
        return parse_hosts(hosts.value, hosts.key)
    return read_hostfile(hostfile.value) if hostfile is not None else ()


def given_python(personal: Mapping[str, GivenOption]) -> Path | None:
    """Return the given interpreter on the hosts."""
    return Path(personal["python"].value) if "python" in personal else None


def given_options(ctx: click.Context) -> dict[str, Any]:
    """Return the job's options on the command line, by field."""
    return {field: ctx.params[field] for field in Job.model_fields if ctx.get_parameter_source(field) == ParameterSource.COMMANDLINE}


def _option(field: str) -> Callable[[Function], Function]:
    flag, topic = flag_name(field), DECLARED[field].topic
    if is_boolean(field):
        return topic_option(topic, f"{flag}/--no-{flag[2:]}", field, default=None, help=_help(field))
    return topic_option(topic, flag, field, type=str, default=None, metavar=_metavar(field), help=_help(field))


def _metavar(field: str) -> str:
    if listed := choices(field):
        return "|".join(listed)
    described = schema(field)
    if described.get("format") == "path":
        return "PATH"
    return {"integer": "N", "number": "X", "array": "X[,X…]"}.get(described.get("type", ""), "TEXT")


def _help(field: str) -> str:
    info = Job.model_fields[field]
    text = info.description or ""
    if info.default is None or info.default is False:
        return text
    return f"{text} [default: {'on' if info.default is True else info.default}]"
