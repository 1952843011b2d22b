"""What is multinomial logistic regression as a network? One dense layer and a softmax."""

from .spec import build

__all__ = ["build"]
