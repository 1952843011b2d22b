"""Parameters and buffers of a model as tensors, its forward function, and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.job import Job
from ...data.sampler import Batches
from ...models.base import Array, ForwardContext, ModelSpec
from ...models.dropout_masks import drawn_rate, keep_mask_of_shape, refused_dropout
from ...models.losses import TALLY
from ..base import TensorFunctions
from ..capabilities import check_precision
from ..decoding_functions import ModelFunctions
from ..vectors import evaluation_passes
from .data import Columns, ResidentSplit, Tensors, part_of
from .decoding import TorchStepper, shape_of
from .optimizers import LOW_FORMATS, overwrites_gradients, watched
from .runtime import cut

TENSORS = TensorFunctions(
    lambda array: torch.from_numpy(array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array),
    lambda tensor: tensor.detach().numpy(),
)


class Dropout:
    """Dropout by a generator seeded with (seed, step, rank, layer) or the shared masks.

    It has no state between steps.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._seed, self._rank, self._shared_masks = job.seed, rank, job.deterministic
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step, self._micro_batch, self._indices = 0, 0, np.zeros(0, dtype=np.int32)

    def set_step(self, step: int, indices_b: NDArray[np.int32], micro_batch: int = 0) -> None:
        """Set the next update, its examples, and the micro-batch."""
        self._step, self._micro_batch, self._indices = step, micro_batch, indices_b

    def __call__(self, x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        """Return x with elements zeroed with probability `rate`, the others divided by 1 − rate."""
        return x * self.factors(x, rate, layer)

    def factors(self, x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        """Return the factors of a tensor like x."""
        rate = drawn_rate(rate)
        if self._shared_masks:
            kept = keep_mask_of_shape(self._seed, self._step, layer, self._indices, x.shape, rate)
            factors = torch.from_numpy(kept).to(x.device).to(x.dtype)
        else:
            further = [self._micro_batch] if self._micro_batch else []
            mixed = np.random.SeedSequence([self._seed, self._step, self._rank, layer, *further]).generate_state(1, np.uint64)
            if x.ndim > 2 and x.device.type == "cpu":
                return _half_words(int(mixed[0]), x.shape, rate).to(x.dtype).mul_(1.0 / (1.0 - rate))
            generator = self._generators.setdefault(x.device, torch.Generator(x.device)).manual_seed(int(mixed[0]))
            factors = torch.empty_like(x).bernoulli_(1.0 - rate, generator=generator)
        return factors.div_(1.0 - rate)


def _half_words(seed: int, shape: torch.Size, rate: float) -> torch.Tensor:
    """Return the boolean mask from a half word of SFC64 per element, exact to 1 in 2¹⁷.

    That takes an eighth of torch's time.
    """
    size = math.prod(shape)
    drawn = np.random.SFC64(seed).random_raw(-(-size // 4)).view(np.uint16)[:size]
    return torch.from_numpy(drawn >= np.uint16(round(rate * 2**16))).view(shape)


class ForwardContexts:
    """Makes a worker's contexts. `buffers` are its values of the model's buffers."""

    def __init__(self, job: Job, spec: ModelSpec, rank: int, buffers: Mapping[str, torch.Tensor], low: torch.dtype | None) -> None:
        self.buffers = buffers
        self.evaluation: Context = ForwardContext(training=False, buffers=buffers, compute=low, settings=spec.settings)
        self._training: Context = ForwardContext(training=True, buffers=buffers, compute=low, settings=spec.settings)
        self._dropout = Dropout(job, rank) if spec.dropout else None
        self._training.dropout = refused_dropout(spec.name) if self._dropout is None else self._dropout

    def separate_training(self) -> Context:
        """Return a separate training context, from which nothing is taken over."""
        return replace(self._training, updated={})

    def training(self, step: int, batches: Batches, position: int, micro_batch: int = 0) -> Context:
        """Return the context of update `step` on a batch, and of its `micro_batch`.

        It is always the same object, with nothing updated.
        """
        if self._dropout is not None:
            self._dropout.set_step(step, batches.batch(position), micro_batch)
        if self.buffers:
            self._training.updated = {}
        return self._training


Forward = Callable[..., torch.Tensor]
Context = ForwardContext[torch.Tensor]
MicroBatch = tuple[Columns, Columns, Context]  # inputs, target, context


class CompiledLoss(Protocol):
    """The compiled sum of the losses of batches of some sizes."""

    def takes(self, y: Columns) -> bool:
        """Return whether a batch has such a size."""

    def __call__(self, named: Mapping[str, torch.Tensor], x: Columns, y: Any, context: Context) -> torch.Tensor:
        """Return the sum, and new buffers in `context`."""


class Model:
    """Trainable tensors by canonical name, buffers, and computations on them.

    `values` are the tensors without gradients.
    """

    def __init__(self, job: Job, spec: ModelSpec, rank: int, leaves: Tensors, buffers: Tensors) -> None:
        self.spec = spec
        self._job, self._rank = job, rank
        self.leaves, self.buffers = list(leaves), list(buffers)
        self.values = [leaf.detach() for leaf in self.leaves]
        self._device = self.leaves[0].device
        check_precision(job, gpu=self._device.type == "cuda")
        self._low = LOW_FORMATS[job.precision]
        self._overwritten = overwrites_gradients(job)
        self.passes = ForwardContexts(
            job, spec, rank, dict(zip((buffer.name for buffer in spec.buffers), self.buffers, strict=True)), self._low
        )
        self.named = dict(zip((parameter.name for parameter in spec.parameters), self.leaves, strict=True))
        functions = ModelFunctions.find(job.model, "torch", spec.objective, shape_of)
        self._unwatched: Forward = functions.module.forward
        self._function = self._unwatched if self._low is None else watched(self._unwatched, job.precision, self._low, job.model)
        self._own_losses, self._example_sums, self._decoding = functions.losses, functions.example_sums, functions.decoding
        self.compiled: CompiledLoss | None = None

    @classmethod
    def initial(cls, job: Job, spec: ModelSpec, rank: int, device: torch.device) -> Model:
        """Make a model with new memory, at the initial values."""
        values, buffers = spec.initial(job.seed), spec.initial_buffers(job.seed)
        leaves = [torch.nn.Parameter(torch.from_numpy(values[parameter.name]).to(device)) for parameter in spec.parameters]
        return cls(job, spec, rank, leaves, [torch.from_numpy(buffers[buffer.name]).to(device) for buffer in spec.buffers])

    @classmethod
    def from_vector(cls, job: Job, spec: ModelSpec, rank: int, flat: torch.Tensor) -> Model:
        """Make a model on a flat float32 vector of parameters, then buffers."""
        leaves = [piece.requires_grad_() for piece in cut(flat[: spec.size], spec.parameters)]
        return cls(job, spec, rank, leaves, cut(flat[spec.size :], spec.buffers))

    def with_values(self, values: Tensors) -> Model:
        """Return the same model and buffers on other parameters, to be evaluated."""
        return Model(self._job, self.spec, self._rank, values, self.buffers)

    def forward(self, x: Columns, context: Context) -> torch.Tensor:
        """Return the forward function's result in float32: of images logits_bk."""
        if self._low is None:
            return self._function(self.named, x, context)
        with torch.autocast(self._device.type, self._low):
            logits_bk = self._function(self.named, x, context)
        return logits_bk.float()

    def stepper(self) -> TorchStepper:
        """Return a stepper with the current parameters.

        Raises RuntimeError for a model that does not translate.
        """
        quality, functions = self.spec.objective.translation, self._decoding
        if quality is None or functions is None:
            raise RuntimeError(f"{self.spec.name!r} does not translate")

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            with torch.autocast(self._device.type, self._low, enabled=self._low is not None):
                return function(self.named, *arguments, self.passes.evaluation)

        return TorchStepper(functions.called(call), quality.source, self.spec.logits_per_position, self._device)

    def compute_loss(self, named: Mapping[str, torch.Tensor], x: Columns, y: Columns, context: Context) -> torch.Tensor:
        """Return the sum of losses with these parameters.

        This is compiled, and touches only its arguments.
        """
        if self._low is None:
            outputs = self._unwatched(named, x, context)
        else:
            with torch.autocast(self._device.type, self._low):
                outputs = self._unwatched(named, x, context)
            outputs = outputs.float()
        return self.sum_of_losses(outputs, y, context)

    def sum_of_losses(self, outputs: torch.Tensor, y: Columns, context: Context) -> torch.Tensor:
        """Return the sum of the losses of a forward function's results."""
        if self._own_losses is None:
            return torch.nn.functional.cross_entropy(outputs, y, reduction="sum")
        return self._own_losses(outputs, y, context).sum()

    def mean_loss(self, x: Columns, y: Columns, context: Context, share: float) -> torch.Tensor:
        """Return a whole, non-empty batch's mean loss; `share` is 1 / (weight of its examples)."""
        if self._own_losses is None and (self.compiled is None or not self.compiled.takes(y)):
            return torch.nn.functional.cross_entropy(self.forward(x, context), y)
        return self.summed_loss(x, y, context) * share

    def summed_loss(self, x: Columns, y: Columns, context: Context) -> torch.Tensor:
        """Return the sum of losses; 0, with zero gradients, for an empty slice."""
        if self.compiled is not None and self.compiled.takes(y):
            return self.compiled(self.named, x, y, context)
        return self.sum_of_losses(self.forward(x, context), y, context)

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients by `leaves`, in separate memory if updates write to them.

        The check takes 3 µs of 115.
        """
        gradients = torch.autograd.grad(loss, self.leaves)
        return in_separate_memory(gradients) if self._overwritten else list(gradients)

    def keep_updated(self, context: Context) -> None:
        """Take over the buffers that a training pass has changed."""
        for name, value in context.updated.items():
            self.passes.buffers[name].copy_(value.detach())

    def sums(self, data: ResidentSplit, start: int, stop: int) -> list[float]:
        """Return the objective's sums, in its order, over the examples start … stop − 1."""
        sums = np.zeros(len(self.spec.objective.sums))
        for outputs, x, y in self._evaluated(data, start, stop):
            parts = self._batch_sums(outputs, x, y)
            summed = (float(parts[name].sum(dtype=torch.float64)) for name in self.spec.objective.summed)
            sums += [*summed, *(parts[TALLY].tolist() if self.spec.objective.tally else ())]
        return sums.tolist()

    def _batch_sums(self, outputs: torch.Tensor, x: Columns, y: Columns) -> dict[str, torch.Tensor]:
        context = self.passes.evaluation
        if self._own_losses is None:
            losses_b = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
        else:
            losses_b = self._own_losses(outputs, y, context)
        parts = self.spec.objective.common_parts(losses_b, torch.ones_like(losses_b), x, y)
        if self._own_losses is None and "correct" in self.spec.objective.sums:
            parts["correct"] = outputs.argmax(1) == y
        if self._example_sums is not None:
            parts |= self._example_sums(outputs, y, context)
        self.spec.objective.check_parts({name: value.dim() if torch.is_tensor(value) else None for name, value in parts.items()})
        return parts

    def logits(self, data: ResidentSplit, start: int, stop: int) -> Array:
        """Return the logits of the examples start … stop − 1, float32 [stop − start, classes]."""
        pieces = [logits_bk.cpu().numpy() for logits_bk, _, _ in self._evaluated(data, start, stop)]
        return np.concatenate([np.zeros((0, self.spec.classes), dtype=np.float32), *pieces])

    def _evaluated(self, data: ResidentSplit, start: int, stop: int) -> Iterator[tuple[torch.Tensor, Columns, Columns]]:
        for first, last in evaluation_passes(self.spec, data.longest, start, stop):
            with torch.inference_mode():
                x, y = data.span(first, last)
                outputs = self.forward(x, self.passes.evaluation)
            yield outputs, x, y


def in_separate_memory(gradients: Tensors) -> list[torch.Tensor]:
    """Return gradients in separate memory.

    Autograd may return one tensor or overlapping views for several.
    """
    separate, seen = [], set()
    for gradient in gradients:
        memory = gradient.untyped_storage().data_ptr()
        if memory in seen or (not gradient.is_contiguous() and 0 in gradient.stride()):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
        separate.append(gradient)
    return separate


def cut_batch(model: Model, x: Columns, y: Columns, batch: Batches, most: int) -> Iterator[MicroBatch]:
    """Cut gathered examples into micro-batches; `batch` has only these examples."""
    cut, _ = batch.in_micro_batches(most)
    for number, (begin, end) in enumerate(pairwise((cut.offsets - cut.offsets[0]).tolist())):
        yield part_of(x, begin, end), part_of(y, begin, end), model.passes.training(0, cut, number, number)


def updates_in_micro_batches(
    model: Model, data: ResidentSplit, batches: Batches, most: int, first_step: int
) -> Iterator[tuple[Iterator[MicroBatch], int]]:
    """Yield each batch's micro-batches, to be taken before the next batch's, and their number.

    Batch i is update `first_step` + i.
    """
    cut, counts = batches.in_micro_batches(most)
    examples = enumerate(batch for block in data.blocks(cut) for batch in block)

    def take_update(step: int, count: int) -> Iterator[MicroBatch]:
        for number, (position, (x, y)) in enumerate(islice(examples, count)):
            yield x, y, model.passes.training(step, cut, position, number)

    for step, count in enumerate(counts.tolist(), first_step):
        yield take_update(step, count), count


class DistributedLoss(torch.nn.Module):  # type: ignore[misc]
    """The module for DistributedDataParallel: batch in, scaled sum of losses out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.leaves = torch.nn.ParameterList(model.leaves)
        self._model = model

    def forward(self, x: Columns, y: Columns, scale: float, context: Context) -> torch.Tensor:
        """Return scale · Σ losses of the slice."""
        return self._model.summed_loss(x, y, context) * scale
