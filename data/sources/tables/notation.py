"""How the cells of a table are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cells = Sequence[str] | NDArray[np.float64]  # texts, "" where there is none; or numbers, NaN where there is none
EMPTY = frozenset({""})
MISSING = frozenset({"", "NA", "N/A", "na", "n/a", "NaN", "nan", "NAN", "null", "NULL", "None", "?"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d*)?([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class Notation:
    """How cells are written: which texts are empty cells, and whether decimals follow a comma."""

    missing: frozenset[str] = MISSING
    comma: bool = False

    def number_of(self, text: str) -> float | None:
        """Return the number that a text without blanks is, if it is one."""
        if self.comma and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(".", "").replace(",", ".")
        return float(text) if _NUMBER.fullmatch(text) else None
