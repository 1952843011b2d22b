"""The size of a batch in words: examples, or, where batches are filled by tokens, that it is a mean number of sentences."""

from __future__ import annotations

from ...records.text.numbers import UNKNOWN, count_text

__all__ = ["batch_text"]


def batch_text(count: float | None, tokens: int | None) -> str:
    """Return a batch of so many examples as text; ``about 71 sentences`` where a budget of `tokens` says how many these are."""
    if count is None or tokens is None:
        return UNKNOWN if count is None else count_text(count)
    return f"about {count_text(count)} sentence{'' if round(count) == 1 else 's'}"
