"""AlexNet as in torchvision: five convolutions and three dense layers, with dropout; images below 63 pixels are enlarged."""

from .spec import build

__all__ = ["build"]
