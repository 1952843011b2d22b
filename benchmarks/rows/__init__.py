"""All contestants and rows of the table, by group."""

from __future__ import annotations

from collections.abc import Mapping

from ..contestants import Contestant, Row
from . import exchange, gpu, images, imported, logreg, translation

CONTESTANTS: Mapping[str, Contestant] = {
    **logreg.CONTESTANTS,
    **images.CONTESTANTS,
    **imported.CONTESTANTS,
    **exchange.CONTESTANTS,
    **translation.CONTESTANTS,
    **gpu.CONTESTANTS,
}

GROUPS: Mapping[str, Mapping[str, Row]] = {
    "logreg": logreg.ROWS,
    "images": images.ROWS,
    "imported": imported.ROWS,
    "exchange": exchange.ROWS,
    "translation": translation.ROWS,
    "gpu": gpu.ROWS,
}
"""A row may be in two groups."""

ROWS: Mapping[str, Row] = {name: row for rows in GROUPS.values() for name, row in rows.items()}
