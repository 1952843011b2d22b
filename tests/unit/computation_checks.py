"""Checks for every worker `Computation`, with logistic regression on a few images."""

import numpy as np

from crosstrain.backends.arrays.model import Gradients, Outputs
from crosstrain.backends.base import make_sampler
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.data.columns import Column
from crosstrain.models.base import ModelSpec, ParameterSpec
from crosstrain.models.logreg import build

CASES = [{}, {"accumulate": 3, "batch_size": 3}, {"clip_norm": 0.05}, {"augment": "crop", "batch_size": 7}]


class Images:
    """40 training and 11 test images of 2 × 8 × 4 pixels in three classes."""

    def __init__(self):
        self.info = DataInfo.of_images("images", {"train": 40, "test": 11}, ImageFeatures((2, 8, 4), 3, (0.4, 0.6), (0.3, 0.2)))
        draw = np.random.default_rng(5)
        self._images = {split: draw.integers(0, 256, (size, 2, 8, 4), dtype=np.uint8) for split, size in self.info.sizes.items()}
        self._labels = {split: draw.integers(0, 3, size) for split, size in self.info.sizes.items()}

    def images(self, split):
        return self._images[split]

    def labels(self, split):
        return self._labels[split]

    def column(self, split, name):
        return Column({"image": self._images, "label": self._labels}[name][split])

    def inputs(self, split):
        return normalised(self.info, self._images[split]).astype(np.float32)


def normalised(info, images):
    mean, std = (np.array(values).reshape(2, 1, 1) for values in (info.mean, info.std))
    return (images / 255.0 - mean) / std


def passed(values, images, labels):
    """Return mean loss, its gradient as a flat vector, and the number correct, in float64."""
    x = images.reshape(len(images), -1).astype(np.float64)
    weight, bias = values[:-3].reshape(3, -1), values[-3:]
    logits = x @ weight.T + bias
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    errors = shares - np.eye(3)[labels]
    losses = -np.log(shares[np.arange(len(x)), labels])
    return losses.mean(), np.concatenate([(errors.T @ x).ravel(), errors.sum(0)]) / len(x), int((logits.argmax(1) == labels).sum())


def moved(image, change):
    """Move an image by (dy, dx) pixels and fill with zeros."""
    dy, dx, _ = change
    rows, columns = image.shape[1:]
    result = np.zeros_like(image)
    for row in range(rows):
        for column in range(columns):
            if 0 <= row - dy < rows and 0 <= column - dx < columns:
                result[:, row, column] = image[:, row - dy, column - dx]
    return result


def check(make, options):
    """Check the computation that `make(job, spec, data, sampler)` returns.

    `options` are the job's settings.
    """
    job, data = Job.model_validate({"mode": "async", "batch_size": 5, **options}), Images()
    spec, sampler = build(data.info), make_sampler(job, data)
    computation = make(job, spec, data, sampler)
    values, gradient = computation.values, computation.gradient
    assert values.dtype == gradient.dtype == np.float32
    assert values.shape == gradient.shape == (spec.size,)
    assert (computation.loss_scale, computation.precision_used, computation.device_used) == (None, "fp32", "cpu")
    batches, draw = sampler.whole(0, 0, 3), np.random.default_rng(1)
    updates = computation.gradients(batches, 17)
    for position in range(3):
        np.copyto(values, draw.normal(size=spec.size))  # each update uses new values
        loss, overflowed = next(updates)
        examples = slice(*batches.offsets[position : position + 2])
        indices = batches.indices[examples]
        images = data.images("train")[indices]
        if batches.changes is not None:
            images = np.stack([moved(*pair) for pair in zip(images, batches.changes[examples], strict=True)])
        expected_loss, expected, _ = passed(values.astype(np.float64), normalised(data.info, images), data.labels("train")[indices])
        if job.clip_norm:
            expected *= min(1.0, job.clip_norm / (np.linalg.norm(expected) + 1e-6))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())
        assert not overflowed
    assert next(updates, None) is None
    assert computation.values is values
    assert computation.gradient is gradient
    loss, _, correct = passed(values.astype(np.float64), normalised(data.info, data.images("test")[2:9]), data.labels("test")[2:9])
    np.testing.assert_allclose(computation.sums("test", 2, 9), [7 * loss, correct, 7], rtol=1e-5)


class Counting:
    """A model with one weight and a buffer that counts passes and examples.

    The gradient of the weight is the sum of a batch's labels.
    """

    device_used = "cpu"
    spec = ModelSpec("counting", (ParameterSpec("weight", (1,)),), (2, 8, 4), 3, buffers=(ParameterSpec("seen", (2,), constant=1.0),))

    def gradients(self, parameters, buffers, batch, weight):
        seen = buffers["seen"] + np.array([1, len(batch)], np.float32)
        return Gradients(len(batch) / weight, {"weight": [float(batch.target.sum())]}, {"seen": seen})

    def outputs(self, parameters, buffers, batch):
        logits = np.eye(3, dtype=np.float32)[batch.target] + buffers["seen"].sum()
        return Outputs(logits, np.full(len(batch), parameters["weight"][0]))
