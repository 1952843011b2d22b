"""From a failed validation to the one message that helps: the key as the user wrote it, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ..errors import UsageError
from .job_fields import allowed, choices, flag_name

__all__ = ["GivenValue", "as_usage_error"]


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value that somebody gave: under which name (``--batch-size``, ``TRAINER_BATCH_SIZE``, ``batch_size``), and where.

    `origin` is ``flag``, ``environment TRAINER_BATCH_SIZE`` or ``file PATH``. `place` is what a message adds after the value; a flag
    and an environment variable are recognised by their names and need none.
    """

    value: Any
    key: str
    origin: str
    place: str | None = None


def as_usage_error(error: ValidationError, given: Mapping[str, GivenValue]) -> UsageError:
    """Return the message for the first thing that is wrong. `given` has what the user gave, by field."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if not first["loc"]:
        return _between_fields(str(cause or first["msg"]), given)
    field = str(first["loc"][0])
    value = given.get(field, GivenValue(first["input"], flag_name(field), "default"))
    return UsageError.of(value.key, _shown(value.value), str(cause or allowed(field)), choices(field), value.place)


def _between_fields(message: str, given: Mapping[str, GivenValue]) -> UsageError:
    """Fields that contradict each other: the job's own message starts with their names, ``a and b: what is wrong``."""
    head, _, rule = message.partition(": ")
    values = [given[field] for field in head.split(" and ") if field in given]
    if not values or not rule:
        return UsageError(f"{message}.")
    keys = " and ".join(value.key for value in values)
    shown = " and ".join(f"{str(_shown(value.value))!r}{f' (from {value.place})' if value.place else ''}" for value in values)
    return UsageError(f"{keys}: got {shown}; {rule}.")


def _shown(value: Any) -> Any:
    """Write a value as a person would: TOML's ``true``, and a list without brackets."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value)
    return value
