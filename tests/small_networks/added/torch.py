"""The forward function on torch."""

from torch.nn.functional import linear


def forward(parameters, x_bchw, context):
    weight = parameters["first.weight"] + parameters["second.weight"] + parameters["flat"].view_as(parameters["first.weight"])
    return linear(x_bchw.flatten(1), weight, parameters["first.bias"] + parameters["second.bias"])
