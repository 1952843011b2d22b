"""Comparable training on TensorFlow and PyTorch: ``import crosstrain as ct``.

`run` trains, `sweep` trains several configurations, `compare` compares runs, `load` opens one. `table` names a DataFrame's columns for
training. Nothing is imported before its use, and no framework at all: each run has processes of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.calls import run as run
    from .api.calls import sweep as sweep
    from .api.given_data import table as table
    from .api.results import Compared as Compared
    from .api.results import Result as Result
    from .api.results import compare as compare
    from .api.results import load as load
    from .core.errors import InterruptedRunError as InterruptedRunError
    from .core.errors import RunFailedError as RunFailedError
    from .core.errors import TrainerError as TrainerError
    from .core.errors import UsageError as UsageError

_PLACES = {
    "run": "api.calls",
    "sweep": "api.calls",
    "table": "api.given_data",
    "Compared": "api.results",
    "Result": "api.results",
    "compare": "api.results",
    "load": "api.results",
    "InterruptedRunError": "core.errors",
    "RunFailedError": "core.errors",
    "TrainerError": "core.errors",
    "UsageError": "core.errors",
}
__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
