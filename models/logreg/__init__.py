"""Multinomial logistic regression: one dense layer and a softmax."""

from .spec import build

__all__ = ["build"]
