"""The reserved pieces at the beginning of every vocabulary."""

from __future__ import annotations

PADDING, BEGIN, END, UNKNOWN = 0, 1, 2, 3  # after short sentences; at the begin; at the end; for unknown characters
