"""Images of digits that a model must learn: any face, moved, turned and scaled, over clutter, with noise; exact from a seed.

Examples are made in blocks. A block depends on (seed, split, block number) alone, so that any number of processes may share the work.
Random numbers come from the counter-based generator Philox as whole numbers, and everything else is plain arithmetic (no sine, no
normal distribution), whose result depends on neither the numpy release nor the machine.

Shapes: n examples of a block, c channels, h = w = size.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...base import Split
from .tiles import FACES, TILE, TILE_HEIGHT

__all__ = ["BLOCK", "GlyphStyle", "render_block", "render_split"]

BLOCK = 500
"""Examples in a block: small enough for the processor's cache, large enough for numpy."""

_MOST_THREADS = 8  # beyond this the threads wait for memory and for each other

_STREAMS: dict[Split, int] = {"train": 0, "test": 1}

Real = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GlyphStyle:
    """How examples look. Lengths in pixels of the image, brightness from 0 to 1, angles as the tangent of half the angle.

    `height` is the height of a digit at scale 1; `noise` the largest change of a pixel (the distribution is a triangle).
    `clutter` digits lie around the middle, `clutter_distance` away, at up to `clutter_strength` of full brightness. With `inverted`,
    each channel of half the images is turned to its negative, so that neither brightness nor colour tells ink from background.
    """

    size: int
    channels: int
    height: float
    scale: tuple[float, float]
    shift: float
    half_turn: float
    background: tuple[float, float]
    slope: float
    ink: tuple[float, float]
    noise: float
    clutter: int
    clutter_distance: tuple[float, float]
    clutter_strength: float
    inverted: bool = False


