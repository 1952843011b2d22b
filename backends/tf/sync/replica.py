"""What one sync rank trains: parameters, optimiser slots and buffers as variables on its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from ....core.job import Job
from ....core.update_rules import EMA, weights_to_evaluate
from ....models.base import Array
from ....models.layers.tf.image import HeldParameters
from ...base import State
from ..forward_context import Buffers
from ..model import TfModel
from ..optimizers import Optimizer, build_optimizer, clipped
from ..precision import LossScale
from ..state import StateMemory, copy_all, cut, slot_values

__all__ = ["Replica"]

Spread = Callable[[Array | None, tuple[int, ...]], Array]


class Replica:
    """The variables, at their initial values. Buffers are the rank's own; parameters and slots are equal on all ranks.

    Parameters and slots are held in the layouts of the model; states are canonical. `compiled`: XLA compiles an update that is traced.
    """

    def __init__(self, job: Job, model: TfModel) -> None:
        spec = self._spec = model.spec
        self._model = model
        self.optimizer: Optimizer = build_optimizer(job)
        self._parameters = [tf.Variable(self._held(name, value), name=name) for name, value in spec.initial(job.seed).items()]
        self._slots = [{slot: tf.Variable(tf.zeros_like(variable)) for slot in self.optimizer.slots} for variable in self._parameters]
        self._buffers = {name: tf.Variable(value, name=name) for name, value in spec.initial_buffers().items()}
        self.loss_scale = LossScale() if job.precision == "fp16" else None
        self._clip_norm = job.clip_norm
        self.compiled = False
        self._to_evaluate = [weights_to_evaluate(*held) for held in zip(self._parameters, self._slots, strict=True)]
        self._averages = [slots[EMA] for slots in self._slots] if EMA in self.optimizer.slots else None
        self._reset_averages()

    def read(self, *, to_evaluate: bool = False) -> tuple[HeldParameters, Buffers]:
        """Return parameters and buffers by name, in ops. The raw op: `read_value` adds a copy of the reference to it.

        `to_evaluate`: of parameters their moving averages, where the job keeps them.
        """
        variables = self._to_evaluate if to_evaluate else self._parameters
        named = zip((parameter.name for parameter in self._spec.parameters), variables, strict=True)
        parameters = self._model.parameters({name: _read(variable) for name, variable in named})
        return parameters, {name: _read(variable) for name, variable in self._buffers.items()}

    def apply(self, gradients: Sequence[tf.Tensor], scalars: Sequence[tf.Tensor]) -> None:
        """In ops: update every parameter, unless a scaled gradient overflowed."""

        def update(gradients: Sequence[tf.Tensor], scalars: Sequence[tf.Tensor]) -> None:
            if self._clip_norm:
                gradients = clipped(gradients, self._clip_norm)
            for variable, slots, gradient in zip(self._parameters, self._slots, gradients, strict=True):
                self.optimizer.apply(variable, slots, gradient, scalars)

        if self.compiled:
            update = tf.function(update, jit_compile=True, autograph=False)
        if self.loss_scale is None:
            update(gradients, scalars)
        else:
            self.loss_scale.guarded(gradients, lambda unscaled: update(unscaled, scalars))

    def zeros(self) -> list[tf.Tensor]:
        """In ops: return zeros in the shapes of the gradients."""
        return [tf.zeros(variable.shape) for variable in self._parameters]

    def a_number(self) -> tf.Tensor:
        """In ops: return a number of the largest parameter, whose update takes longest."""
        largest = max(self._parameters, key=lambda variable: int(np.prod(variable.shape)))
        return tf.reshape(_read(largest), [-1])[0]

    def keep(self, updated: Buffers) -> None:
        """In ops: take over the buffers that a training pass has changed."""
        for name, value in updated.items():
            self._buffers[name].assign(value)

    def average_buffers(self, add_up: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]], workers: int) -> None:
        """In ops: replace the buffers by their mean over the ranks."""
        sums = add_up([_read(variable) for variable in self._buffers.values()])
        for variable, summed in zip(self._buffers.values(), sums, strict=True):
            variable.assign(summed / workers)

    def reset(self) -> None:
        """Undo what updates with a learning rate of 0 have changed, which is no parameter: so no copy of those is needed."""
        for variable in (variable for slots in self._slots for variable in slots.values()):
            variable.assign(tf.zeros_like(variable))
        self._reset_averages()
        for name, value in self._spec.initial_buffers().items():
            self._buffers[name].assign(value)
        if self.loss_scale is not None:
            self.loss_scale.restore({})

    def _reset_averages(self) -> None:
        """Have the moving averages begin anew as the parameters."""
        for average, variable in zip(self._averages or (), self._parameters, strict=self._averages is not None):
            average.assign(variable)

    @property
    def scalars(self) -> Mapping[str, float]:
        """The further numbers of the state."""
        return {} if self.loss_scale is None else self.loss_scale.scalars

    def memory(self) -> StateMemory:
        """Return room for a copy of the state."""
        return StateMemory(self._spec, self.optimizer.slots)

    def copy_to(self, memory: StateMemory) -> None:
        """Copy everything. On a CPU the arrays that are copied are views of the variables' own memory, let go of at once."""
        targets = [cut(vector, specs) for vector, specs in memory.rows()]
        names = [parameter.name for parameter in self._spec.parameters]
        of_parameters = [dict(zip(names, self._parameters, strict=True))]
        of_parameters += [{name: slots[slot] for name, slots in zip(names, self._slots, strict=True)} for slot in self.optimizer.slots]
        sources = [*of_parameters, self._buffers]
        copy_all(
            (into[name], self._canonical_view(name, group[name])) for into, group in zip(targets, sources, strict=True) for name in into
        )

    def install(self, state: State | None, spread: Spread) -> None:
        """Take over rank 0's state, which `spread` brings to all; slots that are absent become zeros. Others give None."""
        for parameter, variable, slots in zip(self._spec.parameters, self._parameters, self._slots, strict=True):
            values = spread(None if state is None else state.parameters[parameter.name], parameter.shape)
            variable.assign(self._held(parameter.name, values))
            for slot, of in slots.items():
                given = None if state is None else slot_values(state, slot, parameter)
                of.assign(self._held(parameter.name, spread(given, parameter.shape)))
        for buffer in self._spec.buffers:
            self._buffers[buffer.name].assign(spread(None if state is None else state.buffers[buffer.name], buffer.shape))
        if self.loss_scale is not None:
            mine = {} if state is None else state.scalars
            own = np.array([mine.get(name, value) for name, value in LossScale.initial().items()], np.float32)
            given_scale = spread(None if state is None else own, own.shape)
            self.loss_scale.restore(dict(zip(LossScale.initial(), given_scale.tolist(), strict=True)))

    def _held(self, name: str, canonical: Array) -> Array:
        return self._model.layouts[name].to_storage(canonical) if name in self._model.layouts else canonical

    def _canonical_view(self, name: str, variable: tf.Variable) -> Array:
        """Return a view of the variable's memory with the elements in canonical order."""
        held = _view(variable)
        return self._model.layouts[name].as_canonical(held) if name in self._model.layouts else held


def _read(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _view(variable: tf.Variable) -> Array:
    return np.asarray(variable.read_value())
