"""Names and allowed values of the job's fields, for help texts and error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from ..errors import UsageError
from ..job import Job, saved_every
from ..setting import Declaration, Requirement, Role

ENVIRONMENT_PREFIX = "TRAINER_"
Given = TypeVar("Given")
DECLARED: Mapping[str, Declaration] = {name: Declaration.from_field(field) for name, field in Job.model_fields.items()}


def flag_name(field: str) -> str:
    """Return the option of a field: ``--batch-size`` for ``batch_size``."""
    return f"--{field.replace('_', '-')}"


def environment_name(field: str) -> str:
    """Return the environment variable of a field: ``TRAINER_BATCH_SIZE`` for ``batch_size``."""
    return f"{ENVIRONMENT_PREFIX}{field.upper()}"


@cache
def _properties() -> dict[str, dict[str, Any]]:
    return dict(Job.model_json_schema()["properties"])


def schema(field: str) -> dict[str, Any]:
    """Return a field's JSON schema, the first of several, without the alternative ``null``."""
    return _alternatives(field)[0]


def _alternatives(field: str) -> list[dict[str, Any]]:
    described = _properties()[field]
    return [dict(alternative) for alternative in described.get("anyOf", (described,)) if alternative.get("type") != "null"]


def takes_list(field: str) -> bool:
    """Return whether a field takes several values."""
    return any(alternative.get("type") == "array" for alternative in _alternatives(field))


def choices(field: str) -> tuple[str, ...]:
    """Return the allowed values of a field with a closed list of them; otherwise none."""
    described = schema(field)
    if "const" in described:
        return (str(described["const"]),)
    return tuple(str(value) for value in described.get("enum", ()))


def is_boolean(field: str) -> bool:
    """Return whether a field is a switch."""
    return bool(schema(field).get("type") == "boolean")


def allowed(field: str) -> str:
    """Describe what a field allows: ``a whole number of at least 1``, ``sync, async``."""
    several = ", or several with commas between" if len(_alternatives(field)) > 1 else ""
    return ", ".join(choices(field)) or f"{_describe_schema(schema(field))}{several}"


def _describe_schema(described: dict[str, Any]) -> str:
    match described.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_bounds(described)}"
        case "number":
            return f"a number{_bounds(described)}"
        case "array":
            return f"one value or several with commas between, each {_describe_schema(described['items'])}"
        case _:
            return "a path" if described.get("format") == "path" else f"text{_lengths(described)}"


def _lengths(described: dict[str, Any]) -> str:
    return f" of {described['minLength']} to {described['maxLength']} characters" if "maxLength" in described else ""


def _bounds(described: dict[str, Any]) -> str:
    lower = (("minimum", "of at least"), ("exclusiveMinimum", "greater than"))
    upper = (("maximum", "at most"), ("exclusiveMaximum", "less than"))
    parts = [f"{words} {described[key]:g}" for key, words in lower if key in described]
    parts += [f"{words} {_write_bound(described[key])}" for key, words in upper if key in described]
    return f" {' and '.join(parts)}" if parts else ""


def _write_bound(bound: float) -> str:
    """Write a bound in full, so that 2**63 does not become 9.2e18."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


TAKES_EFFECT: Mapping[str, Requirement] = {name: declared.requires for name, declared in DECLARED.items() if declared.requires is not None}


def fields_with_role(*roles: Role) -> tuple[str, ...]:
    """Return the settings of these roles, in the order of the job's fields."""
    return tuple(name for name, declared in DECLARED.items() if declared.role in roles)


def requirement_flags(needed: Requirement) -> str:
    """Return the option that meets a requirement: ``--scale-lr linear or sqrt``."""
    if is_boolean(needed.field):
        return flag_name(needed.field)
    return f"{flag_name(needed.field)} {needed.shown or ' or '.join(map(str, needed.values))}".rstrip()


def idle_settings(job: Mapping[str, Any]) -> dict[str, Requirement]:
    """Return a job's settings without effect, and what each requires."""
    idle = {field: needed for field, needed in TAKES_EFFECT.items() if not needed.holds(job)}
    if not (job["save_final"] or job["keep_best"] or saved_every(job["checkpoint_every"], job["max_restarts"])):
        idle["keep"] = Requirement("checkpoint_every", shown="1epoch")
    return idle


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A given value with its source."""

    value: Any
    key: str  # ``--batch-size``, ``TRAINER_BATCH_SIZE`` or ``batch_size``
    origin: str  # ``flag``, ``environment TRAINER_BATCH_SIZE`` or ``file PATH``
    place: str | None = None  # text after the value in messages, for a file


def merge_layers(layer: Mapping[str, Given], lower: Mapping[str, Given], alternatives: Sequence[Sequence[str]]) -> dict[str, Given]:
    """Return a layer's values over those of a lower one.

    Each of several `alternatives` replaces the others.
    """
    replaced = {name for names in alternatives if any(name in layer for name in names) for name in names}
    return {**{name: value for name, value in lower.items() if name not in replaced}, **layer}


def as_usage_error(error: ValidationError, values: Mapping[str, GivenValue]) -> UsageError:
    """Return the message for the first problem; `given` has the user's values by field."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if not first["loc"]:
        return _error_between_fields(str(cause or first["msg"]), values)
    field = str(first["loc"][0])
    value = values.get(field, GivenValue(first["input"], flag_name(field), "default"))
    return UsageError.of(value.key, value_shown(value.value), str(cause or allowed(field)), choices(field), value.place)


def _error_between_fields(message: str, given_values: Mapping[str, GivenValue]) -> UsageError:
    head, _, rule = message.partition(": ")
    values = [given_values[field] for field in head.split(" and ") if field in given_values]
    if not values or not rule:
        return UsageError(f"{message}.")
    keys = " and ".join(value.key for value in values)
    shown = " and ".join(f"{str(value_shown(value.value))!r}{f' (from {value.place})' if value.place else ''}" for value in values)
    return UsageError(f"{keys}: got {shown}; {rule}.")


def value_shown(value: Any) -> Any:
    """Return a value for a message, booleans and lists as users write them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(str(value_shown(part)) for part in value)
    return value


# A webhook's path is as secret as a password, so only scheme, host and port of ``--notify`` are shown.
MAX_CHARACTERS = 2000


def check_url(text: str) -> None:
    """Raise ValueError, without the text, for anything but a usable http or https URL."""
    what = "allowed: an http:// or https:// URL (what was given is not shown, as such an address may hold a password)"
    if len(text) > MAX_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"is longer than {MAX_CHARACTERS:,} characters, or has some that a URL cannot have; {what}")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"is no URL; {what}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"has another scheme than http and https, or none; {what}")
    if not host:
        raise ValueError(f"names no host; {what}")


def shown_url(text: str) -> str:
    """Return the public part of such a URL: ``https://host:port/...``."""
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/..."
