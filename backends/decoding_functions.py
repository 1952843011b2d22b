"""Functions of a model's forward module, and those by which it translates step by step.

``encode(parameters, inputs, context) -> memory`` of padded sources; ``empty_cache(memory) -> cache``; ``decode_step(parameters, tokens_b,
position, memory, cache, context) -> (logits_bv, cache)``: float32 logits after the pieces at `position` (BEGIN at 0). Memory and cache are
nested tuples of tensors [batch, …], whose rows may be taken, repeated and dropped between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly
from ..core.errors import UsageError
from ..core.plugins import forward_plugin, load
from ..data.base import Dataset, Split
from ..data.text import END
from ..models.decoding import GREEDY, Decoding, Hypothesis, Scored, Stepper, TranslationScorer, decode
from ..models.losses import functions_on
from ..models.objectives import CROSS_ENTROPY, Objective

_NAMES = ("encode", "empty_cache", "decode_step")
ShapeOf = Callable[[Any], Sequence[int | None] | None]  # None for unknown sizes, and for anything but a tensor


@dataclass(frozen=True, slots=True)
class DecodingFunctions:
    """The three functions of one model on one backend."""

    encode: Callable[..., Any]
    empty_cache: Callable[..., Any]
    decode_step: Callable[..., tuple[Any, Any]]

    def called(self, call: Callable[..., Any]) -> DecodingFunctions:
        """Return the functions without parameters and context, which `call` adds."""
        return DecodingFunctions(partial(call, self.encode), self.empty_cache, partial(call, self.decode_step))

    @classmethod
    def from_module(cls, module: Any) -> DecodingFunctions:
        """Find them in a forward module. Raises UsageError where one is missing."""
        if missing := [name for name in _NAMES if not hasattr(module, name)]:
            raise UsageError(f"model: its objective translates, and {module.__name__} has no function {' and no '.join(missing)}.")
        return cls(*(getattr(module, name) for name in _NAMES))


@dataclass(frozen=True, slots=True)
class ModelFunctions:
    """Functions of a model on one backend.

    `losses` [batch] is None for cross entropy; `example_sums` are the objective's further parts.
    """

    module: Any
    losses: Callable[..., Any] | None
    example_sums: Callable[..., Mapping[str, Any]] | None
    decoding: DecodingFunctions | None

    @classmethod
    def find(cls, model: str, backend: str, objective: Objective, shape_of: ShapeOf) -> ModelFunctions:
        """Find the functions of a model.

        Raises UsageError without a forward function, the named loss, or what a translating model decodes with.
        """
        module, name = load(forward_plugin(model, backend), "forward"), objective.loss
        if objective.standard is not None:
            functions = functions_on(backend)
            chosen = None if name == CROSS_ENTROPY else _checked(name, partial(getattr(functions, name), objective.standard), shape_of)
            return cls(module, chosen, partial(functions.example_sums, objective.standard), None)
        if name != CROSS_ENTROPY and not hasattr(module, name):
            raise UsageError(f"model: its objective names the loss {name!r}, which is no function of {module.__name__}.")
        losses = None if name == CROSS_ENTROPY else _checked(name, getattr(module, name), shape_of)
        decoding = None if objective.translation is None else DecodingFunctions.from_module(module)
        return cls(module, losses, getattr(module, "example_sums", None), decoding)


def _checked(name: str, function: Callable[..., Any], shape_of: ShapeOf) -> Callable[..., Any]:
    def checked(outputs: Any, target: Any, context: Any) -> Any:
        losses_b = function(outputs, target, context)
        shape, (rows, *_) = shape_of(losses_b), shape_of(outputs) or (None,)
        if shape is None or len(shape) != 1 or _differ(shape[0], rows):
            kind = _kind(losses_b) if shape is None else _written(shape)
            among = "" if rows is None else f" for {rows} examples"
            raise UsageError(f"model: the loss {name!r} returned {kind}{among}; a number for each example is needed, [batch]")
        return losses_b

    return checked


@dataclass(frozen=True, slots=True)
class DecodingChecks:
    """Checks of what the functions return, or UsageError."""

    shape_of: ShapeOf
    pieces: int

    def memory(self, structure: Any, rows: int | None) -> Any:
        """Check what `encode` returned."""
        self._check_tensors("encode", "", structure, rows)
        return structure

    def cache(self, structure: Any, rows: int | None) -> Any:
        """Check what `empty_cache` returned."""
        self._check_tensors("empty_cache", "", structure, rows)
        return structure

    def step(self, result: Any, rows: int | None, before: Any) -> tuple[Any, Any]:
        """Check what `decode_step` returned, which was given the cache `before`."""
        if not isinstance(result, tuple) or len(result) != 2:
            kind = f"{len(result)} values" if isinstance(result, tuple) else _kind(result)
            raise UsageError(f"model: the function 'decode_step' returned {kind}; two are needed, (logits, cache)")
        logits, cache = result
        shape = self.shape_of(logits)
        if shape is None or len(shape) != 2 or shape[1] not in (None, self.pieces) or _differ(shape[0], rows):
            kind = _kind(logits) if shape is None else _written(shape)
            among = "" if rows is None else f" for {rows} {'row' if rows == 1 else 'rows'}"
            raise UsageError(
                f"model: the function 'decode_step' returned the logits {kind}{among}; a number for each piece is needed,"
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
                kind = _kind(part) if shape is None else f"a tensor {_written(shape)}"
                among = "" if shape is None or rows is None else f" for a batch of {rows}"
                raise UsageError(
                    f"model: the function {function!r} returned {kind}{where}{among}; tensors in tuples are needed, which may be nested,"
                    " each [batch, …]"
                )

    def _parts(self, structure: Any) -> Iterator[Any]:
        if isinstance(structure, tuple):
            for part in structure:
                yield from self._parts(part)
        else:
            yield structure

    def _nesting(self, structure: Any) -> str:
        return f"({', '.join(map(self._nesting, structure))})" if isinstance(structure, tuple) else "·"


def _kind(value: Any) -> str:
    return "None" if value is None else f"one {type(value).__name__}"


def _written(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _differ(size: int | None, rows: int | None) -> bool:
    return size is not None and rows is not None and size != rows


class CachedStepper(ABC):
    """Implementation of `models.decoding.search.Stepper` with a model's memory and cache.

    Raises UsageError (`DecodingChecks`).
    """

    def __init__(self, pieces: int, shape_of: ShapeOf) -> None:
        self._checks = DecodingChecks(shape_of, pieces)
        self._memory: Any = None
        self._cache: Any = None
        self._position = 0
        self._sentence_n = np.zeros(0, np.int64)

    @abstractmethod
    def _begun(self, padded_bs: NDArray[np.int64], lengths_b: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return memory and cache of padded sources, checked."""

    @abstractmethod
    def _taken(self, structures: Sequence[Any], rows_n: NDArray[np.int64]) -> list[Any]:
        """Return these rows of memory or cache."""

    @abstractmethod
    def _stepped(self, tokens_n: NDArray[np.int64]) -> tuple[NDArray[np.float32], Any]:
        """Return log-probabilities and the next cache, checked."""

    def begin(self, sources: Sequence[NDArray[np.integer]]) -> None:
        """See `Stepper.begin`."""
        lengths_b = np.array([len(source) for source in sources])
        padded_bs = np.zeros((len(sources), lengths_b.max()), np.int64)
        for row, source in zip(padded_bs, sources, strict=True):
            row[: len(source)] = source
        self._memory, self._cache = self._begun(padded_bs, lengths_b)
        self._position, self._sentence_n = 0, np.arange(len(sources))

    def advance(self, tokens_n: NDArray[np.int64], rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Stepper.advance`."""
        if not np.array_equal(rows_n, np.arange(len(self._sentence_n))):
            sentence_n = self._sentence_n[rows_n]
            if np.array_equal(sentence_n, self._sentence_n):  # hypotheses of one sentence have one memory
                (self._cache,) = self._taken([self._cache], rows_n)
            else:
                self._cache, self._memory = self._taken([self._cache, self._memory], rows_n)
            self._sentence_n = sentence_n
        log_probabilities_nv, self._cache = self._stepped(tokens_n)
        self._position += 1
        return log_probabilities_nv


FIRST_TEXT_PIECE = 4


class Translating:
    """Translator on a leading task, for its share of a dataset.

    Raises RuntimeError where the objective does not translate.
    """

    def __init__(self, data: Dataset, objective: Objective, stepper: Stepper, task: int, tasks: int) -> None:
        if objective.translation is None:
            raise RuntimeError(f"the objective {objective.name!r} translates nothing")
        self._stepper = stepper
        self._scorer = TranslationScorer(data, objective.translation)
        self._task, self._tasks = task, tasks

    def scored(self, split: Split, start: int, stop: int, decoding: Decoding, heartbeat: Callable[[], None]) -> Scored:
        """Translate this task's share of the sentences start … stop − 1; return its quality sums.

        `heartbeat` is called before each step.
        """
        first, last = split_evenly(stop - start, self._tasks)[self._task]
        stepper = _HeartbeatStepper(self._stepper, heartbeat)
        return self._scorer.scored(stepper, split, start + first, start + last, decoding)

    def translate(self, sources: Sequence[NDArray[np.integer]], decoding: Decoding, n_best: int) -> list[list[Hypothesis]]:
        """Return the best hypotheses of sentences that end with END, in order.

        See `models.decoding.search`.
        """
        return decode(self._stepper, sources, decoding, n_best)

    def warm_up(self) -> None:
        """Run every function once: on two sentences, with hypotheses taken and dropped."""
        source = np.array([FIRST_TEXT_PIECE, END])
        for decoding in (GREEDY, Decoding(beam=2, extra_length=2)):
            decode(self._stepper, [source, source[1:]], decoding)


class _HeartbeatStepper:
    def __init__(self, stepper: Stepper, heartbeat: Callable[[], None]) -> None:
        self._stepper, self._heartbeat = stepper, heartbeat

    def begin(self, sources: Sequence[NDArray[np.integer]]) -> None:
        self._heartbeat()
        self._stepper.begin(sources)

    def advance(self, tokens_n: NDArray[np.int64], rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        self._heartbeat()
        return self._stepper.advance(tokens_n, rows_n)
