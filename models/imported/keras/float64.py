"""What layers compute in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..graph import Traced
from .library import keras_on, using_floats


@contextmanager
def traced_layers(framework: str) -> Iterator[list[Traced]]:
    """Within the block, compute in float64, and collect results of layers as they end.

    A recurrent layer's own layers are not collected, as frameworks do not call them equally often.
    """
    layer, results = keras_on(framework).layers.Layer, []
    original, recurrent = layer.__call__, [0]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        repeats = isinstance(self, keras_on(framework).layers.RNN)
        recurrent[0] += repeats
        try:
            result = original(self, *args, **kwargs)
        finally:
            recurrent[0] -= repeats
        if not recurrent[0]:
            results.append(Traced(type(self).__name__, self.path or self.name, "", result))
        return result

    layer.__call__ = call
    try:
        with in_float64(framework):
            yield results
    finally:
        layer.__call__ = original


@contextmanager
def in_float64(framework: str) -> Iterator[None]:
    """Within the block, Keras computes in float64."""
    keras = keras_on(framework)
    from keras.src import backend
    from keras.src.backend.common import dtypes

    narrow = dtypes.result_type

    def wide(*formats: Any) -> str:
        """Return the format of a result, which Keras takes to be float32 for float64 and float32."""
        is_wide = any("float64" in str(getattr(part, "dtype", part)) for part in formats)
        return "float64" if is_wide else str(narrow(*formats))

    backend.result_type, dtypes.result_type = wide, wide
    try:
        with using_floats(keras, "float64"):
            yield
    finally:
        backend.result_type, dtypes.result_type = narrow, narrow
