"""Which layers do models share? `specs` has their parameters and sizes in numpy terms, `tf` and `torch` the same computations."""

from .specs import LayerSpecs, convolved

__all__ = ["LayerSpecs", "convolved"]
