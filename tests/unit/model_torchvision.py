"""Run plain modules with our initial values; write logits and statistics to FILE (npz).

``python model_torchvision.py FILE``: torchvision's models, and the CNN as it is described: a convolution, ReLU, a pool, and so on.
"""

import sys
from collections import OrderedDict

import numpy as np
import torch
import torchvision
from model_cases import CASES
from torch import nn


def cnn(num_classes, channels, features):
    layers = {
        "conv1": nn.Conv2d(channels, 6, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5, padding=2),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(features, 64),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(64, num_classes),
    }
    return nn.Sequential(OrderedDict(layers))


def module_of(case):
    if case.model == "cnn":
        module = cnn(case.classes, case.shape[0], case.parameters["fc1.weight"].shape[1])
    else:
        module = getattr(torchvision.models, case.model)(num_classes=case.classes)
    state = {name: torch.from_numpy(value) for name, value in (case.parameters | case.buffers).items()}
    counters = {name: value for name, value in module.state_dict().items() if name.endswith("num_batches_tracked")}
    names = [name for name in module.state_dict() if name not in counters]
    assert {name: tuple(module.state_dict()[name].shape) for name in names} == {name: tuple(value.shape) for name, value in state.items()}
    assert [name for name, _ in module.named_parameters()] == list(case.parameters)
    module.load_state_dict(state | counters, strict=True)
    return module


def passes(case):
    module, x = module_of(case), torch.from_numpy(case.examples[0])
    with torch.no_grad():
        yield "evaluated", module.eval()(x)
        for layer in module.modules():
            layer.train(isinstance(layer, torch.nn.BatchNorm2d))
        yield "trained", module(x)
    yield from ((f"buffer/{name}", value) for name, value in module.state_dict().items() if name in case.buffers)


def spread(model):
    """Return the standard deviation of torchvision's initial values, by name."""
    torch.manual_seed(0)
    return {
        name: value.detach().std(unbiased=False)
        for name, value in getattr(torchvision.models, model)().named_parameters()
        if value.numel() > 500
    }


if __name__ == "__main__":
    results = {}
    for case in CASES:
        if case.plain:
            results |= {f"{case}/{key}": np.asarray(value) for key, value in passes(case)}
    for model in ("alexnet", "resnet18"):
        results |= {f"spread/{model}/{name}": np.asarray(value) for name, value in spread(model).items()}
    np.savez(sys.argv[1], **results)
