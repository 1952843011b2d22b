"""glyphs and glyphs28: digits rendered from fonts in the shapes of SVHN and MNIST.

Runs on them need no original files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ..base import PreparedArrays, Split
from ..preprocessing import digit_arrays

FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)
TILE = 64  # width and height
TILE_HEIGHT = 40  # of the digit 0; the empty border is wide enough for interpolation
_TRIAL_SIZE = 100


def glyph_tiles() -> NDArray[np.uint8]:
    """Render the tiles: uint8 [faces, 10, TILE, TILE], 0 empty to 255 ink.

    Raises UsageError for a missing font.
    """
    import matplotlib  # slow to import, and needed once
    from PIL import Image, ImageDraw, ImageFont

    tiles = np.zeros((len(FACES), 10, TILE, TILE), dtype=np.uint8)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for face, name in enumerate(FACES):
        path = folder / f"{name}.ttf"
        if not path.is_file():
            raise UsageError(
                f"data: rendering glyphs needs the font {str(path)!r}, which matplotlib usually ships. Install matplotlib again."
            )
        # BASIC, because the other layout engine is an optional library that may move a glyph by a pixel.
        _, top, _, bottom = ImageFont.truetype(str(path), _TRIAL_SIZE, layout_engine=ImageFont.Layout.BASIC).getbbox("0")
        font = ImageFont.truetype(str(path), round(_TRIAL_SIZE * TILE_HEIGHT / (bottom - top)), layout_engine=ImageFont.Layout.BASIC)
        for digit in range(10):
            left, top, right, bottom = font.getbbox(str(digit))
            image = Image.new("L", (TILE, TILE))
            corner = ((TILE - right - left) // 2, (TILE - bottom - top) // 2)
            ImageDraw.Draw(image).text(corner, str(digit), font=font, fill=255)
            tiles[face, digit] = np.asarray(image)
    return tiles


# A block depends only on (seed, split, block), so threads share the work. Integers of Philox and plain arithmetic (no sine, no normal
# distribution) give the same on every machine. Shapes: n examples of a block, c channels, h = w = size.

BLOCK = 500  # examples: small enough for the processor's cache, large enough for numpy
_MAX_THREADS = 8  # with more, threads wait for memory and for each other
_STREAMS: dict[Split, int] = {"train": 0, "test": 1}
Real = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GlyphStyle:
    """The appearance of examples: lengths in pixels, brightness 0 to 1, angles as half tangents.

    An angle is the tan of its half. `height`: of a digit at scale 1. `noise`: the largest change of a pixel (triangular distribution).
    `clutter` digits lie `clutter_distance` from the middle, at up to `clutter_strength` of full brightness. `inverted`: each channel of
    half the images is a negative, so that neither brightness nor colour identifies ink.
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
    def __init__(self, seed: int, split: Split, block: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence([seed, _STREAMS[split], block]))

    def uniform(self, low: float, high: float, *shape: int) -> Real:
        """Return float32 of the shape, uniform in low … high."""
        unit = (self._bits.random_raw(int(np.prod(shape))) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return (np.float32(low) + np.float32(high - low) * unit).reshape(shape)

    def integers(self, limit: int, count: int) -> NDArray[np.int64]:
        """Return integers in range(limit), int64 [count]."""
        return ((self._bits.random_raw(count) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def triangle(self, *shape: int) -> Real:
        """Return float32 of the shape in −1 … 1, triangular: the difference of two random bytes."""
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

    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:  # numpy releases the interpreter's lock
        list(threads.map(render, range(-(-count // BLOCK))))
    return images, labels


def render_block(
    style: GlyphStyle, tiles: NDArray[np.uint8], seed: int, split: Split, block: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return one block: images uint8 [BLOCK, c, h, w] and labels int64 [BLOCK]."""
    draws = _Draws(seed, split, block)
    labels = draws.integers(10, BLOCK)
    canvas = _background(style, draws)
    for _ in range(style.clutter):
        _paint(canvas, _clutter_mask(style, tiles, draws), _colour(draws, style, (0.0, style.clutter_strength)))
    _paint(canvas, _digit_mask(style, tiles, labels, draws), _colour(draws, style, style.ink))
    if style.inverted:
        negative_nc11 = (draws.integers(2, BLOCK * style.channels) == 1).reshape(BLOCK, style.channels, 1, 1)
        np.subtract(np.float32(1), canvas, out=canvas, where=negative_nc11)
    canvas += np.float32(style.noise) * draws.triangle(*canvas.shape)
    return np.rint(np.clip(canvas, 0, 1) * np.float32(255)).astype(np.uint8), labels


def _background(style: GlyphStyle, draws: _Draws) -> Real:
    """Return a canvas [n, c, h, w]: a brightness per channel, and a slope across the image."""
    level_nc11 = _colour(draws, style, style.background)
    ramp = np.linspace(-1, 1, style.size, dtype=np.float32)
    across_n1 = draws.uniform(-style.slope, style.slope, BLOCK, 1)
    down_n1 = draws.uniform(-style.slope, style.slope, BLOCK, 1)
    slope_nhw = (across_n1 * ramp)[:, None, :] + (down_n1 * ramp)[:, :, None]
    return level_nc11 + slope_nhw[:, None]


def _colour(draws: _Draws, style: GlyphStyle, limits: tuple[float, float]) -> Real:
    return draws.uniform(*limits, BLOCK, style.channels, 1, 1)


def _paint(canvas_nchw: Real, mask_nhw: Real, colour_nc11: Real) -> None:
    canvas_nchw += mask_nhw[:, None] * (colour_nc11 - canvas_nchw)


def _digit_mask(style: GlyphStyle, tiles: NDArray[np.uint8], labels: NDArray[np.int64], draws: _Draws) -> Real:
    cosine, sine = _direction(draws.uniform(-style.half_turn, style.half_turn, BLOCK))
    shift_x, shift_y = draws.uniform(-style.shift, style.shift, 2, BLOCK)
    scale = draws.uniform(*style.scale, BLOCK)
    return _sample(style, tiles[draws.integers(len(FACES), BLOCK), labels], cosine, sine, scale, shift_x, shift_y)


def _clutter_mask(style: GlyphStyle, tiles: NDArray[np.uint8], draws: _Draws) -> Real:
    turn_cosine, turn_sine = _direction(draws.uniform(-1, 1, BLOCK))
    cosine, sine = _direction(draws.uniform(-1, 1, BLOCK))
    distance = draws.uniform(*style.clutter_distance, BLOCK)
    side = np.where(draws.integers(2, BLOCK) == 0, np.float32(-1), np.float32(1))
    scale = draws.uniform(*style.scale, BLOCK)
    chosen = tiles[draws.integers(len(FACES), BLOCK), draws.integers(10, BLOCK)]
    return _sample(style, chosen, turn_cosine, turn_sine, scale, side * cosine * distance, sine * distance)


def _direction(half_tangent: Real) -> tuple[Real, Real]:
    """Return (1 − t²)/(1 + t²) and 2t/(1 + t²), cosine and sine for the half angle's tangent t."""
    square = half_tangent * half_tangent
    return (1 - square) / (1 + square), 2 * half_tangent / (1 + square)


def _sample(style: GlyphStyle, tiles_nab: NDArray[np.uint8], cosine: Real, sine: Real, scale: Real, shift_x: Real, shift_y: Real) -> Real:
    """Return masks [n, h, w] in 0 … 1: tiles rotated, scaled and shifted, bilinearly."""
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
    upper = _interpolate(flat, first, right_part)
    return (upper + lower_part * (_interpolate(flat, first + TILE, right_part) - upper)) * np.float32(1 / 255)


def _interpolate(flat: NDArray[np.uint8], index: NDArray[np.int32], part: Real) -> Real:
    here = flat.take(index).astype(np.float32)
    result: Real = here + part * (flat.take(index + 1) - here)
    return result


_SEED = 28  # fixed, so that the examples belong to the dataset and not to a job


@dataclass(frozen=True)
class _Glyphs:
    """Rendered examples of one style. `sizes`: number of examples by split."""

    name: str
    description: str
    version: int
    style: GlyphStyle
    sizes: Mapping[Split, int]

    def originals(self, data_dir: Path) -> Sequence[Path]:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {self.name!r} is rendered and reads no files. Leave --data-dir out.")

    def load(self, data_dir: Path | None) -> PreparedArrays:
        tiles = glyph_tiles()
        train_images, train_labels = render_split(self.style, tiles, _SEED, "train", self.sizes["train"])
        test_images, test_labels = render_split(self.style, tiles, _SEED, "test", self.sizes["test"])
        return digit_arrays({"train": train_images, "test": test_images}, {"train": train_labels, "test": test_labels})


GLYPHS = _Glyphs(
    name="glyphs",
    description="digits rendered in 20 typefaces in colour with clutter and noise, 32×32×3, in the shape of SVHN",
    version=1,
    style=GlyphStyle(
        size=32,
        channels=3,
        height=18.0,
        scale=(0.7, 1.2),
        shift=3.0,
        half_turn=0.13,
        background=(0.0, 0.4),
        slope=0.15,
        ink=(0.5, 1.0),
        noise=0.25,
        clutter=3,
        clutter_distance=(13.0, 19.0),
        clutter_strength=0.9,
        inverted=True,
    ),
    sizes={"train": 60_000, "test": 10_000},
)

GLYPHS28 = _Glyphs(
    name="glyphs28",
    description="digits rendered in 20 typefaces with clutter and noise, 28×28, in the size of MNIST",
    version=2,
    style=GlyphStyle(
        size=28,
        channels=1,
        height=18.0,
        scale=(0.8, 1.15),
        shift=2.0,
        half_turn=0.11,
        background=(0.0, 0.3),
        slope=0.1,
        ink=(0.55, 1.0),
        noise=0.25,
        clutter=2,
        clutter_distance=(13.0, 18.0),
        clutter_strength=0.8,
    ),
    sizes={"train": 60_000, "test": 10_000},
)
