"""Pytest suite for backends: each layer by itself against float64, forward and backward.

Subclass `LayerConformance` in a pytest module.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from ..lockstep.layer_check import check_layers

MODELS = {"cnn": "glyphs", "alexnet": "glyphs", "resnet18": "glyphs", "transformer?size=tiny": "numbers"}


class LayerConformance:
    """Cases for a backend that computes layers one by one (`backends.replay.Replays`).

    Name the backend::

        class TestLayers(LayerConformance):
            backend = "mine"
    """

    backend: ClassVar[str]

    @pytest.mark.parametrize("model", MODELS)
    def test_layers_agree_with_float64(self, model: str) -> None:
        """Results, slopes, gradients and buffers of every layer differ by rounding alone."""
        checked = check_layers(model, MODELS[model], None, [self.backend])
        assert checked.problem is None
        assert not checked.findings
        assert len(checked.rows) > 10
