"""Translating on the chief of an async run, which computes on the CPU."""

from __future__ import annotations

import torch

from ....core.job import Job
from ....data.base import Dataset
from ....models.base import ModelSpec
from ...base import State
from ...translating import Translating
from ..model import Model
from ..state import each_value

__all__ = ["ChiefTranslating"]


class ChiefTranslating:
    """A copy of the model on the chief, made when it is first needed; a `Translate` of `backends.parameter_server`."""

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset) -> None:
        self._job = job if job.precision != "fp16" else job.model_copy(update={"precision": "fp32"})  # fp16 takes a GPU
        self._spec, self._data = spec, data
        self._made: tuple[Model, Translating] | None = None

    def __call__(self, state: State) -> Translating:
        """Return what translates with these weights."""
        if self._made is None:
            model = Model.initial(self._job, self._spec, 0, torch.device("cpu"))
            self._made = model, Translating(self._data, self._spec.objective, model.stepper(), 0, 1)
        own, translating = self._made
        for tensor, value in zip([*own.values, *own.buffers], each_value(self._spec, (), state), strict=True):
            if value is not None:
                tensor.copy_(value)
        return translating
