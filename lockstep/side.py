"""One of two trainings, in a process of its own: it makes single updates from given states.

``python -m crosstrain.lockstep.side`` reads a request as JSON from each line of standard input, and answers it with a line. States are
files of `arrays` with the keys of `state_to_arrays`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..backends.base import Plan, State, make_sampler
from ..core.console import note
from ..core.errors import TrainerError, UsageError, raised
from ..core.job import Job
from ..core.update_rules import learning_rates
from ..engine.epochs import EpochIndex
from ..engine.policies import Triggers
from ..engine.protocol.state_transfer import state_from_arrays, state_to_arrays
from ..engine.protocol.task_messages import Steps, Train
from ..launch.driver.training_job import TrainingJob
from ..launch.standalone_task import StandaloneTask
from .arrays import read, write_arrays
from .serving import Answer, End, serve
from .updates import LARGE_RATE, measured_gradients, shows_gradient_by_rate, without_slots

Array = NDArray[Any]


class Begin(msgspec.Struct, tag="begin"):
    """Start the tasks of a job, and write its initial state."""

    job: dict[str, Any]
    initial: str


class Advance(msgspec.Struct, tag="advance"):
    """Train from a state on, and write the state after so many updates."""

    state: str
    first: int
    count: int
    result: str


class Probe(msgspec.Struct, tag="probe"):
    """Make one update from a state, and measure its gradients."""

    state: str
    step: int
    gradients: str
    result: str


class Measure(msgspec.Struct, tag="measure"):
    """Measure the gradients of an update from a state alone."""

    state: str
    step: int
    gradients: str


Request = Begin | Advance | Probe | Measure | End


class Schedule:
    """The plans of a job's updates, from its beginning on."""

    def __init__(self, training: TrainingJob) -> None:
        self._job, self._width = training.requested, training.model.width
        self._epochs = EpochIndex(make_sampler(training.job, training.data, training.model.objective.weight))
        self.total = Triggers(training.requested, self._epochs).total

    def plan(self, first: int, most: int) -> Plan:
        """Return a plan of at most so many updates, within an epoch."""
        place = self._epochs.place(first)
        count = min(most, place.left)
        positions = self._epochs.epochs_at(first, count)
        rates = learning_rates(self._job, first, count, self._epochs.steps_per_epoch, self.total, positions, self._width)
        return Plan(first, count, place.epoch, place.first_in_epoch, rates, place.skip, place.arranged)


class Training:
    """The training of a job, by single updates."""

    def __init__(self, job: Job, tasks: ExitStack) -> None:
        self.job = job
        self._training = TrainingJob.from_job(job)
        self.model, self.data = self._training.model, self._training.data
        self._schedule = Schedule(self._training)
        self._task = StandaloneTask(self._training.job, self.model, note, normalisation=self.data.info.normalisation)
        tasks.enter_context(self._task)
        self._begun = False

    def begin(self) -> tuple[State, str]:
        """Start the tasks, unless they are; return the initial state, and the precision used."""
        initial = self._training.initial
        if initial is None:
            initial = State(self.model.initial(self.job.seed), buffers=self.model.initial_buffers(self.job.seed))
        if not self._begun:
            self._task.start(initial)
            self._begun = True
        return initial, self._task.precision_used

    def train(self, state: State, first: int, count: int, rate: float | None = None) -> tuple[State, list[float], float]:
        """Return the state after so many updates, their losses, and the last one's learning rate."""
        self._task.load(state)
        losses: list[float] = []
        used = 0.0
        while count:
            plan = self._schedule.plan(first, count)
            used = float(plan.learning_rates[-1])
            if rate is not None:
                plan = replace(plan, learning_rates=np.full(plan.count, rate))
            for message in self._task.ask_for_all(Train.from_plan(plan)):
                if isinstance(message, Steps):
                    losses += message.result().losses.tolist()
            first, count = first + plan.count, count - plan.count
        return self._task.state(), losses, used

    def gradients(self, state: State, step: int) -> tuple[dict[str, Array], float, float, State | None]:
        """Return an update's gradients, loss and learning rate, and the state after it.

        The state is None where measuring gradients is not the whole update.
        """
        before = without_slots(state_to_arrays(state))
        bare = state_from_arrays(before, state.updates, state.scalars)
        by_rate = shows_gradient_by_rate(self.job)
        after, losses, rate = self.train(bare, step, 1, LARGE_RATE if by_rate else None)
        whole = not by_rate and not any(state.slots.values())
        return measured_gradients(self.job, before, state_to_arrays(after)), losses[0], rate, after if whole else None


def read_state(path: str, updates: int) -> State:
    """Read a state that `write_state` wrote."""
    return state_from_arrays(read(path), updates)


def write_state(path: str, state: State) -> None:
    """Write a state."""
    write_arrays(path, state_to_arrays(state))


class Side:
    """Answers requests."""

    def __init__(self, tasks: ExitStack) -> None:
        self._tasks = tasks
        self._training: Training | None = None

    def answer(self, request: Request) -> Answer:
        """Do what is asked for."""
        if isinstance(request, Begin):
            job = Job.model_validate(request.job)
            if self._training is None or self._training.job != job:
                self._training = Training(job, self._tasks)
            initial, precision = self._training.begin()
            write_state(request.initial, initial)
            return Answer(precision=precision)
        training = self._training
        if training is None or isinstance(request, End):
            raise UsageError("the training was not begun")
        if isinstance(request, Advance):
            state, losses, _ = training.train(read_state(request.state, request.first), request.first, request.count)
            write_state(request.result, state)
            return Answer(losses=list(losses))
        before = read_state(request.state, request.step)
        gradients, loss, rate, after = training.gradients(before, request.step)
        write_arrays(request.gradients, gradients)
        if isinstance(request, Probe):
            if after is None:
                after, _, rate = training.train(before, request.step, 1)
            write_state(request.result, after)
        return Answer(losses=[loss], rate=rate)


def main() -> None:
    """Serve standard input."""
    with ExitStack() as tasks:
        side = Side(tasks)

        def answer(request: Request) -> Answer:
            try:
                return side.answer(request)
            except TrainerError as error:
                return Answer(str(error), error.exit_code)
            except (OSError, ValueError, RuntimeError) as error:
                return Answer(raised(error))

        serve(answer, Request)


if __name__ == "__main__":
    main()
