"""Weights in a kernel's layout, and the inverse."""

import numpy as np

from crosstrain.models.base import ModelSpec, ParameterSpec
from crosstrain.models.layers.formulas import after_flatten, convolutions

SPEC = ModelSpec(
    "small",
    (ParameterSpec("conv.weight", (4, 3, 5, 2)), ParameterSpec("conv.bias", (4,)), ParameterSpec("fc.weight", (7, 4 * 3 * 2))),
    (3, 8, 8),
    7,
)


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_convolution_is_stored_channels_last():
    layouts = convolutions(SPEC)
    assert list(layouts) == ["conv.weight"]
    canonical = numbered((4, 3, 5, 2))
    held = layouts["conv.weight"].to_storage(canonical)
    assert held.shape == layouts["conv.weight"].shape == (5, 2, 3, 4)
    assert held.flags.c_contiguous
    assert held[3, 1, 2, 0] == canonical[0, 2, 3, 1]


def test_dense_weight_follows_the_order_of_pixels():
    canonical = numbered((7, 24))
    layout = after_flatten(SPEC, "fc", channels=4)["fc.weight"]
    image_chw = np.random.default_rng(1).standard_normal((4, 3, 2)).astype(np.float32)
    wanted = canonical @ image_chw.ravel()
    np.testing.assert_allclose(layout.to_storage(canonical) @ image_chw.transpose(1, 2, 0).ravel(), wanted, rtol=1e-4)


def test_inverse_restores_every_element():
    for name, layout in {**convolutions(SPEC), **after_flatten(SPEC, "fc", channels=4)}.items():
        canonical = numbered(next(parameter.shape for parameter in SPEC.parameters if parameter.name == name))
        held = layout.to_storage(canonical)
        view = layout.as_canonical(held)
        assert np.shares_memory(view, held)
        assert np.array_equal(view.reshape(canonical.shape), canonical)
        # A parameter server's flat vector is brought into order in place.
        piece = held.reshape(canonical.shape).copy()
        layout.make_canonical(piece)
        assert np.array_equal(piece, canonical)
