"""Carrying out orders to calibrate by the clock of the host: for any framework, and for none; see `Session.calibrate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, Protocol

from ..data.sampler import Batches
from ..exchange.mesh.mesh import Mesh
from .base import CalibrationOrder, CalibrationResult

__all__ = ["Calibrator", "DirectTrial", "Exchange", "repeat"]

Step = Callable[[], object]


def repeat(order: CalibrationOrder, carry_out: Callable[[int], object]) -> tuple[int, float]:
    """Return how often a component of a step was repeated, and the seconds that it took.

    `carry_out(n)` does it n times and returns when all of that is complete, on a device too. The first n is the order's count; then as
    many as should fit into the time that is left, but at most as many again as were done: the rate may change.
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


class Exchange(Protocol):
    """What a step exchanges with other tasks."""

    def whole(self) -> None:
        """Exchange it once."""
        ...

    def small(self) -> None:
        """Exchange a few bytes in place of each message."""
        ...


class Calibrator:
    """Carries out orders, on a sync rank and on an async worker.

    `batches` are those to gather, and the first of them is the one to compute on. `gather` yields batches as training reads them;
    `compute` computes on one that was gathered, which is also given as the only one of some batches. `exchange` is None where there is
    nobody to exchange with. `settle` waits until the device has done everything.
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
        """Return how often the component was repeated and the seconds that it took. Raises ValueError for one that does not exist here.

        `component` is what the order's is called here, where that is another name: also ``step``, which computes on the next batch.
        """
        component = component or order.component
        step = self._step(component)

        def carry_out(times: int) -> None:
            for _ in range(times):
                step()
            self._settle()

        if component in self._exchanges or component == "step":
            step()  # whoever is early waits here, before the clock starts
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
        """Yield batch after batch without an end."""
        while True:
            yield from self._gather(self._batches)

    def _whole(self) -> Step:
        """Return what computes on the next batch, fresh from memory as in training."""
        gathered, each = self._gathering(), cycle([self._batches.slice(place, 1) for place in range(len(self._batches))])
        return lambda: self._compute(next(gathered), next(each))

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


class DirectTrial:
    """What a step would take with the direct exchange: tried by ranks that have trained with another one, when their run is over.

    `mesh` is beside the run's own exchange, and `carry_out` repeats components of a step that uses it. Without them
    `refused` says why.
    """

    def __init__(
        self,
        rank: int,
        refused: str | None,
        mesh: Mesh | None = None,
        carry_out: Callable[[CalibrationOrder], tuple[int, float]] | None = None,
    ) -> None:
        self._rank, self._refused, self._mesh, self._carry_out = rank, refused, mesh, carry_out

    def run(self, order: CalibrationOrder) -> CalibrationResult:
        """Repeat a component; see `Session.calibrate`."""
        if self._carry_out is None:
            return CalibrationResult(self._rank, 0, 0.0, refused=self._refused)
        return CalibrationResult(self._rank, *self._carry_out(order))

    def close(self) -> None:
        """Close the mesh; a second call does nothing."""
        if self._mesh is not None:
            self._mesh.close()
