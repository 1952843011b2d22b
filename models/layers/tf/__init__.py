"""How does TensorFlow compute each layer?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .image import Layers

__all__ = ["Layers"]


def __getattr__(name: str) -> object:
    """Load the layers, and so TensorFlow, when they are asked for."""
    if name != "Layers":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .image import Layers

    return Layers
