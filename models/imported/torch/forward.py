"""Imported models on torch: the user's module, with a run's parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from ....data.columns import LENGTHS
from ...base import ForwardContext
from ..description import MASKED_RANKS, MIN_ROWS, Imported, is_length
from ..reference import read_reference
from .calls import Call
from .keras_passes import keras_pass, plain_keras
from .modules import built, carried, trained
from .recurrent import drop_between_layers

_drawing: Draws | None = None  # of the pass in progress: a task computes one at a time


def forward(parameters: Mapping[str, torch.Tensor], x: Any, context: ForwardContext[torch.Tensor]) -> torch.Tensor:
    """Return the module's result for a batch.

    An empty batch is computed from blank examples, which are cut off.
    """
    imported: Imported = context.settings
    columns = x if isinstance(x, Mapping) else {imported.inputs[0]: x}
    inputs = [columns[name] for name in imported.inputs]
    rows = len(inputs[0])
    inputs = [_with_blanks(name, value, imported) for name, value in zip(imported.inputs, inputs, strict=True)]
    if imported.is_keras:
        drop = Draws(context, imported, rows).dropped if context.training else None
        result, updated = keras_pass(imported, parameters, inputs, context, drop)
    else:
        bound = _bound(imported)
        bound.bind(parameters, context)
        with drawn_by(context, imported, rows):
            result = bound.call(*inputs)
        updated = bound.buffers() if context.training else {}
    if rows:
        context.updated.update(updated)
    return result if rows else result[:0]


def own_losses(outputs: torch.Tensor, target: Any, context: ForwardContext[torch.Tensor]) -> torch.Tensor:
    """Return the losses [batch] of a module with a loss of its own."""
    return outputs[:, 0]


def example_sums(outputs: torch.Tensor, target: Any, context: ForwardContext[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``correct`` of a module whose evaluation has its own losses, then logits."""
    return {"correct": outputs[:, 1:].argmax(1) == target} if context.settings.measured else {}


def _with_blanks(name: str, value: torch.Tensor, imported: Imported) -> torch.Tensor:
    """Return an input with blank examples if there are none, and a place in empty sequences."""
    if not len(value):
        value = value.new_full((MIN_ROWS, *value.shape[1:]), int(is_length(name, imported.inputs)))
    if name + LENGTHS in imported.inputs and not value.shape[1]:
        value = value.new_zeros(len(value), 1, *value.shape[2:])
    return value


class _Bound:
    """A module whose parameters and buffers are replaced by a run's."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.module = module = call.module
        owners = dict(module.named_modules())

        def places(named: Mapping[str, torch.Tensor], of_all: Iterator[tuple[str, torch.Tensor]], store: str) -> dict[str, list[Any]]:
            by_value = {id(value): name for name, value in named.items()}
            places_by_name: dict[str, list[Any]] = {name: [] for name in named}
            for name, value in of_all:
                if id(value) in by_value:
                    owner, _, attribute = name.rpartition(".")
                    places_by_name[by_value[id(value)]].append((getattr(owners[owner], store), attribute))
            return places_by_name

        state, frozen = carried(module), dict(module.named_parameters())
        floats = {name: value for name, value in state.items() if name not in frozen}
        fixed = {name: value for name, value in state.items() if name in frozen}
        self._parameters = places(trained(module), module.named_parameters(remove_duplicate=False), "_parameters")
        self._fixed = places(fixed, module.named_parameters(remove_duplicate=False), "_parameters")
        self._buffers = places(floats, module.named_buffers(remove_duplicate=False), "_buffers")
        self._bound_to: Mapping[str, torch.Tensor] | None = None
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                part.forward = _normalised_single.__get__(part)
            elif isinstance(part, torch.nn.RNNBase) and part.dropout > 0:
                drop_between_layers(part)

    def bind(self, parameters: Mapping[str, torch.Tensor], context: ForwardContext[torch.Tensor]) -> None:
        """Put parameters and copies of buffers in place, as the module may write to them."""
        if self.module.training != context.training:
            self.module.train(context.training)
        if parameters is not self._bound_to:
            _put(self._parameters, parameters)
            self._bound_to = parameters
        for name, places in self._buffers.items():
            value = context.buffers[name].clone()
            for store, attribute in places:
                store[attribute] = value
        if self._fixed:
            _put(self._fixed, context.buffers)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers' values after a pass."""
        return {name: places[0][0][places[0][1]] for name, places in self._buffers.items()}


def _put(places: Mapping[str, list[Any]], values: Mapping[str, torch.Tensor]) -> None:
    for name, name_places in places.items():
        value = values[name]
        for store, attribute in name_places:
            store[attribute] = value


_modules: dict[Path, _Bound] = {}  # by the folder of the description


def _bound(imported: Imported) -> _Bound:
    known = _modules.get(imported.folder)
    if known is None:
        _install()  # before the user's file can import one of the functions by name
        known = _modules[imported.folder] = _Bound(_built(imported))
    return known


def _built(imported: Imported) -> Call:
    facts = imported.request
    module = built(read_reference(imported.reference), facts["arguments"], facts["data"], facts["outputs"], 0)
    return Call(module, facts["data"], imported.reference, measured=imported.measured)


def unadapted(imported: Imported) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """Return the user's model by itself, and the tensors that its training changes."""
    if imported.is_keras:
        return plain_keras(imported)
    call = _built(imported)
    return call, list(trained(call.module).values())


