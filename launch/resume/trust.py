"""What the files of a run cannot decide by themselves: which code runs, where records are sent, which paths outside the run are used.

A run directory may come from anybody. Such settings of it are used where the user types them again, or accepts all of them with
``--trust-run``; otherwise the command ends before any of it is used. What is installed is the user's own choice and always allowed:
backends, models and datasets that have a name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.plugins import BUILT_IN, available, model_base
from ...core.settings.config_files import shipped
from ...core.settings.job_fields import flag_name
from ...core.settings.personal_options import PERSONAL_OPTIONS

__all__ = [
    "CONFIG", "LINK", "TRUST_RUN", "foreign_settings", "links_outside", "refuse_foreign", "refuse_personal", "refuse_special_files",
    "trust_flag",
]  # fmt: skip

TRUST_RUN = "--trust-run"

CONFIG = "config"
"""The file of settings that a sweep was begun with; no setting of a job."""

LINK = "link"
"""A link in a run directory, or in a sweep's folder, that leads out of it."""


def _is_module(value: Any) -> bool:
    return isinstance(value, str) and "." in model_base(value) and model_base(value) not in available("model")


def _names_a_path(value: Any) -> bool:
    """Whether a dataset's arguments name a folder; what those of somebody else's dataset mean is not known, so they count as one."""
    if not isinstance(value, str) or ":" not in value:
        return False
    if value.partition(":")[0] not in {plugin.name for plugin in BUILT_IN["dataset"]}:
        return True
    from ...data.store.resolve import resolve

    try:
        return resolve(value).folder_in_name
    except UsageError:
        return False  # whoever uses the name says what is wrong with it


def _is_given(value: Any) -> bool:
    return value not in (None, "")


def _is_own_file(value: Any) -> bool:
    return value is not None and value not in shipped()


_FOREIGN: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("run the code of the module {}", _is_module),
    "data": ("read what {} names", _names_a_path),
    "data_dir": ("read the folder {}", _is_given),
    "mlflow": ("send its records to {}", _is_given),
    CONFIG: ("read the settings of the file {}", _is_own_file),
    LINK: ("write through the link {}", _is_given),
}
"""By setting: what taking it from a run's files would do, and which of its values are meant."""


def foreign_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that a run's files do not decide by themselves."""
    return {field: value for field, value in settings.items() if field in _FOREIGN and _FOREIGN[field][1](value)}


def refuse_foreign(settings: Mapping[str, Any], source: Path, typed: Collection[str], *, trusted: bool) -> None:
    """Raise UsageError where the files of `source` decide what they may not, unless it is `trusted`. Imports nothing that they name.

    `settings` are the values taken from these files. `typed`: the fields that the command has an option for.
    """
    found = {} if trusted else foreign_settings(settings)
    if not found:
        return
    uses = " and ".join(_FOREIGN[field][0].format(repr(value)) for field, value in found.items())
    again = f", or type {' and '.join(map(flag_name, found))} yourself" if set(found) <= set(typed) else ""
    raise UsageError(
        f"run: the files of {str(source)!r} would have this command {uses}, which a run's files alone do not decide, as they may come from "
        f"anybody. If you know them, add {TRUST_RUN}{again}."
    )


def refuse_personal(document: Mapping[str, Any], source: Path) -> None:
    """Raise UsageError where a file of a run names what a user alone gives (`core.settings.personal_options`): no run has written that."""
    named = sorted(PERSONAL_OPTIONS.keys() & document.keys())
    if named:
        raise UsageError(
            f"run: {str(source)!r} has {', '.join(named)}, which the files of a run never decide, and which trainer writes into none: this "
            f"file is not as it was written. Take {'it' if len(named) == 1 else 'them'} out, and give "
            f"{', '.join(PERSONAL_OPTIONS[name].flag for name in named)} yourself."
        )


def trust_flag(*settings: Mapping[str, Any]) -> str:
    """Return what the command to go on with a run of these settings needs besides, to be put behind it: `` --trust-run``, or nothing."""
    return f" {TRUST_RUN}" if any(map(foreign_settings, settings)) else ""


def refuse_special_files(run: Path) -> None:
    """Raise UsageError where a run directory has what is neither a file nor a folder nor a link: to open a pipe may wait for ever."""
    for folder, _, files in os.walk(run):  # which does not follow links
        for name in files:
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:  # a run at work has removed it since its name was read
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                found = os.path.relpath(path, run)
                raise UsageError(f"run: {found!r} in {str(run)!r} is neither a file nor a folder, and no run has written it. Remove it.")


def links_outside(run: Path) -> Iterator[str]:
    """Yield the links in a run directory, or in a sweep's folder, that lead out of it, relative to it."""
    root = os.path.realpath(run)
    for folder, folders, files in os.walk(root):  # which does not follow links
        for name in sorted((*folders, *files)):
            path = os.path.join(folder, name)
            if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(root):
                yield os.path.relpath(path, root)
