"""Imported models on TensorFlow, from their exported graphs."""

from .forward import forward, storage_layouts

__all__ = ["forward", "storage_layouts"]
