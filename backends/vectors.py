"""Flat vectors of a model's values.

Fresh memory for AlexNet's state, 488 MB, would cost 1.2 s a copy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.errors import RunFailedError
from ..core.job import Job
from ..core.update_rules import EMA, FIRST_MOMENT, MOMENTUM, SECOND_MOMENT, averaging_rates, slot_names
from ..data.base import IMAGE, LABEL, Dataset, Split
from ..data.columns import LENGTHS
from ..data.features import read_column
from ..data.preprocessing import Changes, apply_changes, normal_table
from ..exchange.parameter_server.shards import Vector
from ..models.base import Array, ModelSpec, ParameterSpec
from .base import State


def cut(flat: Array, specs: Sequence[ParameterSpec]) -> dict[str, Array]:
    """Return a flat vector's pieces by name, in canonical shapes on the same memory."""
    pieces = np.split(flat, np.cumsum([spec.size for spec in specs], dtype=np.int64))  # the last one is empty
    return {spec.name: piece.reshape(spec.shape) for spec, piece in zip(specs, pieces, strict=False)}


def each_value(spec: ModelSpec, slots: Sequence[str], state: State) -> Iterator[Array | None]:
    """Yield the values of a state: parameters, each slot, buffers. Raises ValueError.

    An absent slot is None, or the weights for moving averages.
    """
    yield from _values(spec, spec.parameters, state.parameters, "parameter")
    for slot in slots:
        if slot in state.slots:
            yield from _values(spec, spec.parameters, state.slots[slot], slot)
        elif slot == EMA:
            yield from _values(spec, spec.parameters, state.parameters, "parameter")
        else:
            yield from (None for _ in spec.parameters)
    yield from _values(spec, spec.buffers, state.buffers, "buffer")


def _values(spec: ModelSpec, wanted: Sequence[ParameterSpec], values: Mapping[str, Array], what: str) -> Iterator[Array]:
    for parameter in wanted:
        shape = values[parameter.name].shape if parameter.name in values else "nothing"
        if shape != parameter.shape:
            raise ValueError(f"{what} {parameter.name!r} of model {spec.name!r} has shape {parameter.shape}; the given state has {shape}")
    return (np.asarray(values[parameter.name], dtype=np.float32) for parameter in wanted)


class StateMemory:
    """Memory for one copy of the state.

    `arrays` are its values in canonical shapes, in the order of `each_value`.
    """

    def __init__(self, spec: ModelSpec, slots: Sequence[str], allocate: Callable[[int], Array] | None = None) -> None:
        self._spec, self._slots = spec, tuple(slots)
        make = allocate or (lambda size: np.empty(size, np.float32))
        self.vectors = [make(spec.size) for _ in range(1 + len(self._slots))]
        self.buffers = make(spec.buffers_size)
        for vector in (*self.vectors, self.buffers):
            vector.fill(0.0)  # fresh zeros may share one page
        shaped = [piece for vector in self.vectors for piece in cut(vector, spec.parameters).values()]
        self.arrays = [*shaped, *cut(self.buffers, spec.buffers).values()]

    def fill(self, state: State) -> None:
        """Copy a state; absent slots become zeros.

        Raises ValueError where it does not fit the model.
        """
        for kept, value in zip(self.arrays, each_value(self._spec, self._slots, state), strict=True):
            np.copyto(kept, 0.0 if value is None else value)

    def shard(self, start: int, stop: int) -> list[Array]:
        """Return the non-empty pieces of elements start … stop − 1 of parameters and buffers."""
        size = self._spec.size
        pieces = [vector[start : min(stop, size)] for vector in self.vectors if start < min(stop, size)]
        tail = self.buffers[max(start, size) - size : max(stop, size) - size]
        return pieces + ([tail] if len(tail) else [])

    def state(self, updates: int, scalars: Mapping[str, float] | None = None) -> State:
        """Return the copy as a state on this memory."""
        first, *slots = (cut(vector, self._spec.parameters) for vector in self.vectors)
        buffers = cut(self.buffers, self._spec.buffers)
        return State(first, dict(zip(self._slots, slots, strict=True)), updates, buffers, dict(scalars or {}))


