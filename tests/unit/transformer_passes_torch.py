"""``python transformer_passes_torch.py SEED FILE``: the cases with torch, to FILE (npz)."""

import sys

import numpy as np
import torch
from transformer_cases import CASES, DROPPED, EMPTY, MORE_PADDING, PLAIN, STEP, rates, result_formats

from crosstrain.backends.torch.model import Dropout
from crosstrain.data.text import BEGIN
from crosstrain.models.base import ForwardContext
from crosstrain.models.layers.torch import SequenceLayers
from crosstrain.models.transformer import decode_step, empty_cache, encode
from crosstrain.models.transformer.torch import example_sums, forward, translation_loss


def inputs_of(case, seed, padding=0):
    inputs = {name: torch.from_numpy(value.astype(np.int64)) for name, value in case.inputs(seed, padding).items()}
    return {name: torch.from_numpy(value).requires_grad_() for name, value in case.parameters(seed).items()}, inputs


def training(case):
    dropout = Dropout(case.job(), 0)
    dropout.set_step(STEP, case.indices)
    return ForwardContext(True, dropout=dropout, settings=case.spec.settings)


def passes(case, seed, padding=0):
    parameters, inputs = inputs_of(case, seed, padding)
    context = training(case)
    logits = forward(parameters, inputs, context)
    losses = translation_loss(logits, inputs, context)
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()))
    yield "trained", logits
    yield "losses", losses
    yield from ((f"gradient/{name}", gradient) for name, gradient in zip(parameters, gradients, strict=True))
    with torch.inference_mode():
        context = ForwardContext(False, settings=case.spec.settings)
        logits = forward(parameters, inputs, context)
        yield "evaluated", logits
        yield from ((f"sum/{name}", value) for name, value in example_sums(logits, inputs, context).items())


@torch.inference_mode()
def decoded(case, seed):
    """Return logits of the targets' positions, decoded stepwise."""
    parameters, inputs = inputs_of(case, seed)
    settings = case.spec.settings
    layers = SequenceLayers(parameters, ForwardContext(False, settings=settings))
    memory = encode(layers, inputs["source"], inputs["source_lengths"], settings)
    tokens, cache, logits_by_step = torch.full((case.batch,), BEGIN), empty_cache(memory), []
    for position in range(inputs["target"].shape[1]):
        logits, cache = decode_step(layers, tokens, position, memory, cache, settings)
        logits_by_step.append(logits)
        tokens = inputs["target"][:, position]
    return torch.stack(logits_by_step, 1)


def low(case, seed):
    parameters, inputs = inputs_of(case, seed)
    with torch.autocast("cpu", torch.bfloat16):
        return forward(parameters, inputs, ForwardContext(False, compute=torch.bfloat16, settings=case.spec.settings))


def formats(case, seed):
    parameters, inputs = inputs_of(case, seed)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        layers = SequenceLayers(parameters, ForwardContext(False, compute=torch.bfloat16, settings=case.spec.settings))
        x_btd = layers.embedding(inputs["source"], "embedding")
        results_by_layer = list(result_formats(layers, x_btd, inputs["source"], inputs["source_lengths"]))
    for name, value in results_by_layer:
        yield f"format/{name}", str(value.dtype).removeprefix("torch.")
        yield f"layer/{name}", value.float()


def dropped(seed):
    """Return means of ones after dropout, by mask and number of dimensions, one per rate."""
    for shared in (False, True):
        for dimensions, shape in DROPPED.items():
            dropout = Dropout(CASES[1].job(deterministic=shared), 0)
            dropout.set_step(STEP, np.arange(shape[0], dtype=np.int32))
            yield f"dropped/{shared}/{dimensions}", torch.stack([dropout(torch.ones(shape), rate, 0).mean() for rate in rates(seed)])


def gradients_in_float64(case, seed, padding):
    """Return gradients of the pass in float64; this process keeps float64 from then on."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # where a layer asks for float32
    parameters, inputs = inputs_of(case, seed, padding)
    parameters = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    context = training(case)
    loss = translation_loss(forward(parameters, inputs, context), inputs, context).sum()
    return zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)


if __name__ == "__main__":
    seed = int(sys.argv[1])
    results = {f"{case}/{key}": value for case in (*CASES, EMPTY) for key, value in passes(case, seed)}
    results |= {f"{case}/padded/{key}": value for case in CASES for key, value in passes(case, seed, MORE_PADDING)}
    results |= {f"{case}/decoded": decoded(case, seed) for case in CASES}
    results |= {f"{PLAIN}/low": low(PLAIN, seed)}
    results |= {**dict(dropped(seed)), **dict(formats(PLAIN, seed))}
    for case in CASES:
        for more, padding in (("", 0), ("padded/", MORE_PADDING)):
            gradients = gradients_in_float64(case, seed, padding)
            results |= {f"{case}/float64/{more}gradient/{name}": gradient for name, gradient in gradients}
    np.savez(sys.argv[2], **{key: value if isinstance(value, str) else value.detach().numpy() for key, value in results.items()})
