"""Modules drawn at random from building blocks of torch: ``blocks.py:drawn?seed=7`` is one.

Images [b, c, h, w] pass through some blocks, then rows [b, t, f], then features [b, f]. A block is a function of a generator and of its
input's sizes. torch alone.
"""

import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

MAX_CHANNELS, MAX_SIDE, MAX_ROWS, MAX_FEATURES = 24, 40, 24, 40
IMAGES, ROWS, FEATURES = {}, {}, {}  # blocks by name


def block(kind, smallest=1):
    """Register a block for images or rows of at least this size."""

    def register(make):
        kind[make.__name__.removeprefix("_")] = (make, smallest)
        return make

    return register


class Applied(nn.Module):
    """A function of the module and its input, with parameters, buffers and modules by name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def weights(*shape):
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


def scaled(function, size=1):
    """A function without parameters, with a trained scale before it."""
    return Applied(lambda self, x: function(x * self.scale), scale=nn.Parameter(torch.ones(size)))


def divisor(draw, number, largest=8):
    return draw.choice([part for part in range(1, min(number, largest) + 1) if number % part == 0])


# Images: convolutions


@block(IMAGES, 6)
def convolution(draw, c, h, w):
    return nn.Conv2d(
        c, draw.choice([4, 8, 12]), draw.choice([1, 2, 3, 5]), draw.choice([1, 2]), draw.choice([0, 1]), bias=draw.random() < 0.5
    )


@block(IMAGES, 6)
def grouped_convolution(draw, c, h, w):
    groups = divisor(draw, c)
    return nn.Conv2d(c, groups * draw.choice([1, 2, 3]), 3, draw.choice([1, 2]), 1, groups=groups)


@block(IMAGES, 6)
def depthwise_separable(draw, c, h, w):
    depthwise = nn.Conv2d(c, 2 * c, 3, draw.choice([1, 2, (2, 1)]), 1, groups=c)
    return nn.Sequential(depthwise, nn.GELU(), nn.Conv2d(2 * c, 8, 1))


@block(IMAGES, 9)
def dilated_convolution(draw, c, h, w):
    return nn.Conv2d(c, 8, 3, draw.choice([1, 2]), draw.choice([0, 2]), dilation=draw.choice([2, 3, (1, 2)]))


@block(IMAGES, 6)
def asymmetric_convolution(draw, c, h, w):
    return nn.Conv2d(c, 8, draw.choice([(1, 5), (3, 1), (2, 3)]), draw.choice([1, (1, 2), (2, 1)]), draw.choice([(0, 2), (1, 0), (2, 1)]))


@block(IMAGES, 6)
def same_convolution(draw, c, h, w):
    return nn.Conv2d(c, 8, draw.choice([2, 3, 4, (3, 2)]), padding="same", dilation=draw.choice([1, 2]))


@block(IMAGES, 6)
def padding_mode(draw, c, h, w):
    return nn.Conv2d(
        c, 8, 3, draw.choice([1, 2]), draw.choice([1, 2, (1, 2)]), padding_mode=draw.choice(["reflect", "replicate", "circular"])
    )


@block(IMAGES, 2)
def transposed_convolution(draw, c, h, w):
    stride = draw.choice([1, 2, 3])
    extra = draw.randrange(stride)
    return nn.ConvTranspose2d(
        c, 8, draw.choice([2, 3, 4]), stride, draw.choice([0, 1]), extra, dilation=draw.choice([1, 2]) if extra == 0 else 1
    )


@block(IMAGES, 2)
def grouped_transposed_convolution(draw, c, h, w):
    groups = divisor(draw, c)
    return nn.ConvTranspose2d(c, groups * 2, draw.choice([2, 3]), 2, draw.choice([0, 1]), groups=groups, bias=draw.random() < 0.5)


@block(IMAGES, 6)
def convolution_3d(draw, c, h, w):
    conv = nn.Conv3d(1, 2, (draw.choice([1, 2]) if c > 1 else 1, 3, 3), padding=(0, 1, 1), stride=(1, draw.choice([1, 2]), 1))
    return Applied(lambda self, x: self.conv(x.unsqueeze(1)).flatten(1, 2), conv=conv)


@block(IMAGES, 6)
def pooling_3d(draw, c, h, w):
    pool = draw.choice([nn.MaxPool3d((1, 2, 2)), nn.AvgPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)), nn.AdaptiveAvgPool3d((c, 4, 5))])
    return Applied(
        lambda self, x: self.pool(torch.stack([x, self.scale * x.sin()], 1)).mean(1), pool=pool, scale=nn.Parameter(torch.ones(c, 1, 1))
    )


@block(IMAGES, 2)
def transposed_convolution_3d(draw, c, h, w):
    conv = nn.ConvTranspose3d(1, 1, (1, 3, 3), (1, draw.choice([1, 2]), 1), (0, 1, 1))
    return Applied(lambda self, x: self.conv(x.unsqueeze(1)).squeeze(1), conv=conv)


@block(IMAGES, 6)
def frozen_convolution(draw, c, h, w):
    frozen = nn.Conv2d(c, 8, 3, padding=1).requires_grad_(False)
    return nn.Sequential(nn.Conv2d(c, c, 1), frozen, nn.Tanh())


@block(IMAGES, 6)
def tied_convolution(draw, c, h, w):
    first, second = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=2, dilation=2)
    second.weight = first.weight
    return nn.Sequential(first, nn.SiLU(), second)


@block(IMAGES, 6)
def weight_norm_convolution(draw, c, h, w):
    return parametrizations.weight_norm(nn.Conv2d(c, 8, 3), dim=draw.choice([0, None]))


@block(IMAGES, 6)
def spectral_norm_convolution(draw, c, h, w):
    return parametrizations.spectral_norm(nn.Conv2d(c, 8, 3))


@block(IMAGES, 6)
def standardised_convolution(draw, c, h, w):
    def standardised(self, x):
        weight = self.conv.weight
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, (weight - mean) * torch.rsqrt(variance + 1e-5), self.conv.bias, padding=1)

    return Applied(standardised, conv=nn.Conv2d(c, 8, 3))


@block(IMAGES, 6)
def fixed_filter(draw, c, h, w):
    kernel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    edges = Applied(lambda self, x: F.conv2d(x, self.kernel.expand(c, 1, 3, 3), padding=1, groups=c), kernel=kernel)
    return nn.Sequential(nn.Conv2d(c, c, 1), edges)


# Images: normalisation


@block(IMAGES)
def batch_norm(draw, c, h, w):
    affine, tracked = draw.random() < 0.7, draw.random() < 0.7
    return nn.Sequential(
        nn.Conv2d(c, c, 1), nn.BatchNorm2d(c, affine=affine, track_running_stats=tracked, momentum=draw.choice([0.1, 0.3]))
    )


@block(IMAGES)
def frozen_batch_norm(draw, c, h, w):
    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    return Frozen(c)


@block(IMAGES)
def group_norm(draw, c, h, w):
    return nn.Sequential(nn.GroupNorm(divisor(draw, c), c, affine=draw.random() < 0.7), nn.Conv2d(c, c, 1))


@block(IMAGES, 3)
def instance_norm(draw, c, h, w):
    return nn.Sequential(nn.Conv2d(c, c, 1), nn.InstanceNorm2d(c, affine=draw.random() < 0.5, track_running_stats=draw.random() < 0.4))


@block(IMAGES)
def local_response_norm(draw, c, h, w):
    return nn.Sequential(nn.Conv2d(c, c, 1), nn.LocalResponseNorm(draw.choice([2, 3, 5]), alpha=0.1, k=draw.choice([1.0, 2.0])))


@block(IMAGES)
def layer_norm_of_channels(draw, c, h, w):
    return Applied(lambda self, x: self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(c))


@block(IMAGES)
def rms_norm_of_images(draw, c, h, w):
    return nn.RMSNorm((c, h, w), eps=draw.choice([None, 1e-4]))


# Images: pooling


@block(IMAGES, 6)
def max_pool(draw, c, h, w):
    return nn.Sequential(
        nn.Conv2d(c, c, 1),
        nn.MaxPool2d(draw.choice([2, 3, (2, 3)]), draw.choice([None, 2]), draw.choice([0, 1]), ceil_mode=draw.random() < 0.5),
    )


@block(IMAGES, 8)
def dilated_max_pool(draw, c, h, w):
    return nn.Sequential(
        nn.Conv2d(c, c, 1),
        nn.MaxPool2d(3, draw.choice([1, 2]), draw.choice([0, 1]), draw.choice([2, (1, 2)]), ceil_mode=draw.random() < 0.5),
    )


@block(IMAGES, 6)
def average_pool(draw, c, h, w):
    override = draw.choice([None, None, 3])
    pool = nn.AvgPool2d(draw.choice([2, 3]), draw.choice([None, 2, (2, 1)]), 1, draw.random() < 0.5, draw.random() < 0.5, override)
    return nn.Sequential(nn.Conv2d(c, c, 1), pool)


@block(IMAGES, 6)
def adaptive_pool(draw, c, h, w):
    pool = draw.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
    return nn.Sequential(nn.Conv2d(c, c, 1), pool(draw.choice([4, 5, (3, 7), (None, 6)])))


@block(IMAGES, 6)
def lp_pool(draw, c, h, w):
    return nn.Sequential(
        nn.Conv2d(c, c, 1),
        nn.Sigmoid(),
        nn.LPPool2d(draw.choice([1, 2, 3]), draw.choice([2, 3]), draw.choice([None, 2]), ceil_mode=draw.random() < 0.3),
    )


@block(IMAGES, 6)
def unpooled(draw, c, h, w):
    def unpool(self, x):
        largest, places = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(largest.tanh(), places, 2, output_size=x.shape[2:])

    return Applied(unpool, conv=nn.Conv2d(c, c, 1))


@block(IMAGES)
def global_pools(draw, c, h, w):
    return Applied(
        lambda self, x: x * self.mix(torch.cat([x.mean((2, 3)), x.amax((2, 3)), x.amin(dim=[2, 3])], 1))[:, :, None, None],
        mix=nn.Linear(3 * c, c),
    )


# Images: sizes, places and channels


@block(IMAGES, 2)
def upsample(draw, c, h, w):
    mode = draw.choice(["nearest", "nearest-exact", "bilinear", "bicubic"])
    corners = draw.random() < 0.5 if mode in ("bilinear", "bicubic") else None
    size = {"scale_factor": draw.choice([2, 1.5, (2, 1)])} if draw.random() < 0.5 else {"size": (h + 3, 2 * w - 1)}
    return nn.Sequential(nn.Conv2d(c, min(c, 8), 1), nn.Upsample(mode=mode, align_corners=corners, **size))


@block(IMAGES, 8)
def downsample(draw, c, h, w):
    mode = draw.choice(["bilinear", "bicubic", "area"])
    smooth = {"antialias": True} if mode != "area" and draw.random() < 0.5 else {}
    return scaled(lambda x: F.interpolate(x, size=(h // 2, w - 3), mode=mode, **smooth), (c, 1, 1))


@block(IMAGES, 2)
def upsample_3d(draw, c, h, w):
    mode = draw.choice(["trilinear", "nearest"])
    return scaled(lambda x: F.interpolate(x.unsqueeze(2), scale_factor=(1, 2, 1), mode=mode).squeeze(2), (c, 1, 1))


@block(IMAGES)
def pixel_shuffle(draw, c, h, w):
    factor = draw.choice([2, 3])
    return nn.Sequential(nn.Conv2d(c, 2 * factor**2, 1), nn.PixelShuffle(factor))


@block(IMAGES, 4)
def pixel_unshuffle(draw, c, h, w):
    return nn.Sequential(nn.Conv2d(c, 3, 1), nn.AdaptiveAvgPool2d((h // 2 * 2, w // 2 * 2)), nn.PixelUnshuffle(2))


@block(IMAGES)
def channel_shuffle(draw, c, h, w):
    return nn.Sequential(nn.Conv2d(c, 6, 1), nn.ChannelShuffle(draw.choice([2, 3])))


@block(IMAGES, 4)
def padded(draw, c, h, w):
    pads = draw.choice([(1, 2, 0, 3), (2, 2, 2, 2), (0, 1, 1, 0)])
    layers = [
        nn.ReflectionPad2d(pads),
        nn.ReplicationPad2d(pads),
        nn.CircularPad2d(pads),
        nn.ZeroPad2d((-1, 2, 1, -1)),
        nn.ConstantPad2d(pads, 0.5),
    ]
    return nn.Sequential(nn.Conv2d(c, c, 1), draw.choice(layers))


@block(IMAGES, 6)
def unfolded(draw, c, h, w):
    def fold_again(self, x):
        columns = self.mix(F.unfold(x, 3, padding=1, stride=2).transpose(1, 2)).transpose(1, 2)
        return F.fold(columns, (h, w), 3, padding=1, stride=2)

    return Applied(fold_again, mix=nn.Linear(9 * c, 9 * 4))


@block(IMAGES, 4)
def patches(draw, c, h, w):
    side = draw.choice([2, 3])
    return Applied(lambda self, x: self.mix(x.unfold(2, side, side).unfold(3, side, side).flatten(4)).mean(-1), mix=nn.Linear(side**2, 4))


@block(IMAGES)
def moved_pixels(draw, c, h, w):
    move = draw.choice(
        [lambda x: x.roll((1, -2), (2, 3)), lambda x: x.flip(3), lambda x: x.rot90(1, (2, 3)), lambda x: x.mT, lambda x: x.roll(3)]
    )
    return Applied(
        lambda self, x: self.conv(x) + self.scale * move(x).mean((2, 3), keepdim=True), conv=nn.Conv2d(c, c, 1), scale=weights(c, 1, 1)
    )


@block(IMAGES)
def split_channels(draw, c, h, w):
    cut = draw.choice(["chunk", "split", "tensor_split", "unbind"])

    def joined(self, x):
        x = self.conv(x)
        if cut == "chunk":
            first, second, third = x.chunk(3, 1)
        elif cut == "split":
            first, second, third = x.split([2, 1, 3], 1)
        elif cut == "tensor_split":
            first, second, third = x.tensor_split([2, 4], dim=1)
        else:
            first, second, third = (x[:, 2 * place : 2 * place + 2] for place in range(3))
        return torch.cat([first.tanh(), second, third.sigmoid(), first.mean(1, keepdim=True)], 1)

    return Applied(joined, conv=nn.Conv2d(c, 6, 1))


@block(IMAGES)
def squeeze_excitation(draw, c, h, w):
    gates = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 4, 1), nn.SiLU(), nn.Conv2d(4, c, 1), draw.choice([nn.Sigmoid(), nn.Hardsigmoid()])
    )
    return Applied(lambda self, x: x * self.gates(x), gates=gates)


@block(IMAGES)
def coordinates(draw, c, h, w):
    def located(self, x):
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([rows, columns]).expand(x.shape[0], 2, h, w)
        return self.conv(torch.cat([x, grid], 1))

    return Applied(located, conv=nn.Conv2d(c + 2, 8, 1))


@block(IMAGES, 4)
def transformed(draw, c, h, w):
    def located(self, x):
        theta = self.identity + 0.1 * self.place(x.mean((2, 3))).tanh().view(-1, 2, 3)
        grid = F.affine_grid(theta, [x.shape[0], c, h, w], align_corners=False)
        return F.grid_sample(x, grid, mode="bilinear", padding_mode=draw_mode, align_corners=False)

    draw_mode = draw.choice(["zeros", "border"])
    return Applied(located, place=nn.Linear(c, 6), identity=torch.tensor([[1.0, 0, 0], [0, 1, 0]]))


@block(IMAGES)
def mixed_by_einsum(draw, c, h, w):
    equation, shape = draw.choice(
        [("bchw,cd->bdhw", (c, 8)), ("bchw,hk->bckw", (h, h)), ("b c h w, d c -> b d h w", (8, c)), ("...hw,wv->...hv", (w, w))]
    )
    return Applied(lambda self, x: torch.einsum(equation, x, self.matrix), matrix=weights(*shape))


@block(IMAGES, 4)
def assigned(draw, c, h, w):
    def changed(self, x):
        y = self.conv(x).clone()
        y[:, 0] = y[:, 1].tanh()
        y[:, :, 1:3] += 0.5
        y[:, 1:, ::2, 0] = self.value
        return y.mul_(0.9)

    return Applied(changed, conv=nn.Conv2d(c, 4, 1), value=nn.Parameter(torch.ones(())))


@block(IMAGES)
def dropped_channels(draw, c, h, w):
    kind = draw.choice([nn.Dropout2d, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout])
    return nn.Sequential(nn.Conv2d(c, c, 1), kind(draw.choice([0.1, 0.4])))


@block(IMAGES)
def stochastic_depth(draw, c, h, w):
    def kept(self, x):
        y = self.conv(x).tanh()
        if self.training:
            y = y * torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.7).div_(0.7)
        return x + y

    return Applied(kept, conv=nn.Conv2d(c, c, 3, padding=1))


@block(IMAGES)
def moving_mean(draw, c, h, w):
    def centred(self, x):
        x = self.conv(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return x - self.mean[:, None, None]

    return Applied(centred, conv=nn.Conv2d(c, c, 1), mean=torch.zeros(c))


@block(IMAGES)
def layer_scale(draw, c, h, w):
    branch = nn.Sequential(nn.Conv2d(c, c, 7, padding=3, groups=c), nn.Conv2d(c, c, 1))
    return Applied(lambda self, x: x + self.scale * self.branch(x), branch=branch, scale=nn.Parameter(torch.full((c, 1, 1), 0.1)))


@block(IMAGES)
def checkered(draw, c, h, w):
    def joined(self, x):
        mask = (torch.arange(h)[:, None] + torch.arange(w)) % 2 == 0
        return torch.where(mask, self.conv(x), x.masked_fill(~mask, 0.0).sin())

    return Applied(joined, conv=nn.Conv2d(c, c, 1))


ACTIVATIONS = {
    "celu": lambda: nn.CELU(0.7),
    "elu": lambda: nn.ELU(1.3),
    "gelu": lambda: nn.GELU(),
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "hardshrink": lambda: nn.Hardshrink(0.1),
    "hardsigmoid": lambda: nn.Hardsigmoid(),
    "hardswish": lambda: nn.Hardswish(),
    "hardtanh": lambda: nn.Hardtanh(-0.7, 1.2),
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "log_sigmoid": lambda: nn.LogSigmoid(),
    "log_softmax": lambda: nn.LogSoftmax(1),
    "mish": lambda: nn.Mish(),
    "prelu": lambda: nn.PReLU(),
    "relu": lambda: nn.ReLU(),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "selu": lambda: nn.SELU(),
    "sigmoid": lambda: nn.Sigmoid(),
    "silu": lambda: nn.SiLU(inplace=True),
    "softmax": lambda: nn.Softmax(1),
    "softmin": lambda: nn.Softmin(1),
    "softplus": lambda: nn.Softplus(2.0, 5.0),
    "softshrink": lambda: nn.Softshrink(0.2),
    "softsign": lambda: nn.Softsign(),
    "tanh": lambda: nn.Tanh(),
    "tanhshrink": lambda: nn.Tanhshrink(),
    "threshold": lambda: nn.Threshold(0.1, 0.05),
}


@block(IMAGES)
def activated_images(draw, c, h, w):
    layers = [*ACTIVATIONS.values(), lambda: nn.Softmax2d(), lambda: nn.PReLU(c)]
    return nn.Sequential(nn.Conv2d(c, c, 1), draw.choice(layers)())


@block(IMAGES)
def gated_channels(draw, c, h, w):
    return nn.Sequential(nn.Conv2d(c, 8, 1), nn.GLU(1))


# Rows


@block(ROWS)
def dense_rows(draw, t, f):
    return nn.Sequential(nn.Linear(f, 12, bias=draw.random() < 0.5), draw.choice(list(ACTIVATIONS.values()))(), nn.Linear(12, f))


@block(ROWS, 4)
def convolution_1d(draw, t, f):
    groups = divisor(draw, f)
    options = {"padding": draw.choice([0, 1, "same"]), "padding_mode": draw.choice(["zeros", "replicate", "circular", "reflect"])}
    conv = nn.Conv1d(f, groups * 4, draw.choice([2, 3]), dilation=1, groups=groups, **options)
    return Applied(lambda self, x: self.conv(x.transpose(1, 2)).transpose(1, 2), conv=conv)


@block(ROWS, 6)
def strided_convolution_1d(draw, t, f):
    conv = nn.Conv1d(f, 8, 3, draw.choice([1, 2]), draw.choice([0, 1]), draw.choice([1, 2]))
    return Applied(lambda self, x: self.conv(x.transpose(1, 2)).transpose(1, 2), conv=conv)


@block(ROWS)
def transposed_convolution_1d(draw, t, f):
    groups = divisor(draw, f, 4)
    conv = nn.ConvTranspose1d(f, groups * 2, 3, 2, 1, draw.choice([0, 1]), groups)
    return Applied(lambda self, x: self.conv(x.transpose(1, 2)).transpose(1, 2), conv=conv)


@block(ROWS, 4)
def pooling_1d(draw, t, f):
    pools = [nn.MaxPool1d(3, 2, 1, ceil_mode=True), nn.AvgPool1d(2, 2, 1, ceil_mode=True, count_include_pad=False), nn.AvgPool1d(3, 1)]
    pools += [nn.AdaptiveAvgPool1d(3), nn.AdaptiveMaxPool1d(3), nn.LPPool1d(2, 2), nn.MaxPool1d(2, 1, dilation=2)]
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: self.pool(x.mT.sigmoid()).mT, pool=draw.choice(pools)))


@block(ROWS)
def normalised_rows(draw, t, f):
    norms = [nn.BatchNorm1d(f), nn.InstanceNorm1d(f, affine=True), nn.GroupNorm(divisor(draw, f), f), nn.BatchNorm1d(f, affine=False)]
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: self.norm(x.permute(0, 2, 1)).permute(0, 2, 1), norm=draw.choice(norms)))


@block(ROWS)
def layer_norm(draw, t, f):
    return nn.Sequential(
        nn.Linear(f, f),
        draw.choice([nn.LayerNorm(f), nn.LayerNorm((t, f), elementwise_affine=False), nn.RMSNorm(f), nn.LayerNorm(f, bias=False)]),
    )


@block(ROWS, 2)
def self_attention(draw, t, f):
    heads = divisor(draw, f, 4)
    attention = nn.MultiheadAttention(
        f, heads, draw.choice([0.0, 0.2]), batch_first=True, add_bias_kv=draw.random() < 0.2, bias=draw.random() < 0.8
    )
    wanted, masked = draw.random() < 0.5, draw.random() < 0.5

    def attended(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(t) if masked else None
        y, shares = self.attention(x, x, x, need_weights=wanted, attn_mask=mask)
        return x + y if shares is None else x + y * shares.amax((1, 2))[:, None, None]

    return Applied(attended, attention=attention)


@block(ROWS, 2)
def cross_attention(draw, t, f):
    attention = nn.MultiheadAttention(f, 1, kdim=6, vdim=5, add_zero_attn=draw.random() < 0.3)

    def attended(self, x):
        x = x.transpose(0, 1)
        blank = torch.arange(t).expand(x.shape[1], t) > t // 2
        y, _ = self.attention(x, self.keys(x), self.values(x), key_padding_mask=blank)
        return (x + y).transpose(0, 1)

    return Applied(attended, attention=attention, keys=nn.Linear(f, 6), values=nn.Linear(f, 5))


@block(ROWS, 2)
def scaled_attention(draw, t, f):
    causal, rate, grouped, form = (
        draw.random() < 0.4,
        draw.choice([0.0, 0.0, 0.2]),
        draw.random() < 0.3,
        draw.choice(["none", "bool", "float"]),
    )

    def attended(self, x):
        q, k, v = self.project(x).view(-1, t, 6, 4).transpose(1, 2).split([4, 1, 1], 1)
        mask = None
        if not causal and form == "bool":
            mask = torch.ones(t, t, dtype=torch.bool).tril(1)
        elif not causal and form == "float":
            mask = self.bias
        if not grouped:
            k, v = k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1)
        options = {"enable_gqa": True} if grouped else {}
        y = F.scaled_dot_product_attention(q, k, v, mask, rate if self.training else 0.0, causal, scale=0.4, **options)
        y = y + 0.01 * self.bias.sum()
        return self.out(y.transpose(1, 2).flatten(2))

    return Applied(attended, project=nn.Linear(f, 24), out=nn.Linear(16, f), bias=nn.Parameter(torch.zeros(t, t)))


@block(ROWS, 2)
def encoder_layer(draw, t, f):
    layer = nn.TransformerEncoderLayer(
        f, divisor(draw, f, 4), 16, draw.choice([0.0, 0.1]), draw.choice(["relu", "gelu"]), batch_first=True, norm_first=draw.random() < 0.5
    )
    return layer if draw.random() < 0.5 else nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(f), enable_nested_tensor=False)


@block(ROWS, 2)
def decoder_layer(draw, t, f):
    layer = nn.TransformerDecoderLayer(f, 1, 12, 0.1, batch_first=draw.random() < 0.5)
    return Applied(lambda self, x: self.layer(x, self.memory(x).tanh()), layer=layer, memory=nn.Linear(f, f))


@block(ROWS)
def gru(draw, t, f):
    layer = nn.GRU(f, 6, draw.choice([1, 2]), bias=draw.random() < 0.7, batch_first=True, bidirectional=draw.random() < 0.5)
    return Applied(lambda self, x: self.layer(x)[0], layer=layer)


@block(ROWS)
def lstm(draw, t, f):
    layers = draw.choice([1, 2])
    layer = nn.LSTM(f, 6, layers, batch_first=True, dropout=0.2 if layers > 1 else 0.0, bidirectional=draw.random() < 0.5)

    def states(self, x):
        y, (hidden, cell) = self.layer(x)
        return y + hidden.mean() + cell[-1].mean(-1)[:, None, None]

    return Applied(states, layer=layer)


@block(ROWS)
def projected_lstm(draw, t, f):
    return Applied(lambda self, x: self.layer(x)[0], layer=nn.LSTM(f, 8, batch_first=True, proj_size=5))


@block(ROWS)
def elman(draw, t, f):
    layer = nn.RNN(f, 6, draw.choice([1, 2]), nonlinearity=draw.choice(["tanh", "relu"]), batch_first=True)
    return Applied(lambda self, x: self.layer(x, 0.1 * torch.ones(layer.num_layers, x.shape[0], 6))[0], layer=layer)


@block(ROWS)
def cells(draw, t, f):
    kind = draw.choice([nn.GRUCell, nn.LSTMCell, nn.RNNCell])

    def stepped(self, x):
        state, outputs = None, []
        for row in x.unbind(1):
            state = self.cell(row, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)

    return Applied(stepped, cell=kind(f, 6))


@block(ROWS, 2)
def cumulative(draw, t, f):
    functions = [
        lambda x: x.cumsum(1),
        lambda x: x.logcumsumexp(1),
        lambda x: (x.tanh() + 1.5).cumprod(2).log(),
        lambda x: x.cummax(1).values,
        lambda x: x.diff(dim=1),
    ]
    return scaled(draw.choice(functions), f)


@block(ROWS, 3)
def sorted_rows(draw, t, f):
    def gathered(self, x):
        order = x.sum(-1).argsort(1, descending=True)
        return x.gather(1, order[:, :, None].expand(-1, -1, f))

    functions = [
        lambda self, x: x.sort(1).values,
        lambda self, x: x.topk(2, dim=1).values,
        lambda self, x: x.topk(3, dim=1, largest=False)[0],
        lambda self, x: x.kthvalue(2, dim=1, keepdim=True).values + x,
        lambda self, x: x.median(1, keepdim=True).values * x,
        gathered,
    ]
    return nn.Sequential(nn.Linear(f, f), Applied(draw.choice(functions)))


@block(ROWS, 3)
def indexed_rows(draw, t, f):
    places = torch.tensor(draw.choices(range(t), k=t))
    functions = [
        lambda self, x: x.index_select(1, self.places),
        lambda self, x: x[:, self.places],
        lambda self, x: x[:, [0, 2, -1]],
        lambda self, x: x.index_add(1, self.places, x.tanh()),
        lambda self, x: torch.zeros_like(x).scatter_add(1, self.places[None, :, None].expand(x.shape[0], -1, f), x),
        lambda self, x: x.scatter(2, self.places[:1].clamp(max=f - 1)[None, :, None].expand(x.shape[0], t, 1), 0.5),
        lambda self, x: x[:, :, self.places[:2] % f, None].squeeze(-1),
        lambda self, x: x.take_along_dim(self.places[None, :, None], 1),
        lambda self, x: x[torch.arange(x.shape[0])[:, None], self.places],
    ]
    return nn.Sequential(nn.Linear(f, f), Applied(draw.choice(functions), places=places))


@block(ROWS)
def embedded_rows(draw, t, f):
    def looked_up(self, x):
        numbers = (x.detach().mean(-1) * 3).floor().long().remainder(7)
        return x + self.table(numbers)

    def bucketed(self, x):
        return x + self.table(torch.bucketize(x[:, :, 0].detach(), self.edges))

    def bagged(self, x):
        return x + self.bag((x.detach()[:, :3, 0] * 3).long().remainder(7))[:, None]

    options = {"padding_idx": draw.choice([None, 2])}
    bag = nn.EmbeddingBag(7, f, mode=draw.choice(["mean", "sum"]))
    make = draw.choice([looked_up, bucketed, bagged])
    return Applied(
        make, edges=torch.tensor([-1.0, -0.3, 0.2, 0.9]), **({"bag": bag} if make is bagged else {"table": nn.Embedding(7, f, **options)})
    )


@block(ROWS)
def products(draw, t, f):
    functions = [
        lambda self, x: x @ self.matrix,
        lambda self, x: torch.bmm(x, x.mT).softmax(-1) @ x,
        lambda self, x: torch.baddbmm(x, torch.eye(t).expand(x.shape[0], t, t), x @ self.matrix, beta=0.5),
        lambda self, x: torch.tensordot(x, self.matrix, dims=([2], [0])),
        lambda self, x: x + (x @ self.matrix[0])[:, :, None],
        lambda self, x: torch.einsum("btf,bsf,fg->btg", x, x.tanh(), self.matrix) / t,
        lambda self, x: torch.inner(x, self.matrix),
        lambda self, x: torch.addmm(self.matrix[0], x.flatten(0, 1), self.matrix).view_as(x),
        lambda self, x: torch.kron(torch.ones(1, 2), x[:, 0])[:, None] + x.repeat(1, 1, 2),
        lambda self, x: torch.linalg.multi_dot([self.matrix, self.matrix, self.matrix]).matmul(x.mT).mT,
    ]
    function = draw.choice(functions)
    return nn.Sequential(
        nn.Linear(f, f),
        Applied(lambda self, x: function(self, x) + self.matrix.mean(), matrix=weights(f, f)),
    )


@block(ROWS)
def mixture(draw, t, f):
    def soft(self, x):
        shares = self.gate(x).softmax(-1)
        return sum(shares[..., place, None] * expert(x) for place, expert in enumerate(self.experts))

    def best_two(self, x):
        values, places = self.gate(x).topk(2, -1)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, places, values.softmax(-1))
        return torch.einsum("bte,betf->btf", shares, torch.stack([expert(x) for expert in self.experts], 1))

    return Applied(draw.choice([soft, best_two]), gate=nn.Linear(f, 3), experts=nn.ModuleList(nn.Linear(f, f) for _ in range(3)))


@block(ROWS, 2)
def masked_rows(draw, t, f):
    def causal(self, x):
        scores = x @ self.matrix @ x.transpose(-2, -1) / math.sqrt(f)
        scores = scores.masked_fill(torch.triu(torch.ones(t, t), 1).bool(), float("-inf"))
        return scores.softmax(-1) @ x

    def rows_until(self, x):
        lengths = (x.detach().sum((1, 2)).abs() * 3).long() % t + 1
        mask = (torch.arange(t)[None] < lengths[:, None]).unsqueeze(-1)
        return x @ self.matrix * mask + (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    return Applied(draw.choice([causal, rows_until]), matrix=weights(f, f))


@block(ROWS)
def places(draw, t, f):
    def waves(self, x):
        angles = torch.arange(t).float()[:, None] * torch.exp(torch.arange(0, f, 2) * (-math.log(100.0) / f))
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :f]
        return x * self.scale + table

    def rotated(self, x):
        half = f // 2
        angles = torch.outer(torch.arange(t).float(), 1.0 / 50 ** (torch.arange(half) / half))
        first, second = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
        return torch.cat([turned, x[..., 2 * half :]], -1) * self.scale

    def turned_as_complex(self, x):
        half = f // 2
        angles = torch.outer(torch.arange(t).float(), 1.0 / 50 ** (torch.arange(half) / half))
        pairs = torch.view_as_complex(x[..., : 2 * half].reshape(*x.shape[:-1], half, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).repeat(1, 1, 2) * self.scale.mean()

    return Applied(draw.choice([waves, rotated, turned_as_complex] if f > 1 else [waves]), scale=nn.Parameter(torch.ones(f)))


@block(ROWS, 2)
def relative_places(draw, t, f):
    def biased(self, x):
        distance = torch.arange(t)[:, None] - torch.arange(t) + t - 1
        return (x @ x.mT / f + self.table[distance]).softmax(-1) @ x

    return Applied(biased, table=nn.Parameter(torch.randn(2 * t - 1)))


@block(ROWS, 2)
def fourier(draw, t, f):
    return scaled(lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real / math.sqrt(t * f), f)


@block(ROWS)
def compared(draw, t, f):
    functions = [
        lambda self, x: F.normalize(x, dim=-1),
        lambda self, x: F.cosine_similarity(x[:, :, None], x[:, None], dim=-1) @ x,
        lambda self, x: torch.cdist(x, self.centres.expand(x.shape[0], -1, -1)) @ self.centres,
        lambda self, x: F.pairwise_distance(x, self.centres[:1])[..., None] * x,
        lambda self, x: x / (1 + x.norm(dim=-1, keepdim=True)),
        lambda self, x: x * torch.linalg.vector_norm(x, 3, dim=(1, 2), keepdim=True),
    ]
    function = draw.choice(functions)
    return nn.Sequential(
        nn.Linear(f, f),
        Applied(lambda self, x: function(self, x) + 0 * self.centres.sum(), centres=weights(5, f)),
    )


@block(ROWS)
def shaped(draw, t, f):
    functions = [
        lambda x: x.repeat_interleave(2, dim=2),
        lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1).reshape(x.shape[0], t, 2 * f),
        lambda x: x.tile(1, 1, 2),
        lambda x: torch.stack([x, x.sin()], -1).flatten(-2),
        lambda x: torch.hstack([x, x.flip(1)]),
        lambda x: x.swapaxes(1, 2).swapaxes(-1, 1).narrow(2, 0, max(1, f - 1)),
        lambda x: torch.movedim(x, 2, 1).unflatten(1, (1, f)).squeeze(1).mT,
        lambda x: F.pad(x, (1, 0, 0, 2)),
        lambda x: torch.cat(torch.meshgrid(x[0, 0], torch.ones(2), indexing="xy"), 1).sum() + x,
        lambda x: x.view(x.shape[0], -1, 1).view(-1, t, f),
        lambda x: torch.broadcast_tensors(x, x[:, :1])[1] + x,
        lambda x: x.as_strided(x.shape, x.stride()) if not x.requires_grad else x.contiguous(),
        lambda x: torch.dstack([x[:, :, None], x[:, :, None].cos()]).flatten(2),
        lambda x: x.new_ones(x.shape[0], 1, f) + x + torch.full_like(x, 0.5) + x.new_tensor([0.5]),
    ]
    function = draw.choice(functions)
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: function(x)))


ELEMENTWISE = [
    lambda x: x.pow(3) * 0.1,
    lambda x: x.abs().pow(1.5),
    lambda x: (x.abs() + 0.1).log2(),
    lambda x: torch.log1p(x.abs()),
    lambda x: (x.abs() + 0.5).log10(),
    lambda x: torch.exp2(-x.square()),
    lambda x: torch.expm1(x.tanh()),
    lambda x: torch.erf(x) + torch.erfc(x.sin()),
    lambda x: torch.atan2(x, x.cos() + 2),
    lambda x: torch.sinh(x.tanh()) + torch.cosh(x.tanh()),
    lambda x: torch.asinh(x) + torch.atanh(x.tanh() * 0.9) + torch.acosh(x.square() + 1.5),
    lambda x: torch.asin(x.tanh() * 0.9) + torch.acos(x.tanh() * 0.9) + torch.atan(x),
    lambda x: torch.logaddexp(x, -x) + torch.logaddexp2(x, x.sin()),
    lambda x: torch.hypot(x, x + 1),
    lambda x: torch.xlogy(x.square(), x.square() + 1),
    lambda x: torch.lerp(x, x.sin(), 0.3),
    lambda x: torch.addcmul(x, x, x.tanh(), value=0.5),
    lambda x: torch.addcdiv(x, x, x.square() + 1, value=0.5),
    lambda x: torch.clamp(x, -0.8, 0.9) + x.clamp(min=x.new_tensor(-0.5)),
    lambda x: torch.maximum(x, x.mean(0)) - torch.minimum(x, torch.zeros(())),
    lambda x: x.fmod(0.7) + x.remainder(0.6) + torch.fmod(x, x.square() + 1),
    lambda x: x * (x > 0) + x * torch.logical_and(x > -1, x < 0.5) - x * (x != 0).float().neg(),
    lambda x: x.frac() + x.trunc() * x + x.round(decimals=1) * 0.1 + x.sign() * x,
    lambda x: torch.nan_to_num(x / x.abs().clamp_min(1e-3)) * x,
    lambda x: torch.sinc(x) + torch.special.expit(x) + torch.special.i0(x.tanh()),
    lambda x: torch.special.gammaln(x.abs() + 1) + torch.digamma(x.abs() + 1) + torch.special.erfcx(x.abs()),
    lambda x: torch.heaviside(x.detach(), x.new_ones(())) * x + x.copysign(x.cos()),
    lambda x: x.div(0.3, rounding_mode="floor") * x + torch.floor_divide(x, 0.4) * x,
    lambda x: x.rsqrt() if not x.is_floating_point() else (x.square() + 1).rsqrt() + (x.square() + 1).reciprocal(),
    lambda x: torch.rsub(x, 1.0, alpha=2) + torch.float_power(x.abs() + 0.1, 1.5).float(),
    lambda x: x.double().sin().float() + x.half().float() * 0.0 + x,
    lambda x: torch.logit(x.sigmoid(), eps=1e-3) + x.deg2rad(),
]


@block(ROWS)
def elementwise_rows(draw, t, f):
    function = draw.choice(ELEMENTWISE)
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: function(x)))


@block(ROWS)
def statistics(draw, t, f):
    functions = [
        lambda x: (x - x.mean((1, 2), keepdim=True)) / (x.std((1, 2), keepdim=True) + 0.1),
        lambda x: x / (x.var(1, correction=0, keepdim=True) + 0.1).sqrt(),
        lambda x: x - x.logsumexp(-1, keepdim=True),
        lambda x: x - x.max(1, keepdim=True).values + x.min(2, keepdim=True)[0],
        lambda x: x + (x.tanh() + 1.5).prod(-1, keepdim=True) / 10,
        lambda x: x * (x.argmax(-1, keepdim=True) == torch.arange(f)),
        lambda x: x + F.one_hot(x.argmin(-1), f),
        lambda x: x + torch.count_nonzero(x > 0, dim=1).unsqueeze(1) + (x > 0).any(1, keepdim=True) * x.all(1, keepdim=True),
        lambda x: x - x.nanmean(1, keepdim=True) + x.nansum(1, keepdim=True) / t,
        lambda x: x * x.aminmax(dim=1, keepdim=True).max,
        lambda x: torch.std_mean(x, 1, keepdim=True)[0] * x,
        lambda x: x + torch.trapezoid(x, dim=1).unsqueeze(1) / t,
        lambda x: x + x.quantile(0.3, dim=1, keepdim=True),
        lambda x: x - torch.linalg.norm(x.detach(), dim=-1, keepdim=True) * x.softmax(1).cumsum(1),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32) + F.softmax(x, 1),
    ]
    function = draw.choice(functions)
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: function(x)))


# Features


@block(FEATURES)
def dense(draw, f):
    return nn.Sequential(nn.Linear(f, draw.choice([8, 16])), draw.choice(list(ACTIVATIONS.values()))())


@block(FEATURES)
def bilinear(draw, f):
    return Applied(lambda self, x: self.product(x, x.tanh()), product=nn.Bilinear(f, f, 8, bias=draw.random() < 0.5))


@block(FEATURES)
def batch_norm_of_features(draw, f):
    return nn.Sequential(nn.Linear(f, f), nn.BatchNorm1d(f, eps=1e-3, affine=draw.random() < 0.6))


@block(FEATURES)
def dropout(draw, f):
    return nn.Sequential(nn.Linear(f, f), draw.choice([nn.Dropout(0.3), nn.Dropout(0.2, inplace=True), nn.AlphaDropout(0.2)]))


@block(FEATURES)
def maxout(draw, f):
    return Applied(lambda self, x: self.pieces(x).view(-1, 8, 3).max(-1).values, pieces=nn.Linear(f, 24))


@block(FEATURES)
def radial(draw, f):
    return Applied(lambda self, x: torch.exp(-torch.cdist(x, self.centres).square() / f), centres=weights(8, f))


@block(FEATURES)
def tied(draw, f):
    encode = nn.Linear(f, 6)
    return Applied(lambda self, x: F.linear(self.encode(x).tanh(), self.encode.weight.t()), encode=encode)


@block(FEATURES)
def weight_norm(draw, f):
    return nn.utils.weight_norm(nn.Linear(f, 8)) if draw.random() < 0.4 else parametrizations.weight_norm(nn.Linear(f, 8))


@block(FEATURES)
def spectral_norm(draw, f):
    return parametrizations.spectral_norm(nn.Linear(f, 8), n_power_iterations=draw.choice([1, 2]))


@block(FEATURES)
def orthogonal(draw, f):
    return parametrizations.orthogonal(nn.Linear(f, f, bias=False), orthogonal_map="householder" if draw.random() < 0.3 else "cayley")


@block(FEATURES)
def factorised(draw, f):
    def crossed(self, x):
        outer = torch.einsum("bi,bj->bij", self.first(x), self.second(x))
        return torch.cat([outer.flatten(1), outer.diagonal(dim1=1, dim2=2), outer.tril().sum(-1)], 1)

    return Applied(crossed, first=nn.Linear(f, 4), second=nn.Linear(f, 4))


@block(FEATURES)
def factorisation_machine(draw, f):
    return Applied(
        lambda self, x: x + ((x @ self.factors).square() - x.square() @ self.factors.square()).sum(1, keepdim=True) / 2,
        factors=weights(f, 4),
    )


@block(FEATURES)
def soft_bins(draw, f):
    return Applied(
        lambda self, x: (-(x.unsqueeze(-1) - self.edges).square() * 3).softmax(-1).matmul(self.values),
        edges=torch.linspace(-1, 1, 4),
        values=weights(4),
    )


@block(FEATURES)
def gated(draw, f):
    return (
        nn.Sequential(nn.Linear(f, 16), nn.GLU())
        if draw.random() < 0.5
        else Applied(lambda self, x: F.silu(self.up(x)) * self.gate(x), up=nn.Linear(f, 8), gate=nn.Linear(f, 8))
    )


@block(FEATURES)
def highway(draw, f):
    return Applied(lambda self, x: torch.lerp(x, self.new(x).relu(), self.gate(x).sigmoid()), new=nn.Linear(f, f), gate=nn.Linear(f, f))


@block(FEATURES)
def elementwise(draw, f):
    function = draw.choice(ELEMENTWISE)
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: function(x)))


@block(FEATURES)
def listed_parameters(draw, f):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = nn.ParameterList([weights(f, f) for _ in range(2)])
            self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.zeros(f))})

        def forward(self, x):
            for matrix in self.matrices:
                x = (x @ matrix + self.shifts["first"]).tanh()
            return x

    return Listed()


@block(FEATURES)
def centred_batch(draw, f):
    return nn.Sequential(nn.Linear(f, f), Applied(lambda self, x: x - x.mean(0) + x @ (x.t() @ x) / x.shape[0] / f))


def drawn(seed, channels, num_classes, image_size):
    """Return the module of a seed."""
    draw = random.Random(f"module {seed}")
    parts, x = [], torch.zeros(2, channels, image_size, image_size)

    def add(part):
        nonlocal x
        with torch.no_grad():
            x = part.eval()(x)
        parts.append(part)

    def add_block(kind):
        names = [name for name, (_, smallest) in kind.items() if min(x.shape[2:] or x.shape[1:2]) >= smallest]
        add(kind[draw.choice(names)][0](draw, *x.shape[1:]))

    add(nn.Conv2d(channels, 6, 3, padding=1))
    for _ in range(draw.randint(1, 3)):
        add_block(IMAGES)
        if x.shape[1] > MAX_CHANNELS or max(x.shape[2:]) > MAX_SIDE:
            add(nn.Sequential(nn.Conv2d(x.shape[1], 6, 1), nn.AdaptiveAvgPool2d(12)))
        add(nn.GroupNorm(1, x.shape[1]))
    add(Applied(lambda self, x: x.permute(0, 2, 3, 1).flatten(2)))
    add(nn.Linear(x.shape[2], 8))
    for _ in range(draw.randint(0, 3)):
        add_block(ROWS)
        if x.shape[1] > MAX_ROWS or x.shape[2] > MAX_FEATURES:
            add(Applied(lambda self, x: self.mix(x[:, :12]), mix=nn.Linear(x.shape[2], 8)))
        add(nn.LayerNorm(x.shape[2]))
    add(draw.choice([Applied(lambda self, x: x.mean(1)), Applied(lambda self, x: x[:, 0]), nn.Flatten()]))
    for _ in range(draw.randint(0, 2)):
        add_block(FEATURES)
    add(nn.Linear(x.shape[1], num_classes))
    return nn.Sequential(*parts).train()
