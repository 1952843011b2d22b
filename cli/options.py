"""Options of ``trainer run``, made from the job's fields: same name, same help, same default.

Values stay text here; `crosstrain.core.settings.sources` validates them, so that a wrong value reads the same from a flag, the
environment or a file.
"""

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
from ..core.settings.job_fields import choices, flag_name, is_boolean, schema, topic
from ..core.settings.personal import GivenOption, resolve_personal
from ..core.settings.personal_options import ALTERNATIVES, PERSONAL_OPTIONS
from ..core.topics import Topic
from ..core.units import decimal_number
from ..launch.launchers.host_list import Host, parse_hosts, read_hostfile
from ..models.decoding.settings import LARGEST_BEAM
from .group import SOURCES
from .grouped_help import topic_option

__all__ = [
    "FURTHER_PLACES",
    "NAMING_NODES",
    "PLACES",
    "GivenPath",
    "IntegerRange",
    "NumberRange",
    "check_typed_model",
    "decoding_options",
    "given_hosts",
    "given_options",
    "given_personal",
    "given_python",
    "job_options",
    "job_options_without",
    "model_option",
    "name_settings",
    "trust_option",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of decimal numbers. Click's takes "nan" too, as it is neither below nor above anything, and 1_0 for 10."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; what is none, or outside, ends the command."""
        if isinstance(value, str):
            try:
                value = decimal_number(value)
            except ValueError:
                self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        number: float = super().convert(value, param, ctx)
        return number


class IntegerRange(click.IntRange):
    """A range of integers, in decimal digits. Click's takes 1_0 for 10, too, and describes one without bounds as ``x<=None``."""

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the integer; what is none, or outside, ends the command."""
        if isinstance(value, str) and re.fullmatch("[+-]?[0-9]+", value) is None:
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        number: int = super().convert(value, param, ctx)
        return number


class GivenPath(click.Path):
    """A path, but not an empty one, such as a variable of the shell that is not set leaves; it would be taken for this folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an empty one ends the command."""
        if value == "":
            self.fail("'' is no path; this folder is '.'.", param, ctx)
        return super().convert(value, param, ctx)


def job_options(function: Function) -> Function:
    """Add an option for every field of the job to a click command."""
    return job_options_without(())(function)


def job_options_without(left_out: Collection[str]) -> Callable[[Function], Function]:
    """Return what adds an option for every field of the job but some, which mean something else to the command."""

    def add(function: Function) -> Function:
        for field in reversed(list(Job.model_fields)):
            function = function if field in left_out else _option(field)(function)
        return function

    return add


def trust_option(begins: str) -> Callable[[Function], Function]:
    """Return what adds ``--trust-run`` to a command; `begins` are the first words of its help text."""
    return topic_option(
        Topic.CHECKPOINTS,
        "--trust-run",
        is_flag=True,
        help=f"{begins} the run's files: also use the code, addresses and external paths that they name (a model's module, a data folder, "
        "MLflow's URI).",
    )


def decoding_options(function: Function) -> Function:
    """Add ``--beam`` and ``--length-penalty`` to a command that translates with a trained model."""
    for name, kind, what in (
        ("--length-penalty", NumberRange(0, 10), "Log-probabilities are divided by ((5 + length) / 6) to this power [default: the run's]."),
        ("--beam", IntegerRange(1, LARGEST_BEAM), "Hypotheses that a translation follows at once; 1 is greedy [default: the run's]."),
    ):
        function = click.option(name, type=kind, default=None, help=what)(function)
    return function


def model_option(function: Function) -> Function:
    """Add ``--model`` to a command that takes a checkpoint: the model's name, typed, which is then not taken from the files."""
    return click.option(
        "--model",
        metavar="NAME",
        help="The checkpoint's own model, typed again; replaces --trust-run for a dotted path. [default: as recorded]",
    )(function)


def check_typed_model(typed: str | None, recorded: str) -> None:
    """Raise UsageError where ``--model`` names another model than the checkpoint is of."""
    from ..models.build import canonical_model

    if typed is not None and typed != recorded and canonical_model(typed) != recorded:
        raise UsageError(f"--model: got {typed!r}, but the checkpoint is of {recorded!r}; type that, or leave --model out.")


def name_settings(sources: Mapping[str, str]) -> None:
    """Have an error of the command that begins with one of these fields say where its value came from, by field name."""
    click.get_current_context().meta[SOURCES] = sources


PLACES = ("hosts", "hostfile", "python")
"""The personal options that say where the nodes are, and with which interpreter."""

NAMING_NODES = ALTERNATIVES[0]
"""Those that say where the nodes are. Which launcher takes them that says itself (`takes` of `LauncherPlugin`)."""

FURTHER_PLACES = tuple(name for name in NAMING_NODES if name not in PLACES)


def personal_options(*names: str) -> Callable[[Function], Function]:
    """Return what adds these of the options that a user alone gives to a command; `given_personal` has what was given."""

    def add(function: Function) -> Function:
        for option in (PERSONAL_OPTIONS[name] for name in reversed(names)):
            kind = GivenPath() if option.metavar == "PATH" else str
            add_option = topic_option(
                option.topic, option.flag, option.name, type=kind, default=None, metavar=option.metavar, help=option.help
            )
            function = add_option(function)
        return function

    return add


def given_personal(ctx: click.Context) -> dict[str, GivenOption]:
    """Return those of a command's personal options that were given, by flag, variable or the user's own file. Raises UsageError."""
    names = [name for name in PERSONAL_OPTIONS if name in ctx.params]
    return resolve_personal(names, {name: ctx.params[name] for name in names}, os.environ)


def given_hosts(personal: Mapping[str, GivenOption]) -> Sequence[Host]:
    """Return the hosts that a command was given, none where it was given none. Raises UsageError for what is no list of hosts."""
    hosts, hostfile = personal.get("hosts"), personal.get("hostfile")
    if hosts is not None and hostfile is not None:
        raise UsageError(f"{hosts.key} and {hostfile.key}: both name the nodes' hosts; give one of them")
    if hosts is not None:
        return parse_hosts(hosts.value, hosts.key)
    return read_hostfile(hostfile.value) if hostfile is not None else ()


def given_python(personal: Mapping[str, GivenOption]) -> Path | None:
    """Return the interpreter on the hosts that a command was given, None where it was given none."""
    return Path(personal["python"].value) if "python" in personal else None


def given_options(ctx: click.Context) -> dict[str, Any]:
    """Return the job's options that stand on the command line, by field name."""
    return {field: ctx.params[field] for field in Job.model_fields if ctx.get_parameter_source(field) == ParameterSource.COMMANDLINE}


def _option(field: str) -> Callable[[Function], Function]:
    flag = flag_name(field)
    if is_boolean(field):
        return topic_option(topic(field), f"{flag}/--no-{flag[2:]}", field, default=None, help=_help(field))
    return topic_option(topic(field), flag, field, type=str, default=None, metavar=_metavar(field), help=_help(field))


def _metavar(field: str) -> str:
    listed = choices(field)
    if listed:
        return "|".join(listed)
    described = schema(field)
    if described.get("format") == "path":
        return "PATH"
    return {"integer": "N", "number": "X", "array": "X[,X…]"}.get(described.get("type", ""), "TEXT")


def _help(field: str) -> str:
    """Return the field's description with its default, where it has one that says something."""
    info = Job.model_fields[field]
    text = info.description or ""
    if info.default is None or info.default is False:
        return text
    return f"{text} [default: {'on' if info.default is True else info.default}]"
