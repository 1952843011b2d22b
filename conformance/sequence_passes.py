"""Passes of a sequence model on one backend, in a process of its own.

``python -m crosstrain.conformance.sequence_passes BACKEND MODEL DATA FILE`` writes an npz. Vectors of seed 0 are moved, so that each
matters. Arrays are [positions of all examples, …] for sequence targets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..backends.base import HasTensors, TensorFunctions
from ..backends.decoding_functions import DecodingFunctions
from ..backends.loading import load_backend
from ..core.plugins import forward_plugin, load
from ..core.process import python
from ..data.base import DataInfo, Dataset
from ..data.columns import LENGTHS, Column
from ..data.store.stored_dataset import open_dataset
from ..data.text import BEGIN
from ..models.base import Array, ForwardContext, ModelSpec
from ..models.build import build_model

PLAIN, PADDED, STEPWISE = "plain", "padded", "stepwise"  # the last only if the model translates
EXAMPLES = 8
MORE_PADDING = 7  # additional positions after the longest example
MOVED = 0.1  # standard deviation of noise on vectors, many of which start as zeros or ones
TIMEOUT_SECONDS = 600.0


def reads_sequences(spec: ModelSpec, info: DataInfo) -> bool:
    """Return whether a model has an input of varying length."""
    return any(info.column(name).varies for name in spec.inputs)


def sequence_passes(backend: str, model: str, data: str, file: Path) -> Mapping[str, Array]:
    """Compute the passes in a process, by name. Raises AssertionError with its output."""
    command = python("crosstrain.conformance.sequence_passes", backend, model, data, str(file))
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise AssertionError(f"passes of {model} on {backend} ended with {done.returncode}:\n{done.stderr}")
    with np.load(file) as arrays:
        return dict(arrays)


@dataclass(frozen=True)
class _Passes:
    spec: ModelSpec
    data: Dataset
    module: Any
    tensors: TensorFunctions
    parameters: Mapping[str, Any]
    context: ForwardContext[Any]
    count: int

    def examples(self, name: str) -> Column:
        """Return the first examples of a column."""
        return self.data.column("test", name).take(np.arange(self.count))

    def inputs(self, names: Sequence[str], padding: int) -> Any:
        """Return columns as forward inputs, with `padding` positions after the longest example."""
        inputs: dict[str, Any] = {}
        for name in names:
            examples = self.examples(name)
            if examples.offsets is None:
                inputs[name] = self.tensors.tensor(examples.values)
                continue
            values = examples.padded()
            values = np.pad(values, [(0, 0), (0, padding), *[(0, 0)] * (values.ndim - 2)])
            inputs |= {name: self.tensors.tensor(values), f"{name}{LENGTHS}": self.tensors.tensor(examples.lengths)}
        return inputs

    def without_padding(self, result: Array) -> Array:
        """Drop positions after an example's end, for results by target position."""
        if not self.data.info.column(self.spec.target).varies:
            return result
        positions: Array = result[np.arange(result.shape[1]) < self.examples(self.spec.target).lengths[:, None]]
        return positions

    def forward(self, padding: int) -> Array:
        result = self.module.forward(self.parameters, self.inputs(self.spec.inputs, padding), self.context)
        return self.without_padding(self.tensors.array(result))

    def stepwise(self, source: str, target: str) -> Array:
        """Return the logits of each target position, decoded piece by piece."""
        functions = DecodingFunctions.from_module(self.module)
        memory = functions.encode(self.parameters, self.inputs([source], 0), self.context)
        targets_bt = self.tensors.array(self.inputs([target], 0)[target])
        cache, tokens_b, logits = functions.empty_cache(memory), np.full(self.count, BEGIN), []
        for position in range(targets_bt.shape[1]):
            tokens = self.tensors.tensor(tokens_b)
            logits_bv, cache = functions.decode_step(self.parameters, tokens, position, memory, cache, self.context)
            logits.append(self.tensors.array(logits_bv))
            tokens_b = targets_bt[:, position]
        return self.without_padding(np.stack(logits, axis=1))


def _move_vectors(spec: ModelSpec) -> dict[str, Array]:
    draw = np.random.default_rng(0)
    return {
        name: (value + MOVED * draw.standard_normal(value.shape)).astype(np.float32) if value.ndim == 1 else value
        for name, value in spec.initial(0).items()
    }


def main(backend: str, model: str, data: str, file: str) -> None:
    """Compute the passes and write them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # a GPU's products may have less than float32's precision
    dataset = open_dataset(data)
    spec = build_model(model, dataset.info)
    tensors = cast(HasTensors, load_backend(backend)).tensor_functions()
    buffers = {name: tensors.tensor(value) for name, value in spec.initial_buffers().items()}
    passes = _Passes(
        spec,
        dataset,
        load(forward_plugin(model, backend), "forward"),
        tensors,
        {name: tensors.tensor(value) for name, value in _move_vectors(spec).items()},
        ForwardContext(training=False, buffers=buffers, settings=spec.settings),
        min(EXAMPLES, dataset.info.sizes["test"]),
    )
    results = {PLAIN: passes.forward(0), PADDED: passes.forward(MORE_PADDING)}
    if spec.objective.translation is not None:
        results[STEPWISE] = passes.stepwise(spec.objective.translation.source, spec.objective.translation.target)
    np.savez(file, **cast(dict[str, Any], results))


if __name__ == "__main__":
    main(*sys.argv[1:])
