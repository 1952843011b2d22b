"""What a model that translates has in its forward module beside `forward`, so that a backend can decode piece by piece.

``encode(parameters, inputs, context) -> memory`` makes of padded sources what the decoder needs of them; ``empty_cache(memory) -> cache``
is what it knows before the first piece; ``decode_step(parameters, tokens_b, position, memory, cache, context) -> (logits_bv, cache)`` takes
the pieces at `position` (BEGIN at 0) and gives the logits of what follows, float32. Memory and cache are nested tuples of tensors whose
first dimension is the batch: rows of them may be taken, repeated and left out between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import UsageError

__all__ = ["DecodingFunctions"]

_NAMES = ("encode", "empty_cache", "decode_step")


@dataclass(frozen=True, slots=True)
class DecodingFunctions:
    """The three functions of one model on one backend."""

    encode: Callable[..., Any]
    empty_cache: Callable[..., Any]
    decode_step: Callable[..., tuple[Any, Any]]

    @classmethod
    def of(cls, module: Any) -> DecodingFunctions:
        """Find them in a forward module. Raises UsageError where one is missing."""
        if missing := [name for name in _NAMES if not hasattr(module, name)]:
            raise UsageError(f"model: its objective translates, and {module.__name__} has no function {' and no '.join(missing)}.")
        return cls(*(getattr(module, name) for name in _NAMES))
