"""Compute the cases of standard losses on one framework: ``loss_passes.py torch|tf FILE``."""

import sys

import numpy as np
from loss_cases import cases

from crosstrain.models.losses import TALLY, functions_on, objective_of_loss
from crosstrain.models.objectives import CROSS_ENTROPY


def torch_passes(case):
    import torch

    functions = functions_on("torch")
    outputs, target = torch.from_numpy(case.outputs).requires_grad_(), torch.from_numpy(case.target)
    if case.loss.name == CROSS_ENTROPY:
        losses = torch.nn.functional.cross_entropy(outputs, target, reduction="none")
    else:
        losses = getattr(functions, case.loss.name)(case.loss, outputs, target, None)
    (gradient,) = torch.autograd.grad(losses.sum(), [outputs])
    with torch.inference_mode():
        parts = [functions.example_sums(case.loss, outputs[begin:end], target[begin:end], None) for begin, end in case.slices]
    return losses.detach(), gradient, parts


def tf_passes(case):
    import tensorflow as tf

    functions = functions_on("tf")
    target = case.target.astype(np.int32) if case.target.dtype == np.int64 else case.target
    signature = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (case.outputs, target)]

    @tf.function(autograph=False, input_signature=signature)
    def computed(outputs, target):
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            if case.loss.name == CROSS_ENTROPY:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, outputs)
            else:
                losses = getattr(functions, case.loss.name)(case.loss, outputs, target, None)
        return losses, tape.gradient(losses, outputs), functions.example_sums(case.loss, outputs, target, None)

    results = [computed(case.outputs[begin:end], target[begin:end]) for begin, end in case.slices]
    return results[0][0], results[0][1], [parts for _, _, parts in results]


def summed(objective, losses, parts):
    """Return a batch's sums as backends add them up."""
    parts = {"loss_sum": losses, "examples": np.ones(len(losses)), **{name: part.numpy() for name, part in parts.items()}}
    return np.concatenate([[np.sum(parts[name], dtype=np.float64) for name in objective.summed], parts.get(TALLY, [])])


def main(framework, file):
    arrays = {}
    for number, case in enumerate(cases()):
        losses, gradient, parts = {"torch": torch_passes, "tf": tf_passes}[framework](case)
        losses, objective = losses.numpy(), objective_of_loss(case.loss)
        sums = [summed(objective, losses[begin:end], slice_parts) for (begin, end), slice_parts in zip(case.slices, parts, strict=True)]
        arrays |= {f"losses {number}": losses, f"gradient {number}": gradient.numpy(), f"sums {number}": np.array(sums)}
    np.savez(file, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
