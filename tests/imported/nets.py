"""Modules of many kinds for tests of imported models; torch alone."""

import random

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F


class Recurrent(nn.Module):
    """Rows of an image through a GRU and an LSTM, and one linear layer under two names."""

    def __init__(self, image_size, channels, num_classes):
        super().__init__()
        self.gru = nn.GRU(channels * image_size, 12, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(24, 16, num_layers=2)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        batch, channels, height, width = x.shape
        rows, _ = self.gru(x.permute(0, 2, 1, 3).reshape(batch, height, channels * width))
        states, _ = self.lstm(rows.transpose(0, 1))
        return self.head(self.second(torch.tanh(self.first(states[-1]))))


class Attentive(nn.Module):
    """Rows of an image through Transformer layers with dropout everywhere, time first."""

    def __init__(self, image_size, channels, num_classes):
        super().__init__()
        self.embed = nn.Linear(channels * image_size, 16)
        self.places = nn.Parameter(torch.randn(image_size, 1, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        rows = x.permute(2, 0, 1, 3).flatten(2)
        return self.head(self.encoder(self.embed(rows) + self.places).mean(0))


class Convolutional(nn.Module):
    """Convolutions, poolings and norms of many kinds, and random depth."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.depthwise = nn.Conv2d(8, 16, 3, padding="same", groups=8)
        self.grouped = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=2, bias=False)
        self.norm = nn.Sequential(nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, track_running_stats=True, momentum=0.3))
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)
        self.frozen = nn.Conv2d(8, 8, 1)
        self.frozen.requires_grad_(False)
        self.drop = nn.Dropout2d(0.2)
        self.head = nn.Linear(8 * 9, num_classes)

    def forward(self, x):
        x = self.stem(x)
        x = F.silu(self.norm(self.grouped(F.elu(self.depthwise(x)))))
        x = F.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)
        x = self.up(x)
        if self.training:
            kept = torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.8)
            x = x * kept / 0.8
        x = F.max_pool2d(self.drop(self.frozen(x)), 3, stride=2, padding=1, ceil_mode=True)
        return self.head(F.adaptive_avg_pool2d(x, 3).flatten(1))


class Quantised(nn.Module):
    """A moving codebook with straight-through gradients, parts of which have no gradient."""

    def __init__(self, channels, num_classes, codes=30):
        super().__init__()
        self.embed = nn.Conv2d(channels, 6, 3, stride=2)
        self.register_buffer("codes", torch.randn(codes, 6))
        self.head = nn.Linear(6, num_classes)

    @torch.no_grad()
    def nearest(self, rows):
        places = torch.cdist(rows, self.codes).argmin(1)
        if self.training:
            self.codes.lerp_(rows.mean(0).expand_as(self.codes), 0.01)
        return self.codes[places]

    def forward(self, x):
        rows = self.embed(x).mean((2, 3))
        codes = self.nearest(rows)
        with torch.no_grad():
            scale = rows.square().mean() + 0.5
        return self.head((rows + (codes - rows).detach()).roll(7) / scale + torch.where(rows > 9, float("nan"), rows) * codes)


class Branching(nn.Module):
    """Cannot be exported: a branch depends on values."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.LazyLinear(num_classes) if channels == 0 else nn.Linear(channels, num_classes)

    def forward(self, x):
        means = x.mean((2, 3))
        return self.head(means if means.sum() > 0 else -means)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, slopes):
        return slopes


class Rounding(nn.Module):
    """Cannot be exported: it has a backward of its own."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(Rounded.apply(x).mean((2, 3)))


class FixedBatch(nn.Module):
    """Cannot be exported: ``len`` makes the batch size a number."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3))) + torch.zeros(len(x), 1)


class Eigen(nn.Module):
    """Has an operation that TensorFlow has no form of."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        means = x.mean((2, 3))
        return self.head(means * torch.linalg.eigh(means.detach().T @ means.detach())[0])


class Noisy(nn.Module):
    """Draws random numbers that a run cannot repeat."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3)) + torch.randn_like(x[:, :, 0, 0]))


class Averaged(nn.Module):
    """Has a mean of all batches, whose count is a whole number."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, momentum=None)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(self.norm(x).mean((2, 3)))


class Counting(nn.Module):
    """Counts its steps in a whole number."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.head(x.mean((2, 3)))


class Head(nn.Module):
    """A linear layer on an image's means."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3)))


class Stepping(Head):
    def __init__(self, channels, num_classes):
        super().__init__(channels, num_classes)
        self.register_buffer("step", torch.tensor(0), persistent=False)

    def forward(self, x):
        self.step += 1
        return super().forward(x) * (self.step > 4)


class Listed(Head):
    def __init__(self, channels, num_classes):
        super().__init__(channels, num_classes)
        self.weights = [self.head.weight]

    def forward(self, x):
        return F.linear(x.mean((2, 3)), self.weights[0], self.head.bias)


class Hooked(Head):
    def __init__(self, channels, num_classes):
        super().__init__(channels, num_classes)
        self.head.weight.register_hook(lambda slopes: slopes * 0)


class Sharing(Head):
    def __init__(self, channels, num_classes):
        super().__init__(channels, num_classes)
        self.other = nn.Linear(channels, num_classes)
        self.other.weight.data = self.head.weight.data

    def forward(self, x):
        return super().forward(x) + self.other(x.amax((2, 3)))


class Wide(Head):
    def __init__(self, channels, num_classes):
        super().__init__(channels, num_classes)
        self.register_buffer("shift", torch.zeros(num_classes, dtype=torch.float64))


class Chance(Head):
    def forward(self, x):
        return super().forward(x) * random.choice([1.0, 2.0])


class Rebuilt(Head):
    """Its constructor draws from a generator that no seed decides."""

    def __init__(self, channels, num_classes):
        super().__init__(channels, num_classes)
        self.shift = torch.tensor(np.random.default_rng().standard_normal(num_classes).astype(np.float32))

    def forward(self, x):
        return super().forward(x) + self.shift


class Dropping(Head):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5))


class AloneOrNot(Head):
    def forward(self, x):
        return super().forward(x if x.shape[0] > 1 else 5 * x)


class Probable(Head):
    def forward(self, x):
        return super().forward(x).softmax(1)


class InPlace(Head):
    """Works in place, with a random constant, a buffer of all passes, and checkpointed dropout."""

    def __init__(self, channels, num_classes):
        super().__init__(channels, 8)
        self.last = nn.Linear(8, num_classes)
        self.constant = torch.from_numpy(np.random.standard_normal((8, 8)).astype(np.float32))
        self.register_buffer("mean", torch.zeros(8))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        y = super().forward(x.mul_(0.5).add_(0.1)) @ self.constant
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        dropped = torch.utils.checkpoint.checkpoint(lambda y: self.drop(y).tanh(), y, use_reentrant=False) if self.training else y.tanh()
        return self.last(dropped - self.mean)


class Stateless(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


class Unused(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)
        self.spare = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3)))


class NotFinite(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)
        nn.init.constant_(self.head.bias, float("nan"))

    def forward(self, x):
        return self.head(x.mean((2, 3)))


class Demanding(nn.Module):
    def __init__(self, channels, num_classes, depth, rate=0.5):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3)))


class OnlyColours(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, num_classes, 3)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


class Images(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)

    def forward(self, x):
        return self.conv(x)


TABLE = {"not": "a model"}


def broken(channels):
    raise ValueError("no such width")


def a_list():
    return [nn.Linear(1, 1)]
