"""Which piece numbers mean the same in every dataset of text."""

from __future__ import annotations

__all__ = ["BEGIN", "END", "PADDING", "UNKNOWN"]

PADDING, BEGIN, END, UNKNOWN = 0, 1, 2, 3
"""``<pad>``, behind an example in a batch; ``<s>``, before its first piece; ``</s>``, its last piece; ``<unk>``. Text is from 4 on."""
