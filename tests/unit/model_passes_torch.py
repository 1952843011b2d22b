"""Run the cases with torch; write logits, gradients and new buffers to FILE (npz).

``python model_passes_torch.py FILE``
"""

import sys

import numpy as np
import torch
from model_cases import CASES, EMPTY, SINGLE, dropout_mask, thinned
from torch.nn.functional import cross_entropy

from crosstrain.core.plugins import forward_plugin, load
from crosstrain.models.base import ForwardContext


def dropout(x, rate, layer):
    return x * torch.from_numpy(dropout_mask(layer, len(x), x.shape[1], rate)) / (1 - rate)


def passes(case, compute=None):
    forward = load(forward_plugin(case.model, "torch"), "forward").forward
    parameters = {name: torch.from_numpy(value).requires_grad_() for name, value in case.parameters.items()}
    buffers = {name: torch.from_numpy(value) for name, value in case.buffers.items()}
    x, y = case.examples
    x = torch.from_numpy(x).to(memory_format=torch.channels_last)  # as a batch lies in memory
    y = torch.from_numpy(y.astype(np.int64))
    context = ForwardContext(training=True, buffers=buffers, compute=compute, dropout=dropout)
    with torch.autocast("cpu", dtype=compute, enabled=compute is not None):
        trained = forward(parameters, x, context)
    gradients = torch.autograd.grad(cross_entropy(trained, y, reduction="sum"), list(parameters.values()))
    with torch.no_grad():
        evaluated = forward(parameters, x, ForwardContext(training=False, buffers=buffers))
    unchanged = all(np.array_equal(buffers[name], value) for name, value in case.buffers.items())
    yield "trained", trained.detach()
    yield "evaluated", evaluated
    yield "unchanged", np.array(unchanged)
    yield from ((f"gradient/{name}", thinned(gradient)) for name, gradient in zip(parameters, gradients, strict=True))
    yield from ((f"buffer/{name}", value) for name, value in context.updated.items())


if __name__ == "__main__":
    torch.set_num_threads(2)
    results = {f"{case}/{key}": np.asarray(value) for case in CASES + EMPTY + SINGLE for key, value in passes(case)}
    low = next(value for key, value in passes(CASES[0], torch.bfloat16) if key == "trained")
    np.savez(sys.argv[1], **results, **{"bf16/trained": np.asarray(low)})
