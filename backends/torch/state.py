"""A state as one flat float32 vector and back: parameters in the order of the spec, then each slot in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...models.base import Array, ModelSpec
from ..base import State

__all__ = ["flatten", "pack", "unflatten", "unpack"]


def flatten(spec: ModelSpec, values: Mapping[str, Array], what: str = "parameter") -> Array:
    """Return one value a parameter as one vector [spec.size]. Raises ValueError, naming it, where one is missing or has another shape."""
    for parameter in spec.parameters:
        found = values[parameter.name].shape if parameter.name in values else "nothing"
        if found != parameter.shape:
            raise ValueError(f"{what} {parameter.name!r} of model {spec.name!r} has shape {parameter.shape}; the given state has {found}")
    return np.concatenate([np.asarray(values[parameter.name], dtype=np.float32).ravel() for parameter in spec.parameters])


def unflatten(spec: ModelSpec, flat: Array) -> dict[str, Array]:
    """Cut a vector [spec.size] into values by name (copies)."""
    stops = np.cumsum([parameter.size for parameter in spec.parameters])[:-1]
    pieces = np.split(flat, stops)
    return {parameter.name: piece.reshape(parameter.shape).copy() for parameter, piece in zip(spec.parameters, pieces, strict=True)}


def pack(spec: ModelSpec, state: State, slots: Sequence[str]) -> Array:
    """Return the state as one vector [(1 + slots) · spec.size].

    A state before its first update needs no slots: they are zero. Raises ValueError where the state does not fit the model, or lacks
    a slot of the optimiser.
    """
    parts = [flatten(spec, state.parameters)]
    for slot in slots:
        if slot in state.slots:
            parts.append(flatten(spec, state.slots[slot], slot))
        elif state.updates == 0:
            parts.append(np.zeros(spec.size, dtype=np.float32))
        else:
            raise ValueError(f"the given state has {state.updates} updates and slots {sorted(state.slots)}; the optimiser needs {slot!r}")
    return np.concatenate(parts)


def unpack(spec: ModelSpec, flat: Array, updates: int, slots: Sequence[str]) -> State:
    """Read back what `pack` wrote, as copies."""
    parameters, *rest = np.split(flat, 1 + len(slots))
    return State(unflatten(spec, parameters), {slot: unflatten(spec, part) for slot, part in zip(slots, rest, strict=True)}, updates)
