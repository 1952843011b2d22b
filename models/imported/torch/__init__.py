"""Imported models on torch: the user's own module, and its export as a graph."""

from .forward import forward

__all__ = ["forward"]
