"""The Transformer of Vaswani et al. 2017 in three sizes: what is trained, how it is started, and what it is judged by.

Initial values are the reference implementation's (tensor2tensor, and OpenSeq2Seq after it). The embedding is normal with the deviation
width^−½: rows that are looked up, times √width, have unit variance, and so have the logits that come of a normalised position. Every
other matrix is uniform in ±√(6 / (fan in + fan out)) (Glorot and Bengio 2010), where the matrices of an attention's queries, keys and
values count each by itself, though they lie in one. Biases are 0, normalisation's scale 1 and shift 0.

Attention has no biases: the gradient of a key's bias is 0 in mathematics, and Adam with a small ε makes whole steps of its rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ...core.errors import UsageError
from ...data.base import DataInfo
from ...metrics import Metric
from ..arguments import Rate
from ..base import ModelSpec
from ..decoding.quality import TranslationQuality
from ..layers import LayerSpecs
from ..objectives import Objective

__all__ = ["EMBEDDING", "SIZES", "SOURCE", "TARGET", "TRANSLATION", "Settings", "build"]

SOURCE, TARGET = "source", "target"
"""The columns that are read."""

EMBEDDING = "embedding"

Size = Literal["tiny", "base", "big"]
Norm = Literal["pre", "post"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a forward pass has to know. `width` is a position's, `inner` the feed-forward layer's; encoder and decoder have `layers` each.

    `norm`: layer normalisation before each sublayer (and once more at the end), or after its result has been added. Dropout rates by place:
    of the sum of embedding and position; of what each sublayer adds; behind the feed-forward layer's ReLU; of the attention's shares.
    `smoothing` is the share of the label that all pieces of the vocabulary have in equal parts.
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
        """Whether anything is dropped."""
        return any((self.dropout_embedding, self.dropout_residual, self.dropout_relu, self.dropout_attention))


@dataclass(frozen=True, slots=True)
class _Dimensions:
    """Of a size: see `Settings`. `dropout` is that of every place but attention."""

    width: int
    layers: int
    heads: int
    inner: int
    dropout: float
    dropout_attention: float


SIZES: dict[Size, _Dimensions] = {
    "tiny": _Dimensions(128, 3, 4, 512, 0.1, 0.1),
    "base": _Dimensions(512, 6, 8, 2048, 0.1, 0.1),
    "big": _Dimensions(1024, 6, 16, 4096, 0.3, 0.1),
}
"""`base` and `big` are Vaswani's, with the dropout of OpenSeq2Seq's configurations."""

MOST_NATS = 700.0
"""Of a negative log-likelihood: the exponential of more has no float64."""

PERPLEXITY = Metric(
    "perplexity",
    "perplexity",
    "lower",
    lambda sums: math.exp(min(max(sums["nll_sum"] / sums["target_tokens"], 0.0), MOST_NATS)),
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
"""The loss is the cross entropy with smoothed labels for each target token, the sentence's end among them; perplexity is not smoothed."""


def build(
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
    """Fit the network to the data's vocabulary. `dropout` is the rate of all places, before those given by place; None is the size's own.

    Raises UsageError for rates that are no probabilities below 1, and for a source and a target with two vocabularies.
    """
    own = SIZES[size]
    given = {
        "dropout": dropout,
        "dropout_embedding": dropout_embedding,
        "dropout_residual": dropout_residual,
        "dropout_relu": dropout_relu,
        "dropout_attention": dropout_attention,
        "smoothing": smoothing,
    }
    for name, rate in given.items():
        if rate is not None and not 0.0 <= rate < 1.0:
            raise UsageError.of(f"model: {name} of 'transformer'", f"{rate:g}", "a number from 0 up to, but not including, 1")
    everywhere = own.dropout if dropout is None else dropout
    attention = own.dropout_attention if dropout is None else dropout
    settings = Settings(
        width=own.width,
        layers=own.layers,
        heads=own.heads,
        inner=own.inner,
        norm=norm,
        dropout_embedding=everywhere if dropout_embedding is None else dropout_embedding,
        dropout_residual=everywhere if dropout_residual is None else dropout_residual,
        dropout_relu=everywhere if dropout_relu is None else dropout_relu,
        dropout_attention=attention if dropout_attention is None else dropout_attention,
        smoothing=smoothing,
    )
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
    """Return what it is judged by: also by its translations, where the data's columns are languages and not pieces alone."""
    text = data.text
    quality = TranslationQuality(SOURCE, TARGET, text.bleu_tokenizer) if text.languages else None
    return replace(TRANSLATION, translation=quality)


def _vocabulary(data: DataInfo) -> int:
    """Return how many pieces source and target are made of."""
    sizes = data.text.vocabulary_sizes
    if lacking := [column for column in (SOURCE, TARGET) if column not in sizes]:
        raise UsageError(
            f"model: 'transformer' reads the columns {SOURCE} and {TARGET}, and {data.name!r} has no {' and no '.join(lacking)}."
        )
    if sizes[SOURCE] != sizes[TARGET]:
        raise UsageError(
            f"model: 'transformer' has one vocabulary for source and target, and those of {data.name!r} have {sizes[SOURCE]:,} and "
            f"{sizes[TARGET]:,} pieces."
        )
    return sizes[SOURCE]


def _layers(settings: Settings, pieces: int) -> LayerSpecs:
    """Return what is trained, in the order in which a forward pass needs it.

    `multiply_adds` is how often one piece of a source and one of a target, together, are multiplied with a weight: an example costs that
    for each piece of its length (with source and target of about one length), and beside it what attention multiplies without weights,
    which for sentences is a small part.
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
