"""Which of a run's weights are used: those of the newest checkpoint, of the best, of one by name, or the mean of several.

The mean is taken parameter by parameter in float64 and stored as float32: beside the result there is one parameter at a time, as
checkpoints are maps of their files. Running statistics are averaged like weights.
"""

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
from ..metrics.recorded import read_metrics
from ..records.store.run_directory import RunReader
from .folder import best_checkpoints, is_checkpoint, list_checkpoints, read_lock
from .meta import Meta
from .reader import Checkpoint, DamagedCheckpointError, read_checkpoint
from .writer import checkpoint_name

__all__ = ["WEIGHTS", "ChosenWeights", "Selection", "WeightsKind", "choose", "held"]

WeightsKind = Literal["ema", "trained"]
WEIGHTS: tuple[WeightsKind, ...] = ("ema", "trained")
"""The moving average that ``--ema-decay`` keeps, and the weights that are trained."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked for of a run. `best`: by the figure of its ``--keep-best``, or by its first metric; without it the newest.

    `checkpoint`: one by the name of its folder, or by its number of updates. `average`: the mean of so many, the newest or the best.
    `weights`: None takes the moving average where the checkpoint has one, as the run's own evaluations do.
    """

    best: bool = False
    checkpoint: str | None = None
    average: int = 1
    weights: WeightsKind | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The options that were given."""
        asked = {
            "--best": self.best,
            "--checkpoint": self.checkpoint is not None,
            "--average-checkpoints": self.average > 1,
            "--weights": self.weights is not None,
        }
        return tuple(option for option, given in asked.items() if given)


@dataclass(frozen=True)
class ChosenWeights:
    """Sound checkpoints of one run, whose mean is used; the first is the newest or the best. `weights` says which of their weights.

    `damaged` are those that were passed over.
    """

    checkpoints: tuple[Checkpoint, ...]
    weights: WeightsKind
    damaged: tuple[DamagedCheckpointError, ...] = ()

    @property
    def meta(self) -> Meta:
        """The description of the first checkpoint."""
        return self.checkpoints[0].meta

    @property
    def path(self) -> Path:
        """The first checkpoint."""
        return self.checkpoints[0].path

    @property
    def label(self) -> str:
        """The choice as part of a folder's name, such as ``step-000000500-mean-of-3``."""
        count = len(self.checkpoints)
        mean = f"-mean-of-{count}" if count > 1 else ""
        return f"{self.path.name}{mean}{'-trained' if self.weights == 'trained' and EMA in _slots(self.checkpoints[0]) else ''}"

    @property
    def averaged(self) -> list[str] | None:
        """The names of the checkpoints whose mean this is; None of a single one."""
        return [checkpoint.path.name for checkpoint in self.checkpoints] if len(self.checkpoints) > 1 else None

    @property
    def metrics(self) -> Mapping[str, float] | None:
        """The figures of the evaluation of just these weights; None where there was none."""
        evaluated = "ema" if EMA in _slots(self.checkpoints[0]) else "trained"
        return self.meta.metrics if len(self.checkpoints) == 1 and self.weights == evaluated else None

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Return the weights by canonical name."""
        return self._mean(f"slots/{EMA}/" if self.weights == "ema" else "parameters/")

    def buffers(self) -> dict[str, NDArray[Any]]:
        """Return the buffers by canonical name."""
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
    """Return what a selection is of a run directory, or of a checkpoint, which then is the only one.

    Raises UsageError where there is no such checkpoint, or there are fewer sound ones than are to be averaged, DamagedCheckpointError for
    one that was named and is damaged.
    """
    if is_checkpoint(source):
        for option in selection.given:
            if option != "--weights":
                raise UsageError(f"{option}: chooses among the checkpoints of a run, and {str(source)!r} is a checkpoint. Give the run.")
        return _of([read_checkpoint(source)], selection, ())
    if selection.checkpoint is not None:
        return _of([read_checkpoint(_named(source, selection))], selection, ())
    return _of_several(source, selection)


def _of_several(run: Path, selection: Selection) -> ChosenWeights:
    """Choose the newest or the best, passing over what is damaged. A run at work may remove one meanwhile: then once more."""
    found: list[Checkpoint] = []
    damaged: list[DamagedCheckpointError] = []
    candidates = best_checkpoints(run, best_by(run)) if selection.best else list_checkpoints(run)
    for path in candidates:
        try:
            found.append(read_checkpoint(path))
        except DamagedCheckpointError as error:
            if not path.exists():
                return _of_several(run, selection)
            damaged.append(error)
        if len(found) == selection.average:
            return _of(found, selection, tuple(damaged))
    problems = "".join(f"\n{error}" for error in damaged)
    if found:
        which = "evaluated and sound" if selection.best else "sound"
        number = f"1 checkpoint that is {which}" if len(found) == 1 else f"{len(found)} checkpoints that are {which}"
        raise UsageError(
            f"--average-checkpoints: got {selection.average}, but the run {str(run)!r} has {number}; "
            f"a run keeps as many as its --keep and --keep-best-count say.{problems}"
        )
    if damaged:
        raise UsageError(f"run: {str(run)!r} has no sound checkpoint.{problems}")
    if selection.best and list_checkpoints(run):
        raise UsageError(
            f"--best: none of the checkpoints of {str(run)!r} was evaluated. Evaluations before a save do that (--eval-every)."
        )
    raise UsageError(f"run: {str(run)!r} has no checkpoint. A run saves its last state, and more often with --checkpoint-every.")


def _named(run: Path, selection: Selection) -> Path:
    asked = selection.checkpoint or ""
    if selection.best or selection.average > 1:
        other = "--best" if selection.best else "--average-checkpoints"
        raise UsageError(
            f"--checkpoint: got {asked!r}, which names the one to take, and {other}, which has it chosen; give one of the two."
        )
    known = {path.name: path for path in list_checkpoints(run)}
    name = checkpoint_name(int(asked)) if asked.isascii() and asked.isdigit() and len(asked) <= 20 else asked
    if name not in known:
        raise UsageError.of("--checkpoint", asked, ", ".join(known) or "none, as the run has no checkpoint", list(known))
    return known[name]


def best_by(run: Path) -> MetricInfo:
    """Return the metric that a run's best checkpoint is the best by: that of its ``--keep-best``, or its first."""
    job = RunReader(run).job()
    infos = read_metrics(job)
    return next((info for info in infos if info.name == job.get("keep_best")), infos[0])


def _of(checkpoints: list[Checkpoint], selection: Selection, damaged: tuple[DamagedCheckpointError, ...]) -> ChosenWeights:
    """Put a choice together. Raises UsageError where one of the checkpoints lacks the weights, or has other ones than the first."""
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
def held(source: Path, selection: Selection) -> Iterator[ChosenWeights]:
    """Choose, and keep a run that is at work from removing the checkpoints within the block."""
    while True:
        chosen = choose(source, selection)
        with ExitStack() as locks:
            if all(locks.enter_context(read_lock(checkpoint.path)) for checkpoint in chosen.checkpoints):
                yield chosen
                return
