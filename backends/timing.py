"""Calibration by the host's clock, for any framework; see `Session.calibrate`."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Protocol

from ..core.cluster import Task
from ..data.sampler import Batches
from ..exchange.mesh import Mesh, Vector, open_trial_mesh
from .base import CalibrationOrder, CalibrationResult
from .compiling import TIMED_SECONDS

Step = Callable[[], object]
CarryOut = Callable[[CalibrationOrder], tuple[int, float]]


def repeat(order: CalibrationOrder, carry_out: Callable[[int], object]) -> tuple[int, float]:
    """Return a component's repetitions and seconds.

    `carry_out(n)` returns when n are complete, on a device too.
    """
    done, wanted, elapsed = 0, order.count, 0.0
    began = time.perf_counter()
    while wanted:
        carry_out(wanted)
        done += wanted
        elapsed = time.perf_counter() - began
        left = order.seconds - elapsed
        wanted = 0 if left <= 0 else max(1, min(done, int(left * done / elapsed)))
    return done, elapsed


def measure_step(run: CarryOut) -> float:
    """Return the seconds of a step's computation, repeated by `run`, after a first one."""
    run(CalibrationOrder("compute", 1))
    count, seconds = run(CalibrationOrder("compute", 1, TIMED_SECONDS))
    return seconds / count


class Exchange(Protocol):
    """What a step exchanges with other tasks."""

    def whole(self) -> None:
        """Exchange it once."""

    def small(self) -> None:
        """Exchange a few bytes in place of each message."""


class Calibrator:
    """Repetition of a step's components on `batches`, which `gather` yields.

    `exchange` is None without other tasks.
    """

    def __init__(
        self,
        batches: Batches,
        gather: Callable[[Batches], Iterable[Any]],
        compute: Callable[[Any, Batches], object],
        exchange: Exchange | None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches, self._gather, self._compute, self._settle = batches, gather, compute, settle
        self._exchanges: dict[str, Step] = {} if exchange is None else {"communicate": exchange.whole, "message": exchange.small}

    def run(self, order: CalibrationOrder, component: str | None = None) -> tuple[int, float]:
        """Return count and seconds of the order's component, or another name's.

        ``step`` uses the next batch. Raises ValueError.
        """
        component = component or order.component
        step = self._step(component)

        def carry_out(times: int) -> None:
            for _ in range(times):
                step()
            self._settle()

        if component in self._exchanges or component == "step":
            step()  # early tasks wait here, before the clock starts
        self._settle()
        return repeat(order, carry_out)

    def _step(self, name: str) -> Step:
        if name == "data":
            return self._gathering().__next__
        if name in ("compute", "half"):
            return self._computing(self._first(half=name == "half"))
        if name == "step":
            return self._whole()
        if name not in self._exchanges:
            raise ValueError(f"there is no component {name!r} of a step here")
        return self._exchanges[name]

    def _gathering(self) -> Iterator[Any]:
        while True:
            yield from self._gather(self._batches)

    def _whole(self) -> Step:
        gathered, batches = self._gathering(), cycle([self._batches.slice(place, 1) for place in range(len(self._batches))])
        return lambda: self._compute(next(gathered), next(batches))

    def _first(self, *, half: bool) -> Batches:
        first = self._batches.slice(0, 1)
        if not half:
            return first
        start, stop = first.offsets.tolist()
        offsets = first.offsets.copy()
        offsets[1] = start + (stop - start) // 2
        return replace(first, offsets=offsets)

    def _computing(self, batch: Batches) -> Step:
        (gathered,) = self._gather(batch)
        return lambda: self._compute(gathered, batch)


@dataclass(frozen=True, slots=True)
class DirectTrial:
    """Trial of the direct exchange after a run with another one.

    It has a mesh and what repeats components, or why it is `refused`.
    """

    rank: int
    refused: str | None
    mesh: Mesh | None = None
    carry_out: CarryOut | None = None

    @classmethod
    def open(
        cls,
        task: Task,
        on_cpu: bool,
        all_reduce: Callable[[Vector], Vector],
        silence_seconds: float,
        make: Callable[[Mesh], CarryOut],
    ) -> DirectTrial:
        """Open a second mesh on all ranks by their `all_reduce`.

        GPUs are refused, as the exchange sums in the host's memory.
        """
        mesh, refused = open_trial_mesh(task, all_reduce, silence_seconds) if on_cpu else (None, "it is for CPUs")
        return cls(task.rank, refused) if mesh is None else cls(task.rank, None, mesh, make(mesh))

    def run(self, order: CalibrationOrder) -> CalibrationResult:
        """Repeat a component; see `Session.calibrate`."""
        if self.carry_out is None:
            return CalibrationResult(self.rank, 0, 0.0, refused=self.refused)
        return CalibrationResult(self.rank, *self.carry_out(order))

    def close(self) -> None:
        """Close the mesh; a second call does nothing."""
        if self.mesh is not None:
            self.mesh.close()


FOLDER_VARIABLE = "TRAINER_PROFILE_DIR"


class StepTracer(ABC):
    """Trace from the first `begin` until `left`, the updates to trace, is 0.

    Only the tracing task, `here`, writes it; others count.
    """

    def __init__(self, updates: int, *, here: bool) -> None:
        self.left = updates
        self._folder = os.environ.get(FOLDER_VARIABLE) if here else None
        self._running = False

    def begin(self) -> None:
        """Start the trace before its first update; does nothing later."""
        if self.left and not self._running:
            self._running = True
            if self._folder:
                self._start(self._folder)

    def done(self, updates: int = 1) -> None:
        """Count updates after the first `begin`; write the trace after the last."""
        self.left = max(0, self.left - updates) if self._running else self.left
        if self._running and not self.left:
            self._running = False
            if self._folder:
                self._write()

    @abstractmethod
    def _start(self, folder: str) -> None:
        """Start the trace, to be written into a folder."""

    @abstractmethod
    def _write(self) -> None:
        """End and write the trace."""
