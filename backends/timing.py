"""Carrying out an order to calibrate by the clock of the host: for any framework, and for none."""

from __future__ import annotations

import time
from collections.abc import Callable

from .base import CalibrationOrder

__all__ = ["repeat"]


def repeat(order: CalibrationOrder, carry_out: Callable[[int], object]) -> tuple[int, float]:
    """Return how often a component of a step was repeated, and the seconds that it took.

    `carry_out(n)` does it n times and returns when all of that is complete, on a device too. The first n is the order's count; then as
    many as should fit into the time that is left, but at most as many again as were done: the rate may change.
    """
    done, wanted, elapsed = 0, order.count, 0.0
    began = time.perf_counter()
    while wanted:
        carry_out(wanted)
        done += wanted
        elapsed = time.perf_counter() - began
        left = order.seconds - elapsed
        wanted = 0 if left <= 0 else max(1, min(done, int(left * done / elapsed)))
    return done, elapsed