def _normalised_single(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Normalise a batch of one value per channel, which torch rejects in training.

    Only the shift remains. Other batches are normalised by the layer itself.
    """
    if not self.training or x.numel() != x.shape[1] or self.running_mean is None:
        return type(self).forward(self, x)
    with torch.no_grad():
        share = 0.1 if self.momentum is None else self.momentum
        self.running_mean.lerp_(x.detach().flatten(), share)
        self.running_var.mul_(1 - share)
    shape = (1, -1, *[1] * (x.ndim - 2))
    y = x * 0
    return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


class Draws:
    """Random numbers of one training pass, by the number of the drawing operation."""

    def __init__(self, context: ForwardContext[torch.Tensor], imported: Imported, rows: int) -> None:
        self._context, self._axes, self._rows = context, imported.dropouts, rows
        self._layer = 0

    def dropped(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """Zero elements with probability `rate` and scale the others.

        An empty batch's blank examples keep all.
        """
        layer, self._layer = self._layer, self._layer + 1
        if rate >= 1.0:
            return torch.zeros_like(x)
        if not self._rows:
            return x
        axis = self._axes[layer] if layer < len(self._axes) else 0 if x.shape[0] == self._rows else -1
        if axis == 1:
            return self._masked(x.transpose(0, 1), rate, layer, whole=True).transpose(0, 1)
        return self._masked(x, rate, layer, whole=axis == 0)

    def _masked(self, x: torch.Tensor, rate: float, layer: int, *, whole: bool) -> torch.Tensor:
        if whole and x.ndim in MASKED_RANKS:
            return self._context.dropout(x, rate, layer)
        return self._context.dropout(x.reshape(self._rows, -1), rate, layer).reshape(x.shape)


@contextmanager
def drawn_by(context: ForwardContext[torch.Tensor], imported: Imported, rows: int) -> Iterator[None]:
    """Within the block, draw by the run's seed, the update and the layer."""
    global _drawing
    _install()
    if not context.training:
        yield
        return
    _drawing = Draws(context, imported, rows)
    try:
        yield
    finally:
        _drawing = None


_SELU_LIMIT = -1.7580993408473766
_original_dropout = functional.dropout
_original_alpha_dropout = functional.alpha_dropout
_original_feature_alpha_dropout = functional.feature_alpha_dropout
_original_attention = functional.scaled_dot_product_attention
_original_bernoulli = torch.Tensor.bernoulli_
_original_checkpoint = checkpoint.checkpoint


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if _drawing is None or not training or p == 0:
        return _original_dropout(input, p, training, inplace)
    return _drawing.dropped(input, p)


def _channel_dropout(original: Callable[..., torch.Tensor], dimensions: int) -> Callable[..., torch.Tensor]:
    """Return dropout of whole channels of [batch, channels, …] with so many further dimensions."""

    def channels_dropped(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if _drawing is None or not training or p == 0 or input.ndim != 2 + dimensions:
            return original(input, p, training, inplace)
        return input * _drawing.dropped(input.new_ones(*input.shape[:2], *[1] * dimensions), p)

    return channels_dropped


def _alpha_dropout(input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> torch.Tensor:
    """Drop to SELU's negative limit and keep mean and variance (Klambauer et al. 2017)."""
    if _drawing is None or not training or p == 0:
        return _original_alpha_dropout(input, p, training, inplace)
    return _alpha_kept(input, _drawing.dropped(torch.ones_like(input), p) * (1 - p), p)


def _feature_alpha_dropout(input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> torch.Tensor:
    """Drop whole channels as `_alpha_dropout` drops elements."""
    if _drawing is None or not training or p == 0:
        return _original_feature_alpha_dropout(input, p, training, inplace)
    return _alpha_kept(input, _drawing.dropped(input.new_ones(*input.shape[:2], *[1] * (input.ndim - 2)), p) * (1 - p), p)


def _alpha_kept(input: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    scale = ((1 - p) * (1 + p * _SELU_LIMIT**2)) ** -0.5
    return (input * kept + _SELU_LIMIT * (1 - kept)) * scale - scale * _SELU_LIMIT * p


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if _drawing is None or not dropout_p:
        return _original_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _drawing.dropped(scores.softmax(-1), dropout_p) @ value


def _bernoulli(self: torch.Tensor, p: Any = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    if _drawing is None or generator is not None or not isinstance(p, int | float) or p in (0, 1):
        return _original_bernoulli(self, p, generator=generator)
    return self.copy_(_drawing.dropped(torch.ones_like(self), 1.0 - p) * p)


def _checkpoint(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if _drawing is None:
        return _original_checkpoint(function, *arguments, **options)
    return function(*arguments)  # to compute it again would draw again


@lru_cache(maxsize=1)
def _install() -> None:
    """Replace torch's drawing functions. Outside training passes they act as before."""
    replaced: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "alpha_dropout": _alpha_dropout,
        "feature_alpha_dropout": _feature_alpha_dropout,
        "scaled_dot_product_attention": _attention,
        **{f"dropout{number}d": _channel_dropout(getattr(functional, f"dropout{number}d"), number) for number in (1, 2, 3)},
    }
    for name, function in replaced.items():
        setattr(functional, name, function)
    torch.Tensor.bernoulli_ = _bernoulli
    checkpoint.checkpoint = _checkpoint
