"""Cases of image models for both frameworks, with identical inputs; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from crosstrain.core.plugins import find, load
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.models.base import initial_values
from crosstrain.models.dropout_masks import keep_mask

SEED, STEP = 5, 7
LARGE = 1_000_000


@dataclass(frozen=True)
class Case:
    """One training pass and one evaluation pass over `batch` examples.

    `raised` is added to the shifts of batch normalisation. Rounding puts one activation in a million on the other side of a ReLU's kink,
    and with millions of them float32 differs from float64 by up to 1e-2 in the gradient, on one framework alone; raised by four standard
    deviations they have no kink (5e-7).
    """

    model: str
    shape: tuple[int, int, int]
    batch: int
    classes: int = 10
    raised: float = 0.0

    def __str__(self):
        return f"{self.model}-{'x'.join(map(str, self.shape))}-{self.batch}"

    @property
    def plain(self):
        """Whether a plain module takes it: torchvision needs 3 channels, AlexNet at least 63 pixels."""
        return self.model == "cnn" or (self.shape[0] == 3 and min(self.shape[1:]) >= (63 if self.model == "alexnet" else 1))

    @property
    def spec(self):
        info = DataInfo.of_images(
            "made", {"train": 1, "test": 1}, ImageFeatures(self.shape, self.classes, (0.0,) * self.shape[0], (1.0,) * self.shape[0])
        )
        return load(find("model", self.model), "model")(info)

    @property
    def parameters(self):
        values = initial(self.spec.parameters)
        shifts = {parameter.name.removesuffix("weight") + "bias" for parameter in self.spec.parameters if parameter.constant == 1.0}
        return {name: value + np.float32(self.raised) if name in shifts else value for name, value in values.items()}

    @property
    def buffers(self):
        """Return running statistics that are neither 0 nor 1."""
        rng = np.random.default_rng(3)
        return {
            name: (value + rng.uniform(0.1, 0.5, value.shape)).astype(np.float32) for name, value in self.spec.initial_buffers().items()
        }

    @property
    def examples(self):
        rng = np.random.default_rng(4)
        x = rng.standard_normal((self.batch, *self.shape)).astype(np.float32)
        return x, rng.integers(0, self.classes, self.batch).astype(np.int32)


@lru_cache(maxsize=1)
def initial(specs):
    """Return initial parameters, cached for consecutive cases of one model.

    AlexNet has 57 million, at any size of image.
    """
    return initial_values(specs, SEED)


CASES = [
    Case("cnn", (3, 32, 32), 16),
    Case("cnn", (1, 28, 28), 5),
    Case("cnn", (1, 8, 8), 3),
    Case("alexnet", (3, 32, 32), 4),
    Case("alexnet", (3, 63, 63), 4),
    Case("alexnet", (1, 70, 100), 2),
    Case("alexnet", (3, 224, 224), 2, 1000),
    Case("resnet18", (3, 32, 32), 16),
    Case("resnet18", (3, 63, 40), 4),
    Case("resnet18", (3, 224, 224), 2, 1000, raised=4.0),
]

EMPTY = [Case("cnn", (3, 32, 32), 0), Case("alexnet", (3, 32, 32), 0), Case("resnet18", (3, 32, 32), 0), Case("resnet18", (3, 63, 40), 0)]
"""Sizes of CASES, so that a framework that traces its functions traces none for these."""

SINGLE = [Case("resnet18", (3, 32, 32), 1)]
"""The last stage has one pixel: one value a channel to normalise."""


def dropout_mask(layer, batch, width, rate):
    """Return the mask of a dropout layer for examples 10, 11, …"""
    return keep_mask(SEED, STEP, layer, np.arange(10, 10 + batch), width, rate)


def thinned(gradient):
    """Return a gradient, or every n-th element of a large one, which is enough to compare norms.

    n is prime to the length of any row.
    """
    gradient = np.asarray(gradient)
    return gradient if gradient.size < LARGE else gradient.ravel()[::127]
