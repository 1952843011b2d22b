"""Encoder–decoder Transformer, which translates a source into a target.

Source and target share a vocabulary, and its embedding is also the output layer.
Vaswani et al. 2017, in three sizes. Shapes: tokens_bt [batch, time]; x_btd [batch, time, width]; logits_btv [batch, target time, pieces];
heads x_bhte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, NamedTuple

from ...core.errors import UsageError
from ...data.base import DataInfo
from ...data.columns import LENGTHS
from ...data.text import BEGIN
from ...metrics import Metric
from ..base import ForwardContext, ModelSpec
from ..build import Rate
from ..decoding import TranslationQuality
from ..layers import LayerSpecs
from ..layers.protocol import SequenceNetworkLayers
from ..objectives import Objective

SOURCE, TARGET = "source", "target"  # columns read
EMBEDDING = "embedding"
Size = Literal["tiny", "base", "big"]
Norm = Literal["pre", "post"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a forward pass.

    `inner`: width of the feed-forward layer, `layers`: of each side. `norm`: layer normalisation before each sublayer (and at the end), or
    after adding its result. Dropout rates by place: sum of embedding and position; result of each sublayer; feed-forward layer's ReLU;
    attention's softmax. `smoothing`: label smoothing.
    """

    width: int
    layers: int
    heads: int
    inner: int
    norm: Norm
    dropout_embedding: float
    dropout_residual: float
    dropout_relu: float
    dropout_attention: float
    smoothing: float

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        return any((self.dropout_embedding, self.dropout_residual, self.dropout_relu, self.dropout_attention))


SIZES: dict[Size, Settings] = {
    "tiny": Settings(128, 3, 4, 512, "pre", 0.1, 0.1, 0.1, 0.1, smoothing=0.1),
    "base": Settings(512, 6, 8, 2048, "pre", 0.1, 0.1, 0.1, 0.1, smoothing=0.1),
    "big": Settings(1024, 6, 16, 4096, "pre", 0.3, 0.3, 0.3, 0.1, smoothing=0.1),
}
"""`base` and `big` are Vaswani's, with the dropout of OpenSeq2Seq's configurations."""

MAX_NATS = 700.0  # largest negative log-likelihood whose exponential is a float64
PERPLEXITY = Metric(
    "perplexity",
    "perplexity",
    "lower",
    lambda sums: math.exp(min(max(sums["nll_sum"] / sums["target_tokens"], 0.0), MAX_NATS)),
    bounds=(1.0, math.inf),
)
TOKEN_ACCURACY = Metric(
    "token_accuracy", "token accuracy", "higher", lambda sums: sums["correct_tokens"] / sums["target_tokens"], bounds=(0.0, 1.0)
)

TRANSLATION = Objective(
    "translation",
    "translation_loss",
    ("loss_sum", "nll_sum", "correct_tokens", "target_tokens", "examples"),
    (PERPLEXITY, TOKEN_ACCURACY),
    weight="target_tokens",
)
"""The loss is per target token, including END, with smoothed labels; perplexity is not smoothed."""


def build(  # noqa: PLR0913 - the options that a user may give the model
    data: DataInfo,
    *,
    size: Size = "base",
    norm: Norm = "pre",
    dropout: Rate | None = None,
    dropout_embedding: Rate | None = None,
    dropout_residual: Rate | None = None,
    dropout_relu: Rate | None = None,
    dropout_attention: Rate | None = None,
    smoothing: Rate = 0.1,
) -> ModelSpec:
    """Fit the network to the data; `dropout`: default of all rates, None for the size's.

    Raises UsageError.
    """
    by_place = {
        "dropout_embedding": dropout_embedding,
        "dropout_residual": dropout_residual,
        "dropout_relu": dropout_relu,
        "dropout_attention": dropout_attention,
    }
    rates = {name: rate for name, rate in {"dropout": dropout, **by_place, "smoothing": smoothing}.items() if rate is not None}
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise UsageError.of(f"model: {name} of 'transformer'", f"{rate:g}", "a number from 0 up to, but not including, 1")
    changed: dict[str, Any] = {} if dropout is None else dict.fromkeys(by_place, rates.pop("dropout"))
    settings = replace(SIZES[size], norm=norm, **{**changed, **rates})
    pieces = _vocabulary(data)
    layers = _layers(settings, pieces)
    return ModelSpec(
        "transformer",
        tuple(layers.parameters),
        multiply_adds=layers.multiply_adds,
        dropout=settings.drops,
        objective=_objective(data),
        inputs=(SOURCE, TARGET),
        target=TARGET,
        logits_per_position=pieces,
        width=settings.width,
        settings=settings,
    )


def _objective(data: DataInfo) -> Objective:
    """The objective includes translations if the data's columns are languages."""
    text = data.text
    quality = TranslationQuality(SOURCE, TARGET, text.bleu_tokenizer) if text.languages else None
    return replace(TRANSLATION, translation=quality)


