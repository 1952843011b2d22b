"""Modules that read columns, for tests of imported models; torch alone."""

import torch
from torch import nn
from torch.nn import functional as F


class TwoInputs(nn.Module):
    """Two named columns of a table; batch normalisation and dropout."""

    def __init__(self, num_classes, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(1, width), nn.Linear(1, width)
        self.norm, self.drop, self.head = nn.BatchNorm1d(width), nn.Dropout(0.25), nn.Linear(width, num_classes)

    def forward(self, y, x):
        return self.head(self.drop(self.norm(torch.tanh(self.first(x[:, None]) * self.second(y[:, None])))))


class Joined(nn.Module):
    """All numbers of a table side by side."""

    def __init__(self, in_features, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(in_features, 16), nn.ReLU(), nn.Linear(16, num_classes))

    def forward(self, features):
        return self.body(features)


class Recurrent(nn.Module):
    """An embedding and a GRU, read at each sequence's end."""

    def __init__(self, vocab_size, num_classes):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 12, padding_idx=0)
        self.gru = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, num_classes)

    def forward(self, tokens, lengths):
        states, _ = self.gru(self.embed(tokens))
        return self.head(states[torch.arange(tokens.shape[0]), lengths - 1])


class Attentive(nn.Module):
    """A Transformer with a mask of padding and positions."""

    def __init__(self, vocab_size, num_classes, longest=64):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab_size, 16), nn.Embedding(longest, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, num_classes)

    def forward(self, tokens, mask):
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.encoder(x, src_key_padding_mask=~mask)
        weights = mask[..., None].float()
        return self.head((x * weights).sum(1) / weights.sum(1))


class LossEach(Joined):
    """Its own loss per example, and logits, in a dictionary."""

    def forward(self, features):
        return {"logits": self.body(features)}

    def loss(self, columns):
        logits = self.body(torch.stack([columns["x"], columns["y"]], 1))
        return F.cross_entropy(logits, columns["ring"], reduction="none")


class LossMean(nn.Module):
    """An autoencoder of tokens: its forward returns two tensors, its loss is a mean."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(vocab_size, 8), nn.Dropout(0.2), nn.Linear(8, vocab_size)

    def forward(self, tokens, weights):
        code = (self.embed(tokens) * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        return self.head(self.drop(code)), code

    def loss(self, columns):
        tokens = columns["tokens"]
        weights = (torch.arange(tokens.shape[1]) < columns["tokens_lengths"][:, None]).float()
        logits, code = self(tokens, weights)
        losses = F.cross_entropy(logits[:, None].expand(-1, tokens.shape[1], -1).transpose(1, 2), tokens, reduction="none")
        return ((losses * weights).sum(1) / weights.sum(1)).mean() + 0.01 * code.square().sum(1).mean()


class Misnamed(Joined):
    def forward(self, x, z):
        return self.body(torch.stack([x, z], 1))


class Unnamed(Joined):
    def forward(self, left, right):
        return self.body(torch.stack([left, right], 1))


class Pair(Joined):
    def forward(self, features):
        return self.body(features), features


class WrongLoss(Joined):
    def loss(self, columns):
        return self.body(torch.stack([columns["x"], columns["y"]], 1))


class WholeLoss(Joined):
    def loss(self, columns):
        return columns["ring"]
