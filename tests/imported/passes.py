"""Passes of imported models: ``passes.py torch|tf FOLDER``, on one framework.

Torch is first, and describes the models for both.
References are read from standard input, one a line. Results go to FOLDER; one JSON line is printed for each model.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

from crosstrain.core.errors import UsageError
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.models.base import ForwardContext
from crosstrain.models.dropout_masks import keep_mask_of_shape
from crosstrain.models.imported import description, importing

ROWS, SHAPE, CLASSES = 6, (3, 18, 18), 5
STEPS, RATE = 3, 0.05
SHIFTS, SHIFT = 2, 1e-6  # how often, and how far, torch's input and parameters are moved to see how its results move
DATA = DataInfo.of_images("drawn", {"train": 10, "test": 10}, ImageFeatures(SHAPE, CLASSES, (0.5,) * 3, (0.2,) * 3))
LABELS = np.arange(ROWS) % CLASSES


def images():
    return np.random.default_rng(0).standard_normal((ROWS, *SHAPE)).astype(np.float32)


def mask(step, layer, shape, rate):
    return keep_mask_of_shape(0, step, layer, np.arange(ROWS, dtype=np.int32), shape, rate)


class TorchPasses:
    """Passes of a spec on torch; also describes models, in this process."""

    def __init__(self, spec):
        import torch

        from crosstrain.models.imported.torch.forward import forward

        self.torch, self.forward, self.spec, self.step = torch, forward, spec, 0

    def dropped(self, x, rate, layer):
        return x * self.torch.from_numpy(mask(self.step, layer, x.shape, rate)).to(x.dtype) / (1 - rate)

    def evaluate(self, parameters, buffers, x):
        torch = self.torch
        state = {name: torch.from_numpy(value) for name, value in buffers.items()}
        with torch.no_grad():
            context = ForwardContext(False, state, settings=self.spec.settings)
            return self.forward({name: torch.from_numpy(value) for name, value in parameters.items()}, torch.from_numpy(x), context).numpy()

    def train(self, parameters, buffers, x, y):
        torch = self.torch
        state = {name: torch.from_numpy(value) for name, value in buffers.items()}
        leaves = {name: torch.from_numpy(value).requires_grad_() for name, value in parameters.items()}
        context = ForwardContext(True, state, settings=self.spec.settings, dropout=self.dropped)
        logits = self.forward(leaves, torch.from_numpy(x), context)
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)) if len(x) else logits.sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=not len(x))
        computed = {name: value.numpy() for name, value in zip(leaves, gradients, strict=True) if value is not None}
        return logits.detach().numpy(), loss.item(), computed, {name: value.detach().numpy() for name, value in context.updated.items()}


class TFPasses:
    """Passes of a spec on TensorFlow, in graphs as in a run."""

    def __init__(self, spec):
        import tensorflow as tf

        from crosstrain.models.imported.tf.forward import forward, storage_layouts
        from crosstrain.models.layers.tf import HeldParameters

        layouts = self.layouts = storage_layouts(spec)
        self.spec, self.step = spec, 0
        empty = spec.initial(0)
        held = {
            name: tf.TensorSpec((layouts[name].to_storage(value) if name in layouts else value).shape, tf.float32)
            for name, value in empty.items()
        }
        state = {buffer.name: tf.TensorSpec(buffer.shape, tf.float32) for buffer in spec.buffers}
        x, y = tf.TensorSpec([None, *SHAPE]), tf.TensorSpec([None], tf.int64)

        def dropped(x, rate, layer):
            kept = tf.numpy_function(lambda shape: mask(self.step, layer, shape.tolist(), rate), [tf.shape(x)], tf.bool)
            return tf.where(tf.ensure_shape(kept, x.shape), x / (1 - rate), 0.0)

        def evaluate(parameters, buffers, x):
            return forward(HeldParameters(spec, layouts, parameters), x, ForwardContext(False, buffers, settings=spec.settings))

        def train(parameters, buffers, x, y):
            context = ForwardContext(True, buffers, settings=spec.settings, dropout=dropped)
            with tf.GradientTape() as tape:
                tape.watch(list(parameters.values()))
                logits = forward(HeldParameters(spec, layouts, parameters), x, context)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            gradients = tape.gradient(loss, parameters, unconnected_gradients="zero")
            return logits, loss, {name: tf.convert_to_tensor(value) for name, value in gradients.items()}, dict(context.updated)

        self._evaluate = tf.function(evaluate, autograph=False).get_concrete_function(held, state, x)
        self._train = tf.function(train, autograph=False).get_concrete_function(held, state, x, y)
        self.tf = tf

    def _stored(self, parameters):
        return {
            name: self.tf.constant(self.layouts[name].to_storage(value) if name in self.layouts else value)
            for name, value in parameters.items()
        }

    def _tensors(self, values):
        return {name: self.tf.constant(value) for name, value in values.items()}

    def evaluate(self, parameters, buffers, x):
        return self._evaluate(self._stored(parameters), self._tensors(buffers), self.tf.constant(x)).numpy()

    def train(self, parameters, buffers, x, y):
        stored, state = self._stored(parameters), self._tensors(buffers)
        logits, loss, gradients, updated = self._train(stored, state, self.tf.constant(x), self.tf.constant(y))
        shapes = {parameter.name: parameter.shape for parameter in self.spec.parameters}
        canonical = {
            name: self.layouts[name].as_canonical(value.numpy()).reshape(shapes[name]) if name in self.layouts else value.numpy()
            for name, value in gradients.items()
        }
        return logits.numpy(), float(loss), canonical, {name: value.numpy() for name, value in updated.items()}


def trained(passes, parameters, buffers, x):
    """Logits and gradient of the first update, and losses and buffers of all."""
    losses, parameters, buffers = [], dict(parameters), dict(buffers)
    for passes.step in range(STEPS):
        logits, loss, gradients, updated = passes.train(parameters, buffers, x, LABELS)
        if passes.step == 0:
            first = {"trained": logits} | {f"gradient {name}": value for name, value in gradients.items()}
        losses.append(loss)
        parameters = {name: np.asarray(value - RATE * gradients[name], np.float32) for name, value in parameters.items()}
        buffers |= updated
    return first | {"losses": np.array(losses)} | {f"buffer {name}": value for name, value in buffers.items()}


def moved(values, random):
    """Move values by `SHIFT`, but not whole numbers, on which modules may decide."""
    by = {name: np.where(value == np.round(value), 0.0, SHIFT * random.standard_normal(value.shape)) for name, value in values.items()}
    return {name: np.asarray(value * (1 + by[name]), np.float32) for name, value in values.items()}


def shifts(passes, parameters, buffers, computed):
    """How far torch's results move, relative, at most."""
    from agreement import difference, flat

    apart = {"evaluated": 0.0, "trained": 0.0, "losses": 0.0, "gradient": 0.0}
    for seed in range(SHIFTS):
        random = np.random.default_rng(seed)
        x = moved({"x": images()}, random)["x"]
        changed = moved(parameters, random)
        arrays = {"evaluated": passes.evaluate(changed, buffers, x)} | trained(passes, changed, buffers, x)
        pairs = {name: (arrays[name], computed[name]) for name in ("evaluated", "trained", "losses")}
        pairs["gradient"] = flat(arrays), flat(computed)
        apart = {name: max(value, difference(*pairs[name])) for name, value in apart.items()}
    return {f"shift {name}": np.array(value) for name, value in apart.items()}


