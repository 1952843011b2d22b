"""Encoder–decoder Transformer, which translates a source into a target; one vocabulary for both, whose embedding is the output's too."""

from .spec import build

__all__ = ["build"]
