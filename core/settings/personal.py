"""Personal options: flag > ``TRAINER_*`` > ``~/.config/crosstrain/trainer.toml``.

The file selects programs and addresses, so it counts only if no other user can write it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bounded_json import parse_toml
from ..console import one_line
from ..errors import UsageError
from ..suggestions import did_you_mean
from ..topics import Topic
from .job_fields import check_url, environment_name, flag_name, merge_layers, shown_url

# Shared configurations and runs cannot set these options, which select machines, programs and addresses.
MAX_CHARACTERS = 65_536  # of a value: a list of thousands of hosts


def _check_text(text: str) -> None:
    if "\0" in text or len(text) > MAX_CHARACTERS:
        raise ValueError(f"is longer than {MAX_CHARACTERS:,} characters, or has a zero byte")


@dataclass(frozen=True, slots=True)
class PersonalOption:
    """An option that gives its name to flag, variable and key in the user's own file."""

    name: str
    metavar: str
    help: str
    topic: Topic
    is_path: bool = False  # names a local file
    check: Callable[[str], None] = _check_text  # raises ValueError with the problem
    shown: Callable[[str], str] = str  # without secrets
    recorded: Callable[[str], str] = str  # for the files of a run

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return flag_name(self.name)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return environment_name(self.name)


PERSONAL_OPTIONS: Mapping[str, PersonalOption] = {
    option.name: option
    for option in (
        PersonalOption(
            "hosts",
            "HOST,HOST",
            "The nodes' hosts, reached by ssh unless --launcher says otherwise, in this order; also node[01-03]. node0:2 for two processes "
            "there; set ports in your ssh configuration.",
            Topic.CLUSTER,
        ),
        PersonalOption(
            "hostfile",
            "PATH",
            "The same from a file: one host per line, as in an MPI hostfile; a host listed n times runs n processes.",
            Topic.CLUSTER,
            is_path=True,
        ),
        PersonalOption(
            "python",
            "PATH",
            "With hosts, Slurm, Ray or a package's launcher: the interpreter there. [default: the path of this one]",
            Topic.CLUSTER,
        ),
        PersonalOption(
            "ray_address",
            "auto|HOST:PORT|ray://HOST:PORT",
            "The Ray cluster that gives the nodes: auto (the one of which this machine is a node), its head, or its client server. "
            "[default with --launcher ray, and in a Ray job: auto]",
            Topic.CLUSTER,
        ),
        PersonalOption(
            "notify",
            "URL",
            "Post a JSON document to this http(s) address when the run fails, restarts, finishes, or is interrupted.",
            Topic.OUTPUT,
            check=check_url,
            shown=shown_url,
            recorded=shown_url,
        ),
        PersonalOption(
            "on_failure",
            "COMMAND",
            "Run this by the shell when the run has failed, with the same document on its standard input.",
            Topic.OUTPUT,
            recorded=lambda text: "...",
        ),
    )
}
ALTERNATIVES = (("hosts", "hostfile", "ray_address"),)  # a higher layer's replaces the others


def shown_command(command: list[str]) -> list[str]:
    """Return a command line for a run's files, without addresses and commands with passwords."""
    words: list[str] = []
    recorded: Callable[[str], str] | None = None
    by_flag = {option.flag: option.recorded for option in PERSONAL_OPTIONS.values()}
    for word in command:
        flag, equals, value = word.partition("=")
        if recorded is not None:
            words.append(recorded(word))
            recorded = None
        elif equals and flag in by_flag:
            words.append(f"{flag}={by_flag[flag](value)}")
        else:
            recorded = by_flag.get(word)
            words.append(word)
    return words


