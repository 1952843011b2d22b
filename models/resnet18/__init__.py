"""ResNet-18 as in torchvision: seventeen convolutions in residual blocks with batch normalisation, and one dense layer."""

from .spec import build

__all__ = ["build"]
