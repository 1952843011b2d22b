"""Pytest suite for backends: each layer by itself against float64, forward and backward.

Subclass `LayerConformance` in a pytest module.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from ..backends.base import State
from ..core.job import Job
from ..engine.protocol.state_transfer import state_to_arrays
from ..launch.driver.training_job import TrainingJob
from ..lockstep.arrays import read
from ..lockstep.layers import EXAMPLES, LayerTape
from ..models.imported.requests import ask_processes

MODELS = {"cnn": "glyphs", "alexnet": "glyphs", "resnet18": "glyphs", "transformer?size=tiny": "numbers"}
REPLAYING = "crosstrain.lockstep.replaying"


class LayerConformance:
    """Cases for a backend that computes layers one by one (`backends.replay.Replays`).

    Name the backend::

        class TestLayers(LayerConformance):
            backend = "mine"
    """

    backend: ClassVar[str]

    @pytest.mark.parametrize("model", MODELS)
    def test_layers_agree_with_float64(self, model: str, tmp_path: Path) -> None:
        """Results, slopes, gradients and buffers of every layer differ by rounding alone."""
        job = Job(backend=self.backend, model=model, data=MODELS[model], global_batch_size=EXAMPLES, deterministic=True, seed=5)
        training = TrainingJob.from_job(job)
        initial = State(training.model.initial(job.seed), buffers=training.model.initial_buffers(job.seed))
        tape = LayerTape(job, training.model, training.data, state_to_arrays(initial), 0, tmp_path)
        (problem,) = ask_processes([REPLAYING], msgspec.json.encode(tape.request(job, "layers.npz")), "computing layers")
        assert problem is None
        results = read(str(tmp_path / "layers.npz"))
        assert tape.findings([results, results], [job.precision] * 2) == []
        assert tape.tensors >= len(training.model.parameters)
