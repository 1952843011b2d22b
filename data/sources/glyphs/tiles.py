"""The ten digits in the typefaces that matplotlib ships, as one array of grey tiles from which examples are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....core.errors import UsageError

__all__ = ["FACES", "TILE", "TILE_HEIGHT", "glyph_tiles"]

FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)
TILE = 64
"""Width and height of a tile."""
TILE_HEIGHT = 40
"""Height of the digit 0 in a tile; the empty border is wide enough that a neighbouring pixel outside is never needed."""
_TRIAL_SIZE = 100


def glyph_tiles() -> NDArray[np.uint8]:
    """Render the tiles: uint8 [faces, 10, TILE, TILE], 0 empty to 255 ink, each digit in the middle.

    Raises UsageError for a missing font.
    """
    import matplotlib  # imported here: rendering happens once, and both take time to import
    from PIL import Image, ImageDraw, ImageFont

    tiles = np.zeros((len(FACES), 10, TILE, TILE), dtype=np.uint8)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for face, name in enumerate(FACES):
        path = folder / f"{name}.ttf"
        if not path.is_file():
            raise UsageError(
                f"data: rendering glyphs needs the font {str(path)!r}, which matplotlib usually ships. Install matplotlib again."
            )
        # The basic layout engine, because the other one is an optional library that may move a glyph by a pixel.
        _, top, _, bottom = ImageFont.truetype(str(path), _TRIAL_SIZE, layout_engine=ImageFont.Layout.BASIC).getbbox("0")
        font = ImageFont.truetype(str(path), round(_TRIAL_SIZE * TILE_HEIGHT / (bottom - top)), layout_engine=ImageFont.Layout.BASIC)
        for digit in range(10):
            left, top, right, bottom = font.getbbox(str(digit))
            image = Image.new("L", (TILE, TILE))
            corner = ((TILE - right - left) // 2, (TILE - bottom - top) // 2)
            ImageDraw.Draw(image).text(corner, str(digit), font=font, fill=255)
            tiles[face, digit] = np.asarray(image)
    return tiles
