"""What is ResNet-18 here? As in torchvision: seventeen convolutions in residual blocks with batch normalisation, and one dense layer."""

from .spec import build

__all__ = ["build"]
