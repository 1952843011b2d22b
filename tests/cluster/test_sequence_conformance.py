"""The suite for models passes a sequence model and fails for each broken variant of it."""

from __future__ import annotations

import pytest
from digit_pairs import DIGITS, lines, text
from own_models import importable

from crosstrain.conformance.model_suite import ModelConformance
from crosstrain.conformance.sequence_passes import sequence_passes

pytestmark = pytest.mark.cluster

SPEC = """
from crosstrain.models.transformer import build as transformer


def build(data):
    return transformer(data, size="tiny", dropout=0.0)
"""

SOUND = """
from crosstrain.models.transformer.{backend} import *
"""

UNMASKED = """
from crosstrain.models.layers.{backend} import SequenceLayers
from crosstrain.models import transformer as spec
from crosstrain.models.transformer import {backend} as sound
from crosstrain.models.transformer.{backend} import empty_cache, example_sums, translation_loss


class Layers(SequenceLayers):
    def attended(self, lengths_b, tokens_bt):
        return super().attended(lengths_b * 0 + tokens_bt.shape[1], tokens_bt)


def forward(parameters, inputs, context):
    return spec.network(Layers(parameters, context), inputs, context.settings)


def encode(parameters, inputs, context):
    return spec.encode(Layers(parameters, context), inputs["source"], inputs["source_lengths"], context.settings)


decode_step = sound.decode_step
"""

UNPLACED = """
from crosstrain.models.transformer import {backend} as sound
from crosstrain.models.transformer.{backend} import empty_cache, encode, example_sums, forward, translation_loss


def decode_step(parameters, tokens_b, position, memory, cache, context):
    return sound.decode_step(parameters, tokens_b, 0, memory, cache, context)
"""

MODELS = {"sound": SOUND, "unmasked": UNMASKED, "unplaced": UNPLACED}


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Return a function that checks a model on a backend; each is computed on first use."""
    folder, results = tmp_path_factory.mktemp("broken"), {}
    for language in DIGITS:
        (folder / f"digits.{language}").write_text(text(lines(language)))
    for name, module in MODELS.items():
        package = folder / "pairs_of_models" / name
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(SPEC)
        for backend in ("tf", "torch"):
            (package / f"{backend}.py").write_text(module.format(backend=backend))
    data = f"parallel-text:{folder}/digits:en-de?vocabulary=320,held-out=51"

    def computed(name, backend):
        if (name, backend) not in results:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", importable(folder)["PYTHONPATH"])
                results[name, backend] = sequence_passes(backend, f"pairs_of_models.{name}", data, folder / f"{name}-{backend}.npz")
        return {backend: results[name, backend]}

    return computed


BACKENDS = pytest.mark.parametrize("backend", [pytest.param("tf", marks=pytest.mark.slow), "torch"])
suite = ModelConformance()


@pytest.mark.thorough
@BACKENDS
def test_a_sound_model_passes(passes, backend):
    results = passes("sound", backend)
    suite.test_logits_of_positions_agree(results)
    suite.test_more_padding_changes_nothing(results)
    suite.test_decoding_step_by_step_is_the_forward_pass(results)


@pytest.mark.thorough
@BACKENDS
def test_a_model_without_its_padding_mask_fails(passes, backend):
    results = passes("unmasked", backend)
    suite.test_decoding_step_by_step_is_the_forward_pass(results)
    with pytest.raises(AssertionError):
        suite.test_more_padding_changes_nothing(results)


@pytest.mark.thorough
@BACKENDS
def test_model_that_decodes_ignoring_position_fails(passes, backend):
    results = passes("unplaced", backend)
    suite.test_more_padding_changes_nothing(results)
    with pytest.raises(AssertionError):
        suite.test_decoding_step_by_step_is_the_forward_pass(results)


@pytest.mark.thorough
def test_differing_backends_fail(passes):
    (sound,), (broken,) = passes("sound", "torch").values(), passes("unmasked", "torch").values()
    with pytest.raises(AssertionError):
        suite.test_logits_of_positions_agree({"one": sound, "other": broken})


@pytest.mark.slow
def test_both_backends_agree(passes):
    suite.test_logits_of_positions_agree({**passes("sound", "torch"), **passes("sound", "tf")})
