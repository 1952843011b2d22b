"""What the direct exchange of gradients sends: known to what carries it out, and to what plans with it."""

from __future__ import annotations

__all__ = ["MOST_RANKS", "sent_whole"]

MOST_RANKS = 64
"""Each rank has two connections to each other one, and sends small vectors to all of them."""

MOST_FURTHER_BYTES = 32 << 10
"""What a rank may send more by sending whole vectors: a message less is worth that."""


def sent_whole(size_bytes: float, ranks: int) -> bool:
    """Return whether ranks send each other vectors of this size whole, in one message each, and not in shares of which sums come back."""
    return (ranks - 1) * (ranks - 2) * size_bytes <= ranks * MOST_FURTHER_BYTES
