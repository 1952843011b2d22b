"""What a network of sequences is written in: the layers that every framework's `SequenceLayers` has.

Shapes: tokens_bt [batch, time]; x_btd [batch, time, width]; of attention's heads x_bhte [batch, heads, time, width of a head]. Behind the
end of an example stands padding, whose results mean nothing and reach no other position.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["SequenceNetworkLayers"]


class SequenceNetworkLayers(Protocol):
    """The layers of one forward pass, on tensors of some framework. Each with weights takes the name its parameters are found under.

    Matrix products are computed in the context's number format, all else in float32: embedding, normalisation, softmax and sums. Every
    result is float32 whatever the format of what is given, on every framework, so that results may be added to each other. A layer with
    `low` leaves it in the number format of products where that is asked for, because a product follows; `heads`, `appended` and `dropout`
    keep the format that they are given. `rate` is the probability with which a dropout drops, `layer` its number within the model. A
    batch may be empty, and so may a time.
    """

    def embedding(self, tokens_bt: Any, name: str) -> Any:
        """Return rows of ``<name>.weight`` [pieces, width] times the root of the width, and zeros where a token is padding: x_btd."""
        ...

    def positions(self, x_btd: Any, start: Any = 0) -> Any:
        """Add the code of each position: of position p, counted from `start`, sin(p·f_i), and behind all of these cos(p·f_i).

        The frequencies are f_i = 10000^(−i / (width/2 − 1)), i from 0 to width/2 − 1 (Vaswani et al. 2017, as tensor2tensor lays them out).
        """
        ...

    def shifted(self, tokens_bt: Any, first: int) -> Any:
        """Return the tokens moved a place to the right, `first` at their beginning."""
        ...

    def attended(self, lengths_b: Any, tokens_bt: Any) -> Any:
        """Return which positions of `tokens_bt` lie within their example, as a mask for `attention`: boolean, True = attend."""
        ...

    def layer_norm(self, x_btd: Any, name: str) -> Any:
        """Normalise each position to mean 0 and variance 1 (1e-6 added to it), then scale and shift."""
        ...

    def linear(self, x_btd: Any, name: str, *, low: bool = False) -> Any:
        """Multiply by ``<name>.weight`` [out, in]: x_bto."""
        ...

    def dense(self, x_btd: Any, name: str) -> Any:
        """Multiply by ``<name>.weight`` [out, in] and add ``<name>.bias``."""
        ...

    def dense_relu(self, x_btd: Any, name: str, *, low: bool = False) -> Any:
        """Return max(0, `dense`)."""
        ...

    def heads(self, x_btd: Any, parts: int, count: int) -> tuple[Any, ...]:
        """Cut the width into `parts` of the same size, and each of these into `count` heads: so many x_bhte."""
        ...

    def attention(
        self,
        query_bhqe: Any,
        key_bhke: Any,
        value_bhke: Any,
        mask: Any,
        rate: float,
        layer: int,
        *,
        causal: bool = False,
        low: bool = False,
    ) -> Any:
        """Return softmax(query · key / √e) · value with the heads side by side, [batch, query, width]; dropout on the softmax.

        `mask` is what `attended` gave or any other boolean [batch, heads, query time, key time], of which each size may be 1, True where a
        key is attended to; None where every key is. `causal`: query i attends to the keys up to i alone, of those that the mask leaves.
        Each query needs a key. Raises UsageError for a mask of anything but booleans.
        """
        ...

    def appended(self, before: Any, new: Any) -> Any:
        """Return two x_bhte of one format with one time after the other: along the third dimension alone."""
        ...

    def dropout(self, x_btd: Any, rate: float, layer: int) -> Any:
        """Drop at random while training."""
        ...

    def logits(self, x_btd: Any, name: str) -> Any:
        """Multiply by ``<name>.weight`` [pieces, width]: logits_btv."""
        ...
