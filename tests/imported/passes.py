"""Passes of imported models: ``passes.py torch|tf FOLDER``, on one framework.

References are read from standard input, one a line. Results go to FOLDER; one JSON line is printed for each model.
"""

import json
import sys
from pathlib import Path

import numpy as np

from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.models.base import ForwardContext
from crosstrain.models.dropout_masks import keep_mask_of_shape
from crosstrain.models.imported.importing import IMPORTER

ROWS, SHAPE, CLASSES = 6, (3, 18, 18), 5
DATA = DataInfo.of_images("drawn", {"train": 10, "test": 10}, ImageFeatures(SHAPE, CLASSES, (0.5,) * 3, (0.2,) * 3))
LABELS = np.arange(ROWS) % CLASSES


def images():
    return np.random.default_rng(0).standard_normal((ROWS, *SHAPE)).astype(np.float32)


def mask(layer, shape, rate):
    return keep_mask_of_shape(0, 1, layer, np.arange(ROWS, dtype=np.int32), shape, rate)


def torch_passes(spec):
    import torch

    from crosstrain.models.imported.torch.forward import forward

    def dropped(x, rate, layer):
        return x * torch.from_numpy(mask(layer, x.shape, rate)).to(x.dtype) / (1 - rate)

    parameters = {name: torch.from_numpy(value).requires_grad_() for name, value in spec.initial(0).items()}
    buffers = {name: torch.from_numpy(value) for name, value in spec.initial_buffers(0).items()}
    with torch.no_grad():
        evaluated = forward(parameters, torch.from_numpy(images()), ForwardContext(False, buffers, settings=spec.settings))
    context = ForwardContext(True, buffers, settings=spec.settings, dropout=dropped)
    trained = forward(parameters, torch.from_numpy(images()), context)
    loss = torch.nn.functional.cross_entropy(trained, torch.from_numpy(LABELS))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    empty = forward(parameters, torch.zeros(0, *SHAPE), ForwardContext(True, buffers, settings=spec.settings, dropout=dropped))
    assert tuple(empty.shape) == (0, CLASSES)
    updated = {name: value.numpy() for name, value in context.updated.items()}
    return evaluated.numpy(), trained.detach().numpy(), dict(zip(parameters, (value.numpy() for value in gradients), strict=True)), updated


def tf_passes(spec):
    import tensorflow as tf

    from crosstrain.models.imported.tf.forward import forward, storage_layouts
    from crosstrain.models.layers.tf import HeldParameters

    layouts = storage_layouts(spec)
    held = {name: tf.constant(layouts[name].to_storage(value) if name in layouts else value) for name, value in spec.initial(0).items()}
    buffers = {name: tf.constant(value) for name, value in spec.initial_buffers(0).items()}

    def dropped(x, rate, layer):
        kept = tf.numpy_function(lambda shape: mask(layer, shape.tolist(), rate), [tf.shape(x)], tf.bool)
        return tf.where(tf.ensure_shape(kept, x.shape), x / (1 - rate), 0.0)

    signature = [tf.TensorSpec([None, *SHAPE])]

    @tf.function(autograph=False, input_signature=signature)
    def evaluate(x):
        return forward(HeldParameters(spec, layouts, held), x, ForwardContext(False, buffers, settings=spec.settings))

    @tf.function(autograph=False, input_signature=[*signature, tf.TensorSpec([None], tf.int32)])
    def train(x, y):
        context = ForwardContext(True, buffers, settings=spec.settings, dropout=dropped)
        with tf.GradientTape() as tape:
            tape.watch(list(held.values()))
            logits = forward(HeldParameters(spec, layouts, held), x, context)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return logits, tape.gradient(loss, held, unconnected_gradients="zero"), context.updated

    x = tf.constant(images())
    trained, gradients, updated = train(x, tf.constant(LABELS, tf.int32))
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    canonical = {
        name: layouts[name].as_canonical(tf.convert_to_tensor(value).numpy()).reshape(shapes[name])
        if name in layouts
        else tf.convert_to_tensor(value).numpy()
        for name, value in gradients.items()
    }
    empty, _, unchanged = train(tf.zeros([0, *SHAPE]), tf.zeros([0], tf.int32))
    assert tuple(empty.shape) == (0, CLASSES)
    assert all(np.array_equal(value.numpy(), buffers[name].numpy()) for name, value in unchanged.items())
    return evaluate(x).numpy(), trained.numpy(), canonical, {name: value.numpy() for name, value in updated.items()}


def main(framework, folder):
    passes = {"torch": torch_passes, "tf": tf_passes}[framework]
    for number, reference in enumerate(sys.stdin.read().split()):
        spec = IMPORTER(reference, DATA)
        evaluated, trained, gradients, updated = passes(spec)
        path = Path(folder, f"{framework}-{number}.npz")
        arrays = {f"gradient {name}": value for name, value in gradients.items()} | {
            f"buffer {name}": value for name, value in updated.items()
        }
        np.savez(path, evaluated=evaluated, trained=trained, **arrays)
        print(json.dumps({"reference": reference, "parameters": spec.size, "dropouts": list(spec.settings.dropouts)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
