"""How much of what was computed on text was padding, and what makes it less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["padding_text"]

_MUCH = 0.3
"""Batches of like length have less (a quarter, on corpora of sentences)."""


def padding_text(summary: Mapping[str, Any]) -> str | None:
    """Return a sentence about the padding of a run on text; None for other data, and for runs of releases that did not count it."""
    share = summary.get("padding_share")
    if share is None:
        return None
    advice = "; --batch-tokens groups sentences of similar length" if share > _MUCH else ""
    return f"{share:.0%} of the computed token positions were padding{advice}."
