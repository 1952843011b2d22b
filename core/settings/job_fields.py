"""The job's fields in words: which names a field has, and what it allows. Help texts and error messages are made from this."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..job import Job
from ..topics import Topic

__all__ = ["ENVIRONMENT_PREFIX", "allowed", "choices", "environment_name", "flag_name", "is_boolean", "schema", "topic"]

ENVIRONMENT_PREFIX = "TRAINER_"


def flag_name(field: str) -> str:
    """Return the option of a field: ``--batch-size`` for ``batch_size``."""
    return f"--{field.replace('_', '-')}"


def environment_name(field: str) -> str:
    """Return the environment variable of a field: ``TRAINER_BATCH_SIZE`` for ``batch_size``."""
    return f"{ENVIRONMENT_PREFIX}{field.upper()}"


@cache
def _properties() -> dict[str, dict[str, Any]]:
    properties: dict[str, dict[str, Any]] = Job.model_json_schema()["properties"]
    return properties


def schema(field: str) -> dict[str, Any]:
    """Return the JSON schema of a field without the alternative ``null`` that optional fields have; the first one where it has several."""
    return _alternatives(field)[0]


def _alternatives(field: str) -> list[dict[str, Any]]:
    """Return the schemas of which a value has to meet one; the form that most values have comes first."""
    described = _properties()[field]
    return [dict(each) for each in described.get("anyOf", (described,)) if each.get("type") != "null"]


def topic(field: str) -> Topic:
    """Return what a field is about. Raises KeyError for one that was declared without a topic (`core.job.setting`)."""
    return Topic(_properties()[field]["topic"])


def choices(field: str) -> tuple[str, ...]:
    """Return the values of a field that has a closed list of them, otherwise nothing."""
    described = schema(field)
    if "const" in described:
        return (str(described["const"]),)
    return tuple(str(value) for value in described.get("enum", ()))


def is_boolean(field: str) -> bool:
    """Return whether a field is a switch."""
    return bool(schema(field).get("type") == "boolean")


def allowed(field: str) -> str:
    """Say in words what a field allows: ``a whole number of at least 1``, ``sync, async``."""
    several = ", or several with commas between" if len(_alternatives(field)) > 1 else ""
    return ", ".join(choices(field)) or f"{_in_words(schema(field))}{several}"


def _in_words(described: dict[str, Any]) -> str:
    match described.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_bounds(described)}"
        case "number":
            return f"a number{_bounds(described)}"
        case "array":
            return f"one value or several with commas between, each {_in_words(described['items'])}"
        case _:
            return "a path" if described.get("format") == "path" else f"text{_lengths(described)}"


def _lengths(described: dict[str, Any]) -> str:
    return f" of {described['minLength']} to {described['maxLength']} characters" if "maxLength" in described else ""


def _bounds(described: dict[str, Any]) -> str:
    lower = (("minimum", "of at least"), ("exclusiveMinimum", "greater than"))
    upper = (("maximum", "at most"), ("exclusiveMaximum", "less than"))
    parts = [f"{words} {described[key]:g}" for key, words in lower if key in described]
    parts += [f"{words} {_plain(described[key])}" for key, words in upper if key in described]
    return f" {' and '.join(parts)}" if parts else ""


def _plain(bound: float) -> str:
    """Write a bound in full, so that 2**63 does not become 9.2e18."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
