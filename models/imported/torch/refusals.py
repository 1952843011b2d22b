"""Refusals of what a run cannot repeat or save.

These are random numbers besides dropout, and whole numbers that training changes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ....core.errors import UsageError
from ..reference import Reference
from .export import user_place

# Dropout of every kind, also of attention, and ``torch.empty(…).bernoulli_(p)`` of stochastic depth.
_GOVERNED = ("aten.native_dropout.", "aten.bernoulli_.float", "aten._scaled_dot_product_")


@contextmanager
def refusing_draws(reference: Reference) -> Iterator[None]:
    """Refuse random numbers in the block that a run's seed does not govern.

    Raises UsageError with the user's line.
    """
    draws = _Draws()
    with draws:
        yield
    if draws.names:
        name, place = draws.names[0]
        raise UsageError(
            f"model: {reference.text} draws random numbers by {name}{f' ({place})' if place else ''}, which a run cannot repeat."
            " Use nn.Dropout, or torch.empty(…).bernoulli_(p)."
        )


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


def refuse_counters(reference: Reference, module: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Refuse whole numbers or booleans that a training pass changed.

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
        changed = name in before and not value.is_floating_point() and not torch.equal(value, before[name])
        if changed and name not in uncounted:
            raise UsageError(f"model: a training step changes {name!r} of {reference.text}, which is {value.dtype}. Make it float32.")
