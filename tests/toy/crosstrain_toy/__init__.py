"""A backend in numpy: synchronous and asynchronous training, evaluation and prediction."""

import numpy as np

from crosstrain.backends.arrays.backend import ArrayBackend
from crosstrain.backends.arrays.model import Gradients, Outputs, refuse_other_columns, refuse_own_losses
from crosstrain.backends.base import Availability
from crosstrain.backends.capabilities import Capabilities
from crosstrain.core.plugins import forward_plugin, load


class ToyModel:
    device_used = "cpu"

    def __init__(self, network):
        self.network = network  # the model's own module, with `forward` and `backward`

    def passed(self, parameters, batch):
        """Logits [n, classes], losses [n], and the gradients of these by the logits [n, classes]."""
        logits = self.network.forward(parameters, batch.inputs)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=1))
        rows = np.arange(len(batch))
        errors = np.exp(shifted - log_sum[:, None])
        errors[rows, batch.target] -= 1
        return logits, log_sum - shifted[rows, batch.target], errors

    def gradients(self, parameters, buffers, batch, weight):
        _, losses, errors = self.passed(parameters, batch)
        return Gradients(losses.sum() / weight, self.network.backward(parameters, batch.inputs, errors / weight))

    def outputs(self, parameters, buffers, batch):
        logits, losses, _ = self.passed(parameters, batch)
        return Outputs(logits, losses)


class ToyBackend(ArrayBackend):
    name = "toy"
    capabilities = Capabilities(
        modes=frozenset({"sync", "async"}),
        exchanges=frozenset({"native", "direct"}),
        augmentation=True,
        deterministic=True,
        accumulation=True,
        clipping=True,
        weight_averaging=True,
        rejoins=frozenset({"worker"}),
        packages={"numpy": ["numpy"]},
        install="pip install numpy",
    )

    def probe(self):
        return Availability(self.name, np.__version__, ("cpu",))

    def preload(self, job):
        pass  # numpy is all it needs

    def model(self, task, job, spec):
        refuse_other_columns(spec, self.name)
        refuse_own_losses(spec, self.name)
        return ToyModel(load(forward_plugin(job.model, self.name), "forward"))


BACKEND = ToyBackend()
