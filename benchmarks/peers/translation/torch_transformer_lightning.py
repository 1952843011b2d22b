"""Lightning's Trainer around a Transformer written like JoeyNMT's and OpenNMT-py's.

All of Lightning's logging is off (`barebones`). As in theirs: separate products for queries, keys and values, an explicit softmax, a loss
against the matrix of smoothed labels (kl_div), and the number of right tokens of each batch. The loader gathers and pads sentence by
sentence.
"""

from __future__ import annotations

import logging
import math
import warnings

import lightning
import numpy as np
import torch
from text_batches import BEGIN, PADDING, indices_of, positions
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from workload import Timer, Workload, read_workload

EPSILON = 1e-6


class Attention(nn.Module):
    """Attention with several heads."""

    def __init__(self, width: int, heads: int, rate: float, *values: torch.Tensor) -> None:
        super().__init__()
        self.heads, self.size, self.drop = heads, width // heads, nn.Dropout(rate)
        self.query, self.key, self.value, self.output = (_linear(value) for value in values)

    def forward(self, query: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend from `query` to `memory` where `mask` is true."""
        batch = query.shape[0]

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(batch, -1, self.heads, self.size).transpose(1, 2)

        queries, keys, values = heads(self.query(query)), heads(self.key(memory)), heads(self.value(memory))
        scores = torch.matmul(queries / math.sqrt(self.size), keys.transpose(2, 3)).masked_fill(~mask, -1e9)
        mixed = torch.matmul(self.drop(torch.softmax(scores, dim=-1)).to(values.dtype), values)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, -1, self.heads * self.size))


class FeedForward(nn.Module):
    """The feed-forward layer, with the normalisation before it."""

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__()
        settings = work.spec.settings
        self.norm = nn.LayerNorm(settings.width, EPSILON)
        parts = [
            torch.from_numpy(work.initial[f"{name}.{part}"]) for part in ("inner.weight", "inner.bias", "output.weight", "output.bias")
        ]
        self.layers = nn.Sequential(_linear(*parts[:2]), nn.ReLU(), nn.Dropout(settings.dropout_relu), _linear(*parts[2:]))
        self.drop = nn.Dropout(settings.dropout_residual)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what it makes of each position."""
        return x + self.drop(self.layers(self.norm(x)))


class Layer(nn.Module):
    """A layer of the encoder or the decoder."""

    def __init__(self, work: Workload, name: str, *, decodes: bool) -> None:
        super().__init__()
        settings, weights = work.spec.settings, {key: torch.from_numpy(value) for key, value in work.initial.items()}
        sizes = (settings.width, settings.heads, settings.dropout_attention)
        query_key_value = weights[f"{name}.self_attention.query_key_value.weight"].chunk(3)
        self.norm = nn.LayerNorm(settings.width, EPSILON)
        self.attention = Attention(*sizes, *query_key_value, weights[f"{name}.self_attention.output.weight"])
        if decodes:
            crossed = [weights[f"{name}.cross_attention.{part}.weight"] for part in ("query", "key_value", "output")]
            self.cross_norm = nn.LayerNorm(settings.width, EPSILON)
            self.cross_attention = Attention(*sizes, crossed[0], *crossed[1].chunk(2), crossed[2])
        self.feed_forward = FeedForward(work, f"{name}.feed_forward")
        self.drop, self.decodes = nn.Dropout(settings.dropout_residual), decodes

    def forward(self, x: torch.Tensor, mask: torch.Tensor, memory: torch.Tensor | None, inside: torch.Tensor | None) -> torch.Tensor:
        """Return what follows x."""
        normed = self.norm(x)
        x = x + self.drop(self.attention(normed, normed, mask))
        if self.decodes:
            x = x + self.drop(self.cross_attention(self.cross_norm(x), memory, inside))
        return self.feed_forward(x)


class Translator(lightning.LightningModule):
    """The model as a user of Lightning writes it."""

    def __init__(self, work: Workload, timer: Timer) -> None:
        super().__init__()
        settings = work.spec.settings
        self.embedding = nn.Embedding.from_pretrained(torch.from_numpy(work.initial["embedding.weight"]), freeze=False)
        self.encoder = nn.ModuleList(Layer(work, f"encoder.{number}", decodes=False) for number in range(settings.layers))
        self.decoder = nn.ModuleList(Layer(work, f"decoder.{number}", decodes=True) for number in range(settings.layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(settings.width, EPSILON), nn.LayerNorm(settings.width, EPSILON)
        self.drop = nn.Dropout(settings.dropout_embedding)
        self.register_buffer("positions", torch.from_numpy(positions(work)))
        self.losses: list[float] = []
        self.right = 0
        self._smoothing, self._rule = settings.smoothing, {"lr": work.learning_rate, "betas": (0.9, work.beta2), "eps": work.epsilon}
        self._timer, self._work = timer, work

    def forward(self, source: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        inside = (source != PADDING)[:, None, None, :]
        causal = torch.ones(1, 1, shifted.shape[1], shifted.shape[1], dtype=torch.bool).tril()
        memory, x = self._embedded(source), self._embedded(shifted)
        for layer in self.encoder:
            memory = layer(memory, inside, None, None)
        memory = self.encoder_norm(memory)
        for layer in self.decoder:
            x = layer(x, causal, memory, inside)
        return nn.functional.linear(self.decoder_norm(x), self.embedding.weight)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drop(self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions[: tokens.shape[1]])

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch, and count."""
        source, shifted, target = batch
        log_shares = log_softmax(self(source, shifted).float(), dim=-1).flatten(0, 1)
        target, pieces = target.flatten(), log_shares.shape[1]
        inside = target != PADDING
        with torch.no_grad():
            labels = torch.full_like(log_shares, self._smoothing / pieces)
            labels.scatter_(1, target[:, None], 1.0 - self._smoothing + self._smoothing / pieces)
            labels.masked_fill_(~inside[:, None], 0.0)
            self.right += int((log_shares.argmax(-1)[inside] == target[inside]).sum())
        loss = kl_div(log_shares, labels, reduction="sum") / inside.sum()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), **self._rule)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        """Start the clock after the warm-up, and stop it after the last update."""
        if len(self.losses) == self._work.warmup:
            self._timer.begin()
        elif len(self.losses) == self._work.updates:
            self._timer.end()


class Sentences(Dataset):
    """Pairs of sentences, as tensors made when they are asked for."""

    def __init__(self, work: Workload) -> None:
        self._columns = [work.data.column("train", name) for name in ("source", "target")]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return source and target."""
        return tuple(torch.from_numpy(column.example(index).astype(np.int64)) for column in self._columns)


def collate(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Pad a batch: sources, targets moved to the right, targets."""
    source, target = (pad_sequence(list(side), batch_first=True, padding_value=PADDING) for side in zip(*pairs, strict=True))
    return source, nn.functional.pad(target, (1, 0), value=BEGIN)[:, :-1], target


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def entropy(work: Workload) -> float:
    """Return the cross entropy minus kl_div: the entropy of the smoothed labels, a constant."""
    pieces, smoothing = work.spec.logits_per_position, work.spec.settings.smoothing
    rest = smoothing / pieces
    target = 1.0 - smoothing + rest
    return -target * math.log(target) - (pieces - 1) * rest * math.log(rest)


def main() -> None:
    """Train in one process."""
    work, timer = read_workload(), Timer()
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.seed)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    indices = [batch.tolist() for batch in indices_of(work)]
    model, sentences = Translator(work, timer), Sentences(work)
    precision = "bf16-mixed" if work.precision == "bf16" else "32-true"
    loader = DataLoader(sentences, batch_sampler=indices, collate_fn=collate, num_workers=0)
    lightning.Trainer(accelerator="cpu", devices=1, precision=precision, barebones=True, max_epochs=1).fit(model, loader)
    lengths = work.data.column("train", "target").lengths
    tokens = sum(int(lengths[batch].sum()) for batch in indices[work.warmup :])
    timer.report_text(work, tokens, np.array(model.losses) + entropy(work))


main()
