"""From a file of a picture, in whatever format and depth, to pixels of one size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["decode"]

_MOST_SCALED_PIXELS = 1 << 27
"""Of a picture before its middle is cut out, 400 MB: one that is a pixel high and millions wide would take all memory there is."""


def decode(path: Path, size: int) -> NDArray[np.uint8]:
    """Return a picture as uint8 [3, size, size]: turned as its camera noted, in RGB, its shorter side scaled to `size`, its middle cut out.

    Raises whatever Pillow raises on a damaged file, and ValueError for pixels that have no meaning as colours.
    """
    from PIL import Image, ImageOps  # needed once, when the store is made

    with Image.open(path) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):  # Pillow would cut 16-bit grey off at 255
            picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        if picture.mode in ("I", "F"):
            raise ValueError(f"its pixels have the format {picture.mode!r}, which is no colour")
        rgb = picture.convert("RGB")
    shorter = min(rgb.size)
    width, height = (max(size, round(length * size / shorter)) for length in rgb.size)
    if width * height > _MOST_SCALED_PIXELS:
        raise ValueError(f"its {rgb.width} × {rgb.height} pixels become {width} × {height} when the shorter side is scaled to {size}")
    scaled = rgb.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels_hwc = np.asarray(scaled.crop((left, top, left + size, top + size)))
    return np.ascontiguousarray(pixels_hwc.transpose(2, 0, 1))
