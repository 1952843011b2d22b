"""A model's parameters and buffers as tensors, its forward function from the (model, backend) table, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from ...core.errors import UsageError
from ...core.job import Job
from ...core.plugins import forward_plugin, load
from ...data.columns import LENGTHS, TOKENS
from ...data.sampler import Batches
from ...models.base import Array, ForwardContext, ModelSpec
from ...models.objectives import COUNTED, CROSS_ENTROPY, LOSS_SUM
from ..decoding_functions import DecodingFunctions
from ..vectors.evaluation_batches import evaluation_batch, examples_at_once
from .data import ColumnTensors, ResidentSplit, part_of
from .decoding import TorchStepper
from .forward_context import ForwardContexts
from .optimizers import overwrites_gradients
from .precision import low_format, watched
from .state import cut

__all__ = ["DistributedLoss", "MicroBatch", "Model", "apart", "micro_batches_of"]

Forward = Callable[..., torch.Tensor]
Context = ForwardContext[torch.Tensor]
MicroBatch = tuple[ColumnTensors, ColumnTensors, Context]
"""Inputs, target and the context of the pass over them."""

Losses = Callable[[torch.Tensor, ColumnTensors, Context], torch.Tensor]
"""From a forward function's result, the target and the context to what each example adds, [batch]."""


class CompiledLoss(Protocol):
    """The sum of the losses of batches of some sizes, compiled."""

    def takes(self, y: ColumnTensors) -> bool:
        """Whether a batch is of such a size."""
        ...

    def __call__(self, named: Mapping[str, torch.Tensor], x: ColumnTensors, y: Any, context: Context) -> torch.Tensor:
        """Return the sum; `context` takes new values of buffers."""
        ...


