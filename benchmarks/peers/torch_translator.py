"""The Transformer as one writes it by hand in torch, twice: attention by `scaled_dot_product_attention`, or torch's own nn.Transformer.

Both begin with the product's weights and compute what it computes: normalisation first, one embedding on both sides and for the output,
no biases in attention (nn.Transformer has them; they stay zero), labels smoothed over the whole vocabulary.
Shapes: x_btd [batch, time, width]; of attention's heads x_bhte; logits_btv [batch, target time, pieces].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from translation_batches import Batch
from workload import Workload

from crosstrain.models.layers.position_codes import position_codes

__all__ = ["ByHand", "Tensors", "build", "optimizer", "smoothed_loss", "tensors"]

EPSILON = 1e-6
LONGEST = 1024

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Source, the decoder's input, and target."""


def tensors(batch: Batch, device: str = "cpu") -> Tensors:
    """Return a batch for torch."""
    source, decoder, target = (torch.from_numpy(part).to(device) for part in (batch.source_bs, batch.decoder_bt, batch.target_bt))
    return source, decoder, target


def smoothed_loss(logits_btv: torch.Tensor, target_bt: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the mean over the target's tokens, padding left out."""
    return functional.cross_entropy(logits_btv.flatten(0, 1).float(), target_bt.flatten(), ignore_index=0, label_smoothing=smoothing)


class _Embedded(nn.Module):
    """What both have: the embedding with positions, and the same matrix for the output."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        settings, initial = work.spec.settings, work.initial
        pieces, width = initial["embedding.weight"].shape
        self.table = nn.Embedding(pieces, width)
        self.register_buffer("codes", torch.from_numpy(position_codes(LONGEST, width)))
        self.drop = nn.Dropout(settings.dropout_embedding)

    def embed(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return x_btd; padding has a position's code alone."""
        x_btd = self.table(tokens_bt) * (math.sqrt(self.table.embedding_dim) * (tokens_bt != 0)[..., None])
        return self.drop(x_btd + self.codes[: tokens_bt.shape[1]])

    def logits(self, x_btd: torch.Tensor) -> torch.Tensor:
        """Return logits_btv."""
        return functional.linear(x_btd, self.table.weight)


class _Attention(nn.Module):
    """Attention of one to another (crossed), or to itself, in one product for query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float, crossed: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.crossed = heads, dropout, crossed
        if crossed:
            self.query, self.key_value = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        else:
            self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def _split(self, x_btd: torch.Tensor) -> torch.Tensor:
        return x_btd.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(
        self, x_btd: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """Attend."""
        if memory is not None:
            query, (key, value) = self.query(x_btd), self.key_value(memory).chunk(2, 2)
        else:
            query, key, value = self.query_key_value(x_btd).chunk(3, 2)
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*map(self._split, (query, key, value)), mask, rate, causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """A layer of the encoder, or (crossed) of the decoder."""

    def __init__(self, work: Workload, crossed: bool) -> None:
        super().__init__()
        settings = work.spec.settings
        width, heads, dropout = settings.width, settings.heads, settings.dropout_attention
        self.self_attention_norm = nn.LayerNorm(width, EPSILON)
        self.self_attention = _Attention(width, heads, dropout, crossed=False)
        if crossed:
            self.cross_attention_norm = nn.LayerNorm(width, EPSILON)
            self.cross_attention = _Attention(width, heads, dropout, crossed=True)
        self.feed_forward_norm = nn.LayerNorm(width, EPSILON)
        self.feed_forward = nn.ModuleDict({"inner": nn.Linear(width, settings.inner), "output": nn.Linear(settings.inner, width)})
        self.residual_drop, self.relu_drop = nn.Dropout(settings.dropout_residual), nn.Dropout(settings.dropout_relu)

    def forward(self, x_btd: torch.Tensor, mask: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """`mask` says which of the source's positions may be attended to."""
        normal = self.self_attention_norm(x_btd)
        own = self.self_attention(normal, mask=mask) if memory is None else self.self_attention(normal, causal=True)
        x_btd = x_btd + self.residual_drop(own)
        if memory is not None:
            x_btd = x_btd + self.residual_drop(self.cross_attention(self.cross_attention_norm(x_btd), memory, mask))
        inner = self.relu_drop(functional.relu(self.feed_forward["inner"](self.feed_forward_norm(x_btd))))
        return x_btd + self.residual_drop(self.feed_forward["output"](inner))


class ByHand(_Embedded):
    """Attention by scaled_dot_product_attention."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        settings = work.spec.settings
        sides = {
            side: nn.ModuleList(_Layer(work, crossed=side == "decoder") for _ in range(settings.layers)) for side in ("encoder", "decoder")
        }
        self.sides = nn.ModuleDict(sides)
        self.norms = nn.ModuleDict({side: nn.LayerNorm(settings.width, EPSILON) for side in sides})
        names = {name: name.replace("embedding", "table") for name in work.initial if name.startswith("embedding")}
        for name in work.initial:
            side, _, rest = name.partition(".")
            if side in sides:
                names[name] = f"norms.{side}.{rest[5:]}" if rest.startswith("norm.") else f"sides.{name}"
        _load(self, {names[name]: values for name, values in work.initial.items()})

    def forward(self, source_bs: torch.Tensor, decoder_bt: torch.Tensor) -> torch.Tensor:
        """Return logits_btv."""
        return self.decoded(decoder_bt, *self.encoded(source_bs))

    def encoded(self, source_bs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the encoder's result, and which of its positions are a sentence's own."""
        mask, memory = (source_bs != 0)[:, None, None, :], self.embed(source_bs)
        for layer in self.sides["encoder"]:
            memory = layer(memory, mask)
        return self.norms["encoder"](memory), mask

    def decoded(self, decoder_bt: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, last: int = 0) -> torch.Tensor:
        """Return logits_btv of the `last` positions, or (0) of all."""
        x_btd = self.embed(decoder_bt)
        for layer in self.sides["decoder"]:
            x_btd = layer(x_btd, mask, memory)
        return self.logits(self.norms["decoder"](x_btd[:, -last:]))


class Modules(_Embedded):
    """torch's nn.Transformer."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        settings = work.spec.settings
        rates = {settings.dropout_residual, settings.dropout_relu, settings.dropout_attention}
        if len(rates) != 1:
            raise SystemExit("nn.Transformer has one rate of dropout for all places")
        self.transformer = nn.Transformer(
            settings.width,
            settings.heads,
            settings.layers,
            settings.layers,
            settings.inner,
            rates.pop(),
            batch_first=True,
            norm_first=True,
            layer_norm_eps=EPSILON,
        )
        initial = work.initial
        values = {"table.weight": initial["embedding.weight"]}
        for side in ("encoder", "decoder"):
            own, attentions = f"transformer.{side}", {"self_attn": "self_attention"}
            values |= {f"{own}.norm.{part}": initial[f"{side}.norm.{part}"] for part in ("weight", "bias")}
            norms = ["self_attention_norm", "feed_forward_norm"]
            if side == "decoder":
                attentions["multihead_attn"] = "cross_attention"
                norms.insert(1, "cross_attention_norm")
            for number in range(settings.layers):
                layer, mine = f"{own}.layers.{number}", f"{side}.{number}"
                for theirs, name in attentions.items():
                    parts = ("query_key_value",) if name == "self_attention" else ("query", "key_value")
                    values[f"{layer}.{theirs}.in_proj_weight"] = np.concatenate([initial[f"{mine}.{name}.{part}.weight"] for part in parts])
                    values[f"{layer}.{theirs}.out_proj.weight"] = initial[f"{mine}.{name}.output.weight"]
                for part in ("weight", "bias"):
                    values |= {f"{layer}.norm{place}.{part}": initial[f"{mine}.{norm}.{part}"] for place, norm in enumerate(norms, 1)}
                    values[f"{layer}.linear1.{part}"] = initial[f"{mine}.feed_forward.inner.{part}"]
                    values[f"{layer}.linear2.{part}"] = initial[f"{mine}.feed_forward.output.{part}"]
        for name, parameter in self.named_parameters():
            if name not in values:  # biases of attention
                assert name.endswith(("in_proj_bias", "out_proj.bias")), name
                parameter.requires_grad_(False).zero_()
        _load(self, values)

    def forward(self, source_bs: torch.Tensor, decoder_bt: torch.Tensor) -> torch.Tensor:
        """Return logits_btv."""
        padding = source_bs == 0
        time = decoder_bt.shape[1]
        later = torch.ones(time, time, dtype=torch.bool, device=source_bs.device).triu(1)
        result = self.transformer(
            self.embed(source_bs),
            self.embed(decoder_bt),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.logits(result)


def _load(model: nn.Module, values: Mapping[str, np.ndarray]) -> None:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained.keys() != values.keys():
        raise SystemExit(f"not the product's parameters: {sorted(trained.keys() ^ values.keys())}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(values[name]))


def build(work: Workload) -> nn.Module:
    """Return the model of the script's variant, with the initial weights."""
    return Modules(work) if work.variant == "modules" else ByHand(work)


def optimizer(model: nn.Module, work: Workload) -> torch.optim.Optimizer:
    """Return torch's fused Adam."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=work.learning_rate, betas=(0.9, work.beta2), eps=work.epsilon, fused=True)