def _vocabulary(data: DataInfo) -> int:
    sizes = data.text.vocabulary_sizes
    if missing := [column for column in (SOURCE, TARGET) if column not in sizes]:
        raise UsageError(
            f"model: 'transformer' reads the columns {SOURCE} and {TARGET}, and {data.name!r} has no {' and no '.join(missing)}."
        )
    if sizes[SOURCE] != sizes[TARGET]:
        raise UsageError(
            f"model: 'transformer' has one vocabulary for source and target, and those of {data.name!r} have {sizes[SOURCE]:,} and "
            f"{sizes[TARGET]:,} pieces."
        )
    return sizes[SOURCE]


def _layers(settings: Settings, pieces: int) -> LayerSpecs:
    """Return the layers' specs; `multiply_adds` is for a source piece and a target piece.

    It is without attention's scores. Initial values are those of the reference implementation (tensor2tensor, and OpenSeq2Seq after it).
    Attention has no biases: the gradient of a key's bias is 0, and Adam with a small ε would turn its rounding errors into full steps.
    """
    width, inner, specs = settings.width, settings.inner, LayerSpecs()
    specs.embedding(EMBEDDING, pieces, width, logits=True)
    for side, crossed in (("encoder", False), ("decoder", True)):
        for number in range(settings.layers):
            layer = f"{side}.{number}"
            specs.layer_norm(f"{layer}.self_attention_norm", width)
            specs.linear(f"{layer}.self_attention.query_key_value", width, width, parts=3)
            specs.linear(f"{layer}.self_attention.output", width, width)
            if crossed:
                specs.layer_norm(f"{layer}.cross_attention_norm", width)
                specs.linear(f"{layer}.cross_attention.query", width, width)
                specs.linear(f"{layer}.cross_attention.key_value", width, width, parts=2)
                specs.linear(f"{layer}.cross_attention.output", width, width)
            specs.layer_norm(f"{layer}.feed_forward_norm", width)
            specs.linear(f"{layer}.feed_forward.inner", width, inner, bias=True)
            specs.linear(f"{layer}.feed_forward.output", inner, width, bias=True)
        if settings.norm == "pre":
            specs.layer_norm(f"{side}.norm", width)
    return specs


Pair = tuple[Any, Any]  # keys and values of an attention, x_bhte
Cache = tuple[Pair, ...]  # by decoder layer, keys and values of the target so far; first dimension: the batch


class Memory(NamedTuple):
    """The encoder's output for the decoder: attention mask, and keys and values by layer."""

    attended: Any
    pairs: Cache


class _Pass:
    """One forward pass; numbers its dropouts."""

    def __init__(self, layers: SequenceNetworkLayers, settings: Settings) -> None:
        self.layers, self.settings = layers, settings
        self._numbers: Iterator[int] = count()

    def dropout(self, x_btd: Any, rate: float) -> Any:
        return self.layers.dropout(x_btd, rate, next(self._numbers))

    def embedded(self, tokens_bt: Any, start: Any = 0) -> Any:
        """Return tokens with their positions, counted from `start`."""
        x_btd = self.layers.positions(self.layers.embedding(tokens_bt, EMBEDDING), start)
        return self.dropout(x_btd, self.settings.dropout_embedding)

    def sublayer_input(self, x_btd: Any, sublayer: str) -> Any:
        """Return a sublayer's input."""
        return self.layers.layer_norm(x_btd, f"{sublayer}_norm") if self.settings.norm == "pre" else x_btd

    def sublayer_result(self, x_btd: Any, added_btd: Any, sublayer: str) -> Any:
        """Return a sublayer's result, given its output `added_btd` for x_btd."""
        x_btd = x_btd + self.dropout(added_btd, self.settings.dropout_residual)
        return x_btd if self.settings.norm == "pre" else self.layers.layer_norm(x_btd, f"{sublayer}_norm")

    def end(self, x_btd: Any, side: str) -> Any:
        return self.layers.layer_norm(x_btd, f"{side}.norm") if self.settings.norm == "pre" else x_btd

    def attention(self, query_bhqe: Any, pair: Pair, mask: Any, name: str, *, causal: bool = False) -> Any:
        """Attend, and multiply by the output's weight."""
        rate, number = self.settings.dropout_attention, next(self._numbers)
        mixed_bqd = self.layers.attention(query_bhqe, *pair, mask, rate, number, causal=causal, low=True)
        return self.layers.linear(mixed_bqd, f"{name}.output")

    def self_attention_heads(self, x_btd: Any, name: str) -> tuple[Any, Any, Any]:
        """Return query, key and value of a self-attention."""
        query, key, value = self.layers.heads(self.layers.linear(x_btd, f"{name}.query_key_value", low=True), 3, self.settings.heads)
        return query, key, value

    def cross_attention(self, x_btd: Any, memory: Memory, layer: int) -> Any:
        name = f"decoder.{layer}.cross_attention"
        (query,) = self.layers.heads(
            self.layers.linear(self.sublayer_input(x_btd, name), f"{name}.query", low=True), 1, self.settings.heads
        )
        return self.sublayer_result(x_btd, self.attention(query, memory.pairs[layer], memory.attended, name), name)

    def feed_forward(self, x_btd: Any, layer: str) -> Any:
        name = f"{layer}.feed_forward"
        inner_bti = self.layers.dense_relu(self.sublayer_input(x_btd, name), f"{name}.inner", low=True)
        return self.sublayer_result(x_btd, self.layers.dense(self.dropout(inner_bti, self.settings.dropout_relu), f"{name}.output"), name)

    def encoded(self, source_bs: Any, lengths_b: Any) -> Memory:
        attended, x_bsd = self.layers.attended(lengths_b, source_bs), self.embedded(source_bs)
        for number in range(self.settings.layers):
            name = f"encoder.{number}.self_attention"
            query, key, value = self.self_attention_heads(self.sublayer_input(x_bsd, name), name)
            x_bsd = self.sublayer_result(x_bsd, self.attention(query, (key, value), attended, name), name)
            x_bsd = self.feed_forward(x_bsd, f"encoder.{number}")
        x_bsd = self.end(x_bsd, "encoder")
        return Memory(attended, tuple(self._pair(x_bsd, number) for number in range(self.settings.layers)))

    def _pair(self, x_bsd: Any, number: int) -> Pair:
        projected = self.layers.linear(x_bsd, f"decoder.{number}.cross_attention.key_value", low=True)
        key, value = self.layers.heads(projected, 2, self.settings.heads)
        return key, value

    def decoded(self, tokens_bt: Any, memory: Memory, start: Any = 0, cache: Cache | None = None) -> tuple[Any, Cache]:
        """Return logits_btv of the next tokens, and the cache.

        With a cache the tokens are one position, else whole targets.
        """
        x_btd, pairs = self.embedded(tokens_bt, start), []
        for number in range(self.settings.layers):
            name = f"decoder.{number}.self_attention"
            query, key, value = self.self_attention_heads(self.sublayer_input(x_btd, name), name)
            if cache is not None:
                before_key, before_value = cache[number]
                key, value = self.layers.appended(before_key, key), self.layers.appended(before_value, value)
            pairs.append((key, value))
            x_btd = self.sublayer_result(x_btd, self.attention(query, (key, value), None, name, causal=cache is None), name)
            x_btd = self.cross_attention(x_btd, memory, number)
            x_btd = self.feed_forward(x_btd, f"decoder.{number}")
        return self.layers.logits(self.end(x_btd, "decoder"), EMBEDDING), tuple(pairs)


