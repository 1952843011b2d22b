"""What a model's network is written in: the layers that every framework's `Layers` has, so that one definition serves them all."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["NetworkLayers"]


class NetworkLayers(Protocol):
    """The layers of one forward pass, on tensors of some framework. Each with weights takes the name its parameters are found under.

    Images go in through `images` and lie in memory as the framework likes until `flatten`, `dense` or `logits`; features are in canonical
    order. A batch may be empty.
    """

    def images(self, x_bchw: Any) -> Any:
        """Return canonical images [b, c, h, w] in the layout that the other layers work in."""
        ...

    def enlarge(self, x: Any, height: int, width: int) -> Any:
        """Resize bilinearly, with half-pixel centres; beyond the edge an image goes on as its edge."""
        ...

    def conv(self, x: Any, name: str, stride: int = 1, padding: int = 0) -> Any:
        """Cross-correlate, with zeros around the image; add the bias where there is one."""
        ...

    def conv_pool(self, x: Any, name: str, kernel: int, stride: int, padding: int = 0) -> Any:
        """Cross-correlate, with `padding` zeros around the image, add the bias, take max(x, 0), and then the maximum of each window.

        Adding the same number and cutting off at zero change no order, so that they may as well come after the maximum, on fewer elements.
        """
        ...

    def relu(self, x: Any) -> Any:
        """Return max(x, 0); x itself may be overwritten."""
        ...

    def max_pool(self, x: Any, kernel: int, stride: int, padding: int = 0) -> Any:
        """Take the maximum of each window; windows that would reach beyond the padding are left out."""
        ...

    def average_pool(self, x: Any, side: int) -> Any:
        """Average to `side` × `side` pixels; output i of a side of n covers the pixels ⌊i·n/side⌋ … ⌈(i+1)·n/side⌉ − 1."""
        ...

    def flatten(self, x: Any) -> Any:
        """Return images as features [b, c·h·w]."""
        ...

    def dense(self, x: Any, name: str) -> Any:
        """Multiply features (or an image, taken as features) by the weight and add the bias."""
        ...

    def dropout(self, x_bf: Any, rate: float, layer: int) -> Any:
        """Drop at random while training; `layer` numbers the model's dropout layers."""
        ...

    def batch_norm(self, x: Any, name: str) -> Any:
        """Normalise each channel by the batch while training, else by the running statistics."""
        ...

    def logits(self, x_bk: Any) -> Any:
        """Return the last layer's result as float32."""
        ...
