"""Layers that models share, per framework."""

from .protocol import LayerSpecs, convolved

__all__ = ["LayerSpecs", "convolved"]
