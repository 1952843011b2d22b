"""Chooses fonts for charts: characters that the usual font lacks come from other installed fonts; characters in no font are named."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

__all__ = ["families_for", "lacking", "lacking_text", "usual_families"]

_LIKED = ("noto sans cjk", "noto sans", "source han sans", "wenquanyi", "droid sans fallback", "dejavu")
"""Families that go well with the usual font, before all others; the fonts of a family with several languages draw all of them."""

_NOT_FOR_NAMES = ("last resort", "stixnon", "stixsize", "cmb10", "cmex10", "cmmi10", "cmr10", "cmss10", "cmsy10", "cmtt10")
"""matplotlib's own: a box for every character there is, and signs of mathematics that stand where other fonts have other characters."""

_SHOWN = 12


def lacking(figure: Figure, families: Collection[str]) -> frozenset[str]:
    """Return the visible characters of a figure's texts that none of the font `families` has."""
    used = {character for text in figure.findobj(Text) for character in text.get_text() if not character.isspace()}
    known: set[int] = set()
    for family in families:
        known |= _characters(findfont(FontProperties(family=[family])))
    return frozenset(character for character in used if ord(character) not in known)


def families_for(characters: Collection[str]) -> list[str]:
    """Return families of installed fonts that together have as many of the characters as can be had, as few as that takes."""
    missing = {ord(character) for character in characters}
    chosen = []
    for font in _candidates():
        if not missing:
            break
        found = missing & _characters(font.fname)
        if found:
            chosen.append(font.name)
            missing -= found
    return chosen


def lacking_text(characters: Collection[str]) -> str:
    """Say which characters are boxes in the figures, and what to do."""
    some = "".join(sorted(characters)[:_SHOWN])
    more = f"… ({len(characters)} characters)" if len(characters) > _SHOWN else ""
    return f"no installed font has {some}{more}: boxes stand for them; install one that does, such as Noto Sans CJK (fonts-noto-cjk)"


def _candidates() -> Iterator[FontEntry]:
    """Yield the installed fonts, upright and of usual weight, those first that go well with the usual one."""
    usual = [font for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal", "regular")]

    def rank(font: FontEntry) -> tuple[int, str]:
        name = font.name.lower()
        return next((place for place, liked in enumerate(_LIKED) if name.startswith(liked)), len(_LIKED)), name

    return (font for font in sorted(usual, key=rank) if not font.name.lower().startswith(_NOT_FOR_NAMES))


@cache
def _characters(path: str) -> frozenset[int]:
    """Return the characters that a font file has; none of one that cannot be drawn with, such as of coloured bitmaps."""
    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # FreeType's word for a kind of font that it does not scale
        return frozenset()


def usual_families() -> list[str]:
    """Return the families that matplotlib draws with where nothing else is said."""
    return list(matplotlib.rcParams["font.family"])
