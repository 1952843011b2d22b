"""A hand-written torch loop for the Transformer: batches in memory, fused Adam, autocast.

The variant `by hand` uses F.scaled_dot_product_attention, with one product for queries, keys and values; before its clock starts it also
tries an explicit softmax, and uses the faster one. The variant `nn.Transformer` is that of torch, whose attention has biases,
which stay zero: the mathematics is the same.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence

import torch
from text_batches import PADDING, TextBatch, positions, text_batches
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from workload import Timer, Workload, read_workload

TRIAL_STEPS = 2
EPSILON = 1e-6

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Sources, which of their positions are no padding, targets moved to the right, and targets."""


class Attention(nn.Module):
    """Multi-head attention; `parts` is the number of products merged for `inputs`."""

    def __init__(self, width: int, heads: int, rate: float, *, crossed: bool) -> None:
        super().__init__()
        self.fused, self.heads, self.rate = True, heads, rate
        sizes = (1, 2) if crossed else (3,)
        self.inputs = nn.ModuleList(nn.Linear(width, size * width, bias=False) for size in sizes)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
        """Attend from x to the memory, or to x itself."""
        sources = (x,) if memory is None else (x, memory)
        projected = (layer(of) for layer, of in zip(self.inputs, sources, strict=True))
        query, key, value = (part for of in projected for part in self._heads(of, x.shape[2]))
        rate = self.rate if self.training else 0.0
        if self.fused:
            mixed = scaled_dot_product_attention(query, key, value, mask, rate, is_causal=causal)
        else:
            scores = (query * query.shape[3] ** -0.5) @ key.transpose(2, 3)
            if causal:
                mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e9)
            shares = nn.functional.dropout(torch.softmax(scores, 3), rate)
            mixed = shares.to(value.dtype) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
        split = x.view(*x.shape[:2], x.shape[2] // width, self.heads, width // self.heads)
        return split.permute(2, 0, 3, 1, 4).unbind()


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder."""

    def __init__(self, work: Workload, *, decodes: bool) -> None:
        super().__init__()
        settings = work.spec.settings
        self.own_norm = nn.LayerNorm(settings.width, EPSILON)
        self.own = Attention(settings.width, settings.heads, settings.dropout_attention, crossed=False)
        if decodes:
            self.cross_norm = nn.LayerNorm(settings.width, EPSILON)
            self.cross = Attention(settings.width, settings.heads, settings.dropout_attention, crossed=True)
        self.inner_norm = nn.LayerNorm(settings.width, EPSILON)
        self.inner, self.outer = nn.Linear(settings.width, settings.inner), nn.Linear(settings.inner, settings.width)
        self.drop, self.drop_inner = nn.Dropout(settings.dropout_residual), nn.Dropout(settings.dropout_relu)
        self.decodes = decodes

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        """Return what follows x; `mask` has the source positions that may be attended to."""
        x = x + self.drop(self.own(self.own_norm(x), None, None if self.decodes else mask, causal=self.decodes))
        if self.decodes:
            x = x + self.drop(self.cross(self.cross_norm(x), memory, mask, causal=False))
        return x + self.drop(self.outer(self.drop_inner(torch.relu(self.inner(self.inner_norm(x))))))


class Stack(nn.Module):
    """Encoder or decoder."""

    def __init__(self, work: Workload, *, decodes: bool) -> None:
        super().__init__()
        settings = work.spec.settings
        self.layers = nn.ModuleList(Layer(work, decodes=decodes) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width, EPSILON)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x, memory, mask)
        return self.norm(x)


class Translator(nn.Module):
    """Embedding and output around an encoder and a decoder."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        settings = work.spec.settings
        self.embedding = nn.Embedding(work.spec.logits_per_position, settings.width)
        self.drop = nn.Dropout(settings.dropout_embedding)
        self.register_buffer("positions", torch.from_numpy(positions(work)))

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens with their positions."""
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return self.drop(x + self.positions[: tokens.shape[1]])

    def forward(self, source: torch.Tensor, inside: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        decoded = self.decoded(self.embedded(source), inside, self.embedded(shifted))
        return nn.functional.linear(decoded, self.embedding.weight)


class ByHand(Translator):
    """The variant `by hand`."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.encoder, self.decoder = Stack(work, decodes=False), Stack(work, decodes=True)
        with torch.no_grad():
            for parameter, values in zip(self.parameters(), work.initial.values(), strict=True):
                parameter.copy_(torch.from_numpy(values))

    def decoded(self, source: torch.Tensor, inside: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the decoder's result."""
        mask = inside[:, None, None, :]
        return self.decoder(target, self.encoder(source, None, mask), mask)

    def use(self, *, fused: bool) -> None:
        """Choose how to attend."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.fused = fused


class ByTorch(Translator):
    """The variant `nn.Transformer`."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        settings = work.spec.settings
        sizes = (settings.width, settings.heads, settings.layers, settings.layers, settings.inner)
        self.transformer = nn.Transformer(*sizes, settings.dropout_residual, batch_first=True, norm_first=True, layer_norm_eps=EPSILON)
        for name, parameter in self.transformer.named_parameters():
            if name.endswith(("in_proj_bias", "out_proj.bias")):
                nn.init.zeros_(parameter)
                parameter.requires_grad_(requires_grad=False)
        self._start(work)

    @torch.no_grad()
    def _start(self, work: Workload) -> None:
        """Load the initial weights.

        Where the product has two matrices torch has one: for query, and for key and value.
        """
        weights = {name: torch.from_numpy(values) for name, values in work.initial.items()}
        self.embedding.weight.copy_(weights["embedding.weight"])
        for side in (self.transformer.encoder, self.transformer.decoder):
            name = "encoder" if side is self.transformer.encoder else "decoder"
            for kind in ("weight", "bias"):
                getattr(side.norm, kind).copy_(weights[f"{name}.norm.{kind}"])
            for number, layer in enumerate(side.layers):
                of = f"{name}.{number}"
                layer.self_attn.in_proj_weight.copy_(weights[f"{of}.self_attention.query_key_value.weight"])
                layer.self_attn.out_proj.weight.copy_(weights[f"{of}.self_attention.output.weight"])
                if name == "decoder":
                    parts = [weights[f"{of}.cross_attention.{part}.weight"] for part in ("query", "key_value")]
                    layer.multihead_attn.in_proj_weight.copy_(torch.cat(parts))
                    layer.multihead_attn.out_proj.weight.copy_(weights[f"{of}.cross_attention.output.weight"])
                for kind in ("weight", "bias"):
                    getattr(layer.linear1, kind).copy_(weights[f"{of}.feed_forward.inner.{kind}"])
                    getattr(layer.linear2, kind).copy_(weights[f"{of}.feed_forward.output.{kind}"])

    def decoded(self, source: torch.Tensor, inside: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the decoder's result."""
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.transformer(
            source,
            target,
            tgt_mask=later,
            src_key_padding_mask=~inside,
            memory_key_padding_mask=~inside,
            tgt_is_causal=True,
        )


class Loop:
    """The loop, from the model's weights."""

    def __init__(self, work: Workload, model: Translator) -> None:
        self._model, self._bf16, self._smoothing = model, work.precision == "bf16", work.spec.settings.smoothing
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rule = {"lr": work.learning_rate, "betas": (0.9, work.beta2), "eps": work.epsilon}
        self._optimizer = torch.optim.Adam(trained, **rule, fused=True)

    def run(self, batches: Sequence[TextBatch]) -> list[torch.Tensor]:
        """Take a step for each batch; return the losses."""
        losses = []
        for batch in batches:
            source, inside, shifted, target = tensors_of(batch)
            self._optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
                logits = self._model(source, inside, shifted)
            total = cross_entropy(
                logits.float().flatten(0, 1),
                target.flatten(),
                ignore_index=PADDING,
                label_smoothing=self._smoothing,
                reduction="sum",
            )
            loss = total / batch.tokens
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        return losses


def tensors_of(batch: TextBatch) -> Tensors:
    """Return a batch as tensors, which share its memory where they can."""
    source = torch.from_numpy(batch.source)
    return source, source != PADDING, torch.from_numpy(batch.shifted), torch.from_numpy(batch.target)


def faster(work: Workload, model: ByHand, batches: Sequence[TextBatch]) -> bool:
    """Return whether the fused attention is faster here than an explicit softmax."""
    taken = {}
    for fused in (True, False):
        trial = copy.deepcopy(model)
        trial.use(fused=fused)
        loop = Loop(work, trial)
        loop.run(batches[:1])
        began = time.perf_counter()
        loop.run(batches[:TRIAL_STEPS])
        taken[fused] = time.perf_counter() - began
    return taken[True] <= taken[False]


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.seed)
    batches = text_batches(work)
    model: Translator
    if work.variant == "nn.Transformer":
        model = ByTorch(work)
    else:
        model = ByHand(work)
        model.use(fused=faster(work, model, batches))
    loop = Loop(work, model)
    losses = loop.run(batches[: work.warmup])
    timer.begin()
    losses += loop.run(batches[work.warmup :])
    timer.end()
    timer.report_text(work, sum(batch.tokens for batch in batches[work.warmup :]), torch.stack(losses).numpy())


if __name__ == "__main__":
    main()
