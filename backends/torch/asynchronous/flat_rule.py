"""A job's update rule on a flat vector in numpy, as a parameter server keeps one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....core.job import Job
from ....exchange.parameter_server.shards import Vector
from ..optimizers import Wrapping, make_rule

__all__ = ["FlatRule"]


class FlatRule(Wrapping):
    """The rule with the vector's memory; an `UpdateRule`."""

    def __init__(self, job: Job, parameters: Vector) -> None:
        self._rule = make_rule(job, [torch.from_numpy(parameters)])
        self.slots: Mapping[str, Vector] = {name: tensor.numpy() for name, (tensor,) in self._rule.slots.items()}

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply one update; see `UpdateRule`."""
        self._rule.step([torch.from_numpy(gradient)], lr)
