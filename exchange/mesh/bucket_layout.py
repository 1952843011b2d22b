"""Which vectors are added up together: those that a backward pass finishes one after another, until they are worth a message."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BUCKET_BYTES", "buckets_of"]

BUCKET_BYTES = 4 << 20
"""Large enough to take the speed of a link, small enough to be on its way while the rest is computed."""


def buckets_of(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Return the places of gradients, bucket by bucket, in about the order in which they are finished: from the last to the first.

    A bucket is closed as soon as it has `BUCKET_BYTES`; no gradient is cut.
    """
    buckets: list[list[int]] = []
    room = 0
    for place in reversed(range(len(sizes_bytes))):
        if room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(place)
        room -= sizes_bytes[place]
    return buckets
