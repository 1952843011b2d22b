"""Normalisation of pixels: the table, and the linear function that may replace it."""

import numpy as np
import pytest

from crosstrain.data.preprocessing import normal_line, normal_table


def test_table_follows_the_definition():
    table = normal_table((0.25, 0.5), (0.5, 2.0))
    assert table.dtype == np.float32
    expected = [[(value / 255 - mean) / std for value in range(256)] for mean, std in ((0.25, 0.5), (0.5, 2.0))]
    assert np.array_equal(table, np.array(expected).astype(np.float32))


def test_line_equals_the_table_bit_by_bit():
    """Realistic means and deviations have a line, and its exact result rounds to the table."""
    draw = np.random.default_rng(3)
    for _ in range(100):
        mean, std = draw.uniform(0.2, 0.7, 3), draw.uniform(0.1, 0.4, 3)
        line = normal_line(tuple(mean), tuple(std))
        assert line is not None
        factor, summand = (values[:, None] for values in line)
        pixels, table = np.arange(256.0), normal_table(tuple(mean), tuple(std))
        assert np.array_equal((pixels * factor + summand).astype(np.float32), table)
        once = pixels.astype(np.longdouble) * factor + summand  # as a fused multiply-add rounds: the product is exact
        assert np.array_equal(once.astype(np.float64).astype(np.float32), table)


@pytest.mark.parametrize("pixel", [51, 102, 204])
def test_mean_equal_to_a_pixel_has_no_line(pixel):
    """There product and summand cancel, and only rounding error is left."""
    assert normal_line((0.501, pixel / 255), (0.3, 0.3)) is None
