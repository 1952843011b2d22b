"""Passes through the Transformer for both frameworks, with seeded inputs; no framework."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, TextFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.data.text import END
from crosstrain.models.build import build_model

VOCABULARY = 37
STEP = 7
MORE_PADDING = 8
MAX_LENGTH = 11
LAYERS = 2
"""Instead of three: what is computed between layers shows with two, and each costs TensorFlow a second of tracing."""


@dataclass(frozen=True)
class Case:
    """A model and its number of pairs. With dropout, masks are those of ``--deterministic``."""

    model: str
    batch: int = 5

    def __str__(self):
        return f"{self.model}-{self.batch}"

    @property
    def spec(self):
        columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
        features = TextFeatures({"source": VOCABULARY, "target": VOCABULARY})
        spec = build_model(self.model, DataInfo("made", {"train": 10, "test": 10}, columns, features))
        kept = [parameter for parameter in spec.parameters if not parameter.name.startswith((f"encoder.{LAYERS}.", f"decoder.{LAYERS}."))]
        return replace(spec, parameters=tuple(kept), settings=replace(spec.settings, layers=LAYERS))

    def job(self, precision="fp32", deterministic=True):
        return Job(model=self.model, deterministic=deterministic, seed=3, precision=precision)

    def parameters(self, seed):
        """Return initial values, with constant ones changed, so that each has an effect."""
        draw = np.random.default_rng([seed, 1])
        values = self.spec.initial(seed)
        moved = {name: value + 0.1 * draw.standard_normal(value.shape) if value.ndim == 1 else value for name, value in values.items()}
        return {name: value.astype(np.float32) for name, value in moved.items()}

    @property
    def indices(self):
        """Return the places of the pairs in the training split."""
        return np.arange(self.batch, dtype=np.int32) * 3 + 11

    def inputs(self, seed, padding=0):
        """Return pairs padded to the longest, plus `padding`.

        The first pair has at least two pieces on both sides: attention to a single one has no choice, and its queries no gradient.
        """
        draw = np.random.default_rng([seed, 2])
        padded = {}
        for column in ("source", "target"):
            lengths = draw.integers(1, MAX_LENGTH + 1, self.batch)
            lengths[:1] = np.maximum(lengths[:1], 2)
            tokens = np.zeros((self.batch, lengths.max(initial=0) + padding), np.int32)
            for row, length in enumerate(lengths):
                tokens[row, :length] = [*draw.integers(4, VOCABULARY, length - 1), END]
            padded |= {column: tokens, f"{column}_lengths": lengths.astype(np.int32)}
        return padded


DROPPED = {2: (64, 512), 3: (64, 16, 32), 4: (64, 2, 8, 32)}
"""Shapes of what is dropped of, by their number of dimensions."""


def result_formats(layers, x_btd, tokens_bt, lengths_b):
    """Yield results of every sequence layer of the plain case, by name.

    Inputs are float32, and the format of products.
    """
    layer = "encoder.0"
    low_btd = layers.linear(x_btd, f"{layer}.self_attention.output", low=True)
    yield "linear, low", low_btd
    yield "embedding", layers.embedding(tokens_bt, "embedding")
    for input_format, x in (("float32", x_btd), ("low", low_btd)):
        yield f"positions of {input_format}", layers.positions(x)
        yield f"layer_norm of {input_format}", layers.layer_norm(x, f"{layer}.feed_forward_norm")
        yield f"linear of {input_format}", layers.linear(x, f"{layer}.self_attention.output")
        yield f"dense of {input_format}", layers.dense(layers.dense_relu(x, f"{layer}.feed_forward.inner"), f"{layer}.feed_forward.output")
        yield f"dense_relu of {input_format}", layers.dense_relu(x, f"{layer}.feed_forward.inner")
        yield f"dense_relu of {input_format}, low", layers.dense_relu(x, f"{layer}.feed_forward.inner", low=True)
        (heads,) = layers.heads(x, 1, 4)
        mask = layers.attended(lengths_b, tokens_bt)
        for causal in (False, True):
            attended = layers.attention(heads, heads, heads, None if causal else mask, 0.0, 0, causal=causal)
            yield f"attention of {input_format}, {causal}", attended
            yield f"x + attention of {input_format}, {causal}", x_btd + attended
            yield (
                f"attention of {input_format}, {causal}, low",
                layers.attention(heads, heads, heads, None, 0.0, 0, causal=causal, low=True),
            )
        yield f"logits of {input_format}", layers.logits(x, "embedding")


def rates(seed):
    """Return dropout rates up to the largest number below 1."""
    drawn = 1.0 - 10.0 ** np.random.default_rng([seed, 3]).uniform(-17, 0, 20)
    return [float(rate) for rate in (*drawn[drawn < 1.0], 0.0, 0.999993, 1 - 2.0**-15, 1 - 2.0**-16, 1 - 2.0**-33, np.nextafter(1.0, 0.0))]


PLAIN = Case("transformer:tiny?dropout=0")
CASES = (
    PLAIN,
    Case("transformer:tiny?norm=post&dropout=0.2"),
    Case("transformer:tiny?dropout=0.1&dropout_attention=0.3&smoothing=0", 1),
)
EMPTY = Case(CASES[-1].model, 0)
