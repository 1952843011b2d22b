"""Comparison of runs; reads files only."""

from ..core import plugins as _plugins  # noqa: F401  (finds the modules that have moved)