FLOAT_LIMIT_BYTES = 2**30  # larger images stay as stored, normalised by batch
ColumnArrays: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]  # one array of a fixed shape, or arrays by name
Indices: TypeAlias = NDArray[np.int32] | NDArray[np.int64]


class GatheredSplit:
    """The columns of a split that a model reads. Whole numbers are int64, others float32."""

    def __init__(
        self, data: Dataset, split: Split, *, inputs: Sequence[str] = (IMAGE,), target: str = LABEL, changing: bool = False
    ) -> None:
        """Load the split. `changing`: images are augmented from stored pixels.

        Raises UsageError for a missing column.
        """
        self._size = data.info.sizes[split]
        self._columns = {name: read_column(data, split, name) for name in (*inputs, target)}
        self._inputs, self._target = tuple(inputs), target
        self._images: Array | None = None
        if IMAGE in inputs:
            self._table = normal_table(data.info.mean, data.info.std)
            if not changing and 4 * self._size * math.prod(data.info.input_shape) <= FLOAT_LIMIT_BYTES:
                self._images = data.inputs(split)

    def __len__(self) -> int:
        return self._size

    def longest(self, start: int, stop: int) -> int:
        """Return the longest length of the examples start … stop − 1 in any varying column.

        It is 0 without one.
        """
        bounds = [column.offsets[start : stop + 1] for column in self._columns.values() if column.offsets is not None]
        return max((int(np.diff(offsets).max(initial=0)) for offsets in bounds), default=0)

    def take(self, indices: Indices, changes: Changes | None = None) -> tuple[ColumnArrays, ColumnArrays]:
        """Return copies of inputs and target of the examples at `indices`.

        `changes` [n, 3] are made on images.
        """
        inputs = {name: self._take_images(indices, changes) if name == IMAGE else self._take(name, indices) for name in self._inputs}
        return only_or_named(inputs), self._take(self._target, indices)

    def _take_images(self, indices: Indices, changes: Changes | None) -> Array:
        if self._images is not None and changes is None:
            return self._images[indices]
        stored: NDArray[Any] = self._columns[IMAGE].values[indices]
        images = stored if changes is None else apply_changes(stored, changes)
        normalised = np.empty(images.shape, np.float32)
        for channel, table in enumerate(self._table):
            np.take(table, images[:, channel], out=normalised[:, channel], mode="clip")
        return normalised

    def _take(self, name: str, indices: Indices) -> ColumnArrays:
        examples = self._columns[name].take(indices)
        if examples.offsets is None:
            return _numbers(examples.values)
        return {name: _numbers(examples.padded()), f"{name}{LENGTHS}": examples.lengths}


def _numbers(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64, copy=False)


Values = TypeVar("Values")


