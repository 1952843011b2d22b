"""What a model that translates has in its forward module beside `forward`, so that a backend can decode piece by piece.

``encode(parameters, inputs, context) -> memory`` makes of padded sources what the decoder needs of them; ``empty_cache(memory) -> cache``
is what it knows before the first piece; ``decode_step(parameters, tokens_b, position, memory, cache, context) -> (logits_bv, cache)`` takes
the pieces at `position` (BEGIN at 0) and gives the logits of what follows, float32. Memory and cache are nested tuples of tensors whose
first dimension is the batch: rows of them may be taken, repeated and left out between two steps. `DecodingChecks` says what is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import UsageError

__all__ = ["DecodingChecks", "DecodingFunctions"]

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


@dataclass(frozen=True, slots=True)
class DecodingChecks:
    """Whether the three functions return what they have to, the same on every backend.

    `shape_of` gives a tensor's shape, with None for what is not known while a function is traced, and None for anything but a tensor;
    `pieces` is the number of logits. Each check returns what it is given, and raises UsageError where that is something else. `rows` is the
    size of the batch, None where it is not known.
    """

    shape_of: Callable[[Any], Sequence[int | None] | None]
    pieces: int

    def memory(self, found: Any, rows: int | None) -> Any:
        """Check what `encode` returned."""
        self._check_tensors("encode", "", found, rows)
        return found

    def cache(self, found: Any, rows: int | None) -> Any:
        """Check what `empty_cache` returned."""
        self._check_tensors("empty_cache", "", found, rows)
        return found

    def step(self, found: Any, rows: int | None, before: Any) -> tuple[Any, Any]:
        """Check what `decode_step` returned, which was given the cache `before`."""
        if not isinstance(found, tuple) or len(found) != 2:
            said = f"{len(found)} values" if isinstance(found, tuple) else _kind(found)
            raise UsageError(f"model: the function 'decode_step' returned {said}; two are needed, (logits, cache)")
        logits, cache = found
        shape = self.shape_of(logits)
        if shape is None or len(shape) != 2 or shape[1] not in (None, self.pieces) or _differ(shape[0], rows):
            said = _kind(logits) if shape is None else _written(shape)
            among = "" if rows is None else f" for {rows} {'row' if rows == 1 else 'rows'}"
            raise UsageError(
                f"model: the function 'decode_step' returned the logits {said}{among}; a number for each piece is needed,"
                f" [batch, pieces], here [{'batch' if rows is None else rows}, {self.pieces}]"
            )
        self._check_tensors("decode_step", " in its cache", cache, rows)
        if (ours := self._nesting(cache)) != (earlier := self._nesting(before)):
            raise UsageError(
                f"model: the function 'decode_step' was given the cache {earlier} and returned {ours}; tuples of one form are needed,"
                " whose tensors alone change"
            )
        return logits, cache

    def _check_tensors(self, function: str, where: str, structure: Any, rows: int | None) -> None:
        for part in self._parts(structure):
            shape = self.shape_of(part)
            if shape is None or not shape or _differ(shape[0], rows):
                said = _kind(part) if shape is None else f"a tensor {_written(shape)}"
                among = "" if shape is None or rows is None else f" for a batch of {rows}"
                raise UsageError(
                    f"model: the function {function!r} returned {said}{where}{among}; tensors in tuples are needed, which may be nested,"
                    " each [batch, …]"
                )

    def _parts(self, structure: Any) -> Iterator[Any]:
        """Yield what is in nested tuples."""
        if isinstance(structure, tuple):
            for part in structure:
                yield from self._parts(part)
        else:
            yield structure

    def _nesting(self, structure: Any) -> str:
        """Return nested tuples as text, with a dot for each tensor."""
        return f"({', '.join(map(self._nesting, structure))})" if isinstance(structure, tuple) else "·"


def _kind(found: Any) -> str:
    return "None" if found is None else f"one {type(found).__name__}"


def _written(shape: Sequence[int | None]) -> str:
    """Return a shape as text; a question mark for what is not known while it is traced."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _differ(size: int | None, rows: int | None) -> bool:
    return size is not None and rows is not None and size != rows
