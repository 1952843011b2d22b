"""Types of figures and texts in the documents of a run directory, each with bounds.

The bounds are far beyond what can be measured: a figure outside them was not written by a run, and would spoil what is computed from it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator

from ...core.job import MOST_NODES
from ...core.untrusted.bounded_json import JsonObject

__all__ = [
    "MOST_NODES",
    "MOST_TASKS",
    "Count",
    "Duration",
    "Figure",
    "JsonObject",
    "Loss",
    "Moment",
    "Name",
    "Node",
    "Seconds",
    "State",
    "Text",
    "Worker",
]

MOST_TASKS = 1 << 16


def _as_it_is(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Check a number, and leave a whole one whole."""
    validate(value)
    return value


Figure = Annotated[float, Field(ge=-1e30, le=1e30), WrapValidator(_as_it_is)]
Loss = Annotated[float, Field(ge=-1e40, le=1e40), WrapValidator(_as_it_is)] | Literal["NaN", "Infinity", "-Infinity"]
"""A float32, or the mean of such; as `finite_json` writes it."""

Seconds = Annotated[float, Field(ge=-1e12, le=1e12), WrapValidator(_as_it_is)]
Duration = Annotated[float, Field(ge=0, le=1e12), WrapValidator(_as_it_is)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Node = Annotated[int, Field(ge=0, lt=MOST_NODES)]
Worker = Annotated[int, Field(ge=0, lt=MOST_TASKS)]
Text = Annotated[str, Field(max_length=1 << 16)]
Name = Annotated[str, Field(max_length=4096)]


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ValueError("a time as ISO 8601 writes it, such as 2026-05-01T10:00:00.000+00:00, is needed") from None
    return text


def _state(text: str) -> str:
    if text not in STATES:
        raise ValueError(f"is {text[:40]!r}; a run is {', '.join(STATES[:-1])} or {STATES[-1]}")
    return text


STATES = ("starting", "running", "succeeded", "failed", "interrupted")
State = Annotated[str, AfterValidator(_state)]
Moment = Annotated[str, Field(max_length=100), AfterValidator(_moment)]
