"""The command that repeats a run, made from its resolved job."""

from __future__ import annotations

import shlex
from collections.abc import Container, Mapping
from typing import Any

from ...core.job import Job
from ...core.settings.ineffective import idle_settings
from ...core.settings.job_fields import environment_name, flag_name, is_boolean

__all__ = ["repeat_command"]

_PLACE = ("out", "name")
"""Where a run is written says nothing about what it does."""


def repeat_command(described: Mapping[str, Any], environ: Container[str] = ()) -> str:
    """Return a ``trainer run`` for the shell that gives every setting of a ``job.json`` that differs from its default, quoted.

    So it needs neither the config file nor the variables that the run was started with; settings for which `environ` has a ``TRAINER_``
    variable are given as well, so that it means the same where that is set. Settings that do nothing in the run are left out. The options
    stand in the job's order.
    """
    words = ["trainer", "run"]
    idle = idle_settings({**Job().model_dump(), **described})
    for field, info in Job.model_fields.items():
        value = described.get(field)
        if field in _PLACE or field in idle or value is None or (value == info.default and environment_name(field) not in environ):
            continue
        if is_boolean(field):
            words.append(flag_name(field) if value else f"--no-{flag_name(field)[2:]}")
        else:
            words += [flag_name(field), ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)
