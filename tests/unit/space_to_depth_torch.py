"""``python space_to_depth_torch.py FILE``: convolutions of our layer and torch, to a file."""

import sys

import torch
from space_to_depth_cases import save_all

from crosstrain.models.base import ForwardContext
from crosstrain.models.layers import torch as layers


def computed(case, convolve):
    x_array, weight_array, bias_array, gradient = (torch.from_numpy(array) for array in case.arrays())
    x = x_array.to(memory_format=torch.channels_last).requires_grad_()
    weight = weight_array.requires_grad_()
    bias = bias_array.requires_grad_() if case.biased else None
    y = convolve(x, weight, bias, case.padding)
    yield "y", y.detach()
    wanted = [operand for operand in (x, weight, bias) if operand is not None]
    yield from zip(("x", "weight", "bias"), torch.autograd.grad(y, wanted, gradient), strict=False)


def plain(x, weight, bias, padding):
    return torch.nn.functional.conv2d(x, weight, bias, padding=padding)


def ours(x, weight, bias, padding):
    parameters = {"conv.weight": weight} | ({} if bias is None else {"conv.bias": bias})
    return layers.Layers(parameters, ForwardContext(training=True)).conv(x, "conv", padding=padding)


if __name__ == "__main__":
    layers.PAIRS_FROM = 0  # the cases are small, and one is empty
    save_all(sys.argv[1], layers, computed, ours, plain)
