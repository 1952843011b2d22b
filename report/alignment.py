"""Which columns of a table hold figures, to stand right, and which hold words, to stand left."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["holds_figures"]

_SAYS_NOTHING = frozenset({"", "-", "–", "not reached", "none", "NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"})
"""Stand in columns of either kind."""

_FIGURE = re.compile(r"[-−+]?\.?\d(?!.*([^\W\d_]{5}|_))", re.DOTALL)
"""A number, perhaps with its unit, its spread or its kind behind it; names of runs and settings that begin with one have longer words."""


def holds_figures(texts: Iterable[str], otherwise: bool = True) -> bool:
    """Return whether the cells of a column are figures; `otherwise` where none of them says anything."""
    telling = [text for text in (cell.removesuffix("†").strip() for cell in texts) if text not in _SAYS_NOTHING]
    return all(_FIGURE.match(text) for text in telling) if telling else otherwise
