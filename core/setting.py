"""Declares a setting of a job, from which options, documentation, checks and rules are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import Field
from pydantic.fields import FieldInfo

from .topics import Topic

SPEED, STEPS, TIME, LOSS, METRICS, TRANSLATIONS, AT_THE_END, TARGET, RESOURCES = GROUPS = (
    "speed",  # examples/s
    "steps/s",
    "run time",
    "loss",
    "metrics",
    "translations",  # metrics of translations made during training
    "translations at the end",
    "time to target",
    "resources",
)
ALL = frozenset(GROUPS)
WORK = frozenset({SPEED, STEPS, TIME, TARGET, RESOURCES})
LEARNT = frozenset({LOSS, METRICS, TRANSLATIONS, AT_THE_END})
LEARNING = LEARNT | {TARGET}
NOTHING: frozenset[str] = frozenset()
Role = Literal["training", "operation", "destination"]  # what is computed; how the run is kept going; where records are stored


@dataclass(frozen=True, slots=True)
class Requirement:
    """The setting that another one needs, and its values for which that one has an effect."""

    field: str
    values: tuple[Any, ...] = ()  # empty: any but None
    above_zero: bool = False  # any number but 0
    unlike: str | None = None  # any other value
    shown: str = ""  # an example

    def holds(self, job: Mapping[str, Any]) -> bool:
        """Return whether a job's fields meet it. Raises KeyError for a missing field."""
        value = job[self.field]
        if self.above_zero:
            return bool(value)
        if self.unlike is not None:
            return bool(value != self.unlike)
        return value in self.values if self.values else value is not None


@dataclass(frozen=True, slots=True)
class ComparisonRule:
    """The effect of a different setting on the comparison of two runs."""

    label: str
    confounds: frozenset[str]  # the `GROUPS` that are not comparable
    why: str
    none: str | None = None  # text for None
    only_if: Requirement | None = None  # compared only among runs that meet it
    matters: bool = True  # False: affects no figure


def trajectory(label: str, only_if: Requirement | None = None, none: str | None = None) -> ComparisonRule:
    """Return the rule of a setting that changes the updates but not their cost."""
    return ComparisonRule(label, LEARNING, "trajectories differ", none, only_if)


def no_effect(label: str, none: str | None = None) -> ComparisonRule:
    """Return the rule of a setting that affects no figure."""
    return ComparisonRule(label, NOTHING, "no figure depends on it", none, matters=False)


def stops_run(label: str, none: str | None = None) -> ComparisonRule:
    """Return the rule of a setting that only decides when a run fails."""
    return ComparisonRule(label, NOTHING, "it only decides when a run fails", none)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A setting's declaration, except its type, default and description."""

    topic: Topic
    requires: Requirement | None = None  # to have an effect
    compare: ComparisonRule | None = None
    role: Role = "training"
    foreign: str | None = None  # effect of an external run's value (``{}``), which the user has to confirm
    mllog: str | None = None  # key in MLPerf's log, with fields of the job in braces

    @classmethod
    def from_field(cls, field: FieldInfo) -> Self:
        """Return the declaration of a field. Raises KeyError for one not declared by `setting`."""
        for item in field.metadata:
            if isinstance(item, cls):
                return item
        raise KeyError("a field of the job that was not declared by core.setting.setting")


def setting(
    topic: Topic,
    default: Any,
    description: str,
    *,
    requires: Requirement | None = None,
    compare: ComparisonRule | None = None,
    role: Role = "training",
    foreign: str | None = None,
    mllog: str | None = None,
) -> Any:
    """Return the declaration of a field; a trajectory is compared only where it has an effect."""
    if compare is not None and compare.confounds == LEARNING and compare.only_if is None:
        compare = replace(compare, only_if=requires)
    field: FieldInfo = Field(default, description=description)
    field.metadata.append(Declaration(topic, requires, compare, role, foreign, mllog))
    return field
