"""Session of a rank of a sync run: the part that is the same on every framework."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from ..core.cluster import Task, split_evenly
from ..core.job import Job
from ..data.base import Dataset, Split
from ..models.base import Array, ModelSpec
from ..models.decoding import Stepper
from .base import DIRECT_COMPONENTS, CalibrationOrder, CalibrationResult, EvalResult, State, StepResult, make_sampler
from .decoding_functions import Translating
from .timing import CarryOut, DirectTrial
from .vectors import StateMemory

Memory = TypeVar("Memory", bound=StateMemory)


class RankSession(ABC, Generic[Memory]):
    """The part of a `Session`; a subclass trains and loads.

    It sets `_averaged` while the ranks' buffers are equal, and `_healthy` while it does not wait for other ranks, of which one may be lost.
    """

    def __init__(self, task: Task, job: Job, spec: ModelSpec, data: Dataset) -> None:
        self._task, self._job, self._spec, self._data = task, job, spec, data
        self._rank, self._world, self._sizes = task.rank, task.cluster.workers, dict(data.info.sizes)
        self._sampler = make_sampler(job, data, spec.objective.weight)
        self._averaged = self._open = self._healthy = True
        self._memory: Memory | None = None
        self._translating: Translating | None = None
        self._trial: DirectTrial | None = None
        self._repetition: CarryOut | None = None

    @property
    @abstractmethod
    def _updates_done(self) -> int:
        """The updates applied."""

    @property
    def _scalars(self) -> Mapping[str, float]:
        """The further numbers of the state."""
        return {}

    @abstractmethod
    def _average(self) -> None:
        """Replace the buffers, of which there are some, by their mean over several ranks."""

    @abstractmethod
    def _sums(self, split: Split) -> Sequence[float]:
        """Return the objective's sums over a split, of all ranks."""

    @abstractmethod
    def _logits(self, split: Split, start: int, stop: int) -> Array:
        """Return the logits of examples start … stop − 1."""

    @abstractmethod
    def _stepper(self) -> Stepper:
        """Return what decodes with the weights to evaluate."""

    @abstractmethod
    def _make_memory(self) -> Memory:
        """Return memory for the state."""

    @abstractmethod
    def _copy_to(self, memory: Memory) -> None:
        """Copy the state."""

    @abstractmethod
    def _make_repetition(self) -> CarryOut:
        """Return what repeats a component other than those of the direct exchange."""

    def _native_figures(self) -> Mapping[str, float]:
        """Return the framework's own figures, before the first repetition."""
        return {}

    @abstractmethod
    def _open_trial(self) -> DirectTrial:
        """Try the direct exchange."""

    @abstractmethod
    def _leave(self) -> None:
        """Leave together with the other ranks, immediately if this one failed."""

    def drain(self) -> Iterator[StepResult]:
        """Nothing is ever outstanding."""
        return iter(())

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate the rank's share of the split and sum over ranks; see `Session.evaluate`."""
        began = time.perf_counter()
        self._average_buffers()
        sums = self._sums(split)
        return EvalResult.of(self._spec.objective, split, self._sizes[split], sums, time.perf_counter() - began, self._updates_done)

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Return logits; see `Session.predict`. Raises RuntimeError with several ranks."""
        if self._world > 1:
            raise RuntimeError(f"predict: needs a single worker, and this run has {self._world}")
        return self._logits(split, start, stop)

    def translating(self) -> Translating:
        """Return what translates this rank's share; see `Session.translating`."""
        self._average_buffers()
        if self._translating is None:
            self._translating = Translating(self._data, self._spec.objective, self._stepper(), self._rank, self._world)
        return self._translating

    def state(self) -> State:
        """Return a copy of the state; complete on the first rank, without values on the others."""
        self._average_buffers()
        memory = self._state_memory()
        if memory is None:
            return State({}, updates=self._updates_done)
        self._copy_to(memory)
        return memory.state(self._updates_done, self._scalars)

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Repeat a component of a step; see `Session.calibrate`.

        Buffers and slots change, parameters do not.
        """
        with self._meeting():
            if order.component in DIRECT_COMPONENTS:
                self._trial = self._trial or self._open_trial()
                return [self._trial.run(order)]
            native = {} if self._repetition is not None else self._native_figures()
            self._repetition = self._repetition or self._make_repetition()
            return [CalibrationResult(self._rank, *self._repetition(order), native)]

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Exchange something with the other ranks within the block.

        If that fails, `close` does not wait for them.
        """
        self._healthy = False
        yield
        self._healthy = True

    def close(self) -> None:
        """Leave together with the other ranks; a second call does nothing."""
        if self._open:
            self._open = False
            if self._trial is not None:
                self._trial.close()
            self._leave()

    def _share(self, split: Split) -> tuple[int, int]:
        return split_evenly(self._sizes[split], self._world)[self._rank]

    def _state_memory(self) -> Memory | None:
        if self._memory is None and self._rank == 0:
            self._memory = self._make_memory()
        return self._memory

    def _average_buffers(self) -> None:
        """Make the buffers equal on all ranks; a second call before further updates changes no bit."""
        if not self._averaged and self._world > 1 and self._spec.buffers:
            self._average()
        self._averaged = True
