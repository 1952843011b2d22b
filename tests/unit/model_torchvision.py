"""``python model_torchvision.py FILE``: torchvision's models with our values; writes their logits and statistics to FILE (npz)."""

import sys

import numpy as np
import torch
import torchvision
from model_cases import CASES


def module_of(case):
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
    """Standard deviation of torchvision's own initial values, by name."""
    torch.manual_seed(0)
    return {
        name: value.detach().std(unbiased=False)
        for name, value in getattr(torchvision.models, model)().named_parameters()
        if value.numel() > 500
    }


if __name__ == "__main__":
    results = {}
    for case in CASES:
        if case.model != "cnn" and case.shape[0] == 3 and min(case.shape[1:]) >= (63 if case.model == "alexnet" else 1):
            results |= {f"{case}/{key}": np.asarray(value) for key, value in passes(case)}
    for model in ("alexnet", "resnet18"):
        results |= {f"spread/{model}/{name}": np.asarray(value) for name, value in spread(model).items()}
    np.savez(sys.argv[1], **results)
