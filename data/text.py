"""The pieces that every vocabulary begins with, whatever text it was made from."""

from __future__ import annotations

__all__ = ["BEGIN", "END", "PADDING", "UNKNOWN"]

PADDING, BEGIN, END, UNKNOWN = 0, 1, 2, 3
"""Behind the end of a shorter sentence; before the first piece; after the last one; in place of what no piece stands for."""