class _Draws:
    """A stream of random numbers of one block."""

    def __init__(self, seed: int, split: Split, block: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence([seed, _STREAMS[split], block]))

    def uniform(self, low: float, high: float, *shape: int) -> Real:
        """Return float32 of the shape, uniform in low … high."""
        unit = (self._bits.random_raw(int(np.prod(shape))) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return (np.float32(low) + np.float32(high - low) * unit).reshape(shape)

    def below(self, limit: int, count: int) -> NDArray[np.int64]:
        """Return whole numbers in range(limit), int64 [count]."""
        return ((self._bits.random_raw(count) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def triangle(self, *shape: int) -> Real:
        """Return float32 of the shape in −1 … 1, small values the likeliest: the difference of two random bytes."""
        count = int(np.prod(shape))
        octets = self._bits.random_raw(-(-count // 4)).astype("<u8").view(np.uint8)[: 2 * count].astype(np.float32)
        return ((octets[:count] - octets[count:]) * np.float32(1 / 255)).reshape(shape)


def render_split(
    style: GlyphStyle, tiles: NDArray[np.uint8], seed: int, split: Split, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return `count` examples: images uint8 [count, c, h, w] and labels int64 [count]."""
    images = np.empty((count, style.channels, style.size, style.size), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)

    def render(block: int) -> None:
        part = slice(block * BLOCK, min((block + 1) * BLOCK, count))
        block_images, block_labels = render_block(style, tiles, seed, split, block)
        images[part] = block_images[: part.stop - part.start]
        labels[part] = block_labels[: part.stop - part.start]

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:  # numpy works outside the interpreter's lock
        for done in [threads.submit(render, block) for block in range(-(-count // BLOCK))]:
            done.result()
    return images, labels


def render_block(
    style: GlyphStyle, tiles: NDArray[np.uint8], seed: int, split: Split, block: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return one block: images uint8 [BLOCK, c, h, w] and labels int64 [BLOCK]. `tiles` as `glyph_tiles` makes them."""
    draws = _Draws(seed, split, block)
    labels = draws.below(10, BLOCK)
    canvas = _background(style, draws)
    for _ in range(style.clutter):
        _paint(canvas, _clutter_mask(style, tiles, draws), _colour(draws, style, (0.0, style.clutter_strength)))
    _paint(canvas, _digit_mask(style, tiles, labels, draws), _colour(draws, style, style.ink))
    if style.inverted:
        negative_nc11 = (draws.below(2, BLOCK * style.channels) == 1).reshape(BLOCK, style.channels, 1, 1)
        np.subtract(np.float32(1), canvas, out=canvas, where=negative_nc11)
    canvas += np.float32(style.noise) * draws.triangle(*canvas.shape)
    return np.rint(np.clip(canvas, 0, 1) * np.float32(255)).astype(np.uint8), labels


def _background(style: GlyphStyle, draws: _Draws) -> Real:
    """Return a canvas [n, c, h, w]: a brightness a channel, and a slope across the image."""
    level_nc11 = _colour(draws, style, style.background)
    ramp = np.linspace(-1, 1, style.size, dtype=np.float32)
    across_n1 = draws.uniform(-style.slope, style.slope, BLOCK, 1)
    down_n1 = draws.uniform(-style.slope, style.slope, BLOCK, 1)
    slope_nhw = (across_n1 * ramp)[:, None, :] + (down_n1 * ramp)[:, :, None]
    return level_nc11 + slope_nhw[:, None]


def _colour(draws: _Draws, style: GlyphStyle, limits: tuple[float, float]) -> Real:
    return draws.uniform(*limits, BLOCK, style.channels, 1, 1)


def _paint(canvas_nchw: Real, mask_nhw: Real, colour_nc11: Real) -> None:
    """Lay a colour over the canvas where the mask says, in place."""
    canvas_nchw += mask_nhw[:, None] * (colour_nc11 - canvas_nchw)


def _digit_mask(style: GlyphStyle, tiles: NDArray[np.uint8], labels: NDArray[np.int64], draws: _Draws) -> Real:
    cosine, sine = _direction(draws.uniform(-style.half_turn, style.half_turn, BLOCK))
    shift_x, shift_y = draws.uniform(-style.shift, style.shift, 2, BLOCK)
    scale = draws.uniform(*style.scale, BLOCK)
    return _sample(style, tiles[draws.below(len(FACES), BLOCK), labels], cosine, sine, scale, shift_x, shift_y)


def _clutter_mask(style: GlyphStyle, tiles: NDArray[np.uint8], draws: _Draws) -> Real:
    """Another digit, turned anyhow, near the edge."""
    turn_cosine, turn_sine = _direction(draws.uniform(-1, 1, BLOCK))
    cosine, sine = _direction(draws.uniform(-1, 1, BLOCK))
    distance = draws.uniform(*style.clutter_distance, BLOCK)
    side = np.where(draws.below(2, BLOCK) == 0, np.float32(-1), np.float32(1))
    scale = draws.uniform(*style.scale, BLOCK)
    chosen = tiles[draws.below(len(FACES), BLOCK), draws.below(10, BLOCK)]
    return _sample(style, chosen, turn_cosine, turn_sine, scale, side * cosine * distance, sine * distance)


def _direction(half_tangent: Real) -> tuple[Real, Real]:
    """Return cosine and sine of an angle from t, the tangent of its half: (1 − t²)/(1 + t²) and 2t/(1 + t²)."""
    square = half_tangent * half_tangent
    return (1 - square) / (1 + square), 2 * half_tangent / (1 + square)


def _sample(style: GlyphStyle, tiles_nab: NDArray[np.uint8], cosine: Real, sine: Real, scale: Real, shift_x: Real, shift_y: Real) -> Real:
    """Return masks [n, h, w] in 0 … 1: each tile turned, scaled and shifted, with linear interpolation between its pixels."""
    ratio = np.float32(TILE_HEIGHT / style.height) / scale
    axis = np.arange(style.size, dtype=np.float32) - np.float32((style.size - 1) / 2)
    x_nw, y_nh = axis - shift_x[:, None], axis - shift_y[:, None]
    along, over = (ratio * cosine)[:, None], (ratio * sine)[:, None]
    middle = np.float32((TILE - 1) / 2)
    column = np.clip((along * x_nw)[:, None, :] + (over * y_nh)[:, :, None] + middle, 0, TILE - 1.001)
    row = np.clip((along * y_nh)[:, :, None] - (over * x_nw)[:, None, :] + middle, 0, TILE - 1.001)
    left, top = column.astype(np.int32), row.astype(np.int32)
    right_part, lower_part = column - left, row - top
    flat = tiles_nab.ravel()
    first = np.arange(len(tiles_nab), dtype=np.int32)[:, None, None] * (TILE * TILE) + top * TILE + left
    upper = _between(flat, first, right_part)
    return (upper + lower_part * (_between(flat, first + TILE, right_part) - upper)) * np.float32(1 / 255)


def _between(flat: NDArray[np.uint8], index: NDArray[np.int32], part: Real) -> Real:
    """Interpolate between a pixel and its right neighbour."""
    here = flat.take(index).astype(np.float32)
    result: Real = here + part * (flat.take(index + 1) - here)
    return result