class Model:
    """Trainable tensors by canonical name, the worker's buffers, and what is computed from them.

    `leaves` require gradients; `values` are the same memory without, for the optimiser to write to. `passes` makes the contexts. All
    tensors have the canonical layout. `rank` numbers the workers. `compiled` computes training losses where it takes a batch.
    """

    def __init__(self, job: Job, spec: ModelSpec, rank: int, leaves: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        self.spec = spec
        self._job, self._rank = job, rank
        self.leaves, self.buffers = list(leaves), list(buffers)
        self.values = [leaf.detach() for leaf in self.leaves]
        self._device = self.leaves[0].device
        self._low = low_format(job.precision, self._device)
        self._overwritten = overwrites_gradients(job)
        self.passes = ForwardContexts(
            job, spec, rank, dict(zip((buffer.name for buffer in spec.buffers), self.buffers, strict=True)), self._low
        )
        self._named = dict(zip((parameter.name for parameter in spec.parameters), self.leaves, strict=True))
        module = load(forward_plugin(job.model, "torch"), "forward")
        self._function: Forward = module.forward if self._low is None else watched(module.forward, job.precision, self._low, job.model)
        self._own_losses = _own_losses(spec, module)
        self._example_sums = module.example_sums if hasattr(module, "example_sums") else None
        self.compiled: CompiledLoss | None = None
        self._unwatched: Forward = module.forward
        self._decoding = DecodingFunctions.of(module) if spec.objective.translation is not None else None

    @classmethod
    def initial(cls, job: Job, spec: ModelSpec, rank: int, device: torch.device) -> Model:
        """Make a model with parameters and buffers of its own, at their initial values."""
        values, buffers = spec.initial(job.seed), spec.initial_buffers()
        leaves = [torch.nn.Parameter(torch.from_numpy(values[parameter.name]).to(device)) for parameter in spec.parameters]
        return cls(job, spec, rank, leaves, [torch.from_numpy(buffers[buffer.name]).to(device) for buffer in spec.buffers])

    @classmethod
    def on(cls, job: Job, spec: ModelSpec, rank: int, flat: torch.Tensor) -> Model:
        """Make a model on a given flat float32 vector: parameters, then buffers, one after another in the order of the spec."""
        leaves = [piece.requires_grad_() for piece in cut(flat[: spec.size], spec.parameters)]
        return cls(job, spec, rank, leaves, cut(flat[spec.size :], spec.buffers))

    def on_values(self, values: Sequence[torch.Tensor]) -> Model:
        """Return the same model, with the same buffers, on other values of its parameters, to be evaluated."""
        return Model(self._job, self.spec, self._rank, values, self.buffers)

    def forward(self, x: ColumnTensors, context: Context) -> torch.Tensor:
        """Return what the forward function does, float32: of images logits_bk."""
        if self._low is None:
            return self._function(self._named, x, context)
        with torch.autocast(self._device.type, self._low):
            logits_bk = self._function(self._named, x, context)
        return logits_bk.float()

    def stepper(self) -> TorchStepper:
        """Return what decodes with the parameters as they are at each call. Raises RuntimeError for a model that does not translate."""
        quality, functions = self.spec.objective.translation, self._decoding
        if quality is None or functions is None:
            raise RuntimeError(f"{self.spec.name!r} does not translate")

        def bound(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                with torch.autocast(self._device.type, self._low, enabled=self._low is not None):
                    return function(self._named, *arguments, self.passes.evaluation)

            return call

        own = DecodingFunctions(bound(functions.encode), functions.empty_cache, bound(functions.decode_step))
        return TorchStepper(own, quality.source, self.spec.logits_per_position, self._device)

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """The parameters by canonical name."""
        return self._named

    def loss_of(self, named: Mapping[str, torch.Tensor], x: ColumnTensors, y: ColumnTensors, context: Context) -> torch.Tensor:
        """Return the sum of the examples' losses with these parameters: what is compiled, and touches nothing but its arguments."""
        if self._low is None:
            outputs = self._unwatched(named, x, context)
        else:
            with torch.autocast(self._device.type, self._low):
                outputs = self._unwatched(named, x, context)
            outputs = outputs.float()
        if self._own_losses is None:
            return torch.nn.functional.cross_entropy(outputs, y, reduction="sum")
        return self._own_losses(outputs, y, context).sum()

    def mean_loss(self, x: ColumnTensors, y: ColumnTensors, context: Context, share: float) -> torch.Tensor:
        """Return the mean loss of a whole (not empty) batch; `share` is 1 / (what its examples weigh together)."""
        if self.compiled is not None and self.compiled.takes(y):
            return self.compiled(self._named, x, y, context) * share
        if self._own_losses is None:
            return torch.nn.functional.cross_entropy(self.forward(x, context), y)
        return self._own_losses(self.forward(x, context), y, context).sum() * share

    def summed_loss(self, x: ColumnTensors, y: ColumnTensors, context: Context) -> torch.Tensor:
        """Return the sum of the examples' losses; 0, with zero gradients, for an empty slice."""
        if self.compiled is not None and self.compiled.takes(y):
            return self.compiled(self._named, x, y, context)
        if self._own_losses is None:
            return torch.nn.functional.cross_entropy(self.forward(x, context), y, reduction="sum")
        return self._own_losses(self.forward(x, context), y, context).sum()

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the loss's gradients by `leaves`, each in memory of its own where the job's updates write to them.

        To see whether they are takes three of the 115 µs that logistic regression's gradients take.
        """
        found = torch.autograd.grad(loss, self.leaves)
        return apart(found) if self._overwritten else list(found)

    def keep_updated(self, context: Context) -> None:
        """Take over the buffers that a training pass has changed."""
        for name, value in context.updated.items():
            self.passes.buffers[name].copy_(value.detach())

    def sums(self, data: ResidentSplit, start: int, stop: int) -> list[float]:
        """Return the objective's sums, in its order, over the examples start … stop − 1."""
        found = [0.0] * len(self.spec.objective.sums)
        for outputs, x, y in self._evaluated(data, start, stop):
            batch = self._batch_sums(outputs, x, y)
            found = [
                so_far + float(batch[name].sum(dtype=torch.float64)) for so_far, name in zip(found, self.spec.objective.sums, strict=True)
            ]
        return found

    def _batch_sums(self, outputs: torch.Tensor, x: ColumnTensors, y: ColumnTensors) -> dict[str, torch.Tensor]:
        """Return what each example adds to the sums, [batch] by name."""
        context = self.passes.evaluation
        if self._own_losses is None:
            losses_b = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
        else:
            losses_b = self._own_losses(outputs, y, context)
        found = {LOSS_SUM: losses_b, COUNTED: torch.ones_like(losses_b)}
        for given in (x, y):
            if isinstance(given, dict):
                found |= {name.removesuffix(LENGTHS) + TOKENS: value for name, value in given.items() if name.endswith(LENGTHS)}
        if self._own_losses is None and "correct" in self.spec.objective.sums:
            found["correct"] = outputs.argmax(1) == y
        if self._example_sums is not None:
            found |= self._example_sums(outputs, y, context)
        self.spec.objective.check_parts({name: value.dim() if torch.is_tensor(value) else None for name, value in found.items()})
        return found

    def logits(self, data: ResidentSplit, start: int, stop: int) -> Array:
        """Return the logits of the examples start … stop − 1, float32 [stop − start, classes]."""
        pieces = [logits_bk.cpu().numpy() for logits_bk, _, _ in self._evaluated(data, start, stop)]
        return np.concatenate([np.zeros((0, self.spec.classes), dtype=np.float32), *pieces])

    def _evaluated(self, data: ResidentSplit, start: int, stop: int) -> Iterator[tuple[torch.Tensor, ColumnTensors, ColumnTensors]]:
        """Yield (result, inputs, target) of the examples start … stop − 1, as many at once as an evaluation takes."""
        step = evaluation_batch(self.spec)
        first = start
        while first < stop:
            end = first + examples_at_once(self.spec, data.longest(first, min(first + step, stop)), min(step, stop - first))
            with torch.inference_mode():
                x, y = data.span(first, end)
                outputs = self.forward(x, self.passes.evaluation)
            yield outputs, x, y
            first = end


def apart(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients each of which has memory of its own: one that shares the memory of another before it, or its own, is copied.

    Autograd returns one tensor for `a` and `b` of `a + b`, views of one for what was put together, and one number for all of a sum.
    """
    found, seen = [], set()
    for gradient in gradients:
        memory = gradient.untyped_storage().data_ptr()
        if memory in seen or (not gradient.is_contiguous() and 0 in gradient.stride()):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
        found.append(gradient)
    return found


def micro_batches_of(model: Model, x: ColumnTensors, y: ColumnTensors, batch: Batches, most: int) -> Iterator[MicroBatch]:
    """Cut examples that were gathered together into micro-batches; `batch` has them as the only ones."""
    cut, _ = batch.in_micro_batches(most)
    for number, (begin, end) in enumerate(pairwise((cut.offsets - cut.offsets[0]).tolist())):
        yield part_of(x, begin, end), part_of(y, begin, end), model.passes.training(0, cut, number, number)


def _own_losses(spec: ModelSpec, module: Any) -> Losses | None:
    """Return the model's own loss, None for cross entropy. Raises UsageError where its module lacks the function that it names."""
    name = spec.objective.loss
    if name == CROSS_ENTROPY:
        return None
    if not hasattr(module, name):
        raise UsageError(f"model: its objective names the loss {name!r}, which is no function of {module.__name__}.")
    function: Losses = getattr(module, name)

    def checked(outputs: torch.Tensor, target: ColumnTensors, context: Context) -> torch.Tensor:
        losses_b = function(outputs, target, context)
        if not isinstance(losses_b, torch.Tensor) or losses_b.ndim != 1 or len(losses_b) != len(outputs):
            found = list(losses_b.shape) if isinstance(losses_b, torch.Tensor) else type(losses_b).__name__
            raise UsageError(f"model: the loss {name!r} returned {found} for {len(outputs)} examples; a number for each is needed, [batch]")
        return losses_b

    return checked


class DistributedLoss(torch.nn.Module):  # type: ignore[misc]
    """The model as the module that DistributedDataParallel wants: batch in, scaled sum of losses out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.leaves = torch.nn.ParameterList(model.leaves)
        self._model = model

    def forward(self, x: ColumnTensors, y: ColumnTensors, scale: float, context: Context) -> torch.Tensor:
        """Return scale · Σ losses of the slice."""
        return self._model.summed_loss(x, y, context) * scale