def computed(framework, reference):
    """The spec of a reference, and its arrays by name. Raises UsageError."""
    spec = importing.IMPORTER(reference, DATA)
    if problem := spec.problems.get(framework):
        raise UsageError(problem)
    passes = {"torch": TorchPasses, "tf": TFPasses}[framework](spec)
    parameters, buffers = spec.initial(0), spec.initial_buffers(0)
    arrays = {"evaluated": passes.evaluate(parameters, buffers, images())} | trained(passes, parameters, buffers, images())
    empty, _, _, unchanged = passes.train(parameters, buffers, np.zeros((0, *SHAPE), np.float32), LABELS[:0])
    assert empty.shape == (0, CLASSES), "an empty batch has a result"
    assert all(np.array_equal(value, buffers[name]) for name, value in unchanged.items()), "an empty batch changes buffers"
    if framework == "torch":
        arrays |= shifts(passes, parameters, buffers, arrays)
    return spec, arrays


def describe_here(request):
    """Describe a model in this process, where a run starts a process for each."""
    answer = import_module(f"crosstrain.models.imported.{request.framework}.process").answer
    Path(request.folder).mkdir(parents=True, exist_ok=True)
    if problem := answer(request):
        raise UsageError(problem)


def main(framework, folder):
    if framework == "torch":
        importing.ask = description.ask = describe_here
    sys.path.insert(0, str(Path(__file__).parents[1] / "imported_coverage"))
    for number, reference in enumerate(sys.stdin.read().split()):
        line = {"reference": reference, "problem": ""}
        try:
            spec, arrays = computed(framework, reference)
            np.savez(Path(folder, f"{framework}-{number}.npz"), **arrays)
            line |= {"parameters": spec.size, "dropouts": list(spec.settings.dropouts)}
        except Exception as error:  # noqa: BLE001 -- of any kind, to be reported with the others'
            line["problem"] = f"{type(error).__name__}: {error}"
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
