"""An async worker's computation with an `ArrayModel`."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.job import Job
from ...core.liveness.startup_watchdog import startup_phase
from ...data.base import Dataset, Split
from ...data.sampler import Batches, Sampler
from ...models.base import ModelSpec
from ..parameter_server.computation import Computed
from ..parameter_server.tickets import cut_evaluation
from ..timing import Calibrator, Exchange
from ..vectors.evaluation_batches import evaluation_batch
from ..vectors.flat_values import FlatValues
from ..vectors.update_formulas import clip
from .model import ArrayModel
from .passes import Passes

__all__ = ["ArrayComputation"]


class ArrayComputation:
    """A `Computation` of the parameter server; warm when it is made."""

    loss_scale: float | None = None

    def __init__(self, job: Job, spec: ModelSpec, data: Dataset, sampler: Sampler, model: ArrayModel) -> None:
        self._passes, self._clip_norm = Passes(job, spec, data, model), job.clip_norm
        self._values, self._gradient = FlatValues(spec), FlatValues(spec)
        self.values, self.gradient = self._values.vector, self._gradient.vector
        self.precision_used: str = job.precision
        self.device_used = model.device_used
        startup_phase("warming up")
        epoch = sampler.whole(0, 0, sampler.steps_per_epoch)
        tickets = cut_evaluation("test", data.info.sizes["test"], job.workers, evaluation_batch(spec))
        pieces = {ticket.stop - ticket.start: (ticket.start, ticket.stop) for ticket in tickets}
        self._passes.warm_up(epoch, self._values, self._gradient, list(pieces.values()))

    def gradients(self, batches: Batches, first_step: int) -> Iterator[Computed]:
        """Compute one update after another; see `Computation.gradients`."""
        for loss in self._passes.gradients(batches, first_step, self._values, self._gradient):
            if self._clip_norm:
                clip(self._gradient.trained, self._clip_norm)
            yield loss, False

    def sums(self, split: Split, start: int, stop: int) -> list[float]:
        """Return the sums of an evaluation's piece; see `Computation.sums`."""
        return self._passes.sums(self._values, split, start, stop)

    def calibrator(self, batches: Batches, exchange: Exchange) -> Calibrator:
        """Return what repeats the components of a step; see `Computation.calibrator`."""
        passes, values, gradient = self._passes, self._values, self._gradient
        return Calibrator(
            batches, passes.gather, lambda found, batch: passes.gradient(found, float(batch.weights[0]), values, gradient), exchange
        )
