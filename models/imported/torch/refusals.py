"""Refusals of what a run cannot repeat, train or save.

These are random numbers besides dropout, state that a run does not carry, and parameters that it cannot replace.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ....core.errors import UsageError
from ..reference import Reference
from .calls import Call
from .export import PREFIX, Called, user_place
from .modules import trained

# Dropout of every kind, also of attention, and ``torch.empty(…).bernoulli_(p)`` of stochastic depth.
_GOVERNED = ("aten.native_dropout.", "aten.bernoulli_.float", "aten._scaled_dot_product_")


@contextmanager
def refusing_draws(reference: Reference) -> Iterator[None]:
    """Refuse random numbers in the block that a run's seed does not govern.

    Raises UsageError with the user's line.
    """
    draws, states = _Draws(), _states()
    with draws:
        yield
    changed = [name for name, state in _states().items() if state != states[name]]
    drawn = draws.names or [(name, "") for name in changed]
    if drawn:
        name, place = drawn[0]
        raise UsageError(
            f"model: {reference.text} draws random numbers by {name}{f' ({place})' if place else ''}, which a run cannot repeat."
            " Use nn.Dropout, or torch.empty(…).bernoulli_(p)."
        )


def _states() -> dict[str, str]:
    """Return the states of the generators that are not torch's."""
    return {"Python's random": repr(random.getstate()), "numpy.random": repr(np.random.get_state())}


class _Draws(TorchDispatchMode):  # type: ignore[misc]
    """Collects the operations that draw, with the user's line."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[str, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not str(func).startswith(_GOVERNED):
            self.names.append((str(func), user_place("".join(traceback.format_stack()))))
        return func(*args, **(kwargs or {}))


class Buffers:
    """The values of a module's buffers, also of those that are not saved."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._kept = [
            (owner, attribute, value, value.clone())
            for owner in module.modules()
            for attribute, value in owner._buffers.items()
            if value is not None
        ]
        self.by_name = {name: value.clone() for name, value in module.named_buffers()}

    def restore(self) -> None:
        """Give the module its buffers with their values again."""
        with torch.no_grad():
            for owner, attribute, buffer, value in self._kept:
                owner._buffers[attribute] = buffer.copy_(value)


def refuse_counters(reference: Reference, module: torch.nn.Module, before: Buffers) -> None:
    """Refuse whole numbers or booleans that a pass changed.

    A run carries float buffers alone. Raises UsageError.
    """
    uncounted: set[str] = set()
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            if part.momentum is None:
                raise UsageError(
                    f"model: {name!r} of {reference.text} has momentum=None, a mean of all batches. Set a number, such as 0.1."
                )
            uncounted.add(f"{name}.num_batches_tracked" if name else "num_batches_tracked")
    for name, value in module.named_buffers():
        known = before.by_name.get(name)
        changed = known is not None and not value.is_floating_point() and not torch.equal(value, known)
        if changed and name not in uncounted:
            raise UsageError(f"model: a training step changes {name!r} of {reference.text}, which is {value.dtype}. Make it float32.")


def refuse_state(reference: Reference, module: torch.nn.Module) -> None:
    """Refuse parameters and buffers that a run would not treat as torch does. Raises UsageError."""
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != torch.float32:
            raise UsageError(f"model: the buffer {name!r} of {reference.text} is {buffer.dtype}; float32 is needed.")
    memory: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(f"model: the parameter {name!r} of {reference.text} has a hook, which a run does not call. Remove it.")
        first = memory.setdefault(parameter.data_ptr(), name)
        if parameter.numel() and first != name:
            raise UsageError(
                f"model: the parameters {first!r} and {name!r} of {reference.text} share their memory. Tie them as one parameter:"
                " self.b.weight = self.a.weight."
            )


def refuse_unused(reference: Reference, call: Call, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse parameters that a training pass does not use, or does not take from a run.

    Raises UsageError.
    """
    parameters = trained(call.module)
    call.module.train()
    _refuse_without_gradient(reference, parameters, call(*tensors), "Freeze them, requires_grad_(False), or remove them.")
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    result = functional_call(Called(call.module, call), {f"{PREFIX}{name}": leaf for name, leaf in leaves.items()}, tuple(tensors))
    _refuse_without_gradient(reference, leaves, result, "It may read them from a list; nn.ParameterList is known to a run.")


def _refuse_without_gradient(reference: Reference, leaves: Mapping[str, torch.Tensor], result: torch.Tensor, advice: str) -> None:
    gradients = torch.autograd.grad(result.sum(), list(leaves.values()), allow_unused=True)
    if unused := [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]:
        listed = f"{', '.join(unused[:3])}{' and others' if len(unused) > 3 else ''}"
        raise UsageError(f"model: its result does not depend on {listed} of {reference.text}. {advice}")
