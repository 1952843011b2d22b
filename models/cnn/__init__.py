"""A small convolutional network: two 5×5 convolutions, each with a 2×2 pool, and two dense layers."""

from .spec import build

__all__ = ["build"]