def network(layers: SequenceNetworkLayers, inputs: Mapping[str, Any], settings: Settings) -> Any:
    """Return logits_btv for each target position, from the source and the target before it."""
    forward_pass = _Pass(layers, settings)
    memory = forward_pass.encoded(inputs[SOURCE], inputs[SOURCE + LENGTHS])
    logits_btv, _ = forward_pass.decoded(layers.shifted(inputs[TARGET], BEGIN), memory)
    return logits_btv


def encode(layers: SequenceNetworkLayers, source_bs: Any, lengths_b: Any, settings: Settings) -> Memory:
    """Encode padded sources for `decode_step`. The context must not be a training one."""
    return _Pass(layers, settings).encoded(source_bs, lengths_b)


def empty_cache(memory: Memory) -> Cache:
    """Return the cache before the first step."""
    return tuple((key[:, :, :0], value[:, :, :0]) for key, value in memory.pairs)


def decode_step(
    layers: SequenceNetworkLayers, tokens_b: Any, position: Any, memory: Memory, cache: Cache, settings: Settings
) -> tuple[Any, Cache]:
    """Return logits of the next tokens, [batch, pieces], and the extended cache.

    `tokens_b` are at `position` of the targets, BEGIN at position 0; `cache` holds the positions before. Rows of memory and cache may be
    reordered between steps.
    """
    logits_b1v, cache = _Pass(layers, settings).decoded(tokens_b[:, None], memory, position, cache)
    return logits_b1v[:, 0], cache


Tensors = Mapping[str, Any]


def forward_functions(
    layers: Callable[..., SequenceNetworkLayers],
) -> tuple[Callable[..., Any], Callable[..., Memory], Callable[..., tuple[Any, Cache]]]:
    """Return a forward module's `forward`, `encode` and `decode_step`.

    They are over a framework's layers.
    """

    def forward(parameters: Tensors, inputs: Tensors, context: ForwardContext[Any]) -> Any:
        return network(context.layers(layers(parameters, context)), inputs, context.settings)

    def encode_sources(parameters: Tensors, inputs: Tensors, context: ForwardContext[Any]) -> Memory:
        return encode(layers(parameters, context), inputs[SOURCE], inputs[SOURCE + LENGTHS], context.settings)

    def next_logits(
        parameters: Tensors, tokens_b: Any, position: Any, memory: Memory, cache: Cache, context: ForwardContext[Any]
    ) -> tuple[Any, Cache]:
        return decode_step(layers(parameters, context), tokens_b, position, memory, cache, context.settings)

    return forward, encode_sources, next_logits
