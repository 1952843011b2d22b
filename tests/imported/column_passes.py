"""Passes of imported models on columns: ``column_passes.py torch|tf FOLDER``.

Standard input has a dataset and a reference a line. Results go to FOLDER, one file for each line.
"""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np

from crosstrain.backends.vectors import GatheredSplit
from crosstrain.core.errors import UsageError
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.models.base import ForwardContext
from crosstrain.models.dropout_masks import keep_mask_of_shape
from crosstrain.models.imported import importing

ROWS = 6


def mask(layer, shape, rate):
    return keep_mask_of_shape(0, 1, layer, np.arange(ROWS, dtype=np.int32), shape, rate)


def batch(spec, data, rows):
    """Inputs and target of the last examples of the test split, none if `rows` is 0."""
    indices = np.arange(100 - rows, 100)
    return GatheredSplit(data, "test", inputs=spec.inputs, target=spec.target).take(indices)


def torch_passes(spec, data):
    import torch

    from crosstrain.models.imported.torch.forward import forward, own_losses

    def tensors(arrays):
        return {name: torch.from_numpy(value) for name, value in arrays.items()} if isinstance(arrays, dict) else torch.from_numpy(arrays)

    def dropped(x, rate, layer):
        return x * torch.from_numpy(mask(layer, x.shape, rate)).to(x.dtype) / (1 - rate)

    parameters = {name: torch.from_numpy(value).requires_grad_() for name, value in spec.initial(0).items()}
    buffers = {name: torch.from_numpy(value) for name, value in spec.initial_buffers(0).items()}

    def training(arrays):
        context = ForwardContext(True, buffers, settings=spec.settings, dropout=dropped)
        outputs = forward(parameters, tensors(arrays), context)
        return outputs, context

    x, y = batch(spec, data, ROWS)
    with torch.no_grad():
        evaluated = forward(parameters, tensors(x), ForwardContext(False, buffers, settings=spec.settings))
    trained, context = training(x)
    if spec.objective.loss == "cross_entropy":
        loss = torch.nn.functional.cross_entropy(trained, torch.from_numpy(y))
    else:
        loss = own_losses(trained, y, context).mean()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    empty, unchanged = training(batch(spec, data, 0)[0])
    assert len(empty) == 0
    zeros = torch.autograd.grad(empty.sum(), list(parameters.values()))
    assert not unchanged.updated
    assert all(not gradient.any() for gradient in zeros)
    updated = {name: value.numpy() for name, value in context.updated.items()}
    named = dict(zip(parameters, (value.numpy() for value in gradients), strict=True))
    return evaluated.numpy(), trained.detach().numpy(), named, updated


def tf_passes(spec, data):
    import tensorflow as tf

    from crosstrain.models.imported.tf.forward import forward, own_losses, storage_layouts
    from crosstrain.models.layers.tf import HeldParameters

    def tensors(arrays):
        return tf.nest.map_structure(lambda value: tf.constant(value if value.dtype.kind == "f" else value.astype(np.int32)), arrays)

    layouts = storage_layouts(spec)
    held = {name: tf.constant(layouts[name].to_storage(value) if name in layouts else value) for name, value in spec.initial(0).items()}
    buffers = {name: tf.constant(value) for name, value in spec.initial_buffers(0).items()}

    def dropped(x, rate, layer):
        kept = tf.numpy_function(lambda shape: mask(layer, shape.tolist(), rate), [tf.shape(x)], tf.bool)
        return tf.where(tf.ensure_shape(kept, x.shape), x / (1 - rate), 0.0)

    def opened(name, value):
        varying = f"{name}_lengths" in spec.settings.inputs
        return tf.TensorSpec([None, *([None] if varying else []), *value.shape[1 + varying :]], value.dtype)

    x, y = (tensors(part) for part in batch(spec, data, ROWS))
    named = x if isinstance(x, dict) else {spec.inputs[0]: x}
    signature = {name: opened(name, value) for name, value in named.items()}

    @tf.function(autograph=False, input_signature=[signature])
    def evaluate(x):
        return forward(HeldParameters(spec, layouts, held), x, ForwardContext(False, buffers, settings=spec.settings))

    @tf.function(autograph=False, input_signature=[signature, tf.TensorSpec([None], tf.int32)])
    def train(x, y):
        context = ForwardContext(True, buffers, settings=spec.settings, dropout=dropped)
        with tf.GradientTape() as tape:
            tape.watch(list(held.values()))
            outputs = forward(HeldParameters(spec, layouts, held), x, context)
            if spec.objective.loss == "cross_entropy":
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
            else:
                losses = own_losses(outputs, y, context)
            loss = tf.reduce_sum(losses) / tf.cast(tf.maximum(1, tf.size(losses)), tf.float32)
        return outputs, tape.gradient(loss, held, unconnected_gradients="zero"), context.updated

    target = y if tf.is_tensor(y) else tf.zeros([ROWS], tf.int32)
    trained, gradients, updated = train(named, target)
    empty_x = tensors(batch(spec, data, 0)[0])
    empty, zeros, unchanged = train(empty_x if isinstance(empty_x, dict) else {spec.inputs[0]: empty_x}, target[:0])
    assert empty.shape[0] == 0
    assert all(np.array_equal(value.numpy(), buffers[name].numpy()) for name, value in unchanged.items())
    assert all(not tf.convert_to_tensor(gradient).numpy().any() for gradient in zeros.values())
    stored = {name: tf.convert_to_tensor(value).numpy() for name, value in gradients.items()}
    canonical = {name: layouts[name].as_canonical(value) if name in layouts else value for name, value in stored.items()}
    return evaluate(named).numpy(), trained.numpy(), canonical, {name: value.numpy() for name, value in updated.items()}


def answer_here(request):
    """Describe a model in this process, which has torch already."""
    answer = import_module(f"crosstrain.models.imported.{request.framework}.process").answer
    Path(request.folder).mkdir(parents=True, exist_ok=True)
    if problem := answer(request):
        raise UsageError(problem)


def main(framework, folder):
    passes = {"torch": torch_passes, "tf": tf_passes}[framework]
    if framework == "torch":
        importing.ask = answer_here
    for number, line in enumerate(sys.stdin.read().splitlines()):
        name, reference = line.split()
        data = open_dataset(name)
        spec = importing.IMPORTER(reference, data.info)
        evaluated, trained, gradients, updated = passes(spec, data)
        arrays = {f"gradient {name}": value for name, value in gradients.items()}
        arrays |= {f"buffer {name}": value for name, value in updated.items()}
        np.savez(Path(folder, f"{framework}-{number}.npz"), evaluated=evaluated, trained=trained, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
