"""Choice of a run's weights: newest or best checkpoint, one by name, or the mean of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..core.update_rules import EMA
from ..metrics import MetricInfo
from ..metrics.base import read_metrics
from ..records.store.run_directory import RunReader
from .folder import best_checkpoints, is_checkpoint, list_checkpoints, no_checkpoint, read_lock, read_sound
from .meta import Meta
from .reader import Checkpoint, DamagedCheckpointError, read_checkpoint
from .writer import checkpoint_name

WeightsKind = Literal["ema", "trained"]
WEIGHTS: tuple[WeightsKind, ...] = ("ema", "trained")  # "ema": the moving average of --ema-decay


@dataclass(frozen=True, slots=True)
class Selection:
    """The requested weights of a run; the newest checkpoint by default.

    `best`: by the metric of the run's ``--keep-best``, or by its first. `checkpoint`: folder name or number of updates. `average`: number
    of checkpoints, the newest or the best, to average. `weights`: None prefers the moving average, as the run's evaluations do.
    """

    best: bool = False
    checkpoint: str | None = None
    average: int = 1
    weights: WeightsKind | None = None

    @property
    def given_options(self) -> tuple[str, ...]:
        """Options that differ from their defaults."""
        options = {
            "--best": self.best,
            "--checkpoint": self.checkpoint is not None,
            "--average-checkpoints": self.average > 1,
            "--weights": self.weights is not None,
        }
        return tuple(option for option, is_given in options.items() if is_given)


@dataclass(frozen=True)
class ChosenWeights:
    """Sound checkpoints of one run to average, the newest or best first.

    `damaged`: those skipped.
    """

    checkpoints: tuple[Checkpoint, ...]
    weights: WeightsKind
    damaged: tuple[DamagedCheckpointError, ...] = ()

    @property
    def meta(self) -> Meta:
        """Description of the first checkpoint."""
        return self.checkpoints[0].meta

    @property
    def path(self) -> Path:
        """Path of the first checkpoint."""
        return self.checkpoints[0].path

    @property
    def label(self) -> str:
        """Part of a folder's name, such as ``step-000000500-mean-of-3``."""
        count = len(self.checkpoints)
        mean = f"-mean-of-{count}" if count > 1 else ""
        return f"{self.path.name}{mean}{'-trained' if self.weights == 'trained' and EMA in _slots(self.checkpoints[0]) else ''}"

    @property
    def averaged(self) -> list[str] | None:
        """Names of the averaged checkpoints; None for a single one."""
        return [checkpoint.path.name for checkpoint in self.checkpoints] if len(self.checkpoints) > 1 else None

    @property
    def metrics(self) -> Mapping[str, float] | None:
        """Metrics of an evaluation of exactly these weights, if any."""
        evaluated = "ema" if EMA in _slots(self.checkpoints[0]) else "trained"
        return self.meta.metrics if len(self.checkpoints) == 1 and self.weights == evaluated else None

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Return the weights by canonical name: the float64 mean, stored as float32."""
        return self._mean(f"slots/{EMA}/" if self.weights == "ema" else "parameters/")

    def buffers(self) -> dict[str, NDArray[Any]]:
        """Return the buffers by canonical name; running statistics are averaged like weights."""
        return self._mean("buffers/")

    def _mean(self, prefix: str) -> dict[str, NDArray[Any]]:
        keys = [key for key in self.checkpoints[0].arrays if key.startswith(prefix)]
        return {key.removeprefix(prefix): _mean([checkpoint.arrays[key] for checkpoint in self.checkpoints]) for key in keys}


def _mean(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]
    total = np.zeros(arrays[0].shape, np.float64)
    for array in arrays:
        total += array
    total /= len(arrays)
    return total.astype(arrays[0].dtype)


def choose(source: Path, selection: Selection) -> ChosenWeights:
    """Select weights of a run or checkpoint.

    Raises UsageError for too few sound ones, or a damaged one given by name.
    """
    if is_checkpoint(source):
        for option in selection.given_options:
            if option != "--weights":
                raise UsageError(f"{option}: chooses among the checkpoints of a run, and {str(source)!r} is a checkpoint. Give the run.")
        return _check_weights([read_checkpoint(source)], selection, ())
    if selection.checkpoint is not None:
        return _check_weights([read_checkpoint(_find_named(source, selection))], selection, ())
    return _choose_among_several(source, selection)


def _choose_among_several(run: Path, selection: Selection) -> ChosenWeights:
    sound, damaged = read_sound(lambda: best_checkpoints(run, best_by(run)) if selection.best else list_checkpoints(run), selection.average)
    if len(sound) == selection.average:
        return _check_weights(sound, selection, tuple(damaged))
    if sound:
        which = "evaluated and sound" if selection.best else "sound"
        number = f"1 checkpoint that is {which}" if len(sound) == 1 else f"{len(sound)} checkpoints that are {which}"
        problems = "".join(f"\n{error}" for error in damaged)
        raise UsageError(
            f"--average-checkpoints: got {selection.average}, but the run {str(run)!r} has {number}; "
            f"a run keeps as many as its --keep and --keep-best-count say.{problems}"
        )
    if selection.best and not damaged and list_checkpoints(run):
        raise UsageError(
            f"--best: none of the checkpoints of {str(run)!r} was evaluated. Evaluations before a save do that (--eval-every)."
        )
    raise no_checkpoint(run, damaged)


def _find_named(run: Path, selection: Selection) -> Path:
    requested = selection.checkpoint or ""
    if selection.best or selection.average > 1:
        option = "--best" if selection.best else "--average-checkpoints"
        raise UsageError(
            f"--checkpoint: got {requested!r}, which names the one to take, and {option}, which has it chosen; give one of the two."
        )
    known = {path.name: path for path in list_checkpoints(run)}
    name = checkpoint_name(int(requested)) if requested.isascii() and requested.isdigit() and len(requested) <= 20 else requested
    if name not in known:
        raise UsageError.of("--checkpoint", requested, ", ".join(known) or "none, as the run has no checkpoint", list(known))
    return known[name]


def best_by(run: Path) -> MetricInfo:
    """Return the metric of a run's ``--keep-best``, or its first."""
    job = RunReader(run).job()
    infos = read_metrics(job)
    return next((info for info in infos if info.name == job.get("keep_best")), infos[0])


