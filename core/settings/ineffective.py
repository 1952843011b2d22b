"""Settings that do something only where another setting has a certain value: given without it they are idle, and their giver is told.

A setting joins by a row in `TAKES_EFFECT`. Contradictions, such as momentum with Adam, are the job's own matter and end the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .job_fields import flag_name, is_boolean

__all__ = ["TAKES_EFFECT", "Requirement", "idle_settings"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """The setting that another one needs, and the values with which it does something; none at all: any value, where it has one.

    `above_zero`: any number but 0; `unlike`: any value but that one; of these `shown` is one to type.
    """

    field: str
    values: tuple[Any, ...] = ()
    above_zero: bool = False
    unlike: str | None = None
    shown: str = ""

    def holds(self, job: Mapping[str, Any]) -> bool:
        """Return whether it does something in a job, given by its fields."""
        if self.above_zero:
            return bool(job[self.field])
        if self.unlike is not None:
            return bool(job[self.field] != self.unlike)
        return job[self.field] in self.values if self.values else job[self.field] is not None

    def flags(self) -> str:
        """Return what to type so that it does something: ``--scale-lr linear or sqrt``."""
        if is_boolean(self.field):
            return flag_name(self.field)
        return f"{flag_name(self.field)} {self.shown or ' or '.join(map(str, self.values))}".rstrip()


TAKES_EFFECT: Mapping[str, Requirement] = {
    "exchange": Requirement("mode", ("sync",)),
    "schedule_step_epochs": Requirement("schedule", ("step",)),
    "schedule_gamma": Requirement("schedule", ("step",)),
    "schedule_coefficient": Requirement("schedule", ("noam",)),
    "base_batch_size": Requirement("scale_lr", ("linear", "sqrt")),
    "beta1": Requirement("optimizer", ("adam", "adamw")),
    "beta2": Requirement("optimizer", ("adam", "adamw")),
    "epsilon": Requirement("optimizer", ("adam", "adamw")),
    "sample_interval": Requirement("monitor", (True,)),
    "keep_best_count": Requirement("keep_best"),
    "patience": Requirement("eval_every", unlike="end", shown="1epoch"),
    "mlflow_experiment": Requirement("mlflow"),
    "restart_window": Requirement("max_restarts", above_zero=True, shown="3"),
    "min_nodes": Requirement("max_restarts", above_zero=True, shown="3"),
    "spare_processes": Requirement("max_restarts", above_zero=True, shown="3"),
}


def idle_settings(job: Mapping[str, Any]) -> dict[str, Requirement]:
    """Return the settings that do nothing in a job, given by its fields, and what each of them needs."""
    return {field: needed for field, needed in TAKES_EFFECT.items() if not needed.holds(job)}
