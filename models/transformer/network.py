"""The Transformer, layer by layer, for every framework: a training pass, and its two halves for decoding, which goes piece by piece.

Shapes: tokens_bt [batch, time]; x_btd [batch, time, width]; logits_btv [batch, target time, pieces]; of attention's heads x_bhte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from ...data.columns import LENGTHS
from ...data.text import BEGIN
from ..layers.sequence_protocol import SequenceNetworkLayers
from .spec import EMBEDDING, SOURCE, TARGET, Settings

__all__ = ["Cache", "Memory", "decode_step", "empty_cache", "encode", "network"]

Pair = tuple[Any, Any]
"""Keys and values of an attention, x_bhte."""

Cache = tuple[Pair, ...]
"""Of each layer of the decoder, the keys and values of the target's positions so far. Their first dimension is the batch."""


class Memory(NamedTuple):
    """What the decoder needs of a source: where it attends to, and keys and values for each of its layers. First dimension: the batch."""

    attended: Any
    pairs: Cache


class _Pass:
    """One forward pass: its layers, the model's settings, and the number of the next dropout."""

    def __init__(self, layers: SequenceNetworkLayers, settings: Settings) -> None:
        self.layers, self.settings = layers, settings
        self._numbers: Iterator[int] = count()

    def dropout(self, x_btd: Any, rate: float) -> Any:
        """Drop at random while training."""
        return self.layers.dropout(x_btd, rate, next(self._numbers))

    def embedded(self, tokens_bt: Any, start: Any = 0) -> Any:
        """Return tokens with their positions, counted from `start`."""
        x_btd = self.layers.positions(self.layers.embedding(tokens_bt, EMBEDDING), start)
        return self.dropout(x_btd, self.settings.dropout_embedding)

    def before(self, x_btd: Any, sublayer: str) -> Any:
        """Return what a sublayer computes from."""
        return self.layers.layer_norm(x_btd, f"{sublayer}_norm") if self.settings.norm == "pre" else x_btd

    def after(self, x_btd: Any, added_btd: Any, sublayer: str) -> Any:
        """Return what follows a sublayer that has computed `added_btd` from x_btd."""
        x_btd = x_btd + self.dropout(added_btd, self.settings.dropout_residual)
        return x_btd if self.settings.norm == "pre" else self.layers.layer_norm(x_btd, f"{sublayer}_norm")

    def end(self, x_btd: Any, side: str) -> Any:
        """Return the result of the encoder or the decoder."""
        return self.layers.layer_norm(x_btd, f"{side}.norm") if self.settings.norm == "pre" else x_btd

    def attention(self, query_bhqe: Any, pair: Pair, mask: Any, name: str, *, causal: bool = False) -> Any:
        """Attend, and multiply by the output's weight."""
        rate, number = self.settings.dropout_attention, next(self._numbers)
        mixed_bqd = self.layers.attention(query_bhqe, *pair, mask, rate, number, causal=causal, low=True)
        return self.layers.linear(mixed_bqd, f"{name}.output")

    def own_heads(self, x_btd: Any, name: str) -> tuple[Any, Any, Any]:
        """Return query, key and value of an attention of positions to each other."""
        query, key, value = self.layers.heads(self.layers.linear(x_btd, f"{name}.query_key_value", low=True), 3, self.settings.heads)
        return query, key, value

    def cross_attention(self, x_btd: Any, memory: Memory, layer: int) -> Any:
        """Add what the target's positions attend to in the source."""
        name = f"decoder.{layer}.cross_attention"
        (query,) = self.layers.heads(self.layers.linear(self.before(x_btd, name), f"{name}.query", low=True), 1, self.settings.heads)
        return self.after(x_btd, self.attention(query, memory.pairs[layer], memory.attended, name), name)

    def feed_forward(self, x_btd: Any, layer: str) -> Any:
        """Add what the feed-forward layer makes of each position."""
        name = f"{layer}.feed_forward"
        inner_bti = self.layers.dense_relu(self.before(x_btd, name), f"{name}.inner", low=True)
        return self.after(x_btd, self.layers.dense(self.dropout(inner_bti, self.settings.dropout_relu), f"{name}.output"), name)

    def encoded(self, source_bs: Any, lengths_b: Any) -> Memory:
        """Return the memory of padded sources."""
        attended, x_bsd = self.layers.attended(lengths_b, source_bs), self.embedded(source_bs)
        for number in range(self.settings.layers):
            name = f"encoder.{number}.self_attention"
            query, key, value = self.own_heads(self.before(x_bsd, name), name)
            x_bsd = self.after(x_bsd, self.attention(query, (key, value), attended, name), name)
            x_bsd = self.feed_forward(x_bsd, f"encoder.{number}")
        x_bsd = self.end(x_bsd, "encoder")
        return Memory(attended, tuple(self._pair(x_bsd, number) for number in range(self.settings.layers)))

    def _pair(self, x_bsd: Any, number: int) -> Pair:
        projected = self.layers.linear(x_bsd, f"decoder.{number}.cross_attention.key_value", low=True)
        key, value = self.layers.heads(projected, 2, self.settings.heads)
        return key, value

    def decoded(self, tokens_bt: Any, memory: Memory, start: Any = 0, cache: Cache | None = None) -> tuple[Any, Cache]:
        """Return logits_btv of what follows each of the tokens, and the cache with their keys and values.

        Without a cache the tokens are targets from their beginning; with one they are the next position of each.
        """
        x_btd, pairs = self.embedded(tokens_bt, start), []
        for number in range(self.settings.layers):
            name = f"decoder.{number}.self_attention"
            query, key, value = self.own_heads(self.before(x_btd, name), name)
            if cache is not None:
                before_key, before_value = cache[number]
                key, value = self.layers.appended(before_key, key), self.layers.appended(before_value, value)
            pairs.append((key, value))
            x_btd = self.after(x_btd, self.attention(query, (key, value), None, name, causal=cache is None), name)
            x_btd = self.cross_attention(x_btd, memory, number)
            x_btd = self.feed_forward(x_btd, f"decoder.{number}")
        return self.layers.logits(self.end(x_btd, "decoder"), EMBEDDING), tuple(pairs)


