"""A backend whose updates take a given time and change nothing, for node 0."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from crosstrain.backends.base import (
    Availability,
    CalibrationOrder,
    CalibrationResult,
    EvalResult,
    Plan,
    State,
    StepResult,
    make_sampler,
    ranks_placement,
)
from crosstrain.backends.capabilities import Capabilities
from crosstrain.core.cluster import Task, TaskSpec
from crosstrain.core.job import Job
from crosstrain.data.base import Dataset, Split
from crosstrain.models.base import Array, ModelSpec

STEP_VARIABLE = "SIMULATED_STEP_SECONDS"
"""The environment variable with the seconds of an update, on every node."""

EVALUATION_SECONDS = 0.05


def step_seconds() -> float:
    """Return how long an update takes."""
    return float(os.environ.get(STEP_VARIABLE, "0.025"))


class WaitingSession:
    """A leading task that waits as long as its work would take."""

    def __init__(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> None:
        self._job, self._model, self._data = job, model, data
        self._rank = task.placed.index
        self._sampler = make_sampler(job, data)
        self._state = State(model.initial(job.seed))
        self._updates = 0

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Wait, and report a loss that falls with the updates."""
        begin = time.perf_counter()
        batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self._rank, plan.skip, plan.arranged)
        time.sleep(max(0.0, plan.count * step_seconds() - (time.perf_counter() - begin)))
        steps = np.arange(plan.first_step, plan.first_step + plan.count)
        self._updates += plan.count
        yield StepResult(
            plan.first_step, (2.3 / (1 + steps / 100)).astype(np.float32), int(batches.examples.sum()), time.perf_counter() - begin
        )

    def drain(self) -> Iterator[StepResult]:
        """Nothing is ever outstanding."""
        return iter(())

    def evaluate(self, split: Split) -> EvalResult:
        """Wait, and report sums as if half of the examples had been classified correctly."""
        time.sleep(EVALUATION_SECONDS)
        size = self._data.info.sizes[split]
        return EvalResult.of(self._model.objective, split, size, [0.7 * size, 0.5 * size, size], EVALUATION_SECONDS, self._updates)

    def state(self) -> State:
        """Return the initial state, with the updates that were asked for."""
        return State(self._state.parameters, {}, self._updates)

    def load(self, state: State | None) -> None:
        """Take note of the updates; there is nothing else."""
        self._updates = 0 if state is None else state.updates

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Raise NotImplementedError: nothing is computed here."""
        raise NotImplementedError("simulated nodes predict nothing")

    def translating(self) -> None:
        """Raise NotImplementedError: nothing is computed here."""
        raise NotImplementedError("simulated nodes translate nothing")

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Report that each part of a step takes a part of the time that a step takes."""
        count = max(1, order.count)
        return [CalibrationResult(self._rank, count, count * step_seconds() / 3)]

    def close(self) -> None:
        """Nothing to leave."""


class SimulatedBackend:
    """Waits where others compute. Sync mode alone."""

    name = "simulated"
    capabilities = Capabilities(packages={"numpy": ["numpy"]}, install="pip install numpy")

    def probe(self) -> Availability:
        """Nothing is needed."""
        return Availability(self.name, np.__version__, ("cpu",))

    def placement(self, job: Job) -> list[TaskSpec]:
        """Place a rank on each node."""
        return ranks_placement(job)

    def preload(self, job: Job) -> None:
        """Import nothing: numpy is there."""

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> WaitingSession:
        """Join nobody."""
        return WaitingSession(task, job, model, data)


BACKEND = SimulatedBackend()
