"""The packages that text needs, imported only where they are used: a prepared store is read without them."""

from __future__ import annotations

import importlib
from types import ModuleType

from ....core.errors import MissingPackageError

__all__ = ["text_package"]


def text_package(name: str) -> ModuleType:
    """Import ``sentencepiece``, ``sacrebleu`` or ``num2words``. Raises MissingPackageError that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackageError(
            f"data: text needs the package {name!r}, which is not installed. Install it with: pip install 'crosstrain[text]'"
        ) from error
