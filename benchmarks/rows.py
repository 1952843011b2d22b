"""Who runs, and which two of them make a row of the table: everything together, by group."""

from __future__ import annotations

from collections.abc import Mapping

from . import rows_exchange, rows_gpu, rows_images, rows_logreg, rows_translation
from .contestants import Contestant, Row

__all__ = ["CONTESTANTS", "GROUPS", "ROWS"]

CONTESTANTS: Mapping[str, Contestant] = {
    **rows_logreg.CONTESTANTS,
    **rows_images.CONTESTANTS,
    **rows_exchange.CONTESTANTS,
    **rows_translation.CONTESTANTS,
    **rows_gpu.CONTESTANTS,
}

GROUPS: Mapping[str, Mapping[str, Row]] = {
    "logreg": rows_logreg.ROWS,
    "images": rows_images.ROWS,
    "exchange": rows_exchange.ROWS,
    "translation": rows_translation.ROWS,
    "gpu": rows_gpu.ROWS,
}
"""A row may be in two groups."""

ROWS: Mapping[str, Row] = {name: row for rows in GROUPS.values() for name, row in rows.items()}
