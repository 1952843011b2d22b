"""``python pairs_torch.py FILE``: results and gradients of the convolutions, by our layer and by torch's own, to FILE (npz)."""

import sys

import numpy as np
import torch
from pair_cases import PAIR_CASES

from crosstrain.models.base import ForwardContext
from crosstrain.models.layers import torch as layers


def computed(case, convolve):
    x_array, weight_array, bias_array, gradient = (torch.from_numpy(array) for array in case.arrays())
    x = x_array.to(memory_format=torch.channels_last).requires_grad_()
    weight = weight_array.requires_grad_()
    bias = bias_array.requires_grad_() if case.biased else None
    y = convolve(x, weight, bias)
    yield "y", y.detach()
    wanted = [one for one in (x, weight, bias) if one is not None]
    yield from zip(("x", "weight", "bias"), torch.autograd.grad(y, wanted, gradient), strict=False)


def ours(x, weight, bias):
    parameters = {"conv.weight": weight} | ({} if bias is None else {"conv.bias": bias})
    return layers.Layers(parameters, ForwardContext(training=True)).conv(x, "conv")


if __name__ == "__main__":
    in_pairs, taken = layers._conv_in_pairs, []
    layers._conv_in_pairs = lambda *arguments: taken.append(1) or in_pairs(*arguments)
    results = {}
    for name, case in PAIR_CASES.items():
        for whose, convolve in (("ours", ours), ("plain", torch.nn.functional.conv2d)):
            results |= {f"{name}/{whose}/{key}": np.asarray(value) for key, value in computed(case, convolve)}
    np.savez(sys.argv[1], taken=np.array(len(taken)), **results)