FILE_PREFIX = "file "  # prefix of sources
MAX_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class GivenOption:
    """A personal option's value, and its source: ``flag``, ``environment X`` or ``file PATH``."""

    option: PersonalOption
    value: str
    source: str

    @property
    def key(self) -> str:
        """The option, variable or file key that sets it."""
        return {"flag": self.option.flag}.get(self.source, f"{self.option.name} (from {self.source})")

    @property
    def typed(self) -> bool:
        """Whether it is on the command line, and so for this run only."""
        return self.source == "flag"

    @property
    def is_from_file(self) -> bool:
        """Whether it is in the user's own file, and so for every run."""
        return self.source.startswith(FILE_PREFIX)


def personal_file(environ: Mapping[str, str]) -> Path:
    """Return the user's own file below XDG_CONFIG_HOME or ``~/.config``; it may not exist."""
    base = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification ignores relative paths
        base = Path.home() / ".config"
    return base / "crosstrain" / "trainer.toml"


def resolve_personal(names: Collection[str], flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, GivenOption]:
    """Return the given options among `names`. Raises UsageError, also for an unsafe own file."""
    path = personal_file(environ)
    options: dict[str, GivenOption] = {}
    for layer in (
        {name: GivenOption(PERSONAL_OPTIONS[name], value, f"{FILE_PREFIX}{path}") for name, value in _read(path).items()},
        {
            name: GivenOption(option, environ[option.variable], f"environment {option.variable}")
            for name, option in PERSONAL_OPTIONS.items()
            if environ.get(option.variable)
        },
        {name: GivenOption(PERSONAL_OPTIONS[name], str(value), "flag") for name, value in flags.items() if value is not None},
    ):
        options = merge_layers(layer, options, ALTERNATIVES)
    return {name: _check_option(options[name]) for name in names if name in options}


def _check_option(option: GivenOption) -> GivenOption:
    if not option.value:
        raise UsageError(f"{option.key}: got an empty text; leave it out, or give a value.")
    try:
        option.option.check(option.value)
    except ValueError as error:
        raise UsageError(f"{option.key}: {error}.") from None
    if option.option.is_path and option.is_from_file:
        if not Path(option.value).expanduser().is_absolute():
            raise UsageError(f"{option.key}: got {option.value!r}; allowed: a whole path, which means the same from every folder.")
        return GivenOption(option.option, str(Path(option.value).expanduser()), option.source)
    return option


def _read(path: Path) -> dict[str, str]:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would wait for a writer
            _refuse_unsafe_file(path, os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: your own file of options cannot be read: {error.strerror}.") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_BYTES >> 10} KiB, the most that is read of your own file of options.")
    values = parse_toml(data, str(path), str(path))
    for key, value in values.items():
        place = f"{one_line(key)[:100]} (in {path})"
        if key not in PERSONAL_OPTIONS:
            raise UsageError(
                f"{place}: your own file of options has {', '.join(PERSONAL_OPTIONS)} and nothing else; settings of a job belong to a "
                f"--config file.{did_you_mean(key, PERSONAL_OPTIONS)}"
            )
        if not isinstance(value, str) or not value:
            raise UsageError(f"{place}: got {'an empty text' if value == '' else type(value).__name__}; allowed: a text in quotes.")
    return values


def _refuse_unsafe_file(path: Path, status: os.stat_result) -> None:
    """Raise UsageError if others than this user or root can write or replace the file."""
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is no file; your own options are read from one.")
    folders = {path.parent, path.resolve().parent}
    for place, place_status in [(path, status), *((folder, folder.stat()) for folder in sorted(folders))]:
        remedy = f"it decides which programs are run, so it counts only where nobody else can write it: chmod go-w {str(place)!r}"
        if place_status.st_uid not in (os.geteuid(), 0):
            raise UsageError(f"{place}: belongs to another user (number {place_status.st_uid}); {remedy}, as its owner.")
        writable = stat.S_IWGRP | stat.S_IWOTH
        if place_status.st_mode & writable and not (stat.S_ISDIR(place_status.st_mode) and place_status.st_mode & stat.S_ISVTX):
            raise UsageError(f"{place}: can be written by others (mode {stat.S_IMODE(place_status.st_mode):o}); {remedy}.")
