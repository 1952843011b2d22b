"""What the C library does with memory that a step frees."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""


def keep_freed_memory(most_bytes: int, piece_bytes: int, *, one_arena: bool) -> None:
    """Have the C library keep what a step's tensors free, for those of the next step: `most_bytes` in pieces of at most `piece_bytes`.

    By default glibc gives large pieces back to the system at once, and the next step takes them anew, page by page. To be called when the
    data are loaded, so that what loading them took is not kept. `one_arena`: threads share one, since another thread's own holds no piece
    above 64 MiB. Elsewhere than on Linux, or with another C library, nothing changes.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, most_bytes)
        mallopt(MMAP_THRESHOLD, piece_bytes)
        if one_arena:
            mallopt(ARENA_MAX, 1)
