"""Keras on one framework, with random numbers that do not depend on it.

Initial values are drawn from the run's seed by numpy, and dropout by the run's masks. Both replace functions of Keras's backends, which
have no public place for that.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from ....core.errors import UsageError
from ....core.plugins import installed_release
from ..reference import Reference

BACKENDS = {"torch": "torch", "tf": "tensorflow"}  # Keras's names
Drop = Callable[[Any, float], Any]
_MAX_SEED = 2**32 - 1


class _Random:
    """What random functions do in this process: a task computes one pass at a time."""

    def __init__(self) -> None:
        self.drop: Drop | None = None  # in a training pass
        self.building = False
        self.drawn: list[str] | None = None  # names of other functions that were called, in a pass that notes them


_random = _Random()


class _Visible(PathFinder):
    """Finder of installed modules that hides some packages."""

    hidden: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a module's spec; None for a hidden package."""
        return None if fullname in cls.hidden else super().find_spec(fullname, path, target)


@cache
def keras_on(framework: str) -> Any:
    """Import Keras on a framework, and return it. Raises UsageError if it is on another one."""
    wanted = BACKENDS[framework]
    _Visible.hidden = {*BACKENDS.values()} - {wanted}
    sys.meta_path[:] = [_Visible if finder is PathFinder else finder for finder in sys.meta_path]  # Keras imports what it finds
    os.environ["KERAS_BACKEND"] = wanted
    import keras

    if keras.config.backend() != wanted:
        raise UsageError(f"model: this process has Keras on {keras.config.backend()}, and {wanted} is needed.")
    keras.config.set_image_data_format("channels_last")
    keras.config.set_epsilon(1e-7)
    _set_floats(keras, "float32")
    keras.config.disable_traceback_filtering()  # which would hide the user's lines
    from keras.src import backend as functions

    _replace_random_functions(functions)
    _let_values_initialize(keras.Variable)
    return keras


def usable_framework(reference: Reference) -> str:
    """Return an installed framework to import a reference with.

    That is torch, unless it imports TensorFlow.
    """
    return "tf" if "tensorflow" in reference.imports() or installed_release("torch") is None else "torch"


@contextmanager
def using_floats(keras: Any, floats: str) -> Iterator[None]:
    """Within the block, constants and new layers have a format of floats."""
    before = keras.config.floatx()
    _set_floats(keras, floats)
    try:
        yield
    finally:
        _set_floats(keras, before)


def _set_floats(keras: Any, floats: str) -> None:
    keras.config.set_floatx(floats)
    keras.config.set_dtype_policy(floats)


def _replace_random_functions(backend: Any) -> None:
    functions = backend.random
    original_dropout = functions.dropout

    def dropout(inputs: Any, rate: float, noise_shape: Sequence[Any] | None = None, seed: Any = None) -> Any:
        if _random.drop is None:
            return original_dropout(inputs, rate, noise_shape, seed)
        if noise_shape is None:
            return _random.drop(inputs, rate)
        sizes = [size if part is None else part for part, size in zip(noise_shape, backend.core.shape(inputs), strict=True)]
        return inputs * _random.drop(backend.numpy.ones(sizes, dtype=inputs.dtype), rate)

    functions.dropout = dropout
    for name, draw in _DRAWS.items():
        setattr(functions, name, _replaced(backend, name, getattr(functions, name), draw))
    for name in ("randint", "categorical", "shuffle", "gamma", "binomial", "beta"):
        setattr(functions, name, _replaced(backend, name, getattr(functions, name), None))


def _let_values_initialize(variable: Any) -> None:
    """Let a variable of given values be made in a StatelessScope, as one of an initializer can."""
    original = variable.__init__

    def initialize(self: Any, initializer: Any, shape: Any = None, dtype: Any = None, **options: Any) -> None:
        if not callable(initializer) and not isinstance(initializer, str):
            values = self._convert_to_tensor(initializer, dtype=dtype)
            initializer, shape, dtype = lambda *_, **__: values, values.shape, dtype or values.dtype
        original(self, initializer, shape, dtype, **options)

    variable.__init__ = initialize


def _replaced(backend: Any, name: str, original: Callable[..., Any], draw: Callable[..., Any] | None) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if _random.drawn is not None:
            _random.drawn.append(f"{name}{_layer_in_words()}")
        if draw is None or not _random.building or backend.common.global_state.get_global_attribute("torch_device") == "meta":
            return original(*args, **kwargs)
        return draw(backend, *args, **kwargs)

    return replaced


def _layer_in_words() -> str:
    """Return the layer that calls, in words; "" if it is not found."""
    import keras

    frame = sys._getframe(1)
    while (calling := frame.f_back) is not None:
        frame = calling
        layer = frame.f_locals.get("self")
        if isinstance(layer, keras.layers.Layer):
            return f" of {type(layer).__name__} ({layer.name!r})"
    return ""


def _generator(seed: Any) -> np.random.Generator:
    """Return the generator of an initializer's seed, or one that the run's seed governs."""
    return np.random.Generator(np.random.Philox(seed if isinstance(seed, int) else random.randint(0, _MAX_SEED)))


def _tensor(backend: Any, values: Any, dtype: Any) -> Any:
    return backend.convert_to_tensor(values.astype(np.float32), dtype=dtype or backend.floatx())


def _normal(backend: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _tensor(backend, mean + stddev * _generator(seed).standard_normal(tuple(shape)), dtype)


def _uniform(backend: Any, shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _tensor(backend, _generator(seed).uniform(minval, maxval, tuple(shape)), dtype)


def _truncated_normal(backend: Any, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draw from a normal distribution within two standard deviations, by its inverse."""
    from scipy.special import ndtr, ndtri

    return _tensor(backend, mean + stddev * ndtri(_generator(seed).uniform(ndtr(-2.0), ndtr(2.0), tuple(shape))), dtype)


_DRAWS: dict[str, Callable[..., Any]] = {"normal": _normal, "uniform": _uniform, "truncated_normal": _truncated_normal}


@contextmanager
def initial_values_by(keras: Any, seed: int) -> Iterator[None]:
    """Within the block, initial values follow from the seed."""
    keras.utils.set_random_seed(seed % 2**32)
    _random.building = True
    try:
        yield
    finally:
        _random.building = False


@contextmanager
def dropping_by(drop: Drop | None) -> Iterator[None]:
    """Within the block, dropout is `drop`, of a tensor and a rate."""
    before, _random.drop = _random.drop, drop
    try:
        yield
    finally:
        _random.drop = before


@contextmanager
def noting_draws() -> Iterator[list[str]]:
    """Within the block, note the names of random functions besides dropout that are called."""
    names: list[str] = []
    _random.drawn = names
    try:
        yield names
    finally:
        _random.drawn = None