def _check_weights(checkpoints: list[Checkpoint], selection: Selection, damaged: tuple[DamagedCheckpointError, ...]) -> ChosenWeights:
    """Raises UsageError if a checkpoint is missing these weights, or is of another model."""
    weights: WeightsKind = selection.weights or ("ema" if EMA in _slots(checkpoints[0]) else "trained")
    wanted = _shapes(checkpoints[0])
    for checkpoint in checkpoints:
        if weights == "ema" and EMA not in _slots(checkpoint):
            raise UsageError(f"--weights: got 'ema', but {checkpoint.path.name} has no moving average of the weights (--ema-decay).")
        if _shapes(checkpoint) != wanted:
            raise UsageError(f"--average-checkpoints: {checkpoint.path.name} and {checkpoints[0].path.name} are of different models.")
    return ChosenWeights(tuple(checkpoints), weights, damaged)


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {key: array.shape for key, array in checkpoint.arrays.items() if not key.startswith("slots/")}


def _slots(checkpoint: Checkpoint) -> set[str]:
    return {key.split("/")[1] for key in checkpoint.arrays if key.startswith("slots/")}


@contextmanager
def locked_weights(source: Path, selection: Selection) -> Iterator[ChosenWeights]:
    """Select weights, and protect their checkpoints from an active run within the block."""
    while True:
        chosen = choose(source, selection)
        with ExitStack() as locks:
            if all(locks.enter_context(read_lock(checkpoint.path)) for checkpoint in chosen.checkpoints):
                yield chosen
                return
