"""The one workload of every row: logistic regression on 784 features and 10 classes, plain SGD, data in memory."""

from __future__ import annotations

__all__ = ["DATA", "LEARNING_RATE", "SEED", "WARMUP"]

DATA = "glyphs28"
LEARNING_RATE = 0.01
SEED = 0
WARMUP = 500
"""Updates of each run before the clock starts. They are real updates from the initial weights, on both sides."""
