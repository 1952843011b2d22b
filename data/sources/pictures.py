"""Decoding a picture of any format and depth to pixels of one size, in bounded memory."""

from __future__ import annotations

import io
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Result = TypeVar("Result")
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "AVIF", "TIFF", "JPEG2000", "PPM", "QOI", "ICO", "PCX", "SGI", "TGA")
"""Pillow reads these itself. For PostScript it would start a program, under any file name."""

_MAX_FILE_BYTES = 1 << 29  # some formats are read as a whole before their size in pixels is known
_LARGE_PIXELS = 1 << 24
_one_large = threading.Lock()  # held for each larger picture, which may need 1 GB


@contextmanager
def limits_as_errors() -> Iterator[None]:
    """Make Pillow reject pictures above `PIL.Image.MAX_IMAGE_PIXELS` (89 million).

    It only warns up to twice that.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these do not name the picture, such as one with damaged EXIF data, which is decoded
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decode(source: Path | io.BytesIO, size: int, background: str = "ffffff", transparent: list[Path] | None = None) -> NDArray[np.uint8]:
    """Decode a picture to uint8 [3, size, size] RGB: EXIF orientation, middle square, scaled.

    Transparent parts show `background`, six hexadecimal digits; such a picture is added to `transparent`. Raises what Pillow raises for a
    damaged file, and ValueError for pixels that are no colours and for too large files.
    """
    from PIL import Image, ImageOps

    opened = _opened(source)
    with opened, _one_large if math.prod(opened.size) > _LARGE_PIXELS else nullcontext():
        grey_range = _grey_range(opened)
        _scale_key(opened)
        ImageOps.exif_transpose(opened, in_place=True)
        middle, box = _middle(opened, size)
        opened.close()
        rgba = _with_alpha(middle, grey_range)
        if rgba.mode == "RGBA":
            if transparent is not None and isinstance(source, Path) and rgba.getextrema()[3][0] < 255:
                transparent.append(source)
            rgba = Image.alpha_composite(Image.new("RGBA", rgba.size, f"#{background}"), rgba)
        scaled = rgba.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
    return np.ascontiguousarray(np.asarray(scaled).transpose(2, 0, 1))


def result_or_why(read: Callable[[], Result]) -> Result | str:
    """Return what is read of a picture, or why it cannot be, on one line."""
    try:
        return read()
    except MemoryError:
        return "takes more memory than there is"
    except Exception as error:  # noqa: BLE001 — Pillow's many readers raise many things; every one of them is reported
        return " ".join(f"{type(error).__name__}: {error}".split())


def _opened(source: Path | io.BytesIO) -> Picture:
    from PIL import Image, UnidentifiedImageError  # needed once, when the store is made

    size_bytes = source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes
    if size_bytes > _MAX_FILE_BYTES:
        raise ValueError(f"its {size_bytes:,} bytes are more than {_MAX_FILE_BYTES >> 20} MiB, the most that is read of a picture")
    Image.init()
    try:
        return Image.open(source, formats=[name for name in _FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        raise ValueError(f"in none of the formats that are read ({', '.join(_FORMATS)})") from None


def shorter_side(source: Path | io.BytesIO) -> int:
    """Return the smaller of a picture's width and height. Raises as `decode` does."""
    with _opened(source) as opened:
        return min(map(int, opened.size))


def _middle(picture: Picture, size: int) -> tuple[Picture, tuple[float, float, float, float]]:
    """Return the part around the middle square, with a margin, and the square in it.

    Scaling all could exhaust memory.
    """
    shorter = min(picture.size)
    scaled = [max(size, round(length * size / shorter)) for length in picture.size]
    begins = [(length - size) // 2 for length in scaled]
    square = [
        (place + end) * length / whole for end in (0, size) for place, length, whole in zip(begins, picture.size, scaled, strict=True)
    ]
    margin = math.ceil(shorter / size) + 2
    left, top = (max(0, math.floor(edge) - margin) for edge in square[:2])
    right, bottom = (min(length, math.ceil(edge) + margin) for length, edge in zip(picture.size, square[2:], strict=True))
    return picture.crop((left, top, right, bottom)), (square[0] - left, square[1] - top, square[2] - left, square[3] - top)


def _grey_range(picture: Picture) -> tuple[int, int] | None:
    """Return (black, white) of a picture with more than 8 bits of grey, None for others."""
    if picture.mode == "I" and picture.format in ("PPM", "PNG"):  # Pillow scales these values to 16 bits
        return 0, 65535
    if not picture.mode.startswith("I;16"):
        return None
    tags = getattr(picture, "tag_v2", {})  # TIFF: Pillow neither scales 12 bits nor inverts 16 bits
    white = (1 << tags.get(258, (16,))[0]) - 1  # BitsPerSample
    return (white, 0) if tags.get(262) == 0 else (0, white)  # PhotometricInterpretation: WhiteIsZero


_KEY_SCALES = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}  # of a PNG's pixels by raw mode; Pillow does not scale the transparent colour


def _scale_key(picture: Picture) -> None:
    key, scale = picture.info.get("transparency"), _KEY_SCALES.get(str(picture.tile[0][3]) if picture.tile else "")
    if picture.format == "PNG" and key is not None and scale is not None:
        picture.info["transparency"] = tuple(int(value * scale) for value in key) if isinstance(key, tuple) else int(key * scale)


def _with_alpha(picture: Picture, grey_range: tuple[int, int] | None) -> Picture:
    """Return a picture in RGBA if it may have transparent parts, else in a mode with colours."""
    from PIL import Image

    key = picture.info.get("transparency")
    if grey_range is not None:  # Pillow would clip these values at 255
        values, black = np.asarray(picture).astype(np.int32), grey_range[0]
        grey = Image.fromarray((np.abs(values - black) >> max(grey_range).bit_length() - 8).astype(np.uint8))
        return (
            grey
            if key is None
            else Image.merge("LA", (grey, Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))).convert("RGBA")
        )
    if picture.mode in ("I", "F"):
        raise ValueError(f"its pixels have the format {picture.mode!r}, which is no colour")
    return picture.convert("RGBA") if key is not None or picture.mode in ("LA", "PA", "RGBA") else picture