def columns_by_name(names: Sequence[str], columns: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what `only_or_named` made as arrays by name."""
    named = columns if isinstance(columns, dict) else {names[0]: columns}
    return {name: convert(value) for name, value in named.items()}


def only_or_named(columns: Mapping[str, Values | dict[str, Values]]) -> Values | dict[str, Values]:
    """Return a model's only column, or all of them by name."""
    if len(columns) == 1:
        return next(iter(columns.values()))
    named: dict[str, Values] = {}
    for name, column in columns.items():
        named |= column if isinstance(column, dict) else {name: column}
    return named


# Torch's formulas for any module of arrays. sgd: g ← g + λ·w, b ← μ·b + g, w ← w − lr·b, or lr·(g + μ·b) by Nesterov. Adam: m ← m +
# (1−β1)·(g−m), v ← β2·v + (1−β2)·g², w ← w − lr/(1−β1ᵗ)·m / (√v/√(1−β2ᵗ) + ε), with λ·w added to g, or with adamw w ← (1 − lr·λ)·w first.


class Factors(NamedTuple):
    """Numbers of one update, computed in float64.

    They are passed as values, so that nothing is compiled again when they change.
    """

    lr: float
    decay: float  # adamw's factor of the weights
    first_rate: float  # lr / (1 − β1ᵗ)
    second_root: float  # √(1 − β2ᵗ)
    averaging: float  # part of the new weights in their average


class UpdateFormulas:
    """A job's update rule, element by element and without memory."""

    def __init__(self, job: Job) -> None:
        self._job, self.slots = job, slot_names(job)

    def factors(self, lr: float, update: int) -> Factors:
        """Return the numbers of an update, counted from 1."""
        job = self._job
        averaging = float(averaging_rates(job.ema_decay, np.array([update]))[0]) if job.ema_decay else 1.0
        if job.optimizer == "sgd":
            return Factors(lr, 1.0, 0.0, 1.0, averaging)
        decay = 1.0 - lr * job.weight_decay if job.optimizer == "adamw" else 1.0
        return Factors(lr, decay, lr / (1.0 - job.beta1**update), math.sqrt(1.0 - job.beta2**update), averaging)

    def updated(self, arrays: Any, weights: Any, gradient: Any, slots: Mapping[str, Any], factors: Factors) -> tuple[Any, dict[str, Any]]:
        """Return weights and slots after an update, as arrays of the module `arrays`.

        Inputs are not changed.
        """
        job = self._job
        if job.weight_decay and job.optimizer != "adamw":
            gradient = gradient + job.weight_decay * weights
        if job.optimizer == "sgd":
            new_slots = {}
            if job.momentum:
                new_slots[MOMENTUM] = job.momentum * slots[MOMENTUM] + gradient
                gradient = gradient + job.momentum * new_slots[MOMENTUM] if job.nesterov else new_slots[MOMENTUM]
            weights = weights - factors.lr * gradient
        else:
            first = slots[FIRST_MOMENT] + (1.0 - job.beta1) * (gradient - slots[FIRST_MOMENT])
            second = job.beta2 * slots[SECOND_MOMENT] + (1.0 - job.beta2) * gradient * gradient
            root = arrays.sqrt(second) / factors.second_root + job.epsilon
            kept = factors.decay * weights if job.optimizer == "adamw" else weights
            weights, new_slots = kept - factors.first_rate * first / root, {FIRST_MOMENT: first, SECOND_MOMENT: second}
        if job.ema_decay:
            new_slots[EMA] = slots[EMA] + factors.averaging * (weights - slots[EMA])
        return weights, new_slots


def clip(gradient: Array, limit: float) -> None:
    """Scale a flat gradient in place to a norm of at most about `limit`.

    g · min(1, limit / (‖g‖ + 1e-6)).
    """
    factor = limit / (float(np.linalg.norm(gradient)) + 1e-6)
    if factor < 1.0:
        gradient *= np.float32(factor)


BLOCK_ELEMENTS = 2**16  # intermediate results stay in a second-level cache


class VectorRule:
    """Update rule with its vector.

    It is an `UpdateRule` of the parameter server and of `backends.arrays`.
    """

    def __init__(self, job: Job, parameters: Vector) -> None:
        self.updates = 0
        self._formulas, self._parameters = UpdateFormulas(job), parameters
        self.slots: Mapping[str, Vector] = {name: np.zeros_like(parameters) for name in self._formulas.slots}
        reset_slots(self.slots, parameters)

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply and count one update; the gradient is not changed."""
        self.updates += 1
        factors = self._formulas.factors(lr, self.updates)
        for start in range(0, len(self._parameters), BLOCK_ELEMENTS):
            part = slice(start, start + BLOCK_ELEMENTS)
            slots = {name: vector[part] for name, vector in self.slots.items()}
            weights, new_slots = self._formulas.updated(np, self._parameters[part], gradient[part], slots, factors)
            np.copyto(self._parameters[part], weights)
            for name, vector in slots.items():
                np.copyto(vector, new_slots[name])


def reset_slots(slots: Mapping[str, Vector], parameters: Vector) -> None:
    """Reset the slots to their values before the first update."""
    for name, vector in slots.items():
        np.copyto(vector, parameters if name == EMA else 0.0)


EVALUATION_BATCH = 1024  # examples per forward pass
EVALUATION_LOGITS_BYTES = 2**27  # of sequences' logits per pass, with padding; the softmax takes as much again
EVALUATION_BYTES = 2**25  # of images per pass: 55 of 224 × 224; AlexNet's activations take ten times as much


def evaluation_batch(spec: ModelSpec) -> int:
    """Return the maximum of examples in an evaluation's pass.

    For sequences see `examples_per_pass`.
    """
    return max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // (4 * math.prod(spec.input_shape))))


def examples_per_pass(spec: ModelSpec, longest: int, most: int) -> int:
    """Return how many of `most` examples an evaluation's pass takes, at least one.

    `longest` is the maximum of their lengths.
    """
    return max(1, min(most, EVALUATION_LOGITS_BYTES // max(1, 4 * spec.logits_per_position * longest)))


def evaluation_passes(spec: ModelSpec, longest: Callable[[int, int], int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of an evaluation's passes over the examples start … stop − 1.

    `longest` returns the maximum length in a range.
    """
    while start < stop:
        most = min(evaluation_batch(spec), stop - start)
        end = start + examples_per_pass(spec, longest(start, start + most), most)
        yield start, end
        start = end


class FlatValues:
    """Parameters, then buffers, in a float32 `vector` in the spec's order.

    `parameters` and `buffers` are views of it.
    """

    def __init__(self, spec: ModelSpec, vector: Array | None = None) -> None:
        self.vector: Array = np.zeros(spec.size + spec.buffers_size, np.float32) if vector is None else vector
        self.trained, self.tail = self.vector[: spec.size], self.vector[spec.size :]
        self.parameters, self.buffers = cut(self.trained, spec.parameters), cut(self.tail, spec.buffers)

    def set_initial(self, spec: ModelSpec, seed: int) -> None:
        """Write the model's initial values."""
        for views, values in ((self.parameters, spec.initial(seed)), (self.buffers, spec.initial_buffers(seed))):
            for name, view in views.items():
                np.copyto(view, values[name])


FIRST_SCALE = MAX_SCALE = 2.0**14
MIN_SCALE = 1.0
CLEAN_STEPS = 2000  # updates without an overflow until the scale doubles


def _chosen(condition: Any, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


def next_scale(
    scale: Any, clean: Any, finite: Any, *, where: Callable[[Any, Any, Any], Any] = _chosen, smaller: Callable[[Any, Any], Any] = min
) -> tuple[Any, Any]:
    """Return scale and updates in a row without overflow after an update.

    `where` and `smaller` are the framework's, for its scalars.
    """
    unbroken = where(finite, clean + 1, clean * 0)
    grows = unbroken >= CLEAN_STEPS
    kept = where(grows, smaller(scale * 2.0, MAX_SCALE), scale)
    return where(finite, kept, scale * 0.5), where(grows, clean * 0, unbroken)


def refuse_exhausted(scale: float) -> None:
    """Raise RunFailedError for a scale below the minimum."""
    if scale < MIN_SCALE:
        raise RunFailedError(
            f"precision fp16: gradients are not finite even at the loss scale {MIN_SCALE:g}, so that no update could be made any more; "
            "train with --precision bf16 or fp32, with a smaller --lr or a longer warm-up"
        )


class LossScale:
    """The loss scale, and the updates in a row without an overflow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restore({})

    @property
    def scalars(self) -> dict[str, float]:
        """Numbers for a checkpoint."""
        with self._lock:
            return {"loss_scale": self.scale, "clean_steps": float(self.clean_steps)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of a checkpoint, or the initial values."""
        with self._lock:
            self.scale, self.clean_steps = scalars.get("loss_scale", FIRST_SCALE), int(scalars.get("clean_steps", 0.0))


class ChiefLossScale(LossScale):
    """That of async workers, on the chief, which sends it and learns from their updates."""

    def learn(self, begun: float, ended: float, updates: int) -> None:
        """Learn from a worker's `updates`: a lower scale holds for all.

        Raises RunFailedError if it is exhausted.
        """
        with self._lock:
            if ended < begun:
                self.scale, self.clean_steps = min(self.scale, ended), 0
                refuse_exhausted(self.scale)
                return
            self.clean_steps += updates
            if self.clean_steps >= CLEAN_STEPS:
                self.scale, self.clean_steps = min(self.scale * 2.0, MAX_SCALE), 0
