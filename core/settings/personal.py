"""From flag, variable and the user's own file to the personal options: flag > ``TRAINER_*`` > ``~/.config/crosstrain/trainer.toml``.

That file decides which programs are run and where to something is sent, so it counts only where nobody else can have written it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..suggestions import nearest
from ..untrusted.console import one_line
from .config_files import parse_toml
from .personal_options import ALTERNATIVES, PERSONAL_OPTIONS, PersonalOption

__all__ = ["OWN_FILE", "GivenOption", "own_file", "resolve_personal"]

OWN_FILE = "file "
"""What the source of a value from the user's own file begins with."""

MOST_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class GivenOption:
    """The value of a personal option and its source: ``flag``, ``environment TRAINER_X`` or ``file PATH``."""

    option: PersonalOption
    value: str
    source: str

    @property
    def key(self) -> str:
        """What somebody has to look at to change it."""
        return {"flag": self.option.flag}.get(self.source, f"{self.option.name} (from {self.source})")

    @property
    def typed(self) -> bool:
        """Whether it stands on the command line, and so for this run alone."""
        return self.source == "flag"

    @property
    def of_own_file(self) -> bool:
        """Whether it stands in the user's own file, and so for every run."""
        return self.source.startswith(OWN_FILE)


def own_file(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_CONFIG_HOME/crosstrain/trainer.toml`` or ``~/.config/crosstrain/trainer.toml``; it may not exist."""
    base = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification: a relative path is to be ignored
        base = Path.home() / ".config"
    return base / "crosstrain" / "trainer.toml"


def resolve_personal(names: Collection[str], flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, GivenOption]:
    """Return those of the options `names` that were given, by name. `flags` has what was typed, None for what was not.

    Raises UsageError for a value that cannot be, and for an own file that others can write, or that has anything else in it.
    """
    path = own_file(environ)
    found: dict[str, GivenOption] = {}
    for layer in (
        {name: GivenOption(PERSONAL_OPTIONS[name], value, f"{OWN_FILE}{path}") for name, value in _read(path).items()},
        {name: GivenOption(option, environ[option.variable], f"environment {option.variable}") for name, option in _set(environ).items()},
        {name: GivenOption(PERSONAL_OPTIONS[name], str(value), "flag") for name, value in flags.items() if value is not None},
    ):
        for alternatives in ALTERNATIVES:
            if any(name in layer for name in alternatives):
                found = {name: given for name, given in found.items() if name not in alternatives}
        found |= layer
    return {name: _checked(found[name]) for name in names if name in found}


def _set(environ: Mapping[str, str]) -> dict[str, PersonalOption]:
    """Return the options whose variable is set. An empty variable counts as not set."""
    return {name: option for name, option in PERSONAL_OPTIONS.items() if environ.get(option.variable)}


def _checked(given: GivenOption) -> GivenOption:
    if not given.value:
        raise UsageError(f"{given.key}: got an empty text; leave it out, or give a value.")
    try:
        given.option.check(given.value)
    except ValueError as error:
        raise UsageError(f"{given.key}: {error}.") from None
    if given.option.is_path and given.of_own_file:
        if not Path(given.value).expanduser().is_absolute():
            raise UsageError(f"{given.key}: got {given.value!r}; allowed: a whole path, which means the same from every folder.")
        return GivenOption(given.option, str(Path(given.value).expanduser()), given.source)
    return given


def _read(path: Path) -> dict[str, str]:
    """Return the values of the user's own file, by name; none where there is no such file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would wait for a writer
            _refuse_of_others(path, os.fstat(file.fileno()))
            data = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: your own file of options cannot be read: {error.strerror}.") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path}: is larger than {MOST_BYTES >> 10} KiB, the most that is read of your own file of options.")
    values = parse_toml(data, str(path), str(path))
    for key, value in values.items():
        place = f"{one_line(key)[:100]} (in {path})"
        if key not in PERSONAL_OPTIONS:
            near = nearest(key, PERSONAL_OPTIONS)
            hint = f" Did you mean {near!r}?" if near else ""
            raise UsageError(
                f"{place}: your own file of options has {', '.join(PERSONAL_OPTIONS)} and nothing else; settings of a job belong to a "
                f"--config file.{hint}"
            )
        if not isinstance(value, str) or not value:
            raise UsageError(f"{place}: got {'an empty text' if value == '' else type(value).__name__}; allowed: a text in quotes.")
    return values


def _refuse_of_others(path: Path, status: os.stat_result) -> None:
    """Raise UsageError where others than this user, or root, can have written the file, or can put another in its place."""
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is no file; your own options are read from one.")
    folders = {path.parent, path.resolve().parent}
    for place, found in [(path, status), *((folder, folder.stat()) for folder in sorted(folders))]:
        remedy = f"it decides which programs are run, so it counts only where nobody else can write it: chmod go-w {str(place)!r}"
        if found.st_uid not in (os.geteuid(), 0):
            raise UsageError(f"{place}: belongs to another user (number {found.st_uid}); {remedy}, as its owner.")
        others = stat.S_IWGRP | stat.S_IWOTH
        if found.st_mode & others and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
            raise UsageError(f"{place}: can be written by others (mode {stat.S_IMODE(found.st_mode):o}); {remedy}.")