def network(layers: SequenceNetworkLayers, inputs: Mapping[str, Any], settings: Settings) -> Any:
    """Return logits_btv of each position of the target, from the source and what stands before it in the target."""
    own = _Pass(layers, settings)
    memory = own.encoded(inputs[SOURCE], inputs[SOURCE + LENGTHS])
    logits_btv, _ = own.decoded(layers.shifted(inputs[TARGET], BEGIN), memory)
    return logits_btv


def encode(layers: SequenceNetworkLayers, source_bs: Any, lengths_b: Any, settings: Settings) -> Memory:
    """Return what `decode_step` needs of padded sources and their lengths. The context must not be one of training."""
    return _Pass(layers, settings).encoded(source_bs, lengths_b)


def empty_cache(memory: Memory) -> Cache:
    """Return the cache before the first step: no position of any target."""
    return tuple((key[:, :, :0], value[:, :, :0]) for key, value in memory.pairs)


def decode_step(
    layers: SequenceNetworkLayers, tokens_b: Any, position: Any, memory: Memory, cache: Cache, settings: Settings
) -> tuple[Any, Cache]:
    """Return the logits of what follows each token, [batch, pieces], and the cache with the position added.

    `tokens_b` stand at `position` of the targets, which begin with BEGIN at position 0; `cache` holds the positions before. Memory and
    cache may be taken row by row between two steps, so that a hypothesis goes on from another's.
    """
    logits_b1v, cache = _Pass(layers, settings).decoded(tokens_b[:, None], memory, position, cache)
    return logits_b1v[:, 0], cache
