"""Text for a cell of a CSV file, which a spreadsheet shows and does not carry out."""

from __future__ import annotations

__all__ = ["cell_text"]

_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""With these spreadsheets take a cell for a formula (OWASP, CSV injection)."""


def cell_text(text: str) -> str:
    """Return a text, with an apostrophe before it where a spreadsheet would take it for a formula; one that is a number stays as it is."""
    return f"'{text}" if text.startswith(_STARTS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
