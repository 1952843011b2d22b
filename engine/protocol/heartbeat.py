"""The heartbeat between driver and agents: each sends a sign of life once a second, and measures how long the other has been silent."""

from __future__ import annotations

from .messages import Message

__all__ = ["ALIVE", "INTERVAL_SECONDS"]

INTERVAL_SECONDS = 1.0
"""How often each side gives a sign of life, where it has nothing else to say."""

ALIVE = Message("alive")
